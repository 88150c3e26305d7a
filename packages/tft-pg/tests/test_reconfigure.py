"""Groups that reconfigure by handles: torch's own under the adapter, and this package's."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, ReduceOp, TCPStore  # type: ignore[attr-defined]

from tft_pg import (
    AbortedError,
    CommunicatorFailedError,
    ConfigError,
    ConfigureError,
    ErrorSwallowingProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroup,
    ProcessGroupClosedError,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupWrapper,
    ReconfigurableProcessGroup,
    ReconfigureOptions,
    StoreUnreachableError,
    UnsupportedOperationError,
    handles,
    reconfigure_with_store,
    supports_reconfigure,
)
from tft_pg.handles import exchange_handles, reconfigure_options
from tft_pg.testing import CHECKS, GLOO_LACKS, Bench, Subject, reconfigurable_gloo
from tft_pg.testing.dying import every_death_at_every_point
from tft_pg.work import DummyWork

_Check = Callable[[Subject], None]

# Gloo forgets an operation when a peer dies in the middle of its message. Its thread is then in use for the hour that
# the checks allow each operation, and the checks have many such deaths.
THREADS = 64
KINDS = [True, False] if hasattr(dist.ProcessGroup, "reconfigure") else [True]
GUARD = timedelta(seconds=30)
SHORT = timedelta(milliseconds=200)


def named(value: object) -> str:
    return "stand_in" if value is True else "torchs" if value is False else getattr(value, "__name__", str(value))


def adapted(store_port: int, stand_in: bool) -> ProcessGroup:
    return ReconfigurableProcessGroup(reconfigurable_gloo(store_port, stand_in=stand_in, threads=THREADS))


@pytest.fixture(name="port")
def shared_store_port() -> Any:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def subject(port: int, stand_in: bool) -> Subject:
    return Subject(partial(adapted, port, stand_in), lacks=GLOO_LACKS, store_ports=(port,))


# --- the contract -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [check for check in CHECKS if check is not every_death_at_every_point], ids=named)
@pytest.mark.parametrize("stand_in", KINDS, ids=named)
def test_the_adapter_keeps_the_contract(check: _Check, stand_in: bool, port: int) -> None:
    check(subject(port, stand_in))


@pytest.mark.parametrize("stand_in", KINDS, ids=named)
def test_every_death_under_the_adapter(stand_in: bool, port: int) -> None:
    """The barrier comes last, because Gloo's own waits for the forgotten operations of the other rows."""
    every_death_at_every_point(subject(port, stand_in), ("allreduce", "allgather", "send", "barrier"))


# --- the adapter ------------------------------------------------------------------------------------------------------


class Unsure(dist.ProcessGroup):
    """A torch group of another backend, whose operations end when the test says so, also after an abort."""

    supports_reconfigure = True

    def __init__(self, *, ignores_order: bool = False, device: str = "cpu") -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.ended = threading.Event()
        self.fails = ""
        self.num_aborts = 0
        self._size = 2 if ignores_order else 1
        self._device = torch.device(device)

    @property
    def _device_types(self) -> list[torch.device]:
        return [self._device]

    def get_reconfigure_handle(self) -> str:
        return "here"

    def reconfigure(self, opts: Any) -> dist.Work:
        assert list(opts.handles) == ["here"]
        return DummyWork([])

    def allreduce(self, *args: object, **kwargs: object) -> dist.Work:
        if self.fails:
            raise RuntimeError(self.fails)
        return _Until(self.ended)

    def _get_backend(self, device: torch.device) -> Any:
        raise RuntimeError("no backend")

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def abort(self) -> None:
        self.num_aborts += 1

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size


class _Until(dist.Work):
    def __init__(self, ended: threading.Event) -> None:
        super().__init__()
        self._ended = ended

    def is_completed(self) -> bool:
        return self._ended.is_set()


def test_an_operation_that_its_group_can_not_end_holds_up_configure_until_it_has_ended() -> None:
    foreign = Unsure()
    with Bench(partial(ReconfigurableProcessGroup, foreign)) as bench:
        (group,) = bench.configured(1)
        group.allreduce([torch.ones(1)], ReduceOp.SUM)
        with pytest.raises(ConfigureError, match="1 operations of earlier configurations have not ended") as caught:
            bench.configure([group])
        assert caught.value.is_own
        assert foreign.num_aborts == 1
        foreign.ended.set()
        bench.configure([group])
        assert group.errored() is None


