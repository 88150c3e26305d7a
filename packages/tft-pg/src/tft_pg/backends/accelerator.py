"""Process groups over a library that moves tensors between devices, such as NCCL.

Such a library is a clerk who takes an order and answers at once: the order itself waits in the device's queue, and runs
when everything before it is done. So an operation that hangs holds up nobody on the host; and whoever asks too early
whether it went well hears nothing bad. This file stands beside the clerk with a list and a watch. Each order goes onto
the list with the time by which it must be done; now and then the list is gone through; and when an order is late, or
has failed, or a peer has let go (see `lifeline`), the library is told to drop everything, and from then on every answer
is an error.

What that means for a Work: `wait()` puts the operation before whatever the current stream does next, and returns; only
`wait(timeout)` and a barrier hold up the host. An error shows in `errored()` and in every later `wait` of an operation
that did not end well. Nothing here waits for a whole device, or for what others have queued on it.

The library itself is behind `AcceleratorBackend` and `Communicator`, which a test replaces. The law of this file: what
all such libraries have in common; what only one of them has is in the file of its name.
"""

from __future__ import annotations

import abc
import copy
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from tft_pg.backends.addresses import address_towards
from tft_pg.backends.attempt import Attempt
from tft_pg.backends.examination import Examination
from tft_pg.backends.lifeline import Lifeline
from tft_pg.backends.live import LiveGroup
from tft_pg.backends.native import NativeProcessGroup
from tft_pg.backends.patience import Phase
from tft_pg.backends.rendezvous import meet
from tft_pg.backends.word_line import WordLine
from tft_pg.errors import ConfigureFailed, DeadlinePassed, OperationRefused, PeerFailed, ProcessGroupError
from tft_pg.forwarding import forward
from tft_pg.futures import timer, watchdog_timeout
from tft_pg.ops import Collective
from tft_pg.threads import join_within
from tft_pg.word import LINGER

__all__ = ["AcceleratorBackend", "AcceleratorProcessGroup", "Communicator"]

_LOOK_S = 0.02
_MOMENT_S = 0.0002
_LONGEST_MOMENT_S = 0.002
# A peer that has finished may leave at once; what this rank's device still has the data for may come to its end.
_GRACE_S = 0.05
# So long at most for the others' words, as a rank that leaves waits for its own to pass.
_WORDS_S = LINGER.total_seconds()
# How long anybody waits for the library to drop everything. Past that, it is left to itself.
_ABORT_S = 5.0
_ABANDON_S = 0.1

_Looking = Callable[[], AbstractContextManager[object]]
_Fault = type[PeerFailed] | type[DeadlinePassed] | type[OperationRefused]


class Communicator(abc.ABC):
    """One torch group of the library, made by `AcceleratorBackend.communicator`.

    `connect` is called once, on a thread of its own; `abort` by any thread, also while `connect` runs, once or more.
    """

    @property
    @abc.abstractmethod
    def torch_group(self) -> dist.ProcessGroup:
        """Whose collectives are called. Their Works:

        - `is_completed()` tells, without waiting, whether the device is done with it, or it has failed;
        - `wait()`, called only after that, returns at once, and raises if it has failed: OperationRefused if the group
          works on, any other RuntimeError if it does not;
        - `synchronize()` puts it before what the current stream does next, and returns at once;
        - `get_future()` gives a future that is ordered like the stream.
        """

    @abc.abstractmethod
    def connect(self) -> None:
        """Connect to all ranks, and show that it works; blocks. Raises: RuntimeError: it could not, or was aborted."""

    @abc.abstractmethod
    def looking(self) -> AbstractContextManager[object]:
        """Round whatever is asked of the Works, on any thread.

        Inside, that must neither start another device, nor spoil what other threads do, such as recording a graph.
        """

    @abc.abstractmethod
    def is_recording(self) -> bool:
        """Whether what the calling thread starts now is recorded, to be run later and again, instead of run."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Drop everything, on the device too; may block for some time. Raises: RuntimeError: it could not."""


class AcceleratorBackend(abc.ABC):
    """A library, as a group needs it.

    The place to put another in the place of torch's: each group takes one as `backend`.
    """

    @abc.abstractmethod
    def check(self) -> None:
        """Called when a group is made.

        Raises: Unsupported: this torch does not have it. InvalidSetting: the environment asks for what can't work.
        """

    @abc.abstractmethod
    def current_device(self) -> torch.device | None:
        """The device of the calling thread, with its index; None where none is in use yet. Must not start one."""

    @abc.abstractmethod
    def communicator(
        self, store: Store, rank: int, world_size: int, device: torch.device | None, limit: timedelta
    ) -> Communicator:
        """Make one; called on the thread that calls `connect` next.

        Args:
            store: for the library's own exchange of addresses.
            rank, world_size: as usual.
            device: to use, with its index; without one, or None: no device was in use when a caller's thread was asked,
                so take the one that is current then. What the thread of this call says is current says nothing later.
            limit: after which nobody waits for `connect` any more.
        """


