"""Managers in a standing quorum: a steady step sends no request, and the end of such a quorum costs the minimum."""

from __future__ import annotations

import itertools
import logging
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, final

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tft_algos import Coordinator, Manager, ProcessGroupLike, ResolvedConfig
from tft_algos.errors import LeftJob
from tft_algos.manager.step.control_words import lease_of
from tft_coord.core import events
from tft_coord.core.lighthouse import LighthouseCore
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

WAIT_S: Final = 60.0
LR: Final = 0.01

pytestmark = pytest.mark.timeout(180)


@final
class Replica:
    """A replica of one rank, on a thread of this process.

    Args:
        lighthouse: address.
        name: of the replica. It seeds the weights.
        pause_s: its own part of a step.
    """

    def __init__(self, lighthouse: str, name: str, *, pause_s: float = 0.002, **settings: Any) -> None:
        self.weights = torch.full((8,), float(ord(name[0])))
        self.manager = Manager(
            ProcessGroupGloo(),
            lambda state: self.weights.copy_(state["weights"]),
            lambda: {"weights": self.weights.clone()},
            lighthouse_addr=lighthouse,
            replica_id=name,
            hostname="localhost",
            **settings,
        )
        self.committed: dict[int, tuple[int, float]] = {}  # by step: participants and time
        self.num_failed = 0
        self.requests: list[int] = []  # the step of each request
        self.then: Callable[[Replica], None] = lambda _: None  # called inside a step, once
        self.is_over = threading.Event()
        self.left = False
        coordinator = self.manager._parts.shared.coordinator
        asks = coordinator.quorum

        def counted(request: Any, timeout: Any) -> Any:
            self.requests.append(request.step)
            return asks(request, timeout)

        coordinator.quorum = counted  # type: ignore[method-assign]
        self._pause_s = pause_s
        self._thread = threading.Thread(target=self._train, name=f"replica-{name}", daemon=True)

    def start(self) -> Replica:
        self._thread.start()
        return self

    @property
    def step(self) -> int:
        return self.manager.current_step()

    @property
    def participants(self) -> int:
        """Return the participants of its last committed step."""
        return self.committed[max(self.committed)][0]

    def reaches(self, step: int) -> None:
        """Wait until it has committed that many steps."""
        give_up_at = time.monotonic() + WAIT_S
        while self.step < step:
            assert self._thread.is_alive(), "it has ended"
            assert time.monotonic() < give_up_at, f"it is at step {self.step}"
            time.sleep(0.005)

    def goes_on(self, steps: int) -> None:
        self.reaches(self.step + steps)

    def _train(self) -> None:
        try:
            while not self.is_over.is_set():
                self._one_step()
        except LeftJob:
            self.left = True
        finally:
            self.manager.shutdown()

    def _one_step(self) -> None:
        self.manager.start_quorum()
        time.sleep(self._pause_s)
        gradient = torch.full((8,), LR)
        self.manager.allreduce(gradient).wait()
        then, self.then = self.then, lambda _: None
        then(self)
        if self.manager.should_commit():
            self.weights.sub_(gradient)
            self.committed[self.step] = (self.manager.num_participants(), time.monotonic())
        else:
            self.num_failed += 1

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@final
class Job:
    """Replicas and their lighthouse."""

    def __init__(self) -> None:
        self.lighthouse = self.new_lighthouse("127.0.0.1:0")
        self.address = str(self.lighthouse.address())
        self.replicas: list[Replica] = []

    @staticmethod
    def new_lighthouse(bind: str) -> LighthouseServer:
        return LighthouseServer(bind, min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=20)

    def replica(self, name: str, **settings: Any) -> Replica:
        self.replicas.append(Replica(self.address, name, **settings))
        return self.replicas[-1]

    def stand(self, names: str, **settings: Any) -> list[Replica]:
        """Return replicas that train together without further requests."""
        return self.stands([self.replica(name, **settings) for name in names], len(names))

    @staticmethod
    def stands(made: list[Replica], num_replicas: int) -> list[Replica]:
        """Start them, and wait until they train without further requests."""
        for each in made:
            each.start()
        give_up_at = time.monotonic() + WAIT_S
        while True:
            before = [(each.step, len(each.requests)) for each in made]
            for each in made:
                each.goes_on(5)
            after = [len(each.requests) for each in made]
            together = all(each.participants == num_replicas for each in made)
            if together and [requests for _, requests in before] == after:
                return made
            assert time.monotonic() < give_up_at, "the quorum does not stand"

    def end(self) -> None:
        for each in self.replicas:
            each.is_over.set()
        # All leave by their words, so that none waits for another one.
        for each in self.replicas:
            each.manager.leave(reason="the test is over")
        for each in self.replicas:
            each.join()
        self.lighthouse.shutdown()
        self.replicas.clear()  # pytest holds this for a while, and a replica holds its store's port


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.end()


