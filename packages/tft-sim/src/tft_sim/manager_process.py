"""A manager server of a simulated cluster: the session core and the group core behind the simulated network.

Law of this file: the work of the manager server's gRPC shell. Decisions belong elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from tft_coord.compat.replica_group import (
    BEAT_INTERVAL_MS,
    CallQuorum,
    CancelCall,
    TellGroup,
    TorchftEffect,
    TorchftGroupCore,
)
from tft_coord.core import effects, events
from tft_coord.core.replica_group import ReplicaGroupCore
from tft_coord.core.session import (
    Dial,
    GiveUp,
    HangUp,
    Look,
    Say,
    SendBeat,
    SendHello,
    SendLeave,
    SendRequest,
    SendWithdraw,
    SessionCore,
)
from tft_coord.core.session import SessionEffect as _SessionEffect
from tft_coord.core.stops import LOOK_EVERY_MS
from tft_coord.core.types import Hello, NewcomerAsks, Quorum, Refusal, Unreached, Via
from tft_sim.clock import Timer
from tft_sim.config import Chance
from tft_sim.foreign_process import ForeignLighthouseProcess, Unimplemented
from tft_sim.invariants import Invariants
from tft_sim.lighthouse_process import JOB, LighthouseProcess
from tft_sim.links import FAILS_AFTER_MS, Links
from tft_sim.network import Stream
from tft_sim.parts import Parts
from tft_sim.process import Process, State
from tft_sim.rank import Rank, SentBeat
from tft_sim.trainer import Trainer
from tft_sim.waiting import Refused, Waiter

TRIAL_MS = 5  # duration of a trial in which all peers answer
FATAL_CODES = frozenset(
    {
        "group_lost",
        Refusal.DEAD.value,
        Refusal.AHEAD.value,
        Refusal.DUPLICATE.value,
        Refusal.MALFORMED.value,
        Refusal.OTHER_KIND.value,
        Refusal.DIFFERS.value,
        Refusal.OVER.value,
    }
)


@dataclass(slots=True)
class Replica:
    """One life of a replica group, number `life`: its manager server and its trainers."""

    name: str
    replica_id: str
    replaces: str
    life: int
    job: str = JOB
    manager: ManagerProcess | None = None
    trainers: list[Trainer] = field(default_factory=list)
    num_managers: int = 0
    ended: str = ""
    elsewhere: str = ""
    world_size: int = 1
    released: bool = False  # the replica has left, and no peer heals from it
    # values of its ranks, under each name
    gathered: dict[str, dict[int, tuple[str, Waiter]]] = field(default_factory=dict)

    @property
    def host(self) -> str:
        """Return the name prefix of its processes. A second process with that replica id runs elsewhere."""
        return self.replica_id + (f"@{self.elsewhere}" if self.elsewhere else "")

    @property
    def alive(self) -> bool:
        """Return whether all its trainers exist."""
        return not self.ended and all(trainer.alive for trainer in self.trainers)

    def processes(self) -> list[Process]:
        """Return all its processes, the manager server first."""
        managers: list[Process] = [self.manager] if self.manager is not None else []
        return [*managers, *self.trainers]


class Ends(Protocol):
    """The watch over ends, as a manager server reports to it."""

    def rank_stream_closed(self, manager: ManagerProcess, rank: int) -> None: ...
    def rank_stream_opened(self, manager: ManagerProcess, rank: int) -> None: ...
    def quorum_received(self, manager: ManagerProcess, quorum: Quorum) -> None: ...
    def death_reported(self, manager: ManagerProcess, reason: str) -> None: ...


class Hangs(Protocol):
    """The watch over hangs, as a manager server reports to it."""

    def beat_received(self, trainer: Rank, stream: int, beat: SentBeat) -> None: ...
    def session_opened(self, manager: ManagerProcess, hello: Hello) -> None: ...


class World(Parts, Protocol):
    """The cluster, as a manager server sees it."""

    @property
    def chance(self) -> Chance: ...
    @property
    def links(self) -> Links: ...
    @property
    def hangs(self) -> Hangs: ...
    @property
    def ends(self) -> Ends: ...
    def trace(self, who: str, what: object) -> None: ...
    def is_local(self, trainer: Trainer) -> bool: ...
    def invariants_of(self, job: str) -> Invariants: ...
    def lighthouse_at(self, address: int) -> LighthouseProcess | ForeignLighthouseProcess: ...
    def manager_exits(self, manager: ManagerProcess) -> None: ...


class ManagerProcess(Process):
    """The shell of a manager server: a session core and a group core."""

    def __init__(self, cluster: World, replica: Replica, number: int, session: int) -> None:
        super().__init__(f"{replica.host}/manager{number or ''}", cluster.clock)
        self.replica = replica
        self.address = f"{self.name}:1"
        self.group = ReplicaGroupCore(
            replica_id=replica.replica_id,
            address=self.address,
            store_address=f"{replica.replica_id}/store:1",
            world_size=replica.world_size,
            timeouts=cluster.timeouts,
        )
        self.session = SessionCore(
            job=replica.job,
            replica_id=replica.replica_id,
            address=self.address,
            session=session,
            timeouts=cluster.timeouts,
            jitter=cluster.chance.jitter,
            replaces=replica.replaces,
            num_addresses=2 if cluster.config.standby else 1,
            answers_probes=cluster.config.probes,
            tries_peers=cluster.config.trials,
        )
        self._rank_check: Timer | None = None
        self.foreign = TorchftGroupCore(
            job=replica.job, replica_id=replica.replica_id, timeouts=cluster.timeouts, words=cluster.chance.words
        )
        self._on_foreign = False  # the stream is a connection to torchft's lighthouse
        self._cluster = cluster
        self._stream: Stream | None = None
        self._ranks: dict[int, Stream] = {}
        self._answers: dict[int, Callable[[Any], None]] = {}
        self._deadline: Timer | None = None
        self._beat: Timer | None = None
        self._leaving = False
        self._open_request: int | None = None
        self.on_end: list[Callable[[], object]] = []  # make the calls fail that wait in this server

    @property
    def stream_number(self) -> int | None:
        """Return the number of its stream to the lighthouse."""
        return self._stream.number if self._stream is not None else None

    def rank_since_ms(self, rank: int) -> int | None:
        """Return the time since which the rank's stream is open, or None. This end may not know yet that it has
        broken."""
        stream = self._ranks.get(rank)
        return stream.open_since_ms if stream is not None and stream.open else None

    @property
    def lighthouse(self) -> Process | None:
        """Return the lighthouse that its stream goes to, or None."""
        return self._stream.server if self._stream is not None else None

    def lighthouse_since_ms(self) -> int | None:
        """Return the time since which its stream to the lighthouse is open, or None."""
        return self._stream.open_since_ms if self._stream is not None and self._stream.open else None

    def start(self) -> None:
        """Dial the lighthouse."""
        self._perform_session(self.session.start(self.clock.now_ms))

    # --- from the ranks ---------------------------------------------------------------------------------------------

    def rank_connected(self, rank: int, stream: Stream, session: int) -> None:
        """Register a rank's open stream. The rank's process has that session."""

        def closed() -> None:
            if self._ranks.get(rank) is stream:
                del self._ranks[rank]
                self._cluster.ends.rank_stream_closed(self, rank)
            self.handle(events.RankDisconnected(rank=rank, stream=stream.number))

        def progressed(beat: SentBeat) -> None:
            self._cluster.hangs.beat_received(self.replica.trainers[rank], stream.number, beat)
            self.handle(events.RankProgressed(rank, beat.progress))
            if beat.number:
                self.handle(events.RankBeat(rank, beat.number))

        self._ranks[rank] = stream
        self._cluster.ends.rank_stream_opened(self, rank)
        stream.listen(self, progressed, closed)
        self.handle(events.RankConnected(rank=rank, stream=stream.number, session=session))

    def called(
        self, event: events.RankAsked | events.RankVoted | events.RankLeft, answer: Callable[[Any], None]
    ) -> None:
        """Handle a rank's call. `answer` receives the core's decision."""
        self._answers[event.call] = answer
        self.handle(event)

    def handle(self, event: events.GroupEvent) -> None:
        """Pass an event to the group core, and perform its effects."""
        self._cluster.trace(self.name, event)
        now_ms = self.clock.now_ms
        if isinstance(event, events.QuorumArrived):
            self._cluster.ends.quorum_received(self, event.quorum)
        self._perform_group(self.group.handle(event, now_ms))
        if self.session.hangs and not self.group.is_hung(now_ms):
            self._cluster.marks.hit("a session that was held back was opened")
            self._perform_session(self.session.went_on(now_ms))
        self._set_deadline()
        if self._rank_check is None and self._cluster.config.probes and self.group.looks(now_ms):
            self._rank_check = self.after(0, self._check_ranks)

    def _check_ranks(self) -> None:
        """Check which ranks on this host are stopped, for as long as the core wants it."""
        self._rank_check = self.after(LOOK_EVERY_MS, self._check_ranks)
        self.handle(events.RanksLookedAt(self._stopped_ranks()))
        if not self.group.looks(self.clock.now_ms):
            self._rank_check.cancel()
            self._rank_check = None

    def _stopped_ranks(self) -> dict[int, bool]:
        local = [each for each in self.replica.trainers if each.alive and self._cluster.is_local(each)]
        return {each.rank: each.state is State.STOPPED and not each.is_seen_running for each in local}

    def _is_hung(self) -> bool:
        """Return whether a rank hangs or is stopped now."""
        if self._cluster.config.probes:
            self.handle(events.RanksLookedAt(self._stopped_ranks()))
        return self.group.is_hung(self.clock.now_ms)

    def _set_deadline(self) -> None:
        due_ms = self.group.next_deadline_ms()
        if self._deadline is not None:
            if self._deadline.action is not None and self._deadline.at_ms == due_ms:
                return
            self._deadline.cancel()
            self._deadline = None
        if due_ms is not None:
            self._deadline = self.clock.at(due_ms, lambda: self.run(self._deadline_passed))

    def _deadline_passed(self) -> None:
        self._deadline = None
        orders = self.group.tick(self.clock.now_ms)
        if any(isinstance(order, effects.AnswerVote) for order in orders):
            self._cluster.marks.hit("a deadline sealed a vote")
        self._perform_group(orders)
        self._set_deadline()

    def _perform_group(self, orders: list[effects.GroupEffect]) -> None:
        now_ms = self.clock.now_ms
        for order in orders:
            self._cluster.trace(self.name, order)
            match order:
                case effects.AskLighthouse():
                    self._open_request = order.request
                    self._perform_session(
                        self.session.ask(order.request, order.member, order.held, now_ms, order.fingerprint)
                    )
                    if self.session.refused is not None:
                        self._refuse_pending(self.session.refused)
                    if self._on_foreign:
                        self._ask_foreign()
                case effects.WithdrawFromLighthouse():
                    self._perform_foreign(self.foreign.withdraw(order.request))
                    self._perform_session(self.session.withdraw(order.request, now_ms))
                case effects.ReportDeath():
                    self._cluster.marks.hit("a manager server reported a death")
                    self._cluster.ends.death_reported(self, order.reason)
                    self.foreign.ended()
                    if order.reason.startswith("rank ") and not order.reason.startswith("rank 0"):
                        self._cluster.marks.hit("a manager server missed the stream of another rank")
                    if self._stream is not None:
                        self._stream.send(self, events.DeathReported(self._stream.number, order.reason))
                    if not self._leaving:
                        self._leaving = True
                        self.after(20, lambda: self._cluster.manager_exits(self))
                case effects.SayWaits():
                    progress = self.group.progress(now_ms)
                    if self._cluster.config.probes and not self._on_foreign:
                        self._perform_session(self.session.say_waits(progress), extra=True)
                case effects.ReportLate(key, step):
                    self._send(partial(events.LateReported, key=key, step=step))
                case effects.ReportStop(reason, stopped_ms, _, probe):
                    self._cluster.marks.hit("a manager server reported a stop")
                    answer = partial(events.ProbeAnswered, number=probe, stopped=reason, stopped_ms=stopped_ms)
                    self._send(answer, extra=True)
                case effects.AnswerPlan():
                    self._cluster.invariants_of(self.replica.job).planned_from(order.plan, order.quorum)
                    self._answer(order.call, order.plan)
                case effects.AnswerRankUnchanged():
                    self._answer(order.call, order.key)
                case effects.AnswerVote():
                    self._answer(order.call, order.verdict)
                case effects.FailRank():
                    self._answer(order.call, Refused(order.code, order.message, order.code in FATAL_CODES))
                case effects.NotifyRank():
                    if order.rank in self._ranks:
                        self._ranks[order.rank].send(self, order.notice)
                case effects.TellNewcomer():
                    if order.rank in self._ranks:
                        self._ranks[order.rank].send(self, NewcomerAsks(order.replica_id))
                case effects.TellRank():
                    if order.rank in self._ranks:
                        self._ranks[order.rank].send(self, order.news)
                case effects.LeaveJob():
                    self.foreign.ended()
                    self._perform_session(self.session.leave(order.reason, order.serve_ms, order.finished_step))
                case effects.TellGroupLost(rank, _, left):
                    self._cluster.marks.hit("a rank was told that its group is lost")
                    # A rank that said goodbye may be about to end. It learns of the loss if it asks.
                    if rank in self._ranks and not left:
                        self._ranks[rank].send(self, order)
                case effects.RefuseSession():
                    raise AssertionError(order.message)  # in the simulation no two processes have one rank

    def _answer(self, call: int, value: Any) -> None:
        answer = self._answers.pop(call, None)
        if answer is not None:
            answer(value)

    # --- to the lighthouse --------------------------------------------------------------------------------------------

    def _perform_session(self, orders: list[_SessionEffect], *, extra: bool = False) -> None:
        for order in orders:
            self._cluster.trace(self.name, order)
            match order:
                case Dial(at_ms, address):
                    self.clock.at(at_ms, partial(self.run, partial(self._dial, address)))
                case Look(address):
                    self._request_identity(address)
                case Say():
                    self._cluster.marks.hit("a lighthouse of another cluster was found")
                case SendHello():
                    self._cluster.hangs.session_opened(self, order.hello)
                    self._send(partial(events.HelloReceived, hello=order.hello))
                case SendRequest():
                    asked = partial(events.QuorumRequested, request=order.request, member=order.member)
                    self._send(partial(asked, held=order.held, fingerprint=order.fingerprint))
                case SendWithdraw():
                    self._cluster.marks.hit("a request was withdrawn")
                    self._send(partial(events.RequestWithdrawn, request=order.request))
                case SendBeat():
                    beat = partial(events.BeatReceived, healed_bytes=order.healed_bytes, progress=order.progress)
                    self._send(partial(beat, waits=order.waits, number=order.number), extra=extra)
                case SendLeave():
                    left = partial(events.LeaveReceived, reason=order.reason, serve_ms=order.serve_ms)
                    self._send(partial(left, finished_step=order.finished_step))
                case HangUp():
                    stream, self._stream = self._stream, None
                    if stream is not None:
                        stream.close(self)
                        self._perform_session(self.session.stream_broke(self.clock.now_ms))
                case GiveUp():
                    self._cluster.marks.hit(f"a session was refused: {order.code}")
                    self._refuse_pending(order)

    # --- to torchft's lighthouse ------------------------------------------------------------------------------------

    def _foreign_lighthouse_found(self) -> None:
        self._perform_session(self.session.found_foreign())
        self._on_foreign = True
        if self.session.open_request is not None:
            self._ask_foreign()
        self._perform_foreign(self.foreign.opened())
        self._tick_foreign()

    def _ask_foreign(self) -> None:
        asked = self.session.open_request
        assert asked is not None
        now_ms = self.clock.now_ms
        orders = self.foreign.ask(asked.request, asked.member, asked.held, self.session.session, now_ms)
        self._perform_foreign(orders)

    def _tick_foreign(self) -> None:
        if self._on_foreign and self._stream is not None:
            if self.foreign.tick(self.clock.now_ms):
                self._stream.send(self, events.HeartbeatReceived(self.replica.replica_id))
            self.after(BEAT_INTERVAL_MS, self._tick_foreign)

    def _perform_foreign(self, orders: list[TorchftEffect]) -> None:
        for order in orders:
            self._cluster.trace(self.name, order)
            match order:
                case CallQuorum(call, member):
                    if self._stream is not None:
                        self._stream.send(self, events.UnaryQuorumRequested(call, member))
                case CancelCall(call):
                    if self._stream is not None:
                        self._stream.send(self, events.UnaryRequestWithdrawn(call))
                case TellGroup(event):
                    key = event.quorum.key if isinstance(event, events.QuorumArrived) else None
                    if key is not None and key == self.session.held:
                        self._cluster.marks.hit("a key stood on a foreign lighthouse")
                    if self.session.answered(event.request, key):
                        # The event is handled later, because the core must not be entered twice.
                        self.after(0, partial(self.handle, event))

    def _refuse_pending(self, refused: GiveUp) -> None:
        request = self._open_request
        if request is not None:
            # The event is handled later, because the core must not be entered twice.
            self.after(0, lambda: self.handle(events.RequestRefused(request, refused.code, refused.message)))

    def _send(self, make: Callable[[int], events.LighthouseEvent], *, extra: bool = False) -> None:
        if self._stream is not None:
            self._stream.send(self, make(self._stream.number), extra=extra)

    def _request_identity(self, address: int) -> None:
        """Ask another lighthouse for its identity."""
        lighthouse, network = self._cluster.lighthouse_at(address), self._cluster.network

        def asked() -> None:
            assert isinstance(lighthouse, LighthouseProcess)
            started_ms, cluster_id, jobs = lighthouse.identity()
            serves = self.replica.job in jobs
            network.message(
                lighthouse, self, lambda: self._identity_received(address, cluster_id, started_ms, serves), lambda: None
            )

        network.message(self, lighthouse, asked, lambda: None)

    def _identity_received(self, address: int, cluster_id: str, started_ms: int, serves: bool) -> None:
        orders = self.session.looked(address, cluster_id, started_ms, serves=serves)
        if HangUp() in orders:
            self._cluster.marks.hit("a replica followed to a newer lighthouse")
        self._perform_session(orders)

    def _try_peers(self, order: effects.TryPeers) -> None:
        """Dial these members. A bad link to one of them is found after a while."""
        links, marks = self._cluster.links, self._cluster.marks
        unreached = tuple(
            Unreached(peer.replica_id, Via.GROUP, "no answer")
            for peer in order.peers
            if links.is_bad(self.replica.replica_id, peer.replica_id, Via.GROUP)
        )
        marks.hit("a newcomer failed its trial" if unreached else "a newcomer passed its trial")
        stream = self._stream

        def over() -> None:
            if stream is self._stream:
                self._send(lambda number: events.PeersTried(number, order.number, unreached))

        self.after(FAILS_AFTER_MS if unreached else TRIAL_MS, over)

    def _dial(self, address: int) -> None:
        lighthouse = self._cluster.lighthouse_at(address)
        self._cluster.network.dial(
            self, lighthouse, accepted=lighthouse.accepted, opened=self._opened, failed=self._dial_failed
        )

    def _opened(self, stream: Stream) -> None:
        self._stream, self._on_foreign = stream, False
        stream.listen(self, self._heard, lambda: self._stream_closed(stream))
        self._perform_session(self.session.stream_opened(self.clock.now_ms))
        self._tick_session()

    def _dial_failed(self) -> None:
        self._perform_session(self.session.stream_broke(self.clock.now_ms))

    def _stream_closed(self, stream: Stream) -> None:
        if self._stream is stream:
            self._stream = None
            self._on_foreign = False
            self.foreign.closed()
            self._cluster.trace(self.name, "stream closed")
            self._perform_session(self.session.stream_broke(self.clock.now_ms))

    def beat(self) -> None:
        """Send an extra beat."""
        self._send(partial(events.BeatReceived, healed_bytes=0))

    def _tick_session(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
        now_ms = self.clock.now_ms
        waits = self._cluster.config.probes and self.group.waits(now_ms)
        self._perform_session(self.session.tick(now_ms, lambda: self.group.progress(now_ms), lambda: waits))
        if self._stream is not None:
            due_ms = max(self.session.next_beat_ms, self.clock.now_ms + 50)
            self._beat = self.clock.at(due_ms, lambda: self.run(self._tick_session))

    def _heard(self, order: Any) -> None:
        now_ms = self.clock.now_ms
        self._cluster.trace(self.name, order)
        match order:
            case Unimplemented():
                self._foreign_lighthouse_found()
            case effects.AnswerUnaryQuorum():
                self._perform_foreign(self.foreign.answered(order.call, order.quorum))
            case effects.Welcome():
                started_ms, cluster_id = order.lighthouse_started_ms, order.cluster_id
                self._perform_session(
                    self.session.welcomed(order.session, started_ms, now_ms, cluster_id, order.heartbeat_timeout_ms)
                )
            case effects.TellLost():
                self._cluster.marks.hit("the living were told that they are lost")
                hung = self._is_hung()
                self._perform_session(self.session.told_lost(order.session, now_ms, hung=hung))
                self.handle(events.SessionLost(order.session, order.message))
            case effects.NotifyLoss():
                self.handle(events.LossNoticed(order.notice))
            case effects.TryPeers():
                self._try_peers(order)
            case effects.AnnounceNewcomer():
                self.handle(events.NewcomerAnnounced(order.replica_id))
            case effects.AskToLeave():
                self.handle(events.LeaveAsked(order.reason, order.serve_ms))
            case effects.TellNewest(_, news):
                if news.beat and news.recalled and not self.group.is_recalled:
                    self._cluster.marks.hit("a recall came with the answer to a beat")
                self.handle(events.NewestNamed(news, self.session.beat_answered(news.beat)))
            case effects.TellStraggler():
                self.handle(events.PaceTold(order.news))
            case effects.Release():
                self.handle(events.NobodyHeals())
            case effects.Probe(_, number):
                stopped, stopped_ms = self.group.stopped(now_ms)
                answer = partial(events.ProbeAnswered, number=number, stopped=stopped, stopped_ms=stopped_ms)
                self._send(answer, extra=True)
                self.handle(events.ProbeCame(number))
            case effects.RefuseSession():
                hung = self._is_hung()
                orders = self.session.told_refused(order.refusal, order.message, now_ms, order.silent_ms, hung=hung)
                self._perform_session(orders)
            case effects.AskForQuorum():
                held = self.group.report()
                quorum = held if held is not None and held.key == order.key else None
                self._send(lambda stream: events.QuorumReported(stream, quorum))
            case effects.AnswerQuorum():
                if self.session.answered(order.request, order.quorum.key):
                    self._cluster.invariants_of(self.replica.job).received(self.replica.host, order.quorum.key)
                    self.handle(events.QuorumArrived(order.request, order.quorum))
            case effects.AnswerUnchanged():
                if self.session.answered(order.request, order.key):
                    self._cluster.invariants_of(self.replica.job).received(self.replica.host, order.key)
                    self.handle(events.UnchangedArrived(order.request, order.key))
            case effects.RefuseRequest(_, _, Refusal.LOST):
                pass  # the replica lives, so its next session sends the request again
            case effects.RefuseRequest():
                if self.session.answered(order.request, None):
                    code = order.refusal.value
                    self.handle(events.RequestRefused(order.request, code, order.message))
            case _:
                raise AssertionError(f"a manager server can't read {order!r}")
