"""Reductions over the members of a quorum, and futures that end in time."""
