"""The word of a round in the Manager: which groups and coordinators take part, and what a steady step calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tft_algos import Manager, ManagerPhase, ManagerStatus
from tft_algos.errors import ConfigError
from tft_algos.manager.clock import SystemClock
from tft_algos.manager.config import config_of, from_environment
from tft_algos.manager.recovery.healing import state_key
from tft_algos.manager.step.control_words import ControlWords, exchange_of, lease_of
from tft_algos.testing import EventInjector, FakeGroup, MemoryTransport, ScriptedCoordinator, plan_of
from tft_coord.core.lineage import fold_lineage, initial_lineage, state_check
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.types import NewcomerAsks, Plan, Purpose, QuorumKey, QuorumNews, Verdict
from tft_coord.timeouts import Timeouts
from tft_pg import ErrorSwallowingProcessGroupWrapper, ProcessGroup, ProcessGroupDummy, ProcessGroupGloo
from tft_pg.errors import CollectiveTimeoutError
from tft_pg.word import EndedExchange, WordExchange


class TalkingGroup:
    """A group of two whose other member says what this one says, but for what `other` says."""

    def __init__(self) -> None:
        self.inside = FakeGroup()
        self.rounds: list[int] = []
        self.timeouts: list[timedelta] = []
        self.other: tuple[int, ...] | None = None
        self.error: Exception | None = None
        self.lingered: list[timedelta] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)

    def exchange_word(self, words: Sequence[int], *, round_number: int, timeout: timedelta) -> EndedExchange:
        self.rounds.append(round_number)
        self.timeouts.append(timeout)
        self.meanwhile()
        if self.error is not None:
            raise self.error
        other, self.other = self.other or (1, 0, 0, 0, words[4]), None
        return EndedExchange(tuple(mine + theirs for mine, theirs in zip(words, other, strict=True)))

    def linger(self, timeout: timedelta) -> bool:
        self.lingered.append(timeout)
        return True


class StandingScript:
    """A script whose quorums may stand."""

    def __init__(self, *answers: Plan) -> None:
        self.inside = ScriptedCoordinator(answers)
        self.lates: list[tuple[QuorumKey, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)

    def vote(self, step: int, yes: bool, timeout: timedelta, *, stands: bool = False, **more: Any) -> Verdict:
        verdict = self.inside.vote(step, yes, timeout, **more)
        return replace(verdict, stands=stands and verdict.yes)

    def number_beats(self, number: Any) -> None:
        self.number = number

    def late(self, key: QuorumKey, step: int) -> None:
        self.lates.append((key, step))


class Pair:
    """A Manager in a quorum of two that may stand."""

    def __init__(self, *answers: Plan, **settings: Any) -> None:
        self.group = TalkingGroup()
        self.coordinator = StandingScript(*(replace(answer, lease_ms=60_000) for answer in answers))
        self.manager = Manager(
            self.group,
            lambda _: None,
            lambda: {"weight": torch.zeros(1)},
            coordinator=self.coordinator,  # type: ignore[arg-type]
            checkpoint_transport=MemoryTransport(),
            lighthouse_addr="localhost:1",
            hostname="localhost",
            **settings,
        )
        self.manager._parts.audit.step_begins = lambda: None  # type: ignore[method-assign]

    def step(self) -> bool:
        self.manager.start_quorum()
        self.manager.allreduce(torch.ones(2)).wait()
        return self.manager.should_commit()

    @property
    def num_asked(self) -> int:
        return len(self.coordinator.requests)


@pytest.fixture
def pair() -> Any:
    made: list[Pair] = []

    def make(*answers: Plan, **settings: Any) -> Pair:
        made.append(Pair(*answers, **settings))
        return made[-1]

    yield make
    for each in made:
        each.manager.shutdown()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_steady_steps_ask_once_and_say_one_word_each(pair: Any, asynchronous: bool) -> None:
    it = pair(plan_of(7, size=2), use_async_quorum=asynchronous)
    assert all(it.step() for _ in range(5))
    assert it.num_asked == 1
    assert it.coordinator.requests[0].lease_ms == 60_000
    assert it.group.rounds == [0, 1, 2, 3, 4]
    assert [purpose for _, _, _, purpose in it.coordinator.votes] == [Purpose.COMMIT] * 5


def test_the_status_says_that_a_rank_waits_for_the_others_words(pair: Any) -> None:
    it = pair(plan_of(7, size=2))
    seen: list[ManagerStatus] = []
    it.group.meanwhile = lambda: seen.append(it.manager.status())
    assert it.step()
    (status,) = seen
    assert status.phase is ManagerPhase.VOTING
    assert status.waits_for == "the end of the step at the other replicas: the other members of quorum 7: replica_1"


def test_a_recall_and_a_wish_of_another_ask_after_that_step(pair: Any) -> None:
    it = pair(plan_of(7, size=2), plan_of(8, size=2, step=2), plan_of(9, size=2, step=3))
    assert it.step()
    it.coordinator.listener(QuorumNews(QuorumKey(7, 7), recalled=True))
    assert it.step()
    assert it.num_asked == 1
    assert it.step()
    assert it.num_asked == 2


def test_a_word_that_fails_is_logged_and_aborts_before_the_next_request(pair: Any) -> None:
    it = pair(plan_of(7, size=2), plan_of(8, size=2, step=1))
    assert it.step()
    it.group.error = RuntimeError("the connection has ended")
    assert not it.step()
    assert it.group.num_aborts == 1
    it.group.error = None
    assert it.step()
    assert it.coordinator.requests[1].needs_configure


def test_a_word_of_an_error_is_not_waited_for_as_long_as_another(pair: Any) -> None:
    it = pair(plan_of(7, size=2), plan_of(8, size=2, step=1), timeout=timedelta(seconds=30))
    assert it.step()
    it.manager.start_quorum()
    it.manager.allreduce(torch.ones(2)).wait()
    it.manager.report_error(RuntimeError("no room"))
    assert not it.manager.should_commit()
    assert it.group.timeouts == [timedelta(seconds=30), timedelta(seconds=1)]


def test_a_late_round_is_told_and_beats_are_numbered(pair: Any) -> None:
    it = pair(plan_of(7, size=2))
    assert it.coordinator.number() == 0, "no quorum stands yet"
    assert it.step()
    assert it.coordinator.number() == 1
    it.manager._life._standing.late(QuorumKey(7, 7), 1)
    assert it.coordinator.lates == [(QuorumKey(7, 7), 1)]


def test_whoever_ends_soon_after_its_last_word_lingers(pair: Any) -> None:
    it = pair(plan_of(7, size=2))
    assert it.step()
    it.manager.shutdown()
    (left,) = it.group.lingered
    assert timedelta() < left <= timedelta(seconds=1)


def test_whoever_ends_inside_a_step_does_not_linger(pair: Any) -> None:
    """The others wait for it: a loop that raises, or is interrupted, costs them no second."""
    it = pair(plan_of(7, size=2))
    assert it.step()
    it.manager.start_quorum()
    it.manager.shutdown()
    assert it.group.lingered == []


def test_whoever_has_no_word_does_not_linger(pair: Any) -> None:
    it = pair(plan_of(7, size=2))
    it.group.error = RuntimeError("the connection has ended")
    assert not it.step()
    it.manager.shutdown()
    assert it.group.lingered == []


class Foreign(dist.ProcessGroup):
    """A group of torch's kind, of some backend."""

    def __init__(self, backend: str) -> None:
        super().__init__(0, 1)
        self.backend = backend

    def getBackendName(self) -> str:  # torch's name
        return self.backend


