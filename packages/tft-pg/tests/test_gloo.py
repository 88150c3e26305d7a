"""ProcessGroupGloo where it differs from any other group: what an abort reaches, and what it leaves alone."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ReduceOp, TCPStore
from torch.nn.parallel import DistributedDataParallel

from tft_pg import (
    COLLECTIVES,
    AbortedError,
    ConfigError,
    ConfigureError,
    OperationRefusedError,
    PeerDisconnectedError,
    ProcessGroup,
    ProcessGroupClosedError,
    ProcessGroupDummy,
    ProcessGroupError,
    ProcessGroupGloo,
    UnsupportedOperationError,
    parse_store_addr,
    sockets,
)
from tft_pg import work as works
from tft_pg.backends import gloo, transfers, watch
from tft_pg.backends.attempt import Attempt
from tft_pg.backends.gloo import _Published
from tft_pg.backends.live import LiveGroup
from tft_pg.backends.peers import own_address
from tft_pg.backends.transfers import Transfers
from tft_pg.sockets import Endpoint
from tft_pg.testing import GLOO_LACKS, Bench
from tft_pg.testing.bench import Outcome

HOUR = timedelta(hours=1)
GUARD = timedelta(seconds=20)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench(ProcessGroupGloo, timeout=GUARD) as bench:
        yield bench


def failure(act: Callable[[], object]) -> BaseException | None:
    try:
        act()
    except ProcessGroupError as error:
        return error
    return None


def threads_of_ours() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("tft-") and "bench" not in each.name]


def transfers_of(group: ProcessGroup) -> Transfers:
    found: Transfers = group._live._start.args[1]  # type: ignore[attr-defined]
    return found


def reduce(group: ProcessGroup) -> torch.Tensor:
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    return tensor


# --- what an abort reaches -----------------------------------------------------------------------------------------


def test_an_abort_ends_a_collective_within_200_ms_here_and_there(bench: Bench) -> None:
    groups = bench.configured(3)
    took_s = []
    for _ in range(7):
        bench.configure(groups)
        for group in groups:
            group.set_timeout(HOUR)
        works = [groups[rank].allreduce([torch.ones(1 << 16)]) for rank in (0, 1)]
        ended: list[float] = []

        def wait(work: dist.Work, ended: list[float] = ended) -> BaseException | None:
            error = failure(work.wait)
            ended.append(time.perf_counter())
            return error

        waits = [bench.start(partial(wait, work)) for work in works]
        begun_s = time.perf_counter()
        groups[0].abort()
        errors = [finish().get() for finish in waits]
        took_s.append(max(ended) - begun_s)
        assert isinstance(errors[0], AbortedError)
        assert isinstance(errors[1], PeerDisconnectedError)
        assert isinstance(failure(partial(reduce, groups[2])), PeerDisconnectedError)
    assert statistics.median(took_s) < 0.2, took_s


def test_every_kind_of_wait_is_ended(bench: Bench) -> None:
    groups = bench.configured(2)
    starts: dict[str, Callable[[ProcessGroup], dist.Work]] = {
        "recv": lambda group: group.recv([torch.ones(3)], 1, 0),
        "send": lambda group: group.send([torch.ones(1 << 22)], 1, 0),
        "barrier": lambda group: group.barrier(),
        "broadcast": lambda group: group.broadcast(torch.ones(3), 1),
        "two": lambda group: [group.allreduce([torch.ones(3)]) for _ in range(5)][-1],
    }
    for name, start in starts.items():
        bench.configure(groups)
        groups[0].set_timeout(HOUR)
        work = start(groups[0])
        waiting = bench.start(partial(failure, work.wait))
        groups[0].abort()
        assert isinstance(waiting().get(), AbortedError), name


def test_a_new_configure_and_a_shutdown_end_what_runs(bench: Bench) -> None:
    groups = bench.configured(2)
    for group in groups:
        group.set_timeout(HOUR)
    before = groups[0].allreduce([torch.ones(3)])
    bench.configure(groups)
    assert isinstance(failure(before.wait), AbortedError)
    assert groups[0].errored() is None
    before = groups[0].allreduce([torch.ones(3)])
    groups[0].shutdown()
    assert isinstance(failure(before.wait), ProcessGroupClosedError)
    assert isinstance(failure(partial(reduce, groups[1])), PeerDisconnectedError)


@pytest.mark.parametrize(("end", "kind"), [("abort", AbortedError), ("shutdown", ProcessGroupClosedError)])
def test_an_end_that_comes_as_configure_succeeds_is_not_lost(
    end: str, kind: type[ProcessGroupError], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that ends is held up between its look at the attempt and its word to it."""
    group = bench.make()
    stopping, configured = threading.Event(), threading.Event()
    stop, finish = Attempt.stop, ProcessGroupGloo._finish

    def stop_late(attempt: Attempt, error: ProcessGroupError) -> None:
        stopping.set()
        configured.wait(0.2)
        stop(attempt, error)

    def finish_meanwhile(group: ProcessGroupGloo, attempt: Attempt, live: LiveGroup) -> None:
        ends.append(bench.start(getattr(group, end)))
        assert stopping.wait(20)
        finish(group, attempt, live)

    ends: list[Callable[[], Outcome]] = []
    monkeypatch.setattr(Attempt, "stop", stop_late)
    monkeypatch.setattr(ProcessGroupGloo, "_finish", finish_meanwhile)
    error = failure(lambda: group.configure(bench.fresh_address(), 0, 1))
    configured.set()
    ends[0]().get()
    assert isinstance(error, kind)
    assert isinstance(group.errored(), kind)
    assert isinstance(failure(lambda: reduce(group)), kind)
    assert threads_of_ours() == []


def test_an_old_works_error_is_not_the_new_groups(bench: Bench) -> None:
    groups = bench.configured(2)
    work = groups[1].allreduce([torch.ones(3)])
    groups[0].abort()
    bench.configure(groups)
    assert isinstance(failure(work.wait), PeerDisconnectedError | AbortedError)
    assert groups[1].errored() is None
    assert [tensor.tolist() for tensor in bench.all(groups, lambda rank, group: reduce(group))] == [[2.0] * 3] * 2


def test_an_error_that_comes_through_a_future_is_known_to_the_group(bench: Bench) -> None:
    groups = bench.configured(2)
    future = groups[1].allreduce([torch.ones(3)]).get_future()
    groups[0].abort()
    known = future.then(lambda future: groups[1].errored())
    assert isinstance(known.wait(), PeerDisconnectedError)
    with pytest.raises(RuntimeError, match="Connection closed"):
        future.wait()


def test_a_slow_callback_of_a_future_does_not_lock_the_group_up(bench: Bench) -> None:
    groups = bench.configured(2)
    groups[0].set_timeout(HOUR)
    entered, leave, done = threading.Event(), threading.Event(), threading.Event()

    def callback(future: torch.futures.Future[object]) -> None:
        entered.set()
        leave.wait(20)
        done.set()

    groups[0].allreduce([torch.ones(3)]).get_future().add_done_callback(callback)
    groups[0].abort()  # returns while the callback runs
    assert entered.wait(20)
    closing = bench.start(groups[0].shutdown)
    leave.set()
    closing().get()  # waits for it
    assert done.is_set()


def test_a_callback_may_abort(bench: Bench) -> None:
    groups = bench.configured(2)
    groups[1].set_timeout(HOUR)
    done = threading.Event()

    def callback(future: torch.futures.Future[object]) -> None:
        groups[1].abort()
        done.set()

    groups[1].allreduce([torch.ones(3)]).get_future().add_done_callback(callback)
    groups[0].abort()
    assert done.wait(20)
    bench.configure(groups)
    assert [tensor.tolist() for tensor in bench.all(groups, lambda rank, group: reduce(group))] == [[2.0] * 3] * 2


