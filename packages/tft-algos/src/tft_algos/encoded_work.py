"""The Work of a reduction whose numbers travel encoded: what all kinds of it have in common.

The members first compare what they are about to reduce. Then a reduction encodes its tensors, exchanges bytes in one or
two collectives, and writes the result when the last of them has ended. Either the waiting caller moves it on, or a
thread of its own does.

On a CPU, the numbers are exchanged after the comparison. On an accelerator, a wait of the host would leave the device
without work, so all collectives are started at once, and the comparison is read when the result is used.

Law of this file: the life of a Work, from its start to its result. `collectives` and `gathered` decide what is sent.
"""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, final

import torch
import torch.distributed as dist

from tft_algos.agreement import Agreement


class Driver(Protocol):
    """The thread that moves reductions on, as a waiting caller sees it."""

    def await_until(self, done: Callable[[], bool], timeout: timedelta | None) -> None:
        """Wait until `done` is true.

        Raises: CollectiveTimeoutError: a reduction stood still for too long, or `timeout` has passed.
        """
        ...


class Exchange(abc.ABC):
    """What a reduction sends, and what it makes of what it receives."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Encode, and start the first collective. Raises: errors of the process group."""

    @abc.abstractmethod
    def proceed(self, timeout: timedelta | None) -> dist.Work | None:
        """Wait for all collectives but the last one.

        Args:
            timeout: for all of them. None: each has the time-out of the process group.
        Returns: the last collective. None: the result is written.
        Raises: errors of the process group.
        """

    @abc.abstractmethod
    def write(self) -> None:
        """Write the result into the tensors. The last collective has ended. Raises: the result can't be used."""

    @abc.abstractmethod
    def release(self) -> None:
        """Release the memory of the exchange."""


