"""Checks of a peer's death: killed, stopped or disconnected, at each point of a collective, in real processes.

Two ranks survive, this process and a child, and a third is the victim. The survivors must fail at once with
`PeerDisconnectedError`. If the victim is only stopped, nothing reports that, and `abort` must end the operation. Then
the survivors must work in a smaller group. Victims that survive their fault join the next group, so that few processes
are started.

Law of this file: processes report every moment, and no wait depends on a timeout of the group.
"""

from __future__ import annotations

import ctypes
import enum
import multiprocessing
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import final

import torch

from tft_pg.base import ProcessGroup
from tft_pg.errors import AbortedError, PeerDisconnectedError, ProcessGroupError
from tft_pg.sockets import Endpoint, Held
from tft_pg.store import parse_store_addr
from tft_pg.testing.bench import GUARD_S, Bench
from tft_pg.testing.cases import CASES, Sample, Started
from tft_pg.testing.subject import Subject, failure, reduce_ones, require
from tft_pg.word import WordExchange
from tft_pg.wrappers.wrapping import WrappingProcessGroup

__all__ = [
    "CHECKS",
    "Fault",
    "Point",
    "a_dead_peer_fails_the_collective",
    "every_death_at_every_point",
    "every_death_in_a_word",
]

_HOUR = timedelta(hours=1)
_GUARD = timedelta(seconds=GUARD_S)
_SURVIVORS = 2
_VICTIM = 2
_SMALL = 5
# Larger than the kernel's buffers of a connection, so that a stopped receiver stops its senders.
_LARGE = 1 << 23
_LENGTHS = dict.fromkeys(("allgather", "reduce_scatter", "alltoall_base"), _LARGE // 4)
_ABORT_S = 0.2
# Many processes may share two cores. The check must only exclude a wait for the timeout of an hour.
_SLACK_S = 0.8
_UNDER_WAY_BYTES = 1 << 14
_TRIES = 8
_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None)


class Fault(enum.Enum):
    """The fault of the victim."""

    KILLED = "killed"
    STOPPED = "stopped"
    CUT_OFF = "cut off"


class Point(enum.Enum):
    """The moment of the fault."""

    BEFORE = "before it starts"
    MIDDLE = "in the middle of a large message"
    AFTER = "after it has sent its part"


_ROWS = ("allreduce", "allgather", "broadcast", "reduce_scatter", "alltoall_base", "send", "barrier")


# --- the other processes ---


@dataclass(frozen=True)
class _Order:
    """An order for a child. The child answers with an error's name and text, or None."""

    what: str
    address: str = ""
    rank: int = 0
    world_size: int = 1
    row: str = ""
    length: int = 0
    store_ports: tuple[int, ...] = ()


_Answer = tuple[str, str] | None


