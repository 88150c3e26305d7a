"""What a transport must do, as checks that any transport can be put through, and a proxy that hurts what passes.

Law of this folder: nothing here needs pytest, a fixed port, or time to pass; every wait is for an event, with a bound.
"""

from __future__ import annotations

from tft_ckpt.testing.conformance import CHECKS, check_transport
from tft_ckpt.testing.proxy import Fault, FaultyProxy
from tft_ckpt.testing.states import assert_same_state, sample_state

__all__ = ["CHECKS", "Fault", "FaultyProxy", "assert_same_state", "check_transport", "sample_state"]
