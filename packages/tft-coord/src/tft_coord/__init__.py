"""Membership, quorum and commit for fault-tolerant training: the protocol core, its wire and its simulator."""

__version__ = "0.1.0"
