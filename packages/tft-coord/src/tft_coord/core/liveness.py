"""Liveness: the sessions of one job's replica groups, and what counts as a loss.

A stream breaks most often because a process died, and sometimes because of a short interruption. Now and then the
fault is in the network or in the lighthouse. Three rules follow:

- A break is judged after a short grace.
- When most streams break together, no replica is judged by its break.
- A replica whose link flaps is judged by its silence instead.

A reported death needs no judging and is final. A break that the replica's own host has reported is judged by itself,
however many there are: twenty killed processes are no fault of the network.

Law of this file: one job's sessions; no quorum arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tft_coord.core.names import base_name
from tft_coord.core.progress import Progress
from tft_coord.core.types import Hello, Member, QuorumKey, Refusal
from tft_coord.timeouts import Timeouts

OUTAGE_STREAMS_LEAST = 4
FLAPS_MOST = 3
UNFINISHED_MOST = 10_000  # the number of names that are kept


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A replica's open quorum request."""

    request: int
    member: Member
    held: QuorumKey | None
    asked_ms: int


@dataclass(slots=True)
class Replica:
    """The state of one replica id.

    Excused silence moves `last_sign_ms` on. It does not move `heard_ms`, the true time of the last message. `since_ms`
    is the time since which this replica is known, or its predecessor if that did not finish. `presumed`: other replicas
    have named this one, and it has not said hello yet.
    `withdrawn` keeps (asked_ms, withdrawn_ms) of a request that ended without an answer: a replica that soon asks again
    has waited since its first request. `answered` is the number of the request that the newest quorum answered.
    `answer_void`: the replica had withdrawn that request. `left` is the reason why it has left the job for good. While
    it `serves`, other replicas may heal from it, and its end is watched.
    """

    replica_id: str
    session: int
    address: str
    last_sign_ms: int
    stream: int | None = None
    replaces: str = ""
    heard_ms: int = 0
    since_ms: int = 0
    presumed: bool = False
    ready: bool = False
    built: bool = False  # it was in a process group that all its members had built
    held: QuorumKey | None = None
    num_answers: int = 0
    broken_ms: int | None = None
    excused: bool = False
    lost: str | None = None
    lost_ms: int = 0
    dead: bool = False
    fell_silent: bool = False  # it was lost by silence, a stop or a hang, and may go on with its state
    stream_losses_ms: list[int] = field(default_factory=list)
    request: OpenRequest | None = None
    withdrawn: tuple[int, int] | None = None
    answered: int | None = None
    answer_void: bool = False
    healing_since_ms: int | None = None
    has_healed: bool = False  # it finished that healing, and is between two steps again
    healed_bytes: int = 0
    progress_ms: int = 0
    ineligible_until_ms: int = 0
    barred_ms: int = 0  # when it last waited while kept out or left out: its wait hurries no replica
    left: str | None = None
    finished: bool = False  # it left because its training was over
    serves: bool = False
    pid: int = 0  # of its trainer
    tries_peers: bool = False  # it dials its peers on request
    where: tuple[Progress, int] | None = None  # its progress in the newest beat, and when that came
    wait_reported_ms: int | None = None  # when its newest beat came, if that reports a wait
    stopped: tuple[str, int, int] | None = None  # its stopped ranks, for how long, and when it said so
    answers_probes: bool = False
    asked_to_leave: tuple[str, int] | None = None  # (reason, serve_ms) of the drain request

    @property
    def healthy(self) -> bool:
        return self.lost is None and self.left is None

    @property
    def watched(self) -> bool:
        """Return whether its end would be a loss."""
        return self.lost is None and (self.left is None or self.serves)

    def withdraw(self, now_ms: int) -> None:
        """End the open request, if any, without an answer."""
        if self.request is not None:
            self.withdrawn = (self.request.asked_ms, now_ms)
            self.request = None

    def asked_ms(self, now_ms: int, patience_ms: int) -> int:
        """Return since when a request made now counts as open: an answer that never came does not restart the wait."""
        if self.request is not None:
            return self.request.asked_ms
        if self.withdrawn is not None and now_ms - self.withdrawn[1] < patience_ms:
            return self.withdrawn[0]
        return now_ms


