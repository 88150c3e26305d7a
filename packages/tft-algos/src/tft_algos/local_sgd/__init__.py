"""Training that synchronizes now and then: LocalSGD, DiLoCo and Streaming DiLoCo."""

from __future__ import annotations

from tft_algos.local_sgd.buckets import USE_BUCKETIZATION_ENV
from tft_algos.local_sgd.diloco import DiLoCo
from tft_algos.local_sgd.fragment import extract_local_tensor
from tft_algos.local_sgd.local_sgd import LocalSGD
from tft_algos.local_sgd.splitting import fragment_model

__all__ = ["USE_BUCKETIZATION_ENV", "DiLoCo", "LocalSGD", "extract_local_tensor", "fragment_model"]
