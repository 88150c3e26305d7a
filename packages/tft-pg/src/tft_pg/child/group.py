"""Process groups that run in a child process, so that a fault of the communication library costs the child only.

A crash, a hang or a leak of the library stays in the child. The trainer sees an error, and the next `configure` uses a
fresh child. Each `configure` does: the child of the previous configuration ends its operations and itself, and is
killed if it does not. So nothing of a configuration can reach the next one.

Tensors cross in shared memory: one copy in, one copy out.

Law of this file: the life of a group in the trainer. The child is in `worker`, the connection to it in `link`.
"""

from __future__ import annotations

import abc
import copy
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Final, final

import torch
import torch.distributed as dist

from tft_pg import sockets
from tft_pg.backends.gloo import ProcessGroupGloo
from tft_pg.backends.gloo_table import lacks
from tft_pg.checks import fault_of, is_plain
from tft_pg.child.arguments import dtype_name, pack
from tft_pg.child.link import Call, Link
from tft_pg.child.nursery import NURSERY
from tft_pg.child.segments import Pool, Segment, copy_in, copy_out, places
from tft_pg.errors import (
    AbortedError,
    CollectiveTimeoutError,
    ConfigError,
    ConfigureError,
    NotConfiguredError,
    OperationRefusedError,
    ProcessGroupClosedError,
    ProcessGroupError,
    UnsupportedOperationError,
    Where,
)
from tft_pg.forks import Inheritance, let_go_in_child
from tft_pg.ops import Collective
from tft_pg.placed import PlacedProcessGroup
from tft_pg.settings import checked_timeout, checks_argument_order, refuses_errored_false
from tft_pg.store import parse_store_addr
from tft_pg.word import LINGER, WordExchange, check_round, checked_values
from tft_pg.work import PendingWork

__all__ = ["ProcessGroupBaby", "ProcessGroupBabyGloo"]

# The child's own limit of an operation expires first. These seconds let its error arrive.
_REPORT: Final = timedelta(seconds=6)
# These fill every output on every rank, so the contents before the call need not cross.
_FILLS_ALL: Final = frozenset(
    {
        *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
        *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
        *("alltoall", "alltoall_base"),
    }
)
_ENVIRONMENT: Final = ("GLOO_", "TORCH_")


