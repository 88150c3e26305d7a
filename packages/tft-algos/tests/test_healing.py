"""Which sources a fetch asks, and for how long; the clock is the test's, and moves when somebody does not answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from tft_algos.errors import HealingError
from tft_algos.manager.recovery import healing
from tft_algos.manager.recovery.healing import Fetch, state_key
from tft_algos.manager.recovery.source_calls import silent_sources
from tft_algos.testing import MemoryTransport, plan_of
from tft_coord.core.step.starting import PREPARED_AFTER_ATTEMPTS
from tft_coord.core.types import QuorumKey, Via
from tft_coord.errors import RequestTimeoutError, UnreachableError


class Sources:
    """Source managers, as a coordinator reaches them. `asked` holds whom, and how long an answer was waited for, and
    `asked_beside` the same of the thread that asks for the further ones, whose clock is its own."""

    def __init__(self, silent: Sequence[str] = (), on_ask: Callable[[str], object] = lambda _: None) -> None:
        self.asked: list[tuple[str, float]] = []
        self.asked_beside: list[tuple[str, float]] = []
        self._clock = threading.local()
        self._silent = silent
        self._on_ask = on_ask

    @property
    def now(self) -> float:
        return float(getattr(self._clock, "now", 100.0))

    @now.setter
    def now(self, now: float) -> None:
        self._clock.now = now

    def source_metadata(self, address: str, timeout: timedelta) -> str:
        is_beside = threading.current_thread().name == "tft-heal-sources"
        asked = self.asked_beside if is_beside else self.asked
        asked.append((address, round(timeout.total_seconds(), 6)))
        self._on_ask(address)
        if address in self._silent:
            self.now += timeout.total_seconds()
            raise RequestTimeoutError(f"{address} did not answer")
        return f"at {address}"


def fetch_from(sources: Any, monkeypatch: pytest.MonkeyPatch, *, size: int = 4) -> tuple[Fetch, MemoryTransport]:
    """A fetch by the last of `size` replicas, from all others, that may take a minute."""
    monkeypatch.setattr(healing, "time", SimpleNamespace(monotonic=lambda: sources.now))
    plan = plan_of(7, step=3, rank=size - 1, size=size, healing=[size - 1])
    transport = MemoryTransport({state_key(plan): "state"})
    return (
        Fetch(plan, coordinator=sources, transport=transport, timeout=timedelta(seconds=60), received_before=0),
        transport,
    )


def test_all_that_answer_are_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Sources()
    fetch, transport = fetch_from(sources, monkeypatch, size=7)
    fetch.run()
    assert fetch.result() == "state"
    assert transport.received_from == [(0, "at replica_0", ["at replica_1", "at replica_2", "at replica_3"])]


def test_a_dead_second_source_costs_half_a_second_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Sources(silent=["replica_1", "replica_2"])
    fetch, transport = fetch_from(sources, monkeypatch)
    fetch.run()
    assert fetch.result() == "state"
    assert transport.received_from == [(0, "at replica_0", [])]
    assert (sources.asked, sources.asked_beside) == ([("replica_0", 1.0)], [("replica_1", 0.5)])


def test_the_first_is_waited_for_for_a_second_while_there_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Sources(silent=["replica_0"])
    fetch, transport = fetch_from(sources, monkeypatch)
    fetch.run()
    assert fetch.result() == "state"
    assert transport.received_from == [(1, "at replica_1", ["at replica_2"])]
    assert sources.asked == [("replica_0", 1.0), ("replica_1", 1.0)]
    assert list(fetch.silent) == ["replica_0"], "it is asked last from now on"
    assert fetch.metadata == {"replica_1": "at replica_1", "replica_2": "at replica_2"}


def test_who_was_lost_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Sources()
    fetch, transport = fetch_from(sources, monkeypatch)
    for name in ("replica_0", "replica_2"):
        fetch.source_lost(name)
    fetch.run()
    assert fetch.result() == "state"
    assert transport.received_from == [(1, "at replica_1", [])]
    assert {name for name, _ in sources.asked + sources.asked_beside} == {"replica_1"}


def test_a_loss_ends_the_attempts_with_that_source(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Sources(silent=["replica_0"], on_ask=lambda name: name == "replica_0" and fetch.source_lost(name))
    fetch, _ = fetch_from(sources, monkeypatch)
    fetch.run()
    assert fetch.result() == "state"
    assert [name for name, _ in sources.asked] == ["replica_0", "replica_1"]


def test_the_last_is_waited_for_as_long_as_the_healing_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Sources(silent=["replica_0"])
    fetch, _ = fetch_from(sources, monkeypatch, size=2)
    fetch.run()
    with pytest.raises(HealingError, match="returned the address of its state"):
        fetch.result()
    assert fetch.seconds == pytest.approx(60.0, abs=0.01)


def test_who_refuses_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        if name == "replica_1":
            raise UnreachableError("no")

    sources = Sources(on_ask=refuse)
    fetch, transport = fetch_from(sources, monkeypatch)
    fetch.run()
    assert transport.received_from == [(0, "at replica_0", ["at replica_2"])]


def test_bytes_are_reported_however_fast_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the lighthouse would take a replica that loads its state for one that has received nothing."""
    sources = Sources()
    reported: list[int] = []
    sources.healed = reported.append  # type: ignore[attr-defined]
    fetch, transport = fetch_from(sources, monkeypatch)
    receive = transport.recv_checkpoint

    def at_once(*args: Any, progress: Callable[[int, int], None], **named: Any) -> Any:
        for received in (0, 3, 5, 8):
            progress(received, 8)
        return receive(*args, **named)

    transport.recv_checkpoint = at_once  # type: ignore[method-assign]
    fetch.run()
    assert fetch.result() == "state"
    assert reported == [3, 8]