class _PeerLetGo(RuntimeError):
    """Why operations end: a rank is gone."""


class _TookTooLong(RuntimeError):
    """Why operations end: one of them was late."""


def _late(timeout: timedelta) -> _TookTooLong:
    return _TookTooLong(f"it was not done on the device within {timeout.total_seconds():g} s")


class _Broke(RuntimeError):
    """Why operations end: one has failed on the device."""


class _Ended(RuntimeError):
    """Why operations end: this rank's own `abort`, `configure` or `shutdown`."""


# What the libraries say of themselves when a call can't be made; whatever else they say is a refusal of that call.
_FAULTS: Mapping[str, _Fault] = {
    "remote process exited": PeerFailed,
    "network error": PeerFailed,
    "system error": PeerFailed,
    "internal error": PeerFailed,
    "communicator was aborted": PeerFailed,
    "timed out": DeadlinePassed,
    "timeout": DeadlinePassed,
}


def _classify(error: Exception) -> _Fault:
    match error:
        case _PeerLetGo() | _Ended() | _Broke():
            return PeerFailed
        case _TookTooLong():
            return DeadlinePassed
    text = str(error).lower()
    return next((fault for words, fault in _FAULTS.items() if words in text), OperationRefused)


@final
class _Operation:
    """One order: the library's Work, by when it must be done, and how it ended."""

    def __init__(self, work: dist.Work, name: str, timeout: timedelta) -> None:
        self.work = work
        self.name = name
        self.timeout = timeout
        self.deadline_s = time.monotonic() + timeout.total_seconds()
        self.ended = False
        self.dropped = False  # it had not ended when everything was dropped: what its Work says from then on is moot
        self.error: RuntimeError | None = None

    def look(self, looking: _Looking) -> bool:
        """Whether it has ended. To be called by one thread at a time.

        Never raises: a device that is broken may say so already when it is asked whether it is done, or before.

        Args:
            looking: of the communicator.
        """
        if not self.ended and not self.dropped:
            try:
                with looking():
                    if not self.work.is_completed():
                        return False
                    self.work.wait()
            except OperationRefused as refused:
                self.error = copy.copy(refused)  # without its frames
            except Exception as error:
                self.error = _Broke(*error.args)
            self.ended = True
        return self.ended

    @property
    def is_fatal(self) -> bool:
        """Whether it has failed in a way that ends all others."""
        return self.error is not None and not isinstance(self.error, OperationRefused)