def test_nothing_lands_in_a_tensor_after_its_work_has_failed(bench: Bench) -> None:
    groups = bench.configured(3)
    for length in (1, 1000, 1 << 18):
        tensors = [torch.full((length,), float(rank)) for rank in range(3)]
        works = [groups[rank].allreduce([tensors[rank]]) for rank in (0, 1)]
        aborting = bench.start(groups[1].abort)
        errors = [failure(work.wait) for work in works]
        left = [tensor.clone() for tensor in tensors]
        late = failure(lambda tensor=tensors[2]: groups[2].allreduce([tensor]).wait())
        left[2] = tensors[2].clone()
        aborting().get()
        assert all(isinstance(error, ProcessGroupError) for error in (*errors, late))
        bench.configure(groups)
        bench.all(groups, lambda rank, group: reduce(group))
        torch.testing.assert_close(tensors, left, rtol=0, atol=0)


# --- an abort in the middle of a configure -------------------------------------------------------------------------


def record(endpoint: Endpoint, numbers: tuple[int, ...]) -> bytes:
    """What a rank of torch 2.13 publishes."""
    address = struct.pack("=H", socket.AF_INET) + struct.pack(">H", endpoint.port)
    address += socket.inet_aton(endpoint.address)
    address = address.ljust(128, b"\0") + struct.pack("=q", -1)
    name = b"elsewhere"
    return b"".join(
        [struct.pack("=Q", len(name)), name, struct.pack("=Q", len(address)), address, struct.pack("=2q", *numbers)]
    )


def publish(address: str, rank: int, endpoint: Endpoint) -> None:
    place = parse_store_addr(address)
    store = PrefixStore(place.prefix, TCPStore(place.host, place.port, is_master=False, wait_for_workers=False))
    store.set(f"0/{rank}", record(endpoint, (0, 1)))


def abort_once_connecting(bench: Bench, peer: Endpoint, until: Callable[[], bool], timeout: timedelta = HOUR) -> object:
    """Configure rank 0 of 2 whose peer is an impostor at an address, and abort when that has come about."""
    group, address = bench.make(), bench.fresh_address()
    publish(address, 1, peer)
    configuring = bench.start(partial(failure, partial(group.configure, address, 0, 2, timeout=timeout)))
    deadline_s = time.monotonic() + 20
    while not until():
        assert time.monotonic() < deadline_s
    begun_s = time.perf_counter()
    if timeout == HOUR:
        group.abort()
    error = configuring().get()
    assert time.perf_counter() - begun_s < 10  # the time-out is an hour
    groups = [group, bench.make()]
    bench.configure(groups)
    assert [tensor.tolist() for tensor in bench.all(groups, lambda rank, group: reduce(group))] == [[2.0] * 3] * 2
    return error


def test_a_peer_that_published_and_never_connects(bench: Bench) -> None:
    """A rank with the lower address waits for the other to call; 127.255.255.254 is above any of ours."""
    with socket.socket() as listener:
        listener.bind(("127.255.255.254", 0))
        listener.listen()
        peer = Endpoint.of(listener.getsockname())
        watched = threading.Event()
        # Nothing tells from outside that the rank waits now, so the abort falls before, into or after its coming.
        for _ in range(3):
            error = abort_once_connecting(bench, peer, lambda: watched.wait(0.02) or True)
            assert isinstance(error, AbortedError)


def test_a_peer_that_published_and_does_not_answer(bench: Bench) -> None:
    """A rank with the higher address calls; a listener with a full queue drops the call, as a dead host would."""
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        peer = Endpoint.of(listener.getsockname())
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(peer)
        with Bench(partial(ProcessGroupGloo, hostname="127.0.0.2"), timeout=GUARD) as higher:
            known = sockets.connecting(remote={peer})
            error = abort_once_connecting(higher, peer, lambda: bool(sockets.connecting(remote={peer}) - known))
            assert isinstance(error, AbortedError)
            limit = timedelta(milliseconds=200)
            error = abort_once_connecting(higher, peer, lambda: True, timeout=limit)
            assert isinstance(error, ConfigureError)
            assert "0.2 s" in str(error)


_SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def stopped_store() -> Iterator[Callable[[], int]]:
    """Starts a store in another process; the function given stops it, and gives its port."""
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())

        def stop() -> int:
            os.kill(process.pid, signal.SIGSTOP)
            return port

        yield stop
        process.kill()


@pytest.mark.in_parts
def test_a_store_that_is_stopped(bench: Bench, stopped_store: Callable[[], int]) -> None:
    """torch's client would wait for ever, whatever its time-out."""
    group, port = bench.make(), stopped_store()
    error = failure(lambda: group.configure(f"127.0.0.1:{port}/a", 0, 2, timeout=timedelta(milliseconds=100)))
    assert isinstance(error, ConfigureError)
    configuring = bench.start(partial(failure, partial(group.configure, f"127.0.0.1:{port}/b", 0, 2, timeout=HOUR)))
    while not sockets.connected(remote={Endpoint("127.0.0.1", port)}):
        pass
    group.abort()
    assert isinstance(configuring().get(), AbortedError)
    bench.configure([group])
    assert reduce(group).tolist() == [1.0] * 3


@pytest.mark.parametrize("end", ["abort", "shutdown"])
def test_a_store_that_accepts_and_says_nothing(bench: Bench, end: str) -> None:
    group = bench.make()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        peer = Endpoint.of(listener.getsockname())
        address = f"{peer.address}:{peer.port}/a"
        configuring = bench.start(partial(failure, partial(group.configure, address, 0, 2, timeout=HOUR)))
        while not sockets.connected(remote={peer}):
            pass
        getattr(group, end)()
        assert isinstance(configuring().get(), AbortedError if end == "abort" else ProcessGroupClosedError)
        group.shutdown()
    assert "tft-pg-connect" not in [thread.name for thread in threading.enumerate()]


def test_a_store_that_was_started_again_on_the_same_port(bench: Bench) -> None:
    group = bench.make()
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = first.port
    group.configure(f"127.0.0.1:{port}/a", 0, 1)
    del first
    gc.collect()
    second = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    group.configure(f"127.0.0.1:{second.port}/a", 0, 1)
    assert reduce(group).tolist() == [1.0] * 3


# --- a peer in another process -------------------------------------------------------------------------------------


