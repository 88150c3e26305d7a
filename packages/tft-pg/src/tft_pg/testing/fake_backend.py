"""A device library without a device, to test `ProcessGroupNCCL` and `ProcessGroupXCCL` on a CPU.

The fake behaves like NCCL, including its problems. It accepts an operation at once and runs it later, on its own
stream. Until then the tensors are unchanged, and a caller must check again to learn the outcome.

An abort ends the operations here. The peers' operations keep hanging until the peers abort too. If connection errors
propagate, the peers' operations fail late instead, visible only to a check. After an abort every Work looks successful.
The data goes over a Gloo group of this package.

Law of this file: the library only. The group around it is the real one.
"""

from __future__ import annotations

import queue
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from tft_pg.backends.device_library import AcceleratorBackend, Communicator
from tft_pg.backends.gloo import ProcessGroupGloo
from tft_pg.base import ProcessGroup
from tft_pg.errors import OperationRefusedError, ProcessGroupError
from tft_pg.forwarding import forward, forward_collectives
from tft_pg.ops import Collective
from tft_pg.store import format_store_addr
from tft_pg.work import PendingWork
from tft_pg.wrappers.wrapping import WrappingProcessGroup

__all__ = ["FakeAccelerator", "WaitsOnHost"]

_PREFIX_KEY = "fake-accelerator/prefix"
_LOOK_S = 0.005
_HOUR = timedelta(hours=1)

_Future = torch.futures.Future[Any]


@final
class FakeAccelerator(AcceleratorBackend):
    """The fake library, to pass to a group as `backend`.

    If `records` is set, the library reports that new operations are captured into a graph and not run.

    Args:
        propagates: whether a lost peer makes this rank's operations fail, as over a network. Otherwise they hang, as
            over shared memory.
    """

    def __init__(self, *, propagates: bool = False) -> None:
        self.propagates = propagates
        self.records = False
        self._running = threading.Event()
        self._running.set()
        self._made: weakref.WeakSet[_FakeCommunicator] = weakref.WeakSet()

    def hold(self) -> None:
        """Block the end of operations from now on, in all groups with this library in this process."""
        self._running.clear()

    def release(self) -> None:
        """Let operations end again."""
        self._running.set()

    def pull_the_cable(self) -> None:
        """End only the data connections of every group with this library in this process."""
        for communicator in list(self._made):
            communicator.lose_connections()

    def wait_until_running(self, aborted: threading.Event) -> bool:
        """Wait for the end of a `hold`. Returns False if the abort came first."""
        while not self._running.wait(_LOOK_S):
            if aborted.is_set():
                return False
        return not aborted.is_set()

    def check(self) -> None:
        return None

    def current_device(self) -> torch.device | None:
        return None

    def communicator(
        self, store: Store, rank: int, world_size: int, device: torch.device | None, limit: timedelta
    ) -> Communicator:
        made = _FakeCommunicator(self, store, rank, world_size, limit)
        self._made.add(made)
        return made


