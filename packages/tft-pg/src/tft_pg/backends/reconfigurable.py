"""A process group over a torch group that can reconfigure itself, as torch 2.14 and later make them.

Such a group is made once, with `enable_reconfigure=True`, and keeps its object. Each rank has a handle, and
`reconfigure` takes the handles of all ranks in order, and a uuid that was never used. This file adds what a training
job needs and torch's group lacks:

- The handles are exchanged in the store of each `configure`, so they are never those of an earlier membership. Rank 0
  chooses the uuid at random, so no uuid is used twice.
- Torch's Gloo has no abort, and reports no error after one. This file latches the errors, and ends what runs. A receive
  whose own timeout expires makes Gloo close all connections of its group, so this file starts one with a timeout of a
  millisecond.
- The ranks hold plain connections to each other, as for a device library (see `lifeline`). So a rank notices at once
  when another rank aborts or dies, whatever the torch group notices, and a word has its own way.

Torch's group keeps its threads over all configurations, two unless its options say otherwise. Gloo forgets an
operation when a peer dies in the middle of its message. Such an operation keeps its thread until its own timeout. While
all threads are kept, a `configure` fails and says so. Gloo's barrier would wait for such an operation too, so a barrier
runs as an allreduce. `ProcessGroupGloo` has no such limits, because each of its groups has new threads.

Law of this file: one torch group, adapted; the life cycle is in `native`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from tft_pg.backends.attempt import Attempt
from tft_pg.backends.by_allreduce import start_barrier
from tft_pg.backends.device_library import AcceleratorBackend, Communicator, Connecting
from tft_pg.backends.gloo import all_threads, classify, is_reducing, start_collective
from tft_pg.backends.lifeline import Lifeline
from tft_pg.backends.live import LiveGroup, keep_at_exit
from tft_pg.backends.native import NativeProcessGroup
from tft_pg.backends.patience import Phase
from tft_pg.backends.peers import connect_peers, own_address
from tft_pg.backends.transfers import Transfers
from tft_pg.backends.word_line import WordLine
from tft_pg.base import ProcessGroup
from tft_pg.errors import (
    CollectiveTimeoutError,
    CommunicatorFailedError,
    ConfigError,
    ConfigureError,
    OperationRefusedError,
    PeerDisconnectedError,
    UnsupportedOperationError,
    Where,
)
from tft_pg.forwarding import forward
from tft_pg.handles import exchange_handles, reconfigure_options, supports_reconfigure
from tft_pg.ops import Collective
from tft_pg.settings import check_listening
from tft_pg.threads import join_within
from tft_pg.word import LINGER

__all__ = ["ReconfigurableProcessGroup"]

_CPU: Final = torch.device("cpu")
_INTERFACES_ENV: Final = "GLOO_SOCKET_IFNAME"
# No program uses these tags. Each names one of Gloo's contexts, of which there is one for each interface.
_LAST_TAG: Final = (1 << 31) - 1
_AT_ONCE: Final = timedelta(milliseconds=1)
_POINT_TO_POINT: Final = frozenset({"send", "recv", "recv_anysource"})
# A finished peer may disconnect at once. An operation whose data is here already may still finish within this time.
_GRACE_S: Final = 0.05
_WORDS_S: Final = LINGER.total_seconds()
_LOOK_S: Final = 0.002
# This long after the connections were closed, an operation has failed, or Gloo has forgotten it.
_FORGET_AFTER_S: Final = 0.05
# A Gloo thread that still computes, of this or another group, is waited for until then.
_COMPUTES_S: Final = 1.0

_Fault = (
    type[PeerDisconnectedError]
    | type[CollectiveTimeoutError]
    | type[CommunicatorFailedError]
    | type[OperationRefusedError]
)


@final
class ReconfigurableProcessGroup(NativeProcessGroup):
    """A process group over a torch group made with `enable_reconfigure=True`, for tensors on the CPU.

    A Manager that is given such a torch group wraps it in this class. The torch group is used by this object alone from
    then on, and is shut down with it.

    The torch groups of all ranks share one store, which must outlive each of them, and each has another rank in it when
    it is made. Torch's Gloo requires that.

    Args:
        group: the torch group.
        timeout: of each operation, and of `configure` unless it is given another.
        hostname: name or address of this machine for the other ranks; None: this machine's address on the route to the
            store of a `configure`.

    Raises: ConfigError: the group can't reconfigure. UnsupportedOperationError: its tensors are not on the CPU.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: timedelta = timedelta(seconds=60),
        *,
        hostname: str | None = None,
    ) -> None:
        check_listening(hostname=hostname)
        super().__init__(timeout)
        if isinstance(group, ProcessGroup) or not supports_reconfigure(group):
            raise ConfigError(
                f"{group!r} is not a torch group that can reconfigure; make it with enable_reconfigure=True "
                "(torch 2.14 and later), or use ProcessGroupGloo or ProcessGroupNCCL"
            )
        # Torch's Gloo is also entered for other devices, whose tensors it copies.
        devices = sorted({device.type for device in group._device_types})
        if devices and _CPU.type not in devices:
            raise UnsupportedOperationError(
                f"ReconfigurableProcessGroup reduces tensors on the CPU, and {group!r} is for {', '.join(devices)}; "
                "use ProcessGroupNCCL or ProcessGroupXCCL"
            )
        self._group: dist.ProcessGroup | None = group
        self._hostname = hostname
        self._connecting = threading.Lock()
        self._before: _Generation | None = None
        self._unfinished: list[dist.Work] = []  # operations of earlier configurations

    def getBackendName(self) -> str:
        return "tft-reconfigurable"

    def _build(self, store: Store, attempt: Attempt, timeout: timedelta) -> LiveGroup:
        group, client, where = self._group, self._store_client, attempt.where
        assert group is not None
        assert client is not None
        assert where.world_size is not None
        self._wait_for_operations(group, attempt)
        address = own_address(self._hostname, client.host, client.port, where.world_size)
        lifeline = Lifeline(where.rank or 0, where.world_size, address, where.replica_id)
        try:
            connect_peers(store, attempt, lifeline, silent=client.silent)
            # All ranks are here and can reach each other, so this takes milliseconds.
            attempt.enter(Phase.CONNECTIONS)
            store.set_timeout(attempt.remaining())
            limit = attempt.remaining()
            Connecting(_Reconfigures(group, self._connecting, limit), store, None, attempt).result(attempt, lifeline)
        except BaseException:
            lifeline.end()
            raise
        group.set_timeout(timeout)
        generation = self._before = _Generation(group, lifeline, where, timeout)
        live = LiveGroup(
            group,
            set_timeout=generation.set_timeout,
            sever=generation.end,
            settle=generation.settle,
            is_over=generation.is_over,
            reports_end=generation.reports_end,
            classify=generation.classify,
            where=where,
            start=generation.start,
            words=WordLine(lifeline, where),
        )
        keep_at_exit(live)
        generation.watch(live)
        return live

    def _wait_for_operations(self, group: dist.ProcessGroup, attempt: Attempt) -> None:
        """Wait until the operations of earlier configurations leave the torch group usable.

        Gloo's connections are closed, so its operations write into no tensor any more, and only need their threads. Of
        another backend, only the end of an operation shows that it writes no more.

        Raises: ConfigureError: they do not within a second.
        """
        before, self._before = self._before, None
        if before is not None:
            self._unfinished += before.unfinished()
        allowed = _num_threads(group) - 1
        give_up_s = time.monotonic() + _COMPUTES_S
        while True:
            self._unfinished = [work for work in self._unfinished if not work.is_completed()]
            if len(self._unfinished) <= allowed:
                return
            attempt.check()
            if time.monotonic() > give_up_s:
                break
            time.sleep(_LOOK_S)
        raise ConfigureError(
            f"configure failed ({attempt.where}): {len(self._unfinished)} operations of earlier configurations have "
            "not ended, so the torch group can't be used; they end at their own timeout, so configure again, set a "
            "shorter timeout, or use ProcessGroupGloo",
            where=attempt.where,
            is_own=True,
        )

    def _discard(self) -> None:
        return None

    def shutdown(self) -> None:
        super().shutdown()
        group, self._group, self._before = self._group, None, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # a backend without a shutdown, or one that was aborted
                group.shutdown()


