"""Faults on demand: each action at each place, in one process, where a kill is a call that a test notes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from tft_algos import ConfigError, DistributedDataParallel, Manager, Optimizer, UsageError
from tft_algos.testing import (
    Action,
    EventInjector,
    FakeGroup,
    Fault,
    FaultNotInjectedError,
    InjectedError,
    MemoryTransport,
    Place,
    ScriptedCoordinator,
    plan_of,
)
from tft_algos.testing.injector.injector import WRAPPED_BY
from tft_ckpt import HTTPTransport, StateUnavailableError, StateUnsupportedError
from tft_coord.core.types import Plan, QuorumKey, RankRequest, Verdict
from tft_coord.errors import RequestTimeoutError
from tft_pg.errors import ConfigureError, PeerDisconnectedError
from tft_pg.word import EndedExchange

A_KEY = QuorumKey(1, 1)
OURS = [Place.QUORUM, Place.CONFIGURE, Place.REDUCTION, Place.VOTE, Place.SERVING, Place.HEALING]
USERS = [Place.FORWARD, Place.BACKWARD, Place.OPTIMIZER]


def fault(action: Action = Action.RAISE, place: Place = Place.VOTE, **fields: Any) -> Fault:
    return Fault(action=action, place=place, **({"replica": "a"} | fields))


class Rig:
    """A trainer whose Manager is put together from struck parts, with stand-ins inside of them."""

    def __init__(self, *answers: Any, faults: tuple[Fault, ...] = (), name: str = "a", **settings: Any) -> None:
        self.told: list[Fault] = []
        self.injector = EventInjector(*faults, on_strike=self.told.append)
        self.group = FakeGroup(others=1.0)
        self.inside = ScriptedCoordinator(answers)
        self.transport = MemoryTransport()
        self.module = torch.nn.Linear(2, 1)
        self.sgd = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.manager = Manager(
            self.injector.group(self.group),
            self.module.load_state_dict,
            self.module.state_dict,
            coordinator=self.injector.coordinator(self.inside),
            checkpoint_transport=self.injector.transport(self.transport),
            lighthouse_addr="localhost:1",
            hostname="localhost",
            replica_id=name,
            **settings,
        )
        self.ddp = DistributedDataParallel(self.manager, self.injector.module(self.module))
        self.optimizer = Optimizer(self.manager, self.injector.optimizer(self.sgd))
        self.injector.attach(self.manager)

    def step(self) -> tuple[bool, str]:
        """One step as users write it. Returns: whether it was committed, and its error as text."""
        before = self.manager.current_step()
        self.optimizer.zero_grad()
        self.ddp(torch.ones(3, 2)).sum().backward()
        error = self.manager.errored()
        self.optimizer.step()
        return self.manager.current_step() > before, "" if error is None else str(error.original_exception)


@pytest.fixture
def rigs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHFT_TIMEOUT_SEC"):
        monkeypatch.delenv(name, raising=False)
    made: list[Rig] = []

    def make(*answers: Any, **settings: Any) -> Rig:
        made.append(Rig(*answers, **settings))
        return made[-1]

    yield make
    for rig in made:
        rig.manager.shutdown()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tft-")]


@pytest.fixture
def managers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Manager]]:
    """Makes Managers of which one part is wrapped."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHFT_TIMEOUT_SEC"):
        monkeypatch.delenv(name, raising=False)
    made: list[Manager] = []

    def make(injector: EventInjector, wrapped: str, **settings: Any) -> Manager:
        plan = plan_of(1, size=2, rank=1, healing=[1])
        parts: dict[str, Any] = {
            "group": FakeGroup(),
            "coordinator": ScriptedCoordinator([plan]),
            "transport": MemoryTransport(),
        }
        parts[wrapped] = getattr(injector, wrapped)(parts[wrapped])
        module = torch.nn.Linear(2, 1)
        manager = Manager(
            parts["group"],
            module.load_state_dict,
            module.state_dict,
            coordinator=parts["coordinator"],
            checkpoint_transport=parts["transport"],
            lighthouse_addr="localhost:1",
            hostname="localhost",
            **settings,
        )
        made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.shutdown()


def whole_step(manager: Manager) -> bool:
    manager.start_quorum()
    manager.allreduce(torch.ones(2)).wait()
    return manager.should_commit()


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What would have been sent: (pid, signal)."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    return sent