def same_steps(replicas: list[Replica]) -> None:
    """Check that all have committed the same steps, except the last ones, and have equal weights at equal steps."""
    upto = min(each.step for each in replicas)
    first = max(min(each.committed) for each in replicas)
    for step in range(first, upto):
        assert all(step in each.committed for each in replicas), step


def test_a_thousand_steady_steps_send_the_lighthouse_nothing_but_beats(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: Counter[str] = Counter()
    handle = LighthouseCore.handle

    def counted(self: LighthouseCore, event: Any, *args: Any, **more: Any) -> Any:
        heard[type(event).__name__] += 1
        return handle(self, event, *args, **more)

    monkeypatch.setattr(LighthouseCore, "handle", counted)
    replicas = job.stand("ab", pause_s=0.0)
    heard.clear()
    before = [len(each.requests) for each in replicas]
    for each in replicas:
        each.goes_on(1_000)
    told = Counter(heard)
    assert [len(each.requests) for each in replicas] == before
    # If the machine stalls for a moment, the lighthouse probes a manager server, and it answers.
    assert set(told) - {events.ProbeAnswered.__name__} == {events.BeatReceived.__name__}, told
    assert not any(each.num_failed for each in replicas)
    same_steps(replicas)


@pytest.mark.in_parts
def test_a_lighthouse_that_is_away_costs_no_step_and_no_line(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    replicas = job.stand("ab", pause_s=0.01)
    failed = [each.num_failed for each in replicas]
    requests = [len(each.requests) for each in replicas]
    caplog.clear()
    began_s = time.monotonic()
    with caplog.at_level(logging.INFO, logger="tft_algos"):
        job.lighthouse.shutdown()
        time.sleep(5)
        job.lighthouse = job.new_lighthouse(job.address.removeprefix("http://"))
        time.sleep(2)
    ended_s = time.monotonic()
    assert [each.num_failed for each in replicas] == failed
    assert [len(each.requests) for each in replicas] == requests
    said = [record.getMessage() for record in caplog.records if record.name.startswith("tft_algos")]
    assert len(said) <= len(replicas), said
    for each in replicas:
        at_s = [at_s for _, at_s in each.committed.values() if began_s <= at_s <= ended_s]
        gaps = [later - earlier for earlier, later in itertools.pairwise(at_s)]
        assert len(gaps) > 50
        # No step waits for the lighthouse. On a busy machine a step is late now and then, by less than its absence.
        assert max(gaps) < statistics.median(gaps) + 1.5
    for each in replicas:
        each.goes_on(20)
    same_steps(replicas)


@pytest.mark.in_parts
def test_a_newcomer_is_in_within_two_rounds_and_no_round_fails(job: Job) -> None:
    old = job.stand("ab", pause_s=0.02)
    failed = [each.num_failed for each in old]
    requests = [len(each.requests) for each in old]
    newcomer = job.replica("c", pause_s=0.02)
    newcomer.start()
    newcomer.reaches(old[0].step + 1)
    for each in (*old, newcomer):
        each.goes_on(20)
    assert [each.num_failed for each in old] == failed
    asked = [len(each.requests) - before for each, before in zip(old, requests, strict=True)]
    assert max(asked) <= 3, "once to take it in, once because it recovered"
    assert newcomer.participants == 3
    same_steps([*old, newcomer])


@pytest.mark.in_parts
def test_an_error_in_one_replica_is_a_step_that_nobody_commits(job: Job) -> None:
    replicas = job.stand("abc", pause_s=0.005)
    failed_at: list[int] = []

    def fails(replica: Replica) -> None:
        failed_at.append(replica.step)
        replica.manager.report_error(RuntimeError("of its own"))

    before = [each.num_failed for each in replicas]
    replicas[1].then = fails
    for each in replicas:
        each.goes_on(20)
    assert [each.num_failed - number for each, number in zip(replicas, before, strict=True)] == [1, 1, 1]
    participants = [each.committed[failed_at[0] + 1][0] for each in replicas]
    assert participants == [3, 3, 3], "they try the step again together"
    same_steps(replicas)


@pytest.mark.in_parts
def test_a_replica_that_leaves_costs_the_others_no_step(job: Job) -> None:
    replicas = job.stand("abc", pause_s=0.005)
    before = [each.num_failed for each in replicas]
    replicas[2].manager.leave(reason="it was told to")
    replicas[2].join()
    assert replicas[2].left
    for each in replicas[:2]:
        each.goes_on(20)
        assert each.participants == 2
    assert [each.num_failed for each in replicas] == before
    same_steps(replicas[:2])


@pytest.mark.in_parts
def test_a_state_that_is_loaded_by_hand_breaks_the_quorum_and_loses_no_update(job: Job) -> None:
    replicas = job.stand("ab", pause_s=0.005)
    one = replicas[0]
    one.then = lambda replica: replica.manager.load_state_dict(replica.manager.state_dict())
    for each in replicas:
        each.goes_on(30)
    same_steps(replicas)


@pytest.mark.in_parts
def test_groups_of_two_ranks_stand_and_commit_or_not_together(job: Job) -> None:
    stores = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in "ab"]
    ranks = [
        job.replica(name, rank=rank, world_size=2, store_addr="localhost", store_port=store.port, pause_s=0.005)
        for name, store in zip("ab", stores, strict=True)
        for rank in (0, 1)
    ]
    job.stands(ranks, 2)
    before = [(each.num_failed, len(each.requests)) for each in ranks]
    ranks[0].goes_on(50)
    assert [(each.num_failed, len(each.requests)) for each in ranks] == before
    # An error of one rank reaches its own group by the verdict, and the other rank's partner by the word.
    ranks[1].then = lambda replica: replica.manager.report_error(RuntimeError("of rank 1"))
    for each in ranks:
        each.goes_on(20)
    assert {each.num_failed - failed for each, (failed, _) in zip(ranks, before, strict=True)} == {1}
    same_steps(ranks)


@pytest.mark.in_parts
def test_a_lease_of_zero_asks_in_every_step(job: Job) -> None:
    replicas = [job.replica(name, lease=timedelta()).start() for name in "ab"]
    for each in replicas:
        each.reaches(20)
    before = [(each.step, len(each.requests)) for each in replicas]
    for each in replicas:
        each.goes_on(20)
    for each, (step, requests) in zip(replicas, before, strict=True):
        assert len(each.requests) - requests >= each.step - step - 2


@pytest.mark.in_parts
def test_a_replica_that_asks_in_every_step_makes_all_do_so(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def lease(config: ResolvedConfig, group: ProcessGroupLike, coordinator: Coordinator) -> int | None:
        return None if config.replica_id == "b" else lease_of(config, group, coordinator)

    monkeypatch.setattr("tft_algos.manager.assembly.lease_of", lease)
    replicas = [job.replica(name).start() for name in "ab"]
    for each in replicas:
        each.reaches(20)
    before = [(each.step, len(each.requests)) for each in replicas]
    for each in replicas:
        each.goes_on(20)
    for each, (step, requests) in zip(replicas, before, strict=True):
        assert len(each.requests) - requests >= each.step - step - 2
