"""Process groups under torchft's names, with both of its forms of rendezvous: `configure` (0.2) and handles (0.3).

A group here holds a group of tft_pg and translates: the order of `configure`, the names of the arguments, and the types
of the errors. A group that was shut down may be configured again, as torchft's may. It then gets a new inner group.

Law of this file: torchft's classes. No collective is implemented here, and nothing is decided.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Final, NoReturn

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

import tft_pg
from tft_pg import (
    Collective,
    ReconfigureOptions,
    WordExchange,
    context_timeout,
    create_store_client,
    extend_device_mesh,
    stream_timeout,
)
from tft_pg.handles import OwnHandle, exchange_handles, reconfigure_options
from tft_pg.word import LINGER
from torchft._errors import ArgumentError, asserted
from torchft._records import write_abort
from torchft._settings import SIXTY_SECONDS

__all__ = [
    "TORCHFT_TRIGGER_FR_ON_ABORT",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR",
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ManagedProcessGroup",
    "ProcessGroup",
    "ProcessGroupBaby",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
    "ProcessGroupXCCL",
    "ReconfigureOptions",
    "context_timeout",
    "create_store_client",
    "extend_device_mesh",
    "reconfigure_with_store",
    "stream_timeout",
    "trigger_nccl_fr_trace_through_pipe",
]

TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR: Final = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
TORCHFT_TRIGGER_FR_ON_ABORT: Final = "TORCHFT_TRIGGER_FR_ON_ABORT"
_DUMP_S: Final = 60

_BABIES: Final[Mapping[str, Callable[[timedelta], tft_pg.ProcessGroup]]] = {
    "Gloo": tft_pg.ProcessGroupBabyGloo,
    "NCCL": tft_pg.ProcessGroupBabyNCCL,
    "XCCL": tft_pg.ProcessGroupBabyXCCL,
}
# The names of the arguments in torchft, in order. Torch's own names differ, so a call goes on by position.
_OUT_IN: Final = ("output_tensors", "input_tensors", "opts")
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "allgather": ("output_tensors", "input_tensor", "opts"),
    "allgather_into_tensor_coalesced": _OUT_IN,
    "allreduce": ("tensors", "opts"),
    "allreduce_coalesced": ("tensors", "opts"),
    "alltoall_base": ("output_buffer", "input_buffer", "output_split_sizes", "input_split_sizes", "opts"),
    "barrier": ("opts",),
    "broadcast": ("tensor_list", "opts"),
    "recv": ("tensors", "src_rank", "tag"),
    "reduce_scatter": _OUT_IN,
    "reduce_scatter_tensor_coalesced": _OUT_IN,
    "send": ("tensors", "dst_rank", "tag"),
}


def by_position(
    collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return a call with its leading keywords in their places, and the keywords that are left."""
    rest = dict(kwargs)
    for name in _NAMES.get(collective.name, ())[len(args) :]:
        if name not in rest:
            break
        args = (*args, rest.pop(name))
    return (() if collective.name == "barrier" and args == (None,) else args), rest