@final
class _Reconfigures(AcceleratorBackend, Communicator):
    """One `reconfigure` of a torch group, which can't be interrupted and so runs on its own thread.

    Args:
        group: the torch group.
        lock: held while the group reconfigures. An earlier attempt may still do that.
        limit: of the exchange of handles and of the `reconfigure`.
    """

    def __init__(self, group: dist.ProcessGroup, lock: threading.Lock, limit: timedelta) -> None:
        self._group = group
        self._lock = lock
        self._limit = limit
        self._store: Store | None = None
        self._place = (0, 1)

    def check(self) -> None:
        return None

    def current_device(self) -> torch.device | None:
        return None

    def communicator(
        self, store: Store, rank: int, world_size: int, device: torch.device | None, limit: timedelta
    ) -> Communicator:
        self._store, self._place = store, (rank, world_size)
        return self

    @property
    def torch_group(self) -> dist.ProcessGroup:
        return self._group

    @property
    def device(self) -> torch.device:
        return _CPU

    def connect(self) -> None:
        """Exchange the handles, and reconfigure the group. Raises: ConfigureError; RuntimeError: torch's."""
        end_s = time.monotonic() + self._limit.total_seconds()
        if not self._lock.acquire(timeout=self._limit.total_seconds()):
            raise ConfigureError(
                "the torch group still runs the reconfigure of an earlier attempt, which ends at its own timeout; this "
                f"attempt has waited for {self._limit.total_seconds():g} s; configure again",
                is_own=True,
            )
        try:
            assert self._store is not None
            group: Any = self._group  # the methods are new in torch 2.14
            uuid, handles = exchange_handles(self._store, group.get_reconfigure_handle(), *self._place)
            left = timedelta(seconds=max(end_s - time.monotonic(), 0.001))
            group.reconfigure(reconfigure_options(uuid, handles, timeout=left)).wait()
            found = (self._group.rank(), self._group.size())
            if found != self._place:
                raise ConfigureError(
                    f"the torch group is rank {found[0]} of {found[1]} after a reconfigure to rank {self._place[0]} of "
                    f"{self._place[1]}; its reconfigure ignores the order of the handles, so use another group",
                    is_own=True,
                )
        finally:
            self._store = None
            self._lock.release()

    def looking(self) -> AbstractContextManager[object]:
        return nullcontext()

    def is_recording(self) -> bool:
        return False

    def abort(self) -> None:
        """Do nothing: a `reconfigure` ends at its own timeout, and the next one waits for that."""


