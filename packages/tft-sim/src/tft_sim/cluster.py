"""A simulated cluster: one lighthouse, and replica groups of a manager server and its trainers.

The cores are the real ones. Around them, `lighthouse_process.py` and `manager_process.py` do the work of the gRPC
shells over the simulated network. Nothing here is random. Callers that want faults call the verbs (`kill`, `stop`,
`restart_lighthouse`…): `simulator.py` by chance, `scenario.py` by script.

Law of this file: the parts of a cluster, and the verbs. The choice of events belongs elsewhere.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from tft_coord.core import effects, events
from tft_coord.core.stops import STOPPED_MS
from tft_coord.core.stragglers import StragglerNotice
from tft_coord.core.types import (
    DrainComplete,
    LeaveRequest,
    LossNotice,
    Member,
    NewcomerAsks,
    Quorum,
    QuorumKey,
    QuorumNews,
    WaitsFor,
)
from tft_sim.clock import VirtualClock
from tft_sim.config import Chance, ClusterConfig, TrainerSettings
from tft_sim.end_truth import EndTruth
from tft_sim.foreign_process import ForeignLighthouseProcess
from tft_sim.group import SimulatedGroup
from tft_sim.hang_truth import HangTruth
from tft_sim.invariants import InvariantError, Invariants
from tft_sim.lighthouse_process import JOB, OTHER_JOB, LighthouseProcess, kind_of_loss
from tft_sim.links import Links
from tft_sim.loops import Loop
from tft_sim.loss_watch import LossWatch
from tft_sim.manager_process import ManagerProcess, Replica
from tft_sim.marks import Marks
from tft_sim.network import Network, Stream
from tft_sim.pace_truth import PaceTruth
from tft_sim.process import Process, State
from tft_sim.rank import Rank, SentBeat
from tft_sim.surroundings import Outside
from tft_sim.syncs import SyncLoop
from tft_sim.torchft_process import TorchftProcess
from tft_sim.trainer import Trainer
from tft_sim.waiting import Refused, Waiter

REASON_MARKS = (
    "joined",
    "is gone",
    "failed to commit",
    "asks for a new process group",
    "has a newer session",
    "has left",
    "can't be reached",
    "did not receive it",
)
STOP_REPORT_DELAY_MS = 2_000  # a report of a stop may be late by this much
_UNREACHABLE = Refused("unreachable", "the manager server can't be reached")


class Cluster:
    """A lighthouse, replica groups, a network and a clock.

    Args:
        config: parts and settings.
        chance: random or scripted values.
        on_end: called with a replica when one life of it has ended.
        on_line: called with every line of the trace.
        log_lines: number of trace lines that are kept for a message.
    """

    def __init__(
        self,
        config: ClusterConfig,
        chance: Chance,
        *,
        on_end: Callable[[Replica], None] | None = None,
        on_line: Callable[[str], None] | None = None,
        log_lines: int = 60,
    ) -> None:
        self.config = config
        self.chance = chance
        self.timeouts = config.timeouts
        self.clock = VirtualClock(budget_events=config.budget_events)
        self.marks = Marks()
        self.network = Network(
            self.clock,
            chance.network,
            self.marks,
            delay_ms=config.delay_ms,
            keepalive_ms=self.timeouts.heartbeat_timeout_ms,
            extra_rng=chance.extra,
        )
        self.network.on_mend = self._retry_groups
        self.links = Links()
        self.links.on_change = self._retry_groups
        self.wall_offset_ms = 0  # offset by which the wall clock was set
        self._invariants: dict[str, Invariants] = {}
        self.losses = LossWatch(self)
        self.hangs = HangTruth(self)
        self.paces = PaceTruth(self)
        self.ends = EndTruth(self)
        self.replicas: dict[str, Replica] = {}
        self.torchft: dict[str, TorchftProcess] = {}
        self.lives: list[Replica] = []  # all lives that were ever started
        self.log: deque[str] = deque(maxlen=log_lines)
        self.deciding = ""  # the lighthouse whose decisions are being reported now
        self.on_foreign_quorum: Callable[[Quorum], None] = lambda _: None
        self.on_effect: Callable[[effects.LighthouseEffect], None] = lambda _: None
        self.on_note: Callable[[str, str], None] = lambda _name, _text: None
        self.num_lighthouses = 0
        self._on_end = on_end
        self._on_line = on_line
        self._lives: dict[str, int] = {}
        self._answers: set[tuple[str, QuorumKey, tuple[Member, ...]]] = set()
        self._groups: dict[tuple[QuorumKey, int], SimulatedGroup] = {}
        self.calls = itertools.count(1)
        self._digest = hashlib.blake2b(digest_size=16)
        self.lighthouse = self._new_lighthouse()
        self.standby = self._new_lighthouse("lighthouse2") if config.standby else None

    @property
    def wall_ms(self) -> int:
        """Return the milliseconds since 1970, in the simulation."""
        return self.config.wall_start_ms + self.clock.now_ms + self.wall_offset_ms

    @property
    def jobs(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the replica groups of each job."""
        others = {OTHER_JOB: self.config.other_names} if self.config.other_names else {}
        return {JOB: self.config.names, **others}

    @property
    def invariants(self) -> Invariants:
        """Return the invariants of the first job."""
        return self.invariants_of(JOB)

    def invariants_of(self, job: str) -> Invariants:
        """Return the invariants of a job."""
        if job not in self._invariants:
            self._invariants[job] = Invariants(
                initial_step=self.config.trainers.step, several_lighthouses=self.config.standby != ""
            )
        return self._invariants[job]

    @property
    def trace_digest(self) -> str:
        """Return the digest of every event and effect so far."""
        return self._digest.hexdigest()

    def trace(self, who: str, what: object) -> None:
        """Append an event to the trace."""
        line = f"{self.clock.now_ms} {who} {what!r}"
        self._digest.update(line.encode())
        self.log.append(line)
        if self._on_line is not None:
            self._on_line(line)

    def watch(self, order: effects.LighthouseEffect) -> None:
        """Check an effect that the lighthouse decides, and hit its marks."""
        match order:
            case effects.QuorumFormed():
                self.invariants_of(order.job).formed(order.quorum)
                if order.previous is None:
                    self.invariants_of(order.job).started_over(order.quorum, durable=self.config.durable)
                self.paces.formed(order.job, order.quorum, order.previous)
                self._check_jobs(order)
                self.marks.hit("a quorum was formed")
                if order.previous is not None and len(order.quorum.members) < len(order.previous.members):
                    self.marks.hit("a quorum shrank")
                if order.previous is not None and order.previous.lease_ms:
                    both = set(order.previous.replica_ids).intersection(order.quorum.replica_ids)
                    if 0 < len(both) < len(order.previous.replica_ids):
                        self.marks.hit("some members of a standing quorum went on without the others")
                for words in REASON_MARKS:
                    if words in order.reason:
                        self.marks.hit(f"new id: {words}")
                if order.reason.count(" joined") > 1:
                    self.marks.hit("new id: two joined at once")
                if order.previous is not None and order.previous.replica_ids == order.quorum.replica_ids:
                    self.marks.hit("the same list got a new id")
            case effects.AnswerQuorum():
                replica = self.replica_of_stream(order.stream)
                if replica is not None:
                    self.invariants_of(replica.job).answered(replica.replica_id, order.quorum)
                    answer = (replica.replica_id, order.quorum.key, order.quorum.members)
                    if answer in self._answers:
                        self.marks.hit("an answer was given again")
                    self._answers.add(answer)
            case effects.AnswerUnchanged():
                self.marks.hit("unchanged was answered")
            case effects.AskForQuorum():
                self.marks.hit("a lighthouse without memory asked for a quorum")
            case effects.ReplicaLost():
                self.marks.hit(f"lost: {kind_of_loss(order.reason)}")
            case effects.ReplicaLeft():
                self.marks.hit("a replica left")
            case effects.JobEnded():
                self.marks.hit("a job ended")
            case effects.RefuseSession():
                self.marks.hit(f"refused: {order.refusal.value}")
            case effects.RefuseRequest():
                self.marks.hit(f"request refused: {order.refusal.value}")
        self.on_effect(order)

    def replica_of_stream(self, number: int) -> Replica | None:
        """Return the replica whose manager server holds that stream to the lighthouse."""
        for replica in self.replicas.values():
            manager = replica.manager
            if manager is not None and manager.stream_number == number:
                return replica
        return None

    def _check_jobs(self, order: effects.QuorumFormed) -> None:
        """Check that jobs don't mix in a quorum, and hit the marks for torn members and states of unknown lineage."""
        if order.job == OTHER_JOB:
            self.marks.hit("another job formed a quorum")
        for member in order.quorum.members:
            job = self._job_of(member.replica_id.split(":")[0])
            if job != order.job:
                whose = f"quorum {order.quorum.key} of job {order.job}"
                raise InvariantError("I2", f"{member.replica_id} of job {job} is in {whose}")
            if member.torn:
                self.marks.hit("a torn group was in a quorum")
        highest = max(member.step for member in order.quorum.members)
        unknown = [member for member in order.quorum.members if member.step == highest and member.lineage is None]
        if highest > 0 and len(unknown) > 1:
            self.marks.hit("loaded states of one step met")

    def _job_of(self, name: str) -> str:
        return OTHER_JOB if name in self.config.other_names else JOB

    # --- verbs --------------------------------------------------------------------------------------------------------

    def foreign_formed(self, quorum: Quorum) -> None:
        """Record a quorum that torchft's lighthouse gives to all its members."""
        self.marks.hit("a foreign lighthouse formed a quorum")
        self.on_foreign_quorum(quorum)

    @property
    def is_foreign(self) -> bool:
        """Return whether the lighthouse is torchft's."""
        return isinstance(self.lighthouse, ForeignLighthouseProcess)

    @property
    def our_lighthouse(self) -> LighthouseProcess:
        """Return the lighthouse, in a cluster where it is not torchft's."""
        assert isinstance(self.lighthouse, LighthouseProcess)
        return self.lighthouse

    def lighthouse_at(self, address: int) -> LighthouseProcess | ForeignLighthouseProcess:
        """Return the lighthouse at that address of the list."""
        if address == 0:
            return self.lighthouse
        assert self.standby is not None
        return self.standby

    def _new_lighthouse(self, name: str = "lighthouse") -> LighthouseProcess | ForeignLighthouseProcess:
        self.num_lighthouses += 1
        for invariants in self._invariants.values():
            if invariants.lighthouse_started(self.wall_ms):
                self.marks.hit("a lighthouse started before its predecessor's ids")
        kind = ForeignLighthouseProcess if self.config.foreign else LighthouseProcess
        lighthouse = kind(self, self.num_lighthouses, name)
        lighthouse.start()
        self.paces.forget()
        return lighthouse

    def start(
        self,
        name: str,
        *,
        settings: TrainerSettings | None = None,
        replaces: str = "",
        loading: bool = False,
        twin_of: str = "",
        world_size: int = 0,
    ) -> Replica:
        """Start the next life of that replica group.

        Args:
            name: of the group.
            settings: of its trainers, if they differ from the job's.
            replaces: the replica id that it replaces.
            loading: the caller starts its trainers.
            twin_of: by mistake, the replica has the replica id of that group's life.
            world_size: number of its ranks, if it differs from that of the job's groups.
        """
        life = self._lives[name] = self._lives.get(name, 0) + 1
        replica = Replica(name, f"{name}:{life}", replaces, life, self._job_of(name))
        if twin_of:
            first = self.replicas[twin_of]
            self.invariants_of(first.job).twin_started(first.replica_id)
            replica = Replica(name, first.replica_id, replaces, life, first.job, elsewhere=name)
        replica.world_size = world_size or self.config.world_size
        self.replicas[name] = replica
        self.lives.append(replica)
        self.start_manager(replica)
        chosen = settings if settings is not None else self.config.trainers
        for rank in range(replica.world_size):
            replica.trainers.append(
                Trainer(
                    replica.job,
                    replica.replica_id,
                    rank,
                    replica.world_size,
                    chosen,
                    Outside(self, replica),
                    host=replica.host,
                )
            )
        for trainer in replica.trainers:
            self.connect_rank(replica, trainer)
            if not loading:
                self.train(trainer)
        return replica

    def train(self, trainer: Trainer) -> None:
        """Start a trainer's training loop."""
        loop = SyncLoop(trainer) if trainer.settings.num_fragments > 0 else Loop(trainer)
        trainer.spawn(loop.run())

    def start_torchft(self, name: str, *, step: int = 0) -> TorchftProcess:
        """Start a torchft replica group that has trained up to that step."""
        process = self.torchft[name] = TorchftProcess(self, name, step)
        process.start()
        return process

    def start_manager(self, replica: Replica) -> None:
        """Start a manager server, the first one or a successor after its death."""
        manager = ManagerProcess(self, replica, replica.num_managers, self.wall_ms)
        replica.num_managers += 1
        replica.manager = manager
        manager.start()

    def connect_rank(self, replica: Replica, trainer: Trainer) -> None:
        """Open a rank's stream to its manager server, and reopen it whenever it breaks."""
        manager = replica.manager
        if manager is None or not trainer.alive:
            return

        def again() -> None:
            trainer.after(50, lambda: self.connect_rank(replica, trainer))

        def opened(stream: Stream) -> None:
            stream.listen(trainer, heard, again)
            self._beat(trainer, stream)
            if self.config.probes and not self.is_foreign:
                trainer.report_long_wait = lambda: self._say_where(trainer, stream, extra=True)

        def heard(
            news: LossNotice
            | NewcomerAsks
            | LeaveRequest
            | DrainComplete
            | WaitsFor
            | StragglerNotice
            | QuorumNews
            | effects.TellGroupLost,
        ) -> None:
            match news:
                case QuorumNews():
                    trainer.quorum_announced(news)
                case NewcomerAsks(replica_id):
                    trainer.recovery.newcomer_announced(replica_id)
                case effects.TellGroupLost(_, message):
                    trainer.group_lost(message)
                case LeaveRequest():
                    trainer.leave()
                case DrainComplete():
                    replica.released = True
                case WaitsFor():
                    pass  # this is for logs alone
                case StragglerNotice():
                    trainer.pace_announced(news)
                case notice:
                    self.losses.loss_announced(trainer, notice)
                    trainer.loss_announced(notice)

        self.network.dial(
            trainer,
            manager,
            accepted=lambda stream: manager.rank_connected(trainer.rank, stream, replica.life),
            opened=opened,
            failed=again,
        )

    def _beat(self, trainer: Trainer, stream: Stream) -> None:
        """Send a rank's position in its step once a beat, for as long as its stream is open."""
        if stream.open:
            self._say_where(trainer, stream, number=trainer.number_beat())
            trainer.check_waits()
            trainer.after(self.timeouts.beat_interval_ms, lambda: self._beat(trainer, stream))

    def _say_where(self, trainer: Trainer, stream: Stream, *, extra: bool = False, number: int = 0) -> None:
        beat = SentBeat(trainer.progress(), self.clock.now_ms, trainer.phase_since_ms, number)
        stream.send(trainer, beat, extra=extra)

    def is_local(self, trainer: Trainer) -> bool:
        """Return whether a rank runs on its manager server's host."""
        return trainer.rank == 0 or self.config.ranks_together

    def was_stopped(self, replica_id: str, for_ms: int = STOPPED_MS) -> bool:
        """Return whether a local rank of the replica is or was recently stopped for at least that time."""
        ranks = [each for life in self.lives if life.replica_id == replica_id for each in life.trainers]
        for each in ranks:
            stops = [each.stop_seen_ms]
            if each.state is State.STOPPED and not each.is_seen_running:
                stops.append((each.stopped_since_ms, self.clock.now_ms))
            for since_ms, until_ms in stops if self.is_local(each) else ():
                if self.clock.now_ms - until_ms < STOP_REPORT_DELAY_MS and until_ms - since_ms >= for_ms:
                    return True
        return False

    def end_process(self, process: Process, *, vanish: bool = False) -> None:
        """End one process, and let the network show its end."""
        if process.alive:
            self.trace(process.name, "vanishes" if vanish else "ends")
            process.end(vanish=vanish)
            self.network.ended(process)
            if isinstance(process, ManagerProcess) and not vanish:
                for action in process.on_end:
                    action()

    def kill_trainer(self, replica: Replica, rank: int, reason: str = "killed by signal 9") -> None:
        """Kill a trainer with kill -9. The manager server learns of rank 0's end by pipe, of another's by its
        stream."""
        trainer = replica.trainers[rank]
        self.end_process(trainer)
        manager = replica.manager
        if rank == 0 and manager is not None:
            manager.after(1, lambda: manager.handle(events.RankDied(rank=0, reason=reason)))
        self._finish(replica, f"rank {rank} {reason}")

    def kill_manager(self, replica: Replica) -> None:
        """Kill a manager server with kill -9. A group of one rank starts another one. A larger group ends."""
        if replica.manager is not None:
            self.manager_exits(replica.manager)

    def manager_exits(self, manager: ManagerProcess) -> None:
        """End a manager server: it was killed, or it exits after it has reported a loss."""
        replica = manager.replica
        if not manager.alive or replica.manager is not manager:
            return
        self.end_process(manager)
        if replica.world_size == 1 and replica.alive:
            replica.manager = None
            trainer = replica.trainers[0]

            def successor() -> None:
                self.invariants_of(replica.job).manager_restarted(replica.host, trainer.held)
                self.start_manager(replica)
                self.connect_rank(replica, trainer)

            trainer.after(200, successor)
        else:
            self._finish(replica, "its manager server died")

    def vanish(self, replica: Replica) -> None:
        """Remove the hosts of a replica group. No process reports the loss."""
        for process in replica.processes():
            self.end_process(process, vanish=True)
        self._finish(replica, "its host vanished")

    def vanish_rank(self, replica: Replica, rank: int) -> None:
        """Remove the host of one rank. Its manager server, or the group's supervisor, detects the loss."""
        self.end_process(replica.trainers[rank], vanish=True)
        patience_ms = 2 * self.timeouts.heartbeat_timeout_ms + self.timeouts.reconnect_grace_ms
        self.clock.after(patience_ms, lambda: self._finish(replica, f"rank {rank}'s host vanished"))

    def trainer_left(self, replica: Replica, trainer: Rank) -> None:
        """End a rank that has left. The manager server ends with the last rank, and reports a clean shutdown."""
        trainer.leave_group()
        if all(each.phase == "ended: left" or not each.alive for each in replica.trainers):
            manager = replica.manager
            if manager is not None:
                for rank in range(replica.world_size):
                    manager.handle(events.RankDied(rank=rank, reason="it was shut down", left=True))
            self._finish(replica, "left")

    def drain(self, name: str) -> None:
        """Ask the lighthouse to let this group leave, as an operator does."""
        replica = self.replicas[name]
        order = events.DrainRequested(0, replica.job, replica.replica_id, "it is drained")
        self.our_lighthouse.drain(order)

    def shut_down(self, replica: Replica, reason: str) -> None:
        """End the rest of a replica group."""
        self._finish(replica, reason)

    def block_reductions(self) -> None:
        """Let no reduction of the newest quorum end any more."""
        if self.is_foreign:
            return
        quorum = self.our_lighthouse.core.quorum(JOB)
        if quorum is not None:
            for (key, _), group in self._groups.items():
                group.is_blocked = group.is_blocked or key == quorum.key
            self.hangs.reductions_blocked(quorum.key)

    def unblock_reductions(self) -> None:
        """Let all reductions end again."""
        for group in self._groups.values():
            if group.is_blocked:
                group.is_blocked = False
                group.update()

    def restart_lighthouse(self, after_ms: int) -> None:
        """Kill the lighthouse, and start another one with an empty memory at its address."""
        self.end_process(self.lighthouse)
        self.clock.after(after_ms, self.revive_lighthouse)

    def revive_lighthouse(self) -> None:
        """Start a lighthouse if none is alive."""
        if not self.lighthouse.alive:
            self.trace("lighthouse", "starts")
            self.lighthouse = self._new_lighthouse()

    def _finish(self, replica: Replica, reason: str) -> None:
        """End one life. Its remaining processes end soon after."""
        if replica.ended:
            return
        replica.ended = reason
        self.trace(replica.replica_id, f"ended: {reason}")

        def sweep() -> None:
            for process in replica.processes():
                process.resume()
                self.end_process(process)

        self.clock.after(self.timeouts.reconnect_grace_ms + 100, sweep)
        if self._on_end is not None:
            self._on_end(replica)

    # --- for the trainers ---------------------------------------------------------------------------------------------

    def group(self, job: str, key: QuorumKey, group_rank: int, members: tuple[str, ...], store: str) -> SimulatedGroup:
        """Return the group of that name. The first caller creates it."""
        name = (key, group_rank)
        if name not in self._groups:

            def is_cut(one: str, other: str) -> bool:
                return self.network.is_cut(f"{one}/{group_rank}", f"{other}/{group_rank}")

            self._groups[name] = SimulatedGroup(
                key,
                group_rank,
                members,
                self.clock,
                self.invariants_of(job),
                self.chance.spread_ms,
                is_cut,
                self.links,
                store,
            )
        return self._groups[name]

    def _retry_groups(self) -> None:
        """Let groups that were cut apart go on."""
        for replica in self.replicas.values():
            for trainer in replica.trainers:
                if trainer.group is not None:
                    trainer.group.update()

    def call(
        self,
        trainer: Rank,
        replica: Replica,
        make: Callable[[int], events.RankAsked | events.RankVoted | events.RankLeft],
        done: Callable[[Any], None],
    ) -> int:
        """Send a unary call of a trainer to its manager server. `done` receives the answer, or Refused, once."""
        call = next(self.calls)
        manager = replica.manager
        if manager is None:
            trainer.after(1, lambda: done(_UNREACHABLE))
            return call
        outcome = Waiter()
        outcome.then(done)

        def fail() -> None:
            trainer.run(lambda: outcome.resolve(_UNREACHABLE))

        def lost_answer() -> None:
            # The connection broke under the answer, so both ends learn of it.
            self.marks.hit("an answer of a manager server was lost")
            fail()

        numbers = itertools.chain([call], self.calls)
        num_requests = trainer.num_requests

        def arrived() -> None:
            number = next(numbers)
            if number == call:
                manager.called(
                    make(number),
                    lambda value: self.network.message(manager, trainer, partial(outcome.resolve, value), lost_answer),
                )
            elif trainer.num_requests == num_requests:
                # The client has given up this attempt for another. The server hears the attempt before the end of its
                # connection, but not as late as in the rank's next step.
                again = make(number)
                manager.called(again, lambda _: None)
                manager.after(1, lambda: manager.handle(events.RankWithdrew(again.rank, number)))

        manager.on_end.append(lambda: outcome.done or self.clock.after(1, fail))
        self.network.message(trainer, manager, arrived, fail)
        return call
