"""A simulated cluster: one lighthouse, and replica groups of a manager server and its trainers.

The cores are the real ones; around them stands what the gRPC shells do, over the simulated network. Nothing here is
random: whoever wants faults calls the verbs (`kill`, `stop`, `restart_lighthouse`…), by chance in `simulator.py`, by
script in `scenario.py`.

Law of this file: shells of the cores and the verbs; no choice of what happens when.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tft_coord.core import effects, events
from tft_coord.core.group import GroupCore
from tft_coord.core.lighthouse import LighthouseConfig, LighthouseCore
from tft_coord.core.session import Dial, GiveUp, HangUp, SendBeat, SendHello, SendRequest, SendWithdraw, SessionCore
from tft_coord.core.session import SessionEffect as _SessionEffect
from tft_coord.core.types import Hello, LossNotice, Member, QuorumKey, RankRequest, Refusal
from tft_coord.testing.clock import Timer, VirtualClock
from tft_coord.testing.invariants import Attendance, InvariantBroken, Invariants, Round
from tft_coord.testing.marks import Marks
from tft_coord.testing.network import Network, Stream
from tft_coord.testing.process import Process, State
from tft_coord.testing.trainer import Group, Refused, Snapshot, Trainer, TrainerSettings, Waiter
from tft_coord.timeouts import Timeouts

JOB = "job"
FATAL = frozenset(
    {
        "group_lost",
        Refusal.DEAD.value,
        Refusal.AHEAD.value,
        Refusal.DUPLICATE.value,
        Refusal.MALFORMED.value,
        Refusal.OTHER_KIND.value,
    }
)
REASONS = (
    "joined",
    "is gone",
    "failed to commit",
    "can't use its process group",
    "has a newer session",
    "does not hold it",
)
WAITS = (
    "of min_replicas",
    "a majority is needed",
    "a survivor of the last quorum",
    "heals and its bytes arrive",
    "join_timeout ends",
    "has just started",
    "the members of quorum",
)
REACHED_MS = 100  # two messages, the wait before the abort, and as much again
WATCHED_MS = 10_000  # longer than anything that waits in a group has a time-out
_UNREACHABLE = Refused("unreachable", "the manager server can't be reached")
SHORT_TIMEOUTS = Timeouts(
    timeout_ms=6_000,
    quorum_timeout_ms=8_000,
    connect_timeout_ms=6_000,
    heartbeat_timeout_ms=2_000,
    join_timeout_ms=3_000,
    heal_timeout_ms=12_000,
    beat_interval_ms=500,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What a simulated cluster is made of.

    Args:
        names: of the replica groups.
        world_size: ranks in each.
        min_replicas: of the lighthouse.
        timeouts: of everybody; shorter than in production, so that fewer events happen while waiting.
        trainers: settings of the job.
        wall_start_ms: wall clock at the start of virtual time.
        delay_ms: bounds of a message's delay.
        budget_events: after so many events the run fails as a livelock.
    """

    names: tuple[str, ...] = ("a", "b", "c")
    world_size: int = 1
    min_replicas: int = 1
    timeouts: Timeouts = SHORT_TIMEOUTS
    trainers: TrainerSettings = TrainerSettings()  # noqa: RUF009  # frozen
    wall_start_ms: int = 1_000_000
    delay_ms: tuple[int, int] = (1, 5)
    budget_events: int = 400_000


def _steady_step_ms(_name: str) -> int:
    return 200


@dataclass(slots=True, kw_only=True)
class Chance:
    """Everything that is left to chance, or fixed by a script.

    Args:
        network: for delays.
        jitter: in [0, 1), spreads redials.
        nonces: random 64-bit numbers of the lighthouse.
        step_ms: how long a replica's forward and backward take.
        spread_ms: after which a member learns that a reduction is complete.
        chunk_ms: of a transfer, by the name of the rank that fetches.
        optimizer_raises: whether a rank's optimizer raises after this commit.
    """

    network: random.Random = field(default_factory=lambda: random.Random("network"))
    jitter: Callable[[], float] = lambda: 0.5
    nonces: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)
    step_ms: Callable[[str], int] = _steady_step_ms
    spread_ms: Callable[[], int] = lambda: 1
    chunk_ms: Callable[[str], int] = lambda _: 20
    optimizer_raises: Callable[[str], bool] = lambda _: False