@final
class _Generation:
    """The torch group from one `reconfigure` to the next.

    Args:
        group: the torch group.
        lifeline: the connections between the ranks.
        where: this rank's place.
        timeout: of the operations.
    """

    def __init__(self, group: dist.ProcessGroup, lifeline: Lifeline, where: Where, timeout: timedelta) -> None:
        self._group = group
        self._lifeline = lifeline
        self._where = where
        self._is_gloo = _is_gloo(group)
        self._transfers = Transfers(timeout)
        self._start: Callable[..., dist.Work] = (
            partial(start_collective, where, self._transfers) if self._is_gloo else forward
        )
        self._running: deque[dist.Work] = deque()
        self._lock = threading.Lock()
        self._ended_s: float | None = None
        self._closed = threading.Event()  # nothing passes over the torch group's connections any more
        self._thread: threading.Thread | None = None
        self._live: Callable[[], LiveGroup | None] = lambda: None

    def watch(self, live: LiveGroup) -> None:
        """Start to watch the other ranks. The end of one ends this rank's operations too."""
        self._live = weakref.ref(live)
        # Weak, so that the watch does not keep an unreferenced group alive.
        on_disconnected = weakref.WeakMethod(self._on_disconnected)
        self._lifeline.watch(lambda rank: (on_disconnected() or _nothing)(rank))

    # --- operations ---------------------------------------------------------------------------------------------------

    def reports_end(self, collective: Collective) -> bool:
        """Return whether the wait for this collective may be interrupted and repeated. Unknown backends may not allow
        that."""
        return self._is_gloo and collective.name not in _POINT_TO_POINT

    def start(
        self,
        torch_group: dist.ProcessGroup,
        collective: Collective,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> dist.Work:
        """Start a collective. Raises: RuntimeError: the group has lost a rank; torch's errors."""
        if self._ended_s is not None:
            raise RuntimeError("Connection closed by a rank that has left the group")
        if self._is_gloo and collective.name == "barrier":
            with self._lock:
                self._forget_ended()
                before = list(self._running)
            work = start_barrier(torch_group, before, collective, args, kwargs)
        else:
            work = self._start(torch_group, collective, args, kwargs)
        if collective.name not in _POINT_TO_POINT:
            with self._lock:
                self._forget_ended()
                self._running.append(work)
        return work

    def _forget_ended(self) -> None:
        while self._running and self._running[0].is_completed():
            self._running.popleft()

    @property
    def _is_running(self) -> bool:
        with self._lock:
            self._forget_ended()
            return bool(self._running)

    def classify(self, error: Exception) -> _Fault:
        """Return the kind of an operation's error."""
        if self._ended_s is not None:
            return PeerDisconnectedError  # whatever torch says, the connections were closed here
        fault = classify(error)
        if fault is OperationRefusedError and not self._is_gloo:
            return CommunicatorFailedError  # an unknown backend may not work any more
        return fault

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)
        self._transfers.set_timeout(timeout)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _on_disconnected(self, rank: int) -> None:
        """End the operations, because a rank has disconnected. Runs on the lifeline's thread."""
        began_s = time.monotonic()
        while self._ended_s is None:
            # A word that needs that rank fails by itself. Another one gets the time to finish, because a rank may leave
            # after its own word.
            grace_s = _GRACE_S if self._is_running else _WORDS_S if self._lifeline.is_exchanging else 0.0
            if time.monotonic() >= began_s + grace_s:
                break
            time.sleep(_LOOK_S)
        self.end(f"rank {rank} disconnected from the group")

    def end(self, because: str = "") -> None:
        """End everything that runs, and return at once. The first call counts."""
        with self._lock:
            if self._ended_s is not None:
                return
            self._ended_s = time.monotonic()
            self._thread = threading.Thread(target=self._close, name="tft-pg-close", daemon=True)
        self._lifeline.end(because)
        self._thread.start()

    def _close(self) -> None:
        """Close the torch group's connections, on a thread of its own because that may block."""
        try:
            if self._is_gloo:
                self._close_gloo()
            else:
                self._group.abort()
        # The thread has no caller to raise to. The next configure fails if something still runs.
        except Exception as error:
            threading.excepthook(
                threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
            )
        finally:
            self._closed.set()
            self._transfers.end()
            live = self._live()
            if live is not None:
                live.give_up()

    def _close_gloo(self) -> None:
        rank, world_size = self._where.rank or 0, self._where.world_size or 1
        if world_size == 1:
            return
        for context in range(os.environ.get(_INTERFACES_ENV, "").count(",") + 1):
            with contextlib.suppress(RuntimeError):  # the timeout, which is the purpose; or the connections are gone
                never: Any = self._group.recv([torch.empty(1)], (rank + 1) % world_size, _LAST_TAG - context)
                never.wait(_AT_ONCE)

    def is_over(self) -> bool:
        """Return whether unfinished operations can never finish, nor write into a tensor."""
        if self._ended_s is None or not self._closed.is_set():
            return False
        passed_s = time.monotonic() - self._ended_s
        return passed_s > _COMPUTES_S or (passed_s > _FORGET_AFTER_S and not is_reducing(all_threads()))

    def settle(self) -> None:
        self._lifeline.settle()
        if self._thread is not None:
            join_within(self._thread)

    def unfinished(self) -> list[dist.Work]:
        """Return the operations that have not ended, after `end`."""
        with self._lock:
            return [work for work in self._running if not work.is_completed()]


def _nothing(rank: int) -> None:
    return None


def _num_threads(group: dist.ProcessGroup) -> int:
    """Return how many operations of Gloo run at the same time; 1 for another backend."""
    if not _is_gloo(group):
        return 1
    options: Any = group._get_backend(_CPU).options
    return int(options._threads)


def _is_gloo(group: dist.ProcessGroup) -> bool:
    with contextlib.suppress(RuntimeError):  # the group has no backend of its own for the CPU
        return isinstance(group._get_backend(_CPU), dist.ProcessGroupGloo)
    return False