@final
class _Orders:
    """The list of one group's operations, with the watch: what is late, or has failed, ends all of them.

    Args:
        communicator: runs them.
        lifeline: tells of peers that let go, and tells them.
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
        self._tell: Callable[[str, Exception], object] = _tell_nobody

    def begin(self, live: LiveGroup) -> None:
        """From now on tell the group of what ends its operations, and hear of peers that let go."""
        told = weakref.WeakMethod(live.convert)  # the group holds this, so this does not hold the group

        def tell(operation: str, error: Exception) -> None:
            convert = told()
            if convert is not None:
                convert(operation, error)

        self._tell = tell
        cut = weakref.WeakMethod(self._cut)

        def on_cut(rank: int) -> None:
            act = cut()
            if act is not None:
                act(rank)

        self._lifeline.watch(on_cut)

    # --- starting and ending an operation ---------------------------------------------------------------------------

    def start(
        self,
        torch_group: dist.ProcessGroup,
        collective: Collective,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> dist.Work:
        """Start a collective. Raises: RuntimeError: the library's, or why there are no operations any more."""
        if self._reason is not None:
            raise self.reason_again()
        if self._communicator is not None and self._communicator.is_recording():
            raise RuntimeError("it can't become part of a graph, which would outlive the group; call it outside of one")
        # Of an operation on the caller's own stream torch gives no Work, and nobody could tell how it ends. On the
        # library's stream and waited for at once, as torch then does, it is the same to the caller, whose options say
        # again afterwards what they said.
        on_callers_stream = [each for each in (*args, *kwargs.values()) if getattr(each, "asyncOp", True) is False]
        try:
            for options in on_callers_stream:
                options.asyncOp = True  # type: ignore[attr-defined]
            work = forward(torch_group, collective, args, kwargs)
        except RuntimeError as error:
            fault = _classify(error)
            if fault is not OperationRefused:  # and then no other operation will do better
                # Without its frames, which hold the torch group.
                kind = _TookTooLong if fault is DeadlinePassed else _Broke
                self._drop(kind(*error.args), operation=None)
            raise
        finally:
            for options in on_callers_stream:
                options.asyncOp = False  # type: ignore[attr-defined]
        if work is None:
            raise RuntimeError("the library gave no Work for it, so that nobody could tell how it ends")
        return work

    def take(self, work: dist.Work, name: str) -> _Operation:
        """Put a started operation onto the list."""
        operation = _Operation(work, name, self._timeout)
        with self._lock:
            operation.dropped = self._reason is not None  # which came in between
            if operation.dropped:
                return operation
            self._pending.append(operation)
            watch, self._watched = not self._watched, True
        if watch:
            timer().after_s(_LOOK_S, self._look)
        return operation

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def dropped(self) -> bool:
        """Whether the library drops everything, or has."""
        return self._reason is not None

    def wait_until_over(self) -> None:
        """Wait until what is dropped has been dropped, so that nothing is written any more; bounded."""
        self._over.wait(_ABORT_S)

    def end(self) -> None:
        """End everything, here and at the peers; returns at once. Any thread."""
        self._drop(_Ended("the group was ended"), operation=None)

    def settle(self) -> None:
        """After `end`: wait until the library has let go, or has shown that it will not; then let go of it."""
        self.wait_until_over()
        self._lifeline.settle()
        if self._aborting is not None and self._over.is_set():
            join_within(self._aborting)
        self._communicator = None

    def is_over(self) -> bool:
        """Whether the library has dropped everything."""
        return self._over.is_set()

    def fail(self, operation: _Operation, error: RuntimeError) -> None:
        """An operation has shown that nothing will come of any; the first one counts."""
        self._drop(error, operation=operation.name)

    # --- the watch ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Go through the list; on the timer thread."""
        late = None
        with self._lock:
            failed = self._forget_ended()
            if failed is None:
                now_s = time.monotonic()
                late = next(
                    (each for each in self._pending if now_s >= each.deadline_s and not each.look(self._looking)), None
                )
            self._watched = bool(self._pending) and failed is None and late is None and self._reason is None
            watch = self._watched
        if failed is not None and failed.error is not None:
            self.fail(failed, failed.error)
        elif late is not None:
            self.fail(late, _late(late.timeout))
        elif watch:
            timer().after_s(_LOOK_S, self._look)

    def _forget_ended(self) -> _Operation | None:
        """Take the ended ones off the front of the list; gives the first that has failed."""
        while self._pending and self._pending[0].look(self._looking):
            if self._pending[0].is_fatal:
                return self._pending[0]
            self._pending.popleft()
        return None

    def looked(self, operation: _Operation) -> bool:
        """Whether an operation has ended by now."""
        with self._lock:
            return operation.look(self._looking)

    def _looking(self) -> AbstractContextManager[object]:
        communicator = self._communicator
        return nullcontext() if communicator is None else communicator.looking()

    def _cut(self, rank: int) -> None:
        """A peer has let go; on the lifeline's thread."""
        began_s = time.monotonic()
        while True:
            with self._lock:
                failed = self._forget_ended()
                pending = self._pending[0] if self._pending else None
            # A word that this rank can end without that peer shall end: a rank that has said its own may leave. A word
            # that needs that peer fails by itself.
            grace_s = _GRACE_S if pending is not None else _WORDS_S if self._lifeline.is_exchanging else 0.0
            if failed is not None or self._reason is not None or time.monotonic() >= began_s + grace_s:
                break
            time.sleep(_LONGEST_MOMENT_S)
        reason = _PeerLetGo(f"rank {rank} has let go of the group")
        self._drop(reason, operation=None if pending is None else pending.name)

    # --- dropping everything -----------------------------------------------------------------------------------------

    def _drop(self, reason: RuntimeError, *, operation: str | None) -> None:
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            self._aborting = threading.Thread(target=self._abort, name="tft-pg-device-abort", daemon=True)
        # Before the abort: whoever sees its kernel end must find the reason.
        try:
            if operation is not None:
                self._tell(operation, reason)
            self._lifeline.end(str(reason))
        finally:
            self._aborting.start()

    def _abort(self) -> None:
        """Have the library drop everything; on a thread of its own."""
        try:
            communicator = self._communicator
            assert communicator is not None
            with self._lock:
                # Once it is told to drop everything, its Works look as if they had ended well.
                running = [each for each in self._pending if not each.look(self._looking)]
                for each in running:
                    each.dropped = True
                self._pending.clear()
            # What is to be recorded of the library's state is recorded here, before it is gone.
            communicator.abort()
            _until_left(running, self._looking)
        except Exception as error:  # there is nobody to raise it to, and whoever waits must not wait for ever
            threading.excepthook(
                threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
            )
        finally:
            self._over.set()

    def reason_again(self) -> RuntimeError:
        """Why everything was dropped, without frames."""
        assert self._reason is not None
        return copy.copy(self._reason)