@final
class _FakeCommunicator(Communicator):
    def __init__(self, library: FakeAccelerator, store: Store, rank: int, world_size: int, limit: timedelta) -> None:
        self._library = library
        self._store: Store | None = store
        self._rank = rank
        self._world_size = world_size
        self._limit = limit
        self._inner = ProcessGroupGloo(_HOUR, hostname="127.0.0.1")
        self._aborted = threading.Event()
        self._lock = threading.Lock()  # held while a result is written
        self._queue: queue.SimpleQueue[_Kernel | None] = queue.SimpleQueue()
        self._stream = threading.Thread(target=self._run_stream, name="fake-accelerator", daemon=True)
        self._group = _FakeGroup(self._launch, rank, world_size)

    @property
    def torch_group(self) -> dist.ProcessGroup:
        return self._group

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def connect(self) -> None:
        # this object and the group form a reference cycle, which must not keep a connection
        store, self._store = self._store, None
        assert store is not None
        if self._rank == 0:
            store.set(_PREFIX_KEY, secrets.token_hex(8))
        prefix = store.get(_PREFIX_KEY).decode()
        place: Any = store
        while hasattr(place, "underlying_store"):
            place = place.underlying_store
        address = format_store_addr(place.host, place.port, f"fake-accelerator/{prefix}")
        self._inner.configure(address, self._rank, self._world_size, timeout=self._limit)
        self._stream.start()

    def abort(self) -> None:
        self._aborted.set()
        self._queue.put(None)
        self._inner.shutdown()
        if self._stream.is_alive():
            self._stream.join()

    def looking(self) -> AbstractContextManager[object]:
        return nullcontext()

    def is_recording(self) -> bool:
        return self._library.records

    def lose_connections(self) -> None:
        self._inner.abort()

    def _launch(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        if self._aborted.is_set():
            raise RuntimeError("the communicator was aborted")
        # The stream works on copies, so that no result shows too early.
        copies: dict[int, torch.Tensor] = {}
        work: dist.Work | None
        try:
            work = forward(
                self._inner,
                collective,
                tuple(_copied(value, copies) for value in args),
                {name: _copied(value, copies) for name, value in kwargs.items()},
            )
        except OperationRefusedError:
            raise
        except ProcessGroupError:
            work = None  # the peers are gone: the operation is accepted and never ends
        outputs = collective.results(args, kwargs)
        kernel = _Kernel(work, [(output, copies[id(output)]) for output in outputs], self._aborted)
        self._queue.put(kernel)
        on_own_stream = all(getattr(value, "asyncOp", True) for value in (*args, *kwargs.values()))
        return _FakeWork(kernel, outputs) if on_own_stream else None  # type: ignore[return-value]  # like torch

    def _run_stream(self) -> None:
        while (kernel := self._queue.get()) is not None:
            error = self._run(kernel)
            hangs = isinstance(error, _PeersDisconnectedError) and not self._library.propagates
            if not self._library.wait_until_running(self._aborted):
                return
            if hangs:
                self._aborted.wait()
                return
            with self._lock:
                if self._aborted.is_set():
                    return
                kernel.end(error)

    def _run(self, kernel: _Kernel) -> RuntimeError | None:
        try:
            if kernel.work is not None:
                kernel.work.wait()
                return None
        except OperationRefusedError as refused:
            return refused
        except ProcessGroupError:
            pass
        return _PeersDisconnectedError("async error: remote process exited")


class _PeersDisconnectedError(RuntimeError):
    """The late error of a network library when the other end of a connection is gone."""


@final
class _Kernel:
    """One operation on the stream.

    Args:
        work: moves the data; None: nothing ever will.
        writes: the caller's tensors, and the copies with their new values.
        aborted: set when the communicator is aborted.
    """

    def __init__(
        self,
        work: dist.Work | None,
        writes: list[tuple[torch.Tensor, torch.Tensor]],
        aborted: threading.Event,
    ) -> None:
        self.work = work
        self._writes = writes
        self._aborted = aborted
        self._error: RuntimeError | None = None
        self._ended = threading.Event()
        self._pending = PendingWork(on_timeout=_never_waits, limit=_HOUR)

    def end(self, error: RuntimeError | None) -> None:
        self._error = error
        if error is None:
            for tensor, result in self._writes:
                tensor.copy_(result)
        self._ended.set()
        if error is None:
            self._pending.finish([tensor for tensor, _ in self._writes])
        elif isinstance(error, OperationRefusedError):
            self._pending.fail(error)

    def is_left(self) -> bool:
        """Return whether the device has finished the operation. An abort looks the same."""
        return self._ended.is_set() or self._aborted.is_set()

    def check(self) -> None:
        """Raise the error. As torch's NCCL does, first abort everything, unless only this call was refused."""
        if self._error is not None:
            if not isinstance(self._error, OperationRefusedError):
                self._aborted.set()
            raise self._error

    def future(self) -> _Future:
        return self._pending.get_future()


def _never_waits(timeout: timedelta) -> Exception:
    raise AssertionError("nobody waits for a kernel")


@final
class _FakeWork(dist.Work):
    def __init__(self, kernel: _Kernel, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._kernel = kernel
        self._outputs = outputs

    def is_completed(self) -> bool:
        return self._kernel.is_left()

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert self._kernel.is_left(), "torch's wait would hold up this thread"
        self._kernel.check()
        return True

    def block_current_stream(self) -> None:
        return None

    def get_future(self) -> _Future:
        """Return a future that is done when the tensors are written, because the fake has no real stream."""
        return self._kernel.future()

    def result(self) -> list[torch.Tensor]:
        return self._outputs


_Launch = Callable[[Collective, tuple[object, ...], Mapping[str, object]], dist.Work]


@final
@forward_collectives
class _FakeGroup(dist.ProcessGroup):
    def __init__(self, launch: _Launch, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]  # torch's stub declares only another form
        self._launch = launch

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        return self._launch(collective, args, kwargs)


def _copied(value: object, copies: dict[int, torch.Tensor]) -> object:
    if isinstance(value, torch.Tensor):
        return copies.setdefault(id(value), value.clone())
    if isinstance(value, (list, tuple)):
        return [_copied(item, copies) for item in value]
    return value


@final
class WaitsOnHost(WrappingProcessGroup):
    """A group of CPU tensors over a group that only orders streams. Its Works wait on the host.

    So `check_process_group`, which reads tensors right after a wait, can check a group over a device.

    Args:
        pg: the wrapped group.
        device: the device of its tensors, which are copied there and back. None: no copies.
    """

    def __init__(self, pg: ProcessGroup, *, device: torch.device | None = None) -> None:
        super().__init__(pg)
        self._device = device

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        outputs = collective.results(args, kwargs)
        if self._device is None:
            return _HostWork(forward(self.parent, collective, args, kwargs), outputs, [])
        moved: dict[int, torch.Tensor] = {}
        work = forward(
            self.parent,
            collective,
            tuple(_moved(value, self._device, moved) for value in args),
            {name: _moved(value, self._device, moved) for name, value in kwargs.items()},
        )
        return _HostWork(work, outputs, [(output, moved[id(output)]) for output in outputs])


def _moved(value: object, device: torch.device, moved: dict[int, torch.Tensor]) -> object:
    if isinstance(value, torch.Tensor):
        return moved.setdefault(id(value), value.to(device))
    if isinstance(value, (list, tuple)):
        return [_moved(item, device, moved) for item in value]
    return value


@final
class _HostWork(dist.Work):
    def __init__(
        self, work: dist.Work, outputs: list[torch.Tensor], writes: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        super().__init__()
        self._work = work
        self._outputs = outputs
        self._writes = writes
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait(timeout or _HOUR)
        with self._lock:
            for tensor, result in self._writes:
                tensor.copy_(result)
            self._writes = []
        return True

    def get_future(self) -> _Future:
        """Return a future whose callbacks see the written tensors. It runs after the library's own future."""
        return self._work.get_future().then(self._outcome)

    def _outcome(self, future: _Future) -> list[torch.Tensor]:
        future.value()
        self.wait()
        return self._outputs

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()