STARTS: dict[str, Callable[[ProcessGroup, torch.Tensor, int], dist.Work]] = {
    "send": lambda group, tensor, peer: group.send([tensor], peer, 0),
    "recv": lambda group, tensor, peer: group.recv([tensor], peer, 0),
    "reduce": lambda group, tensor, peer: group.allreduce([tensor]),
    "reduce_scatter": lambda group, tensor, peer: group._reduce_scatter_base(tensor[: tensor.numel() // 2], tensor),
    "broadcast": lambda group, tensor, peer: group.broadcast([tensor], _rooted(dist.BroadcastOptions(), 1)),
    "broadcast of mine": lambda group, tensor, peer: group.broadcast([tensor], _rooted(dist.BroadcastOptions(), 0)),
    "gather": lambda group, tensor, peer: group.gather(
        [[torch.zeros_like(tensor), torch.zeros_like(tensor)]] if peer == 1 else [],
        [tensor],
        _rooted(dist.GatherOptions(), 0),
    ),
    "scatter": lambda group, tensor, peer: group.scatter(
        [tensor], [] if peer == 1 else [[tensor, tensor]], _rooted(dist.ScatterOptions(), 1)
    ),
}
OPPOSITES = {what: {"send": "recv", "recv": "send"}.get(what, what) for what in STARTS}


def _rooted(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


def _peer(address: str, size: int, parent: Connection) -> None:
    """Rank 1 of 2: configure, say so, and reduce when told to."""
    torch.set_num_threads(1)
    group = ProcessGroupGloo()
    group.configure(address, 1, 2)
    parent.send("configured")
    order = parent.recv()
    if order in STARTS:
        work = STARTS[order](group, torch.ones(size), 0)
        parent.send("started")
        work.wait()
        parent.send("ended")
        parent.poll(None)


def forkserver() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "tft_pg"])
    return context


@pytest.fixture
def start_peer(bench: Bench) -> Iterator[Callable[[int], tuple[ProcessGroup, multiprocessing.Process, Connection]]]:
    context = forkserver()
    children: list[tuple[multiprocessing.Process, Connection]] = []

    def start(size: int) -> tuple[ProcessGroup, multiprocessing.Process, Connection]:
        group, address = bench.make(), bench.fresh_address()
        ours, theirs = context.Pipe()
        child = context.Process(target=_peer, args=(address, size, theirs), daemon=True)
        child.start()
        theirs.close()
        children.append((child, ours))
        group.configure(address, 0, 2, timeout=GUARD)
        assert ours.poll(20)
        assert ours.recv() == "configured"
        return group, child, ours

    yield start
    for child, ours in children:
        if child.is_alive():  # else its number may be another's by now: it is the forkserver's child
            child.kill()
        child.join(20)
        ours.close()


def test_an_abort_while_the_peer_is_stopped(bench: Bench, start_peer: Callable[..., tuple[ProcessGroup, ...]]) -> None:
    group, child, _ = start_peer(3)
    group.set_timeout(HOUR)
    os.kill(child.pid, signal.SIGSTOP)
    # More than the socket's buffers hold, so that it waits for the peer to read, too.
    works = [group.allreduce([torch.ones(1 << 22)]), group.send([torch.ones(1 << 22)], 1, 0)]
    begun_s = time.perf_counter()
    group.abort()
    assert all(isinstance(failure(work.wait), AbortedError) for work in works)
    assert time.perf_counter() - begun_s < 10  # the time-out is an hour
    bench.configure([group])
    assert reduce(group).tolist() == [1.0] * 3


def test_an_aborted_transfer_ends_within_200_ms_and_leaves_no_thread(
    bench: Bench, start_peer: Callable[..., tuple[ProcessGroup, ...]]
) -> None:
    """With a time-out of an hour and a peer that is stopped: half a message sent, another one never begun."""
    took_s = []
    for what in ("send", "recv", "send"):
        group, child, _ = start_peer(3)
        group.set_timeout(HOUR)
        os.kill(child.pid, signal.SIGSTOP)
        work = STARTS[what](group, torch.ones(1 << 22), 1)
        ended: list[float] = []

        def wait(work: dist.Work = work, ended: list[float] = ended) -> BaseException | None:
            error = failure(work.wait)
            ended.append(time.perf_counter())
            return error

        waits = [bench.start(wait), bench.start(wait)]
        of_group, deadline_s = transfers_of(group), time.monotonic() + 20
        while not of_group._waited_for:
            assert time.monotonic() < deadline_s
        begun_s = time.perf_counter()
        group.abort()
        assert all(isinstance(finish().get(), AbortedError) for finish in waits)
        took_s.append(max(ended) - begun_s)
        group.shutdown()
        assert threads_of_ours() == []
    assert statistics.median(took_s) < 0.2, took_s


def test_a_wait_for_a_transfer_that_began_when_its_connection_had_ended(bench: Bench) -> None:
    """What arrived before is there all the same; what did not never comes."""
    groups = bench.configured(2)
    groups[1].set_timeout(HOUR)
    there, never = torch.zeros(3), torch.zeros(3)
    works = [groups[1].recv([there], 0, 0), groups[1].recv([never], 0, 1)]
    assert groups[0].send([torch.ones(3)], 1, 0).wait()
    groups[0].shutdown()
    of_group, deadline_s = transfers_of(groups[1]), time.monotonic() + 20
    while not of_group._over:
        assert time.monotonic() < deadline_s
    assert works[0].wait()
    assert there.tolist() == [1.0] * 3
    for _ in range(2):
        assert isinstance(failure(works[1].wait), PeerDisconnectedError)
    assert never.tolist() == [0.0] * 3


def test_a_transfer_that_ended_may_be_waited_for_again(bench: Bench) -> None:
    """With torch alone the second wait would last until the time-out."""
    groups = bench.configured(2)
    tensor = torch.zeros(3)
    work = groups[1].recv([tensor], 0, 0)
    groups[0].send([torch.ones(3)], 1, 0).wait(GUARD)
    assert [work.wait(), work.wait(), work.wait(GUARD), work.is_completed()] == [True] * 4
    assert work.source_rank() == 0


def test_a_wait_that_could_not_be_ended_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of C++ is called of which it is not known that it is there, and on what."""
    groups = bench.configured(2)
    others = bench.all(groups, lambda rank, group: group.allreduce([torch.ones(3)]))
    other = others[0]._work
    with pytest.raises(UnsupportedOperationError, match="can't interrupt a wait"):
        Transfers(HOUR).adopt(other)
    monkeypatch.setattr(transfers, "_ABORT", "_ZN4c10d16ProcessGroupGloo8{}7nothingEv")
    transfers._aborts.cache_clear()
    with pytest.raises(UnsupportedOperationError, match="can't interrupt a send or a receive"):
        groups[0].send([torch.ones(3)], 1, 0)
    assert groups[0].errored() is None  # all else goes on
    transfers._aborts.cache_clear()


def strike_in_the_middle(
    group: ProcessGroup,
    child_pid: int,
    what: str,
    tensor: torch.Tensor,
    started: Callable[[], object],
    blow: signal.Signals = signal.SIGKILL,
) -> dist.Work:
    """Start an operation with a peer, and kill or stop that when a part of the message has passed."""
    # Stopped, the peer takes what the kernel's buffers hold and no more; what it has to do itself it does in portions.
    started()
    os.kill(child_pid, signal.SIGSTOP)
    known = sockets.traffic(group._live._sever.__self__._inodes)  # type: ignore[attr-defined]
    work = STARTS[what](group, tensor, 1)
    deadline_s = time.monotonic() + 20
    while not any(
        passed.acknowledged + passed.received > sum(known[inode]) + (1 << 14)
        for inode, passed in sockets.traffic(known).items()
    ):
        assert time.monotonic() < deadline_s
        os.kill(child_pid, signal.SIGCONT)
        os.kill(child_pid, signal.SIGSTOP)
    os.kill(child_pid, blow)
    return work


@pytest.mark.parametrize(
    ("what", "blow"),
    [
        *((what, signal.SIGSTOP) for what in ("broadcast", "broadcast of mine", "gather", "scatter")),
        *((what, signal.SIGKILL) for what in ("broadcast", "gather")),  # it takes the kernel a while to end it
    ],
)
def test_a_collective_in_the_middle_of_a_message_ends_at_once(
    what: str, blow: signal.Signals, bench: Bench, start_peer: Callable[..., tuple[ProcessGroup, ...]]
) -> None:
    """By an abort if the peer was stopped; by itself if it was killed."""
    tensor = torch.ones(1 << 24)
    limit_s = 1.0
    took_s: list[float] = []
    # A busy machine makes some late, or lets the whole message pass before the blow; constants that add up to too much
    # would make all late.
    for _ in range(6):
        group, child, ours = start_peer(tensor.numel())
        ours.send(OPPOSITES[what])
        work = strike_in_the_middle(group, child.pid, what, tensor, ours.recv, blow)
        wait = bench.start(partial(failure, work.wait))
        begun_s = time.perf_counter()
        if blow == signal.SIGSTOP:
            group.abort()
        error = wait().get()
        if error is not None:
            assert isinstance(error, AbortedError if blow == signal.SIGSTOP else PeerDisconnectedError)
            took_s.append(time.perf_counter() - begun_s)
        group.shutdown()
        child.kill()
        child.join(20)
        if min(took_s, default=limit_s) < limit_s:
            break
    assert min(took_s, default=limit_s) < limit_s, took_s


@pytest.mark.parametrize(
    ("what", "through_future"),
    [("send", False), ("recv", False), ("reduce", False), ("reduce", True), ("reduce_scatter", False)],
)
def test_a_peer_that_is_killed_in_the_middle_of_a_message(
    what: str,
    through_future: bool,
    bench: Bench,
    start_peer: Callable[[int], tuple[ProcessGroup, multiprocessing.Process, Connection]],
) -> None:
    """Gloo forgets who waits for half a message when its connection ends, and would wait until the time-out."""
    size = 1 << 25
    group, child, ours = start_peer(size)
    # Torch's thread of a collective stays until then.
    group.set_timeout(HOUR if what in ("send", "recv") else timedelta(seconds=20))
    tensor = torch.ones(size)
    ours.send(OPPOSITES[what])
    work = strike_in_the_middle(group, child.pid, what, tensor, ours.recv)
    begun_s = time.perf_counter()
    # A future's error is the backend's own, if it has one.
    with pytest.raises(RuntimeError if through_future else PeerDisconnectedError):
        (work.get_future().wait if through_future else work.wait)()
    assert isinstance(group.errored(), PeerDisconnectedError)
    tensor.fill_(-7.0)
    bench.configure([group])
    took_s = time.perf_counter() - begun_s
    assert took_s < 5, took_s
    assert reduce(group).tolist() == [1.0] * 3
    assert bool((tensor == -7.0).all())


def _survivor(addresses: list[str], size: int, what: str, peer_pid: int, parent: Connection) -> None:
    """Rank 0 of 2, whose peer it kills in the middle of a message; then a group of its own, and the end."""
    torch.set_num_threads(1)
    group = ProcessGroupGloo(HOUR)
    group.configure(addresses[0], 0, 2)
    strike_in_the_middle(group, peer_pid, what, torch.ones(size), lambda: parent.send("go") or parent.recv())
    begun_s = time.perf_counter()
    group.configure(addresses[1], 0, 1)
    reduce(group)
    group.shutdown()
    parent.send((time.perf_counter() - begun_s, threads_of_ours()))


@pytest.mark.parametrize("what", ["reduce", "reduce_scatter", "recv"])
def test_a_process_outlives_an_hours_operation_that_gloo_forgot_and_ends(bench: Bench, what: str) -> None:
    """Nobody waits for it: not the next configure, not a shutdown, not the end of the process."""
    context = forkserver()
    size = 1 << 25
    addresses = [bench.fresh_address(), bench.fresh_address()]
    (ours, theirs), (to_peer, peers) = context.Pipe(), context.Pipe()
    peer = context.Process(target=_peer, args=(addresses[0], size, peers), daemon=True)
    peer.start()
    survivor = context.Process(target=_survivor, args=(addresses, size, what, peer.pid, theirs), daemon=True)
    survivor.start()
    for end in (theirs, peers):
        end.close()
    try:
        assert (to_peer.recv(), ours.recv()) == ("configured", "go")
        to_peer.send(OPPOSITES[what])
        ours.send(to_peer.recv())
        assert ours.poll(30)
        took_s, threads = ours.recv()
        assert took_s < 7, took_s
        assert threads == []
        survivor.join(10)
        assert survivor.exitcode == 0
    finally:
        for process, end in ((peer, to_peer), (survivor, ours)):
            if process.is_alive():  # else its number may be another's by now: it is the forkserver's child
                process.kill()
            process.join(20)
            end.close()


_ENDS_WHILE_OPERATIONS_RUN = """
import os, signal, sys, threading
from datetime import timedelta
import torch
from tft_pg import ProcessGroupError, ProcessGroupGloo, format_store_addr

begun = threading.Semaphore(0)

def started(pg, operation):
    try:
        work = operation(pg, torch.zeros(4))
        begun.release()  # in the middle of a call of torch's that takes a moment, the end would end the process its way
        work.wait()
    except ProcessGroupError:
        pass

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background is started with it ignored
port, way = int(sys.argv[1]), sys.argv[2]
groups = [ProcessGroupGloo(timedelta(hours=1)) for _ in range(4)]
configures = [
    threading.Thread(target=pg.configure, args=(format_store_addr("127.0.0.1", port, f"{i // 2}"), i % 2, 2))
    for i, pg in enumerate(groups)
]
for each in configures:
    each.start()
for each in configures:
    each.join()
waits = [
    threading.Thread(target=started, args=(groups[0], operation), daemon=True)
    for operation in (lambda pg, t: pg.allreduce([t]), lambda pg, t: pg.recv([t], 1, 0))
]
for each in waits:
    each.start()
    begun.acquire()
aborted = groups[2].allreduce([torch.zeros(4)])
groups[2].abort()
running = groups[1].recv([torch.zeros(4)], 0, 2)
print("ready", flush=True)
if way == "interrupt":
    groups[1].allgather([[torch.zeros(4)] * 2], [torch.zeros(4)]).wait()
sys.stdin.readline()
"""


@pytest.mark.parametrize(("way", "code"), [("end", 0), ("interrupt", -signal.SIGINT)])
def test_a_process_ends_at_once_while_operations_of_an_hour_run(bench: Bench, way: str, code: int) -> None:
    """Nobody called `shutdown`; two daemon threads wait, one group was aborted, and one has an operation."""
    port = parse_store_addr(bench.fresh_address()).port
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", _ENDS_WHILE_OPERATIONS_RUN, str(port), way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            if way == "interrupt":
                process.send_signal(signal.SIGINT)
            try:
                _, errors = process.communicate("", timeout=30)  # far from an hour, also on a machine that is busy
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # it tells where each of its threads is
                _, errors = process.communicate()
            assert process.returncode == code, errors
        finally:
            process.kill()


def test_a_process_that_receives_more_than_it_expects_is_ended_by_torch(
    start_peer: Callable[..., tuple[ProcessGroup, ...]],
) -> None:
    """Not caught, and documented: Gloo's own thread throws, which ends the process that expected less."""
    group, child, ours = start_peer(4)
    ours.send("reduce")
    assert isinstance(failure(lambda: group.allreduce([torch.ones(8)]).wait()), PeerDisconnectedError)
    child.join(20)
    assert child.exitcode == -signal.SIGABRT


def test_a_rank_that_receives_less_than_it_expects_is_not_told(bench: Bench) -> None:
    """Not caught, and documented: the rest of the tensor stays as it was."""
    groups = bench.configured(2)
    tensors = [torch.full((4,), 1.0), torch.full((8,), 2.0)]
    assert bench.all(groups, lambda rank, group: group.broadcast(tensors[rank], 0).wait()) == [True, True]
    assert tensors[1].tolist() == [1.0] * 4 + [2.0] * 4


# --- what an abort leaves alone ------------------------------------------------------------------------------------


def resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@pytest.mark.in_parts
def test_a_hundred_configures_and_aborts_leave_nothing_and_touch_nothing_else(bench: Bench) -> None:
    groups = bench.configured(2)
    place = parse_store_addr(bench.fresh_address())
    stop = threading.Event()
    rounds: list[int] = []

    def use_sockets_and_a_store() -> None:
        store = TCPStore(place.host, place.port, is_master=False, wait_for_workers=False)
        with socket.create_server(("127.0.0.1", 0)) as server:
            while not stop.is_set():
                with socket.create_connection(server.getsockname()) as here, server.accept()[0] as there:
                    for number in range(20):
                        here.sendall(b"%06d" % number)
                        assert there.recv(6) == b"%06d" % number
                        rounds.append(store.add("rounds", 1))

    plain = [TCPStore(place.host, place.port, is_master=False, wait_for_workers=False) for _ in range(2)]
    bystanders: list[dist.ProcessGroupGloo] = [None, None]

    def make_bystander(rank: int) -> None:
        store = PrefixStore("bystander", plain[rank])
        bystanders[rank] = dist.ProcessGroupGloo(store, rank, 2, timeout=GUARD)

    for finish in [bench.start(partial(make_bystander, rank)) for rank in range(2)]:
        finish().get()
    using = bench.start(use_sockets_and_a_store)

    def cycle(number: int) -> None:
        for group in groups:
            group.set_timeout(HOUR)
        work = groups[number % 2].allreduce([torch.ones(100)])
        groups[0].abort()
        assert isinstance(failure(work.wait), AbortedError | PeerDisconnectedError)
        bench.configure(groups)

    for number in range(10):
        cycle(number)
    before = resources()
    for number in range(100):
        cycle(number)
    gc.collect()
    # The bystander opens and closes a pair of sockets all the time, and a server lets go of a client a moment later.
    for _ in range(2000):
        after = resources()
        if after[0] <= before[0] and after[1] <= before[1] + 2:
            break
        threading.Event().wait(0.005)
    assert after[0] <= before[0]
    assert after[1] <= before[1] + 2
    stop.set()
    using().get()
    assert rounds
    works = [bystander.allreduce(torch.ones(2)) for bystander in bystanders]
    assert all(work.wait() for work in works)


def test_strangers_at_its_port_end_no_group_and_are_let_go_with_the_next(bench: Bench) -> None:
    """A port scanner's connections stay open in Gloo, and one that has ended looks like a member's that has."""
    groups = bench.configured(2)
    before = len(os.listdir("/proc/self/fd"))
    for group in groups:
        for host, port in group._listeners:  # type: ignore[attr-defined]
            for _ in range(20):
                socket.create_connection((host, port)).close()
    for _ in range(2000):  # Gloo's own thread takes them
        if len(os.listdir("/proc/self/fd")) >= before + 40:
            break
        threading.Event().wait(0.005)
    assert len(os.listdir("/proc/self/fd")) >= before + 40
    bench.configure(groups)
    assert [tensor.tolist() for tensor in bench.all(groups, lambda rank, group: reduce(group))] == [[2.0] * 3] * 2
    assert [group.errored() for group in groups] == [None, None]
    for _ in range(2000):
        if len(os.listdir("/proc/self/fd")) <= before:
            break
        threading.Event().wait(0.005)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_another_group_of_the_same_process_is_left_alone(bench: Bench) -> None:
    one, two = bench.configured(2), bench.configured(2)
    one[0].abort()
    assert [tensor.tolist() for tensor in bench.all(two, lambda rank, group: reduce(group))] == [[2.0] * 3] * 2


def test_what_an_abort_waits_for_adds_up_to_less_than_200_ms() -> None:
    """Clocks can't tell on a machine that many share; the constants can."""
    assert watch._PASS_S + watch._LET_GO_S + gloo._FORGET_AFTER_S + works._LOOK_S < 0.2


def test_a_group_looks_at_its_own_threads_only(bench: Bench) -> None:
    """Else an operation that Gloo forgot would be waited for while another group computes."""
    alone, other = bench.make(), bench.make()
    threads = []
    for group in (alone, other):
        group.configure(bench.fresh_address(), 0, 1)
        threads.append(group._live._sever.__self__._threads)  # type: ignore[attr-defined]
    assert all(threads)
    assert not threads[0] & threads[1]


def test_a_member_that_was_left_behind_does_not_disturb_the_others(bench: Bench) -> None:
    groups = bench.configured(3)
    bench.configure(groups[1:])  # over the same listeners
    groups[0].abort()
    groups[0].shutdown()
    assert [tensor.tolist() for tensor in bench.all(groups[1:], lambda rank, group: reduce(group))] == [[2.0] * 3] * 2


def test_only_connected_sockets_of_the_address_match() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        place, elsewhere = Endpoint.of(server.getsockname()), Endpoint.of(other.getsockname())
        with socket.create_connection(place) as here, server.accept()[0] as there, socket.create_connection(elsewhere):
            inodes = {end: os.fstat(end.fileno()).st_ino for end in (here, there)}
            assert sockets.connected(local={place}) == {inodes[there]}
            assert sockets.connected(remote={place}) == {inodes[here]}
            assert sockets.connected(local={place}, remote={place}) == set(inodes.values())
            assert sockets.shut_down({inodes[here]}) == 1
            assert there.recv(1) == b""
        assert sockets.shut_down(set(inodes.values())) == 0
        with socket.create_connection(place) as here, server.accept()[0] as there:
            here.sendall(b"1")
            assert there.recv(1) == b"1"


def test_looking_at_a_socket_does_not_change_it() -> None:
    """Python makes a socket object non-blocking under a default time-out, and with it every duplicate."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        assert os.get_blocking(here.fileno())
        socket.setdefaulttimeout(5)
        try:
            assert sockets.connected(remote={Endpoint.of(server.getsockname())})
            sockets.shut_down({os.fstat(here.fileno()).st_ino})
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(here.fileno())


def test_an_address_is_the_same_in_every_form() -> None:
    assert Endpoint.of(("::ffff:10.0.0.1", 5, 0, 0)) == Endpoint.of(("10.0.0.1", 5)) == Endpoint("10.0.0.1", 5)
    assert Endpoint.of(("fe80::1%eth0", 5, 0, 2)) == Endpoint("fe80::1", 5)
    assert Endpoint.read(b"\1\0/a/unix/socket") is None
    assert Endpoint.read(struct.pack("=H", socket.AF_INET)) is None


def test_a_record_is_read_or_refused() -> None:
    published = _Published.read(record(Endpoint("10.1.2.3", 4000), (5, 6)))
    assert (published.endpoint, published.numbers) == (Endpoint("10.1.2.3", 4000), (5, 6))
    for junk in (b"", b"x" * 20, record(Endpoint("10.1.2.3", 4000), (5, 6))[:-1], struct.pack("=QQ", 0, 1 << 60)):
        with pytest.raises(ConfigureError, match="in an unknown format"):
            _Published.read(junk)


# --- reduce_scatter, which torch's Gloo makes of an allreduce -------------------------------------------------------


SCATTERS: dict[str, Callable[[ProcessGroup, list[torch.Tensor], list[torch.Tensor]], dist.Work]] = {
    "tensor": lambda group, outs, ins: group._reduce_scatter_base(outs[0], ins[0]),
    "by keyword": lambda group, outs, ins: group._reduce_scatter_base(outputTensor=outs[0], inputTensor=ins[0]),
    "list": lambda group, outs, ins: group.reduce_scatter([outs[0]], [list(ins[0].chunk(3))]),
    "list of one": lambda group, outs, ins: group.reduce_scatter(
        output=outs[0], input=list(ins[0].chunk(3)), op=ReduceOp.SUM, timeout=GUARD
    ),
    "coalesced": lambda group, outs, ins: group.reduce_scatter_tensor_coalesced(outs, ins),
}


@pytest.mark.parametrize("form", SCATTERS)
def test_a_reduce_scatter_in_every_form(bench: Bench, form: str) -> None:
    groups = bench.configured(3)

    def scatter(rank: int, group: ProcessGroup) -> list[torch.Tensor]:
        gaps = torch.full((4, 4), -1.0).t()[:, :2]  # what it fills in may have gaps, and so may what it reads
        outs = [gaps, torch.zeros(2, dtype=torch.int64)]
        ins = [(torch.arange(48.0).reshape(12, 4) * (rank + 1))[:, ::2], torch.arange(6) + rank]
        work = SCATTERS[form](group, outs, ins)
        assert work.wait()
        assert work.is_completed()
        return outs if form == "coalesced" else outs[:1]

    for rank, outs in enumerate(bench.all(groups, scatter)):
        whole = torch.arange(48.0).reshape(12, 4)[:, ::2] * 6
        assert torch.equal(outs[0], whole[4 * rank : 4 * rank + 4])
        assert form != "coalesced" or outs[1].tolist() == [6 * rank + 3, 6 * rank + 6]


def test_a_reduce_scatter_is_the_bits_of_torchs(bench: Bench) -> None:
    groups = bench.configured(3)

    def both(rank: int, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.randn(3 * 1001, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)
        ours, torchs = torch.empty(1001, dtype=torch.bfloat16), torch.empty(1001, dtype=torch.bfloat16)
        options = dist.ReduceScatterOptions()
        options.reduceOp = ReduceOp.AVG
        group._reduce_scatter_base(ours, whole, options).wait()
        group._live._torch_group._reduce_scatter_base(torchs, whole, options).wait()  # type: ignore[attr-defined]
        return ours, torchs

    for ours, torchs in bench.all(groups, both):
        assert torch.equal(ours, torchs)


def test_a_reduce_scatter_ends_for_whoever_looks(bench: Bench) -> None:
    """By its future, by a look at whether it has ended, and by a configure that nobody waited before."""
    groups = bench.configured(2)

    def scatter(rank: int, group: ProcessGroup) -> list[list[float]]:
        outs = [torch.zeros(2) for _ in range(3)]
        works = [group._reduce_scatter_base(out, torch.ones(4)) for out in outs]
        assert works[0].get_future().wait()[0] is outs[0]
        while not works[1].is_completed():
            time.sleep(0.001)
        assert outs[1].tolist() == [2.0, 2.0]
        assert works[2].get_future().wait()
        return [out.tolist() for out in outs]

    assert bench.all(groups, scatter) == [[[2.0, 2.0]] * 3] * 2
    unseen = [torch.zeros(2) for _ in groups]
    inner: list[dist.Work] = []
    for group, out in zip(groups, unseen, strict=True):
        inner += group._reduce_scatter_base(out, torch.ones(4))._work._works  # type: ignore[attr-defined]
    while not all(work.is_completed() for work in inner):
        time.sleep(0.001)
    bench.configure(groups)
    assert [out.tolist() for out in unseen] == [[2.0, 2.0]] * 2


# --- calls that can't work -----------------------------------------------------------------------------------------


def _gaps() -> torch.Tensor:
    return torch.ones(4, 4)[:, :2]


def _meta(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="meta")


def _root(kind: type, rank: int) -> object:
    options = kind()
    options.rootRank = rank
    return options


_one, _two, _six = torch.ones(1), torch.ones(2), torch.ones(6)
_Probe = Callable[[ProcessGroup, int], dist.Work]

# Of each collective what one rank can see to be wrong; every call is the same on both ranks, but for `rank`.
NONSENSE: dict[str, _Probe] = {
    "allreduce: nothing": lambda group, rank: group.allreduce([]),
    "allreduce: elsewhere": lambda group, rank: group.allreduce([_meta(2)]),
    "allreduce: gaps": lambda group, rank: group.allreduce([_gaps()]),
    "allreduce: two sizes": lambda group, rank: group.allreduce([_two, _one]),
    "allreduce: two dtypes": lambda group, rank: group.allreduce([_two, _two.double()]),
    "allreduce: no such dtype": lambda group, rank: group.allreduce([_two.to(torch.int16)]),
    "allreduce: one form elsewhere": lambda group, rank: group.allreduce(_meta(2), ReduceOp.SUM),
    "allreduce_coalesced: nothing": lambda group, rank: group.allreduce_coalesced([]),
    "allreduce_coalesced: two dtypes": lambda group, rank: group.allreduce_coalesced([_two, _two.double()]),
    "allreduce_coalesced: elsewhere": lambda group, rank: group.allreduce_coalesced([_meta(2)]),
    "allgather: nothing": lambda group, rank: group.allgather([], []),
    "allgather: no outputs": lambda group, rank: group.allgather([[]], [_two]),
    "allgather: too few": lambda group, rank: group.allgather([[_two]], [_two]),
    "allgather: too many": lambda group, rank: group.allgather([[_two] * 3], [_two]),
    "allgather: two sizes": lambda group, rank: group.allgather([[_two, _one]], [_two]),
    "allgather: too small": lambda group, rank: group.allgather([[_one, _one]], [_two]),
    "allgather: two dtypes": lambda group, rank: group.allgather([[_two.double()] * 2], [_two]),
    "allgather: elsewhere": lambda group, rank: group.allgather([[_two, _two]], [_meta(2)]),
    "allgather_coalesced: nothing": lambda group, rank: group.allgather_coalesced([], []),
    "allgather_coalesced: too few": lambda group, rank: group.allgather_coalesced([[_two]], [_two]),
    "allgather_coalesced: uneven": lambda group, rank: group.allgather_coalesced([[_two], [_two, _one]], [_two]),
    "allgather_coalesced: two sizes": lambda group, rank: group.allgather_coalesced([[_two], [_one]], [_two]),
    "_allgather_base: too small": lambda group, rank: group._allgather_base(torch.ones(3), _two),
    "_allgather_base: too large": lambda group, rank: group._allgather_base(_six, _two),
    "_allgather_base: two dtypes": lambda group, rank: group._allgather_base(torch.ones(4).double(), _two),
    "_allgather_base: gaps": lambda group, rank: group._allgather_base(_gaps(), torch.ones(4)),
    "_allgather_base: elsewhere": lambda group, rank: group._allgather_base(_meta(4), _two),
    "allgather_into: nothing": lambda group, rank: group.allgather_into_tensor_coalesced([], []),
    "allgather_into: uneven": lambda group, rank: group.allgather_into_tensor_coalesced([_two], [_one, _one]),
    "allgather_into: too small": lambda group, rank: group.allgather_into_tensor_coalesced([_two], [_two]),
    "reduce_scatter: nothing": lambda group, rank: group.reduce_scatter([], []),
    "reduce_scatter: too few": lambda group, rank: group.reduce_scatter([_two], [[_two]]),
    "reduce_scatter: too many": lambda group, rank: group.reduce_scatter([_two], [[_two] * 3]),
    "reduce_scatter: too large": lambda group, rank: group.reduce_scatter([_two], [[_six] * 2]),
    "reduce_scatter: two dtypes": lambda group, rank: group.reduce_scatter([_two.double()], [[_two] * 2]),
    "reduce_scatter: uneven": lambda group, rank: group.reduce_scatter([_two, _two], [[_two] * 2]),
    "reduce_scatter: elsewhere": lambda group, rank: group.reduce_scatter([_meta(2)], [[_two] * 2]),
    "_reduce_scatter_base: too small": lambda group, rank: group._reduce_scatter_base(_two, _two),
    "_reduce_scatter_base: too large": lambda group, rank: group._reduce_scatter_base(_two, _six),
    "_reduce_scatter_base: two dtypes": lambda group, rank: group._reduce_scatter_base(_one.double(), _two),
    "_reduce_scatter_base: elsewhere": lambda group, rank: group._reduce_scatter_base(_one, _meta(2)),
    "_reduce_scatter_base: no tensors": lambda group, rank: group._reduce_scatter_base("a", "b"),
    "reduce_scatter_coalesced: nothing": lambda group, rank: group.reduce_scatter_tensor_coalesced([], []),
    "reduce_scatter_coalesced: uneven": lambda group, rank: group.reduce_scatter_tensor_coalesced([_one], [_two] * 2),
    "alltoall_base: odd": lambda group, rank: group.alltoall_base(torch.ones(5), torch.ones(5), [], []),
    "alltoall_base: two sizes": lambda group, rank: group.alltoall_base(_two, _six, [], []),
    "alltoall_base: splits don't add up": lambda group, rank: group.alltoall_base(_two, _two, [1, 1], [1, 0]),
    "alltoall_base: below zero": lambda group, rank: group.alltoall_base(_two, _two, [1, 1], [-1, 3]),
    "alltoall_base: too few splits": lambda group, rank: group.alltoall_base(_two, _two, [1, 1], [2]),
    "alltoall_base: own part": lambda group, rank: group.alltoall_base(_two, _two, [0, 2], [1, 1]),
    "alltoall_base: two dtypes": lambda group, rank: group.alltoall_base(_two.double(), _two, [], []),
    "alltoall_base: rows": lambda group, rank: group.alltoall_base(torch.ones(2, 2), torch.ones(2, 3), [], []),
    "alltoall_base: gaps": lambda group, rank: group.alltoall_base(_gaps(), torch.ones(4, 2), [], []),
    "alltoall_base: gaps in": lambda group, rank: group.alltoall_base(torch.ones(4, 2), _gaps(), [], []),
    "alltoall_base: elsewhere": lambda group, rank: group.alltoall_base(_meta(2), _two, [], []),
    "alltoall_base: no rows": lambda group, rank: group.alltoall_base(torch.tensor(1.0), torch.tensor(1.0), [], []),
    "alltoall: too few": lambda group, rank: group.alltoall([_two], [_two]),
    "alltoall: two sizes": lambda group, rank: group.alltoall([_two] * 2, [_one] * 2),
    "broadcast: nothing": lambda group, rank: group.broadcast([], dist.BroadcastOptions()),
    "broadcast: no such root": lambda group, rank: group.broadcast([_two], _root(dist.BroadcastOptions, 2)),
    "broadcast: root below zero": lambda group, rank: group.broadcast([_two], _root(dist.BroadcastOptions, -1)),
    "broadcast: elsewhere": lambda group, rank: group.broadcast([_meta(2)], dist.BroadcastOptions()),
    "reduce: nothing": lambda group, rank: group.reduce([], dist.ReduceOptions()),
    "reduce: no such root": lambda group, rank: group.reduce([_two], _root(dist.ReduceOptions, 2)),
    "reduce: two": lambda group, rank: group.reduce([_two, _two], dist.ReduceOptions()),
    "reduce: elsewhere": lambda group, rank: group.reduce([_meta(2)], dist.ReduceOptions()),
    "gather: no such root": lambda group, rank: group.gather([], [_two], _root(dist.GatherOptions, 2)),
    "gather: too few": lambda group, rank: group.gather([[_two]], [_two], _root(dist.GatherOptions, rank)),
    "gather: too large": lambda group, rank: group.gather([[_six] * 2], [_two], _root(dist.GatherOptions, rank)),
    "gather: outputs not at the root": lambda group, rank: group.gather(
        [[_two] * 2], [_two], _root(dist.GatherOptions, 1 - rank)
    ),
    "scatter: no such root": lambda group, rank: group.scatter([_two], [], _root(dist.ScatterOptions, 2)),
    "scatter: too few": lambda group, rank: group.scatter([_two], [[_two]], _root(dist.ScatterOptions, rank)),
    "scatter: two dtypes": lambda group, rank: group.scatter(
        [_two.double()], [[_two] * 2], _root(dist.ScatterOptions, rank)
    ),
    "scatter: gaps": lambda group, rank: group.scatter([_gaps()], [], _root(dist.ScatterOptions, 1 - rank)),
    "scatter: elsewhere": lambda group, rank: group.scatter([_meta(2)], [], _root(dist.ScatterOptions, 1 - rank)),
    "send: no such rank": lambda group, rank: group.send([_two], 2, 0),
    "send: below zero": lambda group, rank: group.send([_two], -1, 0),
    "send: itself": lambda group, rank: group.send([_two], rank, 0),
    "send: tag below zero": lambda group, rank: group.send([_two], 1 - rank, -1),
    "send: nothing": lambda group, rank: group.send([], 1 - rank, 0),
    "send: two": lambda group, rank: group.send([_two, _two], 1 - rank, 0),
    "send: gaps": lambda group, rank: group.send([_gaps()], 1 - rank, 0),
    "send: elsewhere": lambda group, rank: group.send([_meta(2)], 1 - rank, 0),
    "recv: no such rank": lambda group, rank: group.recv([_two], 2, 0),
    "recv: itself": lambda group, rank: group.recv([_two], rank, 0),
    "recv: nothing": lambda group, rank: group.recv([], 1 - rank, 0),
    "recv: gaps": lambda group, rank: group.recv([_gaps()], 1 - rank, 0),
    "recv: elsewhere": lambda group, rank: group.recv([_meta(2)], 1 - rank, 0),
    "recv_anysource: elsewhere": lambda group, rank: group.recv_anysource([_meta(2)], 0),
    "recv_anysource: gaps": lambda group, rank: group.recv_anysource([_gaps()], 0),
}


def test_what_one_rank_can_see_to_be_wrong_is_refused_before_anything_is_sent(bench: Bench) -> None:
    """On the calling thread, by an error of the family, and the group goes on."""
    groups = bench.configured(2)
    for name, call in NONSENSE.items():
        for rank, group in enumerate(groups):
            error = failure(partial(call, group, rank))
            assert isinstance(error, OperationRefusedError), f"{name}: {error!r}"
            assert group.errored() is None, name
    assert [tensor.tolist() for tensor in bench.all(groups, lambda rank, group: reduce(group))] == [[2.0] * 3] * 2
    alone = bench.configured(1)[0]
    assert isinstance(failure(lambda: alone.recv_anysource([_two], 0)), OperationRefusedError)
    assert {name.partition(":")[0] for name in NONSENSE} >= {row.name for row in COLLECTIVES} - {
        *("barrier", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", *GLOO_LACKS)
    }


# --- settings and calls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [{"interface": "lo"}, {"hostname": "127.0.0.3"}, {}])
def test_it_listens_where_it_is_told(where: dict[str, str]) -> None:
    with Bench(partial(ProcessGroupGloo, **where), timeout=GUARD) as bench:
        groups = bench.configured(2)
        address = where.get("hostname", "127.0.0.1")
        assert {_listener(group).address for group in groups} == {address}
        assert [tensor.tolist() for tensor in bench.all(groups, lambda rank, group: reduce(group))] == [[2.0] * 3] * 2


def _listener(group: ProcessGroup) -> Endpoint:
    store = group._live._torch_group.get_group_store()  # type: ignore[attr-defined]
    return _Published.read(store.get(f"0/{group.rank()}")).endpoint


def test_it_listens_anew_when_the_store_moves(bench: Bench) -> None:
    """From a store on one loopback address to one on the other: its peers can't reach it where it was."""
    group, other = bench.make(), bench.make()
    group.configure(bench.fresh_address(), 0, 1)
    before = _listener(group)
    store = TCPStore("::1", 0, is_master=True, wait_for_workers=False)
    address = f"[::1]:{store.port}/moved"
    finish = bench.start(lambda: other.configure(address, 1, 2, timeout=GUARD))
    group.configure(address, 0, 2, timeout=GUARD)
    finish().get()
    assert (before.address, _listener(group).address) == ("127.0.0.1", "::1")


def test_the_interface_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    groups = bench.configured(2)
    assert [tensor.tolist() for tensor in bench.all(groups, lambda rank, group: reduce(group))] == [[2.0] * 3] * 2
    assert len(groups[0]._devices) == 2  # type: ignore[attr-defined]
    groups[0].abort()
    assert isinstance(failure(partial(reduce, groups[1])), PeerDisconnectedError)


def test_an_interface_that_is_not_there_is_a_clear_error(bench: Bench) -> None:
    group = ProcessGroupGloo(interface="nope0")
    error = failure(lambda: group.configure(bench.fresh_address(), 0, 1))
    assert isinstance(error, ConfigureError)
    assert "nope0" in str(error)
    group.shutdown()


@pytest.mark.parametrize(
    ("settings", "environment", "advice"),
    [
        ({"interface": "nope0"}, "", "pass another interface to the group"),
        ({"hostname": "no.such.host.invalid"}, "", "pass another hostname to the group"),
        ({"hostname": "no.such.host.invalid"}, "nope0", "pass another hostname to the group"),
        ({}, "nope0", "set GLOO_SOCKET_IFNAME to another interface"),
        ({}, " , ", "GLOO_SOCKET_IFNAME is ' , ' and names no network interface"),
        ({"interface": ","}, "lo", "interface is ',' and names no network interface"),
    ],
)
def test_the_advice_names_the_setting_that_was_wrong(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], environment: str, advice: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", environment)
    group = ProcessGroupGloo(**settings)
    error = failure(lambda: group.configure(bench.fresh_address(), 0, 1))
    assert advice in str(error)
    assert isinstance(error, (ConfigureError, ConfigError))
    group.shutdown()


def test_a_hostname_without_an_address_is_named() -> None:
    for hostname in ("no.such.host.invalid", "a..b"):
        with pytest.raises(ConfigureError, match=f"the hostname '{hostname}' has no address .*pass another hostname"):
            own_address(hostname, "127.0.0.1", 1, 2)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="not both"):
        ProcessGroupGloo(interface="lo", hostname="localhost")
    with pytest.raises(ConfigError, match="above zero"):
        ProcessGroupGloo(timedelta(0))
    for name in ("interface", "hostname"):
        with pytest.raises(ConfigError, match=f"{name} is 5; pass a string"):
            ProcessGroupGloo(**{name: 5})
    with pytest.raises(ConfigError, match="trace_dir is 5; pass the path of a directory"):
        ProcessGroupGloo(trace_dir=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [ProcessGroupGloo, ProcessGroupDummy])
