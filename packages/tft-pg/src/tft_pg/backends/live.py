"""One configured torch group, from its build until its last operation has ended.

An operation may outlive its group. After an abort and a new configure, the old operation fails a millisecond later. So
every Work holds its own group and reports to that group, never to its successor.

Law of this file: no building; the builder says how to end the group.
"""

from __future__ import annotations

import atexit
import copy
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import final

import torch.distributed as dist

from tft_pg.backends.word_line import WordLine
from tft_pg.errors import (
    AbortedError,
    CollectiveTimeoutError,
    CommunicatorFailedError,
    OperationRefusedError,
    PeerDisconnectedError,
    ProcessGroupClosedError,
    ProcessGroupError,
    Where,
)
from tft_pg.forks import Inheritance, fork_safe_lock, let_go_in_child, never_destroy
from tft_pg.forwarding import forward
from tft_pg.ops import Collective
from tft_pg.word import WordExchange
from tft_pg.work import GuardedWork, end_shared_waits

__all__ = ["LiveGroup", "keep_at_exit", "reap"]

_LOOK_S = 0.02
_MOMENT_S = 0.001
_RELEASE_S = 5.0

_Start = Callable[[dist.ProcessGroup, Collective, tuple[object, ...], Mapping[str, object]], dist.Work]
_Fault = (
    type[PeerDisconnectedError]
    | type[CollectiveTimeoutError]
    | type[CommunicatorFailedError]
    | type[OperationRefusedError]
)

_SENTENCES: Mapping[_Fault, str] = {
    PeerDisconnectedError: "the connection to another rank ended; configure the group without that rank",
    CollectiveTimeoutError: "the operation timed out; abort the group and configure it again",
    CommunicatorFailedError: "the library failed and works no more; configure the group again",
    OperationRefusedError: "the backend refused the call; fix its arguments",
}


# Torch groups with a thread that runs a forgotten operation, and these operations. A torch group joins its threads when
# it is destroyed. So the group is kept until the operations have ended by their timeout.
_abandoned_groups: list[tuple[dist.ProcessGroup, tuple[dist.Work, ...]]] = []
# Groups whose operations must not delay the end of the process.
_kept_at_exit: weakref.WeakSet[LiveGroup] = weakref.WeakSet()
_abandoned_lock = fork_safe_lock()
_exit_is_known = False


def _abandon_group(torch_group: dist.ProcessGroup, works: tuple[dist.Work, ...]) -> None:
    with _abandoned_lock:
        _abandoned_groups.append((torch_group, works))


def keep_at_exit(live: LiveGroup) -> None:
    """Prevent this group's destruction at the end of the process, because destruction waits for running operations."""
    global _exit_is_known
    with _abandoned_lock:
        _kept_at_exit.add(live)
        if not _exit_is_known:
            _exit_is_known = True
            atexit.register(_end_of_process)


def _end_of_process() -> None:
    """Keep all groups undestroyed, and connected, at the end of the process.

    A shutdown of the connections would wake waits while the interpreter ends. The kernel closes the connections
    afterwards.
    """
    with _abandoned_lock:
        for live in _kept_at_exit:
            live.never_destroy()
        for torch_group, _ in _abandoned_groups:
            never_destroy(torch_group)
    end_shared_waits()


def reap() -> int:
    """Release the torch groups whose forgotten operations have ended by now. Returns: the number of remaining
    groups.
    """
    with _abandoned_lock:
        ended = [entry for entry in _abandoned_groups if all(work.is_completed() for work in entry[1])]
        _abandoned_groups[:] = [entry for entry in _abandoned_groups if entry not in ended]
        return len(_abandoned_groups)


