"""Test a core, or what you build on one, without a cluster.

- `snapshots`: what an object holds as a value to compare, and as a copy that goes its own way.
- `torchft_like`: torchft's quorum rule, told plainly: an oracle, and the core of a fake lighthouse.

A whole cluster in virtual time, with invariants, is a package of its own: tft-sim.

Law of this folder: standard library and tft_coord's core only; no clock, thread or socket.
"""

from tft_coord.testing.snapshots import copied, frozen
from tft_coord.testing.torchft_like import TorchftLike, stripped

__all__ = ["TorchftLike", "copied", "frozen", "stripped"]