def _until_left(running: Sequence[_Operation], looking: _Looking) -> None:
    """The device leaves its kernels a moment after the host was told so; wait for that, bounded."""
    give_up_s = time.monotonic() + _ABORT_S
    for each in running:
        while not _has_left(each.work, looking) and time.monotonic() < give_up_s:
            time.sleep(_LONGEST_MOMENT_S)


def _has_left(work: dist.Work, looking: _Looking) -> bool:
    try:
        with looking():
            return work.is_completed()
    except RuntimeError:  # the device is broken, and runs nothing any more
        return True


def _tell_nobody(operation: str, error: Exception) -> None:
    return None


@final
class _DeviceWork(dist.Work):
    """What the caller gets of an operation: ordered like the stream, and honest about how it ended.

    Args:
        operation: on the list.
        orders: the list.
        live: puts errors into this package's words.
    """

    def __init__(self, operation: _Operation, orders: _Orders, live: LiveGroup) -> None:
        super().__init__()
        self._operation = operation
        self._orders = orders
        self._live = live

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Put the operation before what the current stream does next.

        Args:
            timeout: also wait on the host until the device is done, at most so long. A barrier always does, as long as
                its own time-out allows. None or zero: don't.
        Raises: ProcessGroupError: it, or the group with it, has failed by now.
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
            self._operation.work.synchronize()
        except RuntimeError as error:  # of the stream, which need not be an error of the operation: the watch will tell
            self._raise(error)

    def _wait_on_host(self, timeout: timedelta | None) -> None:
        deadline_s = time.monotonic() + timeout.total_seconds() if timeout else None
        moment_s = _MOMENT_S
        while not self._orders.looked(self._operation):
            self._raise_if_failed()
            if timeout and deadline_s is not None and time.monotonic() >= deadline_s:
                self._raise(_late(timeout))  # the operation itself may go on, and be waited for again
            time.sleep(moment_s)
            moment_s = min(2 * moment_s, _LONGEST_MOMENT_S)
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        operation, orders = self._operation, self._orders
        if orders.dropped and not operation.ended:
            orders.wait_until_over()
            if operation.dropped:
                self._raise(orders.reason_again())
        if operation.is_fatal and operation.error is not None:
            orders.fail(operation, operation.error)
            self._raise(_Broke(*operation.error.args))
        if operation.error is not None:
            raise copy.copy(operation.error)

    def _raise(self, error: RuntimeError) -> NoReturn:
        raise self._live.convert(self._operation.name, error) from error

    def get_future(self) -> torch.futures.Future[Any]:
        """The library's own future, ordered like the stream. It holds no error of the device; `errored()` does."""
        return self._operation.work.get_future()

    def is_completed(self) -> bool:
        """Whether the device is done with it, or it has failed."""
        return self._operation.dropped or self._orders.looked(self._operation)

    def result(self) -> list[torch.Tensor]:
        return self._operation.work.result()

    def source_rank(self) -> int:
        return self._operation.work.source_rank()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()


