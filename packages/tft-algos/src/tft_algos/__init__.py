"""Per-step fault tolerance for PyTorch training: Manager, DistributedDataParallel, Optimizer."""

__version__ = "0.1.0"
