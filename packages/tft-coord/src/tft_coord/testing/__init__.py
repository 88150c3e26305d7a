"""Tools to test a core, or code built on one, without a cluster.

- `snapshots`: an object's contents as a value to compare, and as an independent copy.
- `torchft_like`: torchft's quorum rule in plain form: an oracle, and the core of a fake lighthouse.

The package tft-sim simulates a whole cluster in virtual time, with invariants.

Law of this folder: standard library and tft_coord's core only; no clock, thread or socket.
"""

from tft_coord.testing.snapshots import copied, frozen
from tft_coord.testing.torchft_like import TorchftLike, stripped

__all__ = ["TorchftLike", "copied", "frozen", "stripped"]
