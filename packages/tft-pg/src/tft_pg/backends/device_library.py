"""The interface of a library that moves tensors between devices, and the wait for its connection.

`AcceleratorBackend` and `Communicator` hide the library from `accelerator`, and a test replaces them.

Law of this file: the library's side only; no operation, no watch.
"""

from __future__ import annotations

import abc
import copy
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from tft_pg.backends.attempt import Attempt
from tft_pg.backends.lifeline import Lifeline
from tft_pg.errors import ConfigureError, ProcessGroupError
from tft_pg.ops import Collective
from tft_pg.threads import join_within

__all__ = ["AcceleratorBackend", "Communicator", "Connecting"]

_CHECK_S = 0.02
_ABANDON_S = 0.1


class Communicator(abc.ABC):
    """One torch group of the library, made by `AcceleratorBackend.communicator`.

    `connect` is called once, on its own thread. Any thread may call `abort`, also while `connect` runs, once or more.
    """

    @property
    @abc.abstractmethod
    def torch_group(self) -> dist.ProcessGroup:
        """Return the torch group that runs the collectives.

        Its Works behave as follows:

        - `is_completed()` returns without waiting whether the device has finished the operation, or the operation has
          failed.
        - `wait()` is called only after that and returns at once. If the operation has failed, `wait()` raises.
          OperationRefusedError means that the group keeps working, and any other RuntimeError that it does not. Before
          it raises, it may abort the communicator, as torch's NCCL does. The kernels of all other operations end then,
          without their result.
        - `block_current_stream()` orders the current stream after the operation, and returns at once.
        - `get_future()` returns a future that is ordered like the stream.
        """

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Return the device of all operations."""

    def lacks(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> str:
        """Return why the library can't run this call, as a part of a sentence, or an empty text."""
        return ""

    def fit(
        self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], Mapping[str, object]]:
        """Return the arguments in the form that works best in the library."""
        return args, kwargs

    @abc.abstractmethod
    def connect(self) -> None:
        """Connect to all ranks, verify the connections, and block until then. Raises: RuntimeError: failed or
        aborted.
        """

    @abc.abstractmethod
    def looking(self) -> AbstractContextManager[object]:
        """Return a context manager for every query of the Works, on any thread.

        A query inside must not initialise another device, and must not disturb other threads, for example a graph
        capture.
        """

    @abc.abstractmethod
    def is_recording(self) -> bool:
        """Return whether the calling thread's operations are captured into a graph now, instead of run."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Abort everything, on the device too. May block for some time. Raises: RuntimeError: the abort failed."""


class AcceleratorBackend(abc.ABC):
    """The interface of a library for a group.

    Each group takes a `backend` argument, which replaces torch's library.
    """

    @abc.abstractmethod
    def check(self) -> None:
        """Check that the library is usable. Called when a group is made.

        Raises: UnsupportedOperationError: this torch does not have the library. ConfigError: the environment asks for
            something impossible.
        """

    @abc.abstractmethod
    def current_device(self) -> torch.device | None:
        """Return the device of the calling thread, with its index, or None if none is in use. Must not initialise
        a device.
        """

    @abc.abstractmethod
    def communicator(
        self, store: Store, rank: int, world_size: int, device: torch.device | None, limit: timedelta
    ) -> Communicator:
        """Make a communicator, on the thread that calls `connect` next.

        Args:
            store: for the library's own exchange of addresses.
            rank, world_size: the rank of this process and the number of ranks.
            device: the device to use, with its index. Without an index, or None, no device was in use on the caller's
                thread. Then use the device that is current during this call. The current device of this call's thread
                has no meaning later.
            limit: the time after which the caller stops waiting for `connect`.
        """


@final
class Connecting:
    """The library while it connects, on a separate thread because the call can't be interrupted.

    Args:
        backend: the library.
        store: for the library's own exchange of addresses.
        device: the device to use.
        attempt: the current attempt, with rank and size.
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
            communicator = backend.communicator(store, where.rank or 0, where.world_size or 1, device, attempt.timeout)
            with self._lock:
                self._communicator = communicator
                abandoned = self._abandoned
            if abandoned:
                communicator.abort()
            else:
                communicator.connect()
        # Raised by `result`; without a call of `result`, the attempt's own error is reported.
        except Exception as error:
            self._error = error
        self._done.set()

    def result(self, attempt: Attempt, lifeline: Lifeline) -> Communicator:
        """Return the connected communicator. Raises: the library's error; the attempt's; ConfigureError: a peer
        disconnected.
        """
        try:
            while not self._done.wait(_CHECK_S):
                attempt.check()
                rank = lifeline.disconnected_rank()
                if rank is not None:
                    raise ConfigureError(
                        f"rank {rank} disconnected during configure ({attempt.where}); ask for a new quorum",
                        where=attempt.where,
                    )
            if self._error is not None:
                raise self._error
            attempt.check()
        except BaseException as error:
            if isinstance(error, ProcessGroupError):
                attempt.stop(copy.copy(error))  # interrupts the library's wait in the store
            self._abandon()
            raise
        join_within(self._thread)
        assert self._communicator is not None
        return self._communicator

    def _abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            communicator = self._communicator
        if communicator is not None:
            # On a separate thread again, because a library that ignores the abort would block the caller.
            ending = threading.Thread(target=communicator.abort, name="tft-pg-device-abort", daemon=True)
            ending.start()
            ending.join(_ABANDON_S)
        self._thread.join(_ABANDON_S)