@pytest.mark.parametrize("attempts_later", [0, 1], ids=["before the next step", "later"])
def test_state_that_is_registered_right_after_a_healing_is_healed_too(rigs: Any, attempts_later: int) -> None:
    shelf: dict[Any, Any] = {}
    assert rigs(plan_of(7, size=2, healing=[1]), checkpoint_transport=MemoryTransport(shelf)).step()
    again = [QuorumKey(7, 7)] * (1 + attempts_later)
    member = rigs(plan_of(7, rank=1, size=2, healing=[1]), *again, checkpoint_transport=MemoryTransport(shelf))
    assert member.step()
    for _ in range(attempts_later):
        assert member.step()
    member.manager.register_state_dict_fn("late", lambda _: None, lambda: 1)
    member.step()
    # Whoever registers long after a healing has the piece as everybody else has it.
    assert member.coordinator.requests[-1].torn == (attempts_later == 0)


@pytest.mark.parametrize("heals", [False, True])
def test_who_is_new_gets_ready_to_serve_when_nobody_waits_for_it_any_more(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, heals: bool
) -> None:
    prepared: list[int] = []
    monkeypatch.setattr(MemoryTransport, "prepare_to_send", lambda _: prepared.append(member.manager.strategy.attempt))
    shelf: dict[Any, Any] = {}
    healing = [1] if heals else []
    assert rigs(plan_of(7, size=2, healing=healing), checkpoint_transport=MemoryTransport(shelf)).step()
    again = [QuorumKey(7, 7)] * (2 + PREPARED_AFTER_ATTEMPTS)
    member = rigs(plan_of(7, rank=1, size=2, healing=healing), *again, checkpoint_transport=MemoryTransport(shelf))
    for _ in range(3 + PREPARED_AFTER_ATTEMPTS):
        assert member.step()
    assert prepared == [1 + PREPARED_AFTER_ATTEMPTS]


# --- sources that answer no connection -----------------------------------------------------------------------------


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield unused.getsockname()[1]


