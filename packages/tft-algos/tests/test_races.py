"""The Manager's threads in any order: a storm of steps, losses, errors, looks and a leave, with yields between lines.

To try the other tests of the Manager in the same way, each N times: `TFT_RACES=N pytest packages/tft-algos/tests`.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tft_algos import Manager, ManagerPhase
from tft_algos.testing import FakeGroup, MemoryTransport, plan_of
from tft_coord.core.lineage import fold_lineage, initial_lineage
from tft_coord.core.progress import Progress
from tft_coord.core.types import LossNotice, Plan, Purpose, QuorumKey, RankRequest, Verdict
from tft_coord.notifications import Notification

GUARD_S = 60.0
SEEDS = range(max(3, int(os.environ.get("TFT_RACES", "0"))))
RUNS_IN_SOAK = 200
TESTS = Path(__file__).parent


class Lighthouse:
    """A coordinator that forms a new quorum whenever it is asked for one, and keeps books of what commits."""

    replica_id = "replica_0"

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._quorum_id = 0
        self.step, self.lineage = 0, initial_lineage("default")
        self.mistakes: list[str] = []
        self.key: QuorumKey | None = None
        self.left = False
        self.listener: Callable[[Notification], None] = lambda _: None
        self.progress: Callable[[], Progress | None] = lambda: None

    def quorum(self, request: RankRequest, timeout: timedelta) -> Plan | QuorumKey:
        if (request.step, request.lineage) != (self.step, self.lineage):
            self.mistakes.append(f"asks at step {request.step} and has committed {self.step}")
        stands = request.held is not None and request.held == self.key
        if stands and not request.needs_configure and not request.commit_failures and self._dice.random() < 0.9:
            return QuorumKey(self._quorum_id, self._quorum_id)
        self._quorum_id += 1
        plan = plan_of(self._quorum_id, step=self.step, lineage=self.lineage, size=2)
        self.key = plan.key
        return plan

    def vote(
        self, step: int, yes: bool, timeout: timedelta, *, key: QuorumKey, purpose: Purpose, leaving: bool = False
    ) -> Verdict:
        if step != self.step:
            self.mistakes.append(f"votes on step {step} and has committed {self.step}")
        yes = yes and self._dice.random() < 0.95
        if yes:
            self.step += 1
            self.lineage = fold_lineage(self.lineage, key, self.step)
        return Verdict(yes, leaving)

    def leave(self, reason: str, serve: timedelta, timeout: timedelta, *, finished_step: int | None = None) -> None:
        self.left = True

    def gather(self, name: str, value: str, timeout: timedelta) -> tuple[str, ...]:
        return (value,)

    def follow(self, progress: Callable[[], Progress]) -> None:
        self.progress = progress

    def beat(self) -> None:
        """Nothing: nobody judges this rank."""

    def listen(self, listener: Callable[[Notification], None]) -> None:
        self.listener = listener

    def source_metadata(self, address: str, timeout: timedelta) -> str:
        return address

    def healed(self, bytes_total: int) -> None:
        """Nothing: nobody heals here."""

    def close(self) -> None:
        """Nothing runs."""


class Storm:
    """Threads that do to a Manager what other threads do, until the training loop has ended."""

    def __init__(self, seed: int) -> None:
        self.lighthouse = Lighthouse(seed)
        self.group = FakeGroup()
        self.weights = torch.ones(2)
        self.manager = Manager(
            self.group,
            lambda _: None,
            lambda: {"weights": self.weights},
            coordinator=self.lighthouse,
            checkpoint_transport=MemoryTransport(),
            lighthouse_addr="localhost:1",
            hostname="localhost",
        )
        self._dice = random.Random(seed + 1)
        self._over = threading.Event()
        self._failures: list[BaseException] = []

    def repeats(self, what: Callable[[], object], every_s: float) -> threading.Thread:
        def run() -> None:
            try:
                while not self._over.wait(every_s):
                    what()
            except BaseException as error:
                self._failures.append(error)

        thread = threading.Thread(target=run, name="storm", daemon=True)
        thread.start()
        return thread

    def loses_a_member(self) -> None:
        key = self.lighthouse.key
        if key is not None and self._dice.random() < 0.3:
            self.lighthouse.listener(LossNotice(key, "replica_1", self._dice.randrange(3), "killed"))

    def reports(self) -> None:
        if self._dice.random() < 0.2:
            self.manager.report_error(RuntimeError("a thread of the user's"))

    def reads(self) -> None:
        manager = self.manager
        before = manager.current_step()
        manager.errored()
        assert manager.strategy.is_untouched in (True, False)
        status = manager.status()
        assert status.step >= before
        assert status.phase in ManagerPhase
        assert manager.current_step() >= status.step

    def blow(self, loop: Callable[[Storm], None]) -> None:
        """Run the loop on a thread of its own, and the storm around it."""
        trainer = threading.Thread(target=self._train, args=[loop], name="trainer", daemon=True)
        threads = [
            self.repeats(self.loses_a_member, 0.002),
            self.repeats(self.reports, 0.003),
            self.repeats(self.reads, 0.001),
            self.repeats(lambda: self.lighthouse.progress(), 0.002),
        ]
        trainer.start()
        trainer.join(GUARD_S)
        hangs = trainer.is_alive()
        self._over.set()
        for thread in threads:
            thread.join(GUARD_S)
        assert not hangs, "the training loop hangs"
        assert not [thread for thread in threads if thread.is_alive()], "a thread hangs"
        assert not self._failures, self._failures
        assert not self.lighthouse.mistakes
        assert self.manager.current_step() == self.lighthouse.step
        self.manager.shutdown()

    def _train(self, loop: Callable[[Storm], None]) -> None:
        try:
            loop(self)
        except BaseException as error:
            self._failures.append(error)


def steps(storm: Storm) -> None:
    """One step after the other, until a leave that another thread wishes."""
    manager, committed = storm.manager, 0
    for number in range(60):
        manager.start_quorum()
        reductions = [manager.allreduce(torch.ones(2)) for _ in range(3)]
        if number == 40:
            threading.Thread(target=manager.leave, name="storm").start()
        for reduction in reductions:
            reduction.wait()
        committed += manager.should_commit()
        assert manager.current_step() == committed
        if manager.left:
            break
    assert manager.left or number == 59


def syncs(storm: Storm) -> None:
    """Steps that begin before earlier ones have ended, two in flight."""
    manager, committed, flying = storm.manager, 0, []
    for _ in range(40):
        manager.start_quorum()
        manager.strategy.reduce_in_sync(torch.ones(2))
        flying.append(manager.strategy.defer())
        while len(flying) > 2 or any(step.is_abandoned for step in flying):
            step = flying.pop(0)
            committed += step.should_commit()
            assert manager.current_step() == committed
    manager.strategy.give_up_deferred()


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHFT_TIMEOUT_SEC"):
        monkeypatch.delenv(name, raising=False)
    return


@pytest.mark.in_parts
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loop", [steps, syncs])
def test_a_storm_loses_no_step_and_hangs_nobody(quiet: None, yields: Any, loop: Any, seed: int) -> None:
    with yields(seed):
        Storm(seed).blow(loop)


def test_what_a_signal_handler_says_in_the_midst_of_an_event_is_heard(rigs: Any) -> None:
    """A handler runs on the thread that holds the mailbox: it must neither wait for it nor see half an event."""
    rig = rigs(plan_of(size=2))
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    box, seen = rig.manager._parts.shared.step, []
    core = box._core
    right = core.handle

    def interrupted(event: Any, now_ms: int) -> Any:
        effects = right(event, now_ms)
        if not seen:
            seen.append(rig.manager.current_step())
            rig.manager.leave(reason="it was sent SIGTERM")
            rig.manager.report_error(RuntimeError("by the handler"))
        return effects

    box._core = type("Interrupted", (), {"handle": staticmethod(interrupted), "known_status": None})()
    rig.manager.allreduce(torch.ones(2)).wait()
    box._core = core
    assert seen == [0]
    assert rig.manager.status().is_leaving
    assert [str(error) for error in rig.manager.status().errors] == ["by the handler"]
    assert not rig.manager.should_commit()
    assert rig.manager.left


def test_a_child_that_is_forked_in_the_midst_of_an_event_reads_on(rigs: Any) -> None:
    """The thread that held the mailbox is not in the child, and nobody would ever let go of it."""
    rig = rigs(plan_of(size=2))
    assert rig.step()
    box = rig.manager._parts.shared.step
    assert box.status.step == 1
    held, over = threading.Event(), threading.Event()

    def holds() -> None:
        with box._lock:
            box._status = None
            held.set()
            over.wait(GUARD_S)

    thread = threading.Thread(target=holds)
    thread.start()
    try:
        assert held.wait(GUARD_S)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of newer Pythons: this process has threads
            child = os.fork()
        if child == 0:  # no test runs on in it, whatever happens
            try:
                os._exit(10 + rig.manager.current_step())
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11
    finally:
        over.set()
        thread.join(GUARD_S)


@pytest.mark.parametrize("seed", range(2))
def test_effects_of_two_threads_are_performed_once_each(quiet: None, yields: Any, seed: int) -> None:
    storm = Storm(seed)
    told: list[str] = []
    storm.manager.start_quorum()
    storm.manager.wait_quorum()
    reports = storm.manager._parts.shared.reports
    right = reports.error

    def counted(name: Any, error: Exception, **facts: Any) -> None:
        told.append(str(error))
        right(name, error, **facts)

    reports.error = counted
    with yields(seed):
        threads = [
            threading.Thread(target=lambda n=number: storm.manager.report_error(RuntimeError(f"error {n}")))
            for number in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GUARD_S)
    assert sorted(told) == sorted(f"error {number}" for number in range(12))
    assert len(storm.manager.status().errors) == 12
    storm.manager.shutdown()


@pytest.mark.soak
@pytest.mark.timeout(7_200)
def test_the_managers_tests_hold_in_any_order_of_lines() -> None:
    names = ("manager", "losses", "deferred", "leaving", "healing", "exchange", "thrown_away", "waits", "whereabouts")
    files = [str(TESTS / f"test_{name}.py") for name in names]
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "120", *files],
        env={**os.environ, "TFT_RACES": str(RUNS_IN_SOAK)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"{RUNS_IN_SOAK} runs in {time.monotonic() - begun:.0f} s")
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-2_000:]
