"""The lighthouse of a simulated cluster: its core behind the simulated network, and the marks that it hits.

Law of this file: the work of the lighthouse's gRPC shell, and the marks that only it can see. Decisions belong
elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from tft_coord.compat.router import Effects, ProtocolRouter
from tft_coord.compat.rule import TorchftCore
from tft_coord.core import effects, events
from tft_coord.core.config import LighthouseConfig
from tft_coord.core.lighthouse import LighthouseCore
from tft_coord.core.living_quorum import LIVES, UNKNOWN_MEMBERS
from tft_coord.core.stragglers import StragglerNotice
from tft_coord.core.suspicion import LOST_SILENT, LOST_STOPPED
from tft_coord.core.types import Hello, Member, Quorum, QuorumKey, Refusal
from tft_coord.timeouts import Timeouts
from tft_sim.config import Chance
from tft_sim.liveness_truth import LivenessTruth, LivenessTruths
from tft_sim.marks import Marks
from tft_sim.network import Stream
from tft_sim.parts import Parts
from tft_sim.probe_watch import ProbeWatch
from tft_sim.process import Process
from tft_sim.silence import Silence

JOB = "job"
OTHER_JOB = "other"
HANG_REASON = "its trainer hangs"
STUCK_REASON = "waits in a reduction"
LEFT_OUT_REASON = "is left out as a straggler"
LATE_REASON = "for longer than join_timeout"  # end of the reason for a quorum that is broken for a late member
OVERDUE_REASON = "asked for the next quorum, and"  # start of the reason for a member that still waits in it
WAIT_MARKS = (
    "of min_replicas",
    "a majority is needed",
    "a survivor of the last quorum",
    "is healing and receives data",
    "the state of step",
    "join_timeout ends",
    "has just started",
    "the members of quorum",
    UNKNOWN_MEMBERS,
    "the report of",
    "that reach one another",
    LIVES,
    "replicas of an earlier lighthouse",
)


class Losses(Protocol):
    """The watch over losses, as a lighthouse reports to it."""

    def decided(self, lighthouse: LighthouseProcess, key: QuorumKey, lost: str) -> None: ...
    def left(self, lighthouse: LighthouseProcess, key: QuorumKey, who: str, *, surely: bool) -> None: ...


class Hangs(Protocol):
    """The watch over hangs, as a lighthouse reports to it."""

    def welcomed(self, hello: Hello) -> None: ...
    def lost(self, replica_id: str, session: int) -> None: ...
    def stuck(self, key: QuorumKey, members: tuple[str, ...]) -> None: ...


class Paces(Protocol):
    """The watch over stragglers, as a lighthouse reports to it."""

    def decided(self, job: str, news: StragglerNotice, quorum: Quorum | None, healthy: int) -> None: ...


class Ends(Protocol):
    """The watch over ends, as a lighthouse reports to it."""

    def refused(self, hello: Hello, refusal: Refusal, message: str) -> None: ...


class World(Parts, Protocol):
    """The cluster, as a lighthouse sees it."""

    deciding: str

    @property
    def chance(self) -> Chance: ...
    @property
    def wall_ms(self) -> int: ...
    @property
    def jobs(self) -> Mapping[str, tuple[str, ...]]: ...
    @property
    def calls(self) -> Iterator[int]: ...
    @property
    def losses(self) -> Losses: ...
    @property
    def hangs(self) -> Hangs: ...
    @property
    def paces(self) -> Paces: ...
    @property
    def ends(self) -> Ends: ...
    def trace(self, who: str, what: object) -> None: ...
    def watch(self, order: effects.LighthouseEffect) -> None: ...
    def was_stopped(self, replica_id: str, for_ms: int = ...) -> bool: ...


class LighthouseProcess(Process):
    """The shell of one life of the lighthouse."""

    def __init__(self, cluster: World, number: int, name: str = "lighthouse") -> None:
        super().__init__(name, cluster.clock)
        config = LighthouseConfig(
            min_replicas=cluster.config.min_replicas,
            timeouts=cluster.timeouts,
            stragglers=cluster.config.stragglers,
            lost_state_timeout_ms=cluster.config.lost_state_ms,
        )
        # No two lighthouses start in one millisecond.
        self._started_ms = cluster.wall_ms + number - 1
        of_address = cluster.config.cluster_id if name == "lighthouse" else cluster.config.standby
        self._cluster_id = of_address or f"cluster-{number}"
        self.core = LighthouseCore(
            config,
            started_ms=self._started_ms,
            cluster_id=self._cluster_id,
            nonces=cluster.chance.nonces,
            now_ms=self.clock.now_ms,
            had_earlier_life=cluster.config.durable and number > 1,
        )
        torchft = TorchftCore(config, started_ms=cluster.wall_ms)
        self._router = ProtocolRouter(
            self.core,
            torchft,
            undecided_ms=cluster.timeouts.heartbeat_timeout_ms,
            now_ms=self.clock.now_ms,
            job=JOB,
        )
        self._calls: dict[int, tuple[Process, Callable[[Quorum | effects.RefuseUnary], None]]] = {}
        self._cluster = cluster
        self._life_began_ms = self.clock.now_ms
        self.num_heard: Counter[str] = Counter()  # stream messages, by type
        self._streams: dict[int, Stream] = {}
        self._stuck: set[QuorumKey] = set()  # quorums that it broke because all members waited
        self._liveness = LivenessTruths(self._new_liveness)
        self._silence = Silence(cluster.timeouts, self.clock.now_ms)
        self._probes = self._new_probe_watch()
        self._job_marks: dict[str, LighthouseMarks] = {}

    def waiting_for(self, job: str) -> str:
        """Return what the next quorum of that job waits for, as one phrase."""
        return self.core.waiting_for(job)

    def identity(self) -> tuple[int, str, tuple[str, ...]]:
        """Return its start time, its cluster, and the jobs that it knows."""
        return self.core.started_ms, self._cluster_id, self.core.jobs

    def start(self) -> None:
        """Start the tick."""
        self.after(self._cluster.timeouts.quorum_tick_ms, self._tick)

    def liveness_of(self, job: str) -> LivenessTruth:
        """Return the observed liveness of that job's replicas."""
        return self._liveness.of(job)

    def _new_probe_watch(self) -> ProbeWatch:
        return ProbeWatch(
            self._cluster.timeouts,
            self.clock.now_ms,
            lambda job, name: self.liveness_of(job).is_alive(name),
            self._cluster.was_stopped,
        )

    def _new_liveness(self) -> LivenessTruth:
        config = self._cluster.config
        return LivenessTruth(config.min_replicas, self._broken, self._left, config.timeouts, config.lost_state_ms)

    def _marks_of(self, job: str) -> LighthouseMarks:
        if job not in self._job_marks:
            self._job_marks[job] = LighthouseMarks(self._cluster.marks, self._cluster.timeouts)
        return self._job_marks[job]

    def drain(self, request: events.DrainRequested) -> None:
        """Perform a drain request, as an operator's call does."""
        self._cluster.trace("lighthouse", request)
        for order in self.core.drain(request):
            self._cluster.trace("lighthouse", order)
            if isinstance(order, effects.AskToLeave):
                self._cluster.marks.hit("a replica was drained")
            if isinstance(order, effects.AskToLeave | effects.TellNewest):
                self._send(order.stream, order)

    def _broken(self, key: QuorumKey, lost: str) -> None:
        self._cluster.losses.decided(self, key, lost)

    def _left(self, key: QuorumKey, who: str, surely: bool) -> None:
        self._cluster.losses.left(self, key, who, surely=surely)

    def accepted(self, stream: Stream) -> None:
        """Listen to a stream that a manager server has dialed."""
        self._streams[stream.number] = stream
        stream.listen(self, self._heard, lambda: self._closed(stream.number, told=stream.end_reported))

    def _tick(self) -> None:
        now_ms, timeouts, marks = self.clock.now_ms, self._cluster.timeouts, self._cluster.marks
        for job in self._cluster.jobs:
            self._marks_of(job).ticked(now_ms)
            waits = self.core.waiting_for(job)
            for words in WAIT_MARKS:
                if words in waits:
                    marks.hit(f"waited: {words}")
            newest = self.core.quorum(job)
            who = waits.partition(" ")[0]
            if LIVES in waits and newest is not None and who != "unknown" and newest.member(who) is None:
                marks.hit("a member of an earlier quorum was waited for")
            if "of min_replicas" in waits and self.liveness_of(job).shrink_only_blocks():
                marks.hit("shrink_only left too few")
        self._silence.woke(now_ms)
        self._probes.woke(now_ms)
        self._perform(self._router.tick(self.clock.now_ms, self._cluster.wall_ms))
        self._silence.ticked(now_ms)
        self._probes.ticked(now_ms)
        starts = now_ms - self._life_began_ms < timeouts.reconnect_grace_ms
        for job in self._cluster.jobs:
            waits = self.core.waiting_for(job)
            if not starts and not waits.startswith("the members of quorum") and UNKNOWN_MEMBERS not in waits:
                self.liveness_of(job).check_wait(waits, now_ms)
        self.after(timeouts.quorum_tick_ms, self._tick)

    def _heard(self, event: events.LighthouseEvent) -> None:
        self._cluster.trace(self.name, event)
        self.num_heard[type(event).__name__] += 1
        self._liveness.heard(event, self.clock.now_ms)
        self._marks_of(self._liveness.job_of(event.stream)).heard(event, self.clock.now_ms)
        orders = self._router.handle(event, self.clock.now_ms, self._cluster.wall_ms)
        if self.core.started_ms != self._started_ms:
            self._reset_watches()
        self._silence.heard(event, self.clock.now_ms)
        self._probes.heard(event, self.clock.now_ms)
        self._perform(orders)

    def handle_unary_request(
        self, caller: Process, member: Member, answer: Callable[[Quorum | effects.RefuseUnary], None]
    ) -> int:
        """Handle the request of a torchft member, and return the number of its call here."""
        call = next(self._cluster.calls)
        self._calls[call] = (caller, answer)
        self.called(events.UnaryQuorumRequested(call, member))
        return call

    def called(self, event: events.UnaryEvent) -> None:
        """Handle a unary call of a torchft member."""
        if not isinstance(event, events.HeartbeatReceived):
            self._cluster.trace(self.name, event)
        self._perform(self._router.handle_unary(event, self.clock.now_ms, self._cluster.wall_ms))

    def _answer(self, call: int, answer: Quorum | effects.RefuseUnary) -> None:
        waiting = self._calls.pop(call, None)
        if waiting is not None:
            caller, told = waiting
            self._cluster.network.message(self, caller, lambda: told(answer), lambda: None)

    def _closed(self, number: int, *, told: bool = False) -> None:
        self._streams.pop(number, None)
        self._heard(events.StreamClosed(number, told))

    def _perform(self, orders: Effects) -> None:
        for order in orders:
            self._cluster.trace(self.name, order)
            match order:
                case effects.AnswerUnaryQuorum():
                    self.liveness_of(JOB).check_single_kind(order.quorum)
                    self._answer(order.call, order.quorum)
                    continue
                case effects.RefuseUnary():
                    self._answer(order.call, order)
                    continue
                case effects.JobFailed():
                    raise order.error
                case effects.QuorumFormed() if not order.job:
                    continue  # this quorum is of torchft members, and the others have a job
            self._cluster.deciding = self.name
            if isinstance(order, effects.Welcome):
                self._cluster.hangs.welcomed(self._liveness.hello_of(order.stream))
            self._cluster.watch(order)
            self._probes.decided(order, self.clock.now_ms)
            self._liveness.decided(order, self.clock.now_ms)
            self._silence.decided(order, self.clock.now_ms)
            match order:
                case effects.ReplicaLeft() | effects.JobEnded() | effects.Warned() | effects.TellWait():
                    continue
                case effects.PaceChanged(job, news):
                    healthy = self.liveness_of(job).num_ready()
                    self._cluster.paces.decided(job, news, self.core.quorum(job), healthy)
                    continue
                case effects.QuorumFormed() | effects.ReplicaLost():
                    if isinstance(order, effects.ReplicaLost) and order.reason.startswith(HANG_REASON):
                        self._cluster.hangs.lost(order.replica_id, order.session)
                    self._marks_of(order.job).decided(order, self.clock.now_ms)
                    continue
                case effects.NotifyLoss() if order.notice.lives:
                    self._cluster.marks.hit("one that lives broke its quorum")
                    if order.notice.reason.startswith(LEFT_OUT_REASON):
                        self._cluster.marks.hit("a quorum was ended for a straggler")
                        self._cluster.losses.left(self, order.notice.key, order.notice.replica_id, surely=True)
                    if order.notice.reason.endswith(LATE_REASON) or order.notice.reason.startswith(OVERDUE_REASON):
                        late = order.notice.reason.endswith(LATE_REASON)
                        words = "a late member" if late else "one that had asked"
                        self._cluster.marks.hit(f"a standing quorum was broken for {words}")
                        self._cluster.losses.left(self, order.notice.key, order.notice.replica_id, surely=True)
                        self.liveness_of(self._liveness.job_of(order.stream)).quorum_broken_for(late=late)
                    if order.notice.reason.startswith(STUCK_REASON):
                        self._record_stuck_quorum(order)
            self._marks_of(self._liveness.job_of(order.stream)).decided(order, self.clock.now_ms)
            match order:
                case effects.RefuseSession() | effects.CloseStream():
                    if isinstance(order, effects.RefuseSession):
                        hello = self._liveness.hello_of(order.stream)
                        self._cluster.ends.refused(hello, order.refusal, order.message)
                    stream = self._streams.get(order.stream)
                    if stream is not None:
                        if isinstance(order, effects.RefuseSession):
                            stream.send(self, order)
                        stream.close(self)
                        self._closed(order.stream)
                case _:
                    self._send(order.stream, order)
        refusals = {order.refusal for order in orders if isinstance(order, effects.RefuseSession)}
        if Refusal.OLD_LIGHTHOUSE in refusals:  # a newer lighthouse serves, so this one has no memory from now on
            self._stuck.clear()
            self._liveness = LivenessTruths(self._new_liveness)
            self._silence = Silence(self._cluster.timeouts, self.clock.now_ms)
            self._probes = self._new_probe_watch()
            self._job_marks.clear()

    def _reset_watches(self) -> None:
        """Reset the watches, because the core has forgotten everything and behaves as if it has just started."""
        self._cluster.marks.hit("an older lighthouse stood in for a newer one")
        self._started_ms = self.core.started_ms
        self._life_began_ms = self.clock.now_ms
        self._silence = Silence(self._cluster.timeouts, self.clock.now_ms)
        self._probes = self._new_probe_watch()

    def _record_stuck_quorum(self, order: effects.NotifyLoss) -> None:
        notice = order.notice
        self._cluster.marks.hit("all were stuck in one reduction")
        self._cluster.losses.left(self, notice.key, notice.replica_id, surely=True)
        held = self.core.quorum(self._liveness.job_of(order.stream))
        if held is not None and held.key == notice.key and notice.key not in self._stuck:
            self._stuck.add(notice.key)  # a reconnected stream is told again, whatever the members do by then
            self._cluster.hangs.stuck(notice.key, held.replica_ids)

    def _send(self, number: int, order: effects.LighthouseEffect) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            stream.send(self, order, extra=isinstance(order, effects.Probe))


