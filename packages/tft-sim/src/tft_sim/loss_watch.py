"""The watch over pushed losses: all work in a broken quorum must end, and no other work.

Law of this file: observe only, as in `invariants.py`. It needs the cluster to know which processes could be reached.
"""

from __future__ import annotations

from tft_coord.core.types import LossNotice, QuorumKey
from tft_sim.invariants import InvariantError
from tft_sim.lighthouse_process import LighthouseProcess
from tft_sim.manager_process import Replica
from tft_sim.process import State
from tft_sim.rank import Rank
from tft_sim.watched import World

REACHED_MS = 100  # two messages, the wait before the abort, and as much again
WATCHED_MS = 10_000  # longer than any timeout of a wait in a group


class LossWatch:
    """The check P3: a loss that a lighthouse has decided ends the work in the broken quorum.

    Source: docs/protocol/sessions-and-quorums.md, "Broken quorums".

    Some members are reachable without a break, since the decision or since their stream is open again. Such a member is
    out of the broken quorum's group `REACHED_MS` later. The watch sees the lost replicas, not the messages.

    Args:
        cluster: the watched cluster.
    """

    def __init__(self, cluster: World) -> None:
        self._cluster = cluster
        self._decided: set[tuple[QuorumKey, str]] = set()
        self._left: set[tuple[QuorumKey, str]] = set()

    def decided(self, lighthouse: LighthouseProcess, key: QuorumKey, lost: str) -> None:
        """Record that a lighthouse takes a member of that quorum for lost, or knows its successor."""
        if (key, lost) not in self._decided:
            self._decided.add((key, lost))
            at_ms = self._cluster.clock.now_ms
            self._check_later(lighthouse, key, at_ms, at_ms + WATCHED_MS)

    def left(self, lighthouse: LighthouseProcess, key: QuorumKey, who: str, *, surely: bool) -> None:
        """Record that a member of that quorum has asked for the next. `surely`: it can't go on in this one."""
        self._left.add((key, who))
        if surely:
            at_ms = self._cluster.clock.now_ms
            self._check_later(lighthouse, key, at_ms, at_ms + WATCHED_MS)

    def loss_announced(self, trainer: Rank, notice: LossNotice) -> None:
        """Check a loss notice to a rank: a lighthouse has decided it, unless it is of the rank's own replica."""
        known = self._left if notice.lives else self._decided
        if notice.replica_id != trainer.replica_id and (notice.key, notice.replica_id) not in known:
            raise InvariantError(
                "P3", f"{trainer.name} receives a loss notice that no lighthouse has decided: {notice}"
            )

    def _check_later(self, lighthouse: LighthouseProcess, key: QuorumKey, at_ms: int, until_ms: int) -> None:
        cluster = self._cluster

        def check() -> None:
            if cluster.lighthouse is not lighthouse or not lighthouse.alive:
                return  # the next lighthouse decides for itself
            for replica in cluster.replicas.values():
                for trainer in replica.trainers:
                    if trainer.group is not None and trainer.group.key == key:
                        self._check_rank(replica, trainer, key, at_ms)
            if cluster.clock.now_ms < until_ms:
                self._check_later(lighthouse, key, at_ms, until_ms)

        cluster.clock.after(REACHED_MS, check)

    def _check_rank(self, replica: Replica, trainer: Rank, key: QuorumKey, at_ms: int) -> None:
        if trainer.left or (key, replica.replica_id) in self._left:
            return  # the replica trains no more, or its ranks wait for the next quorum
        since_ms = self.reached_since_ms(replica, trainer, key)
        if since_ms is None:
            return
        for_ms = self._cluster.clock.now_ms - max(at_ms, since_ms, trainer.group_since_ms)
        if for_ms >= REACHED_MS:
            raise InvariantError(
                "P3", f"{trainer.name} is still in quorum {key}, which is broken, and was reachable for {for_ms} ms"
            )

    def reached_since_ms(self, replica: Replica, trainer: Rank, key: QuorumKey, *, stopped: bool = False) -> int | None:
        """Return the time since which a notice would reach that rank at once, or None if it would not now.

        Args:
            replica: of the rank.
            trainer: the rank.
            key: of the quorum that the notice is about.
            stopped: the rank itself is stopped and hears nothing. Only the way to it counts.
        """
        lighthouse, manager, network = self._cluster.our_lighthouse, replica.manager, self._cluster.network
        if replica.ended or manager is None or lighthouse.liveness_of(replica.job).is_dead(replica.replica_id):
            return None  # the replica ends, or it was replaced and learns of that when it speaks
        processes = (lighthouse, manager) if stopped else (lighthouse, manager, trainer)
        if any(process.state is not State.RUNNING for process in processes):
            return None
        rank_since_ms, lighthouse_since_ms = manager.rank_since_ms(trainer.rank), manager.lighthouse_since_ms()
        if rank_since_ms is None or lighthouse_since_ms is None or manager.lighthouse is not lighthouse:
            return None
        held = manager.group.quorum
        if held is None or held.key != key:
            return None  # a manager server that was restarted since does not know that quorum
        return max(
            lighthouse_since_ms,
            rank_since_ms,
            network.calm_since_ms("lighthouse", manager.name),
            network.calm_since_ms(manager.name, trainer.name),
            *(process.running_since_ms for process in processes),
        )
