"""Which of its addresses a machine is reached by, whatever its own name means to itself."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tft_pg import ConfigureError, ProcessGroup, ProcessGroupGloo
from tft_pg.backends import addresses, gloo
from tft_pg.backends.addresses import address_towards, loopback_of, own_name_is_loopback
from tft_pg.backends.gloo import _Published
from tft_pg.backends.gloo_place import ListeningPlace
from tft_pg.testing import Bench

LOOK_UP = socket.getaddrinfo
NOBODYS = "203.0.113.1"  # reserved for documentation


def resolve(monkeypatch: pytest.MonkeyPatch, name: str, *found: str) -> None:
    """Let a name mean these addresses to this machine; none: nothing."""

    def look_up(host: str, port: int | None, **wishes: Any) -> list[Any]:
        if host == name and not found:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [place for each in (found if host == name else (host,)) for place in LOOK_UP(each, port, **wishes)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["127.0.1.1"], True),
        (["::1", "127.0.0.1"], True),
        ([], True),
        ([NOBODYS], True),
        ([NOBODYS, "127.0.0.1"], True),
        (["0.0.0.0"], False),  # whatever can be listened on
        (["0.0.0.0", "127.0.0.1"], False),
    ],
)
def test_an_own_name_that_torch_would_listen_on_loopback_for(
    found: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(monkeypatch, socket.gethostname(), *found)
    assert own_name_is_loopback() is expected


def test_the_address_is_that_of_the_way_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_OUTSIDE", ())
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"
    assert address_towards("::1", 1) == "::1"
    resolve(monkeypatch, "node-a")
    with pytest.raises(OSError, match="no such name"):
        address_towards("node-a", 1)


def test_a_name_that_means_loopback_only_here_gives_the_address_to_the_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, "node-a", "127.0.0.1")
    monkeypatch.setattr(addresses, "_OUTSIDE", (("node-b", 9), ("::1", 9)))  # to the first no way leads
    monkeypatch.setattr(addresses, "_towards", without_way("node-b", addresses._towards))
    assert address_towards("node-a", 1) == "::1"
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"
    monkeypatch.setattr(addresses, "_OUTSIDE", ())
    assert address_towards("node-a", 1) == "127.0.0.1"


def without_way(to: str, towards: Any) -> Any:
    def way(host: str, port: int) -> str:
        if host == to:
            raise OSError("Network is unreachable")
        return str(towards(host, port))

    return way


def test_loopback_is_told_by_what_it_means_everywhere() -> None:
    assert [loopback_of(host) for host in ("localhost", "127.0.1.1", "::1", "10.0.0.1", "node-a")] == [
        *("127.0.0.1", "127.0.0.1", "::1", None, None)
    ]


# --- where Gloo listens --------------------------------------------------------------------------------------------


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Its store is at 127.0.0.1, which counts as another machine's."""
    monkeypatch.setattr(gloo, "loopback_of", lambda host: None)
    monkeypatch.setattr(gloo, "address_towards", lambda host, port: "127.0.0.3")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with Bench(ProcessGroupGloo, timeout=timedelta(seconds=20)) as bench:
        yield bench


def listener(group: ProcessGroup) -> str:
    store = group._live._torch_group.get_group_store()  # type: ignore[attr-defined]
    return _Published.read(store.get(f"0/{group.rank()}")).endpoint.address


def test_gloo_listens_on_the_way_to_the_store_where_its_own_name_is_loopback(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(gloo, "own_name_is_loopback", lambda: not asked.append(True))  # type: ignore[func-returns-value]
    groups = bench.configured(2)
    devices = [group._devices for group in groups]  # type: ignore[attr-defined]
    bench.configure(groups)
    assert {listener(group) for group in groups} == {"127.0.0.3"}
    assert [group._devices for group in groups] == devices  # type: ignore[attr-defined]
    assert len(asked) == 2, "each group asks once, for a resolver may be slow"


def test_what_the_environment_says_counts_before_the_own_name(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "own_name_is_loopback", lambda: True)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert listener(bench.configured(1)[0]) == "127.0.0.1"


def test_a_usable_own_name_is_left_to_torch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "own_name_is_loopback", lambda: False)
    assert bench.configured(1)[0]._listens == ListeningPlace()  # type: ignore[attr-defined]


def test_a_machine_without_an_address_is_told_what_to_name(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "own_name_is_loopback", lambda: True)
    monkeypatch.setattr(gloo, "address_towards", without_way("127.0.0.1", address_towards))
    with pytest.raises(ConfigureError, match=r"unreachable.*set GLOO_SOCKET_IFNAME to a network interface"):
        bench.make().configure(bench.fresh_address(), 0, 1)
