"""Configure and abort, again and again, while the rest of the process lives its own life.

Three ranks; in each round aborts fall at random moments into a configure and into a collective that one rank never
joins, or joins late. Meanwhile other threads of the same process open and use connections, servers, datagrams and
stores of their own. Nothing of theirs may be touched, nothing may pile up, and no tensor whose operation has failed
may change afterwards. The law of this file: every moment comes from a seed, which the failure names.
"""

from __future__ import annotations

import ctypes
import gc
import http.client
import http.server
import itertools
import multiprocessing
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tft_pg import ProcessGroup, ProcessGroupError, ProcessGroupGloo, parse_store_addr
from tft_pg.backends.live import reap
from tft_pg.testing import Bench

HOUR = timedelta(hours=1)
GUARD = timedelta(seconds=20)
RANKS = 3
# What torch's Gloo forgets in the middle of a message keeps its threads until this has passed; no wait takes as long.
TIMEOUT = timedelta(seconds=4)
PROMPT_S = 2.0
WARM_UP_ROUNDS = 50
SENTINEL = -7.0
ROUNDS_KEPT = 4
LENGTHS = (1, 1000, 1 << 16, 1 << 19)
# The store keeps the addresses that each configure published: some 300 bytes a rank.
ALLOCATED_BYTES = 4 << 20
RESIDENT_BYTES = 64 << 20
# Where the store is another process's, a configure leaves nothing, but torch leaves some 1 to 1.6 KB of each group, of
# a bare one as well, whose threads have run an operation. Nothing large comes and goes, so there are few holes.
TORCHS_BYTES_A_GROUP = 2 << 10
HOLES_BYTES = 4 << 20
SETTLE_S = 10.0


# --- the rest of the process ---------------------------------------------------------------------------------------