class AcceleratorProcessGroup(NativeProcessGroup):
    """Abstract: a group over such a library; a subclass names the library.

    Args:
        timeout: of each operation, and of `configure` unless it is given another.
        backend: the library.
        device: to use; None, or one without an index: the one that is current for the thread that makes the group, if
            one is in use by then, else the one that is current for the thread that configures it.
        hostname: name or address of this machine that the other ranks reach it by; None: the address by which this
            machine talks to the store.

    Raises: Unsupported: this torch does not have the library. InvalidSetting: the environment, or an argument, can't
        work.
    """

    def __init__(
        self,
        timeout: timedelta,
        *,
        backend: AcceleratorBackend,
        device: torch.device | None,
        hostname: str | None,
    ) -> None:
        super().__init__(timeout)
        backend.check()
        watchdog_timeout()  # a setting that is wrong is said here, and not in the first operation
        self._backend = backend
        self._device = device
        self._device = self._device_here()
        self._hostname = hostname

    def _build(self, store: Store, attempt: Attempt, timeout: timedelta) -> LiveGroup:
        where = attempt.where
        assert where.rank is not None
        assert where.world_size is not None
        device = self._device_here()  # now, and not on another thread, where the current one is the first
        lifeline = Lifeline(where.rank, where.world_size, self._address(where.world_size), where.replica_id)
        try:
            self._meet(store, attempt, lifeline)
            store.set_timeout(attempt.remaining())
            connecting = _Connecting(self._backend, store, device, attempt)
            communicator = connecting.result(attempt, lifeline)
        except BaseException:
            lifeline.end()
            raise
        orders = _Orders(communicator, lifeline, timeout)
        live = LiveGroup(
            communicator.torch_group,
            set_timeout=orders.set_timeout,
            sever=orders.end,
            settle=orders.settle,
            is_over=orders.is_over,
            tells_its_end=lambda collective: False,
            classify=_classify,
            where=where,
            start=orders.start,
            words=WordLine(lifeline, where),
            guard=lambda work, group, operation: _DeviceWork(orders.take(work, operation), orders, group),
        )
        orders.begin(live)
        return live

    def _meet(self, store: Store, attempt: Attempt, lifeline: Lifeline) -> None:
        """Find the other ranks, and tie the lifeline to them. Raises: ConfigureFailed: it names who is not there."""
        assert self._store_client is not None
        records = meet(store, attempt, lifeline.record(), silent=self._store_client.silent)
        examination = Examination(store, attempt, lifeline.unconnected)
        attempt.enter(Phase.CONNECTIONS, late=examination.late, examine=examination.run)
        try:
            lifeline.connect(records, attempt)
        except ConfigureFailed as failure:
            raise examination.after(failure) from failure
        attempt.enter(None)  # the library, which takes seconds the first time

    def _discard(self) -> None:
        return None

    def _device_here(self) -> torch.device | None:
        """The device to use, as the calling thread sees it."""
        if self._device is not None and self._device.index is not None:
            return self._device
        return self._backend.current_device() or self._device

    def _address(self, world_size: int) -> str:
        assert self._store_client is not None
        if world_size == 1:
            return ""
        try:
            if self._hostname is not None:
                return str(socket.getaddrinfo(self._hostname, None, type=socket.SOCK_STREAM)[0][4][0])
            return address_towards(self._store_client.host, self._store_client.port)
        except OSError as error:
            raise ConfigureFailed(
                f"this machine has no address to be reached by ({error}); give the group a hostname"
            ) from error


@final
class _Connecting:
    """The library while it connects: on a thread of its own, because it listens to nobody.

    Args:
        backend: the library.
        store: for its own exchange of addresses.
        device: to use.
        attempt: who takes part.
    """

    def __init__(
        self, backend: AcceleratorBackend, store: Store, device: torch.device | None, attempt: Attempt
    ) -> None:
        self._lock = threading.Lock()
        self._abandoned = False
        self._communicator: Communicator | None = None
        self._error: Exception | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(backend, store, device, attempt), name="tft-pg-device-connect", daemon=True
        )
        self._thread.start()

    def _run(self, backend: AcceleratorBackend, store: Store, device: torch.device | None, attempt: Attempt) -> None:
        where = attempt.where
        try:
            made = backend.communicator(store, where.rank or 0, where.world_size or 1, device, attempt.timeout)
            with self._lock:
                self._communicator = made
                abandoned = self._abandoned
            if abandoned:
                made.abort()
            else:
                made.connect()
        except Exception as error:  # raised by `result`; where nobody asks, the attempt's own error is the news
            self._error = error
        self._done.set()

    def result(self, attempt: Attempt, lifeline: Lifeline) -> Communicator:
        """The connected communicator. Raises: the library's error; the attempt's; ConfigureFailed: a peer let go."""
        try:
            while not self._done.wait(_LOOK_S):
                attempt.check()
                rank = lifeline.cut_by()
                if rank is not None:
                    raise ConfigureFailed(
                        f"rank {rank} let go while the group was built ({attempt.where}); ask for a new quorum",
                        where=attempt.where,
                    )
            if self._error is not None:
                raise self._error
            attempt.check()
        except BaseException as error:
            if isinstance(error, ProcessGroupError):
                attempt.stop(copy.copy(error))  # breaks what the library waits for in the store
            self._abandon()
            raise
        join_within(self._thread)
        assert self._communicator is not None
        return self._communicator

    def _abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            made = self._communicator
        if made is not None:
            # On another thread again: a library that does not let itself be told would hold up who wants to go on.
            ending = threading.Thread(target=made.abort, name="tft-pg-device-abort", daemon=True)
            ending.start()
            ending.join(_ABANDON_S)
        self._thread.join(_ABANDON_S)
