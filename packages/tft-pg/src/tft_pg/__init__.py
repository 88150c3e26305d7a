"""PyTorch process groups that are configured again and again, aborted from another thread and composed."""

__version__ = "0.1.0"
