"""The watch over hangs: it compares the hangs that the lighthouse reports with the real ones.

Each trainer records for itself the time that it was busy or stopped without a break. It also records its waits in one
reduction. The watch compares what the lighthouse says with these records.

Law of this file: observe only, as in `invariants.py`. It needs the cluster to know which processes could be reached.
"""

from __future__ import annotations

from typing import Protocol

from tft_coord.core.types import Hello, Plan, QuorumKey
from tft_sim.invariants import InvariantError
from tft_sim.lighthouse_process import JOB
from tft_sim.loss_watch import LossWatch
from tft_sim.manager_process import ManagerProcess, Replica
from tft_sim.process import State
from tft_sim.rank import Rank, SentBeat
from tft_sim.watched import World


class HangWorld(World, Protocol):
    """The cluster, as this watch sees it."""

    @property
    def losses(self) -> LossWatch: ...


class HangTruth:
    """The checks H1 (replicas lost for a hang do hang) and H2 (hanging replicas are lost).

    Source: docs/protocol/appendix.md, "Hangs".

    Args:
        cluster: the watched cluster.
    """

    def __init__(self, cluster: HangWorld) -> None:
        self._cluster = cluster
        self._losses_ms: list[int] = []
        # State at the time of the loss: the session, and the hanging trainers.
        self._hung: dict[str, tuple[int, list[tuple[ManagerProcess, Rank, Plan | None]]]] = {}
        # For each rank: the subject of its newest beat (stream, start of the phase), and the shortest transit time of a
        # beat about that subject.
        self._late_ms: dict[str, tuple[tuple[int, int], int]] = {}

    @property
    def _limit_ms(self) -> int:
        return self._cluster.timeouts.slowest_step_ms

    @property
    def _report_within_ms(self) -> int:
        """Return the time allowed after the limit: two beats (to manager server and lighthouse), a tick, and that
        twice."""
        return 4 * self._cluster.timeouts.beat_interval_ms

    def lost(self, replica_id: str, session: int) -> None:
        """Check a loss for a hang: a trainer of that replica does hang."""
        now_ms = self._cluster.clock.now_ms
        self._losses_ms.append(now_ms)
        # A silent rank is judged from its last message on. That message was at most a beat and a little earlier.
        needed_ms = self._limit_ms - 2 * self._cluster.timeouts.beat_interval_ms
        lives = [each for each in self._cluster.lives if each.replica_id == replica_id]
        self._hung[replica_id] = (
            session,
            [
                (each.manager, trainer, trainer.plan)
                for each in lives
                for trainer in each.trainers
                # Another rank may be stuck only for a moment. It counts as hanging after the full time.
                if each.manager is not None and trainer.hangs and now_ms - trainer.phase_since_ms >= needed_ms
            ],
        )
        if any(self._may_be_unheard(each, trainer, now_ms - needed_ms) for each in lives for trainer in each.trainers):
            return
        if not any(self._busy_ms(trainer, now_ms) >= needed_ms for each in lives for trainer in each.trainers):
            raise InvariantError("H1", f"{replica_id} is lost for a hang, and none of its trainers hangs")

    def _busy_ms(self, trainer: Rank, now_ms: int) -> int:
        """Return for how long the trainer was busy, as others can know.

        A wait may begin after the last beat before a stop. No peer hears of it, so the trainer seems busy as in that
        beat.
        """
        silent_since_ms, beat_ms = trainer.stopped_since_ms, self._cluster.timeouts.beat_interval_ms
        observed_ms = trainer.busy.observed_ms(
            now_ms, silent_since_ms=silent_since_ms, heard_ms=silent_since_ms - beat_ms * 5 // 4
        )
        # In a standing quorum the start of a step is not visible. A rank that is silent for so long may be in a step.
        until_ms = now_ms if trainer.state is State.STOPPED else trainer.running_since_ms  # the newest beat is older
        unseen = self._cluster.config.trainers.speaks and now_ms - until_ms < self._report_within_ms
        return max(trainer.busy.longest_ms(now_ms), observed_ms, until_ms - silent_since_ms if unseen else 0)

    def _may_be_unheard(self, replica: Replica, trainer: Rank, since_ms: int) -> bool:
        """Return whether the manager server may not have heard the trainer.

        There are three cases:

        - The trainer vanished without a message.
        - The way between them was cut for less than a ping takes to find it. Its beats are lost, and the silence looks
          like a held interpreter lock.
        - The manager server was stopped. On waking up it reports a silence before it reads the messages of its ranks.
        """
        manager = replica.manager
        if manager is None:
            return False
        if not trainer.alive:
            return True
        calm_since_ms = self._cluster.network.calm_since_ms(manager.name, trainer.name)
        return max(calm_since_ms, manager.running_since_ms) > since_ms

    def stuck(self, key: QuorumKey, members: tuple[str, ...]) -> None:
        """Check that all these members wait in one reduction of that quorum, as a lighthouse reports."""
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
            if idle and all(idle):  # of two processes with one replica id, the other one is no member
                raise InvariantError(
                    "H1", f"quorum {key} is broken because all members wait, and {idle[0]} does not wait"
                )

    def beat_received(self, trainer: Rank, stream: int, beat: SentBeat) -> None:
        """Record that the manager server hears a beat of a trainer.

        A slow beat is indistinguishable from a beat of a trainer that went on, unless earlier beats reported the same
        phase. Each beat carries more than the last.
        """
        subject, late_ms = (stream, beat.since_ms), self._cluster.clock.now_ms - beat.sent_ms
        known, known_late_ms = self._late_ms.get(trainer.name, (subject, late_ms))
        if known == subject and beat.since_ms == trainer.phase_since_ms:
            late_ms = min(late_ms, known_late_ms)
        self._late_ms[trainer.name] = subject, late_ms

    def _known_ms(self, trainer: Rank) -> int:
        """Return for how long the trainer is in its phase, as far as its manager server can know."""
        _, late_ms = self._late_ms.get(trainer.name, (None, 0))
        return self._cluster.clock.now_ms - trainer.phase_since_ms - late_ms

    def hang_began(self, replica: Replica, trainer: Rank) -> None:
        """Check later that a trainer is lost, if it now begins to hang or is stopped inside a step that is not
        excused."""
        if self._cluster.is_foreign:
            return  # no process learns where a trainer is
        cluster, lighthouse, at_ms = self._cluster, self._cluster.our_lighthouse, self._cluster.clock.now_ms
        plan, stopped = trainer.plan, not trainer.hangs
        # A rank that can't speak is silent for two and a half beats first.
        silent_ms = 3 * cluster.timeouts.beat_interval_ms if stopped else 0

        def check() -> None:
            goes_on = trainer.state is State.RUNNING if stopped else not trainer.hangs
            if trainer.plan is not plan or goes_on or plan is None or cluster.our_lighthouse is not lighthouse:
                return
            if trainer.stopped_since_ms > at_ms or not lighthouse.liveness_of(replica.job).is_alive(replica.replica_id):
                return
            if lighthouse.liveness_of(replica.job).is_last_holder(replica.replica_id, trainer.step):
                return  # without this trainer the others would start over
            since_ms = cluster.losses.reached_since_ms(replica, trainer, plan.key, stopped=stopped)
            if since_ms is None or since_ms > at_ms or any(loss_ms >= at_ms for loss_ms in self._losses_ms):
                return  # only one replica at a time is lost
            raise InvariantError("H2", f"{trainer.name} hangs since {at_ms} ms, is reachable, and is not lost")

        cluster.clock.after(self._limit_ms + self._report_within_ms + silent_ms, check)

    def session_opened(self, manager: ManagerProcess, hello: Hello) -> None:
        """Check that a manager server opens no newer session than the lost one while its trainer hangs."""
        before, hung = self._hung.get(hello.replica_id, (hello.session, []))
        for its, trainer, plan in hung if hello.session > before else ():
            hangs = trainer.hangs and trainer.plan is plan and self._known_ms(trainer) >= self._limit_ms
            if its is manager and hangs and manager.replica.alive:
                raise InvariantError("H2", f"{trainer.name} still hangs, and its manager server opens a newer session")

    def welcomed(self, hello: Hello) -> None:
        """Record that a lighthouse accepts a session, so that loss is over.

        Another live process with the same replica id takes the place of the hanging one.
        """
        _, hung = self._hung.get(hello.replica_id, (0, []))
        if any(manager.address == hello.address for manager, _, _ in hung):
            del self._hung[hello.replica_id]

    def reductions_blocked(self, key: QuorumKey) -> None:
        """Check later that the quorum is broken, because from now on none of its reductions ends."""
        if self._cluster.is_foreign:
            return  # no process learns where a trainer is
        cluster, lighthouse, at_ms = self._cluster, self._cluster.our_lighthouse, self._cluster.clock.now_ms
        within_ms = self._limit_ms + self._report_within_ms

        def check() -> None:
            held = lighthouse.core.quorum(JOB)
            if cluster.our_lighthouse is not lighthouse or held is None or held.key != key or len(held.members) < 2:
                return
            for replica in [each for each in cluster.lives if each.replica_id in held.replica_ids]:
                for trainer in replica.trainers:
                    since_ms = cluster.losses.reached_since_ms(replica, trainer, key)
                    waits = trainer.group is not None and trainer.phase == "reduction"
                    if since_ms is None or since_ms > at_ms or not waits or trainer.phase_since_ms > at_ms + 500:
                        return
            raise InvariantError(
                "H2",
                f"all members of quorum {key} wait in one reduction since {at_ms} ms, and the quorum is not broken",
            )

        cluster.clock.after(within_ms + 500, check)
