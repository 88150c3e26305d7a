"""The trainer's side of one child process: calls, their answers, and the child's death.

Every call has a number. An answer without an outstanding call is dropped. The child's end, expected or not, fails every
outstanding call at once. A child that does not answer in time, or does not end when it is told to, is killed.

Two threads take turns in reading the answers, as torch's Gloo has two. So a callback of a future may wait for another
operation of the same group.

Law of this file: one child from its first message to its end; a link is never used for another child.
"""

from __future__ import annotations

import copy
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, final

from tft_pg.child.call import Call, CallMemory
from tft_pg.child.messages import MESSAGE_BYTES_MAX, SEVERED, decode, decode_error, encode
from tft_pg.child.nursery import ChildProcess
from tft_pg.errors import (
    AbortedError,
    CollectiveTimeoutError,
    CommunicatorFailedError,
    OperationRefusedError,
    ProcessGroupClosedError,
    ProcessGroupError,
    Where,
)
from tft_pg.forks import Inheritance, let_go_in_child
from tft_pg.threads import join_within

__all__ = ["REPORT", "Link"]

REPORT: Final = timedelta(seconds=6)
"""How long a wait lasts beyond the child's own limit of an operation, so that the child's error arrives."""

_READERS: Final = 2
_SEND_S: Final = 5.0
_LATE_S: Final = 5.0
_TICK_S: Final = 1.0
# After which a child that was told to end is killed. A child ends its group within milliseconds.
_GRACE_S: Final = 0.25
_GRACE_TICK_S: Final = 0.02
_KILLED_S: Final = 5.0


