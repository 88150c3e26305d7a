"""Live state transfer over a process group."""