def test_foreign_groups_take_part_where_they_reduce_on_the_cpu() -> None:
    assert exchange_of(Foreign("torchft-gloo")) is not None  # type: ignore[arg-type]
    assert exchange_of(Foreign("torchft-nccl")) is None  # type: ignore[arg-type]
    assert exchange_of(FakeGroup()) is None
    group = ProcessGroupGloo()
    assert exchange_of(group) == group.exchange_word


class ByAllreduce(ProcessGroupDummy):  # type: ignore[misc]  # it is final, and this is a test
    """A group of ours that has no connections for words."""

    exchange_word = ProcessGroup.exchange_word


def test_words_by_an_allreduce_have_an_order_whoever_wraps_their_group() -> None:
    def is_ordered(group: Any) -> bool:
        shared: Any = SimpleNamespace(
            config=SimpleNamespace(timeout=timedelta(1), timeouts=Timeouts()), clock=SystemClock(), step=None
        )
        return ControlWords(shared, group).is_ordered

    for make, ordered in [(ProcessGroupGloo, False), (ByAllreduce, True)]:
        assert is_ordered(make()) is ordered
        assert is_ordered(EventInjector().group(make())) is ordered
        assert is_ordered(ErrorSwallowingProcessGroupWrapper(make())) is ordered
    assert not is_ordered(FakeGroup())
    assert is_ordered(Foreign("torchft-gloo"))