@final
class LiveGroup:
    """A torch group with its place, its end and its first error.

    Args:
        torch_group: runs the collectives; its destruction joins its threads.
        set_timeout: sets the torch group's timeout.
        sever: ends everything that waits in the group; called once, from any thread, and returns at once.
        settle: called last, when the torch group is gone; may wait for the effects of `sever`.
        is_over: returns whether unfinished operations can never finish.
        reports_end: returns whether a torch thread runs this collective, and its Work reports its end. Such a Work is
            waited for in shares, and the wait may be abandoned. For any other Work, `sever` must end the wait.
        classify: returns the kind of an operation's error.
        where: the group's place, for messages.
        start: starts a collective of the torch group.
        blame: returns the ranks whose silence has ended the group, with reasons.
        words: exchanges the words of the ranks; None: the group has no connections for words.
        guard: makes the caller's Work from the backend's. By default the host settles the future of the caller's Work.
    """

    def __init__(
        self,
        torch_group: dist.ProcessGroup,
        *,
        set_timeout: Callable[[timedelta], None],
        sever: Callable[[], None],
        settle: Callable[[], None],
        is_over: Callable[[], bool],
        reports_end: Callable[[Collective], bool],
        classify: Callable[[Exception], _Fault],
        where: Where,
        start: _Start = forward,
        blame: Callable[[], Mapping[int, str]] = dict,
        words: WordLine | None = None,
        guard: Callable[[dist.Work, LiveGroup, str], dist.Work] | None = None,
    ) -> None:
        self.where = where
        self.words = words
        self._torch_group: dist.ProcessGroup | None = torch_group
        self._set_timeout: Callable[[timedelta], None] | None = set_timeout
        self._sever = sever
        self._settle = settle
        self._start = start
        self._blame = blame
        self._guard = guard
        self._reports_end = reports_end
        self._is_over = is_over
        self._unfinished: weakref.WeakSet[GuardedWork] = weakref.WeakSet()
        self._gave_up = False  # the thread that fails the forgotten futures has made its last check
        self._classify = classify
        self._lock = threading.Lock()
        self._running: deque[dist.Work] = deque()
        self._ended: ProcessGroupError | None = None
        self._failed: ProcessGroupError | None = None
        let_go_in_child(self)

    @property
    def error(self) -> ProcessGroupError | None:
        """Return why the group is unusable, or None while it is usable."""
        return self._ended or self._failed

    def run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        """Start a collective. Raises: AbortedError or ProcessGroupClosedError after `end`; OperationRefusedError;
        TypeError."""
        # A stored error must not keep the torch group and its threads alive, so this frame drops its reference.
        torch_group = self._torch_group
        try:
            if self._ended is not None or torch_group is None:
                raise self._ended_error(collective.name)
            work = self._start(torch_group, collective, args, kwargs)
            runs = self._reports_end(collective)
            if runs:
                with self._lock:
                    self._forget_ended()
                    self._running.append(work)
            if self._guard is not None:
                return self._guard(work, self, collective.name)
            return GuardedWork(work, self, collective.name, in_shares=runs)
        except ProcessGroupError:
            raise
        except RuntimeError as error:
            raise self.convert(collective.name, error) from error
        finally:
            torch_group = None

    def exchange_word(self, values: tuple[int, ...], round_number: int, timeout: timedelta) -> WordExchange:
        """Start to exchange a word. Raises: AbortedError or ProcessGroupClosedError after `end`; the errors of
        `WordLine.start`."""
        assert self.words is not None
        if self._ended is not None:
            raise self._ended_error("exchange_word")
        return self.words.start(values, round_number=round_number, timeout=timeout, fail=self._word_failed)

    def _word_failed(self, error: ProcessGroupError) -> ProcessGroupError:
        """Record that the group can't exchange words any more. Returns: the error to raise."""
        with self._lock:
            if self._ended is None:
                self._failed = self._failed or copy.copy(error)
                return error
        return self._ended_error("exchange_word")

    def convert(self, operation: str, error: Exception) -> ProcessGroupError:
        """Record what an operation's error says about the group, and convert it to this package's errors."""
        if self._ended is not None:
            return self._ended_error(operation)
        fault = self._classify(error)
        reason = (str(error).splitlines() or [""])[0]
        converted = self._error_of(fault, f"{operation} failed ({self.where}): {_SENTENCES[fault]} ({reason})")
        if fault is not OperationRefusedError:
            with self._lock:
                if self._failed is None:
                    self._failed = copy.copy(converted)
        return converted

    def _error_of(self, fault: _Fault, message: str) -> ProcessGroupError:
        if issubclass(fault, PeerDisconnectedError):
            return fault(message, where=self.where, unreached=self._blame())
        return fault(message, where=self.where)

    def forgotten(self, operation: str) -> ProcessGroupError | None:
        """Return the error of an operation that the backend forgot when its connections ended, or None if it may
        still end.
        """
        if not self._is_over():
            return None
        if self._ended is not None:
            return self._ended_error(operation)
        with self._lock:
            if self._failed is None:
                self._failed = self._error_of(
                    PeerDisconnectedError,
                    f"{operation} failed ({self.where}): {_SENTENCES[PeerDisconnectedError]}"
                    " (in the middle of a message)",
                )
            return copy.copy(self._failed)

    def track_future(self, work: GuardedWork) -> None:
        """Register this work, so that its future fails if the backend forgets the operation."""
        with self._lock:
            self._unfinished.add(work)
            starts_thread = self._gave_up
        if starts_thread:
            threading.Thread(target=self.give_up, name="tft-pg-give-up", daemon=True).start()

    def give_up(self) -> None:
        """Fail the futures of forgotten operations. Callers run this after the connections have ended."""
        while True:
            over = self._is_over()
            with self._lock:
                unfinished = [work for work in self._unfinished if not work.is_completed()]
                if over or not unfinished:
                    self._gave_up = True
                    break
            time.sleep(_LOOK_S)
        for work in unfinished:
            work.give_up()

    def set_timeout(self, timeout: timedelta) -> None:
        setter = self._set_timeout
        if setter is not None:
            setter(timeout)

    def label(self, name: str, description: str) -> None:
        """Name the torch group in torch's flight recorder."""
        torch_group = self._torch_group
        if torch_group is not None:
            torch_group._set_group_name(name)  # type: ignore[arg-type]  # torch's stub wants a name of its tables
            torch_group._set_group_desc(description)

    def unfinished(self) -> int | None:
        """Return the number of running collectives, or None if only the library knows it."""
        if self._guard is not None:
            return None
        with self._lock:
            return sum(not work.is_completed() for work in self._running)

    def never_destroy(self) -> None:
        """Prevent the destruction of the torch group, because the process ends."""
        torch_group = self._torch_group
        if torch_group is not None:
            never_destroy(torch_group)

    def forked(self) -> Inheritance:
        """Make this group unusable in a forked child, and never destroy its torch group there."""
        self._lock = threading.Lock()
        torch_group, self._torch_group = self._torch_group, None
        self._ended = self._ended or ProcessGroupClosedError(
            f"the group ({self.where}) belongs to the parent of this forked process; use it there",
            where=self.where,
        )
        kept = (torch_group, *self._running, *(left for left, _ in _abandoned_groups))
        return Inheritance(kept=[each for each in kept if each is not None])

    def end(self, why: ProcessGroupError) -> None:
        """End the running operations at once. The first call counts. Any thread may call this, also one of the
        group's own.
        """
        with self._lock:
            if self._ended is not None:
                return
            self._ended = why
        self._sever()

    def release(self) -> None:
        """Release the torch group, and block until its last operation has ended and its threads are gone.

        Call this method only after `end`, which makes the wait a matter of milliseconds. Never call it from a callback
        of an operation, which runs on such a thread. If a peer is killed in the middle of a message, the backend
        forgets the operation. Such an operation keeps the torch group's threads until its own timeout, and this method
        does not wait for that.
        """
        assert self._ended is not None
        self._set_timeout = None
        deadline_s = time.monotonic() + _RELEASE_S
        while self._has_running_works() and not self._is_over() and time.monotonic() < deadline_s:
            time.sleep(_MOMENT_S)
        with self._lock:
            self._running = deque(work for work in self._running if not work.is_completed())
            if self._running and self._torch_group is not None:
                _abandon_group(self._torch_group, tuple(self._running))
            self._running.clear()
            self._torch_group = None
        self._settle()
        reap()

    def _has_running_works(self) -> bool:
        with self._lock:
            self._forget_ended()
            return bool(self._running)

    def _forget_ended(self) -> None:
        running = self._running
        while running and running[0].is_completed():
            running.popleft()

    def _ended_error(self, operation: str) -> ProcessGroupError:
        assert self._ended is not None
        kind = ProcessGroupClosedError if isinstance(self._ended, ProcessGroupClosedError) else AbortedError
        return kind(f"{operation} was aborted: {self._ended}", where=self.where)