class LighthouseMarks:
    """The coverage marks of one life of a lighthouse, derived from what it hears and says.

    Args:
        marks: the counter.
        timeouts: of the job.
    """

    def __init__(self, marks: Marks, timeouts: Timeouts) -> None:
        self._marks = marks
        self._timeouts = timeouts
        self._ticked_ms: int | None = None
        self._names: dict[int, str] = {}  # replica ids by stream
        self._addresses: dict[str, str] = {}
        self._hellos: dict[int, Hello] = {}
        self._answered_hello: int | None = None  # the stream whose hello is being answered
        self._closed_ms: dict[str, int] = {}
        self._losses: dict[str, list[str]] = {}  # reasons, by replica id
        self._lost: set[str] = set()
        self._asking: set[str] = set()
        self._newest: frozenset[str] = frozenset()
        self._newest_key: QuorumKey | None = None

    def ticked(self, now_ms: int) -> None:
        """Record a tick of the lighthouse."""
        self._answered_hello = None
        away_ms = now_ms - self._ticked_ms if self._ticked_ms is not None else 0
        if away_ms >= self._timeouts.heartbeat_timeout_ms:
            self._marks.hit("the lighthouse was away for longer than heartbeat_timeout")
        self._ticked_ms = now_ms

    def heard(self, event: events.LighthouseEvent, now_ms: int) -> None:
        """Record an event that the lighthouse receives."""
        name = self._names.get(event.stream, "")
        if not isinstance(event, events.StreamClosed):  # an older stream is closed on the way
            self._answered_hello = None
        match event:
            case events.HelloReceived():
                self._hellos[event.stream] = event.hello
                self._answered_hello = event.stream
            case events.QuorumRequested():
                self._asking.add(name)
            case events.RequestWithdrawn():
                self._asking.discard(name)
            case events.StreamClosed():
                self._asking.discard(name)
                newest = self._names.pop(event.stream, "") and name not in self._names.values()
                if newest and name not in self._lost:
                    self._closed_ms.setdefault(name, now_ms)
            case events.BeatReceived():
                if name in self._lost and self._losses[name][-1].startswith("its manager server reports"):
                    self._marks.hit("a beat came after a reported death")

    def decided(self, order: effects.LighthouseEffect, now_ms: int) -> None:
        """Record an effect that the lighthouse decides, and hit its marks."""
        match order:
            case effects.QuorumFormed():
                self._newest, self._newest_key = frozenset(order.quorum.replica_ids), order.quorum.key
            case effects.AnswerQuorum() | effects.AnswerUnchanged() | effects.RefuseRequest():
                self._asking.discard(self._names.get(order.stream, ""))
            case effects.ReplicaLost():
                self._lose(order.replica_id, order.reason)
            case effects.NotifyLoss():
                if order.stream == self._answered_hello:
                    self._marks.hit("a hello was answered with a loss")
                    if self._newest_key is not None and order.notice.key < self._newest_key:
                        self._marks.hit("a hello was answered with a loss in a quorum that others have left")
            case effects.Welcome():
                hello = self._hellos[order.stream]
                self._names[order.stream] = hello.replica_id
                self._welcome(hello, now_ms)
            case _:
                return

    def _lose(self, replica_id: str, reason: str) -> None:
        if replica_id in self._asking:
            joins = self._newest_key is not None and replica_id not in self._newest
            self._marks.hit("one that only waited to join was lost" if joins else "a waiting member was lost")
        self._asking.discard(replica_id)
        self._lost.add(replica_id)
        self._closed_ms.pop(replica_id, None)
        self._losses.setdefault(replica_id, []).append(reason)

    def _welcome(self, hello: Hello, now_ms: int) -> None:
        name = hello.replica_id
        reasons = self._losses.get(name, [])
        if name in self._lost:
            self._lost.discard(name)
            kind = kind_of_loss(reasons[-1])
            self._marks.hit(f"came back after its loss: {kind}")
            if self._addresses.get(name, hello.address) != hello.address:
                self._marks.hit("a group that was lost came back elsewhere")
        elif name in self._closed_ms:
            away_ms = now_ms - self._closed_ms.pop(name)
            if away_ms <= self._timeouts.reconnect_grace_ms:
                self._marks.hit("a stream was back within the grace")
            elif away_ms > self._timeouts.reconnect_grace_ms + self._timeouts.quorum_tick_ms:
                by_stream = [reason for reason in reasons if reason.startswith("its stream disconnected")]
                flaps = len(by_stream) >= 3
                self._marks.hit("a flapping link was judged by silence" if flaps else "all were excused together")
        self._addresses[name] = hello.address


def kind_of_loss(reason: str) -> str:
    """Return the kind of loss that a reason describes."""
    for kind in (
        LOST_SILENT,
        LOST_STOPPED,
        "silent",
        "its stream disconnected",
        "its manager server reports",
        "replaced by",
        HANG_REASON,
    ):
        if reason.startswith(kind):
            return kind
    return reason
