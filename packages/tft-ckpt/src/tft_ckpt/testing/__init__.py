"""Public conformance checks for any transport, and tools that inject faults.

Law of this folder: nothing here needs pytest, a fixed port, or elapsed time; every wait is for an event, with a bound.
"""

from __future__ import annotations

from tft_ckpt.testing.conformance import CHECKS, Together, check_transport
from tft_ckpt.testing.groups import FaultyGroup, GroupFault, members_of_gloo
from tft_ckpt.testing.proxy import Fault, FaultyProxy
from tft_ckpt.testing.states import assert_same_state, sample_state

__all__ = [
    "CHECKS",
    "Fault",
    "FaultyGroup",
    "FaultyProxy",
    "GroupFault",
    "Together",
    "assert_same_state",
    "check_transport",
    "members_of_gloo",
    "sample_state",
]
