"""Runs without processes: events written down as a test needs them.

Law of this file: helpers that make events; nothing waits and nothing is random.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from signal import SIGKILL

from tft_suite.demo.events import (
    Event,
    HealingStarted,
    ProcessEnded,
    ProcessKilled,
    ProcessStarted,
    StepCommitted,
    TrainingEnded,
)


def started(replica: int, at_s: float = 0.0) -> ProcessStarted:
    return ProcessStarted(at_s=at_s, replica=replica, pid=1_000 + replica)


def healing(replica: int, at_s: float) -> HealingStarted:
    return HealingStarted(at_s=at_s, replica=replica)


def committed(
    replica: int, step: int, at_s: float, *, participants: int = 3, took_part: bool = True, loss: float = 0.5
) -> StepCommitted:
    return StepCommitted(
        at_s=at_s, replica=replica, step=step, participants=participants, took_part=took_part, loss=loss
    )


def killed(replica: int, step: int, at_s: float) -> ProcessKilled:
    return ProcessKilled(at_s=at_s, replica=replica, step=step)


def ended(replica: int, at_s: float, exit_code: int = 0) -> ProcessEnded:
    return ProcessEnded(at_s=at_s, replica=replica, exit_code=exit_code)


def done(replica: int, step: int, at_s: float, *, digest: str = "d", accuracy: float = 0.98) -> TrainingEnded:
    return TrainingEnded(at_s=at_s, replica=replica, step=step, digest=digest, test_accuracy=accuracy)


def together(replicas: Iterable[int], steps: Iterable[int], *, participants: int) -> Iterator[Event]:
    """Each step committed by each replica, step n at second n, one replica a hundredth after the other."""
    members = list(replicas)
    for step in steps:
        for place, replica in enumerate(members):
            yield committed(replica, step, step + place / 100, participants=participants)


def a_good_run() -> list[Event]:
    """Three replicas to step 10; replica 1 is killed at step 4, and back in step 7."""
    return [
        *(started(replica) for replica in range(3)),
        *together([0, 2, 1], range(1, 5), participants=3),
        killed(1, 4, 4.03),
        ended(1, 4.04, -SIGKILL),
        started(1, 4.05),
        committed(0, 5, 5.03, participants=2),
        committed(2, 5, 5.23, participants=2),
        healing(1, 5.5),
        committed(0, 6, 6.0, participants=2),
        committed(2, 6, 6.01, participants=2),
        committed(1, 6, 6.53, participants=2, took_part=False),
        *together([0, 1, 2], range(7, 11), participants=3),
        *(done(replica, 10, 10.5) for replica in range(3)),
        *(ended(replica, 11.0) for replica in range(3)),
    ]
