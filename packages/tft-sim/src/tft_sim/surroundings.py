"""The surroundings of a simulated replica group's trainers: their manager server, groups and snapshots.

Law of this file: what a trainer finds, over a cluster. Decisions belong elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from tft_coord.core import events
from tft_coord.core.step import effects as do
from tft_coord.core.types import QuorumKey, RankRequest, Verdict, Via
from tft_coord.timeouts import Timeouts
from tft_sim.clock import VirtualClock
from tft_sim.config import Chance
from tft_sim.group import SimulatedGroup
from tft_sim.invariants import Invariants, Round
from tft_sim.links import Links
from tft_sim.manager_process import Replica
from tft_sim.marks import Marks
from tft_sim.parts import Parts
from tft_sim.process import State
from tft_sim.rank import Rank, Source
from tft_sim.waiting import Refused, Waiter

LEAVE_TIMEOUT_MS = 1_000


class Ends(Protocol):
    """The watch over ends, as a rank reports to it."""

    def requested(self, trainer: Rank, request: RankRequest) -> None: ...
    def gave_up(self, replica: Replica, trainer: Rank, answer: Refused, deadline_ms: int) -> None: ...
    def no_verdict(self, replica: Replica, trainer: Rank, since_ms: int) -> None: ...
    def ended(self, replica: Replica, trainer: Rank, reason: str, answer: Refused) -> None: ...


class Hangs(Protocol):
    """The watch over hangs, as a rank reports to it."""

    def hang_began(self, replica: Replica, trainer: Rank) -> None: ...


class World(Parts, Protocol):
    """The cluster, as the surroundings of a rank use it."""

    @property
    def chance(self) -> Chance: ...
    @property
    def links(self) -> Links: ...
    @property
    def replicas(self) -> Mapping[str, Replica]: ...
    @property
    def on_note(self) -> Callable[[str, str], None]: ...
    @property
    def hangs(self) -> Hangs: ...
    @property
    def ends(self) -> Ends: ...
    def call(
        self,
        trainer: Rank,
        replica: Replica,
        make: Callable[[int], events.RankAsked | events.RankVoted | events.RankLeft],
        done: Callable[[Any], None],
    ) -> int: ...
    def group(
        self, job: str, key: QuorumKey, group_rank: int, members: tuple[str, ...], store: str
    ) -> SimulatedGroup: ...
    def invariants_of(self, job: str) -> Invariants: ...
    def kill_trainer(self, replica: Replica, rank: int, reason: str = ...) -> None: ...
    def trainer_left(self, replica: Replica, trainer: Rank) -> None: ...


@dataclass(slots=True)
class Outside:
    """The surroundings of one replica's trainers."""

    cluster: World
    replica: Replica
    fingerprint_holders: dict[int, object] = field(
        default_factory=dict
    )  # the manager server that has a rank's fingerprint

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

    @property
    def chance(self) -> Chance:
        return self.cluster.chance

    @property
    def name(self) -> str:
        """Return the name of the replica group."""
        return self.replica.name

    def own_ms(self) -> int:
        """Return the time by the trainer's own clock, which its lease follows."""
        now_ms = self.clock.now_ms
        if not self.cluster.config.slow_clocks:
            return now_ms
        self.marks.hit("a lease was judged by a slow clock")
        return now_ms - now_ms // 100

    def ask(self, trainer: Rank, request: RankRequest, deadline_ms: int) -> Waiter:
        """Ask the manager server for a quorum.

        Returns: a waiter that resolves to a Plan, to a QuorumKey (unchanged), or to Refused. None: a new manager server
            serves, which holds no quorum.
        """
        waiter = Waiter()
        first = self.replica.manager
        calls: list[int] = []
        self.cluster.ends.requested(trainer, request)

        def attempt() -> None:
            manager = self.replica.manager
            if manager is not None and first is not None and manager is not first and not first.alive:
                waiter.resolve(None)
                return

            def make(call: int) -> events.RankAsked:
                fingerprint_holders = self.fingerprint_holders.get(trainer.rank) is manager
                fingerprint = () if fingerprint_holders else trainer.fingerprint
                return events.RankAsked(trainer.rank, call, replace(request, fingerprint=fingerprint), deadline_ms)

            def done(value: Any) -> None:
                if isinstance(value, Refused) and value.code == "unreachable" and self.clock.now_ms < deadline_ms:
                    if not waiter.done and trainer.alive:
                        trainer.after(100, attempt)
                else:
                    if isinstance(value, Refused):
                        self.cluster.ends.gave_up(self.replica, trainer, value, deadline_ms)
                    else:
                        self.fingerprint_holders[trainer.rank] = manager
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
        timer = trainer.after(max(0, deadline_ms - self.clock.now_ms), give_up)
        waiter.then(lambda _: timer.cancel())
        return waiter

    def leave(self, trainer: Rank, order: do.TellLeaving) -> Waiter:
        """Leave the job. The waiter resolves when the manager server has recorded it, or to None."""
        waiter = Waiter()

        def make(call: int) -> events.RankLeft:
            return events.RankLeft(trainer.rank, call, order.reason, order.serve_ms, order.finished_step)

        self.cluster.call(trainer, self.replica, make, lambda value: waiter.resolve(value))
        timer = trainer.after(LEAVE_TIMEOUT_MS, lambda: waiter.resolve(None))
        waiter.then(lambda _: timer.cancel())
        return waiter

    def is_healed_from(self, trainer: Rank) -> bool:
        return not self.replica.released

    def report_late(self, trainer: Rank, key: QuorumKey, step: int) -> None:
        """Tell the manager server that a round waits for a member for longer than `join_timeout`."""
        manager = self.replica.manager
        if manager is not None:
            event = events.RankLate(trainer.rank, key, step)
            self.cluster.network.message(trainer, manager, lambda: manager.handle(event), lambda: None)

    def _decides_alone(self, trainer: Rank) -> bool:
        """Return whether the rank decides its vote by itself, as `GroupCoordinator.vote` does."""
        decides = trainer.settings.decides_alone and self.replica.world_size == 1
        return decides and trainer.plan is not None and trainer.plan.replica_world_size > 1

    def vote(self, trainer: Rank, vote: Round, yes: bool, *, leaving: bool = False, stands: bool = False) -> Waiter:
        waiter = Waiter()
        since_ms = self.clock.now_ms
        deadline_ms = since_ms + self.timeouts.timeout_ms
        first_manager = self.replica.manager
        world_size = self.replica.world_size
        self.invariants.voted(self.replica.host, trainer.rank, vote, yes)
        if self._decides_alone(trainer):
            verdict = Verdict(yes, leaving, yes and stands)
            self.invariants.decided(self.replica.host, world_size, vote, verdict)
            waiter.resolve(verdict)
            return waiter

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
            # Without a verdict in time the trainer neither steps nor goes on.
            if not waiter.done:
                self.cluster.ends.no_verdict(self.replica, trainer, since_ms)
            waiter.resolve(Refused("no_verdict", fatal=True))

        attempt()
        timer = trainer.after(self.timeouts.timeout_ms + 1_000, give_up)
        waiter.then(lambda _: timer.cancel())
        return waiter

    def group(self, key: QuorumKey, group_rank: int, members: tuple[str, ...], store: str) -> SimulatedGroup:
        return self.cluster.group(self.replica.job, key, group_rank, members, store)

    def is_unreachable(self, trainer: Rank, replica_id: str) -> bool:
        return self.cluster.links.is_bad(trainer.replica_id, replica_id, Via.STATE)

    def is_silent(self, trainer: Rank, replica_id: str) -> bool:
        replicas = [each for each in self.cluster.replicas.values() if each.replica_id == replica_id and not each.ended]
        return any(each.trainers[trainer.rank].recovery.is_silent_source for each in replicas)

    def source(self, trainer: Rank, replica_id: str) -> Source | None:
        """Return what the replica gives to that rank, if it is reached."""
        for replica in self.cluster.replicas.values():
            if replica.replica_id == replica_id and not replica.ended:
                source = replica.trainers[trainer.rank]
                reached = source.state is State.RUNNING and not self.cluster.network.is_cut(source.name, trainer.name)
                return source.recovery if reached else None
        return None

    def is_received_from(self, trainer: Rank, key: QuorumKey) -> bool:
        """Return whether a running rank of another replica is receiving the state of that quorum from this rank."""
        ranks = (rank for replica in self.cluster.replicas.values() for rank in replica.trainers)
        running = (rank for rank in ranks if rank.rank == trainer.rank and rank.state is State.RUNNING)
        return any(rank.recovery.receives(self.replica.replica_id, key) for rank in running)

    def gather(self, trainer: Rank, name: str, value: str) -> Waiter:
        """Contribute a value. The waiter resolves to the values of all ranks of this group, or to None on timeout."""
        given = self.replica.gathered.setdefault(name, {})
        given[trainer.rank] = value, Waiter()
        if len(given) == self.replica.world_size:
            values = tuple(value for _, (value, _) in sorted(given.items()))
            for _, waiter in given.values():
                self.clock.after(1, partial(waiter.resolve, values))
        return trainer.within(given[trainer.rank][1], self.timeouts.timeout_ms)

    def received(self, trainer: Rank, num_bytes: int) -> None:
        if self.replica.manager is not None:
            self.replica.manager.session.healed(num_bytes)

    def hangs(self, trainer: Rank) -> None:
        self.cluster.hangs.hang_began(self.replica, trainer)

    def note(self, trainer: Rank, text: str) -> None:
        self.cluster.on_note(trainer.name, text)

    def ended(self, trainer: Rank, reason: str, answer: Refused | None = None) -> None:
        self.cluster.on_note(trainer.name, f"ends: {reason}")
        trainer.phase = f"ended: {reason}"
        if trainer.left:
            self.cluster.trainer_left(self.replica, trainer)
            return
        assert answer is not None, f"{trainer.name} ends, and nobody has told it to"
        self.cluster.ends.ended(self.replica, trainer, reason, answer)
        self.marks.hit(f"a trainer ended itself: {reason}")
        self.cluster.kill_trainer(self.replica, trainer.rank, reason)