def answers_that_reach(place: Place) -> list[Any]:
    """Two quorums: in the first the place is come to."""
    if place is Place.SERVING:
        return [plan_of(1, size=2, healing=[1]), A_KEY]
    if place is Place.HEALING:
        return [plan_of(1, step=5, rank=1, size=2, healing=[1]), plan_of(2, step=5, rank=1, size=2, healing=[1])]
    return [plan_of(1, size=2), plan_of(2, size=2)]


# --- what can be asked for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"action": "kill"}, "action is 'kill'; give an Action, one of FAIL, RAISE, HANG, STOP, KILL"),
        ({"place": "vote"}, "place is 'vote'; give a Place, one of QUORUM, CONFIGURE, FORWARD, BACKWARD, "),
        ({"replica": ""}, "replica is ''; give the name"),
        ({"step": -1}, "step is -1; give a whole number, at least 0"),
        ({"step": True}, "step is True; give a whole number, at least 0"),
        ({"rank": None}, "rank is None; give a whole number, at least 0"),
        ({"hang_for": timedelta()}, "hang_for is .*; give a timedelta above zero"),
        ({"with_children": 1}, "with_children is 1; give True or False"),
        ({"with_children": True}, "with_children belongs to STOP and action is RAISE"),
    ],
)
def test_a_fault_that_can_not_be_is_refused_in_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        Fault(**({"action": Action.RAISE, "place": Place.VOTE, "replica": "a"} | fields))
    assert "\n" not in str(refused.value)


def test_what_is_no_fault_is_refused() -> None:
    with pytest.raises(ConfigError, match="a fault is a str; give a Fault"):
        EventInjector("kill a")  # type: ignore[arg-type]


def test_a_fault_says_what_it_is() -> None:
    assert fault(step=7, rank=1).describe() == (
        "injected: raise at vote, replica a, rank 1, step 7; a test asked for it"
    )
    assert "the first time" in fault().describe()


def test_an_injector_without_a_manager_says_so() -> None:
    injector = EventInjector(fault(place=Place.FORWARD))
    with pytest.raises(UsageError, match=r"call injector\.attach\(manager\)"):
        injector.module(torch.nn.Linear(1, 1))(torch.ones(1))


@pytest.mark.parametrize("place", Place)
def test_a_fault_for_a_part_that_was_not_wrapped_is_refused(place: Place) -> None:
    method = WRAPPED_BY[place]
    injector = EventInjector(fault(place=place), fault(place=place, replica="b"), fault(place=place, rank=1))
    parts: dict[str, Any] = {
        "group": FakeGroup(),
        "coordinator": ScriptedCoordinator([]),
        "transport": MemoryTransport(),
        "module": torch.nn.Linear(1, 1),
        "optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]),
    }
    for name, part in parts.items():
        if name != method:
            getattr(injector, name)(part)
    with pytest.raises(
        UsageError, match=rf"at {place.name} of replica a.* not wrapped.* injector\.{method} "
    ) as raised:
        injector.attach(Somebody())
    assert "\n" not in str(raised.value)
    getattr(injector, method)(parts[method])
    injector.attach(Somebody())


def test_a_fault_that_comes_later_is_refused_too() -> None:
    injector = EventInjector()
    injector.attach(Somebody())
    injector.inject(fault(replica="b"))
    with pytest.raises(UsageError, match=r"at VOTE of replica a.* not wrapped"):
        injector.inject(fault())
    injector.coordinator(ScriptedCoordinator([]))
    injector.inject(fault())


@pytest.mark.parametrize("wrapped", ["group", "coordinator", "transport"])
@pytest.mark.parametrize("faults", [(), (fault(replica="b"),)], ids=["no fault", "a fault of another"])
def test_an_attach_that_was_forgotten_is_raised_in_the_first_step(
    managers: Any, use_async_quorum: bool, wrapped: str, faults: tuple[Fault, ...]
) -> None:
    manager = managers(EventInjector(*faults), wrapped, use_async_quorum=use_async_quorum)
    with pytest.raises(UsageError, match=r"call injector\.attach\(manager\)"):
        whole_step(manager)


