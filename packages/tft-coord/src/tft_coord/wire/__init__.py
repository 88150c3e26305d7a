"""The wire: one .proto, its generated messages, and the codec between them and the core's values. Nothing else."""
