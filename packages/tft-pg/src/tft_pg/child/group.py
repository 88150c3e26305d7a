"""Process groups that run in a child process, so that a fault of the communication library costs the child only.

A crash, a hang or a leak of the library stays in the child. The trainer sees an error, and the next `configure` uses a
fresh child. Each `configure` does: the child of the previous configuration ends its operations and itself, and is
killed if it does not. So nothing of a configuration can reach the next one.

Law of this file: the life of a group in the trainer. The child is in `worker`, the connection to it in `link`. How the
tensors get there is in the file of each kind.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, final

import torch.distributed as dist

from tft_pg import sockets
from tft_pg.backends.patience import Patience
from tft_pg.child.arguments import pack
from tft_pg.child.link import Link
from tft_pg.child.messages import ENVIRONMENT
from tft_pg.child.nursery import NURSERY
from tft_pg.child.sharing import TensorSharing
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
from tft_pg.settings import check_place, checked_timeout, checks_argument_order, refuses_errored_false
from tft_pg.store import format_store_addr, parse_store_addr
from tft_pg.word import LINGER, WordExchange, check_round, checked_values

__all__ = ["ProcessGroupBaby"]

_LOOK: Final = timedelta(seconds=5)
_LONGEST: Final = timedelta(days=36500)  # timedelta.max leaves no room for what is added to it


class ProcessGroupBaby(PlacedProcessGroup):
    """Abstract base: a process group whose communication library runs in a child process.

    The child ends with this process, and a fresh child serves each `configure`. If the child dies, all running
    operations raise `CommunicatorFailedError` at once, and this process goes on to the next `configure`. The first such
    group of a process starts a helper process (the nursery), from which children are forked in milliseconds. `prepare`,
    which a Manager calls, waits for the helper's imports. Without that the first `configure` waits for them, for at
    most 180 seconds beyond its timeout.

    Args:
        timeout: of each operation, and of `configure` unless it is given another, in seconds or as a timedelta.
        kind: of the child's group, one of `worker.KINDS`.
        sharing: the memory that is shared with the child.
        settings: of the child's group.

    Raises: ConfigError: the timeout is not above zero. UnsupportedOperationError: not on this system.
    """

    def __init__(
        self, timeout: float | timedelta, *, kind: str, sharing: TensorSharing, settings: dict[str, object]
    ) -> None:
        super().__init__()
        seconds = timeout if isinstance(timeout, timedelta) else _seconds(timeout)
        self._timeout = _bounded(seconds)
        if not sockets.supported() or not hasattr(os, "pidfd_open"):
            raise UnsupportedOperationError(f"{type(self).__name__} needs Linux 5.4 or later; use another group")
        self._kind = kind
        self._sharing = sharing
        self._settings = settings
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
        let_go_in_child(self)
        NURSERY.start()

    @property
    def child_pid(self) -> int | None:
        """Return the process id of the child, also while it is configured, or None while there is none."""
        attempt = self._attempt
        link = self._link if attempt is None else attempt.link
        return None if link is None else link.pid

    # --- the life -----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Wait for the imports of the helper process, for at most 180 seconds."""
        NURSERY.child(check=lambda: None).close()

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
        address = parse_store_addr(store_addr)
        check_place(
            rank,
            world_size,
            replica_id=replica_id,
            quorum_id=quorum_id,
            group_rank=group_rank,
            group_world_size=group_world_size,
            global_ranks=global_ranks,
        )
        limit = self._timeout if timeout is None else _bounded(timeout)
        arguments = {
            "store_addr": format_store_addr(
                address.host, address.port, f"{address.prefix}/{self._sharing.prefix}".strip("/")
            ),
            "rank": rank,
            "world_size": world_size,
            "replica_id": replica_id,
            "quorum_id": quorum_id,
            "group_rank": group_rank,
            "group_world_size": group_world_size,
            "global_ranks": None if global_ranks is None else [int(each) for each in global_ranks],
            "timeout_s": None if timeout is None else limit.total_seconds(),
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
        memory = self._sharing.open()
        link = Link(NURSERY.child(check=attempt.check, limit=limit), where, memory)
        with self._lock:
            attempt.link = link
            stopped = attempt.stopped
        if stopped is not None:
            raise stopped
        command = {
            "do": "configure",
            "kind": self._kind,
            "settings": {**self._settings, **memory.settings},
            "timeout_s": self._timeout.total_seconds(),
            "patience": self._patience,
            "environment": {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)},
            "arguments": arguments,
        }
        link.ask("configure", command, limit, self._learn)
        with self._lock:
            self._attempt = None
            if attempt.stopped is not None:
                raise attempt.stopped
            self._link, self._error = link, None
        link.tell({"do": "set_timeout", "timeout_s": self._timeout.total_seconds()})  # it may have changed meanwhile

    def _learn(self, answer: Mapping[str, Any]) -> None:
        patience = answer.get("patience")
        if isinstance(patience, dict):
            Patience().restore(patience)  # raises if the next child could not use it
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
        self._handle.close()
        for each in (link, starting):
            if each is not None:
                each.end(why)
        with self._configuring:  # a stopped attempt ends within milliseconds
            leaving, self._leaving = self._leaving, None
        for each in (link, leaving):
            if each is not None:
                each.join()
        self._sharing.close()

    def errored(self) -> Exception | None:
        link = self._link
        if link is None:
            return self._error
        # A device may be past an operation whose failure only the child knows yet.
        if link.failed is None and link.has_started:
            with suppress(ProcessGroupError):
                link.ask("errored", {"do": "look"}, _LOOK)
        return link.failed

    def forked(self) -> Inheritance:
        """Close the group in a forked child of this process."""
        self._parent_pid = os.getppid()
        self._configuring, self._lock = threading.Lock(), threading.Lock()
        self._closed, self._attempt, self._link, self._leaving = True, None, None, None
        self._error = self._closed_error("an operation")
        return Inheritance()

    def set_timeout(self, timeout: timedelta) -> None:
        with self._lock:
            limit = self._timeout = _bounded(timeout)
            link = self._link
        if link is not None:
            link.tell({"do": "set_timeout", "timeout_s": limit.total_seconds()})

    # --- operations ---------------------------------------------------------------------------------------------------

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        link = self._link
        if link is None:
            raise self._unusable(collective.name)
        fault = self._sharing.fault(collective, args, kwargs, self._where)
        packed = pack(() if fault else args, kwargs)
        if packed.reduction == "PREMUL_SUM":
            fault = fault or "a child process does not get the factor of a PREMUL_SUM; multiply the tensor and use SUM"
        if fault:
            raise OperationRefusedError(
                f"{collective.name} was refused ({self._where}): {fault}; fix the call", where=self._where
            )
        limit = min(max(self._timeout, packed.timeout), _LONGEST)
        return self._sharing.start(link, collective, packed, collective.results(args, kwargs), limit)

    def exchange_word(self, words: Sequence[int], *, round_number: int, timeout: timedelta) -> WordExchange:
        link = self._link
        if link is None:
            raise self._unusable("exchange_word")
        values = checked_values(words)
        check_round(round_number, self._last_round)
        limit = _bounded(timeout)
        if link.failed is not None and link.has_ended:
            raise link.ended_error("exchange_word")
        link.tell({"do": "word", "words": values, "round": round_number, "timeout_s": limit.total_seconds()})
        self._last_round = round_number
        return _Exchange(link, round_number, limit)

    def linger(self, timeout: timedelta = LINGER) -> bool:
        link = self._link
        if link is None or link.failed is not None:
            return True
        limit = _bounded(timeout)
        found: list[bool] = []
        try:
            command = {"do": "linger", "timeout_s": limit.total_seconds()}
            link.ask("linger", command, limit, lambda answer: found.append(bool(answer.get("value"))))
        except ProcessGroupError:
            return False
        return found[0]


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
                self._link.ask(
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


def _bounded(timeout: timedelta) -> timedelta:
    """Return the timeout, or a century if it is longer. Raises: ConfigError: it is not above zero."""
    return min(checked_timeout(timeout), _LONGEST)


def _seconds(timeout: object) -> timedelta:
    try:
        if isinstance(timeout, bool):
            raise TypeError("a bool is no number of seconds")
        return timedelta(seconds=timeout)  # type: ignore[arg-type]
    except (TypeError, OverflowError, ValueError) as error:
        raise ConfigError(f"the timeout is {timeout!r} ({error}); pass seconds or a timedelta") from None