def test_who_demands_that_all_have_struck_learns_which_have_not(rigs: Any) -> None:
    struck, mistyped, never = fault(Action.FAIL, Place.QUORUM), fault(replica="A"), fault(step=99)
    rig = rigs(plan_of(1, size=2), faults=(struck, mistyped, never))
    rig.step()
    with pytest.raises(FaultNotInjectedError) as raised:
        rig.injector.check_all_struck()
    assert raised.value.faults == (mistyped, never)
    assert str(raised.value) == (
        "faults that did not strike: injected: raise at vote, replica A, rank 0, the first time, and injected: raise "
        "at vote, replica a, rank 0, step 99; check whether that replica and rank reached that place and step"
    )


def test_what_has_struck_elsewhere_counts(rigs: Any) -> None:
    ours, other = fault(Action.FAIL, Place.QUORUM), fault(replica="b")
    rig = rigs(plan_of(1, size=2), faults=(ours, other, other))
    rig.step()
    with pytest.raises(FaultNotInjectedError):
        rig.injector.check_all_struck(other)
    rig.injector.check_all_struck(other, other)


# --- whom it strikes --------------------------------------------------------------------------------------------------


def test_another_replica_rank_or_step_is_not_struck(rigs: Any) -> None:
    others = (fault(replica="b"), fault(rank=1), fault(step=2), fault(place=Place.SERVING))
    rig = rigs(plan_of(1, size=2), A_KEY, faults=others)
    assert [rig.step(), rig.step()] == [(True, ""), (True, "")]
    assert rig.injector.struck == ()


def test_a_fault_strikes_at_its_step_and_once(rigs: Any) -> None:
    asked = fault(Action.FAIL, Place.QUORUM, step=1)
    rig = rigs(plan_of(1, size=2), A_KEY, A_KEY, faults=(asked,))
    assert rig.step() == (True, "")
    assert rig.step() == (False, asked.describe())
    assert [rig.step(), rig.step()] == [(True, ""), (True, "")]
    assert rig.injector.struck == tuple(rig.told) == (asked,)


def test_the_same_fault_asked_for_twice_strikes_twice(rigs: Any) -> None:
    asked = fault(Action.FAIL, Place.QUORUM)
    rig = rigs(plan_of(1, size=2), faults=(asked, asked))
    assert [rig.step()[0] for _ in range(3)] == [False, False, True]


def test_what_torchfts_users_write(rigs: Any) -> None:
    rig = rigs(plan_of(1, size=2), plan_of(2, size=2))
    rig.injector.fail_allreduce_at("a", 0).fail_at("a", 1)
    assert rig.step()[0] is False
    assert rig.step()[0] is True
    with pytest.raises(InjectedError, match="raise at forward, replica a, rank 0, step 1"):
        rig.step()


# --- raise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [Place.QUORUM, Place.CONFIGURE, Place.REDUCTION, Place.HEALING])
def test_raised_in_ours_it_is_an_error_of_the_step(rigs: Any, place: Place) -> None:
    asked = fault(Action.RAISE, place)
    rig = rigs(*answers_that_reach(place), faults=(asked,))
    committed, error = rig.step()
    assert not committed
    assert asked.describe() in (error or str(rig.manager.errored()))
    assert rig.injector.struck == (asked,)


@pytest.mark.parametrize("place", USERS)
def test_raised_in_the_users_code_it_comes_out_there(rigs: Any, place: Place) -> None:
    rig = rigs(plan_of(1, size=2), faults=(fault(Action.RAISE, place),))
    with pytest.raises(InjectedError) as raised:
        rig.step()
    assert raised.value.fault.place is place


# --- standing quorums -------------------------------------------------------------------------------------------------


class Standing:
    """A coordinator whose quorums may stand, and a group of two that exchanges words; each notes what it was asked."""

    def __init__(self) -> None:
        self.group = FakeGroup(others=1.0)
        self.words: list[tuple[int, ...]] = []
        self.requests: list[RankRequest] = []
        self.votes: list[bool] = []
        self.lates: list[QuorumKey] = []

    def exchange_word(self, words: Sequence[int], *, round_number: int, timeout: timedelta) -> EndedExchange:
        self.words.append(tuple(words))
        return EndedExchange(tuple(mine + other for mine, other in zip(words, (1, 0, 0, 0, words[4]), strict=True)))

    def quorum(self, request: RankRequest, timeout: timedelta) -> Plan | QuorumKey:
        self.requests.append(request)
        plan = plan_of(len(self.requests), size=2, step=request.step, lineage=request.lineage or 0)
        return replace(plan, lease_ms=request.lease_ms)

    def vote(self, step: int, yes: bool, timeout: timedelta, *, stands: bool = False, **more: Any) -> Verdict:
        self.votes.append(stands)
        return Verdict(yes, stands=yes and stands)

    def number_beats(self, number: Callable[[], int]) -> None:
        self.beat = number

    def late(self, key: QuorumKey, step: int) -> None:
        self.lates.append(key)


