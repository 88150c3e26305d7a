"""Two islands over a slow cable, in short: Streaming DiLoCo goes on where data-parallel training waits.

The benchmark has the figures: `python -m benchmarks.run slow`.
"""

from __future__ import annotations

import pytest

from benchmarks import slow_link
from integration_tests.hosts import why_not


@pytest.mark.in_parts
@pytest.mark.timeout(300)
def test_on_a_slow_cable_streaming_diloco_computes_where_ddp_waits() -> None:
    reason = why_not(limited=True)
    if reason is not None:
        pytest.skip(reason)
    found = slow_link.run(turns=1, rounds=1)
    assert found.kept["ddp"] < 0.3, found
    assert found.kept["diloco"] > 2.5 * found.kept["ddp"], found
    assert found.losses["diloco"] < 4.0, found  # from ln 128 = 4.85