@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"rank": False}, "rank is False; pass an int"),
        ({"world_size": 1.0}, "world_size is 1.0; pass an int"),
        ({"world_size": 0}, "rank is 0 and world_size is 0; pass a rank from 0"),
        ({"replica_id": 5}, "replica_id is 5; pass a string"),
        ({"quorum_id": "x"}, "quorum_id is 'x'; pass an int"),
        ({"group_rank": -1}, "group_rank is below 0; pass a number from 0"),
        ({"group_rank": None}, "group_rank is None; pass an int"),
        ({"group_world_size": 0}, "group_world_size is below 1"),
        ({"global_ranks": ["a"]}, "global_ranks[0] is 'a'; pass an int"),
        ({"global_ranks": [-1]}, "global_ranks[0] is below 0"),
        ({"global_ranks": "a"}, "global_ranks is 'a'; pass a list"),
        ({"global_ranks": 5}, "global_ranks is 5; pass a list"),
        ({"global_ranks": [0, 1]}, "global_ranks has 2 entries and world_size is 1"),
    ],
)
def test_each_argument_of_configure_is_checked_before_anything_starts(
    make: Callable[[], ProcessGroup], arguments: dict[str, Any], fault: str
) -> None:
    group = make()
    with pytest.raises(ConfigError, match=re.escape(fault)):
        group.configure("127.0.0.1:1/x", **{"rank": 0, "world_size": 1, **arguments})
    assert group.errored() is None
    group.shutdown()