class StandingParts:
    """The two as one part of a Manager each; what they do not say themselves a stand-in says."""

    def __init__(self, says: Standing, inside: Any) -> None:
        self._says, self._inside = says, inside

    def __getattr__(self, name: str) -> Any:
        return getattr(self._says if name in vars(Standing) else self._inside, name)


class StandingRig:
    """As `Rig`, of a replica whose quorums stand."""

    def __init__(self, *faults: Fault) -> None:
        self.says = Standing()
        self.injector = EventInjector(*faults)
        coordinator: Any = StandingParts(self.says, ScriptedCoordinator([]))
        self.manager = Manager(
            self.injector.group(StandingParts(self.says, self.says.group)),  # type: ignore[arg-type]
            lambda _: None,
            lambda: {"weight": torch.zeros(1)},
            coordinator=self.injector.coordinator(coordinator),
            checkpoint_transport=MemoryTransport(),
            lighthouse_addr="localhost:1",
            hostname="localhost",
            replica_id="a",
        )
        self.manager._parts.audit.step_begins = lambda: None  # type: ignore[method-assign]
        self.injector.attach(self.manager)

    def steps(self, number: int) -> list[bool]:
        return [whole_step(self.manager) for _ in range(number)]


@pytest.fixture
def standing() -> Iterator[Callable[..., StandingRig]]:
    made: list[StandingRig] = []

    def make(*faults: Fault) -> StandingRig:
        made.append(StandingRig(*faults))
        return made[-1]

    yield make
    for rig in made:
        rig.manager.shutdown()


def test_struck_parts_stand_like_those_inside(standing: Any) -> None:
    rig = standing(fault(Action.FAIL, Place.REDUCTION, step=9))
    assert rig.steps(5) == [True] * 5
    assert [request.lease_ms for request in rig.says.requests] == [60_000]
    assert rig.says.votes == [True] * 5
    rig.manager._life._standing.late(A_KEY, 1)
    assert rig.says.lates == [A_KEY]


def test_the_job_asks_in_every_step_until_a_request_is_struck(standing: Any) -> None:
    asked = fault(Action.FAIL, Place.QUORUM, step=2)
    rig = standing(asked)
    assert rig.steps(6) == [True, True, False, True, True, True]
    assert [(request.step, request.lease_ms) for request in rig.says.requests] == [(0, 0), (1, 0), (2, 60_000)]
    assert rig.injector.struck == (asked,)


def test_a_fault_at_a_request_that_comes_later_ends_a_standing_quorum_with_a_beat(standing: Any) -> None:
    rig = standing()
    assert rig.steps(3) == [True, True, True]
    asked = fault(Action.FAIL, Place.QUORUM)
    rig.injector.inject(asked)
    rig.injector.inject(fault(Action.FAIL, Place.QUORUM, step=1))  # that step is over
    rig.says.beat()
    assert rig.steps(3) == [True, False, True]
    assert [word[1] for word in rig.says.words] == [0, 0, 0, 1, 0]
    rig.says.beat()
    assert rig.steps(2) == [True, True]
    assert len(rig.says.requests) == 2


@pytest.mark.parametrize("action", [Action.FAIL, Action.RAISE])
def test_a_word_that_can_not_be_fails_its_round(standing: Any, action: Action) -> None:
    asked = fault(action, Place.WORD, step=1)
    rig = standing(asked)
    assert rig.steps(3) == [True, False, True]
    assert rig.says.requests[1].needs_configure
    assert rig.injector.struck == (asked,)


