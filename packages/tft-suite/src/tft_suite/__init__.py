"""Everything for fault-tolerant PyTorch training in one import, and the tft command."""

__version__ = "0.1.0"
