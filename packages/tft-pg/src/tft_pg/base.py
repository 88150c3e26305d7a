"""The process group that everything else here is one of.

A training job outlives its members, so its process group must too: the same object is configured again for every
quorum, with another rank and another size, and lets go of an operation when somebody else knows that it can't end.
The law of this file: the interface and its contract; no backend, no threads.

The contract, which `tft_pg.testing.check_process_group` checks:

- `configure` blocks until the group is built, or raises and leaves none. It may be called again at any time, each
  time under a store prefix that nobody has used; what ran before is ended.
- `abort` may be called by any thread at any time, also before `configure` and in the middle of it. What runs raises
  `Aborted` here and fails at the peers. `errored()` gives an error until the next `configure`.
- A collective before `configure` raises `NotConfigured`, after `abort` `Aborted`, after `shutdown` `Closed`.
- Once a Work has failed (its `wait` has raised, its future holds an error), or the next `configure` or `shutdown`
  has returned, nothing of the operation is written into a tensor any more. Only a `wait(timeout)` whose own time-out
  passes leaves the operation running: it may still write, and still end well. `errored()` stays `DeadlinePassed` all
  the same, because the ranks may no longer agree on what was done: the group must be configured again.
- `shutdown` is for ever, may be repeated, and leaves no thread and no descriptor.
- `exchange_word` gives the same sum to every rank whose exchange ends well. A word of another round, of another
  configured group, or of a rank that is gone is never in it.
- `register` puts the group into torch's tables under a name, `unregister` takes it out; neither touches its life.
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
from tft_pg.errors import InvalidSetting
from tft_pg.forwarding import forward_collectives
from tft_pg.ops import Collective
from tft_pg.word import LINGER, WordExchange, exchange_word_by_allreduce

__all__ = ["ProcessGroup", "check_name"]


def check_name(name: object) -> None:
    """Raises: InvalidSetting: a group can't be registered by this name."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise InvalidSetting(f"{name!r} can't be a group's name; use letters, digits, '_', '-' and '.'")


class _Abstract(abc.ABCMeta, type(dist.ProcessGroup)):  # type: ignore[misc]
    """torch's groups have a metaclass of their own, so ours is both."""


