"""One run with every kind of random fault, from a seed: kills, stops, cuts, leaves, and kills of the lighthouse.

A fault strikes while all train together, or during an earlier fault, as long as a majority is left. In the end all
train together, and have ended where they were told to. At each step that two of them have committed, their states are
equal to the last bit. In the long runs faults come by the clock, and the time without a commit is counted.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Final

import pytest

from integration_tests.faults import ALL_KINDS, OF_HOSTS, Run, running
from integration_tests.hosts import why_not
from tft_coord.timeouts import Timeouts

Record = Callable[[str, object], None]

TIMEOUTS: Final = Timeouts(
    timeout_ms=10_000,
    quorum_timeout_ms=60_000,
    heartbeat_timeout_ms=2_000,
    join_timeout_ms=1_500,
    beat_interval_ms=500,
    heal_timeout_ms=10_000,
)


def suffer(run: Run, faults: int, record: Record) -> None:
    """Inject that many faults. Every third or so comes before the recovery from the one before."""
    rng = random.Random(faults)
    assert run.all_together(60), f"they never trained together; {run.job.history()}"
    longest_s = 0.0
    for number in range(faults):
        run.strike()
        if run.may_strike and rng.random() < 0.35:
            run.pump(rng.uniform(0, 1.5))
            continue
        started = time.monotonic()
        assert run.all_together(60), (
            f"fault {number + 1}, {dict(run.happened)}: not together again; {run.job.history()}"
        )
        longest_s = max(longest_s, time.monotonic() - started)
        run.job.check_digests()
    assert run.all_together(60), run.job.history()
    run.job.finish([group.trainer for group in run.groups])
    assert all(run.happened[kind] for kind in OF_HOSTS), f"not every kind of fault: {run.happened}"
    record("faults", dict(run.happened))
    record("steps_in_common", run.job.check_digests())
    record("longest_until_together_s", round(longest_s, 2))


@pytest.fixture
def needs_hosts() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.in_parts
@pytest.mark.usefixtures("needs_hosts")
@pytest.mark.timeout(180)
def test_a_few_faults(forkserver: ForkServerContext, record_testsuite_property: Record) -> None:
    with running(forkserver, num_groups=3, seed=3, timeouts=TIMEOUTS) as run:
        suffer(run, 8, record_testsuite_property)


@pytest.mark.soak
@pytest.mark.usefixtures("needs_hosts")
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("num_groups", [3, 8])
def test_fifty_faults(forkserver: ForkServerContext, num_groups: int, record_testsuite_property: Record) -> None:
    with running(forkserver, num_groups=num_groups, seed=num_groups, timeouts=TIMEOUTS) as run:
        suffer(run, 50, record_testsuite_property)


@pytest.mark.soak
@pytest.mark.usefixtures("needs_hosts")
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(("every_s", "at_least"), [(6.0, 0.90), (60.0, 0.97)])
def test_twenty_minutes_of_faults(
    forkserver: ForkServerContext, every_s: float, at_least: float, record_testsuite_property: Record
) -> None:
    """Four groups run with the default timeouts and faults of all kinds. SEED and SECONDS are environment variables."""
    seed = int(os.environ.get("SEED", "0"))
    seconds = float(os.environ.get("SECONDS", "1200"))
    with running(forkserver, num_groups=4, seed=seed, kinds=ALL_KINDS, batch_s=0.1) as run:
        assert run.all_together(60), f"they never trained together; {run.job.history()}"
        began_s = time.time()
        run.suffer_for(seconds, every_s)
        ended_s = time.time()
        assert run.all_together(120), run.job.history()
        run.job.finish([group.trainer for group in run.groups])
        stalls = run.stalls(began_s, ended_s)
        progress = 1 - sum(stall.seconds for stall in stalls) / (ended_s - began_s)
        told = {
            "seed": seed,
            "faults": dict(run.happened),
            "steps": len({event.step for event in run.commits()}),
            "steps_in_common": run.job.check_digests(),
            "progress": round(progress, 4),
            "longest stalls": [
                (round(stall.at_s - began_s, 1), round(stall.seconds, 2), stall.faults) for stall in stalls[:12]
            ],
            "load": round(os.getloadavg()[0], 1),
        }
        print(told)
        record_testsuite_property("faults", told)
        assert progress >= at_least, told
