"""The parts of a Manager as small interfaces: coordination, a process group and a clock.

Each interface has only what a step needs, so that a test or another strategy can provide its own. The fourth part, the
transport of live state, is `tft_ckpt.CheckpointTransport`.

Law of this file: interfaces and their descriptions. Nothing is implemented here.
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
from tft_coord.notifications import Notification


class ProcessGroupLike(Protocol):
    """The interface of a Manager's process group. Every `tft_pg.ProcessGroup` implements it."""

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
        """Build the group again, under a fresh store prefix. Blocks."""
        ...

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.ReduceOp | dist.ReduceOp.RedOpType) -> dist.Work:
        """Start a reduction, in place."""
        ...

    def errored(self) -> Exception | None:
        """Return why the group can't be used until the next configure; None: it can be used."""
        ...

    def abort(self) -> None:
        """Abort running operations, here and at the peers. Returns at once."""
        ...

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of each operation."""
        ...

    def shutdown(self) -> None:
        """Shut the group down for ever."""
        ...


class Coordinator(Protocol):
    """The interface of a Manager's coordination. Any thread may call its methods.

    Attributes:
        replica_id: full id of the replica group. It never changes.
    """

    @property
    def replica_id(self) -> str: ...

    def quorum(self, request: RankRequest, timeout: timedelta) -> Plan | QuorumKey:
        """Request the next quorum.

        Returns: the plan, or the key of the quorum that stands unchanged.
        Raises: RequestTimeoutError, RefusedError, ReplicaGroupLostError, ManagerClosedError. ServerRestartedError:
        request again, without a held quorum.
        """
        ...

    def vote(
        self, step: int, yes: bool, timeout: timedelta, *, key: QuorumKey, purpose: Purpose, leaving: bool = False
    ) -> Verdict:
        """Vote, and return the verdict of the whole group and whether the group leaves.

        `leaving`: this rank wishes that the group leaves after this step.

        Raises: RequestTimeoutError, ReplicaGroupLostError, ManagerClosedError. ServerRestartedError: the vote counts
        as a no.
        """
        ...

    def listen(self, listener: Callable[[Notification], None]) -> None:
        """Set the function that receives notifications for this rank: losses, newcomers and orders.

        A thread of the coordinator calls `listener`, which must return at once.
        """
        ...

    def leave(self, reason: str, serve: timedelta, timeout: timedelta, *, finished_step: int | None = None) -> None:
        """Leave the job with the whole group, which then serves its state for at most `serve`.

        `finished_step`: the last step of a finished training. None: other replicas may continue to train.

        Raises: RequestTimeoutError, ReplicaGroupLostError, ManagerClosedError, ServerRestartedError: the request was
        not delivered.
        """
        ...

    def follow(self, progress: Callable[[], Progress]) -> None:
        """Set the function that returns this rank's progress. A coordinator thread calls it several times a beat."""
        ...

    def beat(self) -> None:
        """Report this rank's progress now, ahead of the next beat. Never waits."""
        ...

    def gather(self, name: str, value: str, timeout: timedelta) -> tuple[str, ...]:
        """Exchange a value with every rank of this replica group. All ranks call this, or none.

        Args:
            name: the name of this exchange, the same on all ranks, and a new one each time.
            value: a line of text.
        Returns: the values, in rank order.
        Raises: RequestTimeoutError: a rank gave no value in time, or the group's store does not answer.
        """
        ...

    def source_metadata(self, address: str, timeout: timedelta) -> str:
        """Ask a source's manager server where the state of this group rank can be fetched."""
        ...

    def healed(self, bytes_total: int) -> None:
        """Report the bytes of live state that this process has received in its life, to show that a healing goes on."""
        ...

    def close(self) -> None:
        """End everything. A second call does nothing."""
        ...


class StandingCoordinator(Coordinator, Protocol):
    """The interface of a coordinator whose quorums may stand, so that a steady step needs no request.

    With a plain Coordinator, every step makes a request. The listener of a StandingCoordinator also receives
    `QuorumNews`: the answer to each numbered beat, and changes between two beats.
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
        """Vote as above, with `stands`.

        `stands`: in this rank's word of the round, no member requested a quorum, left or recovered. The verdict says so
        if all ranks of the group do.
        """
        ...

    def number_beats(self, number: Callable[[], int]) -> None:
        """Set the function that returns the number of each beat when it is sent. The answer to a beat renews the lease.

        Number 0: the beat needs no answer.
        """
        ...

    def late(self, key: QuorumKey, step: int) -> None:
        """Report that the round of a step has waited for other members for `join_timeout`. Returns at once."""
        ...


class Clock(Protocol):
    """The interface of a Manager's clock. Any thread may call its methods."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary moment. The value never goes back."""
        ...

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until the event is set, or for `timeout_s` seconds. Return whether the event is set."""
        ...

    def after(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], object]:
        """Run a callback after `delay_s` seconds, on a thread of the clock. The callback must return at once.

        Returns: a function that cancels the callback. After the callback has run, this function does nothing.
        """
        ...
