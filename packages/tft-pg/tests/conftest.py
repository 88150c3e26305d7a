"""Settings that every test of this package runs under, before torch is imported, and the certainty that none leaves a
thread behind.

torch's TCPStore looks up the name of each address that it connects to or accepts. A resolver that does not answer
costs five seconds each time, which is nothing that these tests are about.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Final

import pytest

SETTLE_S: Final = 5.0  # torch's attempt to reach a store that is gone ends by itself after some seconds

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    """After each module no thread of ours runs, whoever started it."""
    yield
    ours = [each for each in threading.enumerate() if each.name.startswith("tft-")]
    for thread in ours:
        thread.join(SETTLE_S)
    left = [thread.name for thread in ours if thread.is_alive()]
    assert not left, f"left behind by this module: threads {', '.join(left)}"