def test_words_by_an_allreduce_are_refused_beside_syncs_in_flight(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for ordered in (False, True):
        it = pair(plan_of(7, size=2))
        monkeypatch.setattr(ControlWords, "is_ordered", property(lambda _, ordered=ordered: ordered))
        it.manager.strategy.attach("DiLoCo")
        it.manager.start_quorum()
        it.manager.wait_quorum()
        assert (it.coordinator.requests[0].lease_ms is None) is ordered


def test_a_job_that_stands_knows_by_the_time_of_a_newcomer_that_its_state_may_be_taken_early(pair: Any) -> None:
    lineage = initial_lineage("default")
    for step in range(1, 12):
        lineage = fold_lineage(lineage, QuorumKey(7, 7), step)
    it = pair(plan_of(7, size=2), plan_of(8, step=11, lineage=lineage, size=2, healing=[1]))
    assert all(it.step() for _ in range(10))
    it.coordinator.listener(NewcomerAsks("replica_1"))
    it.coordinator.listener(QuorumNews(QuorumKey(7, 7), recalled=True))
    assert it.step()
    transport = it.manager._parts.shared.transport
    assert (it.num_asked, transport.staged) == (1, [])
    it.manager.start_quorum()
    it.manager.wait_quorum()
    assert it.num_asked == 2
    assert [key.step for key in transport.shelf] == [11], "it is offered before the forward"


class LateWord(WordExchange):
    """A word whose sum comes when the test says so."""

    def __init__(self, sums: tuple[int, ...]) -> None:
        self.comes = threading.Event()
        self.sums = sums

    def wait(self) -> tuple[int, ...]:
        assert self.comes.wait(20)
        return self.sums


@pytest.mark.parametrize("end", ["comes", "fails", "never"])
def test_who_recovers_in_a_sync_speaks_before_it_takes_its_state(
    pair: Any, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    plan = plan_of(7, step=5, lineage=9, size=2, rank=1, healing=[1])
    timeout = timedelta(seconds=0.2 if end == "never" else 20)
    it = pair(plan, plan_of(8, step=5, lineage=9, size=2, rank=1), timeout=timeout)
    own = {"step": 5, "batches_committed": 10, "lineage": f"{9:016x}"}
    state = {"user": {"default": {"weight": torch.ones(1)}}, "tft": own}
    it.manager._parts.shared.transport.shelf[state_key(plan)] = state
    words: list[tuple[int, ...]] = []
    late: list[LateWord] = []

    def exchange(values: Sequence[int], *, round_number: int, timeout: timedelta) -> WordExchange:
        assert it.manager.status().step == 0, "the state has not come"
        words.append(tuple(values))
        assert timeout > timedelta(minutes=10), "the others train until their syncs end"
        late.append(LateWord((2, 0, 0, 1, state_check(5, 9)) if end != "fails" else (1, 0, 0, 1, state_check(5, 9))))
        return late[-1]

    monkeypatch.setattr(it.manager._parts.control_words, "_exchange", exchange)
    it.manager.start_quorum(use_async_quorum=True)
    it.manager.wait_quorum()
    it.manager.strategy.reduce_in_sync(torch.ones(2))
    assert it.manager.strategy.exchange_state()
    assert words == [(1, 0, 0, 1, 0)]
    assert it.manager.current_step() == 5
    if end != "never":
        late[0].comes.set()
    assert it.manager.should_commit() is (end == "comes")
    late[0].comes.set()
    assert len(words) == 1
    it.manager.shutdown()
    assert "tft-word" not in [thread.name for thread in threading.enumerate()]


def test_a_word_that_failed_by_a_time_out_is_told_as_it_failed(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is a TimeoutError too, and is not the wait of this rank at the end of its sync."""
    it, error = pair(plan_of(7, size=2)), CollectiveTimeoutError("the group's own")

    def exchange(*_: Any, **__: Any) -> WordExchange:
        raise error

    control_words = it.manager._parts.control_words
    monkeypatch.setattr(control_words, "_exchange", exchange)
    control_words.send(do.SendWord(0, QuorumKey(7, 7), (1, 0, 0, 1, 0), 4, hears=False))
    assert control_words.hear(do.HearWord(3, QuorumKey(7, 7), 4)) == on.WordEnded(3, None, error)


def test_who_can_not_say_all_wishes_in_time_says_no_lease() -> None:
    def lease(coordinator: Any, **settings: Any) -> int | None:
        config = from_environment(
            config_of(None, {"lighthouse_addr": "localhost:1", **settings}), {}, own_host=lambda: "localhost"
        )
        return lease_of(config, TalkingGroup(), coordinator)  # type: ignore[arg-type]

    assert lease(StandingScript()) == 60_000
    assert lease(StandingScript(), lease=timedelta(seconds=20)) == 20_000
    assert lease(StandingScript(), lease=timedelta()) == 0
    assert lease(StandingScript(), rank0_synchronization_only=True) is None
    assert lease(ScriptedCoordinator(())) is None


def test_the_lease_is_an_argument_or_a_variable() -> None:
    def lease(variables: dict[str, str], **settings: Any) -> int:
        config = config_of(None, {"lighthouse_addr": "localhost:1", **settings})
        return from_environment(config, variables, own_host=lambda: "localhost").timeouts.lease_ms

    assert lease({"TFT_LEASE_SEC": "30"}) == 30_000
    assert lease({"TFT_LEASE_SEC": "0"}) == 0
    assert lease({"TFT_LEASE_SEC": "30"}, lease=timedelta(seconds=20)) == 20_000
    with pytest.raises(ConfigError, match="lease_ms"):
        lease({}, lease=timedelta(seconds=1))
    with pytest.raises(ConfigError, match=r"TFT_LEASE_SEC.*or 0 to ask in every step"):
        lease({"TFT_LEASE_SEC": "long"})