def test_an_unknown_error_of_an_unknown_backend_makes_the_group_unusable() -> None:
    foreign = Unsure()
    with Bench(partial(ReconfigurableProcessGroup, foreign)) as bench:
        (group,) = bench.configured(1)
        foreign.fails = "something went wrong"
        with pytest.raises(CommunicatorFailedError, match="something went wrong"):
            group.allreduce([torch.ones(1)], ReduceOp.SUM)
        assert isinstance(group.errored(), CommunicatorFailedError)


def test_a_group_that_ignores_the_order_of_the_handles_is_refused() -> None:
    with (
        Bench(partial(ReconfigurableProcessGroup, Unsure(ignores_order=True))) as bench,
        pytest.raises(ConfigureError, match="ignores the order of the handles"),
    ):
        bench.configured(1)


def test_what_the_adapter_can_not_adapt(port: int) -> None:
    plain = dist.ProcessGroup(HashStore(), 0, 1)
    for group in (plain, ProcessGroupGloo(), ProcessGroupDummy()):
        with pytest.raises(ConfigError, match="enable_reconfigure=True"):
            ReconfigurableProcessGroup(group)
    assert not supports_reconfigure(plain)
    assert not supports_reconfigure(object())
    with pytest.raises(UnsupportedOperationError, match="use ProcessGroupNCCL"):
        ReconfigurableProcessGroup(Unsure(device="cuda"))


@pytest.mark.parametrize("stand_in", KINDS, ids=named)
def test_torchs_group_is_shut_down_with_the_adapter(stand_in: bool, port: int) -> None:
    group = adapted(port, stand_in)
    assert supports_reconfigure(group)
    group.shutdown()
    group.shutdown()
    with pytest.raises(ProcessGroupClosedError):
        group.configure(f"127.0.0.1:{port}/closed", 0, 1)


# --- this package's groups by handles ---------------------------------------------------------------------------------


def handles_of(groups: list[ProcessGroup]) -> list[str]:
    return [group.get_reconfigure_handle() for group in groups]


def reconfigure_all(bench: Bench, groups: list[ProcessGroup], uuid: int, timeout: timedelta | None = GUARD) -> None:
    given = handles_of(groups)
    bench.all(groups, lambda _, group: group.reconfigure(reconfigure_options(uuid, given, timeout=timeout)).wait())


def sums(bench: Bench, groups: list[ProcessGroup]) -> list[float]:
    def reduce(rank: int, group: ProcessGroup) -> float:
        tensor = torch.tensor([float(rank + 1)])
        group.allreduce([tensor], ReduceOp.SUM).wait()
        return float(tensor)

    return bench.all(groups, reduce)


@pytest.mark.parametrize("wrap", [None, ProcessGroupWrapper, ErrorSwallowingProcessGroupWrapper])
def test_handles_build_groups_of_changing_members(wrap: Callable[[ProcessGroup], ProcessGroup] | None) -> None:
    make = ProcessGroupGloo if wrap is None else lambda: wrap(ProcessGroupGloo())
    with Bench(make) as bench:
        a, b, c = bench.make(), bench.make(), bench.make()
        for uuid, members in enumerate(([a], [a, b], [c, b, a], [c, a])):
            reconfigure_all(bench, members, uuid)
            assert [(group.rank(), group.size()) for group in members] == [
                (rank, len(members)) for rank in range(len(members))
            ]
            assert sums(bench, members) == [sum(range(1, len(members) + 1))] * len(members)
        a.abort()
        assert isinstance(a.errored(), AbortedError)
        reconfigure_all(bench, [a, c], 9)
        assert sums(bench, [a, c]) == [3.0, 3.0]


def test_a_handle_stays_the_same_whatever_its_rank_is_said_to_be() -> None:
    with Bench(ProcessGroupGloo) as bench:
        group = bench.make()
        first = group.get_reconfigure_handle()
        group.set_rank_info("replica_1", 2, 4, global_rank=6)
        assert group.get_reconfigure_handle() == first
        group.reconfigure(reconfigure_options(1, [first], timeout=GUARD)).wait()
        assert "rank 0 of 1, replica replica_1/2" in repr(group)


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ((None, 0, 1), "replica_id is None"),
        (("me", -1, 1), "group_rank is below 0; pass a number from 0"),
        (("me", True, 1), "group_rank is True; pass an int"),
        (("me", 0, 0), "group_world_size is below 1; pass a number from 1"),
        (("me", 0, 1, "x"), "global_rank is 'x'; pass an int"),
    ],
)
def test_a_wrong_rank_info_is_named_and_changes_nothing(info: tuple[Any, ...], text: str) -> None:
    group = ProcessGroupDummy()
    group.set_rank_info("before", 1, 2)
    with pytest.raises(ConfigError, match=re.escape(text)):
        group.set_rank_info(*info)
    own = group._own_handle()
    assert (own.replica_id, own.group_rank, own.group_world_size) == ("before", 1, 2)


