"""Process groups whose communication library runs in a child process."""