@forward_collectives
class ProcessGroup(dist.ProcessGroup, metaclass=_Abstract):
    """A `torch.distributed.ProcessGroup` that is configured again and again and aborted from another thread.

    Every collective of `torch.distributed.ProcessGroup` is a method, in each of torch's call forms:
    `allreduce(tensors, opts | op)` and `(tensor, op)`, `allgather(list of lists, opts)` and `(list, tensor)`,
    `broadcast(tensors, opts)` and `(tensor, root)`. `torch.distributed`'s functions take such a group as `group=`.
    """

    def __init__(self) -> None:
        missing = sorted(type(self).__abstractmethods__)
        if missing:  # torch's metaclass makes objects by itself and does not look
            raise TypeError(f"{type(self).__name__} is abstract; it lacks {', '.join(missing)}")
        super().__init__(0, 1)  # type: ignore[call-arg]  # torch names only another form
        self._registered_as: str | None = None
        self._group_name: GroupName | None = None

    @abc.abstractmethod
    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        """Start a collective; called by every collective method, from any thread.

        Args:
            collective: which.
            args: positional arguments as the caller gave them.
            kwargs: keywords as the caller gave them.
        Returns: its Work.
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
        """Build the group anew; blocks until it is built.

        Args:
            store_addr: `host:port/prefix` of a running store; all ranks give the same, and a fresh prefix each time.
            rank: this process's rank, 0-based.
            world_size: number of ranks, at least 1.
            replica_id: which replica this is, for messages.
            quorum_id: which quorum this is, for messages.
            group_rank: rank inside the replica group, for messages.
            group_world_size: ranks in the replica group, for messages.
            global_ranks: the rank of each member in the whole job, for messages and records.
            timeout: how long building may take; None: the group's own time-out, and with a quorum_id at first only
                seconds for each of the store, the other ranks and the connections to them.
        Raises:
            ConfigureFailed: it was not built in time, or can't be; nothing is left of it. It names the ranks that did
                not come, and those that can't be reached; StoreUnreachable names the store.
            Aborted: `abort` was called meanwhile.
            Closed: the group was shut down.
            InvalidSetting: an argument can't work (StoreAddressError for the address).
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """End what runs, here and at the peers; returns at once. Harmless when nothing runs."""

    @abc.abstractmethod
    def errored(self) -> Exception | None:
        """Why the group can't be used until the next `configure`; None if it can, or was never configured."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End what runs and let go of everything, for ever. A rank that leaves calls `linger` before."""

    def exchange_word(self, words: Sequence[int], *, round_number: int, timeout: timedelta) -> WordExchange:
        """Start to exchange a few integers with all other ranks, at the end of a round; returns at once.

        Every rank of the group calls this once a round, and waits for the exchange before it starts the next one. The
        caller guarantees that this rank's own reductions of the round have ended before, on the device too: it has
        waited for all of their Works there. The exchange does not look at them, so that a rank whose reductions have
        failed can still say so. The words are not ordered with collectives.

        Here it is an allreduce on the CPU, for groups that keep no connections for words; those of this package do.

        Args:
            words: up to `WORD_VALUES_MAX` signed 64-bit integers, as many as on the other ranks. A sum that needs more
                than 64 bits is an error on every rank.
            round_number: above the one before; the same on all ranks, else it is an error on those that differ. A rank
                that is one round ahead waits for the others.
            timeout: for the whole exchange, from now.
        Returns: the exchange; its `wait` gives the sums. An exchange that has failed ends the words of this group:
            abort the group and configure it again.
        Raises: InvalidSetting: an argument can't work; nothing was sent. What `wait` raises, if it is known by now.
        """
        return exchange_word_by_allreduce(self, words, round_number=round_number, timeout=timeout)

    def linger(self, timeout: timedelta = LINGER) -> bool:
        """Keep the connections until the last word of this rank has passed; called by a rank that leaves.

        It ends as soon as every other rank has sent a word of a later round, or has ended its connection because it
        configures its group again. `abort` and `shutdown` end it from another thread. Here, for groups that can't know
        that, it waits for the whole time.

        Args:
            timeout: how long at most.
        Returns: whether all others have gone on within the time.
        """
        if self.errored() is None and self.size() > 1:
            time.sleep(timeout.total_seconds())
            return False
        return True

    @abc.abstractmethod
    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of every operation that starts from now on, on the live group too.

        An operation that runs keeps the one that it started with; `abort` ends it.

        Raises: InvalidSetting: not above zero.
        """

    @abc.abstractmethod
    def size(self) -> int:
        """Number of ranks. Raises: NotConfigured, Closed."""

    @abc.abstractmethod
    def rank(self) -> int:
        """This process's rank. Raises: NotConfigured, Closed."""

    @abc.abstractmethod
    def getBackendName(self) -> str:
        """Name of the backend, `tft-` first."""

    @abc.abstractmethod
    def __repr__(self) -> str: ...

    @property
    def parent(self) -> ProcessGroup | None:
        """The group inside; None where there is none."""
        return None

    # --- torch's tables ----------------------------------------------------------------------------------------------

    def register(self, name: str) -> ProcessGroup:
        """Have torch know this group by a name, as a DeviceMesh and functional collectives need it.

        To torch it is a group of this process alone, whatever its size; it may be configured before or after. All
        processes of a replica group do this, in the same order, as they make torch's own groups.

        Args:
            name: what it is for, for messages and torch's logs: letters, digits, `_`, `-` and `.`.
        Returns: this group.
        Raises: InvalidSetting: torch's default group is not initialized, the name can't be one, or this group is
            registered already.
        """
        check_name(name)
        if not dist.is_initialized():
            raise InvalidSetting(
                f"group {name!r} can't be registered without torch's default group; call init_process_group first"
            )
        if self._registered_as is not None and registry.is_entered(self):
            raise InvalidSetting(
                f"group {name!r} is registered already, as {self._registered_as!r}; unregister it first, or use it so"
            )
        registry.enter(self, kind=self.getBackendName(), description=name)
        self._registered_as = name
        return self

    def unregister(self) -> None:
        """Have torch forget this group. It works on: only its name is gone, and so is what was found by it.

        Raises: InvalidSetting: it is not registered.
        """
        if self._registered_as is None:
            raise InvalidSetting(f"{self!r} is not registered; call register first")
        self._registered_as = None
        if not registry.is_entered(self):
            return  # torch has forgotten all groups together with its default group
        # Torch shuts down what it forgets, but when this group ends is for its owner to say.
        shutdowns: list[None] = []
        vars(self)["shutdown"] = lambda: shutdowns.append(None)
        try:
            registry.leave(self)
        finally:
            del vars(self)["shutdown"]
        self._group_name = None
        if len(shutdowns) > 1:  # another thread's came in between
            self.shutdown()

    @property
    def group_name(self) -> GroupName:
        """By which torch knows this group. Raises: InvalidSetting: it is not registered, or torch has forgotten it."""
        known = self._group_name is not None and (
            torch.compiler.is_compiling()  # before torch 2.13 it follows us here, and can't follow into torch's tables
            or registry.is_known_as(self, self._group_name)
        )
        if not known or self._group_name is None:
            raise InvalidSetting(f"{self!r} has no name, because it is not registered; call register first")
        return self._group_name

    def _set_group_name(self, name: GroupName) -> None:
        """Called by torch when the group is registered."""
        self._group_name = name

    # C++ asks for the size and the rank by these names.
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