def test_a_uuid_is_used_once() -> None:
    with Bench(ProcessGroupGloo) as bench:
        groups = [bench.make(), bench.make()]
        reconfigure_all(bench, groups, 5)
        with pytest.raises(ConfigureError, match="fresh prefix"):
            reconfigure_all(bench, groups, 5)
        reconfigure_all(bench, groups, 6)


def test_wrong_handles_are_named() -> None:
    with Bench(ProcessGroupGloo) as bench:
        group = bench.make()
        own, other = group.get_reconfigure_handle(), bench.make().get_reconfigure_handle()
        unordered = ReconfigureOptions()
        unordered.handles = {own}
        for opts, text in (
            (unordered, "as a list"),
            (reconfigure_options(1, []), "own handle is not among the 0 handles"),
            (reconfigure_options(1, [other]), "own handle is not among the 1 handles"),
            (reconfigure_options(1, [own, own]), "occurs twice"),
            (reconfigure_options(1, ["x" * 5000, own]), "too long"),
        ):
            with pytest.raises(ConfigError, match=text):
                group.reconfigure(opts)
        assert group.errored() is None


@pytest.mark.parametrize(
    "handle",
    [
        *("", "garbage", "[]", "7", "null", "[" * 4000, '{"store": 7}', '{"store": "::1/"}', "gloo:0:-1", "{}"),
        *('{"store": "\\ud800:1"}', 5, None, {}, ["a"], b"x"),
    ],
    ids=lambda handle: repr(handle)[:20],
)
def test_a_handle_of_any_rank_that_is_none_is_named_at_once(handle: Any) -> None:
    """None of these reaches a store: nothing listens for the first rank, and the last rank would never come."""
    group = ProcessGroupDummy()
    own = group.get_reconfigure_handle()
    for rank, given in enumerate(([handle, own], [own, handle])):
        opts = ReconfigureOptions()
        opts.uuid, opts.handles = 1, given
        with pytest.raises(ConfigError, match=f"the handle of rank {rank} is not one of a tft_pg group"):
            group.reconfigure(opts)
    assert group.configure_count == 0


@pytest.mark.parametrize("uuid", [None, "8", True, 1.0, -1, 1 << 64, 1 << 20_000], ids=range(7))
def test_a_wrong_uuid_is_named(uuid: Any) -> None:
    group = ProcessGroupDummy()
    opts = ReconfigureOptions()
    opts.handles = [group.get_reconfigure_handle()]
    opts.uuid = uuid
    with pytest.raises(ConfigError, match="uuid is"):
        group.reconfigure(opts)
    assert group.configure_count == 0


@pytest.mark.parametrize("opts", [None, {}, ["a"]], ids=repr)
def test_what_is_no_options_is_named(opts: Any) -> None:
    with pytest.raises(ConfigError, match="takes ReconfigureOptions, but got a"):
        ProcessGroupDummy().reconfigure(opts)


def test_a_missing_rank_fails_the_reconfigure_and_is_named() -> None:
    with Bench(ProcessGroupGloo) as bench:
        groups = [bench.make(), bench.make()]
        with pytest.raises(ConfigureError) as caught:
            groups[0].reconfigure(reconfigure_options(1, handles_of(groups), timeout=SHORT))
        assert caught.value.missing_ranks == (1,)


def test_groups_without_a_rendezvous_of_their_own() -> None:
    dummy = ProcessGroupDummy()
    dummy.reconfigure(reconfigure_options(1, [dummy.get_reconfigure_handle()])).wait()
    assert dummy.configure_count == 1
    managed = ManagedProcessGroup(Any)  # type: ignore[arg-type]
    assert not supports_reconfigure(managed)
    with pytest.raises(UnsupportedOperationError, match="get_reconfigure_handle"):
        managed.get_reconfigure_handle()


def test_a_closed_group_has_no_handle_and_no_store() -> None:
    group = ProcessGroupGloo()
    port = int(json.loads(group.get_reconfigure_handle())["store"].rpartition(":")[2])
    assert _listens(port)
    group.shutdown()
    with pytest.raises(ProcessGroupClosedError, match="no handle any more"):
        group.get_reconfigure_handle()
    assert not _listens(port)