@final
class EncodedWork(dist.Work):
    """A reduction of encoded numbers.

    Args:
        exchange: of this reduction.
        agreement: compares the members before the result is used.
        tensors: receive the result, on one device.
        driver: another thread calls `advance`, so `wait` and `get_future` do not.
    """

    def __init__(
        self,
        exchange: Exchange,
        agreement: Agreement,
        tensors: list[torch.Tensor],
        *,
        driver: Driver | None = None,
    ) -> None:
        super().__init__()
        self.agreement = agreement
        self._exchange = exchange
        self._tensors = tensors
        self._on_cpu = tensors[0].device.type == "cpu"
        self._is_empty = not any(tensor.numel() for tensor in tensors)
        self._driver = driver
        self._lock = threading.RLock()
        self._has_begun = False
        self._last: dist.Work | None = None  # the collective after which the result is here
        self._end = _End()

    # --- the parts of a reduction -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the comparison, and on an accelerator the first half. Raises: errors of the process group."""
        with self._lock:
            self._has_begun = True
            self.agreement.begin()
            if not self._on_cpu and not self._is_empty:
                self._exchange.begin()

    def advance(self, timeout: timedelta | None = None) -> None:
        """Bring the reduction to its last collective. A second call does nothing. Raises nothing.

        Args:
            timeout: for all collectives before the last. None: each has that of the process group.
        """
        ends_at = _end_of(timeout)
        with self._lock:
            if self._end.advanced.is_set():
                return
            try:
                if not self._has_begun:
                    self.begin()
                self.agreement.wait(_until(ends_at))
                self._last = self._exchanged(ends_at)
                self._end.is_written = self._last is None and self._on_cpu
            except Exception as error:
                self._end.error = error
        self._end.advanced.set()
        self._resolve()

    def _exchanged(self, ends_at: float | None) -> dist.Work | None:
        """Return the last collective of the exchange, or None if there is none.

        Raises: ContributionError: on a CPU, the members reduce something else. No numbers were exchanged. Errors of the
            process group.
        """
        if self._on_cpu:
            failure = self.agreement.failure()
            if failure is not None:
                raise failure
            if not self._is_empty:
                self._exchange.begin()
        return None if self._is_empty else self._exchange.proceed(_until(ends_at))

    def _finish(self) -> None:
        """Write the result. The last collective has ended."""
        with self._lock:
            if self._end.is_written or self._end.error is not None:
                return
            try:
                if not self._on_cpu and not self.agreement.read_later:
                    self._end.error = self.agreement.failure()
                if self._end.error is None and self._last is not None:
                    self._exchange.write()
            except Exception as error:
                self._end.error = error
            self._end.is_written = self._end.error is None
            self._exchange.release()

    @property
    def failure(self) -> Exception | None:
        """Return the error of a part that could not start or has failed. None: there is none yet."""
        return self._end.error

    # --- the interface of a Work --------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensors hold the result.

        Args:
            timeout: maximum wait. None: each collective has the time-out of the process group.
        Raises: errors of the process group. The result is undefined then.
        """
        ends_at = _end_of(timeout)
        if self._driver is not None:
            self._driver.await_until(self._end.advanced.is_set, timeout)
        else:
            self.advance(timeout)
        last = self._last
        if self._end.error is None and last is not None and not self._end.is_written:
            left = _until(ends_at)
            failure = _failure(lambda: last.wait(left) if left else last.wait())
            self._end.error = self._end.error or failure
        self._finish()
        if self._end.error is not None:
            raise self._end.error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors, which is done when they hold the result, or holds an error.

        Without a driver, this waits until the last collective has started, because the order of collectives is that of
        the calls. So it returns when the other members have begun, or after the time-out of the process group.
        """
        if self._driver is None:
            self.advance()
        with self._end.lock:
            if self._end.future is None:
                device = self._tensors[0].device
                self._end.future = torch.futures.Future(devices=None if device.type == "cpu" else [device])
            future = self._end.future
        if self._end.advanced.is_set():
            self._resolve()
        return future

    def _resolve(self) -> None:
        """Complete the future, if there is one, when the last collective has ended."""
        with self._end.lock:
            future = self._end.future
            if future is None or self._end.is_resolved:
                return
            self._end.is_resolved = True
            last = self._last
        if last is None:
            self._complete(future)
        elif not self._on_cpu:  # this wait only orders the stream
            self._end.error = self._end.error or _failure(last.wait)
            self._complete(future)
        else:
            last.get_future().add_done_callback(lambda ended: self._ended(future, ended))

    def _ended(self, future: torch.futures.Future[Any], ended: torch.futures.Future[Any]) -> None:
        # A wait here, on the backend's own thread, would never end.
        self._end.error = self._end.error or _failure(ended.value)
        self._complete(future)

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        """Complete the future. All collectives have ended."""
        self._finish()
        if self._end.error is not None:
            future.set_exception(self._end.error)
        else:
            future.set_result(self._tensors)

    def is_completed(self) -> bool:
        if self._end.is_written or self._end.error is not None:
            return True
        last = self._last
        return self._end.advanced.is_set() and (last is None or last.is_completed())

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()


def _end_of(timeout: timedelta | None) -> float | None:
    """Return when a wait ends, or None if it has no time-out of its own."""
    return None if timeout is None else time.monotonic() + timeout.total_seconds()


def _until(ends_at: float | None) -> timedelta | None:
    """Return the time until then, or None if there is no end."""
    return None if ends_at is None else timedelta(seconds=max(ends_at - time.monotonic(), 0.001))


def _failure(call: Callable[[], object]) -> Exception | None:
    """Return the error that a call raises, or None."""
    try:
        call()
    except Exception as error:
        return error
    return None


@final
class _End:
    """How far a reduction has come."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # of the future. The lock of the Work is held during the first half
        self.advanced = threading.Event()  # the last collective was issued, or there is an error
        self.error: Exception | None = None
        self.is_written = False
        self.future: torch.futures.Future[Any] | None = None
        self.is_resolved = False
