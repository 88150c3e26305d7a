"""What a rank's log says of its waits, by what its core and its training thread are at."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from tft_algos.manager.step.waits import WaitWatch
from tft_algos.testing import plan_of
from tft_coord.core.progress import Phase
from tft_coord.core.step import Healing
from tft_coord.core.step import Phase as StepPhase


class Watched:
    """A watch, and what it looks at."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.lines: list[str] = []
        self.core = SimpleNamespace(
            name=SimpleNamespace(attempt=1),
            phase=StepPhase.PLANNED,
            healing=Healing.NONE,
            plan=plan_of(7, size=3),
            failed_quorums=0,
            pends=False,
        )
        self.at = Phase.OUTSIDE
        self.step_progress = SimpleNamespace(phase=lambda _: self.at, awaits_words=False)
        limits = {"quorum_timeout": 70, "timeout": 60, "heal_timeout": 600}
        config: Any = SimpleNamespace(world_size=2, **{name: timedelta(seconds=s) for name, s in limits.items()})
        reports: Any = SimpleNamespace(log=lambda _, message, *args: self.lines.append(message % args))
        step: Any = SimpleNamespace(status=self.core)
        step_progress: Any = self.step_progress
        self.failure = ""
        self.watch = WaitWatch(
            step, step_progress, config, reports, lambda: self.now_s, failed_before=lambda: self.failure
        )

    def run(self, seconds: int, reductions: int = 0) -> list[str]:
        """Returns: the lines of this time."""
        del self.lines[:]
        for _ in range(seconds):
            self.now_s += 1
            self.watch.look(reductions)
        return list(self.lines)


def waits(watched: Watched, kind: str) -> None:
    watched.at = Phase.REDUCING if kind == "a reduction" else Phase.WAITING
    watched.core.pends = kind in ("a quorum", "the process group of the new quorum")
    watched.core.phase = StepPhase.ASKED if kind == "a quorum" else StepPhase.PLANNED
    watched.core.healing = Healing.FETCHING if kind == "live state" else Healing.NONE
    watched.step_progress.awaits_words = kind == "the end of the step at the other replicas"


@pytest.mark.parametrize(
    ("kind", "who", "ends"),
    [
        ("a quorum", "the lighthouse has not reported the missing replicas yet", "quorum_timeout (70 s)"),
        (
            "the process group of the new quorum",
            "the other members of quorum 7: replica_1, replica_2",
            "the process group's own timeout",
        ),
        ("a reduction", "the other members of quorum 7: replica_1, replica_2", "timeout (60 s)"),
        ("live state", "the state of step 0 from replica_1 at ", "heal_timeout (600 s)"),
        ("the vote of its group", "the other ranks of this group of 2", "timeout (60 s)"),
        (
            "the end of the step at the other replicas",
            "the other members of quorum 7: replica_1, replica_2",
            "timeout (60 s)",
        ),
    ],
)
def test_each_kind_of_wait_says_for_whom_and_what_ends_it(kind: str, who: str, ends: str) -> None:
    watched = Watched()
    if kind == "live state":
        watched.core.plan = plan_of(7, size=3, rank=0, healing=[0])
    waits(watched, kind)
    (line,) = watched.run(10)
    assert line.startswith(f"waiting for {kind} for 5 s: {who}")
    assert line.endswith(f"; time limit: {ends}")
    watched.watch.reported("waits for b at b-host:1")
    (again,) = watched.run(25)
    assert again.startswith(f"waiting for {kind} for 30 s: waits for b at b-host:1; time limit")
    watched.at = Phase.OUTSIDE
    assert watched.run(5) == [f"the wait for {kind} is over after 35 s"]


@pytest.mark.parametrize(
    ("kind", "who"),
    [
        (
            "the process group of the new quorum",
            "the group itself is starting, and no other replica is in quorum 7 (the last one failed: no device)",
        ),
        ("a reduction", "no other replica is in quorum 7"),
    ],
)
def test_a_replica_that_is_alone_waits_for_no_other(kind: str, who: str) -> None:
    watched = Watched()
    watched.core.plan, watched.failure = plan_of(7, size=1), "no device"
    waits(watched, kind)
    (line,) = watched.run(10)
    assert line.startswith(f"waiting for {kind} for 5 s: {who}; time limit: ")


def test_a_quorum_that_does_not_come_is_no_wait_that_is_over() -> None:
    watched = Watched()
    waits(watched, "a quorum")
    watched.run(70)
    watched.core.phase, watched.at = StepPhase.FAILED, Phase.OUTSIDE
    assert watched.run(1) == [
        "timed out waiting for a quorum after 70 s (70 s in total); the next step requests it again"
    ]
    waits(watched, "a quorum")
    watched.core.name.attempt, watched.core.failed_quorums = 2, 1
    watched.run(70)
    watched.core.name.attempt, watched.core.failed_quorums = 3, 2  # no look came in between
    assert watched.run(1) == [
        "timed out waiting for a quorum after 70 s (141 s in total); the next step requests it again"
    ]
    watched.run(10)
    watched.core.phase, watched.at = StepPhase.PLANNED, Phase.OUTSIDE
    assert watched.run(1) == ["the wait for a quorum is over after 11 s"]


def test_what_was_said_of_an_earlier_wait_is_not_said_of_this_one() -> None:
    watched = Watched()
    watched.watch.reported("waits for b at b-host:1")
    watched.now_s = 100
    waits(watched, "a reduction")
    (line,) = watched.run(10)
    assert "b-host" not in line


def test_steps_that_are_short_say_nothing() -> None:
    watched = Watched()
    waits(watched, "a reduction")
    for step in range(30):
        watched.core.name.attempt = step
        assert watched.run(4, reductions=step) == []


def test_a_wait_for_a_group_says_why_the_last_one_was_not_built() -> None:
    watched = Watched()
    waits(watched, "the process group of the new quorum")
    watched.failure = "replica replica_2 could not be reached at 10.0.0.3 port 4321: connection refused"
    (line, *_) = watched.run(60)
    assert f"replica_1, replica_2 (the last one failed: {watched.failure})" in line
