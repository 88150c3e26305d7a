"""A stopped trainer's process is lost after heartbeat_timeout, however short that is set."""

from __future__ import annotations

import time
from datetime import timedelta

import psutil
import pytest

from integration_tests.conftest import Spawn
from integration_tests.training import Job
from tft_lighthouse import LighthouseServer

HEARTBEAT_MS = 1_000


@pytest.mark.in_parts
def test_a_short_heartbeat_timeout_shortens_what_a_stopped_trainer_costs(spawn: Spawn) -> None:
    """Field report D12: with a shorter heartbeat_timeout in the lighthouse alone, a stop cost 6 s as before.

    The manager server used its trainer's timeout of 5 s.
    """
    with LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=HEARTBEAT_MS) as lighthouse:
        job = Job(spawn, lighthouse)
        heartbeat_timeout = timedelta(milliseconds=HEARTBEAT_MS)
        first, second = (job.start(name, heartbeat_timeout=heartbeat_timeout) for name in ("a", "b"))
        job.until(lambda: all(each.committed_with(2) for each in (first, second)), "both train")
        stopped = psutil.Process(second.process.pid)
        stopped.suspend()
        since_s = time.time()
        job.until(lambda: first.committed_with(1, 1, since_s=since_s), "the other one trains on")
        took_s = first.events[-1].at_s - since_s
        stopped.kill()
        assert took_s < 5.0, "less than the 5 s of the default"
