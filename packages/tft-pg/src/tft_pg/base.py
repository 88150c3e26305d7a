"""The interface and the contract of every process group in this package.

A training job outlives its members, so its process group must too. The same object is configured again for every
quorum, with another rank and another size. Another thread can abort an operation that can't finish.

Law of this file: the interface and its contract; no backend, no threads.

The contract, which `tft_pg.testing.check_process_group` checks:

- `configure` blocks until the group is built, or raises and leaves no group. The caller may call it at any time, each
  time with an unused store prefix. It ends every operation of the previous configuration.
- Any thread may call `abort` at any time, also before and during `configure`. Running operations raise `AbortedError`
  on this rank and fail on the peers. `errored()` returns an error until the next `configure`.
- A collective raises `NotConfiguredError` before `configure`, `AbortedError` after `abort` and
`ProcessGroupClosedError` after `shutdown`.
- A Work has failed when its `wait` has raised or its future holds an error. A failed operation writes into no tensor.
  No operation writes into a tensor after the next `configure` or `shutdown` has returned.
- The exception is a `wait(timeout)` whose own timeout expires. The operation keeps running: it may still write, and may
  still succeed. `errored()` stays `CollectiveTimeoutError` nevertheless, because the ranks may disagree about the
  result. The group must be configured again.
- `shutdown` is permanent, may be repeated, and leaves no thread and no descriptor.
- `exchange_word` gives the same sum to every rank whose exchange succeeds. The sum never contains a word of another
  round, of another configuration, or of a disconnected rank.
- `reconfigure` is a `configure` whose store and rank follow from the handles of all ranks, see `handles`.
- `register` adds the group to torch's tables under a name, and `unregister` removes the group. Neither changes the
  state of the group.
"""

from __future__ import annotations

import abc
import re
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName

from tft_pg import registry
from tft_pg.errors import ConfigError
from tft_pg.forwarding import forward_collectives
from tft_pg.handles import OwnHandle, ReconfiguresByHandles
from tft_pg.ops import Collective
from tft_pg.word import LINGER, WordExchange, exchange_word_by_allreduce

__all__ = ["ProcessGroup", "check_name"]


def check_name(name: object) -> None:
    """Check that a group can be registered under this name. Raises: ConfigError: the name is invalid."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ConfigError(f"the group name {name!r} is invalid; use letters, digits, '_', '-' and '.'")


class _Abstract(abc.ABCMeta, type(dist.ProcessGroup)):  # type: ignore[misc]
    """A metaclass that is also the metaclass of torch's process groups."""