class ProcessGroupBaby(PlacedProcessGroup):
    """Abstract base: a process group whose communication library runs in a child process.

    The child ends with this process, and a fresh child serves each `configure`. If the child dies, all running
    operations raise `CommunicatorFailedError` at once, and this process goes on to the next `configure`. The first such
    group of a process starts a helper process (the nursery), from which children are forked in milliseconds. The first
    `configure` waits for the helper's imports, for at most 60 seconds beyond its timeout.

    Args:
        timeout: of each operation, and of `configure` unless it is given another, in seconds or as a timedelta.

    Raises: ConfigError: the timeout is not above zero. UnsupportedOperationError: not on this system.
    """

    _kind: ClassVar[str] = ""

    def __init__(self, timeout: float | timedelta = 60.0) -> None:
        super().__init__()
        seconds = timeout if isinstance(timeout, timedelta) else _seconds(timeout)
        self._timeout = checked_timeout(seconds)
        if not sockets.supported() or not hasattr(os, "pidfd_open"):
            raise UnsupportedOperationError(f"{type(self).__name__} needs Linux 5.4 or later; use another group")
        self._settings: dict[str, object] = {}
        self._patience: dict[str, Any] = {}
        self._configuring = threading.Lock()
        self._lock = threading.Lock()
        self._attempt: _Attempt | None = None
        self._link: Link | None = None
        self._leaving: Link | None = None
        self._error: ProcessGroupError | None = None
        self._closed = False
        self._parent_pid = 0
        self._where = Where()
        self._last_round = -1
        self._pool = Pool()
        let_go_in_child(self)
        NURSERY.start()

    @abc.abstractmethod
    def _fault(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> str:
        """Return why the library can't run a call, regardless of the other ranks. Empty if no fault shows."""

    @property
    def child_pid(self) -> int | None:
        """Return the process id of the child, also while it is configured, or None while there is none."""
        attempt = self._attempt
        link = self._link if attempt is None else attempt.link
        return None if link is None else link.pid

    # --- the life -----------------------------------------------------------------------------------------------------

    @checks_argument_order
    def configure(
        self,
        store_addr: str,
        rank: int,
        world_size: int,
        *,
        replica_id: str = "",
        quorum_id: int | None = None,
        group_rank: int = 0,
        group_world_size: int = 1,
        global_ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        parse_store_addr(store_addr)
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(f"rank is {rank} and world_size is {world_size}; pass a rank from 0 to world_size - 1")
        if global_ranks is not None and len(global_ranks) != world_size:
            raise ConfigError(
                f"global_ranks has {len(global_ranks)} entries and world_size is {world_size}; pass one for each rank"
            )
        limit = self._timeout if timeout is None else checked_timeout(timeout)
        arguments = {
            "store_addr": store_addr,
            "rank": rank,
            "world_size": world_size,
            "replica_id": replica_id,
            "quorum_id": quorum_id,
            "group_rank": group_rank,
            "group_world_size": group_world_size,
            "global_ranks": None if global_ranks is None else [int(each) for each in global_ranks],
            "timeout_s": None if timeout is None else timeout.total_seconds(),
        }
        where = Where(rank, world_size, replica_id, quorum_id, group_rank)
        with self._configuring:
            attempt = _Attempt()
            self._begin(attempt, where)
            try:
                self._build(attempt, where, arguments, limit)
            except BaseException as error:
                raise self._fail(attempt, error) from error.__cause__

    def _begin(self, attempt: _Attempt, where: Where) -> None:
        with self._lock:
            if self._closed:
                raise self._closed_error("configure")
            self._attempt, before, self._link = attempt, self._link, None
            self._error = NotConfiguredError(f"configure is still running ({where}); wait until it returns")
            self._where = where
            self._last_round = -1
        # At most one child ends while the next one works.
        leaving, self._leaving = self._leaving, before
        if before is not None:
            before.end(AbortedError(f"a new configure replaced the group ({before.where})", where=before.where))
        if leaving is not None:
            leaving.join()

    def _build(self, attempt: _Attempt, where: Where, arguments: dict[str, object], limit: timedelta) -> None:
        child = NURSERY.child(check=attempt.check)
        link = Link(child, where, self._pool)
        with self._lock:
            attempt.link = link
            stopped = attempt.stopped
        if stopped is not None:
            raise stopped
        command = {
            "do": "configure",
            "kind": self._kind,
            "settings": self._settings,
            "timeout_s": self._timeout.total_seconds(),
            "patience": self._patience,
            "environment": {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)},
            "arguments": arguments,
        }
        _ask(link, "configure", command, limit, self._learn)
        with self._lock:
            self._attempt = None
            if attempt.stopped is not None:
                raise attempt.stopped
            self._link, self._error = link, None
        link.tell({"do": "set_timeout", "timeout_s": self._timeout.total_seconds()})  # it may have changed meanwhile

    def _learn(self, answer: Mapping[str, Any]) -> None:
        patience = answer.get("patience")
        if isinstance(patience, dict):
            self._patience = patience

    def _fail(self, attempt: _Attempt, error: BaseException) -> BaseException:
        if attempt.link is not None:
            attempt.link.end(AbortedError(f"configure failed ({self._where})", where=self._where))
            attempt.link.join()
        failure = attempt.stopped or error
        if isinstance(failure, CollectiveTimeoutError) or not isinstance(failure, ProcessGroupError):
            failure = ConfigureError(
                f"configure failed ({self._where}): {failure or type(failure).__name__}; ask for a new quorum and "
                "configure under its prefix",
                where=self._where,
                is_own=True,
            )
        with self._lock:
            self._attempt = None
            if not self._closed:
                self._error = copy.copy(failure)
        return failure if isinstance(error, Exception) else error

    @refuses_errored_false
    def abort(self) -> None:
        with self._lock:
            if self._closed:
                return
            why = AbortedError(f"abort was called ({self._where}); configure the group again", where=self._where)
            attempt, link = self._attempt, self._link
            if link is None:
                self._error = why
            if attempt is not None:
                link = attempt.stop(why) or link
        if link is not None:
            link.end(why)

    def shutdown(self) -> None:
        with self._lock:
            self._closed = True
            why = ProcessGroupClosedError(
                f"the group was shut down ({self._where}); make a new group", where=self._where
            )
            if self._parent_pid:
                why = self._closed_error("an operation")
            attempt, link, self._link = self._attempt, self._link, None
            self._error = why
            starting = None if attempt is None else attempt.stop(why)
        for each in (link, starting):
            if each is not None:
                each.end(why)
        with self._configuring:  # a stopped attempt ends within milliseconds
            leaving, self._leaving = self._leaving, None
        for each in (link, leaving):
            if each is not None:
                each.join()
        self._pool.close()

    def errored(self) -> Exception | None:
        link = self._link
        return self._error if link is None else link.failed

    def forked(self) -> Inheritance:
        """Close the group in a forked child of this process."""
        self._parent_pid = os.getppid()
        self._configuring, self._lock = threading.Lock(), threading.Lock()
        self._closed, self._attempt, self._link, self._leaving = True, None, None, None
        self._error = self._closed_error("an operation")
        return Inheritance()

    def set_timeout(self, timeout: timedelta) -> None:
        with self._lock:
            self._timeout = checked_timeout(timeout)
            link = self._link
        if link is not None:
            link.tell({"do": "set_timeout", "timeout_s": timeout.total_seconds()})

    # --- operations ---------------------------------------------------------------------------------------------------

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        link = self._link
        if link is None:
            raise self._unusable(collective.name)
        fault = "" if is_plain(collective, args) else self._fault(collective, args, kwargs)
        packed = pack(() if fault else args, kwargs)
        if packed.reduction == "PREMUL_SUM":
            fault = fault or "a child process does not get the factor of a PREMUL_SUM; multiply the tensor and use SUM"
        if fault:
            raise OperationRefusedError(
                f"{collective.name} was refused ({self._where}): {fault}; fix the call", where=self._where
            )
        results = collective.results(args, kwargs)
        limit = max(self._timeout, packed.timeout)
        work = PendingWork(on_timeout=partial(_late, link, collective.name), limit=limit + _REPORT)
        call = Call(collective.name, partial(_finish, work, results), work.fail, limit.total_seconds())
        offsets, size = places(packed.tensors)
        if packed.tensors:
            self._share(call, collective, packed.tensors, offsets, size, results)
        segment = call.segment
        command = {
            "do": "run",
            "name": collective.name,
            "args": packed.args,
            "kwargs": packed.kwargs,
            "segment": None if segment is None else [segment.number, segment.size],
            "tensors": [
                [offset, dtype_name(tensor.dtype), list(tensor.shape)]
                for offset, tensor in zip(offsets, packed.tensors, strict=True)
            ],
        }
        try:
            link.call(call, command)
        except ProcessGroupError:
            if segment is not None:
                self._pool.give(segment)
            raise
        return work

    def _share(
        self,
        call: Call,
        collective: Collective,
        tensors: Sequence[torch.Tensor],
        offsets: Sequence[int],
        size: int,
        results: Sequence[torch.Tensor],
    ) -> None:
        """Copy the call's tensors to shared memory, and note which to copy back."""
        try:
            segment = self._pool.take(max(size, 1))  # tensors may be empty
        except OSError as error:
            raise OperationRefusedError(
                f"{collective.name} was refused ({self._where}): there is no shared memory of {size} bytes ({error}); "
                "free memory or descriptors",
                where=self._where,
            ) from error
        outputs = {id(tensor) for tensor in results}
        fills_all = collective.name in _FILLS_ALL
        back = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            is_output = id(tensor) in outputs
            if is_output:
                back.append((tensor, offset))
            if not (is_output and fills_all):
                copy_in(segment.memory, offset, tensor)
        call.segment = segment
        call.write = partial(_write, segment, back)

    def exchange_word(self, words: Sequence[int], *, round_number: int, timeout: timedelta) -> WordExchange:
        link = self._link
        if link is None:
            raise self._unusable("exchange_word")
        values = checked_values(words)
        check_round(round_number, self._last_round)
        limit = checked_timeout(timeout)
        if link.failed is not None and link.has_ended:
            raise link.ended_error("exchange_word")
        link.tell({"do": "word", "words": values, "round": round_number, "timeout_s": limit.total_seconds()})
        self._last_round = round_number
        return _Exchange(link, round_number, limit)

    def linger(self, timeout: timedelta = LINGER) -> bool:
        link = self._link
        if link is None or link.failed is not None:
            return True
        limit = checked_timeout(timeout)
        found: list[bool] = []
        try:
            command = {"do": "linger", "timeout_s": limit.total_seconds()}
            _ask(link, "linger", command, limit, lambda answer: found.append(bool(answer.get("value"))))
        except ProcessGroupError:
            return False
        return found[0]

    # --- what it is ---------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return f"tft-child-{self._kind}"


@final
class ProcessGroupBabyGloo(ProcessGroupBaby):
    """`ProcessGroupGloo` in a child process, for tensors on the CPU.

    Args:
        timeout: of each operation, and of `configure` unless it is given another, in seconds or as a timedelta.
        interface, hostname: where to listen, as for `ProcessGroupGloo`.

    Raises: ConfigError: both are given, or the timeout is not above zero. UnsupportedOperationError: not on this
    system.
    """

    _kind = "gloo"

    def __init__(
        self, timeout: float | timedelta = 60.0, *, interface: str | None = None, hostname: str | None = None
    ) -> None:
        if interface and hostname:
            raise ConfigError(f"name an interface ({interface}) or a hostname ({hostname}), not both")
        super().__init__(timeout)
        self._settings = {"interface": interface, "hostname": hostname}

    @classmethod
    def like(cls, group: ProcessGroupGloo) -> ProcessGroupBabyGloo:
        """Return a new group with the settings of a `ProcessGroupGloo`. Its peers may be groups of both kinds."""
        timeout, settings = group.settings()
        found = cls(timeout)
        found._settings = settings
        return found

    def _fault(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> str:
        rank, world_size = self._where.rank or 0, self._where.world_size or 1
        fault = fault_of(collective, args, kwargs, rank=rank, world_size=world_size)
        return fault or lacks(collective, args, kwargs)


@final
class _Attempt:
    """One running `configure`. Its fields are changed under the group's lock."""

    def __init__(self) -> None:
        self.stopped: ProcessGroupError | None = None
        self.link: Link | None = None

    def stop(self, why: ProcessGroupError) -> Link | None:
        """Stop the attempt. The first reason counts, unless the group was closed. Returns: the link to end."""
        if self.stopped is None or isinstance(why, ProcessGroupClosedError):
            self.stopped = why
        return self.link

    def check(self) -> None:
        """Raise the reason if the attempt was stopped."""
        if self.stopped is not None:
            raise self.stopped


@final
class _Exchange(WordExchange):
    """A word that the child exchanges. As in any other group, nothing waits for the words before `wait` is called."""

    def __init__(self, link: Link, round_number: int, limit: timedelta) -> None:
        self._link = link
        self._round_number = round_number
        self._limit = limit
        self._outcome: tuple[int, ...] | ProcessGroupError | None = None

    def wait(self) -> tuple[int, ...]:
        if self._outcome is None:
            answers: list[tuple[int, ...]] = []
            command = {"do": "wait for word", "round": self._round_number}
            try:
                _ask(
                    self._link,
                    "exchange_word",
                    command,
                    self._limit,
                    lambda answer: answers.append(tuple(answer.get("value") or ())),
                )
                self._outcome = answers[0]
            except ProcessGroupError as error:
                self._outcome = copy.copy(error)
                raise
        if isinstance(self._outcome, ProcessGroupError):
            raise copy.copy(self._outcome)
        return self._outcome


def _ask(
    link: Link,
    operation: str,
    command: Mapping[str, object],
    limit: timedelta,
    learn: Callable[[dict[str, Any]], None],
) -> None:
    """Send a command and wait for its answer, which `learn` gets. Raises: the error of the answer."""
    done = threading.Event()
    errors: list[Exception] = []

    def fail(error: Exception) -> None:
        errors.append(error)
        done.set()

    link.call(Call(operation, lambda answer: done.set(), fail, limit.total_seconds(), learn=learn), command)
    wait = limit + _REPORT
    if not done.wait(min(wait.total_seconds(), threading.TIMEOUT_MAX)):
        raise _late(link, operation, wait)
    if errors:
        raise errors[0]


def _finish(work: PendingWork, results: list[torch.Tensor], answer: Mapping[str, Any]) -> None:
    work.finish(results, source=int(answer.get("value") or 0))


def _write(segment: Segment, back: Sequence[tuple[torch.Tensor, int]]) -> None:
    for tensor, offset in back:
        copy_out(segment.memory, offset, tensor)


def _late(link: Link, operation: str, limit: timedelta) -> CollectiveTimeoutError:
    """Return the error of a wait that expired, and record it: the ranks may disagree about the result."""
    error = CollectiveTimeoutError(
        f"{operation} failed ({link.where}): the operation timed out after {limit.total_seconds():g} s; abort the "
        "group and configure it again",
        where=link.where,
    )
    link.latch(error)
    return error


def _seconds(timeout: object) -> timedelta:
    try:
        return timedelta(seconds=timeout)  # type: ignore[arg-type]
    except (TypeError, OverflowError, ValueError) as error:
        raise ConfigError(f"the timeout is {timeout!r} ({error}); pass seconds or a timedelta") from None
