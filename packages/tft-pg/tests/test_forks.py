"""A process that has a group and forks: whatever its children hold, the group ends, and the peers hear of its death."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, Final

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tft_pg import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    PeerDisconnectedError,
    ProcessGroup,
    ProcessGroupClosedError,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    ProcessGroupWrapper,
    format_store_addr,
    sockets,
)
from tft_pg.forks import forks_wait, let_go_in_child
from tft_pg.sockets import Endpoint
from tft_pg.testing import WAYS, FakeAccelerator, WaitsOnHost, end_children, fork_child
from tft_pg.testing.forking import FORKS

HOUR: Final = timedelta(hours=1)
GUARD: Final = timedelta(seconds=30)
SOON_S: Final = 3.0  # milliseconds on an idle machine; the children live for minutes


def over_fake(*, propagates: bool) -> ProcessGroup:
    return WaitsOnHost(ProcessGroupNCCL(backend=FakeAccelerator(propagates=propagates)))


def wrapped(wrapper: Callable[[ProcessGroup], ProcessGroup]) -> ProcessGroup:
    return wrapper(ProcessGroupGloo())


GROUPS: Final[dict[str, Callable[[], ProcessGroup]]] = {
    "gloo": ProcessGroupGloo,
    "wrapper": partial(wrapped, ProcessGroupWrapper),
    "swallowing": partial(wrapped, ErrorSwallowingProcessGroupWrapper),
    "faulty": partial(wrapped, FakeProcessGroupWrapper),
    "over a network": partial(over_fake, propagates=True),
    "over shared memory": partial(over_fake, propagates=False),
}
PHASES: Final = ("before", "configuring", "idle", "reducing")


def tcp_sockets_of(pid: int) -> set[str]:
    """The inodes of the TCP sockets that a process holds."""
    rows: set[str] = set()
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError), open(f"/proc/{pid}/net/{table}", encoding="ascii") as lines:
            rows |= {line.split()[9] for line in list(lines)[1:]}
    held = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            held.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    return rows & held


def reduce(group: ProcessGroup) -> Any:
    return group.allreduce([torch.ones(1 << 16)])


def forking_while_it_configures(group: ProcessGroup, configure: Callable[[], None]) -> list[int]:
    """Fork every few milliseconds from before the configure until after it."""
    children, over = [], threading.Event()

    def fork() -> None:
        while not over.wait(0.005) and len(children) < 40:
            children.append(fork_child("os.fork"))

    thread = threading.Thread(target=fork, name="tft-pg-test-forks")
    thread.start()
    configure()
    reduce(group).wait()
    over.set()
    thread.join()
    assert children
    return children


def rank_one(
    make: Callable[[], ProcessGroup], phase: str, ways: Sequence[str], addresses: list[str], parent: Connection
) -> None:
    """Joins rank 0, forks in that phase, tells of its children, and then does what it is told."""
    group = make()
    configure = partial(group.configure, addresses[0], 1, 2, timeout=GUARD)
    children = [fork_child(way) for way in ways] if phase == "before" else []
    if phase == "configuring":
        children = forking_while_it_configures(group, configure)
    else:
        configure()
        reduce(group).wait()
    if phase == "idle":
        children = [fork_child(way) for way in ways]
    running = reduce(group)  # which rank 0 joins late
    if phase == "reducing":
        children = [fork_child(way) for way in ways]
    parent.send(children)
    if parent.recv() == "reconfigure":
        took = []
        for act in (
            partial(group.configure, addresses[1], 0, 1, timeout=GUARD),
            group.abort,
            partial(group.configure, addresses[2], 0, 1, timeout=GUARD),
            group.shutdown,
        ):
            begun_s = time.monotonic()
            act()
            took.append(time.monotonic() - begun_s)
        with suppress(Exception):
            running.wait()
        parent.send(took)
    parent.poll(None)


class Pair:
    """Rank 0 in this process, rank 1 in another with children."""

    def __init__(self, make: Callable[[], ProcessGroup], phase: str, ways: Sequence[str] = FORKS) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        addresses = [format_store_addr("127.0.0.1", self.store.port, f"quorum/{number}") for number in range(3)]
        self.parent, theirs = context().Pipe()
        self.process = context().Process(target=rank_one, args=(make, phase, ways, addresses, theirs))
        self.process.start()
        theirs.close()
        self.group = make()
        self.group.configure(addresses[0], 0, 2, timeout=GUARD)
        self.group.set_timeout(HOUR)
        reduce(self.group).wait()
        assert self.parent.poll(30), "rank 1 did not fork"
        self.children: list[int] = self.parent.recv()

    def close(self) -> None:
        self.group.shutdown()
        if self.process.is_alive():
            self.process.kill()
        self.process.join(20)
        end_children(self.children)
        self.parent.close()


def context() -> ForkServerContext:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["torch", "torch.distributed", "tft_pg"])
    return found


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(*arguments: Any) -> Pair:
        made.append(Pair(*arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


def check_that_a_death_is_heard_of(pair: Pair) -> None:
    waits = [pair.group.allreduce([torch.ones(1 << 16)]) for _ in range(3)]  # of which rank 1 has begun one

    def wait() -> None:
        for each in waits:
            with suppress(RuntimeError):
                each.wait()

    waiter = threading.Thread(target=wait, name="tft-pg-test-waits", daemon=True)
    waiter.start()
    begun_s = time.monotonic()
    pair.process.kill()
    waiter.join(SOON_S)
    took_s = time.monotonic() - begun_s
    assert all(os.path.exists(f"/proc/{child}") for child in pair.children), "a child has ended by itself"
    pair.group.abort()
    waiter.join(SOON_S)
    assert took_s < SOON_S, "the peers hear of a death only when its children end"
    assert pair.group.errored() is not None


@pytest.mark.parametrize("phase", PHASES)
def test_peers_hear_of_a_death_though_a_child_lives(pair: Callable[..., Pair], phase: str) -> None:
    ways = WAYS if phase == "idle" else FORKS
    check_that_a_death_is_heard_of(pair(ProcessGroupGloo, phase, ways))


@pytest.mark.parametrize("group", [name for name in GROUPS if name != "gloo"])
def test_peers_of_every_group_hear_of_a_death_though_a_child_lives(pair: Callable[..., Pair], group: str) -> None:
    check_that_a_death_is_heard_of(pair(GROUPS[group], "idle"))


@pytest.mark.parametrize("group", ["gloo", "over shared memory"])
def test_who_waits_for_a_word_hears_of_a_death_though_a_child_lives(pair: Callable[..., Pair], group: str) -> None:
    found = pair(GROUPS[group], "idle")
    exchange = found.group.exchange_word([1], round_number=1, timeout=HOUR)
    begun_s = time.monotonic()
    found.process.kill()
    with pytest.raises(PeerDisconnectedError):
        exchange.wait()
    assert time.monotonic() - begun_s < SOON_S, "the peers hear of a death only when its children end"
    assert all(os.path.exists(f"/proc/{child}") for child in found.children), "a child has ended by itself"


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_with_a_child_is_configured_aborted_and_shut_down_at_once(
    pair: Callable[..., Pair], group: str
) -> None:
    found = pair(GROUPS[group], "reducing")
    found.parent.send("reconfigure")
    assert found.parent.poll(30), "rank 1 waits for its child"
    took = found.parent.recv()
    assert max(took) < SOON_S, dict(zip(("configure", "abort", "configure", "shutdown"), took, strict=True))


def test_no_program_inherits_a_connection(pair: Callable[..., Pair]) -> None:
    found = pair(ProcessGroupGloo, "idle", ["subprocess that inherits"])
    assert found.process.pid is not None
    assert tcp_sockets_of(found.process.pid), "this test sees no sockets at all"
    assert tcp_sockets_of(found.children[0]) == set()


def test_a_forked_child_holds_no_connection_and_no_port(pair: Callable[..., Pair]) -> None:
    found = pair(ProcessGroupGloo, "configuring")
    deadline_s = time.monotonic() + GUARD.total_seconds()  # a busy machine lets many children wait for its processor
    while any(tcp_sockets_of(child) for child in found.children) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert [tcp_sockets_of(child) for child in found.children] == [set()] * len(found.children)


@pytest.mark.in_parts
def test_a_fork_waits_while_a_listener_has_no_name() -> None:
    let_go_in_child(group := ProcessGroupGloo())  # the hooks are there when anything of ours is
    order: list[str] = []

    def fork() -> None:
        end_children([fork_child("os.fork")])
        order.append("forked")

    thread = threading.Thread(target=fork, name="tft-pg-test-forks")
    with forks_wait():
        thread.start()
        thread.join(0.2)
        order.append("named")
        end_children([fork_child("os.fork")])  # of a signal handler, say, in the same thread
    thread.join(30)
    assert order == ["named", "forked"]
    group.shutdown()


def test_a_child_tells_a_connection_that_its_parent_makes_after_the_fork() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    there = frozenset({Endpoint.of(listener.getsockname())})
    looks, told = os.pipe()
    early = socket.socket()
    child = os.fork()
    if child == 0:
        missing = not sockets.connected(remote=there)
        os.write(told, b"x")
        sockets.wait_until_connected()
        os._exit(7 if missing and sockets.connected(remote=there) else 1)
    os.read(looks, 1)
    early.connect(listener.getsockname())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    for each in (early, listener):
        each.close()
    os.close(looks), os.close(told)


# --- in the child --------------------------------------------------------------------------------------------------

_IN_A_CHILD = """
import gc, os, sys, time
import torch
from torch.distributed import TCPStore
from tft_pg import ProcessGroupGloo, ProcessGroupNCCL, format_store_addr
from tft_pg.testing import FakeAccelerator

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
def address(name):
    return format_store_addr("127.0.0.1", store.port, name)
