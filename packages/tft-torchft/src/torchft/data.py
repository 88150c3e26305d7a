"""The sampler. Law of this file: a name."""

from __future__ import annotations

from tft_algos import DistributedSampler

__all__ = ["DistributedSampler"]