@final
class Link:
    """A child process and its outstanding calls.

    Args:
        child: the process, which the link ends.
        where: the place of the group, for messages.
        memory: what the child's calls use.
    """

    def __init__(self, child: ChildProcess, where: Where, memory: CallMemory) -> None:
        self.where = where
        self.failed: ProcessGroupError | None = None
        self._child = child
        self._memory = memory
        self._sending = threading.Lock()  # commands arrive in the order of their numbers
        self._reading = threading.Lock()  # one reader at a time
        self._copying = threading.Lock()  # held while results are written
        self._lock = threading.Lock()
        self._calls: dict[int, Call] = {}
        self._held: list[Call] = []  # failed ones, while the child may still write into their memory
        self._next = 0
        self._ended: ProcessGroupError | None = None
        self._kill_s: float | None = None
        self._severed = threading.Event()  # the child has ended its operations, or itself
        child.socket.settimeout(_SEND_S)
        let_go_in_child(self)
        self._readers = [
            threading.Thread(target=self._read, name=f"tft-child-reader-{number}", daemon=True)
            for number in range(_READERS)
        ]
        for reader in self._readers:
            reader.start()

    def call(self, call: Call, command: Mapping[str, object]) -> None:
        """Send a command whose answer ends this call.

        Raises: AbortedError, ProcessGroupClosedError, CommunicatorFailedError: the child has ended.
            OperationRefusedError: the command is too long.
        """
        segment = call.segment
        with self._sending:
            packet = encode({**command, "call": self._next})
            with self._lock:
                if self._ended is not None:
                    raise self.ended_error(call.operation)
                number = self._next
                self._next += 1
                call.number, call.due_s = number, time.monotonic() + call.limit_s + _LATE_S
                self._calls[number] = call
            dropped = self._memory.dropped()
            fault = self._send(encode({"do": "unmap", "segments": dropped}), []) if dropped else ""
            if segment is None or segment.descriptor < 0:
                fault = fault or self._send(packet, [])
            else:
                fault = fault or self._send(packet, [segment.descriptor])
                segment.close()
        if fault:
            self._broken(fault)

    def ask(
        self,
        operation: str,
        command: Mapping[str, object],
        limit: timedelta,
        learn: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Send a command and wait for its answer, which `learn` gets. Raises: the error of the answer."""
        done = threading.Event()
        errors: list[Exception] = []

        def fail(error: Exception) -> None:
            errors.append(error)
            done.set()

        self.call(Call(operation, lambda answer: done.set(), fail, limit.total_seconds(), learn=learn), command)
        wait = limit + REPORT
        if not done.wait(min(wait.total_seconds(), threading.TIMEOUT_MAX)):
            raise self.late(operation, wait)
        if errors:
            raise errors[0]

    def late(self, operation: str, limit: timedelta) -> CollectiveTimeoutError:
        """Return the error of a wait that expired, and record it: the ranks may disagree about the result."""
        error = CollectiveTimeoutError(
            f"{operation} failed ({self.where}): the operation timed out after {limit.total_seconds():g} s; abort the "
            "group and configure it again",
            where=self.where,
        )
        self.latch(error)
        return error

    def _send(self, packet: bytes, descriptors: list[int]) -> str:
        """Send a command. Returns: why that failed, or an empty string."""
        try:
            socket.send_fds(self._child.socket, [packet], descriptors)
        except OSError as error:
            return f"it took no command ({error})"
        return ""

    def tell(self, command: Mapping[str, object]) -> None:
        """Send a command without an answer. Harmless after the end."""
        with self._sending, suppress(OSError):
            self._child.socket.send(encode(command))

    def end(self, why: ProcessGroupError) -> None:
        """Fail all calls at once and let the child end. The first call counts.

        Returns as soon as the child has ended its operations, so that the peers hear of it. That takes milliseconds. A
        child that does not react within the grace is killed. No result is written after this method has returned, so
        it waits for the end of a killed child that works on the caller's own tensors.
        """
        if self._fail_all(why):
            self._kill_s = time.monotonic() + _GRACE_S
            # A full socket means that the child does not read, so it is killed.
            with suppress(OSError):
                self._child.socket.send(encode({"do": "end"}), socket.MSG_DONTWAIT)
            if not self._severed.wait(_GRACE_S):
                self._child.kill()
        if not self._severed.is_set() and any(call.lent for call in self._held):
            self._child.has_ended(_KILLED_S)  # until then it may write into the caller's tensors

    def join(self) -> None:
        """Wait until the child and the link's threads have ended, after `end`. A thread of the link does not wait."""
        for reader in self._readers:
            if reader is not threading.current_thread():
                join_within(reader)

    def ended_error(self, operation: str) -> ProcessGroupError:
        """Return the error of an operation on an ended link."""
        why = self._ended
        assert why is not None
        if isinstance(why, CommunicatorFailedError):
            return copy.copy(why)
        kind = ProcessGroupClosedError if isinstance(why, ProcessGroupClosedError) else AbortedError
        return kind(f"{operation} was aborted: {why}", where=self.where)

    @property
    def pid(self) -> int:
        """Return the process id of the child."""
        return self._child.pid

    @property
    def outstanding(self) -> int:
        """Return the number of calls that have not ended."""
        return len(self._calls)

    @property
    def has_started(self) -> bool:
        """Return whether the child has started an operation, of which it has not reported the end."""
        with self._lock:
            return any(call.has_started for call in self._calls.values())

    @property
    def has_ended(self) -> bool:
        """Return whether the child takes no more commands."""
        return self._ended is not None

    def latch(self, error: ProcessGroupError) -> None:
        """Record the first error after which the group needs a new `configure`."""
        with self._lock:
            if self.failed is None:
                self.failed = copy.copy(error)

    def forked(self) -> Inheritance:
        """Become unusable in a forked child of the trainer."""
        for name in ("_sending", "_reading", "_copying", "_lock"):
            setattr(self, name, threading.Lock())
        self._calls, self._held = {}, []
        self._ended = self._ended or ProcessGroupClosedError(
            f"the group ({self.where}) belongs to the parent of this forked process; use it there", where=self.where
        )
        child = self._child
        if child.socket.fileno() < 0:
            return Inheritance()
        return Inheritance(descriptors=[child.socket.fileno(), child.pidfd], kept=[child.socket])

    # --- the readers' threads ---

    def _read(self) -> None:
        while True:
            with self._reading:
                if self._child.closed:
                    return
                packet = self._receive()
            # Callbacks of futures run here, without any lock.
            if packet is None:
                self._die()
                return
            if packet:
                self._take(packet)
            else:
                self._check_late()

    def _receive(self) -> bytes | None:
        """Return the next answer. Empty: none has come for a while. None: the child has ended."""
        tick_s = _TICK_S if self._kill_s is None else _GRACE_TICK_S
        poll = select.poll()
        poll.register(self._child.socket, select.POLLIN)
        poll.register(self._child.pidfd, select.POLLIN)
        ready = dict(poll.poll(tick_s * 1000))
        if ready.get(self._child.socket.fileno()):
            try:
                return self._child.socket.recv(MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT) or None
            except OSError:
                return None
        if ready:
            return None
        # A child that was told to end, and has not ended in time, is given up.
        return None if self._kill_s is not None and time.monotonic() >= self._kill_s else b""

    def _check_late(self) -> None:
        """Give the child up if it has not reported the end of a call in time."""
        now_s = time.monotonic()
        with self._lock:
            call = next((call for call in self._calls.values() if now_s >= call.due_s), None)
        if call is None:
            return
        self._fail_all(
            CollectiveTimeoutError(
                f"{call.operation} failed ({self.where}): child process {self.pid} did not report its end within "
                f"{call.limit_s + _LATE_S:g} s and was killed; configure the group again",
                where=self.where,
            )
        )
        self._child.kill()

    def _take(self, packet: bytes) -> None:
        try:
            answer = decode(packet)
            error = decode_error(answer["error"]) if "error" in answer else None
            latched = decode_error(answer["latched"]) if answer.get("latched") else None
            number = int(answer["call"])
        except Exception as fault:  # whatever a broken process sends, also RecursionError and OverflowError
            self._broken(f"it sent something that is no answer ({fault!r})")
            return
        if number == SEVERED:
            self._severed.set()
            return
        if answer.get("started"):
            with self._lock:
                call = self._calls.get(number)
            if call is not None and call.started is not None:
                call.has_started = True
                call.started()
            return
        with self._copying:
            with self._lock:
                call = self._calls.pop(number, None)
            if call is None:
                return
            if error is None and call.write is not None:
                try:
                    call.write()
                except Exception as fault:
                    error = fault
        self._memory.take_back(call)
        if isinstance(latched, ProcessGroupError) and not isinstance(latched, OperationRefusedError):
            self.latch(latched)
        if isinstance(error, CommunicatorFailedError):
            self.latch(error)
        try:
            if call.learn is not None:
                call.learn(answer)
            if error is None:
                call.finish(answer)
        except Exception as fault:
            why = f"it sent an answer to {call.operation} that can't be used ({fault!r})"
            call.fail(self._failure(why))
            self._broken(why)
            return
        if error is not None:
            call.fail(error)

    def _broken(self, why: str) -> None:
        """Give the child up, because its process can't be used any more."""
        self._fail_all(self._failure(why))
        self._child.kill()

    def _failure(self, why: str) -> CommunicatorFailedError:
        return CommunicatorFailedError(
            f"the child process {self.pid} of the group failed ({self.where}): {why}; see its messages on standard "
            "error, and configure the group again",
            where=self.where,
        )

    def _fail_all(self, why: ProcessGroupError) -> bool:
        """Fail every outstanding call. Returns: whether this was the first end."""
        with self._copying, self._lock:
            if self._ended is not None:
                return False
            self._ended = why
            if self.failed is None or isinstance(why, (AbortedError, ProcessGroupClosedError)):
                self.failed = why
            calls, self._calls = list(self._calls.values()), {}
            self._held += calls
        is_ours = isinstance(why, (AbortedError, ProcessGroupClosedError))
        for call in calls:
            call.fail(self.ended_error(call.operation) if is_ours else copy.copy(why))
        self._memory.release()
        return True

    def _die(self) -> None:
        """Release everything, because the child has ended or will not be heard any more."""
        self._child.kill()
        # Only then does no thread of the child write into the shared memory any more.
        has_ended = self._child.has_ended(_KILLED_S)
        self._severed.set()
        self._fail_all(self._failure("it ended by itself, or was killed"))
        with self._lock:
            held, self._held = self._held, []
        self._memory.release()
        if has_ended:
            for call in held:
                self._memory.take_back(call)
        with self._reading, self._sending:
            self._child.close()