make = {
    "gloo": ProcessGroupGloo,
    "accelerator": lambda: ProcessGroupNCCL(backend=FakeAccelerator()),
}[sys.argv[1]]
import threading
pair = [make(), make()]
def configure(rank):
    pair[rank].configure(address("q"), rank, len(pair))
threads = [threading.Thread(target=configure, args=[rank]) for rank in range(len(pair))]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
def reduce():
    works = [group.allreduce([torch.ones(4)]) for group in pair]
    [work.wait() for work in works]
reduce()
child = os.fork()
if child == 0:
    keep = store  # of the test's own: not ours to end
    if sys.argv[2] == "use":
        try:
            pair[0].allreduce([torch.ones(4)])
        except RuntimeError as error:
            print(type(error).__name__, error, flush=True)
        pair[0].abort()
        for group in pair:
            group.shutdown()
        own = make()
        own.configure(os.environ["STORE"], 0, 1)
        own.allreduce([torch.ones(4)]).wait()
        own.shutdown()
    pair.clear()
    gc.collect()
    import ctypes
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(keep))
    sys.exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
reduce()
print("parent", [group.errored() for group in pair], flush=True)
for group in pair:
    group.shutdown()
"""


@pytest.mark.parametrize(("kind", "what"), [("gloo", "drop"), ("gloo", "use"), ("accelerator", "use")])
def test_a_child_that_ends_as_a_program_does_ends_nothing_of_its_parents(kind: str, what: str) -> None:
    """It runs what is registered for the end, and destroys objects; it may also make a group of its own."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "STORE": format_store_addr("127.0.0.1", store.port, "child")}
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_CHILD, kind, what], capture_output=True, text=True, timeout=50, env=environment
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    if what == "use":
        assert lines.pop(0).startswith("ProcessGroupClosedError allreduce was called in process ")
    assert lines == ["child 7", "parent [None, None]"]


def test_a_child_destroys_no_garbage_of_its_parent() -> None:
    """A collection in a child destroyed a torch group of the parent, whose threads the child does not have."""

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            destroyed.append(os.getpid())

    destroyed: list[int] = []
    group = ProcessGroupGloo()
    gc.disable()
    try:
        Garbage()
        child = os.fork()
        if child == 0:
            try:
                gc.collect()
                os._exit(len(destroyed))
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        gc.collect()
        assert destroyed == [os.getpid()]
    finally:
        gc.enable()
        group.shutdown()


def test_a_child_is_told_whose_group_it_has() -> None:
    group = ProcessGroupGloo()
    group.forked()
    with pytest.raises(
        ProcessGroupClosedError, match=r"which was forked from process \d+, the owner of this group .*; use the group"
    ):
        group.configure("127.0.0.1:1/q", 0, 1)
    group.shutdown()


def test_a_dummy_has_nothing_that_a_child_could_keep() -> None:
    before = len(os.listdir("/proc/self/fd"))
    group = ProcessGroupDummy()
    group.configure("127.0.0.1:1/q", 0, 1)
    assert len(os.listdir("/proc/self/fd")) == before
    group.shutdown()
