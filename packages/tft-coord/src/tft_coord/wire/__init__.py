"""The wire: one .proto, its generated messages, and two codecs between them and the core's values.

The lighthouse's codec is `codec`, and the ranks' is `rank_codec`. `table` has a row for each field of a member, and
makes the codecs of the values with such fields. `fields` has the checks and the other common parts.
"""
