"""The result of a run: the faults and their costs, the digests, and whether everything is correct.

Everything is counted from the events after the run, so the report is what happened.

Law of this file: pure. Events in, one report out, and the sentences that say what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from signal import SIGKILL
from typing import Any, final

from tft_suite.demo.events import Event, ProcessEnded, ProcessKilled, ProcessStarted, StepCommitted, TrainingEnded

TEST_ACCURACY_MIN = 0.95


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kill -9.

    Args:
        replica: the killed replica.
        at_step: its last commit before the kill.
        stall_s: from the kill until each survivor had committed the next step. None: a survivor never did.
        rejoin_s: from the kill until the first commit of the restarted replica. None: there was none.
    """

    replica: int
    at_step: int
    stall_s: float | None
    rejoin_s: float | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """report.json. `digests` are of parameters and optimizer state, by replica, for replicas that reached the end."""

    replicas: int
    steps: int
    faults: tuple[Fault, ...]
    digests: tuple[str, ...]
    identical: bool
    test_accuracy: float | None
    wall_s: float

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data, with the keys in the order of the fields."""
        return asdict(self)


def make_report(events: Sequence[Event], *, replicas: int, steps: int, wall_s: float) -> Report:
    """Make the report from the events."""
    ends = final_ends(events)
    digests = tuple(ends[replica].digest for replica in sorted(ends))
    all_ended_there = len(ends) == replicas and {end.step for end in ends.values()} == {steps}
    return Report(
        replicas=replicas,
        steps=steps,
        faults=tuple(faults(events)),
        digests=digests,
        identical=all_ended_there and len(set(digests)) == 1,
        test_accuracy=min((round(end.test_accuracy, 4) for end in ends.values()), default=None),
        wall_s=round(wall_s, 3),
    )


def final_ends(events: Sequence[Event]) -> dict[int, TrainingEnded]:
    """Return the last TrainingEnded of each replica whose process neither died nor restarted after it."""
    ends: dict[int, TrainingEnded] = {}
    for event in events:
        if isinstance(event, TrainingEnded):
            ends[event.replica] = event
        elif isinstance(event, ProcessStarted | ProcessKilled):
            ends.pop(event.replica, None)
    return ends


def deaths(events: Sequence[Event]) -> Iterable[tuple[int, ProcessKilled]]:
    """Yield each kill -9 with its index in `events`: the scheduled kills, and kills from outside."""
    last_step: dict[int, int] = {}
    is_killed: set[int] = set()
    for index, event in enumerate(events):
        match event:
            case ProcessStarted():
                is_killed.discard(event.replica)
            case StepCommitted():
                last_step[event.replica] = event.step
            case ProcessKilled():
                is_killed.add(event.replica)
                yield index, event
            case ProcessEnded(exit_code=code) if code == -SIGKILL and event.replica not in is_killed:
                step = last_step.get(event.replica, 0)
                yield index, ProcessKilled(at_s=event.at_s, replica=event.replica, step=step)
            case _:
                pass


def faults(events: Sequence[Event]) -> Iterable[Fault]:
    """Yield the kills in order, each with its costs."""
    for index, kill in deaths(events):
        after = events[index + 1 :]
        first_commit = next((e for e in after if isinstance(e, StepCommitted) and e.replica == kill.replica), None)
        yield Fault(
            replica=kill.replica,
            at_step=kill.step,
            stall_s=stall(events[:index], after, kill),
            rejoin_s=None if first_commit is None else round(first_commit.at_s - kill.at_s, 3),
        )


def stall(before: Sequence[Event], after: Sequence[Event], kill: ProcessKilled) -> float | None:
    """Return the seconds from the kill until each survivor committed a later step. A later victim is no survivor."""
    waited_for = alive_and_trained(before) - {kill.replica}
    last_s: float | None = None
    for event in after:
        if not waited_for:
            break
        if isinstance(event, StepCommitted) and event.step > kill.step and event.replica in waited_for:
            waited_for.remove(event.replica)
            last_s = event.at_s
        elif isinstance(event, ProcessKilled | ProcessEnded):
            waited_for.discard(event.replica)
    return None if waited_for or last_s is None else round(last_s - kill.at_s, 3)


def alive_and_trained(events: Sequence[Event]) -> set[int]:
    """Return the replicas whose current process has committed a step."""
    trained: set[int] = set()
    for event in events:
        if isinstance(event, StepCommitted):
            trained.add(event.replica)
        elif isinstance(event, ProcessStarted | ProcessKilled | ProcessEnded):
            trained.discard(event.replica)
    return trained


def problems_of(report: Report, events: Sequence[Event], *, kills: int, error: str | None) -> tuple[str, ...]:
    """Return a sentence for each problem of a run. Empty: the run is good.

    Args:
        kills: how many kills were requested.
        error: why the run was given up. None: it was not.
    """
    found = [] if error is None else [error]
    ends = final_ends(events)
    if error is None and len(ends) < report.replicas:
        missing = sorted(set(range(report.replicas)) - set(ends))
        found.append(f"replica {', '.join(map(str, missing))} did not reach its last step; see its log.")
    found += [
        f"replica {replica} ended at step {end.step} instead of {report.steps}."
        for replica, end in sorted(ends.items())
        if end.step != report.steps
    ]
    if len(set(report.digests)) > 1:
        found.append("the replicas hold different parameters or optimizer state: their digests differ.")
    if report.test_accuracy is not None and report.test_accuracy < TEST_ACCURACY_MIN:
        found.append(f"the test accuracy is {report.test_accuracy:.3f}; at least {TEST_ACCURACY_MIN} is required.")
    made = sum(isinstance(event, ProcessKilled) for event in events)
    if error is None and made < kills:
        found.append(f"only {made} of {kills} scheduled kills happened; raise --steps.")
    found += [
        f"replica {kill.replica} was killed at step {kill.step} and committed no later step with other replicas; "
        "raise --steps."
        for index, kill in deaths(events)
        if error is None and not rejoined(events[index + 1 :], kill.replica)
    ]
    return tuple(found)


def rejoined(after: Sequence[Event], replica: int) -> bool:
    """Return whether a killed replica later committed a step to which its own and another gradient contributed."""
    return any(
        isinstance(event, StepCommitted) and event.replica == replica and event.took_part and event.participants > 1
        for event in after
    )
