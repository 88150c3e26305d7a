"""Process groups that talk to other processes, one backend a file. Each only makes its torch group."""