def test_a_refused_operation_leaves_the_group_usable(bench: Bench) -> None:
    groups = bench.configured(2)
    for error in bench.all(
        groups, lambda rank, group: failure(lambda: group.allreduce([torch.ones(2, dtype=torch.int16)]).wait())
    ):
        assert isinstance(error, OperationRefusedError)
        assert "int16" in str(error)
    with pytest.raises(TypeError):
        groups[0].allreduce("no tensor")
    assert [tensor.tolist() for tensor in bench.all(groups, lambda rank, group: reduce(group))] == [[2.0] * 3] * 2
    assert [group.errored() for group in groups] == [None, None]


def test_torchs_functions_take_the_group(bench: Bench) -> None:
    groups = bench.configured(2)

    def use(rank: int, group: ProcessGroup) -> list[object]:
        mean, taken = torch.full((2,), float(rank)), torch.full((2,), float(rank))
        gathered, objects = [torch.zeros(2), torch.zeros(2)], [None, None]
        dist.all_reduce(mean, op=ReduceOp.AVG, group=group)
        dist.broadcast(taken, group_src=1, group=group)
        dist.all_gather(gathered, taken + rank, group=group)
        dist.barrier(group=group)
        dist.all_gather_object(objects, {"rank": rank}, group=group)
        work = dist.all_reduce(taken, group=group, async_op=True)
        work.wait()
        return [mean.tolist(), taken.tolist(), [tensor.tolist() for tensor in gathered], objects]

    expected = [[0.5, 0.5], [2.0, 2.0], [[1.0, 1.0], [2.0, 2.0]], [{"rank": 0}, {"rank": 1}]]
    assert bench.all(groups, use) == [expected, expected]