@dataclass(frozen=True, slots=True)
class Lost:
    """A replica that was declared lost; its open request, if any, is withdrawn.

    `detect_ms`: how long ago its silence began or its stream broke; 0: its end was reported.
    """

    replica: Replica
    reason: str
    stream: int | None
    request: OpenRequest | None
    detect_ms: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """An accepted hello. `replaced_stream` is an older stream of this replica to close; `lost` is the replaced
    replica."""

    replica: Replica
    replaced_stream: int | None = None
    lost: Lost | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """A rejected hello. `silent_ms`: for how long the replica that it would displace has been silent."""

    refusal: Refusal
    message: str
    silent_ms: int = 0


class Liveness:
    """The sessions of one job.

    Args:
        timeouts: heartbeat_timeout_ms, reconnect_grace_ms and what follows from them.
        remember_ms: the minimum time for which a lost replica is remembered.
    """

    def __init__(self, timeouts: Timeouts, remember_ms: int = 0) -> None:
        self._timeouts = timeouts
        self._forget_after_ms = max(timeouts.forget_after_ms, remember_ms)
        self.replicas: dict[str, Replica] = {}
        self._by_stream: dict[int, Replica] = {}
        # Replicas whose stream broke without a report, in that order; breaks of more than a grace ago are dropped.
        self._broken: dict[str, Replica] = {}
        self._unfinished: dict[str, int] = {}  # user's name -> since when; its replica ended unfinished
        self._outage_ms: int | None = None  # since when silence counts anew; `judge` passes it on to the replicas

    def remember(self, for_ms: int) -> None:
        """Remember lost replicas for at least that long."""
        self._forget_after_ms = max(self._forget_after_ms, for_ms)

    @property
    def num_connected(self) -> int:
        """Return how many replicas have an open stream."""
        return len(self._by_stream)

    def of_stream(self, stream: int) -> Replica | None:
        """Return the replica whose newest stream this is."""
        return self._by_stream.get(stream)

    def hello(self, stream: int, hello: Hello, now_ms: int) -> Accepted | Rejected:
        """Handle the hello of a stream.

        Raises nothing: a bad hello gets an answer like any other.
        """
        known = self.replicas.get(hello.replica_id)
        other = self._by_stream.get(stream)
        if other is not None and other is not known:
            message = f"the stream of replica {other.replica_id} says hello for {hello.replica_id}; open another stream"
            return Rejected(Refusal.MALFORMED, message)
        if known is not None:
            rejected = self._reject(known, stream, hello, now_ms)
            if rejected is not None:
                return rejected
        if known is None:
            known = Replica(
                hello.replica_id, hello.session, hello.address, now_ms, since_ms=self._since_ms(hello, now_ms)
            )
            self.replicas[hello.replica_id] = known
        # A request belongs to its stream. A replica that still wants it sends it again; one that withdrew it meanwhile
        # does not.
        known.withdraw(now_ms)
        if hello.session > known.session or known.lost is not None:
            known.session = hello.session
            known.answered = None
            known.answer_void = False
            known.healing_since_ms = None
            known.healed_bytes = 0
            known.lost = None
        replaced = known.stream if known.stream != stream else None
        if known.stream is not None:
            self._by_stream.pop(known.stream, None)
        known.address, known.pid = hello.address, hello.pid
        known.answers_probes = hello.answers_probes
        known.wait_reported_ms, known.stopped = None, None
        known.replaces = hello.replaces
        known.tries_peers = hello.tries_peers
        known.presumed = False
        known.stream = stream
        self._clear_break(known)
        known.excused = False
        known.last_sign_ms = known.heard_ms = now_ms
        known.ready = known.ready or hello.ready
        known.held, known.num_answers = hello.held, hello.num_answers
        if hello.left and known.left is None:
            self.leave(known, "reported in its hello", now_ms)
        self._by_stream[stream] = known
        lost: Lost | None = None
        predecessor = self.replicas.get(hello.replaces) if hello.replaces != hello.replica_id else None
        if predecessor is not None and predecessor.watched:
            lost = self._lose(predecessor, f"replaced by {hello.replica_id}", now_ms, dead=True)
        elif predecessor is not None:
            predecessor.dead = True  # whatever it was lost by, it can't come back any more
        return Accepted(known, replaced, lost)

    def presume(self, members: Iterable[Member], started_ms: int) -> None:
        """Presume that the members of a reported newest quorum live.

        They are healthy until heartbeat_timeout after the start, unless they say hello themselves. Presumed members of
        an older quorum are dropped, but a loss stays a loss. A member with a successor is dead.
        """
        self.drop_presumed()
        replaced = {replica.replaces for replica in self.replicas.values()}
        for member in members:
            if member.replica_id not in self.replicas and member.replica_id not in replaced:
                self.replicas[member.replica_id] = Replica(
                    member.replica_id,
                    member.session,
                    member.address,
                    started_ms,
                    since_ms=started_ms,
                    ready=True,
                    presumed=True,
                )

    def drop_presumed(self) -> None:
        """Drop the replicas that are only presumed to live, because a quorum formed without them."""
        self.replicas = {
            name: replica for name, replica in self.replicas.items() if not replica.presumed or not replica.healthy
        }

    def sign(self, stream: int, now_ms: int) -> Replica | None:
        """Record a sign of life on a stream; return its replica, or None if the stream is not its replica's newest."""
        replica = self._by_stream.get(stream)
        if replica is not None and replica.lost is None:
            replica.last_sign_ms = replica.heard_ms = now_ms
        return replica

    def leave(self, replica: Replica, reason: str, now_ms: int, *, finished: bool = False) -> None:
        """Mark a replica as having left the job: it is not healthy any more, and no replica waits for it."""
        replica.left = reason
        replica.finished = replica.finished or finished
        self._note_unfinished(replica)
        replica.lost_ms = now_ms
        replica.request = None
        replica.withdrawn = None
        replica.healing_since_ms = None

    def release(self, replica: Replica, now_ms: int) -> None:
        """Release a replica that has left: no replica heals from it any more, so its end will be no loss."""
        replica.serves = False
        replica.lost_ms = now_ms
        self._clear_break(replica)

    def stream_closed(self, stream: int, now_ms: int, *, by_peer: bool = False) -> None:
        """Handle a closed connection; `judge` judges it after the grace. Closings of older streams are ignored.

        Args:
            by_peer: the host at the other end has closed it, so the network and the lighthouse work.
        """
        replica = self._by_stream.pop(stream, None)
        if replica is None:
            return
        replica.stream = None
        # No answer can travel on a closed stream. The replica is healthy, but it does not wait until it asks again.
        replica.withdraw(now_ms)
        if replica.watched:
            replica.broken_ms = now_ms
            if not by_peer:
                self._broken[replica.replica_id] = replica
                self._excuse_outage(now_ms)

    def death(self, stream: int, reason: str, now_ms: int) -> Lost | None:
        """Handle the reported end of a trainer: the replica is lost at once and for good."""
        replica = self._by_stream.get(stream)
        if replica is None:
            return None
        if not replica.watched:
            replica.dead = True
            return None
        return self._lose(replica, f"its manager server reports: {reason}", now_ms, dead=True)

    def silence(self, replica_id: str, reason: str, now_ms: int) -> Lost | None:
        """Declare a replica lost that is silent, stopped or hung, until it opens a newer session.

        The loss does not count as a sign of a bad link.
        """
        replica = self.replicas.get(replica_id)
        if replica is None or not replica.healthy:
            return None
        return self._lose(replica, reason, now_ms, fell_silent=True)

    def flaps(self, replica: Replica, now_ms: int) -> bool:
        """Return whether its link broke often lately, so that only a silence of heartbeat_timeout judges it."""
        recent = [at for at in replica.stream_losses_ms if now_ms - at < self._timeouts.flap_window_ms]
        replica.stream_losses_ms = recent
        return len(recent) >= FLAPS_MOST

    def judge(self, now_ms: int) -> list[Lost]:
        """Declare replicas lost whose grace or heartbeat_timeout has passed; drop old entries."""
        self._apply_outage()
        losses = []
        for replica in self.replicas.values():
            if not replica.watched:
                continue
            if self._break_counts(replica, now_ms):
                replica.stream_losses_ms.append(now_ms)
                reason = f"its stream disconnected and did not return within {self._timeouts.reconnect_grace_ms} ms"
                losses.append(self._lose(replica, reason, now_ms))
            elif now_ms - replica.last_sign_ms >= self._timeouts.heartbeat_timeout_ms:
                reason = f"silent for {self._timeouts.heartbeat_timeout_ms} ms"
                losses.append(self._lose(replica, reason, now_ms, fell_silent=True))
        # A replica with an open stream is kept: when it wakes up, it must hear that it was lost.
        forgotten = [
            replica
            for replica in self.replicas.values()
            if replica.stream is None and not replica.watched and now_ms - replica.lost_ms >= self._forget_after_ms
        ]
        for replica in forgotten:
            del self.replicas[replica.replica_id]
        return losses

    def excuse_all(self, now_ms: int) -> None:
        """Excuse the silence and the breaks of a time when the lighthouse itself was away."""
        for replica in self.replicas.values():
            if replica.watched:
                replica.last_sign_ms = now_ms
                replica.progress_ms = now_ms
                if replica.broken_ms is not None:
                    replica.excused = True

    def _reject(self, known: Replica, stream: int, hello: Hello, now_ms: int) -> Rejected | None:
        name = hello.replica_id
        if known.dead:
            return Rejected(
                Refusal.DEAD,
                f"replica {name} was reported dead ({known.lost}); start its successor under a new replica id",
            )
        lives = known.lost is None and known.stream is not None and known.stream != stream
        if lives and hello.address != known.address:
            return Rejected(
                Refusal.DUPLICATE,
                f"replica {name} is already running at {known.address} (session {known.session}) and connects again "
                f"from {hello.address}; end one of the two, or give them different replica ids",
                now_ms - known.heard_ms,
            )
        if hello.session < known.session:
            return Rejected(
                Refusal.STALE,
                f"replica {name} has session {known.session}, and {hello.session} is older; open a newer session",
            )
        if known.lost is not None and hello.session == known.session:
            return Rejected(
                Refusal.LOST,
                f"session {hello.session} of replica {name} was lost ({known.lost}); open a newer session",
            )
        return None

    def _lose(
        self, replica: Replica, reason: str, now_ms: int, *, dead: bool = False, fell_silent: bool = False
    ) -> Lost:
        request, replica.request = replica.request, None
        replica.withdrawn = None
        self._note_unfinished(replica)
        since_ms = replica.heard_ms if fell_silent and not replica.presumed else replica.broken_ms
        replica.lost = reason
        replica.lost_ms = now_ms
        replica.dead = dead
        replica.fell_silent = fell_silent
        self._clear_break(replica)
        replica.healing_since_ms = None
        return Lost(replica, reason, replica.stream, request, now_ms - since_ms if since_ms is not None else 0)

    def _since_ms(self, hello: Hello, now_ms: int) -> int:
        """Return since when a replica that says hello for the first time, or its predecessor, has been known.

        The successor of a replica that has finished begins something else, such as the next Manager of the same script.
        """
        before = self.replicas.get(hello.replaces)
        name = base_name(hello.replica_id)
        if before is not None:
            return now_ms if before.finished else before.since_ms
        if name in self._unfinished:
            return self._unfinished[name]
        # A finished replica is named to no one as a predecessor, so this predecessor crashed before it could say
        # anything.
        return 0 if hello.replaces else now_ms

    def _note_unfinished(self, replica: Replica) -> None:
        """Remember a replica whose training was not over. A supervisor may restart it long after it is
        forgotten here."""
        name = base_name(replica.replica_id)
        if replica.finished:
            self._unfinished.pop(name, None)
        elif name:
            self._unfinished[name] = min(replica.since_ms, self._unfinished.pop(name, replica.since_ms))
            if len(self._unfinished) > UNFINISHED_MOST:
                del self._unfinished[next(iter(self._unfinished))]

    def _break_counts(self, replica: Replica, now_ms: int) -> bool:
        if replica.broken_ms is None or replica.excused:
            return False
        return not self.flaps(replica, now_ms) and now_ms - replica.broken_ms >= self._timeouts.reconnect_grace_ms

    def _excuse_outage(self, now_ms: int) -> None:
        """Excuse the breaks when more than half of at least four streams break within one grace without a report.

        The fault is not theirs in that case. Thousands break together, so no break may cost a look at all others.
        """
        grace_ms = self._timeouts.reconnect_grace_ms
        while (first := next(iter(self._broken.values()))).broken_ms is None or now_ms - first.broken_ms > grace_ms:
            del self._broken[first.replica_id]
        streams = len(self._by_stream) + len(self._broken)
        if streams < OUTAGE_STREAMS_LEAST or 2 * len(self._broken) <= streams:
            return
        self._outage_ms = now_ms
        for replica in reversed(self._broken.values()):
            if replica.excused:
                break  # all that broke before it are excused too
            replica.excused = True

    def _apply_outage(self) -> None:
        """Count silence from the last outage on, which is a fault of the network or of the lighthouse."""
        if self._outage_ms is None:
            return
        for replica in self.replicas.values():
            if replica.watched:
                replica.last_sign_ms = max(replica.last_sign_ms, self._outage_ms)
        self._outage_ms = None

    def _clear_break(self, replica: Replica) -> None:
        """Clear the break: the stream is back, or the replica's end is known."""
        replica.broken_ms = None
        self._broken.pop(replica.replica_id, None)