@forward_collectives
class ProcessGroup(ReconfiguresByHandles, dist.ProcessGroup, metaclass=_Abstract):
    """A `torch.distributed.ProcessGroup` that can be reconfigured, and aborted from another thread.

    Every collective of `torch.distributed.ProcessGroup` is a method, in each of torch's call forms: `allreduce(tensors,
    opts | op)` and `(tensor, op)`, `allgather(list of lists, opts)` and `(list, tensor)`, `broadcast(tensors, opts)`
    and `(tensor, root)`. The functions of `torch.distributed` accept such a group as `group=`.
    """

    def __init__(self) -> None:
        missing = sorted(type(self).__abstractmethods__)
        if missing:  # torch's metaclass creates objects without this check
            raise TypeError(f"{type(self).__name__} is abstract; implement {', '.join(missing)}")
        dist.ProcessGroup.__init__(self, 0, 1)  # type: ignore[call-arg]  # torch's stub declares only another form
        self._handle = OwnHandle()
        self._registered_as: str | None = None
        self._group_name: GroupName | None = None

    @abc.abstractmethod
    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        """Start a collective. Every collective method calls this method, from any thread.

        Args:
            collective: the collective.
            args: positional arguments as the caller gave them.
            kwargs: keyword arguments as the caller gave them.

        Returns: the Work of the collective.
        """

    @abc.abstractmethod
    def configure(
        self,
        store_addr: str,
        rank: int,
        world_size: int,
        *,
        replica_id: str = "",
        quorum_id: int | None = None,
        group_rank: int = 0,
        group_world_size: int = 1,
        global_ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Build the group again, and block until the group is built.

        Args:
            store_addr: `host:port/prefix` of a running store. All ranks give the same address, with a fresh prefix for
                each call.
            rank: this process's rank, 0-based.
            world_size: number of ranks, at least 1.
            replica_id: the id of this replica, for messages.
            quorum_id: the id of this quorum, for messages.
            group_rank: rank inside the replica group, for messages.
            group_world_size: ranks in the replica group, for messages.
            global_ranks: the rank of each member in the whole job, for messages and records.
            timeout: the limit for building the group. None means the group's own timeout. With a `quorum_id`, None at
                first allows only seconds for each of the store, the other ranks and the connections.

        Raises:
            ConfigureError: the group was not built in time, or can't be built. Nothing remains of the group. The error
                names the ranks that did not join and the unreachable ranks. StoreUnreachableError names the store.
            AbortedError: `abort` was called during `configure`.
            ProcessGroupClosedError: the group was shut down.
            ConfigError: an argument is invalid (StoreAddressError for the address).
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """End the running operations here and at the peers, and return at once. Harmless when nothing runs."""

    @abc.abstractmethod
    def errored(self) -> Exception | None:
        """Return why the group needs a new `configure`. None: the group is usable or was never configured."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End the running operations and release all resources permanently. A rank that leaves calls `linger` first."""

    def exchange_word(self, words: Sequence[int], *, round_number: int, timeout: timedelta) -> WordExchange:
        """Start to exchange a few integers with all other ranks at the end of a round, and return at once.

        Every rank of the group calls this method once a round, and waits for the exchange before the next round. The
        caller guarantees that this rank's own reductions of the round have finished, on the device too. The exchange
        does not look at the reductions, so a rank with failed reductions can still report the failure. The exchange and
        the collectives are not ordered.

        This default is an allreduce on the CPU, for groups that keep no connections for words. The backends of this
        package keep such connections.

        Args:
            words: up to `WORD_VALUES_MAX` signed 64-bit integers, as many as on the other ranks. A sum that needs more
                than 64 bits is an error on every rank.
            round_number: above the previous one, and the same on all ranks. A rank with a different number gets an
                error. A rank that is one round ahead waits for the others.
            timeout: for the whole exchange, from now.

        Returns: the exchange. The method `wait` returns the sums. After a failed exchange, abort the group and
            configure it again.
        Raises: ConfigError: an argument is invalid; nothing was sent. The errors of `wait`, if they are already
            known.
        """
        return exchange_word_by_allreduce(self, words, round_number=round_number, timeout=timeout)

    def prepare(self) -> None:
        """Wait until `configure` needs nothing that this process could have done before. Most groups need nothing.

        A replica calls this before it asks for a quorum, because the other replicas wait in their `configure` then.

        Raises: ConfigureError: the group can't be prepared.
        """
        return

    def linger(self, timeout: timedelta = LINGER) -> bool:
        """Keep the connections until the last word of this rank has been delivered. A rank that leaves calls this
        method.

        The wait ends when every other rank has sent a word of a later round, or has disconnected for its next
        `configure`. `abort` and `shutdown` end the wait from another thread. This default can't observe the other
        ranks, so the default waits for the whole time.

        Args:
            timeout: the longest wait.

        Returns: whether all other ranks have gone on within the time.
        """
        if self.errored() is None and self.size() > 1:
            time.sleep(timeout.total_seconds())
            return False
        return True

    @abc.abstractmethod
    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of every operation that starts from now on, also on the live group.

        A running operation keeps its timeout. `abort` ends a running operation.

        Raises: ConfigError: the timeout is not above zero.
        """

    @abc.abstractmethod
    def size(self) -> int:
        """Return the number of ranks. Raises: NotConfiguredError, ProcessGroupClosedError."""

    @abc.abstractmethod
    def rank(self) -> int:
        """Return this process's rank. Raises: NotConfiguredError, ProcessGroupClosedError."""

    @abc.abstractmethod
    def getBackendName(self) -> str:
        """Return the name of the backend, with the prefix `tft-`."""

    @abc.abstractmethod
    def __repr__(self) -> str: ...

    @property
    def parent(self) -> ProcessGroup | None:
        """Return the wrapped group, or None if this group wraps none."""
        return None

    # --- torch's tables ----------------------------------------------------------------------------------------------

    def register(self, name: str) -> ProcessGroup:
        """Register this group with torch under a name, for DeviceMesh and functional collectives.

        Torch sees a group of this process alone, whatever the real size. The group may be configured before or after.
        All processes of a replica group register their groups in the same order, as for torch's own groups.

        Args:
            name: the purpose of the group, for messages and torch's logs: letters, digits, `_`, `-` and `.`.

        Returns: this group.
        Raises: ConfigError: torch's default group is not initialized, the name is invalid, or this group is already
            registered.
        """
        check_name(name)
        if not dist.is_initialized():
            raise ConfigError(
                f"group {name!r} can't be registered without torch's default group; call init_process_group first"
            )
        if self._registered_as is not None and registry.is_entered(self):
            raise ConfigError(
                f"the group is already registered as {self._registered_as!r}; unregister it before you register it as "
                f"{name!r}"
            )
        registry.enter(self, kind=self.getBackendName(), description=name)
        self._registered_as = name
        return self

    def unregister(self) -> None:
        """Remove this group from torch's tables. The group keeps working, but torch can no longer find it by name.

        Raises: ConfigError: the group is not registered.
        """
        if self._registered_as is None:
            raise ConfigError(f"{self!r} is not registered; call register first")
        self._registered_as = None
        if not registry.is_entered(self):
            return  # torch has forgotten all groups together with its default group
        # Torch shuts down each group that it removes. Only the owner of this group may decide to shut it down.
        shutdowns: list[None] = []
        vars(self)["shutdown"] = lambda: shutdowns.append(None)
        try:
            registry.leave(self)
        finally:
            del vars(self)["shutdown"]
        self._group_name = None
        if len(shutdowns) > 1:  # another thread called shutdown in the meantime
            self.shutdown()

    @property
    def group_name(self) -> GroupName:
        """Return this group's name in torch's tables. Raises: ConfigError: the group is not registered there."""
        known = self._group_name is not None and (
            # Before torch 2.13, the compiler traces this code and can't trace torch's tables.
            torch.compiler.is_compiling() or registry.is_known_as(self, self._group_name)
        )
        if not known or self._group_name is None:
            raise ConfigError(f"{self!r} has no name, because it is not registered; call register first")
        return self._group_name

    def _set_group_name(self, name: GroupName) -> None:
        """Store the name of the group. Torch calls this method when the group is registered."""
        self._group_name = name

    # C++ reads the size and the rank under these names.
    def getSize(self) -> int:
        return self.size()

    def getRank(self) -> int:
        return self.rank()

    def name(self) -> str:
        return self.getBackendName()

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> dist.Work:
        """Broadcast one tensor, in place, from the rank `root`."""
        opts = dist.BroadcastOptions()
        opts.rootRank = root
        return self.broadcast([tensor], opts)

    def __reduce__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} is bound to its process and can't be pickled")