def test_a_forked_child_does_not_keep_the_store() -> None:
    group, dummy = ProcessGroupGloo(), ProcessGroupDummy()
    port = int(json.loads(group.get_reconfigure_handle())["store"].rpartition(":")[2])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            group.get_reconfigure_handle()
        except ProcessGroupClosedError:
            dummy.get_reconfigure_handle()  # a group without connections is usable in a child
            os.write(write, b"kept" if _own_sockets(port) else b"released")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert _own_sockets(port)
    assert os.read(read, 10) == b"released"
    os.close(read)
    group.shutdown()


def _listeners(port: int) -> set[str]:
    """Return the inodes of the sockets of this machine that listen at a port."""
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as lines:
            for line in list(lines)[1:]:
                _, local, _, state, *rest = line.split()
                if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                    found.add(rest[5])
    return found


def _listens(port: int) -> bool:
    return bool(_listeners(port))


def _own_sockets(port: int) -> bool:
    """Return whether this process has a descriptor of a socket that listens at the port."""
    inodes = _listeners(port)
    for name in os.listdir("/proc/self/fd"):
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
        if found and found[1] in inodes:
            return True
    return False


# --- the bridge -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stand_in", "torchs", "ours"])
def test_a_group_is_reconfigured_with_a_store(kind: str, port: int) -> None:
    if kind == "torchs" and len(KINDS) == 1:
        pytest.skip("this torch has no groups that reconfigure")
    with Bench(ProcessGroupGloo) as bench:
        groups = [
            bench.make() if kind == "ours" else reconfigurable_gloo(port, stand_in=kind == "stand_in") for _ in range(2)
        ]
        for turn in range(2):
            address = bench.fresh_address()
            bench.all(
                groups,
                lambda rank, group, address=address, turn=turn: reconfigure_with_store(  # type: ignore[misc]
                    group, address, rank if turn == 0 else 1 - rank, 2, GUARD
                ),
            )
            assert [group.rank() for group in groups] == ([0, 1] if turn == 0 else [1, 0])
            assert sums(bench, groups) == [3.0, 3.0]
        for group in groups:
            group.shutdown()


def test_the_bridge_leaves_the_timeout_to_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[timedelta | None] = []

    class Configured(ProcessGroupDummy):
        def configure(self, *args: Any, timeout: timedelta | None = None, **kwargs: Any) -> None:
            seen.append(timeout)

    reconfigure_with_store(Configured(), "127.0.0.1:1/x", 0, 1)
    reconfigure_with_store(Configured(), "127.0.0.1:1/x", 0, 1, SHORT)
    assert seen == [None, SHORT]
    group = ProcessGroupGloo(SHORT)
    with pytest.raises(StoreUnreachableError):
        reconfigure_with_store(group, "127.0.0.1:1/x", 0, 1)
    group.shutdown()
    monkeypatch.setattr(handles, "_STORE_TIMEOUT", SHORT)
    with pytest.raises(StoreUnreachableError):
        reconfigure_with_store(Unsure(), "127.0.0.1:1/x", 0, 1)


def test_the_bridge_names_what_is_wrong(port: int) -> None:
    group = reconfigurable_gloo(port, stand_in=True)
    with pytest.raises(ConfigureError, match="timed out waiting for the handles of ranks 1") as caught:
        reconfigure_with_store(group, f"127.0.0.1:{port}/missing", 0, 2, SHORT)
    assert caught.value.missing_ranks == (1,)
    with pytest.raises(ConfigError, match="rank is 2"):
        reconfigure_with_store(group, f"127.0.0.1:{port}/rank", 2, 2)
    with pytest.raises(ConfigError, match="world_size is 'x'; pass an int"):
        reconfigure_with_store(group, f"127.0.0.1:{port}/rank", 0, "x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has no reconfigure"):
        reconfigure_with_store(dist.ProcessGroup(HashStore(), 0, 1), f"127.0.0.1:{port}/x", 0, 1)
    group.shutdown()


def test_the_exchange_of_handles_refuses_what_is_no_handle() -> None:
    store = HashStore()
    store.set_timeout(SHORT)
    with pytest.raises(ConfigureError, match="5000 bytes"):
        exchange_handles(store, "x" * 5000, 0, 1)
    uuid, found = exchange_handles(store, "mine", 0, 1)
    assert found == ["mine"]
    assert uuid >= 0
    with pytest.raises(ConfigureError, match="already used by rank 0"):
        exchange_handles(store, "mine", 0, 1)
    for at, record in enumerate(("[1]", "7", "[-1, 'x']", '[true, "x"]', "[1, 2]", "x" * 10_000, "[" * 8000, "{}")):
        store = HashStore()
        store.set("tft-pg/handle/1", record)
        with pytest.raises(ConfigureError, match="record of rank 1 is not a reconfigure handle"):
            exchange_handles(store, f"mine{at}", 0, 2)
