"""A rank's step: its events and effects, the training thread, waits, progress, and what the log says about it."""
