"""What a Manager is put together from, as small interfaces: coordination, a process group and a clock.

Each has what a step needs and no more, so that a test or another strategy can bring its own. The fourth part, the
transport of live state, is `tft_ckpt.CheckpointTransport`.

Law of this file: interfaces and their words; nothing is done here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from tft_coord.core.progress import Progress
from tft_coord.core.types import Plan, Purpose, QuorumKey, RankRequest, Verdict
from tft_coord.news import News


class Group(Protocol):
    """What a Manager asks of its process group; every `tft_pg.ProcessGroup` is one."""

    def configure(
        self,
        store_addr: str,
        rank: int,
        world_size: int,
        *,
        replica_id: str,
        quorum_id: int | None,
        group_rank: int,
        group_world_size: int,
        global_ranks: Sequence[int] | None,
    ) -> None:
        """Build the group anew, under a store prefix that nobody has used; blocks."""
        ...

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.ReduceOp | dist.ReduceOp.RedOpType) -> dist.Work:
        """Start a reduction, in place."""
        ...

    def errored(self) -> Exception | None:
        """Why the group can't be used until the next configure."""
        ...

    def abort(self) -> None:
        """End what runs, here and at the peers; returns at once."""
        ...

    def set_timeout(self, timeout: timedelta) -> None:
        """Of each operation."""
        ...

    def shutdown(self) -> None:
        """For ever."""
        ...


class ServerRestarted(Exception):
    """The manager server of a group of one had died; a new one runs. What was open there counts as no."""


class Coordinator(Protocol):
    """What a Manager asks of coordination. Its methods may be called from any thread.

    Attributes:
        replica_id: full id of the replica group; it never changes.
    """

    @property
    def replica_id(self) -> str: ...

    def quorum(self, request: RankRequest, timeout: timedelta) -> Plan | QuorumKey:
        """Ask for the next quorum.

        Returns: the plan, or the key of the quorum that stands unchanged.
        Raises: DeadlinePassed, Refused, GroupLost, Closed; ServerRestarted: ask again, holding nothing.
        """
        ...

    def vote(
        self, step: int, yes: bool, timeout: timedelta, *, key: QuorumKey, purpose: Purpose, leaving: bool = False
    ) -> Verdict:
        """Vote; returns the verdict of the whole group, and whether it leaves.

        `leaving`: this rank wishes that the group leaves after this step.
        Raises: DeadlinePassed, GroupLost, Closed; ServerRestarted: it counts as a no.
        """
        ...

    def listen(self, listener: Callable[[News], None]) -> None:
        """Have `listener` told of each loss that concerns this rank, of a member of a quorum or of this group, and of
        newcomers that ask.

        It is called by a thread of the coordinator's and must return at once.
        """
        ...

    def leave(self, reason: str, serve: timedelta, timeout: timedelta, *, finished_step: int | None = None) -> None:
        """Leave the job, with the whole group; it serves its state for `serve` at most.

        `finished_step`: the last step of the training, which is over; None: others may train on.
        Raises: DeadlinePassed, GroupLost, Closed, ServerRestarted: nobody has taken it.
        """
        ...

    def follow(self, progress: Callable[[], Progress]) -> None:
        """Have `progress` asked several times a beat where in its step this rank is, on a thread of its own."""
        ...

    def gather(self, name: str, value: str, timeout: timedelta) -> tuple[str, ...]:
        """Give every rank of this replica group one's value, and take theirs. Called by all ranks, or by none.

        Args:
            name: of this exchange; the same on all ranks, and another one each time.
            value: a line of text.
        Returns: the values, in rank order.
        Raises: DeadlinePassed: a rank gave none in time, or the group's store does not answer.
        """
        ...

    def source_metadata(self, address: str, timeout: timedelta) -> str:
        """Where the state of this group rank can be fetched, asked of a source's manager server."""
        ...

    def healed(self, bytes_total: int) -> None:
        """Bytes of live state received so far in this process's life; shows that a healing goes on."""
        ...

    def close(self) -> None:
        """End everything; again does nothing."""
        ...


class StandingCoordinator(Coordinator, Protocol):
    """What a coordinator has besides where its quorums may stand: the Manager asks nobody in a steady step then.

    A coordinator without these is asked in every step. Its listener is told `QuorumNews` too: the answer to each
    numbered beat, and what changes between two of them.
    """

    def vote(
        self,
        step: int,
        yes: bool,
        timeout: timedelta,
        *,
        key: QuorumKey,
        purpose: Purpose,
        leaving: bool = False,
        stands: bool = False,
    ) -> Verdict:
        """As above. `stands`: in the word of this rank's round nobody asked, left or recovered. The verdict says so if
        all ranks of the group said it."""
        ...

    def number_beats(self, number: Callable[[], int]) -> None:
        """Have each beat carry a number, which is asked for when it is sent; its answer renews the lease. 0: it needs
        no answer."""
        ...

    def late(self, key: QuorumKey, step: int) -> None:
        """Tell that the round of that step has waited for other members for `join_timeout`; returns at once."""
        ...


class Clock(Protocol):
    """What a Manager asks of time. Its methods may be called from any thread."""

    def monotonic(self) -> float:
        """Seconds since whenever; never goes back."""
        ...

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until the event is set, or so many seconds; returns whether it is set."""
        ...

    def after(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], object]:
        """Have a callback run after so many seconds, on a thread of the clock's; it returns at once.

        Returns: a function that takes it back; where it has run already, that does nothing.
        """
        ...
