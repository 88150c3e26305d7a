"""The lock under its public name. Law of this file: a name."""

from __future__ import annotations

from torchft.checkpointing._rwlock import RWLock

__all__ = ["RWLock"]
