"""Process groups that talk to other processes, one backend for each file. A backend only makes its torch group."""