class LighthouseProcess(Process):
    """The shell of one life of the lighthouse."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        super().__init__("lighthouse", cluster.clock)
        config = LighthouseConfig(min_replicas=cluster.config.min_replicas, timeouts=cluster.timeouts)
        self.core = LighthouseCore(
            config,
            started_ms=cluster.wall_ms,
            cluster_id=f"cluster-{number}",
            nonces=cluster.chance.nonces,
            now_ms=self.clock.now_ms,
        )
        self._cluster = cluster
        self._born_ms = self.clock.now_ms
        self._streams: dict[int, Stream] = {}
        self.attendance = Attendance(cluster.config.min_replicas, self._broken, self._left)
        self._hellos: dict[int, Hello] = {}
        self._asked: effects.AskForQuorum | None = None
        self._story = LighthouseStory(cluster.marks, cluster.timeouts)

    def start(self) -> None:
        """Begin to look at the clock."""
        self.after(self._cluster.timeouts.quorum_tick_ms, self._tick)

    def _broken(self, key: QuorumKey, lost: str) -> None:
        self._cluster.losses.decided(self, key, lost)

    def _left(self, key: QuorumKey, who: str, surely: bool) -> None:
        self._cluster.losses.left(self, key, who, surely=surely)

    def accepted(self, stream: Stream) -> None:
        """A manager server has dialed."""
        self._streams[stream.number] = stream
        stream.listen(self, self._heard, lambda: self._closed(stream.number))

    def _tick(self) -> None:
        self._story.ticked(self.clock.now_ms)
        waits = self.core.waiting_for(JOB)
        for words in WAITS:
            if words in waits:
                self._cluster.marks.hit(f"waited: {words}")
        self._perform(self.core.tick(self.clock.now_ms, self._cluster.wall_ms))
        timeouts, waits = self._cluster.timeouts, self.core.waiting_for(JOB)
        starts = self.clock.now_ms - self._born_ms < timeouts.reconnect_grace_ms
        if not starts and not waits.startswith("the members of quorum"):
            self.attendance.nobody_else_is_waited_for(waits)
        self.after(self._cluster.timeouts.quorum_tick_ms, self._tick)

    def _heard(self, event: events.LighthouseEvent) -> None:
        self._cluster.trace("lighthouse", event)
        self._story.heard(event, self.clock.now_ms)
        match event:
            case events.HelloReceived():
                self._hellos[event.stream] = event.hello
            case events.QuorumRequested():
                self.attendance.asked(event.member, event.stream, event.held)
            case events.RequestWithdrawn():
                self.attendance.asks_no_more(event.stream)
            case events.StreamClosed():
                self.attendance.asks_no_more(event.stream)
                self.attendance.closed(event.stream)
            case events.QuorumReported():
                asked, quorum = self._asked, event.quorum
                named = (asked.stream, asked.key) if asked is not None else None
                if quorum is not None and named == (event.stream, quorum.key):
                    self.attendance.reported(quorum)
        self._perform(self.core.handle(event, self.clock.now_ms, self._cluster.wall_ms))

    def _closed(self, number: int) -> None:
        self._streams.pop(number, None)
        self._heard(events.StreamClosed(number))

    def _perform(self, orders: list[effects.LighthouseEffect]) -> None:
        for order in orders:
            self._cluster.trace("lighthouse", order)
            self._cluster.watch(order)
            self._story.decided(order, self.clock.now_ms)
            match order:
                case effects.QuorumFormed():
                    self.attendance.formed(order.quorum, order.previous)
                case effects.ReplicaLost():
                    dead = order.reason.startswith(("its manager server reports", "replaced by"))
                    broke = order.reason.startswith("its stream broke")
                    self.attendance.lost(order.replica_id, order.session, dead=dead, broke=broke)
                case effects.AnswerQuorum() | effects.AnswerUnchanged() | effects.RefuseRequest():
                    self.attendance.asks_no_more(order.stream)
                    self._say(order.stream, order)
                case effects.AskForQuorum():
                    self._asked = order
                    self._say(order.stream, order)
                case effects.NotifyLoss():
                    if order.notice.lives:
                        self._cluster.marks.hit("one that lives broke its quorum")
                    self._say(order.stream, order)
                case effects.Welcome():
                    self.attendance.welcomed(self._hellos[order.stream], order.stream)
                    self._say(order.stream, order)
                case effects.RefuseSession() | effects.CloseStream():
                    stream = self._streams.get(order.stream)
                    if stream is not None:
                        if isinstance(order, effects.RefuseSession):
                            stream.send(self, order)
                        stream.close(self)
                        self._closed(order.stream)
                case _:
                    self._say(order.stream, order)

    def _say(self, number: int, order: effects.LighthouseEffect) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            stream.send(self, order)


class LighthouseStory:
    """Marks of what one life of a lighthouse comes by, as seen in what it hears and says.

    Args:
        marks: to hit.
        timeouts: of the job.
    """

    def __init__(self, marks: Marks, timeouts: Timeouts) -> None:
        self._marks = marks
        self._timeouts = timeouts
        self._ticked_ms: int | None = None
        self._names: dict[int, str] = {}  # of streams
        self._addresses: dict[str, str] = {}
        self._hellos: dict[int, Hello] = {}
        self._greets: int | None = None  # the stream whose hello is being answered
        self._closed_ms: dict[str, int] = {}
        self._losses: dict[str, list[str]] = {}  # reasons, by replica id
        self._lost: set[str] = set()
        self._asking: set[str] = set()
        self._newest: frozenset[str] = frozenset()
        self._newest_key: QuorumKey | None = None

    def ticked(self, now_ms: int) -> None:
        """It looks at the clock."""
        self._greets = None
        away_ms = now_ms - self._ticked_ms if self._ticked_ms is not None else 0
        if away_ms >= self._timeouts.heartbeat_timeout_ms:
            self._marks.hit("the lighthouse was away for longer than heartbeat_timeout")
        self._ticked_ms = now_ms

    def heard(self, event: events.LighthouseEvent, now_ms: int) -> None:
        """It hears something."""
        name = self._names.get(event.stream, "")
        if not isinstance(event, events.StreamClosed):  # an older stream is closed on the way
            self._greets = None
        match event:
            case events.HelloReceived():
                self._hellos[event.stream] = event.hello
                self._greets = event.stream
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
        """It decides something."""
        match order:
            case effects.QuorumFormed():
                self._newest, self._newest_key = frozenset(order.quorum.replica_ids), order.quorum.key
            case effects.AnswerQuorum() | effects.AnswerUnchanged() | effects.RefuseRequest():
                self._asking.discard(self._names.get(order.stream, ""))
            case effects.ReplicaLost():
                self._lose(order.replica_id, order.reason)
            case effects.NotifyLoss():
                if order.stream == self._greets:
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
            kind = _kind_of_loss(reasons[-1])
            self._marks.hit(f"came back after its loss: {kind}")
            if self._addresses.get(name, hello.address) != hello.address:
                self._marks.hit("a group that was lost came back elsewhere")
        elif name in self._closed_ms:
            away_ms = now_ms - self._closed_ms.pop(name)
            if away_ms <= self._timeouts.reconnect_grace_ms:
                self._marks.hit("a stream was back within the grace")
            elif away_ms > self._timeouts.reconnect_grace_ms + self._timeouts.quorum_tick_ms:
                by_stream = [reason for reason in reasons if reason.startswith("its stream broke")]
                flaps = len(by_stream) >= 3
                self._marks.hit("a flapping link was judged by silence" if flaps else "all were excused together")
        self._addresses[name] = hello.address


class ManagerProcess(Process):
    """The shell of a manager server: a session core and a group core."""

    def __init__(self, cluster: Cluster, replica: Replica, number: int, session: int) -> None:
        super().__init__(f"{replica.host}/manager{number or ''}", cluster.clock)
        self.replica = replica
        self.address = f"{self.name}:1"
        self.group = GroupCore(
            replica_id=replica.replica_id,
            address=self.address,
            store_address=f"{replica.replica_id}/store:1",
            world_size=cluster.config.world_size,
            timeouts=cluster.timeouts,
        )
        self.session = SessionCore(
            job=JOB,
            replica_id=replica.replica_id,
            address=self.address,
            session=session,
            timeouts=cluster.timeouts,
            jitter=cluster.chance.jitter,
            replaces=replica.replaces,
        )
        self._cluster = cluster
        self._stream: Stream | None = None
        self._ranks: dict[int, Stream] = {}
        self._answers: dict[int, Callable[[Any], None]] = {}
        self._deadline: Timer | None = None
        self._beat: Timer | None = None
        self._leaving = False
        self._open_request: int | None = None
        self.on_end: list[Callable[[], object]] = []  # the calls that wait here fail with it

    @property
    def stream_number(self) -> int | None:
        """Of its stream to the lighthouse."""
        return self._stream.number if self._stream is not None else None

    def rank_since_ms(self, rank: int) -> int | None:
        """Since when that rank's stream stands, if it does; this end may not know yet that it has broken."""
        stream = self._ranks.get(rank)
        return stream.stands_since_ms if stream is not None and stream.open else None

    def lighthouse_since_ms(self) -> int | None:
        """Since when its stream to the lighthouse stands, if it does."""
        return self._stream.stands_since_ms if self._stream is not None and self._stream.open else None

    def start(self) -> None:
        """Dial the lighthouse."""
        self._perform_session(self.session.start(self.clock.now_ms))

    # --- from the ranks ---------------------------------------------------------------------------------------------

    def rank_connected(self, rank: int, stream: Stream) -> None:
        """A rank's stream stands."""

        def closed() -> None:
            if self._ranks.get(rank) is stream:
                del self._ranks[rank]
            self.handle(events.RankDisconnected(rank=rank, stream=stream.number))

        self._ranks[rank] = stream
        stream.listen(self, lambda _: None, closed)
        self.handle(events.RankConnected(rank=rank, stream=stream.number))

    def called(self, event: events.RankAsked | events.RankVoted, answer: Callable[[Any], None]) -> None:
        """A rank's call; `answer` is given what the core decides."""
        self._answers[event.call] = answer
        self.handle(event)

    def handle(self, event: events.GroupEvent) -> None:
        """Give the group core an event."""
        self._cluster.trace(self.name, event)
        self._perform_group(self.group.handle(event, self.clock.now_ms))
        self._set_deadline()

    def _set_deadline(self) -> None:
        due_ms = self.group.next_deadline_ms()
        if self._deadline is not None:
            if self._deadline.action is not None and self._deadline.at_ms == due_ms:
                return
            self._deadline.cancel()
            self._deadline = None
        if due_ms is not None:
            self._deadline = self.clock.at(due_ms, lambda: self.run(self._due))

    def _due(self) -> None:
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
                    self._perform_session(self.session.ask(order.request, order.member, order.held, now_ms))
                    if self.session.refused is not None:
                        self._refuse_open(self.session.refused)
                case effects.WithdrawFromLighthouse():
                    self._perform_session(self.session.withdraw(order.request, now_ms))
                case effects.ReportDeath():
                    self._cluster.marks.hit("a manager server reported a death")
                    if self._stream is not None:
                        self._stream.send(self, events.DeathReported(self._stream.number, order.reason))
                    if not self._leaving:
                        self._leaving = True
                        self.after(20, lambda: self._cluster.manager_exits(self))
                case effects.AnswerPlan():
                    self._cluster.invariants.planned_from(order.plan, order.quorum)
                    self._answer(order.call, order.plan)
                case effects.AnswerRankUnchanged():
                    self._answer(order.call, order.key)
                case effects.AnswerVote():
                    self._answer(order.call, order.verdict)
                case effects.FailRank():
                    self._answer(order.call, Refused(order.code, order.message, order.code in FATAL))
                case effects.NotifyRank():
                    if order.rank in self._ranks:
                        self._ranks[order.rank].send(self, order.notice)
                case effects.TellGroupLost():
                    pass  # whoever is left of the group ends with it

    def _answer(self, call: int, value: Any) -> None:
        answer = self._answers.pop(call, None)
        if answer is not None:
            answer(value)

    # --- to the lighthouse --------------------------------------------------------------------------------------------

    def _perform_session(self, orders: list[_SessionEffect]) -> None:
        for order in orders:
            self._cluster.trace(self.name, order)
            match order:
                case Dial():
                    self.clock.at(order.at_ms, lambda: self.run(self._dial))
                case SendHello():
                    self._send(partial(events.HelloReceived, hello=order.hello))
                case SendRequest():
                    self._send(
                        partial(events.QuorumRequested, request=order.request, member=order.member, held=order.held)
                    )
                case SendWithdraw():
                    self._cluster.marks.hit("a request was withdrawn")
                    self._send(partial(events.RequestWithdrawn, request=order.request))
                case SendBeat():
                    self._send(partial(events.BeatReceived, healed_bytes=order.healed_bytes))
                case HangUp():
                    stream, self._stream = self._stream, None
                    if stream is not None:
                        stream.close(self)
                        self._perform_session(self.session.stream_broke(self.clock.now_ms))
                case GiveUp():
                    self._cluster.marks.hit(f"a session was refused: {order.code}")
                    self._refuse_open(order)

    def _refuse_open(self, refused: GiveUp) -> None:
        request = self._open_request
        if request is not None:
            # After what runs now: the core must not be entered twice.
            self.after(0, lambda: self.handle(events.RequestRefused(request, refused.code, refused.message)))

    def _send(self, make: Callable[[int], events.LighthouseEvent]) -> None:
        if self._stream is not None:
            self._stream.send(self, make(self._stream.number))

    def _dial(self) -> None:
        lighthouse = self._cluster.lighthouse
        self._cluster.network.dial(
            self, lighthouse, accepted=lighthouse.accepted, opened=self._opened, failed=self._dial_failed
        )

    def _opened(self, stream: Stream) -> None:
        self._stream = stream
        stream.listen(self, self._heard, lambda: self._stream_closed(stream))
        self._perform_session(self.session.stream_opened(self.clock.now_ms))
        self._tick_session()

    def _dial_failed(self) -> None:
        self._perform_session(self.session.stream_broke(self.clock.now_ms))

    def _stream_closed(self, stream: Stream) -> None:
        if self._stream is stream:
            self._stream = None
            self._cluster.trace(self.name, "stream closed")
            self._perform_session(self.session.stream_broke(self.clock.now_ms))

    def beat(self) -> None:
        """Give a sign of life, out of turn."""
        self._send(partial(events.BeatReceived, healed_bytes=0))

    def _tick_session(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
        self._perform_session(self.session.tick(self.clock.now_ms))
        if self._stream is not None:
            due_ms = max(self.session.next_beat_ms, self.clock.now_ms + 50)
            self._beat = self.clock.at(due_ms, lambda: self.run(self._tick_session))

    def _heard(self, order: Any) -> None:
        now_ms = self.clock.now_ms
        self._cluster.trace(self.name, order)
        match order:
            case effects.Welcome():
                started_ms, cluster_id = order.lighthouse_started_ms, order.cluster_id
                self._perform_session(self.session.welcomed(order.session, started_ms, now_ms, cluster_id))
            case effects.TellLost():
                self._cluster.marks.hit("the living were told that they are lost")
                self._perform_session(self.session.told_lost(order.session, now_ms))
                self.handle(events.SessionLost(order.session, order.message))
            case effects.NotifyLoss():
                self.handle(events.LossNoticed(order.notice))
            case effects.RefuseSession():
                self._perform_session(self.session.told_refused(order.refusal, order.message, now_ms))
            case effects.AskForQuorum():
                held = self.group.quorum
                quorum = held if held is not None and held.key == order.key else None
                self._send(lambda stream: events.QuorumReported(stream, quorum))
            case effects.AnswerQuorum():
                if self.session.answered(order.request, order.quorum.key):
                    self._cluster.invariants.received(self.replica.host, order.quorum.key)
                    self.handle(events.QuorumArrived(order.request, order.quorum))
            case effects.AnswerUnchanged():
                if self.session.answered(order.request, order.key):
                    self._cluster.invariants.received(self.replica.host, order.key)
                    self.handle(events.UnchangedArrived(order.request, order.key))
            case effects.RefuseRequest():
                if self.session.answered(order.request, None):
                    code = order.refusal.value
                    self.handle(events.RequestRefused(order.request, code, order.message))
            case _:
                raise AssertionError(f"a manager server can't read {order!r}")


@dataclass(slots=True)
class Replica:
    """One life of a replica group: its manager server and its trainers."""

    name: str
    replica_id: str
    replaces: str
    manager: ManagerProcess | None = None
    trainers: list[Trainer] = field(default_factory=list)
    num_managers: int = 0
    ended: str = ""
    elsewhere: str = ""

    @property
    def host(self) -> str:
        """What its processes are named after: a second one with that replica id runs elsewhere."""
        return self.replica_id + (f"@{self.elsewhere}" if self.elsewhere else "")

    @property
    def alive(self) -> bool:
        """Whether all its trainers exist."""
        return not self.ended and all(trainer.alive for trainer in self.trainers)

    def processes(self) -> list[Process]:
        """All of them, the manager server first."""
        managers: list[Process] = [self.manager] if self.manager is not None else []
        return [*managers, *self.trainers]


class Cluster:
    """A lighthouse, replica groups, a network and a clock.

    Args:
        config: what it is made of.
        chance: what is left to chance.
        on_end: called with a replica when one life of it has ended.
        on_line: called with every line of the trace.
        log_lines: how many lines of the trace are kept for a message.
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
        )
        self.network.on_mend = self._mended
        self.invariants = Invariants(initial_step=config.trainers.step)
        self.losses = LossWatch(self)
        self.replicas: dict[str, Replica] = {}
        self.log: deque[str] = deque(maxlen=log_lines)
        self.observer: Callable[[effects.LighthouseEffect], None] = lambda _: None
        self.teller: Callable[[str, str], None] = lambda _name, _text: None
        self.num_lighthouses = 0
        self._on_end = on_end
        self._on_line = on_line
        self._lives: dict[str, int] = {}
        self._answers: set[tuple[str, QuorumKey, tuple[Member, ...]]] = set()
        self._groups: dict[tuple[QuorumKey, int], Group] = {}
        self._calls = itertools.count(1)
        self._digest = hashlib.blake2b(digest_size=16)
        self.lighthouse = self._new_lighthouse()

    @property
    def wall_ms(self) -> int:
        """Milliseconds since 1970, in the simulation."""
        return self.config.wall_start_ms + self.clock.now_ms

    @property
    def trace_digest(self) -> str:
        """Of every event and effect so far."""
        return self._digest.hexdigest()

    def trace(self, who: str, what: object) -> None:
        """Take something into the trace."""
        line = f"{self.clock.now_ms} {who} {what!r}"
        self._digest.update(line.encode())
        self.log.append(line)
        if self._on_line is not None:
            self._on_line(line)

    def watch(self, order: effects.LighthouseEffect) -> None:
        """Look at what the lighthouse decides."""
        match order:
            case effects.QuorumFormed():
                self.invariants.formed(order.quorum)
                self.marks.hit("a quorum was formed")
                if order.previous is not None and len(order.quorum.members) < len(order.previous.members):
                    self.marks.hit("a quorum shrank")
                for words in REASONS:
                    if words in order.reason:
                        self.marks.hit(f"new id: {words}")
                if order.reason.count(" joined") > 1:
                    self.marks.hit("new id: two joined at once")
                if order.previous is not None and order.previous.replica_ids == order.quorum.replica_ids:
                    self.marks.hit("the same list got a new id")
            case effects.AnswerQuorum():
                replica = self.replica_of_stream(order.stream)
                if replica is not None:
                    self.invariants.answered(replica.replica_id, order.quorum)
                    answer = (replica.replica_id, order.quorum.key, order.quorum.members)
                    if answer in self._answers:
                        self.marks.hit("an answer was given again")
                    self._answers.add(answer)
            case effects.AnswerUnchanged():
                self.marks.hit("unchanged was answered")
            case effects.AskForQuorum():
                self.marks.hit("a lighthouse without memory asked for a quorum")
            case effects.ReplicaLost():
                self.marks.hit(f"lost: {_kind_of_loss(order.reason)}")
            case effects.RefuseSession():
                self.marks.hit(f"refused: {order.refusal.value}")
            case effects.RefuseRequest():
                self.marks.hit(f"request refused: {order.refusal.value}")
        self.observer(order)

    def replica_of_stream(self, number: int) -> Replica | None:
        """Whose manager server holds that stream to the lighthouse."""
        for replica in self.replicas.values():
            manager = replica.manager
            if manager is not None and manager.stream_number == number:
                return replica
        return None

    # --- verbs --------------------------------------------------------------------------------------------------------

    def _new_lighthouse(self) -> LighthouseProcess:
        self.num_lighthouses += 1
        lighthouse = LighthouseProcess(self, self.num_lighthouses)
        lighthouse.start()
        return lighthouse

    def start(
        self,
        name: str,
        *,
        settings: TrainerSettings | None = None,
        replaces: str = "",
        loading: bool = False,
        twin_of: str = "",
    ) -> Replica:
        """Start a (new) life of that replica group.

        Args:
            name: of the group.
            settings: of its trainers, if they are not the job's.
            replaces: the replica id whose place it takes.
            loading: its trainers are started by the caller.
            twin_of: by mistake, it has the replica id of that group's life.
        """
        life = self._lives[name] = self._lives.get(name, 0) + 1
        replica = Replica(name, f"{name}:{life}", replaces)
        if twin_of:
            replica = Replica(name, self.replicas[twin_of].replica_id, replaces, elsewhere=name)
        self.replicas[name] = replica
        self.start_manager(replica)
        chosen = settings if settings is not None else self.config.trainers
        for rank in range(self.config.world_size):
            replica.trainers.append(
                Trainer(
                    JOB,
                    replica.replica_id,
                    rank,
                    self.config.world_size,
                    chosen,
                    _Outside(self, replica),
                    host=replica.host,
                )
            )
        for trainer in replica.trainers:
            self.connect_rank(replica, trainer)
            if not loading:
                trainer.start()
        return replica

    def start_manager(self, replica: Replica) -> None:
        """Start a manager server, the first or another one after its death."""
        manager = ManagerProcess(self, replica, replica.num_managers, self.wall_ms)
        replica.num_managers += 1
        replica.manager = manager
        manager.start()

    def connect_rank(self, replica: Replica, trainer: Trainer) -> None:
        """Open the stream of a rank to its manager server, again whenever it breaks."""
        manager = replica.manager
        if manager is None or not trainer.alive:
            return

        def again() -> None:
            trainer.after(50, lambda: self.connect_rank(replica, trainer))

        def opened(stream: Stream) -> None:
            stream.listen(trainer, noticed, again)

        def noticed(notice: LossNotice) -> None:
            self.losses.told(trainer, notice)
            trainer.noticed(notice)

        self.network.dial(
            trainer,
            manager,
            accepted=lambda stream: manager.rank_connected(trainer.rank, stream),
            opened=opened,
            failed=again,
        )

    def end_process(self, process: Process, *, vanish: bool = False) -> None:
        """End one process, and let the network show it."""
        if process.alive:
            self.trace(process.name, "vanishes" if vanish else "ends")
            process.end(vanish=vanish)
            self.network.ended(process)
            if isinstance(process, ManagerProcess) and not vanish:
                for action in process.on_end:
                    action()

    def kill_trainer(self, replica: Replica, rank: int, reason: str = "killed by signal 9") -> None:
        """kill -9 of a trainer. Rank 0's manager server learns of it from its pipe; another rank's from its stream."""
        trainer = replica.trainers[rank]
        self.end_process(trainer)
        manager = replica.manager
        if rank == 0 and manager is not None:
            manager.after(1, lambda: manager.handle(events.RankDied(rank=0, reason=reason)))
        self._finish(replica, f"rank {rank} {reason}")

    def kill_manager(self, replica: Replica) -> None:
        """kill -9 of a manager server. A group of one rank starts another; a larger one ends."""
        if replica.manager is not None:
            self.manager_exits(replica.manager)

    def manager_exits(self, manager: ManagerProcess) -> None:
        """A manager server ends, by itself after it has reported a loss, or killed."""
        replica = manager.replica
        if not manager.alive or replica.manager is not manager:
            return
        self.end_process(manager)
        if self.config.world_size == 1 and replica.alive:
            replica.manager = None
            trainer = replica.trainers[0]

            def successor() -> None:
                self.start_manager(replica)
                self.connect_rank(replica, trainer)

            trainer.after(200, successor)
        else:
            self._finish(replica, "its manager server died")

    def vanish(self, replica: Replica) -> None:
        """The hosts of a replica group are gone; nobody reports anything."""
        for process in replica.processes():
            self.end_process(process, vanish=True)
        self._finish(replica, "its host vanished")

    def shut_down(self, replica: Replica, reason: str) -> None:
        """End what is left of a replica group."""
        self._finish(replica, reason)

    def restart_lighthouse(self, after_ms: int) -> None:
        """The lighthouse dies, and another with an empty memory starts at its address."""
        self.end_process(self.lighthouse)
        self.clock.after(after_ms, self.revive_lighthouse)

    def revive_lighthouse(self) -> None:
        """Start a lighthouse where there is none."""
        if not self.lighthouse.alive:
            self.trace("lighthouse", "starts")
            self.lighthouse = self._new_lighthouse()

    def _finish(self, replica: Replica, reason: str) -> None:
        """One life is over: whatever of it still lives ends soon after."""
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

    def group(self, key: QuorumKey, group_rank: int, members: tuple[str, ...]) -> Group:
        """The meeting of that name, made by whoever comes first."""
        name = (key, group_rank)
        if name not in self._groups:

            def is_cut(one: str, other: str) -> bool:
                return self.network.is_cut(f"{one}/{group_rank}", f"{other}/{group_rank}")

            self._groups[name] = Group(
                key, group_rank, members, self.clock, self.invariants, self.chance.spread_ms, is_cut
            )
        return self._groups[name]

    def _mended(self) -> None:
        """Groups that were torn apart may go on."""
        for replica in self.replicas.values():
            for trainer in replica.trainers:
                if trainer.group is not None:
                    trainer.group.look()

    def call(
        self,
        trainer: Trainer,
        replica: Replica,
        make: Callable[[int], events.RankAsked | events.RankVoted],
        done: Callable[[Any], None],
    ) -> int:
        """A unary call of a trainer to its manager server; `done` is given the answer, or Refused, once."""
        call = next(self._calls)
        manager = replica.manager
        if manager is None:
            trainer.after(1, lambda: done(_UNREACHABLE))
            return call
        outcome = Waiter()
        outcome.then(done)

        def fail() -> None:
            trainer.run(lambda: outcome.resolve(_UNREACHABLE))

        def lost_answer() -> None:
            # The connection broke under the answer: both ends learn of it.
            self.marks.hit("an answer of a manager server was lost")
            fail()

        numbers = itertools.chain([call], self._calls)
        num_requests = trainer.num_requests

        def arrived() -> None:
            number = next(numbers)
            if number == call:
                manager.called(
                    make(number),
                    lambda value: self.network.message(manager, trainer, partial(outcome.resolve, value), lost_answer),
                )
            elif trainer.num_requests == num_requests:
                # An attempt that its client has given up for another: it is heard before its connection's end is, but
                # not as late as in the rank's next step.
                again = make(number)
                manager.called(again, lambda _: None)
                manager.after(1, lambda: manager.handle(events.RankWithdrew(again.rank, number)))

        manager.on_end.append(lambda: outcome.done or self.clock.after(1, fail))
        self.network.message(trainer, manager, arrived, fail)
        return call


@dataclass(slots=True)
class _Outside:
    """What one replica's trainers find outside (`trainer.Surroundings`)."""

    cluster: Cluster
    replica: Replica

    @property
    def clock(self) -> VirtualClock:
        return self.cluster.clock

    @property
    def timeouts(self) -> Timeouts:
        return self.cluster.timeouts

    @property
    def invariants(self) -> Invariants:
        return self.cluster.invariants

    @property
    def marks(self) -> Marks:
        return self.cluster.marks

    def ask(self, trainer: Trainer, request: RankRequest) -> Waiter:
        waiter = Waiter()
        patience_ms = trainer.gives_up_after_ms or self.timeouts.quorum_timeout_ms
        trainer.gives_up_after_ms = None
        deadline_ms = self.clock.now_ms + patience_ms
        calls: list[int] = []

        def attempt() -> None:
            def make(call: int) -> events.RankAsked:
                return events.RankAsked(trainer.rank, call, request, deadline_ms)

            def done(value: Any) -> None:
                if isinstance(value, Refused) and value.code == "unreachable" and self.clock.now_ms < deadline_ms:
                    if not waiter.done and trainer.alive:
                        trainer.after(100, attempt)
                else:
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

    def vote(self, trainer: Trainer, vote: Round, yes: bool) -> Waiter:
        waiter = Waiter()
        deadline_ms = self.clock.now_ms + self.timeouts.timeout_ms
        first_manager = self.replica.manager
        world_size = self.cluster.config.world_size
        self.invariants.voted(self.replica.host, trainer.rank, vote, yes)

        def attempt() -> None:
            def make(call: int) -> events.RankVoted:
                return events.RankVoted(trainer.rank, call, vote.key, vote.step, vote.purpose, yes, deadline_ms)

            def done(value: Any) -> None:
                if waiter.done:
                    return
                if isinstance(value, bool):
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
            waiter.resolve(Refused("no_verdict", fatal=True))

        attempt()
        timer = trainer.after(self.timeouts.timeout_ms + 1_000, give_up)
        waiter.then(lambda _: timer.cancel())
        return waiter

    def group(self, key: QuorumKey, group_rank: int, members: tuple[str, ...]) -> Group:
        return self.cluster.group(key, group_rank, members)

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

    def note(self, trainer: Trainer, text: str) -> None:
        self.cluster.teller(trainer.name, text)

    def ended(self, trainer: Trainer, reason: str) -> None:
        self.cluster.teller(trainer.name, f"ends: {reason}")
        trainer.phase = f"ended: {reason}"
        self.marks.hit(f"a trainer ended itself: {reason}")
        self.cluster.kill_trainer(self.replica, trainer.rank, reason)


class LossWatch:
    """Whether a loss that a lighthouse has decided ends what runs in the broken quorum (protocol.md section 3).

    A member that could be reached all the time, from the decision on or since its stream stands again, is out of the
    broken quorum's group `REACHED_MS` later. It looks at who is lost, not at what was sent to whom.

    Args:
        cluster: that it watches.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._decided: set[tuple[QuorumKey, str]] = set()
        self._left: set[tuple[QuorumKey, str]] = set()

    def decided(self, lighthouse: LighthouseProcess, key: QuorumKey, lost: str) -> None:
        """That lighthouse takes a member of that quorum for lost, or knows its successor."""
        if (key, lost) not in self._decided:
            self._decided.add((key, lost))
            at_ms = self._cluster.clock.now_ms
            self._look_later(lighthouse, key, at_ms, at_ms + WATCHED_MS)

    def left(self, lighthouse: LighthouseProcess, key: QuorumKey, who: str, *, surely: bool) -> None:
        """A member of that quorum has asked for the next; `surely`: because it can't go on in this one."""
        self._left.add((key, who))
        if surely:
            at_ms = self._cluster.clock.now_ms
            self._look_later(lighthouse, key, at_ms, at_ms + WATCHED_MS)

    def told(self, trainer: Trainer, notice: LossNotice) -> None:
        """That rank is told of a loss. Its own group's breaks whatever quorum it is in; another's one only."""
        known = self._left if notice.lives else self._decided
        if notice.replica_id != trainer.replica_id and (notice.key, notice.replica_id) not in known:
            raise InvariantBroken("P3", f"{trainer.name} is told what no lighthouse has decided: {notice}")

    def _look_later(self, lighthouse: LighthouseProcess, key: QuorumKey, at_ms: int, until_ms: int) -> None:
        cluster = self._cluster

        def look() -> None:
            if cluster.lighthouse is not lighthouse or not lighthouse.alive:
                return  # the next one decides anew
            for replica in cluster.replicas.values():
                for trainer in replica.trainers:
                    if trainer.group is not None and trainer.group.key == key:
                        self._judge(replica, trainer, key, at_ms)
            if cluster.clock.now_ms < until_ms:
                self._look_later(lighthouse, key, at_ms, until_ms)

        cluster.clock.after(REACHED_MS, look)

    def _judge(self, replica: Replica, trainer: Trainer, key: QuorumKey, at_ms: int) -> None:
        if (key, replica.replica_id) in self._left:
            return  # its ranks wait for the next quorum
        since_ms = self._reached_since_ms(replica, trainer, key)
        if since_ms is None:
            return
        for_ms = self._cluster.clock.now_ms - max(at_ms, since_ms, trainer.group_since_ms)
        if for_ms >= REACHED_MS:
            raise InvariantBroken(
                "P3", f"{trainer.name} is still in quorum {key}, broken and within reach for {for_ms} ms"
            )

    def _reached_since_ms(self, replica: Replica, trainer: Trainer, key: QuorumKey) -> int | None:
        """Since when a notice would have come through to that rank at once; None if it would not now."""
        lighthouse, manager, network = self._cluster.lighthouse, replica.manager, self._cluster.network
        if replica.ended or manager is None or lighthouse.attendance.is_dead(replica.replica_id):
            return None  # it ends; or another has taken its place, and it hears of that when it speaks
        if any(process.state is not State.RUNNING for process in (lighthouse, manager, trainer)):
            return None
        rank_since_ms, lighthouse_since_ms = manager.rank_since_ms(trainer.rank), manager.lighthouse_since_ms()
        if rank_since_ms is None or lighthouse_since_ms is None:
            return None
        held = manager.group.quorum
        if held is None or held.key != key:
            return None  # a manager server that was started since knows nothing of that quorum
        return max(
            lighthouse_since_ms,
            rank_since_ms,
            network.calm_since_ms("lighthouse", manager.name),
            network.calm_since_ms(manager.name, trainer.name),
            *(process.running_since_ms for process in (lighthouse, manager, trainer)),
        )


def _kind_of_loss(reason: str) -> str:
    for kind in ("silent", "its stream broke", "its manager server reports", "replaced by"):
        if reason.startswith(kind):
            return kind
    return reason
