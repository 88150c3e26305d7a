"""The demo's supervisor with real processes that only simulate training: it starts, hears, kills and ends them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import psutil
import pytest

from integration_tests.conftest import Kill, Spawn
from tft_suite.demo.demo_controller import HOLD_AFTER_S
from tft_suite.demo.events import (
    HealingStarted,
    ProcessKilled,
    ProcessStarted,
    StepCommitted,
    TrainingEnded,
)
from tft_suite.demo.link import Link
from tft_suite.demo.process import ReplicaTask
from tft_suite.demo.report import make_report, problems_of
from tft_suite.demo.run_state import RunState
from tft_suite.demo.settings import DemoSettings
from tft_suite.demo.supervisor import Outcome, Supervisor, log_of
from tft_suite.errors import MessageError

STEP_S = 0.005
AHEAD = 5
GONE_WITHIN_S = 10.0


# --- what replicas do ------------------------------------------------------------------------------------------------


def act(task: ReplicaTask, link: Link) -> None:
    """Commit step after step. A restarted replica continues at the highest step, as if it had healed.

    The others wait for it, so that it joins before they finish, even if its start takes long on a busy machine.
    """
    folder = task.log.parent
    own = folder / f"{task.replica}.step"
    step = max(steps_in(folder), default=0)
    own.write_text(str(step))
    if step:
        link.send(HealingStarted(at_s=0, replica=task.replica))
    while step < task.steps:
        time.sleep(STEP_S)
        if step > min(steps_in(folder)) + AHEAD:
            continue
        step += 1
        own.write_text(str(step))
        link.send(committed(task, step))
    end(task, link, step)


def steps_in(folder: Path) -> list[int]:
    """Return the steps of all replicas that have begun. A step that is just being written does not count."""
    return [int(text) for text in (path.read_text() for path in folder.glob("*.step")) if text]


def committed(task: ReplicaTask, step: int) -> StepCommitted:
    return StepCommitted(at_s=0, replica=task.replica, step=step, participants=task.steps, took_part=True, loss=0.5)


def end(task: ReplicaTask, link: Link, step: int) -> None:
    while not link.is_stopped:
        link.send(TrainingEnded(at_s=0, replica=task.replica, step=step, digest="d", test_accuracy=1.0))
        link.wait_for_order()
        time.sleep(STEP_S)


def stay_behind(task: ReplicaTask, link: Link) -> None:
    """Let replica 1 lose the last step, and have it only when all hold."""
    link.send(committed(task, task.steps - 1))
    if task.replica == 1:
        link.wait_for_order()
        assert link.is_held
    end(task, link, task.steps)


def fail(task: ReplicaTask, link: Link) -> None:
    link.send(committed(task, 1))
    if task.replica == 1:
        raise ValueError("no more digits") from KeyError("seven")
    end(task, link, task.steps)


def abort(task: ReplicaTask, link: Link) -> None:
    if task.replica == 1:
        os.abort()
    end(task, link, task.steps)


def leave(task: ReplicaTask, link: Link) -> None:
    if task.replica == 1:
        return
    end(task, link, task.steps)


def mumble(task: ReplicaTask, link: Link) -> None:
    events: Connection = link._events
    events.send_bytes(b'{"event": "StepDiscarded", "step": "many", "reason": ""}')
    end(task, link, task.steps)


# --- how they are watched --------------------------------------------------------------------------------------------


class Watch:
    """A view that calls `look` with the run_state, and shows nothing."""

    def __init__(self, look: Callable[[RunState], None] = lambda run_state: None) -> None:
        self._look = look

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, run_state: RunState, now_s: float) -> None:
        self._look(run_state)


def run(
    settings: DemoSettings, body: Callable[[ReplicaTask, Link], None], *, look: Callable[[RunState], None] | None = None
) -> Outcome:
    caught: list[int] = []

    def watch(run_state: RunState) -> None:
        if look is not None:
            look(run_state)

    supervisor = Supervisor(
        settings,
        lighthouse_addr="unused",
        token="unused",
        view=Watch(watch),
        body=f"{__name__}:{body.__name__}",
        caught=caught,
    )
    return supervisor.run()


def pids(outcome: Outcome) -> list[int]:
    return [event.pid for event in outcome.events if isinstance(event, ProcessStarted)]


def settings_of(out: Path, *, steps: int = 20, kills: int = 0, replicas: int = 3) -> DemoSettings:
    return DemoSettings(replicas=replicas, steps=steps, kills=kills, out=out)


# --- tests -----------------------------------------------------------------------------------------------------------


def test_killed_replicas_are_started_again_and_come_to_the_end(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, steps=400, kills=3)
    outcome = run(settings, act)
    report = make_report(outcome.events, replicas=3, steps=400, wall_s=outcome.wall_s)
    assert problems_of(report, outcome.events, kills=3, error=outcome.error) == ()
    assert len(report.faults) == 3
    assert len(pids(outcome)) == 6
    assert not [pid for pid in pids(outcome) if psutil.pid_exists(pid)]
    for index, event in enumerate(outcome.events):
        if isinstance(event, ProcessKilled):
            following = (e for e in outcome.events[index + 1 :] if e.replica == event.replica)
            assert type(next(following)).__name__ == "ProcessEnded"  # messages after its death are not heard


def test_one_that_lost_the_last_step_has_it_when_all_hold(tmp_path: Path) -> None:
    outcome = run(settings_of(tmp_path), stay_behind)
    assert outcome.error is None
    assert outcome.wall_s > HOLD_AFTER_S
    last = {event.replica: event.step for event in outcome.events if isinstance(event, TrainingEnded)}
    assert last == {0: 20, 1: 20, 2: 20}


def test_a_replica_that_fails_is_reported_with_its_error_and_all_end(tmp_path: Path) -> None:
    outcome = run(settings_of(tmp_path), fail)
    assert outcome.error == "replica 1 failed: ValueError: no more digits (because of KeyError: 'seven')"
    assert not [pid for pid in pids(outcome) if psutil.pid_exists(pid)]
    assert "Traceback" in log_of(tmp_path, 1).read_text()
    assert not log_of(tmp_path, 0).read_text()


@pytest.mark.parametrize(("body", "words"), [(abort, "by SIGABRT"), (leave, "exit code 0")])
def test_a_replica_that_just_ends_is_no_kill_and_not_started_again(
    body: Callable[[ReplicaTask, Link], None], words: str, tmp_path: Path
) -> None:
    outcome = run(settings_of(tmp_path), body)
    assert outcome.error == f"replica 1 ended unexpectedly: {words}."
    assert len(pids(outcome)) == 3


def test_a_body_that_cannot_be_imported_is_reported(tmp_path: Path) -> None:
    supervisor = Supervisor(
        settings_of(tmp_path),
        lighthouse_addr="unused",
        token="unused",
        view=Watch(),
        body="tft_suite.nowhere:train",
        caught=[],
    )
    assert "failed: ModuleNotFoundError" in str(supervisor.run().error)


def test_a_replica_that_speaks_nonsense_ends_the_run_with_an_error_and_all_end(tmp_path: Path) -> None:
    with pytest.raises(MessageError, match="step='many'"):
        run(settings_of(tmp_path), mumble)
    assert not writing_to([log_of(tmp_path, replica) for replica in range(3)])


def test_a_signal_ends_the_run_and_all_processes(tmp_path: Path) -> None:
    caught: list[int] = []
    supervisor = Supervisor(
        settings_of(tmp_path),
        lighthouse_addr="unused",
        token="unused",
        view=Watch(lambda run_state: caught.append(15) if run_state.step else None),
        body=f"{__name__}:fail_late",
        caught=caught,
    )
    outcome = supervisor.run()
    assert (outcome.signal_number, outcome.error) == (15, None)
    assert not [pid for pid in pids(outcome) if psutil.pid_exists(pid)]


def fail_late(task: ReplicaTask, link: Link) -> None:
    link.send(committed(task, 1))
    link.wait_for_order()
    raise AssertionError("nobody ordered anything")


def supervise_for_ever(out: Path, told: Connection) -> None:
    """Run a supervisor in a separate process, and report when all replicas have committed."""

    def look(run_state: RunState) -> None:
        if all(who.num_commits for who in run_state.replicas):
            told.send(True)

    Supervisor(
        settings_of(out),
        lighthouse_addr="unused",
        token="unused",
        view=Watch(look),
        body=f"{__name__}:fail_late",
        caught=[],
    ).run()


@pytest.mark.in_parts
def test_replicas_end_when_their_supervisor_is_killed(tmp_path: Path, spawn: Spawn, kill: Kill) -> None:
    import multiprocessing

    hear, tell = multiprocessing.Pipe(duplex=False)
    process = spawn(supervise_for_ever, tmp_path, tell)
    assert hear.poll(30)
    assert process.pid is not None
    logs = [log_of(tmp_path, replica) for replica in range(3)]
    assert all(log.exists() for log in logs)
    replicas = writing_to(logs)
    assert len(replicas) == 3
    kill(process.pid)
    _, alive = psutil.wait_procs(replicas, timeout=GONE_WITHIN_S)
    assert not alive


def writing_to(files: list[Path]) -> list[psutil.Process]:
    """Return the processes whose standard error is one of the files."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError):
            if Path(os.readlink(f"/proc/{process.pid}/fd/2")) in files:
                found.append(process)
    return found