class Places:
    """Source managers that say where their state is, or are asked in vain."""

    def __init__(self, *places: str) -> None:
        self._places = {f"replica_{rank}": place for rank, place in enumerate(places)}

    def source_metadata(self, address: str, timeout: timedelta) -> str:
        return self._places[address]


def test_a_fetch_ends_when_no_source_answers_a_connection(monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
    """It would wait for heal_timeout, however often others could be asked meanwhile."""
    monkeypatch.setattr(healing, "UNHEARD_S", 0.05)
    plan = plan_of(7, step=3, rank=2, size=3, healing=[2])
    place = f"http://127.0.0.1:{closed_port}/secret"
    coordinator: Any = Places(place, place)
    fetch = Fetch(
        plan,
        coordinator=coordinator,
        transport=MemoryTransport(endless=True),
        timeout=timedelta(seconds=60),
        received_before=0,
    )
    fetch.start()
    with pytest.raises(HealingError, match="no source accepts a connection: replica replica_0 at 127") as caught:
        fetch.result()
    fetch.cancel()
    why = f"127.0.0.1 port {closed_port}: connection refused"
    assert fetch.unreached == {"replica_0": why, "replica_1": why}
    assert "secret" not in str(caught.value)


def test_a_fetch_goes_on_while_one_source_answers(monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
    monkeypatch.setattr(healing, "UNHEARD_S", 0.05)
    plan = plan_of(7, step=3, rank=2, size=3, healing=[2])
    called = threading.Event()
    ask = healing.silent_sources

    def calls(*args: Any, **named: Any) -> dict[str, str]:
        found = ask(*args, **named)
        called.set()
        return found

    monkeypatch.setattr(healing, "silent_sources", calls)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        coordinator: Any = Places(f"http://127.0.0.1:{closed_port}", f"http://127.0.0.1:{listener.getsockname()[1]}")
        fetch = Fetch(
            plan,
            coordinator=coordinator,
            transport=MemoryTransport(endless=True),
            timeout=timedelta(seconds=60),
            received_before=0,
        )
        fetch.start()
        assert called.wait(20)
        assert fetch._error is None
        fetch.cancel()
    assert fetch.unreached == {}


def test_a_fetch_that_failed_by_itself_says_who_answers_no_connection(closed_port: int) -> None:
    plan = plan_of(7, step=3, rank=2, size=3, healing=[2])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        coordinator: Any = Places(f"http://127.0.0.1:{closed_port}", f"http://127.0.0.1:{listener.getsockname()[1]}")
        fetch = Fetch(
            plan,
            coordinator=coordinator,
            transport=MemoryTransport(),
            timeout=timedelta(seconds=60),
            received_before=0,
        )
        fetch.run()
    assert list(fetch.unreached) == ["replica_0"]


@pytest.mark.parametrize("address", ["memory", "", "http://[::1", "host:port", "nowhere"])
def test_an_address_that_is_none_is_not_called(address: str) -> None:
    assert silent_sources({"replica_0": address}, within_s=1.0, goes_on=lambda: True) == {}


def test_a_name_that_nobody_knows_is_no_answer() -> None:
    found = silent_sources({"replica_0": "state.invalid:80"}, within_s=1.0, goes_on=lambda: True)
    assert "the name can't be resolved" in found["replica_0"]


def test_a_manager_reports_the_sources_that_answer_no_connection(rigs: Any, closed_port: int) -> None:
    plan = plan_of(7, step=3, rank=1, size=2, healing=[1])
    rig = rigs(plan, plan_of(8, step=3, rank=1, size=2, healing=[1]))
    rig.coordinator.source_metadata = lambda address, timeout: f"http://127.0.0.1:{closed_port}"
    assert not rig.step() or rig.manager.current_step() == 0
    rig.manager.start_quorum()
    rig.manager.wait_quorum()
    (said,) = rig.coordinator.requests[1].unreached
    assert (said.replica_id, said.via) == ("replica_0", Via.STATE)
    assert "connection refused" in said.why
