"""From the request for a quorum to a process group that is configured for it, and the peers that can't be reached."""
