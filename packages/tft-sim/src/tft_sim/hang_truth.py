"""The watch over hangs: who is taken to hang, and who does.

Each trainer notes for itself when it was busy with its own work, or stopped, without a break, and when it waited in one
reduction. What the lighthouse says of it is held against that.

Law of this file: looking on, as in `invariants.py`; it needs the cluster to know who could be reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tft_coord.core.progress import Progress
from tft_coord.core.types import Hello, Plan, QuorumKey
from tft_sim.invariants import InvariantBroken
from tft_sim.lighthouse_process import JOB
from tft_sim.process import State
from tft_sim.trainer import Trainer

if TYPE_CHECKING:
    from tft_sim.cluster import Cluster, Replica
    from tft_sim.manager_process import ManagerProcess


@dataclass(frozen=True, slots=True)
class Told:
    """What a trainer's beat tells its manager server, and what that can't know: when it was sent, and since when what
    it tells is so."""

    progress: Progress
    sent_ms: int
    since_ms: int
    number: int = 0  # of the beat, where it wants an answer


class HangTruth:
    """Whether those hang that are lost by it, H1, and those are lost that hang, H2 (protocol.md section 6).

    Args:
        cluster: that it watches.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._losses_ms: list[int] = []
        # As they were when lost: the session, and who hung.
        self._hung: dict[str, tuple[int, list[tuple[ManagerProcess, Trainer, Plan | None]]]] = {}
        # Of each rank: what its newest beat is about (on which stream, and since when it is so), and for how long the
        # fastest beat about it was on its way.
        self._late_ms: dict[str, tuple[tuple[int, int], int]] = {}

    @property
    def _limit_ms(self) -> int:
        return self._cluster.timeouts.slowest_step_ms

    @property
    def _told_within_ms(self) -> int:
        """From the limit on: a beat to the manager server, one to the lighthouse, a tick, and as much again."""
        return 4 * self._cluster.timeouts.beat_interval_ms

    def lost(self, replica_id: str, session: int) -> None:
        """A lighthouse says that it hangs."""
        now_ms = self._cluster.clock.now_ms
        self._losses_ms.append(now_ms)
        # A silent rank is judged from its last word on, which was at most a beat and a little earlier.
        needed_ms = self._limit_ms - 2 * self._cluster.timeouts.beat_interval_ms
        lives = [each for each in self._cluster.lives if each.replica_id == replica_id]
        self._hung[replica_id] = (
            session,
            [
                (each.manager, trainer, trainer.plan)
                for each in lives
                for trainer in each.trainers
                # Another rank of it may have been stuck for a moment only: it is known to hang when it is too long.
                if each.manager is not None and trainer.hangs and now_ms - trainer.phase_since_ms >= needed_ms
            ],
        )
        if any(self._may_be_unheard(each, trainer, now_ms - needed_ms) for each in lives for trainer in each.trainers):
            return
        if not any(self._busy_ms(trainer, now_ms) >= needed_ms for each in lives for trainer in each.trainers):
            raise InvariantBroken("H1", f"{replica_id} is lost by a hang, and none of its trainers hangs")

    def _busy_ms(self, trainer: Trainer, now_ms: int) -> int:
        """For how long it was busy. Of a wait that began after the last beat before it was stopped nobody has heard:
        it seems to have been busy on, with what that beat told."""
        silent_since_ms, beat_ms = trainer.stopped_since_ms, self._cluster.timeouts.beat_interval_ms
        believed_ms = trainer.busy.believed_ms(
            now_ms, silent_since_ms=silent_since_ms, heard_ms=silent_since_ms - beat_ms * 5 // 4
        )
        # Where quorums stand nothing is seen of the beginning of a step: who is silent for so long may be in one.
        silent = trainer.state is State.STOPPED and self._cluster.config.trainers.speaks
        return max(trainer.busy.longest_ms(now_ms), believed_ms, now_ms - silent_since_ms if silent else 0)

    def _may_be_unheard(self, replica: Replica, trainer: Trainer, since_ms: int) -> bool:
        """It has vanished without a word. Or the way to its manager server was cut, for less than a ping takes to find
        it and again: its beats are lost, and its silence is not told from that of a held interpreter lock. Or the
        manager server was stopped itself, and tells on waking up of a silence, before it reads what its ranks said.
        """
        manager = replica.manager
        if manager is None:
            return False
        if not trainer.alive:
            return True
        calm_since_ms = self._cluster.network.calm_since_ms(manager.name, trainer.name)
        return max(calm_since_ms, manager.running_since_ms) > since_ms

    def stuck(self, key: QuorumKey, members: tuple[str, ...]) -> None:
        """A lighthouse says that all of these wait in one reduction of that quorum."""
        now_ms = self._cluster.clock.now_ms
        needed_ms = self._limit_ms - 2 * self._cluster.timeouts.beat_interval_ms
        for member in members:
            lives = [each for each in self._cluster.lives if each.replica_id == member]
            idle = [
                next((rank.name for rank in each.trainers if rank.reducing.longest_ms(now_ms) < needed_ms), None)
                if each.alive
                else None
                for each in lives
            ]
            if idle and all(idle):  # of two processes of one replica id the other one is no member
                raise InvariantBroken("H1", f"quorum {key} is broken by a wait of all, and {idle[0]} waits not")

    def heard(self, trainer: Trainer, stream: int, told: Told) -> None:
        """Its manager server hears a beat of a trainer's. One that was long on its way is not told from that of a
        trainer that went on, unless others have told of the same before; each tells of a beat more than the last."""
        about, late_ms = (stream, told.since_ms), self._cluster.clock.now_ms - told.sent_ms
        known, known_late_ms = self._late_ms.get(trainer.name, (about, late_ms))
        if known == about and told.since_ms == trainer.phase_since_ms:
            late_ms = min(late_ms, known_late_ms)
        self._late_ms[trainer.name] = about, late_ms

    def _known_ms(self, trainer: Trainer) -> int:
        """For how long it is where it is, as far as its manager server can know."""
        _, late_ms = self._late_ms.get(trainer.name, (None, 0))
        return self._cluster.clock.now_ms - trainer.phase_since_ms - late_ms

    def begins(self, replica: Replica, trainer: Trainer) -> None:
        """A trainer begins to hang, or is stopped, inside a step that is not excused."""
        if self._cluster.is_foreign:
            return  # nobody is told where a trainer is
        cluster, lighthouse, at_ms = self._cluster, self._cluster.our_lighthouse, self._cluster.clock.now_ms
        plan, stopped = trainer.plan, not trainer.hangs
        # Who can't speak is silent for two beats and a half first.
        silent_ms = 3 * cluster.timeouts.beat_interval_ms if stopped else 0

        def look() -> None:
            goes_on = trainer.state is State.RUNNING if stopped else not trainer.hangs
            if trainer.plan is not plan or goes_on or plan is None or cluster.our_lighthouse is not lighthouse:
                return
            if trainer.stopped_since_ms > at_ms or not lighthouse.attendance_of(replica.job).lives(replica.replica_id):
                return
            if lighthouse.attendance_of(replica.job).is_last_holder(replica.replica_id, trainer.step):
                return  # without it the others would start over
            since_ms = cluster.losses.reached_since_ms(replica, trainer, plan.key, stopped=stopped)
            if since_ms is None or since_ms > at_ms or any(loss_ms >= at_ms for loss_ms in self._losses_ms):
                return  # one at a time is lost
            raise InvariantBroken("H2", f"{trainer.name} hangs since {at_ms} ms, within reach, and is not lost")

        cluster.clock.after(self._limit_ms + self._told_within_ms + silent_ms, look)

    def opens(self, manager: ManagerProcess, hello: Hello) -> None:
        """A manager server says hello: not as a newer session than the one that was lost, while its trainer hangs."""
        before, hung = self._hung.get(hello.replica_id, (hello.session, []))
        for its, trainer, plan in hung if hello.session > before else ():
            hangs = trainer.hangs and trainer.plan is plan and self._known_ms(trainer) >= self._limit_ms
            if its is manager and hangs and manager.replica.alive:
                raise InvariantBroken("H2", f"{trainer.name} hangs still, and a newer session of it is opened")

    def welcomed(self, hello: Hello) -> None:
        """A lighthouse takes a session: that loss is over.

        Another process with its replica id, which lives, takes the place of the one that hangs.
        """
        _, hung = self._hung.get(hello.replica_id, (0, []))
        if any(manager.address == hello.address for manager, _, _ in hung):
            del self._hung[hello.replica_id]

    def sticks(self, key: QuorumKey) -> None:
        """From now on no reduction of that quorum ends."""
        if self._cluster.is_foreign:
            return  # nobody is told where a trainer is
        cluster, lighthouse, at_ms = self._cluster, self._cluster.our_lighthouse, self._cluster.clock.now_ms
        within_ms = self._limit_ms + self._told_within_ms

        def look() -> None:
            held = lighthouse.core.quorum(JOB)
            if cluster.our_lighthouse is not lighthouse or held is None or held.key != key or len(held.members) < 2:
                return
            for replica in [each for each in cluster.lives if each.replica_id in held.replica_ids]:
                for trainer in replica.trainers:
                    since_ms = cluster.losses.reached_since_ms(replica, trainer, key)
                    waits = trainer.group is not None and trainer.phase == "reduction"
                    if since_ms is None or since_ms > at_ms or not waits or trainer.phase_since_ms > at_ms + 500:
                        return
            raise InvariantBroken("H2", f"all of quorum {key} wait in one reduction since {at_ms} ms, and it stands")

        cluster.clock.after(within_ms + 500, look)
