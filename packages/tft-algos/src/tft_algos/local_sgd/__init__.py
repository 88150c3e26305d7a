"""Training that synchronizes every few steps: LocalSGD, DiLoCo, Streaming DiLoCo, and outer updates of your own."""

from __future__ import annotations

from tft_algos.local_sgd.buckets import USE_BUCKETIZATION_ENV
from tft_algos.local_sgd.diloco import DiLoCo
from tft_algos.local_sgd.fragment import extract_local_tensor
from tft_algos.local_sgd.local_sgd import LocalSGD
from tft_algos.local_sgd.outer_loop import OuterLoop
from tft_algos.local_sgd.outer_update import OuterFragment, OuterUpdate
from tft_algos.local_sgd.splitting import fragment_model

__all__ = [
    "USE_BUCKETIZATION_ENV",
    "DiLoCo",
    "LocalSGD",
    "OuterFragment",
    "OuterLoop",
    "OuterUpdate",
    "extract_local_tensor",
    "fragment_model",
]