def trigger_nccl_fr_trace_through_pipe(rank: int) -> bool:
    """Ask NCCL's flight recorder for a dump through its pipe, and wait a minute. Return whether it reads one."""
    prefix = os.environ.get(TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR, "")
    if not prefix:
        return False
    try:
        pipe = os.open(f"{prefix}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)  # without a reader, a pipe blocks otherwise
    except OSError:
        return False
    try:
        os.write(pipe, b"1\n")
    finally:
        os.close(pipe)
    time.sleep(_DUMP_S)
    return True


def reconfigure_with_store(
    pg: dist.ProcessGroup,
    store_addr: str,
    rank: int,
    world_size: int,
    timeout: timedelta = SIXTY_SECONDS,
) -> None:
    """Reconfigure a group whose ranks find each other in a store. Blocks until the group is built.

    Args:
        pg: a group with `configure` or `reconfigure`.
        store_addr: `host:port/prefix` of a running store. All ranks give the same address, with a fresh prefix for each
            call.
        rank, world_size: of this process.
        timeout: of the whole call.
    Raises: DistStoreError: a peer did not join. ValueError: an argument is wrong. RuntimeError: it was not built.
    """
    try:
        if isinstance(pg, ProcessGroup) and pg._is_by_handles():
            _reconfigure_by_store(pg, store_addr, rank, world_size, timeout)
        else:
            tft_pg.reconfigure_with_store(pg, store_addr, rank, world_size, timeout)
    except tft_pg.ConfigureError as error:
        if not error.missing_ranks:
            raise
        raise dist.DistStoreError(str(error)) from error


def _reconfigure_by_store(pg: ProcessGroup, store_addr: str, rank: int, world_size: int, timeout: timedelta) -> None:
    """Exchange the handles of a group that was written for handles alone, and reconfigure it."""
    store = create_store_client(store_addr, timeout)
    store.set_timeout(timeout)
    uuid, handles = exchange_handles(store, pg.get_reconfigure_handle(), rank, world_size)
    pg.reconfigure(reconfigure_options(uuid, handles, timeout=timeout)).wait()


def configure_any(group: Any, **arguments: Any) -> None:
    """Configure a group of any kind, by keyword, because kinds differ in the order of their arguments."""
    if callable(getattr(group, "configure", None)):
        group.configure(**arguments)
    else:
        timeout = arguments.get("timeout") or SIXTY_SECONDS
        reconfigure_with_store(group, arguments["store_addr"], arguments["rank"], arguments["world_size"], timeout)


class ProcessGroup(tft_pg.ProcessGroup):
    """The base of torchft's process groups. A subclass implements the collectives that it has.

    A subclass that was written for torchft 0.2 has `configure`, one for 0.3 has `reconfigure`. The other form follows.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        raise NotImplementedError("not implemented")

    def configure(  # type: ignore[override]  # torchft's order
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: Sequence[int] | None = None,
        *,
        timeout: timedelta | None = None,
    ) -> None:
        """Build the group again, and block until it is built.

        Args:
            store_addr: `host:port/prefix` of a running store, with a fresh prefix for each call.
            replica_id: the id of this replica, for messages.
            rank, world_size: of this process.
            quorum_id, group_rank, group_world_size, global_ranks: for messages and records.
            timeout: the limit for building the group. None: the group's own.
        Raises: RuntimeError: the group was not built. NotImplementedError: a subclass has neither `configure` nor
            `reconfigure`.
        """
        if not self._is_by_handles():
            raise NotImplementedError("not implemented")
        self.set_rank_info(replica_id, group_rank or 0, group_world_size or 1)
        _reconfigure_by_store(self, store_addr, rank, world_size, timeout or SIXTY_SECONDS)

    def _is_by_handles(self) -> bool:
        """Return whether the class has a `reconfigure` of its own, and no `configure`."""
        own = type(self)
        return own.reconfigure is not ProcessGroup.reconfigure and own.configure is ProcessGroup.configure

    def abort(self) -> None:
        """Do nothing. A subclass ends its running operations."""

    def shutdown(self) -> None:
        """Release the store of the handle. A subclass also ends its operations."""
        self._handle.close()
        self._handle = OwnHandle()  # the group may be configured again

    def errored(self) -> Exception | None:
        """Return None. A subclass returns why it needs a new `configure`."""
        return None

    def set_timeout(self, timeout: timedelta) -> None:
        raise NotImplementedError("not implemented")

    def size(self) -> int:
        raise NotImplementedError("not implemented")

    def rank(self) -> int:
        return 0

    def getBackendName(self) -> str:
        raise NotImplementedError("not implemented")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class ProcessGroupWrapper(ProcessGroup):
    """A group that forwards to another one: a given group, or one that `_create_pg` makes for each configuration.

    Args:
        timeout: of each operation, and of the rendezvous.
        pg: the wrapped group. None: `_create_pg` makes one.
    """

    def __init__(self, timeout: timedelta = SIXTY_SECONDS, pg: Any = None) -> None:
        super().__init__()
        self._timeout = timeout
        self._pg: Any = pg
        self._is_given = pg is not None
        self._dropped: Exception | None = None  # why a group of `_create_pg` was dropped
        self._replica_id = ""
        self._configured: tuple[int, int | None] = (0, None)  # rank and quorum id, for the record of an abort

    # --- hooks of subclasses ------------------------------------------------------------------------------------------

    def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        """Return a new group of torch for one configuration."""
        raise NotImplementedError("not implemented")

    def _wrap_work(self, work: dist.Work, opts: object) -> dist.Work:
        """Return the Work for the caller of a collective with these options."""
        return work

    def _opts_hook(self, opts: Any) -> Any:
        """Return the options for the wrapped group."""
        return opts

    def _run_context(self) -> AbstractContextManager[object]:
        """Return the context in which a collective starts."""
        return nullcontext()

    # --- forwarding ---------------------------------------------------------------------------------------------------

    @property
    def parent(self) -> Any:
        """Return the wrapped group. Raises: AssertionError: there is none, because the group is not configured."""
        if self._pg is None:
            raise ArgumentError("process group not initialized; configure it first")
        return self._pg

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        args, rest = by_position(collective, args, kwargs)
        names = _NAMES.get(collective.name, ())
        place = names.index("opts") if "opts" in names else -1
        opts = args[place] if 0 <= place < len(args) else rest.get("opts")
        if opts is not None:
            opts = self._opts_hook(opts)
            if "opts" in rest:
                rest["opts"] = opts
            else:
                args = (*args[:place], opts, *args[place + 1 :])
        with self._run_context():
            return self._wrap_work(tft_pg.forward(self.parent, collective, args, rest), opts)

    def configure(  # type: ignore[override]  # torchft's order
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: Sequence[int] | None = None,
        *,
        timeout: timedelta | None = None,
    ) -> None:
        self._replica_id, self._configured, self._dropped = replica_id, (rank, quorum_id), None
        if not self._is_given and self._creates():
            self._end(_shut_down)
            store = create_store_client(store_addr, timeout or self._timeout)
            self._pg = self._create_pg(store, rank, world_size)
            return
        if self._pg is None:
            self._pg = self._new_group()
        limit = {} if timeout is None else {"timeout": timeout}
        configure_any(
            self._pg,
            store_addr=store_addr,
            replica_id=replica_id,
            rank=rank,
            world_size=world_size,
            quorum_id=quorum_id,
            group_rank=group_rank or 0,
            group_world_size=group_world_size or 1,
            global_ranks=global_ranks,
            **limit,
        )

    def _creates(self) -> bool:
        """Return whether `_create_pg` makes the group, and not `_new_group`."""
        return True

    def _new_group(self) -> tft_pg.ProcessGroup:
        """Return a new group of tft_pg, which is configured again and again."""
        raise NotImplementedError("not implemented")

    def _end(self, how: Any) -> None:
        group = self._pg
        if not self._is_given:
            self._pg = None
        if group is not None:
            how(group)

    def abort(self, errored: bool = True) -> None:
        """End the running operations here and at the peers.

        Args:
            errored: `errored()` returns an error until the next `configure`. False: the group is as new.
        """
        rank, quorum_id = self._configured
        write_abort(self._replica_id, rank, quorum_id)
        is_made_anew = self._creates() and not self._is_given
        if is_made_anew or not errored:
            self._dropped = tft_pg.AbortedError("aborted; configure the group again") if errored else None
            self._end(_abort_or_shut_down)
        elif self._pg is not None:
            self._pg.abort()

    def shutdown(self) -> None:
        self._end(_shut_down)
        super().shutdown()

    def errored(self) -> Exception | None:
        error = self._pg.errored() if callable(getattr(self._pg, "errored", None)) else self._dropped
        return tft_pg.AbortedError(f"aborted: {error}") if isinstance(error, tft_pg.AbortedError) else error

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if callable(getattr(self._pg, "set_timeout", None)):
            with suppress(NotImplementedError):  # a group of torchft's users need not have it
                self._pg.set_timeout(timeout)

    def size(self) -> int:
        return int(self.parent.size())

    def rank(self) -> int:
        return int(self.parent.rank())

    def getBackendName(self) -> str:
        return str(self.parent.getBackendName())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pg={self._pg!r})"


def _shut_down(group: Any) -> None:
    if callable(getattr(group, "shutdown", None)):
        group.shutdown()


def _abort_or_shut_down(group: Any) -> None:
    if callable(getattr(group, "abort", None)):
        group.abort()
    _shut_down(group)


class _OwnGroup(ProcessGroupWrapper):
    """A group over one group of tft_pg, whose exchange of words it forwards."""

    def _creates(self) -> bool:
        return type(self)._create_pg is not ProcessGroupWrapper._create_pg

    def exchange_word(self, words: Sequence[int], *, round_number: int, timeout: timedelta) -> WordExchange:
        if self._creates():
            return super().exchange_word(words, round_number=round_number, timeout=timeout)
        exchange: WordExchange = self.parent.exchange_word(words, round_number=round_number, timeout=timeout)
        return exchange

    def linger(self, timeout: timedelta = LINGER) -> bool:
        if self._creates() or self._pg is None:
            return super().linger(timeout) if self._pg is not None else True
        return bool(self._pg.linger(timeout))


class ProcessGroupGloo(_OwnGroup):
    """A group over Gloo, for tensors on the CPU.

    Args:
        timeout: of each operation, and of the rendezvous.
        pg: None. A given group is forwarded to instead.
    """

    _is_isolated = False

    def isolate(self) -> None:
        """Run the library in a child process, from the next configuration on. The peers may run it in their own."""
        self._is_isolated = True

    def _new_group(self) -> tft_pg.ProcessGroup:
        group = tft_pg.ProcessGroupGloo(self._timeout)
        if not self._is_isolated:
            return group
        try:
            return tft_pg.ProcessGroupBabyGloo.like(group)
        finally:
            group.shutdown()

    def getBackendName(self) -> str:
        return "torchft-gloo"


class ProcessGroupNCCL(_OwnGroup):
    """A group over NCCL, for tensors on CUDA devices.

    Args:
        timeout: of each operation, and of the rendezvous.
    """

    def __init__(self, timeout: timedelta = SIXTY_SECONDS) -> None:
        super().__init__(timeout)

    def _new_group(self) -> tft_pg.ProcessGroup:
        return tft_pg.ProcessGroupNCCL(self._timeout)

    def abort(self, errored: bool = True) -> None:
        if os.environ.get(TORCHFT_TRIGGER_FR_ON_ABORT) == "true":
            trigger_nccl_fr_trace_through_pipe(self._configured[0])
        super().abort(errored)

    def getBackendName(self) -> str:
        return "torchft-nccl"


class ProcessGroupXCCL(_OwnGroup):
    """A group over XCCL, for tensors on XPU devices.

    Args:
        timeout: of each operation, and of the rendezvous.
    """

    def __init__(self, timeout: timedelta = SIXTY_SECONDS) -> None:
        super().__init__(timeout)

    def _new_group(self) -> tft_pg.ProcessGroup:
        return tft_pg.ProcessGroupXCCL(self._timeout)

    def getBackendName(self) -> str:
        return "torchft-xccl"


class ProcessGroupBaby(_OwnGroup):
    """A group whose communication library runs in a child process. Abstract: a subclass names the library.

    Args:
        timeout: of each operation, and of the rendezvous, in seconds or as a timedelta.
    """

    _kind = ""

    def __init__(self, timeout: float | timedelta = 60.0) -> None:
        super().__init__(timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout))
        self._works: weakref.WeakSet[dist.Work] = weakref.WeakSet()
        self._is_closed = False

    def _new_group(self) -> tft_pg.ProcessGroup:
        if not self._kind:
            raise NotImplementedError("not implemented")
        group = _BABIES[self._kind](self._timeout)
        self._is_closed = False
        return group

    @property
    def parent(self) -> Any:
        """Return the wrapped group. Raises: OSError: after `shutdown`. AssertionError: before `configure`."""
        if self._is_closed:
            raise OSError("handle is closed")
        return super().parent

    def _wrap_work(self, work: dist.Work, opts: object) -> dist.Work:
        self._works.add(work)
        return work

    def num_active_work(self) -> int:
        """Return the number of operations that have not ended and whose Work is held."""
        return sum(not work.is_completed() for work in self._works)

    def shutdown(self) -> None:
        super().shutdown()
        self._is_closed = True

    def getBackendName(self) -> str:
        return f"torchft-baby-{self._kind.lower()}"


class ProcessGroupBabyGloo(ProcessGroupBaby):
    """A group over Gloo in a child process. See `ProcessGroupBaby`."""

    _kind = "Gloo"


class ProcessGroupBabyNCCL(ProcessGroupBaby):
    """A group over NCCL in a child process. See `ProcessGroupBaby`."""

    _kind = "NCCL"


class ProcessGroupBabyXCCL(ProcessGroupBaby):
    """A group over XCCL in a child process. See `ProcessGroupBaby`."""

    _kind = "XCCL"


class ProcessGroupDummy(_OwnGroup):
    """A group of one without a backend, in which every collective succeeds and copies.

    Args:
        rank, world: 0 and 1.
    Raises: AssertionError: another rank or size.
    """

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        with asserted(tft_pg.ConfigError):
            self._pg: tft_pg.ProcessGroupDummy = tft_pg.ProcessGroupDummy(rank, world)

    def configure(self, *args: Any, **kwargs: Any) -> None:
        with asserted(tft_pg.ConfigError):
            super().configure(*args, **kwargs)

    def _end(self, how: Any) -> None:
        return  # there is nothing to end, and the group stays usable

    @property
    def wait_count(self) -> int:
        """Return the number of waits for a Work of this group."""
        return self._pg.wait_count

    @property
    def get_future_count(self) -> int:
        """Return the number of futures that were asked for."""
        return self._pg.get_future_count

    @property
    def configure_count(self) -> int:
        """Return the number of configurations."""
        return self._pg.configure_count

    @property
    def reconfigure_count(self) -> int:
        """Return the number of configurations, under the name of torchft 0.3."""
        return self._pg.configure_count

    def getBackendName(self) -> str:
        return "torchft-dummy"


class _OurWrapper(ProcessGroupWrapper):
    """A group over a wrapper of tft_pg, around the user's group.

    Args:
        wrapper: of tft_pg.
    """

    def __init__(self, wrapper: tft_pg.WrappingProcessGroup) -> None:
        super().__init__(pg=wrapper)

    @property
    def parent(self) -> Any:
        """Return the wrapped group."""
        return self._pg.parent

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        args, rest = by_position(collective, args, kwargs)
        return tft_pg.forward(self._pg, collective, args, rest)

    def exchange_word(self, words: Sequence[int], *, round_number: int, timeout: timedelta) -> WordExchange:
        exchange: WordExchange = self._pg.exchange_word(words, round_number=round_number, timeout=timeout)
        return exchange

    def linger(self, timeout: timedelta = LINGER) -> bool:
        return bool(self._pg.linger(timeout))


class ErrorSwallowingProcessGroupWrapper(_OurWrapper):
    """A group whose collectives turn into finished dummies after an error, until the next `configure`.

    Args:
        pg: the wrapped group.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(tft_pg.ErrorSwallowingProcessGroupWrapper(pg))

    def report_error(self, e: Exception) -> None:
        """Treat the group as failed from now on."""
        self._pg.report_error(e)

    def error(self) -> Exception | None:
        """Return the first error since the last `configure`, or None."""
        error: Exception | None = self._pg.error()
        return error


class FakeProcessGroupWrapper(_OurWrapper):
    """A group that fails on demand, for tests.

    Args:
        pg: the wrapped group.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(tft_pg.FakeProcessGroupWrapper(pg))

    def report_future_error(self, e: Exception) -> None:
        """Fail the next allreduce with this error."""
        self._pg.report_future_error(e)


class ManagedProcessGroup(ProcessGroupWrapper):
    """A group whose allreduce is a Manager's, and whose size is the number of participants.

    Collectives that move weights run alone, because each replica group holds all weights. Others are refused.

    Args:
        manager: a Manager, or an object with its `allreduce` and `num_participants`.
    """

    def __init__(self, manager: Any) -> None:
        super().__init__(pg=tft_pg.ManagedProcessGroup(manager))
        self._manager = manager

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        with asserted(tft_pg.ConfigError):
            return super()._run(collective, args, kwargs)

    @property
    def supports_reconfigure(self) -> bool:
        """Return False, because the Manager configures its own group."""
        return False

    def exchange_word(self, words: Sequence[int], *, round_number: int, timeout: timedelta) -> NoReturn:
        raise tft_pg.UnsupportedOperationError("a managed group exchanges no words, because its Manager does that")

    def getBackendName(self) -> str:
        """Return the name of the backend of the Manager's own group, if it has one."""
        name = getattr(getattr(self._manager, "_pg", None), "getBackendName", lambda: None)()
        return name if isinstance(name, str) else "torchft-managed"

    def __repr__(self) -> str:
        return f"ManagedProcessGroup(manager={self._manager!r})"