@final
class _Child:
    """A process with one group in it."""

    def __init__(self, make: Callable[[], ProcessGroup]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "tft_pg", "tft_pg.testing"])
        self._duplicates, theirs = context.Pipe()
        self._holder = 0  # the process that holds the connections of its group
        self.process = context.Process(target=_serve, args=(make, theirs), name="tft-pg-peer", daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> _Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # otherwise another process may have its number by now, because the forkserver is its parent
        if self.process.is_alive():
            self.process.kill()
        self.process.join(GUARD_S)
        self._duplicates.close()

    def order(self, order: _Order) -> None:
        self._duplicates.send(order)

    def answer(self) -> _Answer:
        assert self._duplicates.poll(GUARD_S), "a child process does not answer"
        answer: _Answer
        answer, self._holder = self._duplicates.recv()
        return answer

    def signal(self, number: int) -> None:
        """Send a signal to the process, and to the one that holds the connections of its group."""
        assert self.process.pid is not None
        for pid in {self.process.pid, self._holder}:
            os.kill(pid, number)


def _serve(make: Callable[[], ProcessGroup], parent: Connection) -> None:
    torch.set_num_threads(1)
    group = make()
    group.set_timeout(_HOUR)
    runs: list[_Run] = []
    words: list[WordExchange] = []
    while True:
        try:
            order: _Order = parent.recv()
        except EOFError:
            return
        parent.send((_told(failure(group, partial(_obey, order, group, runs, words))), _holder(group)))


def _told(error: BaseException | None) -> _Answer:
    return None if error is None else (type(error).__name__, str(error))


def _obey(order: _Order, group: ProcessGroup, runs: list[_Run], words: list[WordExchange]) -> None:
    match order.what:
        case "configure":
            group.configure(order.address, order.rank, order.world_size, timeout=_GUARD)
        case "start":
            runs[:] = [_Run(group, order.row, Sample(order.rank, order.world_size, length=order.length))]
        case "finish":
            runs[0].finish()
        case "reduce":
            _check_equal(reduce_ones(group), torch.full((3,), float(order.world_size)))
        case "start word":
            before = _traffic(_holder(group))
            words[:] = [group.exchange_word([1, order.rank], round_number=1, timeout=_HOUR)]
            _wait_for_traffic(_holder(group), before)
        case "finish word":
            assert words[0].wait() == (3, 3)
        case "cut off":
            _cut_off(_holder(group), {parse_store_addr(order.address).port, *order.store_ports})
        case _:
            raise AssertionError(f"there is no order {order.what!r}")


@final
class _Run:
    """A running collective."""

    def __init__(self, group: ProcessGroup, row: str, sample: Sample) -> None:
        self._group = group
        self._case = next(case for case in CASES if case.row == row)
        self._sample = sample
        self._started: Started | None = None
        self._error = failure(group, self._start)

    def _start(self) -> None:
        self._started = self._case.start(self._group, self._sample)

    def finish(self) -> None:
        """Wait for the end, and check a successful result. Raises: the operation's error, AssertionError."""
        if self._error is not None:
            raise self._error
        assert self._started is not None
        for work in self._started.works:
            error = failure(self._group, work.wait)
            if error is not None:
                raise error
        for got, expected in zip(self._started.outputs, self._case.expected(self._sample) or [], strict=True):
            _check_equal(got, expected)


def _check_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Check equality without `agree`, whose first use in a process takes a second."""
    assert torch.equal(got, expected), f"got {got}, expected {expected}"


def _holder(group: ProcessGroup) -> int:
    """Return the process that holds the connections of a group: this one, or the group's child."""
    while isinstance(group, WrappingProcessGroup):
        group = group.parent
    return getattr(group, "child_pid", None) or os.getpid()


@contextmanager
def _tcp_sockets(pid: int) -> Iterator[dict[int, socket.socket]]:
    """Yield duplicates of a process's connected TCP sockets by their inodes, and close them afterwards."""
    pidfd = os.pidfd_open(pid)
    found: dict[int, socket.socket] = {}
    with ExitStack() as stack:
        stack.callback(os.close, pidfd)
        for name in os.listdir(f"/proc/{pid}/fd"):
            duplicate = int(_libc.syscall(_PIDFD_GETFD, pidfd, int(name), 0))
            if duplicate < 0:  # the descriptor of the listing itself, or closed in the meantime
                continue
            status = os.fstat(duplicate)
            if not stat.S_ISSOCK(status.st_mode):
                os.close(duplicate)
                continue
            opened = stack.enter_context(socket.socket(fileno=duplicate))
            with suppress(OSError):  # a listening socket
                if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.getpeername():
                    found[status.st_ino] = opened
        yield found


def _traffic(pid: int) -> dict[int, int]:
    """Return the bytes that each TCP connection of a process has sent and received."""
    with _tcp_sockets(pid) as found:
        return {inode: sum(Held(each.fileno(), each.fileno(), inode).traffic()) for inode, each in found.items()}


def _wait_for_traffic(
    pid: int, before: dict[int, int], more_than: int = 0, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Wait until one of a process's connections has passed more than that many bytes."""
    deadline_s = time.monotonic() + GUARD_S
    while not any(passed > before.get(inode, passed) + more_than for inode, passed in _traffic(pid).items()):
        assert time.monotonic() < deadline_s, "nothing passes"
        meanwhile()


def _cut_off(pid: int, ports: Collection[int]) -> None:
    """Shut down all TCP connections of a process except those to its stores, at these ports."""
    with _tcp_sockets(pid) as found:
        theirs = [each for each in found.values() if Endpoint.of(each.getpeername()).port not in ports]
        for each in theirs:
            with suppress(OSError):  # its other end is in the same process, and ended it
                each.shutdown(socket.SHUT_RDWR)


# --- the cases ---


@final
class _Stage:
    """This process, a surviving child and a victim, in one group of three, for one case after another."""

    def __init__(self, subject: Subject, bench: Bench, stack: ExitStack) -> None:
        self._subject = subject
        self._bench = bench
        self._stack = stack
        self.group = bench.make()
        self.group.set_timeout(_HOUR)
        self.survivor = stack.enter_context(_Child(subject.make))
        self.victim = stack.enter_context(_Child(subject.make))
        self.address = ""

    def configure(self, children: Sequence[_Child]) -> None:
        """Configure a group with this process as rank 0 and the children as the next ranks."""
        self.address = self._bench.fresh_address()
        size = len(children) + 1
        for rank, child in enumerate(children, 1):
            child.order(_Order("configure", self.address, rank, size))
        self.group.configure(self.address, 0, size, timeout=_GUARD)
        for child in children:
            assert child.answer() is None

    def play(self, row: str, fault: Fault, point: Point) -> bool:
        """Run one case, from a complete group of three to a working group of two.

        Returns: whether the fault came at its point. If not, the whole message had passed before it.
        """
        if not self.victim.process.is_alive():
            self.victim = self._stack.enter_context(_Child(self._subject.make))
        self.configure([self.survivor, self.victim])
        large = point is Point.MIDDLE
        length = _LENGTHS.get(row, _LARGE) if large else _SMALL
        order = partial(_Order, row=row, length=length, world_size=3)
        if point is not Point.BEFORE:
            self.victim.order(order("start", rank=_VICTIM))
            assert self.victim.answer() is None
        before = _traffic(_holder(self.group))
        if large:
            # A stopped victim receives only what fits into the kernel's buffers. `_let_pass` runs it in small portions.
            self.victim.signal(signal.SIGSTOP)
        self.survivor.order(order("start", rank=1))
        assert self.survivor.answer() is None
        run = _Run(self.group, row, Sample(0, 3, length=length))
        self.survivor.order(_Order("finish"))
        if large:
            self._let_pass(before)
        elif point is Point.AFTER:
            self.victim.order(_Order("finish"))
            assert self.victim.answer() is None
        self._strike(fault, large)
        began_s = time.monotonic()
        if fault is Fault.STOPPED and point is not Point.AFTER:
            self.group.abort()
            expected: tuple[type[ProcessGroupError], ...] = (AbortedError,)
        else:
            expected = (PeerDisconnectedError,)
        mine, theirs = failure(self.group, run.finish), self.survivor.answer()
        took_s = time.monotonic() - began_s
        assert took_s < _ABORT_S + _SLACK_S, f"it took {took_s:.2f} s"
        # A rank with all its data may succeed, and `finish` has compared the result.
        mine_may_end = point is Point.AFTER or large
        if mine is not None or not mine_may_end:
            require(mine, *expected)
        assert (theirs is None and point is not Point.BEFORE) or (theirs or ("",))[0] == "PeerDisconnectedError", theirs
        self._go_on_without_the_victim(fault)
        # A victim that disconnects itself runs until then, and may have sent the rest.
        return mine is not None or not large or fault is Fault.CUT_OFF

    def play_word(self, fault: Fault, point: Point) -> None:
        """Run one case of a word, from a complete group of three to a working group of two."""
        if not self.victim.process.is_alive():
            self.victim = self._stack.enter_context(_Child(self._subject.make))
        self.configure([self.survivor, self.victim])
        if point is Point.AFTER:
            self.victim.order(_Order("start word", rank=_VICTIM))
            assert self.victim.answer() is None
        if fault is Fault.STOPPED:
            self.victim.signal(signal.SIGSTOP)
        self.survivor.order(_Order("start word", rank=1))
        assert self.survivor.answer() is None
        mine = self.group.exchange_word([1, 0], round_number=1, timeout=_HOUR)
        self.survivor.order(_Order("finish word"))
        self._strike(fault, is_stopped=False)
        began_s = time.monotonic()
        if fault is Fault.STOPPED and point is Point.BEFORE:
            self.group.abort()
        found: list[tuple[int, ...]] = []
        error = failure(self.group, lambda: found.append(mine.wait()))
        if error is not None:
            self.group.abort()
        theirs = self.survivor.answer()
        took_s = time.monotonic() - began_s
        assert took_s < _ABORT_S + _SLACK_S, f"it took {took_s:.2f} s"
        if point is Point.AFTER and error is None:
            assert found == [(3, 3)]
        else:
            require(error, PeerDisconnectedError, AbortedError)
        # The survivor itself has compared the sum.
        assert (theirs is None and point is Point.AFTER) or (theirs or ("",))[0] == "PeerDisconnectedError", theirs
        self._go_on_without_the_victim(fault)

    def _let_pass(self, before: dict[int, int]) -> None:
        """Let the victim run in the smallest portions until the message is on the wire."""

        def run_a_moment() -> None:
            self.victim.signal(signal.SIGCONT)
            self.victim.signal(signal.SIGSTOP)

        _wait_for_traffic(_holder(self.group), before, _UNDER_WAY_BYTES, run_a_moment)

    def _strike(self, fault: Fault, is_stopped: bool) -> None:
        match fault:
            case Fault.KILLED:
                self.victim.process.kill()
            case Fault.STOPPED:
                self.victim.signal(signal.SIGSTOP)
            case Fault.CUT_OFF:
                self.victim.order(_Order("cut off", self.address, store_ports=self._subject.store_ports))
                if is_stopped:
                    self.victim.signal(signal.SIGCONT)
                self.victim.answer()

    def _go_on_without_the_victim(self, fault: Fault) -> None:
        self.configure([self.survivor])
        self.survivor.order(_Order("reduce", world_size=_SURVIVORS))
        _check_equal(reduce_ones(self.group), torch.full((3,), float(_SURVIVORS)))
        assert self.survivor.answer() is None
        match fault:
            case Fault.KILLED:
                self.victim.process.join(GUARD_S)
            case Fault.STOPPED:
                self.victim.signal(signal.SIGCONT)
            case Fault.CUT_OFF:
                pass


def every_death_at_every_point(subject: Subject, rows: Sequence[str] = _ROWS) -> None:
    """Check every fault at every point of every collective."""
    if 3 not in subject.world_sizes:
        return
    with Bench(subject.make) as bench, ExitStack() as stack:
        stage = _Stage(subject, bench, stack)
        for row in rows:
            for fault in Fault:
                for point in Point:
                    if row == "barrier" and point is Point.MIDDLE:
                        continue  # a barrier has no message
                    try:
                        assert any(stage.play(row, fault, point) for _ in range(_TRIES)), "it always came too late"
                    except Exception as error:
                        raise AssertionError(f"{row}, a peer {fault.value} {point.value}: {error!r}") from error


def every_death_in_a_word(subject: Subject) -> None:
    """Check every fault of a rank before and after its word: the others fail or get its sum, long before an hour."""
    if 3 not in subject.world_sizes:
        return
    with Bench(subject.make) as bench, ExitStack() as stack:
        stage = _Stage(subject, bench, stack)
        for fault in Fault:
            for point in (Point.BEFORE, Point.AFTER):
                try:
                    stage.play_word(fault, point)
                except Exception as error:
                    raise AssertionError(f"a word, a peer {fault.value} {point.value}: {error!r}") from error


def a_dead_peer_fails_the_collective(subject: Subject) -> None:
    """Check that a collective fails when the other process is killed, long before its timeout of an hour."""
    if 2 not in subject.world_sizes:
        return
    with Bench(subject.make) as bench, _Child(subject.make) as child:
        group, address = bench.make(), bench.fresh_address()
        group.set_timeout(_HOUR)
        child.order(_Order("configure", address, 1, 2))
        group.configure(address, 0, 2, timeout=_GUARD)
        assert child.answer() is None
        run = _Run(group, "allreduce", Sample(0, 2))
        child.process.kill()
        require(failure(group, run.finish), PeerDisconnectedError)
        require(group.errored(), PeerDisconnectedError)


CHECKS: tuple[Callable[[Subject], None], ...] = (
    a_dead_peer_fails_the_collective,
    every_death_in_a_word,
    every_death_at_every_point,
)
"""What happens when a peer dies; each a function of a `Subject`."""
