"""What the tests of tft-sim share: the flag that writes the golden transcripts anew, and the soak's size."""

from __future__ import annotations

import pytest
from hypothesis import settings

# How long one example takes says more of the machine, which runs much else, than of what is tested.
settings.register_profile("on a busy machine", deadline=None)
settings.load_profile("on a busy machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest packages/tft-sim --rewrite-transcripts`, then read the difference."""
    parser.addoption("--rewrite-transcripts", action="store_true", help="write the golden transcripts anew")
    parser.addoption("--simulator-seeds", type=int, default=20_000, help="seeds of the simulator's soak test")
