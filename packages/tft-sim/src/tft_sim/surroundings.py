"""What the trainers of a simulated replica group find outside: their manager server, groups and snapshots.

Law of this file: one implementation of `trainer.Surroundings`, over a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tft_coord.core import events
from tft_coord.core.standing import Late
from tft_coord.core.types import QuorumKey, RankRequest, Verdict, Via
from tft_coord.timeouts import Timeouts
from tft_sim.clock import VirtualClock
from tft_sim.invariants import Invariants, Round
from tft_sim.marks import Marks
from tft_sim.process import State
from tft_sim.trainer import LEAVE_WITHIN_MS, Group, Refused, Snapshot, Trainer, Waiter

if TYPE_CHECKING:
    from tft_sim.cluster import Cluster, Replica


LEAVE_TAKEN_WITHIN_MS = 1_000


@dataclass(slots=True)
class Outside:
    """What one replica's trainers find outside (`trainer.Surroundings`)."""

    cluster: Cluster
    replica: Replica
    told: dict[int, object] = field(default_factory=dict)  # the manager server that has a rank's fingerprint

    @property
    def clock(self) -> VirtualClock:
        return self.cluster.clock

    @property
    def timeouts(self) -> Timeouts:
        return self.cluster.timeouts

    @property
    def invariants(self) -> Invariants:
        return self.cluster.invariants_of(self.replica.job)

    @property
    def marks(self) -> Marks:
        return self.cluster.marks

    def own_ms(self) -> int:
        now_ms = self.clock.now_ms
        if not self.cluster.config.slow_clocks:
            return now_ms
        self.marks.hit("a lease was judged by a slow clock")
        return now_ms - now_ms // 100

    def ask(self, trainer: Trainer, request: RankRequest) -> Waiter:
        waiter = Waiter()
        patience_ms = trainer.gives_up_after_ms or self.timeouts.quorum_timeout_ms
        trainer.gives_up_after_ms = None
        deadline_ms = self.clock.now_ms + patience_ms
        calls: list[int] = []

        def attempt() -> None:
            manager = self.replica.manager

            def make(call: int) -> events.RankAsked:
                told = self.told.get(trainer.rank) is manager
                return events.RankAsked(
                    trainer.rank, call, replace(request, fingerprint=()) if told else request, deadline_ms
                )

            def done(value: Any) -> None:
                if isinstance(value, Refused) and value.code == "unreachable" and self.clock.now_ms < deadline_ms:
                    if not waiter.done and trainer.alive:
                        trainer.after(100, attempt)
                else:
                    if isinstance(value, Refused):
                        self.cluster.ends.gave_up(self.replica, trainer, value, deadline_ms)
                    else:
                        self.told[trainer.rank] = manager
                    waiter.resolve(value)

            if not waiter.done:
                calls.append(self.cluster.call(trainer, self.replica, make, done))

        def give_up() -> None:
            if waiter.done:
                return
            manager = self.replica.manager
            if manager is not None and calls:
                event = events.RankWithdrew(trainer.rank, calls[-1])
                self.cluster.network.message(trainer, manager, lambda: manager.handle(event), lambda: None)
            waiter.resolve(Refused("deadline"))

        attempt()
        timer = trainer.after(patience_ms, give_up)
        waiter.then(lambda _: timer.cancel())
        return waiter

    def leave(self, trainer: Trainer) -> Waiter:
        waiter = Waiter()

        def make(call: int) -> events.RankLeft:
            finished = trainer.finished_step
            reason = "it was told to" if finished is None else f"finished at step {finished}"
            return events.RankLeft(trainer.rank, call, reason, LEAVE_WITHIN_MS, finished)

        self.cluster.call(trainer, self.replica, make, lambda value: waiter.resolve(value))
        timer = trainer.after(LEAVE_TAKEN_WITHIN_MS, lambda: waiter.resolve(None))
        waiter.then(lambda _: timer.cancel())
        return waiter

    def is_healed_from(self, trainer: Trainer) -> bool:
        return not self.replica.released

    def say_late(self, trainer: Trainer, late: Late) -> None:
        manager = self.replica.manager
        if manager is not None:
            event = events.RankLate(trainer.rank, late.key, late.step)
            self.cluster.network.message(trainer, manager, lambda: manager.handle(event), lambda: None)

    def vote(self, trainer: Trainer, vote: Round, yes: bool, *, leaving: bool = False, stands: bool = False) -> Waiter:
        waiter = Waiter()
        since_ms = self.clock.now_ms
        deadline_ms = since_ms + self.timeouts.timeout_ms
        first_manager = self.replica.manager
        world_size = self.replica.world_size
        self.invariants.voted(self.replica.host, trainer.rank, vote, yes)

        def attempt() -> None:
            def make(call: int) -> events.RankVoted:
                return events.RankVoted(
                    trainer.rank, call, vote.key, vote.step, vote.purpose, yes, deadline_ms, leaving, stands
                )

            def done(value: Any) -> None:
                if waiter.done:
                    return
                if isinstance(value, Verdict):
                    self.invariants.decided(self.replica.host, world_size, vote, value)
                    waiter.resolve(value)
                elif self.replica.manager is not first_manager or not (first_manager and first_manager.alive):
                    waiter.resolve(Refused("manager_died", fatal=world_size > 1))
                elif value.fatal:
                    waiter.resolve(value)
                else:
                    self.marks.hit("a vote was said again")
                    trainer.after(100, attempt)

            if not waiter.done:
                self.cluster.call(trainer, self.replica, make, done)

        def give_up() -> None:
            # No verdict in time: it neither steps nor goes on.
            if not waiter.done:
                self.cluster.ends.no_verdict(self.replica, trainer, since_ms)
            waiter.resolve(Refused("no_verdict", fatal=True))

        attempt()
        timer = trainer.after(self.timeouts.timeout_ms + 1_000, give_up)
        waiter.then(lambda _: timer.cancel())
        return waiter

    def group(self, key: QuorumKey, group_rank: int, members: tuple[str, ...], store: str) -> Group:
        return self.cluster.group(self.replica.job, key, group_rank, members, store)

    def is_unreachable(self, trainer: Trainer, replica_id: str) -> bool:
        return self.cluster.links.is_bad(trainer.replica_id, replica_id, Via.STATE)

    def is_silent(self, trainer: Trainer, replica_id: str) -> bool:
        replicas = [each for each in self.cluster.replicas.values() if each.replica_id == replica_id and not each.ended]
        return any(each.trainers[trainer.rank].is_silent_source for each in replicas)

    def snapshot_of(self, trainer: Trainer, replica_id: str, group_rank: int) -> Snapshot | None:
        for replica in self.cluster.replicas.values():
            if replica.replica_id == replica_id and not replica.ended:
                source = replica.trainers[group_rank]
                reached = source.state is State.RUNNING and not self.cluster.network.is_cut(source.name, trainer.name)
                return source.snapshot if reached else None
        return None

    def received(self, trainer: Trainer, num_bytes: int) -> None:
        if self.replica.manager is not None:
            self.replica.manager.session.healed(num_bytes)

    def step_ms(self, trainer: Trainer) -> int:
        return self.cluster.chance.step_ms(self.replica.name)

    def chunk_ms(self, trainer: Trainer) -> int:
        return self.cluster.chance.chunk_ms(trainer.name)

    def optimizer_raises(self, trainer: Trainer) -> bool:
        return self.cluster.chance.optimizer_raises(self.replica.name)

    def load_raises(self, trainer: Trainer) -> bool:
        return self.cluster.chance.load_raises(trainer.name)

    def hangs(self, trainer: Trainer) -> None:
        self.cluster.hangs.begins(self.replica, trainer)

    def note(self, trainer: Trainer, text: str) -> None:
        self.cluster.teller(trainer.name, text)

    def ended(self, trainer: Trainer, reason: str, answer: Refused | None = None) -> None:
        self.cluster.teller(trainer.name, f"ends: {reason}")
        trainer.phase = f"ended: {reason}"
        if trainer.left:
            self.cluster.trainer_left(self.replica, trainer)
            return
        assert answer is not None, f"{trainer.name} ends, and nobody has told it to"
        self.cluster.ends.ended(self.replica, trainer, reason, answer)
        self.marks.hit(f"a trainer ended itself: {reason}")
        self.cluster.kill_trainer(self.replica, trainer.rank, reason)
