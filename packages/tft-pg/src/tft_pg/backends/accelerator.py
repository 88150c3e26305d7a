"""Process groups over a library that moves tensors between devices, such as NCCL.

Such a library accepts an operation and returns at once. The operation waits in the device's queue and runs after
everything before it. So a hanging operation does not block the host, and an early check for errors finds none.

This file adds a list of operations and a watch. Each operation goes onto the list with its deadline, and a timer checks
the list. When an operation is late or has failed, or a peer has disconnected (see `lifeline`), the library aborts
everything. Every later result is then an error.

For a Work this means: `wait()` orders the current stream after the operation and returns. Only `wait(timeout)` and a
barrier block the host. An error shows in `errored()` and in every later `wait` of an operation that did not succeed.
Nothing here waits for a whole device, or for unrelated work in its queues.

`device_library` hides the library, and a test replaces it.

Law of this file: what all such libraries share; the file of a library's name holds what only that library has.
"""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from tft_pg.backends.attempt import Attempt
from tft_pg.backends.device_library import AcceleratorBackend, Communicator, Connecting
from tft_pg.backends.lifeline import Lifeline
from tft_pg.backends.live import LiveGroup
from tft_pg.backends.native import NativeProcessGroup
from tft_pg.backends.peers import connect_peers, own_address
from tft_pg.backends.word_line import WordLine
from tft_pg.errors import (
    CollectiveTimeoutError,
    CommunicatorFailedError,
    OperationRefusedError,
    PeerDisconnectedError,
)
from tft_pg.forwarding import forward
from tft_pg.futures import timer, watchdog_timeout
from tft_pg.ops import Collective
from tft_pg.settings import check_listening
from tft_pg.threads import join_within
from tft_pg.word import LINGER

__all__ = ["AcceleratorProcessGroup"]

_CHECK_S = 0.02
_POLL_MIN_S = 0.0002
_POLL_MAX_S = 0.002
# A finished peer may disconnect at once. Operations whose data this rank's device already has may still finish within
# this time.
_GRACE_S = 0.05
# The longest wait for the other ranks' words. A leaving rank waits that long for its own word to be delivered.
_WORDS_S = LINGER.total_seconds()
# The longest wait for the library's abort. After this time, the wait is abandoned.
_ABORT_S = 5.0

_Looking = Callable[[], AbstractContextManager[object]]
_Fault = (
    type[PeerDisconnectedError]
    | type[CollectiveTimeoutError]
    | type[CommunicatorFailedError]
    | type[OperationRefusedError]
)


class _PeerAbortedError(RuntimeError):
    """The reason for ending the operations: a rank has disconnected."""


class _OperationTimeoutError(RuntimeError):
    """The reason for ending the operations: one of them was late."""


def _timeout_error(timeout: timedelta) -> _OperationTimeoutError:
    return _OperationTimeoutError(f"the operation did not finish on the device within {timeout.total_seconds():g} s")


class _ConnectionBrokenError(RuntimeError):
    """The reason for ending the operations: one has failed on the device."""


class _LibraryFailedError(RuntimeError):
    """The reason for ending the operations: a call failed in the library, which works no more."""


class _GroupEndedError(RuntimeError):
    """The reason for ending the operations: this rank's own `abort`, `configure` or `shutdown`."""


# Error texts of the libraries for failures of the communicator. Any other text is a refusal of the single call.
_FAULTS: Mapping[str, _Fault] = {
    "remote process exited": PeerDisconnectedError,
    "network error": PeerDisconnectedError,
    "system error": PeerDisconnectedError,
    "internal error": PeerDisconnectedError,
    "communicator was aborted": PeerDisconnectedError,
    "timed out": CollectiveTimeoutError,
    "timeout": CollectiveTimeoutError,
    "nccl error": CommunicatorFailedError,
}

_REASONS: Mapping[_Fault, type[RuntimeError]] = {
    PeerDisconnectedError: _ConnectionBrokenError,
    CollectiveTimeoutError: _OperationTimeoutError,
    CommunicatorFailedError: _LibraryFailedError,
}