@pytest.mark.parametrize(("action", "number"), [(Action.KILL, signal.SIGKILL), (Action.STOP, signal.SIGSTOP)])
def test_the_process_is_killed_or_stopped_before_its_word(
    standing: Any, signals: list[tuple[int, int]], action: Action, number: int
) -> None:
    rig = standing(fault(action, Place.WORD))
    assert rig.steps(1) == [True]
    assert signals == [(os.getpid(), number)]


def test_who_hangs_before_its_word_says_it_afterwards(standing: Any) -> None:
    rig = standing(fault(Action.HANG, Place.WORD, hang_for=timedelta(milliseconds=1)))
    assert rig.steps(2) == [True, True]
    assert len(rig.says.words) == 2


# --- fail -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "error"),
    [
        (Place.QUORUM, RequestTimeoutError),
        (Place.CONFIGURE, ConfigureError),
        (Place.REDUCTION, PeerDisconnectedError),
        (Place.FORWARD, InjectedError),
        (Place.BACKWARD, InjectedError),
    ],
)
def test_each_place_fails_in_its_own_words(rigs: Any, place: Place, error: type[Exception]) -> None:
    asked = fault(Action.FAIL, place)
    rig = rigs(*answers_that_reach(place), faults=(asked,))
    rig.optimizer.zero_grad()
    rig.ddp(torch.ones(3, 2)).sum().backward()
    first = rig.manager.status().errors[0]
    assert (type(first), str(first)) == (error, asked.describe())
    assert not rig.manager.should_commit()
    assert rig.step() == (True, "")


@pytest.mark.parametrize("action", [Action.FAIL, Action.RAISE])
def test_a_reduction_that_can_not_be_breaks_its_group(rigs: Any, action: Action) -> None:
    """The others are in it, and must not wait for this one."""
    rig = rigs(plan_of(1, size=2), plan_of(2, size=2), faults=(fault(action, Place.REDUCTION),))
    assert rig.step()[0] is False
    assert rig.group.errored() is not None
    assert rig.step()[0] is True
    assert rig.inside.requests[1].needs_configure


@pytest.mark.parametrize(("action", "error"), [(Action.FAIL, RequestTimeoutError), (Action.RAISE, InjectedError)])
def test_a_vote_without_a_verdict_neither_steps_nor_goes_on(rigs: Any, action: Action, error: type[Exception]) -> None:
    rig = rigs(plan_of(1, size=2), faults=(fault(action, Place.VOTE),))
    before = rig.module.weight.clone()
    with pytest.raises(error, match="at vote"):
        rig.step()
    assert torch.equal(rig.module.weight, before)


def test_an_optimizer_that_fails_leaves_a_state_that_heals(rigs: Any) -> None:
    rig = rigs(plan_of(1, size=2), A_KEY, faults=(fault(Action.FAIL, Place.OPTIMIZER),))
    assert rig.step()[0] is True
    rig.step()
    assert rig.inside.requests[1].torn


@pytest.mark.parametrize("action", [Action.FAIL, Action.RAISE])
def test_a_source_that_can_not_serve_trains_on(rigs: Any, action: Action) -> None:
    rig = rigs(*answers_that_reach(Place.SERVING), faults=(fault(action, Place.SERVING),))
    assert rig.step() == (True, "")
    assert rig.injector.struck


def test_those_who_wait_for_a_source_that_fails_are_told() -> None:
    """The transport inside refuses a state by itself, which ends the wait for it."""
    source = HTTPTransport(timedelta(seconds=10), num_chunks=0, advertise_addr="localhost")
    injector = EventInjector(fault(Action.FAIL, Place.SERVING))
    struck = injector.transport(source)
    injector.attach(Somebody())
    try:
        with pytest.raises(StateUnsupportedError, match="fail at serving"):
            struck.send_checkpoint([1], 3, {}, timedelta(seconds=10))
        with pytest.raises(StateUnavailableError, match="fail at serving"):
            source.recv_checkpoint(0, source.metadata(), 3, timedelta(seconds=10))
    finally:
        source.shutdown()


def test_a_healing_that_fails_is_tried_again(rigs: Any) -> None:
    asked = fault(Action.FAIL, Place.HEALING)
    rig = rigs(*answers_that_reach(Place.HEALING), faults=(asked,))
    rig.optimizer.zero_grad()
    rig.ddp(torch.ones(3, 2)).sum().backward()
    assert not rig.manager.should_commit()
    assert rig.inside.requests[0].failed_heals == 0
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    assert rig.inside.requests[1].failed_heals == 1