class Bystanders:
    """Threads that use sockets and stores all the time, and say so if one of them was touched.

    Args:
        host, port: of the store that the groups rendezvous in, which is used by others too.
    """

    def __init__(self, host: str, port: int) -> None:
        self._shared = (host, port)
        self._stop = threading.Event()
        self._resting = threading.Condition()
        self._rest = False
        self._num_resting = 0
        self.uses: dict[str, int] = {}
        self.errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._repeat, args=(name, make), name=f"bystander-{name}")
            for name, make in {
                "kept connection": self._kept_connection,
                "fresh connections": self._fresh_connections,
                "http": self._http,
                "datagrams": self._datagrams,
                "unix sockets": self._unix_sockets,
                "own store": self._own_store,
                "shared store": self._shared_store,
                "fresh clients of the shared store": self._fresh_clients,
            }.items()
        ]

    def __enter__(self) -> Bystanders:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(SETTLE_S)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """While the block lasts, nobody is in the middle of anything: what comes and goes is gone."""
        with self._resting:
            self._rest = True
            everybody = len(self._threads)
            assert self._resting.wait_for(lambda: self._num_resting == everybody or self.errors, SETTLE_S), self.uses
        yield
        with self._resting:
            self._rest = False
            self._resting.notify_all()

    def _repeat(self, name: str, make: Callable[[ExitStack], Callable[[int], None]]) -> None:
        try:
            with ExitStack() as stack:
                use = make(stack)
                for number in itertools.count():
                    with self._resting:
                        while self._rest:
                            self._num_resting += 1
                            self._resting.notify_all()
                            self._resting.wait_for(lambda: not self._rest)
                            self._num_resting -= 1
                    if self._stop.is_set():
                        return
                    use(number)
                    self.uses[name] = number + 1
                    self._stop.wait(0.002)  # many of them share the machine with what is tested
        except Exception as error:
            with self._resting:
                self.errors.append(f"{name}: {type(error).__name__}: {error}")
                self._resting.notify_all()

    @staticmethod
    def _echo(here: socket.socket, there: socket.socket, number: int) -> None:
        here.sendall(b"%06d" % number)
        assert there.recv(6) == b"%06d" % number
        there.sendall(b"%06d" % -number)
        assert here.recv(6) == b"%06d" % -number

    def _kept_connection(self, stack: ExitStack) -> Callable[[int], None]:
        """One connection for the whole test, on the address and the kind of ports that Gloo uses."""
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        here = stack.enter_context(socket.create_connection(server.getsockname(), timeout=SETTLE_S))
        there = stack.enter_context(server.accept()[0])
        return partial(self._echo, here, there)

    def _fresh_connections(self, stack: ExitStack) -> Callable[[int], None]:
        servers = [stack.enter_context(socket.create_server((host, 0))) for host in ("127.0.0.1", "127.0.0.2")]

        def use(number: int) -> None:
            server = servers[number % 2]
            with socket.create_connection(server.getsockname(), timeout=SETTLE_S) as here, server.accept()[0] as there:
                for time in range(5):
                    self._echo(here, there, time)

        return use

    def _http(self, stack: ExitStack) -> Callable[[int], None]:
        class Echo(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                return

        server = stack.enter_context(http.server.HTTPServer(("127.0.0.1", 0), Echo))
        serving = threading.Thread(target=server.serve_forever, args=(0.01,), name="bystander-http-server")
        serving.start()
        stack.callback(serving.join)
        stack.callback(server.shutdown)
        client = stack.enter_context(closing(http.client.HTTPConnection(*server.server_address, timeout=SETTLE_S)))

        def use(number: int) -> None:
            client.request("POST", "/", b"%d" % number)
            assert client.getresponse().read() == b"%d" % number

        return use

    def _datagrams(self, stack: ExitStack) -> Callable[[int], None]:
        here, there = (stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(2))
        for end in (here, there):
            end.settimeout(SETTLE_S)
            end.bind(("127.0.0.1", 0))
        here.connect(there.getsockname())
        there.connect(here.getsockname())
        return partial(self._echo, here, there)

    def _unix_sockets(self, stack: ExitStack) -> Callable[[int], None]:
        kept = [stack.enter_context(end) for end in socket.socketpair()]

        def use(number: int) -> None:
            self._echo(kept[0], kept[1], number)
            here, there = socket.socketpair()
            with here, there:
                self._echo(here, there, number)

        return use

    def _own_store(self, stack: ExitStack) -> Callable[[int], None]:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        return lambda number: self._use_store(server, client, number)

    def _shared_store(self, stack: ExitStack) -> Callable[[int], None]:
        one, two = (TCPStore(*self._shared, is_master=False, wait_for_workers=False) for _ in range(2))
        return lambda number: self._use_store(one, two, number)

    def _fresh_clients(self, stack: ExitStack) -> Callable[[int], None]:
        def use(number: int) -> None:
            client = TCPStore(*self._shared, is_master=False, wait_for_workers=False)
            for _ in range(5):
                self._use_store(client, client, number)
            time.sleep(0.005)  # each costs the store's server a look-up of the address

        return use

    @staticmethod
    def _use_store(one: TCPStore, two: TCPStore, number: int) -> None:
        key = f"bystander/{id(one)}/{number % 10}"
        one.set(key, str(number))
        two.wait([key], GUARD)
        assert two.get(key) == str(number).encode()
        one.delete_key(key)


# --- what the process holds ----------------------------------------------------------------------------------------


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = (
        ("unused", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),
        ("unused_too", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),
        ("unused_as_well", ctypes.c_size_t * 2),
    )


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Mallinfo


@dataclass(frozen=True)
class Held:
    """What this process holds.

    Args:
        threads: of any kind.
        descriptors: open ones.
        allocated_bytes: memory in use, as the allocator counts it.
        resident_bytes: memory that it has from the kernel; holes between what is in use count, which come and go.
    """

    threads: int
    descriptors: int
    allocated_bytes: int
    resident_bytes: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        _libc.malloc_trim(0)
        with open("/proc/self/statm", encoding="ascii") as statm:
            resident_pages = int(statm.read().split()[1])
        allocated = _libc.mallinfo2()
        return cls(
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
            allocated.uordblks + allocated.hblkhd,
            resident_pages * os.sysconf("SC_PAGESIZE"),
        )

    def within(
        self, before: Held, *, allocated_bytes: int = ALLOCATED_BYTES, resident_bytes: int = RESIDENT_BYTES
    ) -> bool:
        """Whether it is no more than before, but for memory."""
        return (
            self.threads <= before.threads
            and self.descriptors <= before.descriptors
            and self.allocated_bytes <= before.allocated_bytes + allocated_bytes
            and self.resident_bytes <= before.resident_bytes + resident_bytes
        )


def settled() -> Held:
    """What the process holds when nothing has come or gone for a while: a server lets go of a client a bit later."""
    still = Held.now()
    deadline_s = time.monotonic() + SETTLE_S
    same = 0
    while (same < 4 or reap()) and time.monotonic() < deadline_s:
        threading.Event().wait(0.05)
        now = Held.now()
        same = same + 1 if (now.threads, now.descriptors) == (still.threads, still.descriptors) else 0
        still = now
    return still


# --- one round -----------------------------------------------------------------------------------------------------


class Sentinels:
    """Tensors of failed operations, filled after the failure; whatever lands later shows."""

    def __init__(self) -> None:
        self._kept: deque[list[torch.Tensor]] = deque([[]])

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.fill_(SENTINEL)
        self._kept[-1].append(tensor)

    def next_round(self) -> None:
        self._kept.append([])
        if len(self._kept) > ROUNDS_KEPT:
            self._check(self._kept.popleft())

    def check_all(self) -> None:
        for tensors in self._kept:
            self._check(tensors)

    @staticmethod
    def _check(tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            assert bool((tensor == SENTINEL).all()), "something landed in the tensor of a failed operation"


def configure_under_fire(group: ProcessGroup, address: str, rank: int, delays_s: Sequence[float]) -> bool:
    """Configure while another thread aborts, after each delay in turn and then again and again; whether it worked."""
    ended = threading.Event()

    def abort() -> None:
        for delay_s in itertools.chain(delays_s, itertools.repeat(0.02)):
            if ended.wait(delay_s):
                return
            group.abort()

    aborting = threading.Thread(target=abort, name="aborting")
    aborting.start()
    try:
        group.configure(address, rank, RANKS, timeout=HOUR)
    except ProcessGroupError:
        return False
    else:
        return True
    finally:
        ended.set()
        aborting.join()


def reduce_under_fire(group: ProcessGroup, tensor: torch.Tensor, wait_s: float, abort_s: float | None) -> bool:
    """Start a reduction after a while, and abort it from another thread after another; whether it worked."""
    if wait_s:
        time.sleep(wait_s)
    timer = threading.Timer(abort_s, group.abort) if abort_s is not None else None
    if timer is not None:
        timer.start()
    begun_s = time.monotonic()
    try:
        group.allreduce([tensor]).wait()
    except ProcessGroupError:
        return False
    else:
        return True
    finally:
        assert time.monotonic() - begun_s < PROMPT_S, "an abort did not end the reduction, its time-out did"
        if timer is not None:
            timer.join()


@dataclass
class Tally:
    """How often which came about: what random moments reach is part of what is tested."""

    built: int = 0
    unbuilt: int = 0
    reduced: int = 0
    unreduced: int = 0

    def configured(self, worked: Sequence[bool]) -> None:
        self.built += sum(worked)
        self.unbuilt += len(worked) - sum(worked)


class Rounds:
    """Rounds of three ranks in this process."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self._bench = bench
        self._random = random.Random(seed)
        self._groups = bench.configured(RANKS)
        self._sentinels = Sentinels()
        self.tally = Tally()

    def run(self) -> None:
        if self._random.random() < 0.5:
            self._abort_configures()
        self._bench.configure(self._groups)
        for group in self._groups:
            group.set_timeout(TIMEOUT)
        self._abort_a_reduction()
        self._sentinels.next_round()

    def rest(self) -> None:
        """To the state in which the process is counted: each group has its store and its listener, and no more."""
        self._sentinels.check_all()
        self._sentinels = Sentinels()
        self._bench.configure(self._groups)
        for group in self._groups:
            group.abort()

    def _abort_configures(self) -> None:
        address = self._bench.fresh_address()
        comers = self._groups if self._random.random() < 0.5 else self._random.sample(self._groups, RANKS - 1)
        plans = [
            (group, self._groups.index(group), [self._random.uniform(0, 0.04) for _ in range(2)]) for group in comers
        ]
        finishes = [
            self._bench.start(partial(configure_under_fire, group, address, rank, delays))
            for group, rank, delays in plans
        ]
        self.tally.configured([finish().get() for finish in finishes])

    def _abort_a_reduction(self) -> None:
        length = self._random.choice(LENGTHS)
        tensors = [torch.ones(length) for _ in self._groups]
        ranks = list(range(RANKS))
        absent = self._random.choice(ranks)
        late_s = self._random.uniform(0, 0.004) if self._random.random() < 0.5 else None
        aborters = self._random.sample(ranks, self._random.randint(1, RANKS))
        if aborters == [absent] and late_s is None:
            aborters.append((absent + 1) % RANKS)
        abort_s = {rank: self._random.uniform(0, 0.006) for rank in aborters}
        comers = [rank for rank in ranks if rank != absent or late_s is not None]
        finishes = [
            self._bench.start(
                partial(
                    reduce_under_fire,
                    self._groups[rank],
                    tensors[rank],
                    (late_s or 0.0) if rank == absent else 0.0,
                    abort_s.get(rank),
                )
            )
            for rank in comers
        ]
        for rank, finish in zip(comers, finishes, strict=True):
            if finish().get():
                self.tally.reduced += 1
                assert bool((tensors[rank] == RANKS).all()), "a reduction that worked has the sum of all ranks"
            else:
                self.tally.unreduced += 1
                self._sentinels.keep(tensors[rank])


def soak(num_rounds: int, seed: int) -> tuple[Held, Held, Tally, dict[str, int]]:
    with Bench(ProcessGroupGloo, timeout=GUARD) as bench:
        rounds = Rounds(bench, seed)
        place = parse_store_addr(bench.fresh_address())
        with Bystanders(place.host, place.port) as bystanders:
            before = after = Held.now()
            for number in range(num_rounds):
                if number == min(WARM_UP_ROUNDS, num_rounds // 2):
                    rounds.rest()
                    with bystanders.at_rest():
                        before = settled()
                rounds.run()
                assert not bystanders.errors, f"seed {seed}, round {number}: {bystanders.errors}"
            rounds.rest()
            with bystanders.at_rest():
                after = settled()
            uses = dict(bystanders.uses)
        assert not bystanders.errors, f"seed {seed}: {bystanders.errors}"
    return before, after, rounds.tally, uses


def check_soak(num_rounds: int, seed: int) -> Tally:
    before, after, tally, uses = soak(num_rounds, seed)
    assert after.within(before), f"seed {seed}: {before} grew to {after}"
    assert len(uses) == 8, uses
    assert min(uses.values()) >= num_rounds, f"a bystander hardly ran: {uses}"
    # The moments fall on both sides of everything.
    assert tally.unbuilt, tally
    assert tally.reduced, tally
    assert tally.unreduced, tally
    return tally


@pytest.mark.in_parts
def test_a_hundred_rounds_touch_nothing_else_and_leave_nothing() -> None:
    check_soak(100, seed=20)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(3))
def test_five_hundred_rounds_touch_nothing_else_and_leave_nothing(seed: int) -> None:
    """And five hundred configures at least that aborts fell into."""
    tally = check_soak(500, seed)
    assert tally.built + tally.unbuilt >= 500, tally


# --- the same with one process a rank ------------------------------------------------------------------------------


def _rank(rank: int, parent: Connection, address: str, seed: int, num_rounds: int) -> None:
    """A rank in its own process: each phase begins when the parent says so, and ends with a word to it."""
    moments = random.Random(f"{seed} {rank}")
    plans = random.Random(seed)  # the same on every rank
    sentinels = Sentinels()
    group = ProcessGroupGloo(GUARD)
    for number in range(num_rounds):
        parent.recv()
        configure_under_fire(group, f"{address}/fire/{number}", rank, [moments.uniform(0, 0.04) for _ in range(2)])
        parent.send("aborted")
        parent.recv()
        group.configure(f"{address}/calm/{number}", rank, RANKS)
        group.set_timeout(TIMEOUT)
        parent.send("configured")
        parent.recv()  # who aborts before all have configured would break their configure
        length, absent = plans.choice(LENGTHS), plans.randrange(RANKS)
        tensor = torch.ones(length)
        if rank != absent:
            abort_s = moments.uniform(0, 0.006)
            assert not reduce_under_fire(group, tensor, 0, abort_s), "a reduction of fewer than all worked"
            sentinels.keep(tensor)
        sentinels.next_round()
        parent.send("reduced")
    sentinels.check_all()
    parent.recv()
    group.configure(f"{address}/last", rank, RANKS)
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    parent.send(tensor.tolist())
    parent.recv()
    group.shutdown()


def _reconfiguring_rank(rank: int, parent: Connection, address: str, num_ranks: int) -> None:
    """A rank that is configured with another place each time, reduces, and tells what its process holds when asked."""
    group = ProcessGroupGloo(GUARD)
    number = 0
    while (order := parent.recv()) != "end":
        if order == "count":
            group.abort()  # the state between two groups: no connection, and none of torch's threads
            parent.send(settled())
            continue
        place = (rank + number) % num_ranks
        group.configure(f"{address}/{number}", place, num_ranks)
        tensor = torch.full((4,), float(place))
        group.allreduce([tensor]).wait()
        parent.send(tensor.tolist())
        number += 1
    group.shutdown()


def _in_child(target: Callable[..., None], rank: int, parent: Connection, arguments: Sequence[object]) -> None:
    torch.set_num_threads(1)
    target(rank, parent, *arguments)


class Ranks:
    """Some ranks, each in a process of its own, that act when they are told to; a context manager, which ends them.

    Args:
        num_ranks: how many.
        target: what each runs: `target(rank, connection to the parent, store address, *arguments)`.
        arguments: for it.
    """

    def __init__(self, num_ranks: int, target: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "tft_pg"])
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [context.Pipe() for _ in range(num_ranks)]
        self._duplicates = [ours for ours, _ in pipes]
        theirs = [theirs for _, theirs in pipes]
        given = (f"127.0.0.1:{self._store.port}", *arguments)
        self._processes = [
            context.Process(target=_in_child, args=(target, rank, end, given)) for rank, end in enumerate(theirs)
        ]
        for process, end in zip(self._processes, theirs, strict=True):
            process.start()
            end.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process, ours in zip(self._processes, self._duplicates, strict=True):
            if process.is_alive():  # else its number may be another's by now: it is the forkserver's child
                process.kill()
            process.join(GUARD.total_seconds())
            ours.close()

    def everybody(self, order: str = "go") -> list[Any]:
        """Tell all, and give what each answers."""
        for ours in self._duplicates:
            ours.send(order)
        answers = []
        for rank, ours in enumerate(self._duplicates):
            assert ours.poll(GUARD.total_seconds()), f"rank {rank} did not come back"
            answers.append(ours.recv())
        return answers

    def end(self) -> None:
        """Tell all that this was the last order, and wait for them to end well."""
        for ours in self._duplicates:
            ours.send("end")
        for process in self._processes:
            process.join(GUARD.total_seconds())
            assert process.exitcode == 0


def test_ranks_in_processes_of_their_own_abort_and_go_on() -> None:
    seed, num_rounds = 4, 15
    with Ranks(RANKS, _rank, seed, num_rounds) as ranks:
        for _ in range(num_rounds):
            assert ranks.everybody() == ["aborted"] * RANKS
            assert ranks.everybody() == ["configured"] * RANKS
            assert ranks.everybody() == ["reduced"] * RANKS
        assert ranks.everybody() == [[float(RANKS)] * 3] * RANKS
        ranks.end()


def check_reconfigurations(num_reconfigurations: int) -> None:
    """No process holds more at the end than after a warm-up."""
    with Ranks(4, _reconfiguring_rank, 4) as ranks:
        before: list[Held] = []
        for number in range(num_reconfigurations):
            if number == min(WARM_UP_ROUNDS, num_reconfigurations // 2):
                before = ranks.everybody("count")
            assert ranks.everybody() == [[6.0] * 4] * 4
        after: list[Held] = ranks.everybody("count")
        ranks.end()
    torchs_bytes = num_reconfigurations * TORCHS_BYTES_A_GROUP
    for rank, (first, last) in enumerate(zip(before, after, strict=True)):
        assert last.within(first, allocated_bytes=torchs_bytes, resident_bytes=torchs_bytes + HOLES_BYTES), (
            f"rank {rank}: {first} grew to {last}"
        )


@pytest.mark.in_parts
def test_sixty_reconfigurations_of_four_processes_leave_nothing() -> None:
    check_reconfigurations(60)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_thousand_reconfigurations_of_four_processes_leave_nothing() -> None:
    check_reconfigurations(1000)