def _classify(error: Exception) -> _Fault:
    match error:
        case _PeerAbortedError() | _GroupEndedError() | _ConnectionBrokenError():
            return PeerDisconnectedError
        case _OperationTimeoutError():
            return CollectiveTimeoutError
        case _LibraryFailedError():
            return CommunicatorFailedError
    text = str(error).lower()
    return next((fault for words, fault in _FAULTS.items() if words in text), OperationRefusedError)


@final
class _Operation:
    """One operation: the library's Work, its deadline, and its outcome."""

    def __init__(self, work: dist.Work, name: str, timeout: timedelta) -> None:
        self.work = work
        self.name = name
        self.timeout = timeout
        self.deadline_s = time.monotonic() + timeout.total_seconds()
        self.ended = False
        # The operation had not ended at the abort, so the state of its Work means nothing from then on.
        self.dropped = False
        self.error: RuntimeError | None = None

    def poll(self, looking: _Looking) -> bool:
        """Return whether the operation has ended. Only one thread may call this at a time.

        Never raises, although a broken device may raise in either query of the Work.

        Args:
            looking: the communicator's method of the same name.
        """
        if not self.ended and not self.dropped:
            try:
                with looking():
                    if not self.work.is_completed():
                        return False
                    self.work.wait()
            except OperationRefusedError as refused:
                self.error = copy.copy(refused)  # without its frames
            except Exception as error:
                self.error = _ConnectionBrokenError(*error.args)
            self.ended = True
        return self.ended

    @property
    def is_fatal(self) -> bool:
        """Return whether the operation has failed in a way that ends all others."""
        return self.error is not None and not isinstance(self.error, OperationRefusedError)


