"""The wire: one .proto, its generated messages, and two codecs between them and the core's values.

The lighthouse's codec is `codec`, the ranks' is `rank_codec`, and `fields` has their common parts.
"""
