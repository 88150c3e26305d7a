"""The wire: one .proto, its generated messages, and between them and the core's values two codecs, the lighthouse's
(`codec`) and the ranks' (`rank_codec`), with what both are made of (`fields`). Nothing else."""