@final
class _OperationList:
    """The list of one group's operations, with a watch. A late or failed operation ends all operations.

    Args:
        communicator: runs the operations.
        lifeline: reports disconnected peers, and informs them.
        timeout: of each operation.
    """

    def __init__(self, communicator: Communicator, lifeline: Lifeline, timeout: timedelta) -> None:
        self._communicator: Communicator | None = communicator
        self._lifeline = lifeline
        self._timeout = timeout
        self._lock = threading.Lock()
        self._pending: deque[_Operation] = deque()
        self._watched = False
        self._reason: RuntimeError | None = None
        self._over = threading.Event()
        self._aborting: threading.Thread | None = None
        self._report: Callable[[str, Exception], object] = _ignore_error

    def begin(self, live: LiveGroup) -> None:
        """Start to report the group's failures to the group, and to listen for disconnected peers."""
        convert_ref = weakref.WeakMethod(live.convert)  # a weak reference, because the group holds this object

        def report(operation: str, error: Exception) -> None:
            convert = convert_ref()
            if convert is not None:
                convert(operation, error)

        self._report = report
        handler_ref = weakref.WeakMethod(self._on_peer_disconnected)

        def on_disconnect(rank: int) -> None:
            handler = handler_ref()
            if handler is not None:
                handler(rank)

        self._lifeline.watch(on_disconnect)

    # --- starting and ending an operation ---------------------------------------------------------------------------

    def start(
        self,
        torch_group: dist.ProcessGroup,
        collective: Collective,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> dist.Work:
        """Start a collective. Raises: RuntimeError: the library's error, or the reason why all operations have
        ended.
        """
        if self._reason is not None:
            raise self.reason_again()
        communicator = self._communicator
        if communicator is not None:
            if communicator.is_recording():
                raise RuntimeError(
                    "a graph can't capture it, because the graph would outlive the group; call it outside"
                )
            if refusal := communicator.lacks(collective, args, kwargs):
                raise RuntimeError(refusal)
            args, kwargs = communicator.fit(collective, args, kwargs)
        try:
            with self._adapted((*args, *kwargs.values())):
                work = forward(torch_group, collective, args, kwargs)
        except RuntimeError as error:
            fault = _classify(error)
            if fault is not OperationRefusedError:  # then every later operation fails too
                # Without its frames, which hold the torch group.
                self._drop(_REASONS[fault](*error.args), operation=collective.name)
            raise
        # Torch's classes raise these for a reduction or a dtype that the library lacks.
        except (ValueError, TypeError) as error:
            if "incompatible function arguments" in str(error):
                raise
            raise RuntimeError(*error.args) from error
        if work is None:
            raise RuntimeError("the library returned no Work, so the end of the operation can't be observed")
        return work

    @contextmanager
    def _adapted(self, values: Sequence[object]) -> Iterator[None]:
        """Change the caller's options for one call, and restore them afterwards.

        Torch gives no Work for an operation on the caller's own stream, so its end could not be observed. So the
        operation runs on the library's stream and is waited for at once, which is equivalent for the caller. Torch's
        `barrier` names the CPU as device for a group that it did not make.
        """
        on_callers_stream: list[Any] = [each for each in values if getattr(each, "asyncOp", True) is False]
        of_barriers: list[Any] = [each for each in values if isinstance(each, dist.BarrierOptions)]
        devices = [each.device for each in of_barriers]
        try:
            for options in on_callers_stream:
                options.asyncOp = True
            for options in of_barriers:
                options.device = None if self._communicator is None else self._communicator.device
            yield
        finally:
            for options in on_callers_stream:
                options.asyncOp = False
            for options, device in zip(of_barriers, devices, strict=True):
                options.device = device

    def add(self, work: dist.Work, name: str) -> _Operation:
        """Add a started operation to the list."""
        operation = _Operation(work, name, self._timeout)
        with self._lock:
            operation.dropped = self._reason is not None  # set by an abort in the meantime
            if operation.dropped:
                return operation
            self._pending.append(operation)
            watch, self._watched = not self._watched, True
        if watch:
            timer().after_s(_CHECK_S, self._check)
        return operation

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def dropped(self) -> bool:
        """Return whether the library aborts everything, or has aborted."""
        return self._reason is not None

    def wait_until_over(self) -> None:
        """Wait until the abort has finished, so that nothing is written any more. The wait is bounded."""
        self._over.wait(_ABORT_S)

    def end(self) -> None:
        """End all operations, here and at the peers, and return at once. Any thread may call this."""
        self._drop(_GroupEndedError("the group was ended"), operation=None)

    def settle(self) -> None:
        """Wait, after `end`, until the library has aborted or a time limit has passed. Then release the library."""
        self.wait_until_over()
        self._lifeline.settle()
        if self._aborting is not None and self._over.is_set():
            join_within(self._aborting)
        self._communicator = None

    def is_over(self) -> bool:
        """Return whether the library has aborted everything."""
        return self._over.is_set()

    def fail(self, operation: _Operation, error: RuntimeError) -> None:
        """End all operations because this one shows that none will succeed. The first call counts."""
        self._drop(error, operation=operation.name)

    # --- the watch ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Check the list, on the timer thread."""
        late = None
        with self._lock:
            failed = self._forget_ended()
            if failed is None:
                now_s = time.monotonic()
                late = next(
                    (each for each in self._pending if now_s >= each.deadline_s and not each.poll(self._looking)), None
                )
            self._watched = bool(self._pending) and failed is None and late is None and self._reason is None
            watch = self._watched
        if failed is not None and failed.error is not None:
            self.fail(failed, failed.error)
        elif late is not None:
            self.fail(late, _timeout_error(late.timeout))
        elif watch:
            timer().after_s(_CHECK_S, self._check)

    def _forget_ended(self) -> _Operation | None:
        """Remove the ended operations from the front of the list. Returns: the first failed one, or None.

        The device runs the operations in this order. The query of a failed operation may abort the communicator, and
        later operations look successful then. So operations are queried only in order, and those after a failed one
        are dropped at once.
        """
        while self._pending and self._pending[0].poll(self._looking):
            if self._pending[0].is_fatal:
                for each in self._pending:
                    each.dropped = not each.ended
                return self._pending[0]
            self._pending.popleft()
        return None

    def has_ended(self, operation: _Operation) -> bool:
        """Return whether an operation has ended by now."""
        self.look()
        return operation.ended

    def look(self) -> None:
        """Report a failure that the watch has not reported yet.

        A kernel may end before the failure is reported. So a caller that has waited for the device must look, before it
        takes the tensors for results.
        """
        with self._lock:
            failed = self._forget_ended()
        if failed is not None and failed.error is not None:
            self.fail(failed, failed.error)

    def _looking(self) -> AbstractContextManager[object]:
        communicator = self._communicator
        return nullcontext() if communicator is None else communicator.looking()

    def _on_peer_disconnected(self, rank: int) -> None:
        """End all operations because a peer has disconnected. Runs on the lifeline's thread."""
        began_s = time.monotonic()
        while True:
            with self._lock:
                failed = self._forget_ended()
                pending = self._pending[0] if self._pending else None
            # A word that this rank can finish without that peer gets the time to finish, because a rank may leave after
            # its own word. A word that needs that peer fails by itself.
            grace_s = _GRACE_S if pending is not None else _WORDS_S if self._lifeline.is_exchanging else 0.0
            if failed is not None or self._reason is not None or time.monotonic() >= began_s + grace_s:
                break
            time.sleep(_POLL_MAX_S)
        reason = _PeerAbortedError(f"rank {rank} disconnected from the group")
        self._drop(reason, operation=None if pending is None else pending.name)

    # --- dropping everything -----------------------------------------------------------------------------------------

    def _drop(self, reason: RuntimeError, *, operation: str | None) -> None:
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            self._aborting = threading.Thread(target=self._abort, name="tft-pg-device-abort", daemon=True)
        # Before the abort: a thread that sees its kernel end must find the reason.
        try:
            if operation is not None:
                self._report(operation, reason)
            self._lifeline.end(str(reason))
        finally:
            self._aborting.start()

    def _abort(self) -> None:
        """Let the library abort everything, on a separate thread."""
        try:
            communicator = self._communicator
            assert communicator is not None
            with self._lock:
                # After the abort starts, the library's Works look successful.
                running = [each for each in self._pending if not each.poll(self._looking)]
                for each in running:
                    each.dropped = True
                self._pending.clear()
            # Any recording of the library's state happens here, while the state still exists.
            communicator.abort()
            _wait_for_kernels(running, self._looking)
        # The thread has no caller to raise to, and the waiting threads must not wait forever.
        except Exception as error:
            threading.excepthook(
                threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
            )
        finally:
            self._over.set()

    def reason_again(self) -> RuntimeError:
        """Return the reason for the abort, without frames."""
        assert self._reason is not None
        return copy.copy(self._reason)


def _wait_for_kernels(running: Sequence[_Operation], looking: _Looking) -> None:
    """Wait until the device has left its kernels, which takes a moment after the abort. The wait is bounded."""
    give_up_s = time.monotonic() + _ABORT_S
    for each in running:
        while not _has_left_device(each.work, looking) and time.monotonic() < give_up_s:
            time.sleep(_POLL_MAX_S)


def _has_left_device(work: dist.Work, looking: _Looking) -> bool:
    try:
        with looking():
            return work.is_completed()
    except RuntimeError:  # the device is broken, and runs nothing any more
        return True


def _ignore_error(operation: str, error: Exception) -> None:
    return None


@final
class _DeviceWork(dist.Work):
    """The caller's Work of an operation: ordered like the stream, with the true outcome.

    Args:
        operation: the operation on the list.
        operations: the list.
        live: converts errors to this package's errors.
    """

    def __init__(self, operation: _Operation, operations: _OperationList, live: LiveGroup) -> None:
        super().__init__()
        self._operation = operation
        self._operations = operations
        self._live = live

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream after the operation.

        Args:
            timeout: wait on the host until the device is done, for at most this time. A barrier always waits on the
                host, within its own timeout. None or zero: no wait on the host.

        Raises: ProcessGroupError: the operation, or the whole group, has failed by now.
        """
        operation = self._operation
        self._raise_if_failed()
        if not operation.ended:
            self._order_the_stream()
            if timeout or operation.name == "barrier":
                self._wait_on_host(timeout)
        return True

    def _order_the_stream(self) -> None:
        try:
            self._operation.work.block_current_stream()
        # An error of the stream is not necessarily an error of the operation; the watch will find out.
        except RuntimeError as error:
            self._raise(error)

    def _wait_on_host(self, timeout: timedelta | None) -> None:
        deadline_s = time.monotonic() + timeout.total_seconds() if timeout else None
        delay_s = _POLL_MIN_S
        while not self._operations.has_ended(self._operation):
            self._raise_if_failed()
            if timeout and deadline_s is not None and time.monotonic() >= deadline_s:
                self._raise(_timeout_error(timeout))  # the operation may continue, and may be waited for again
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, _POLL_MAX_S)
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        operation, operations = self._operation, self._operations
        if operation.dropped:
            operations.look()  # the thread that has found the failure may not have reported it yet
        if operations.dropped and not operation.ended:
            operations.wait_until_over()
            if operation.dropped:
                self._raise(operations.reason_again())
        if operation.is_fatal and operation.error is not None:
            operations.fail(operation, operation.error)
            self._raise(_ConnectionBrokenError(*operation.error.args))
        if operation.error is not None:
            raise copy.copy(operation.error)

    def _raise(self, error: RuntimeError) -> NoReturn:
        raise self._live.convert(self._operation.name, error) from error

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the library's own future, ordered like the stream. Errors of the device show in `errored()` only."""
        return self._operation.work.get_future()

    def is_completed(self) -> bool:
        """Return whether the device has finished the operation, or the operation has failed."""
        return self._operation.dropped or self._operations.has_ended(self._operation)

    def result(self) -> list[torch.Tensor]:
        return self._operation.work.result()

    def source_rank(self) -> int:
        return self._operation.work.source_rank()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()


class AcceleratorProcessGroup(NativeProcessGroup):
    """Abstract base of a group over such a library. A subclass names the library.

    Args:
        timeout: of each operation, and of `configure` unless it is given another.
        backend: the library.
        device: the device to use. None or a device without an index means the current device of the thread that makes
            the group. If no device is in use there yet, it means the current device of the thread that configures the
            group.
        hostname: name or address of this machine for the other ranks; None: this machine's address on the route to the
            store.
        trace_dir: the directory for flight records, or None.

    Raises: UnsupportedOperationError: this torch does not have the library. ConfigError: the environment, or an
        argument, is invalid.
    """

    def __init__(
        self,
        timeout: timedelta,
        *,
        backend: AcceleratorBackend,
        device: torch.device | None,
        hostname: str | None,
        trace_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        check_listening(hostname=hostname)
        super().__init__(timeout, trace_dir=trace_dir)
        backend.check()
        watchdog_timeout()  # reports a wrong setting here instead of in the first operation
        self._backend = backend
        self._device = device
        self._device = self._device_here()
        self._hostname = hostname
        self._operations: _OperationList | None = None

    def _build(self, store: Store, attempt: Attempt, timeout: timedelta) -> LiveGroup:
        where = attempt.where
        assert where.rank is not None
        assert where.world_size is not None
        device = self._device_here()  # on this thread, because on another thread the first device is current
        client = self._store_client
        assert client is not None
        address = own_address(self._hostname, client.host, client.port, where.world_size)
        lifeline = Lifeline(where.rank, where.world_size, address, where.replica_id)
        try:
            connect_peers(store, attempt, lifeline, silent=client.silent)
            attempt.enter(None)  # the library's own connecting, which takes seconds the first time
            store.set_timeout(attempt.remaining())
            connecting = Connecting(self._backend, store, device, attempt)
            communicator = connecting.result(attempt, lifeline)
        except BaseException:
            lifeline.end()
            raise
        operations = _OperationList(communicator, lifeline, timeout)
        live = LiveGroup(
            communicator.torch_group,
            set_timeout=operations.set_timeout,
            sever=operations.end,
            settle=operations.settle,
            is_over=operations.is_over,
            reports_end=lambda collective: False,
            classify=_classify,
            where=where,
            start=operations.start,
            words=WordLine(lifeline, where),
            guard=lambda work, group, operation: _DeviceWork(operations.add(work, operation), operations, group),
        )
        operations.begin(live)
        self._operations = operations
        return live

    def errored(self) -> Exception | None:
        if self._operations is not None:
            self._operations.look()
        return super().errored()

    def _discard(self) -> None:
        return None

    def _device_here(self) -> torch.device | None:
        """Return the device to use, as the calling thread sees it."""
        if self._device is not None and self._device.index is not None:
            return self._device
        return self._backend.current_device() or self._device
