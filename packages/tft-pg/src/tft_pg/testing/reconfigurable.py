"""Torch groups that reconfigure, to test what is over them: torch's own, and a stand-in for older releases of torch.

The stand-in has the methods and the weaknesses of torch's Gloo with `enable_reconfigure=True`. Its abort ends nothing.
A handle changes with each `reconfigure`. A uuid is used once. A failed `reconfigure` leaves the rank as it was.

Law of this file: torch's side only. The adapter around it is the real one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from tft_pg.forks import never_destroy
from tft_pg.forwarding import forward, forward_collectives
from tft_pg.handles import ReconfigureOptions
from tft_pg.ops import Collective
from tft_pg.work import DummyWork

__all__ = ["ReconfigurableGloo", "reconfigurable_gloo"]

_Gloo: Any = dist.ProcessGroupGloo
_CPU: Final = torch.device("cpu")
_HOST: Final = "127.0.0.1"
_TIMEOUT: Final = timedelta(seconds=60)
_POINT_TO_POINT: Final = frozenset({"send", "recv", "recv_anysource"})


def reconfigurable_gloo(
    store_port: int, *, stand_in: bool = not hasattr(dist.ProcessGroup, "reconfigure"), threads: int = 2
) -> Any:
    """Return a torch group over Gloo that can reconfigure and has not done so yet.

    Args:
        store_port: of a TCPStore on loopback, which all groups share. Each group gets a rank of its own there.
        stand_in: return the stand-in; False: torch's own group, from torch 2.14 on.
        threads: that run operations. Torch's own default is 2.
    """
    store = TCPStore(_HOST, store_port, is_master=False, wait_for_workers=False)
    rank = store.add("reconfigurable-gloo/ranks", 1) - 1
    if stand_in:
        return ReconfigurableGloo(store, rank, rank + 1, threads=threads)
    options = _options(_TIMEOUT, threads)
    options.enable_reconfigure = True
    return _torch_group(store, rank, rank + 1, options)


def _options(timeout: timedelta, threads: int) -> Any:
    options = _Gloo._Options()
    options._devices = [_Gloo.create_device(hostname=_HOST, lazy_init=False)]
    options._timeout, options._threads = timeout, threads
    return options


def _torch_group(store: Any, rank: int, size: int, options: Any) -> dist.ProcessGroup:
    backend = _Gloo(store, rank, size, options)
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


@final
@forward_collectives
class ReconfigurableGloo(dist.ProcessGroup):
    """A stand-in for torch's Gloo with `enable_reconfigure=True`.

    Args:
        store: a store that all ranks share.
        rank: of this process, different from all others' in that store.
        size: number of ranks, of which no use is made.
        threads: that run operations.
    """

    supports_reconfigure = True

    def __init__(self, store: TCPStore, rank: int, size: int, *, threads: int = 2) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub declares only another form
        self._store: TCPStore | None = store
        self._first_rank = rank
        self._threads = threads
        self._place = (rank, size)
        self._uuid = -1
        self._timeout = _TIMEOUT
        self._inner: dist.ProcessGroup | None = None
        self._running: deque[dist.Work] = deque()

    def get_reconfigure_handle(self) -> str:
        """Return this rank's handle, which the next `reconfigure` changes."""
        assert self._store is not None
        return f"gloo:{self._place[0]}:{self._uuid}:{self._first_rank}:{self._store.host}:{self._store.port}"

    def reconfigure(self, opts: ReconfigureOptions) -> dist.Work:
        """Build the connections anew. Raises: RuntimeError."""
        assert self._store is not None
        handles, own = list(opts.handles), self.get_reconfigure_handle()
        if own not in handles or len(set(handles)) < len(handles):
            raise RuntimeError("Local Gloo reconfigure handle is not part of the new communicator")
        place = handles.index(own), len(handles)
        store = PrefixStore(f"reconfigure/{opts.uuid}", self._store)
        if place[0] == 0 and store.compare_set("claimed", "", own).decode() != own:
            raise RuntimeError(f"Gloo reconfigure uuid {opts.uuid} was already used")
        inner = _torch_group(store, *place, _options(opts.timeout or self._timeout, self._threads))
        inner.set_timeout(self._timeout)
        self._retire()
        self._inner, self._place, self._uuid = inner, place, opts.uuid
        return DummyWork([])

    def _retire(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None and not all(work.is_completed() for work in self._running):
            never_destroy(inner)  # its destructor would wait for the operations, as torch's threads do
        self._running.clear()

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        if self._inner is None:
            raise RuntimeError("Collectives are not permitted before reconfigure")
        work = forward(self._inner, collective, args, kwargs)
        if collective.name not in _POINT_TO_POINT:
            while self._running and self._running[0].is_completed():
                self._running.popleft()
            self._running.append(work)
        return work

    def _get_backend(self, device: torch.device) -> Any:
        if self._inner is None:
            raise RuntimeError("no backend before reconfigure")
        return self._inner._get_backend(device)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda"), _CPU]  # as torch enters Gloo

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._inner is not None:
            self._inner.set_timeout(timeout)

    def rank(self) -> int:
        return self._place[0]

    def size(self) -> int:
        return self._place[1]

    def abort(self) -> None:
        """Do nothing, as torch's Gloo."""

    def shutdown(self) -> None:
        self._retire()
        self._store = None
