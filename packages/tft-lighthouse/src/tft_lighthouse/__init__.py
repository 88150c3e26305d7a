"""The server that decides membership for fault-tolerant training."""

__version__ = "0.1.0"