def test_torchs_ddp_runs_on_it_unmodified(bench: Bench) -> None:
    groups = bench.configured(2)

    def gradients(rank: int, group: ProcessGroup) -> list[torch.Tensor]:
        with torch.random.fork_rng():
            model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        for number, parameter in enumerate(model.parameters()):
            torch.nn.init.constant_(parameter, 0.01 * (number + 1))
        trained = DistributedDataParallel(model, process_group=group)
        for step in range(3):
            trained.zero_grad()
            trained(torch.full((2, 4), float(rank + step))).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    on_ours = bench.all(groups, gradients)
    assert len(on_ours[0]) == 4
    torch.testing.assert_close(on_ours[0], on_ours[1], rtol=0, atol=0)
    alone = bench.configured(1)
    mean = [(one + two) / 2 for one, two in zip(gradients(0, alone[0]), gradients(1, alone[0]), strict=True)]
    torch.testing.assert_close(on_ours[0], mean)


def test_the_groups_words_name_the_place(bench: Bench) -> None:
    groups = bench.configured(2)
    assert repr(groups[1]) == "ProcessGroupGloo(rank 1 of 2, replica replica_1/0, quorum 1, configured)"
    groups[1].abort()
    error = failure(partial(reduce, groups[1]))
    assert isinstance(error, AbortedError)
    assert error.where is not None
    assert (error.where.rank, error.where.replica_id, error.where.quorum_id) == (1, "replica_1", 1)
    assert "rank 1 of 2, replica replica_1/0, quorum 1" in str(error)
    assert "unusable" in repr(groups[1])