# --- stop and kill ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", OURS + USERS)
@pytest.mark.parametrize(("action", "number"), [(Action.KILL, signal.SIGKILL), (Action.STOP, signal.SIGSTOP)])
def test_the_process_is_killed_or_stopped_at_each_place(
    rigs: Any, signals: list[tuple[int, int]], place: Place, action: Action, number: int
) -> None:
    asked = fault(action, place)
    rig = rigs(*answers_that_reach(place), faults=(asked,))
    rig.transport.shelf.clear()
    rig.step()
    assert signals == [(os.getpid(), number)]
    assert rig.injector.struck == tuple(rig.told) == (asked,)


def test_stopped_with_what_it_has_started(rigs: Any, signals: list[tuple[int, int]]) -> None:
    rig = rigs(plan_of(1, size=2), faults=(fault(Action.STOP, Place.VOTE, with_children=True),))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        rig.step()
    finally:
        child.communicate()
    assert (child.pid, signal.SIGSTOP) in signals[:-1]  # among others, where other tests have left their helpers
    assert signals[-1] == (os.getpid(), signal.SIGSTOP)


# --- hang -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", OURS + USERS)
def test_who_hangs_goes_on_when_that_is_over(rigs: Any, place: Place) -> None:
    rig = rigs(*answers_that_reach(place), faults=(fault(Action.HANG, place, hang_for=timedelta(milliseconds=1)),))
    if place is Place.HEALING:
        assert rig.step()[0] is False  # nobody has put the state there
    else:
        assert rig.step() == (True, "")
    assert rig.injector.struck


def test_a_shutdown_ends_what_hangs(rigs: Any) -> None:
    rig = rigs(plan_of(1, size=2), faults=(fault(Action.HANG, Place.QUORUM),))
    rig.manager.start_quorum()
    rig.manager.shutdown()
    assert rig.injector.struck


HANGS_AND_ENDS = """
import threading
from concurrent.futures import ThreadPoolExecutor
from tft_algos.testing import Action, EventInjector, Fault, Place

class Somebody:
    class strategy:
        class config:
            replica_id, rank = "a", 0
    def current_step(self): return 0

hanging = threading.Event()
injector = EventInjector(Fault(action=Action.HANG, place=Place.VOTE, replica="a"), on_strike=lambda _: hanging.set())
injector.coordinator(None)
injector.attach(Somebody())
ThreadPoolExecutor().submit(injector.reached, Place.VOTE)  # such threads are joined when a process ends
hanging.wait()
"""


def test_who_hangs_does_not_keep_its_process_from_ending() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS_AND_ENDS], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


class Somebody:
    """Replica a, rank 0, at step 3: all that an injector asks of a Manager."""

    class strategy:
        class config:
            replica_id, rank = "a", 0

    def current_step(self) -> int:
        return 3


def test_everything_else_of_a_part_is_passed_on(rigs: Any) -> None:
    injector = EventInjector()
    group, transport, inside = FakeGroup(), MemoryTransport(), ScriptedCoordinator([])
    struck_group: Any = injector.group(group)
    struck_transport: Any = injector.transport(transport)
    coordinator = injector.coordinator(inside)
    struck_group.set_timeout(timedelta(seconds=3))
    struck_group.abort()
    assert (group.timeout, struck_group.errored()) == (timedelta(seconds=3), group.errored())
    assert struck_group.calls is group.calls
    assert struck_transport.shelf is transport.shelf
    struck_transport.disallow_checkpoint()
    struck_transport.abort()
    listener = [].append
    coordinator.listen(listener)
    coordinator.healed(17)
    assert (coordinator.replica_id, coordinator.source_metadata("x", timedelta(seconds=1))) == ("replica_0", "x")
    assert (inside.listener, inside.healed_bytes) == (listener, 17)
    for part in (struck_group, struck_transport):
        part.shutdown()
    coordinator.close()
    assert (group.closed, transport.closed, inside.closed) == (True, True, True)


@pytest.mark.parametrize("needs_group", [False, True])
def test_a_wrapped_transport_needs_a_group_as_the_one_inside_does(needs_group: bool) -> None:
    inside = MemoryTransport()
    inside.needs_group = needs_group
    assert EventInjector().transport(inside).needs_group == needs_group
