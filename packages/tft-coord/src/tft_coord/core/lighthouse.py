"""The lighthouse: hears of sessions, requests and losses; answers with quorums.

One `Job` holds what belongs to a job: who lives, who asks, the newest quorum. The core above it only finds the job of
a stream and keeps the time. A lighthouse that has just started knows nothing: it asks the replica that holds the
newest quorum for its members and goes on from there, so that its own death costs the job nothing.

Law of this file: decisions only. The caller gives the time (`now_ms`, of a clock that never goes back; `wall_ms`,
since 1970, for ids and logs) and random nonces, and performs the effects in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tft_coord.core import effects, events
from tft_coord.core.assignment import all_at, assign
from tft_coord.core.liveness import Accepted, Liveness, Lost, OpenRequest, Rejected, Replica
from tft_coord.core.quorum import Form, Situation, decide, reason_for_new_id
from tft_coord.core.types import MAX_INT64, Hello, Member, Quorum, QuorumKey, Refusal
from tft_coord.errors import ProtocolError, SettingError
from tft_coord.timeouts import Timeouts

INELIGIBLE_FIRST_MS = 1_000
INELIGIBLE_MOST_MS = 60_000


@dataclass(frozen=True, slots=True)
class LighthouseConfig:
    """What a lighthouse is told.

    Args:
        min_replicas: smallest quorum, at least 1.
        timeouts: join, heartbeat, grace and heal time-outs.
    Raises: SettingError: min_replicas is below 1.
    """

    min_replicas: int = 1
    timeouts: Timeouts = Timeouts()  # noqa: RUF009  # frozen

    def __post_init__(self) -> None:
        if self.min_replicas < 1:
            raise SettingError(f"min_replicas is {self.min_replicas}; give at least 1")


@dataclass(frozen=True, slots=True)
class _Birth:
    """Of this lighthouse: when, and which cluster it serves."""

    started_ms: int
    cluster_id: str
    now_ms: int


class LighthouseCore:
    """All jobs of one lighthouse.

    Args:
        config: limits and time-outs.
        started_ms: wall-clock milliseconds since 1970 at the start; the first quorum id is above it.
        cluster_id: of the lighthouses that share one memory; random for a single one.
        nonces: gives a random 64-bit number for each new quorum.
        now_ms: the time at the start.
    """

    def __init__(
        self,
        config: LighthouseConfig,
        *,
        started_ms: int,
        cluster_id: str,
        nonces: Callable[[], int],
        now_ms: int,
    ) -> None:
        self._config = config
        self._birth = _Birth(started_ms, cluster_id, now_ms)
        self._nonces = nonces
        self._jobs: dict[str, Job] = {}
        self._job_of_stream: dict[int, Job] = {}
        self._last_tick_ms = now_ms
        self._succeeded_by_ms = 0
        self._forgotten_id = started_ms

    @property
    def jobs(self) -> tuple[str, ...]:
        """Names of the jobs that have been heard of."""
        return tuple(self._jobs)

    def quorum(self, job: str) -> Quorum | None:
        """The newest quorum of that job."""
        return self._jobs[job].previous if job in self._jobs else None

    def waiting_for(self, job: str) -> str:
        """What the job's next quorum waits for, one phrase."""
        return self._jobs[job].waiting_for if job in self._jobs else "nobody of this job has been heard of"

    def handle(self, event: events.LighthouseEvent, now_ms: int, wall_ms: int) -> list[effects.LighthouseEffect]:
        """Take one event; returns what to do about it, in order."""
        self._note_the_time(now_ms)
        match event:
            case events.HelloReceived():
                return self._hello(event, now_ms, wall_ms)
            case events.StreamClosed():
                job = self._job_of_stream.pop(event.stream, None)
            case _:
                job = self._job_of_stream.get(event.stream)
        if job is None:
            # Before its hello, or refused: nothing that it says counts.
            return []
        return job.handle(event, now_ms, wall_ms)

    def tick(self, now_ms: int, wall_ms: int) -> list[effects.LighthouseEffect]:
        """Let time pass; call every quorum_tick_ms."""
        self._note_the_time(now_ms)
        out: list[effects.LighthouseEffect] = []
        for job in self._jobs.values():
            out += job.tick(now_ms, wall_ms)
        for name in [name for name, job in self._jobs.items() if job.forgotten]:
            # A job of the same name that comes back must not see an id again.
            self._forgotten_id = max(self._forgotten_id, self._jobs.pop(name).last_id)
        return out

    def _note_the_time(self, now_ms: int) -> None:
        """When this process was away for longer than a grace, nobody is lost by it."""
        timeouts = self._config.timeouts
        if now_ms - self._last_tick_ms >= timeouts.quorum_tick_ms + timeouts.reconnect_grace_ms:
            for job in self._jobs.values():
                job.liveness.excuse_all(now_ms)
        self._last_tick_ms = now_ms

    def _hello(self, event: events.HelloReceived, now_ms: int, wall_ms: int) -> list[effects.LighthouseEffect]:
        hello = event.hello
        self._succeeded_by_ms = max(self._succeeded_by_ms, hello.lighthouse_started_ms)
        if self._succeeded_by_ms > self._birth.started_ms:
            message = (
                f"this lighthouse started at {self._birth.started_ms} ms and one that started at "
                f"{self._succeeded_by_ms} ms has taken over; use that one's address"
            )
            return [effects.RefuseSession(event.stream, Refusal.OLD_LIGHTHOUSE, message)]
        current = self._job_of_stream.get(event.stream)
        if current is not None and current.name != hello.job:
            message = f"the stream of replica {hello.replica_id} changes from job {current.name} to {hello.job}"
            return [effects.RefuseSession(event.stream, Refusal.MALFORMED, message + "; open another stream")]
        job = self._jobs.get(hello.job)
        if job is None:
            job = self._jobs[hello.job] = Job(
                hello.job, self._config, self._birth, self._nonces, last_id=self._forgotten_id
            )
        self._job_of_stream[event.stream] = job
        return job.hello(event.stream, hello, now_ms, wall_ms)


class Job:
    """One job: its sessions, its requests, its newest quorum.

    Args:
        name: job id.
        config, birth, nonces: of the lighthouse.
        last_id: the first quorum's id is above it.
    """

    def __init__(
        self, name: str, config: LighthouseConfig, birth: _Birth, nonces: Callable[[], int], *, last_id: int
    ) -> None:
        self.name = name
        self.liveness = Liveness(config.timeouts)
        self.previous: Quorum | None = None
        self.waiting_for = "nobody has asked"
        self._config = config
        self._timeouts = config.timeouts
        self._birth = birth
        self._nonces = nonces
        self.last_id = last_id
        self._broken: str | None = None
        self._formed_here = False
        self._healthy_before: int | None = None
        self._formed_ms = birth.now_ms
        # Replicas that have asked since the newest quorum: once one has, the answer that another lost is not given
        # again, because the quorum has begun to end.
        self._asked_since: set[str] = set()
        self._asking: tuple[int, QuorumKey, int] | None = None  # (stream, key, since_ms)

    @property
    def forgotten(self) -> bool:
        """Nobody of this job is remembered any more, long after its last quorum."""
        return not self.liveness.replicas

    def hello(self, stream: int, hello: Hello, now_ms: int, wall_ms: int) -> list[effects.LighthouseEffect]:
        """A stream of this job says who it is."""
        result = self.liveness.hello(stream, hello, now_ms)
        if isinstance(result, Rejected):
            if result.refusal is Refusal.LOST:
                return [effects.TellLost(stream, hello.session, result.message)]
            return [effects.RefuseSession(stream, result.refusal, result.message)]
        out = self._accepted(stream, hello, result)
        if hello.held is not None:
            out += self._heard_of(stream, hello.held, now_ms)
        return out + self._form(now_ms, wall_ms)

    def handle(self, event: events.LighthouseEvent, now_ms: int, wall_ms: int) -> list[effects.LighthouseEffect]:
        """Take an event of one of this job's streams."""
        out: list[effects.LighthouseEffect] = []
        match event:
            case events.StreamClosed():
                self.liveness.stream_closed(event.stream, now_ms)
                if self._asking is not None and self._asking[0] == event.stream:
                    self._asking = None
                return self._judge(now_ms)
            case events.DeathReported():
                lost = self.liveness.death(event.stream, event.reason, now_ms)
                if lost is not None:
                    out += self._told_lost(lost)
                return out + self._form(now_ms, wall_ms)
        replica = self.liveness.sign(event.stream, now_ms)
        if replica is None:
            return []
        if not replica.healthy:
            # It lives after all, and must know that others went on without it.
            return self._answer_the_lost(replica, event)
        match event:
            case events.BeatReceived():
                self._progress(replica, event.healed_bytes, now_ms)
            case events.QuorumReported():
                out += self._reported(event, now_ms)
                out += self._form(now_ms, wall_ms)
            case events.RequestWithdrawn():
                if replica.request is not None and replica.request.request == event.request:
                    replica.request = None
            case events.QuorumRequested():
                out += self._requested(replica, event, now_ms)
                if self._may_form(now_ms):
                    out += self._form(now_ms, wall_ms)
        return out

    def tick(self, now_ms: int, wall_ms: int) -> list[effects.LighthouseEffect]:
        """Let time pass."""
        if self._asking is not None and now_ms - self._asking[2] >= self._timeouts.heartbeat_timeout_ms:
            self._asking = None
        return self._judge(now_ms) + self._form(now_ms, wall_ms)

    # --- sessions -----------------------------------------------------------------------------------------------

    def _accepted(self, stream: int, hello: Hello, result: Accepted) -> list[effects.LighthouseEffect]:
        self._healthy_before = None
        out: list[effects.LighthouseEffect] = []
        if result.replaced_stream is not None:
            out.append(effects.CloseStream(result.replaced_stream))
        out.append(effects.Welcome(stream, hello.session, self._birth.started_ms, self._birth.cluster_id))
        if result.lost is not None:
            out += self._told_lost(result.lost)
        return out

    def _judge(self, now_ms: int) -> list[effects.LighthouseEffect]:
        out: list[effects.LighthouseEffect] = []
        for lost in self.liveness.judge(now_ms):
            out += self._told_lost(lost)
        return out

    def _told_lost(self, lost: Lost) -> list[effects.LighthouseEffect]:
        replica = lost.replica
        self._healthy_before = None
        out: list[effects.LighthouseEffect] = [
            effects.ReplicaLost(self.name, replica.replica_id, replica.session, lost.reason)
        ]
        message = f"replica {replica.replica_id}, session {replica.session}, was lost: {lost.reason}"
        if lost.stream is not None:
            if lost.request is not None:
                out.append(effects.RefuseRequest(lost.stream, lost.request.request, Refusal.LOST, message))
            if not replica.dead:
                out.append(effects.TellLost(lost.stream, replica.session, message))
        return out

    def _answer_the_lost(self, replica: Replica, event: events.LighthouseEvent) -> list[effects.LighthouseEffect]:
        message = f"replica {replica.replica_id}, session {replica.session}, was lost: {replica.lost}"
        if replica.dead:
            return [effects.RefuseSession(event.stream, Refusal.DEAD, message)]
        return [effects.TellLost(event.stream, replica.session, message)]

    def _progress(self, replica: Replica, healed_bytes: int, now_ms: int) -> None:
        if healed_bytes > replica.healed_bytes:
            replica.healed_bytes = healed_bytes
            replica.progress_ms = now_ms

    # --- a lighthouse without memory --------------------------------------------------------------------------------

    def _heard_of(self, stream: int, held: QuorumKey, now_ms: int) -> list[effects.LighthouseEffect]:
        """A replica holds a quorum: ids go above it, and if we know of none as new, we ask for its members."""
        self.last_id = max(self.last_id, held.quorum_id)
        if self.previous is not None and held <= self.previous.key:
            return []
        if self._asking is not None and held <= self._asking[1]:
            return []
        if self._formed_here:
            # Ours is the newest by definition; ids only go above the other.
            return []
        self._asking = (stream, held, now_ms)
        return [effects.AskForQuorum(stream, held)]

    def _reported(self, event: events.QuorumReported, now_ms: int) -> list[effects.LighthouseEffect]:
        """The members of a quorum that was formed before this lighthouse started."""
        if self._asking is None or self._asking[0] != event.stream:
            return []
        key, self._asking = self._asking[1], None
        quorum = event.quorum
        if quorum is None or quorum.key != key or self._formed_here:
            return []
        if self.previous is not None and quorum.key <= self.previous.key:
            return []
        self.previous = quorum
        self._broken = None
        self._healthy_before = None
        self._formed_ms = now_ms
        self._asked_since = {
            replica.replica_id for replica in self.liveness.replicas.values() if replica.request is not None
        }
        for member in quorum.members:
            self.liveness.presume(member.replica_id, member.session, member.address, self._birth.now_ms)
        return []

    # --- requests ----------------------------------------------------------------------------------------------------

    def _requested(
        self, replica: Replica, event: events.QuorumRequested, now_ms: int
    ) -> list[effects.LighthouseEffect]:
        member = replace(event.member, session=replica.session)
        stream = event.stream
        if member.replica_id != replica.replica_id:
            message = f"the stream of replica {replica.replica_id} asks as {member.replica_id}; ask for itself only"
            return [effects.RefuseRequest(stream, event.request, Refusal.MALFORMED, message)]
        replica.ready = True
        replica.held = event.held
        replica.healing_since_ms = None
        if event.held is not None:
            self.last_id = max(self.last_id, event.held.quorum_id)
        if self._lost_the_answer(replica, event.held):
            if not self._asked_since and self._broken is None and self.previous is not None:
                return [effects.AnswerQuorum(stream, event.request, self.previous)]
            self._broken = self._broken or f"{replica.replica_id} does not hold it while others have gone on"
        self._asked_since.add(replica.replica_id)
        same = replica.request is not None and replica.request.request == event.request
        asked_ms = replica.request.asked_ms if same and replica.request is not None else now_ms
        replica.request = OpenRequest(event.request, member, event.held, asked_ms)
        if member.failed_heals >= 2:
            pause_ms = min(INELIGIBLE_MOST_MS, INELIGIBLE_FIRST_MS << min(member.failed_heals - 2, 16))
            replica.ineligible_until_ms = now_ms + pause_ms
        else:
            replica.ineligible_until_ms = 0
        return []

    def _lost_the_answer(self, replica: Replica, held: QuorumKey | None) -> bool:
        """It is in the newest quorum, in this very session, and does not hold it."""
        if self.previous is None or held == self.previous.key:
            return False
        member = self.previous.member(replica.replica_id)
        return member is not None and member.session == replica.session

    # --- forming -----------------------------------------------------------------------------------------------------

    def _may_form(self, now_ms: int) -> bool:
        """A cheap look before the whole rule: with a thousand members a request must not cost a thousand steps."""
        if self.previous is None:
            return True
        if self._healthy_before is None:
            members = (self.liveness.replicas.get(member.replica_id) for member in self.previous.members)
            self._healthy_before = sum(1 for replica in members if replica is not None and replica.healthy)
        return (
            len(self._asked_since) >= self._healthy_before or now_ms - self._formed_ms >= self._timeouts.join_timeout_ms
        )

    def _waiting(self) -> Iterable[tuple[Replica, OpenRequest]]:
        for replica in self.liveness.replicas.values():
            if replica.healthy and replica.request is not None:
                yield replica, replica.request

    def _form(self, now_ms: int, wall_ms: int) -> list[effects.LighthouseEffect]:
        """Form the next quorum if the rule says so, and answer everyone in it."""
        out = self._refuse_the_ahead()
        waiting = list(self._waiting())
        if not waiting:
            self.waiting_for = "nobody has asked"
            return out
        if self._asking is not None:
            self.waiting_for = f"the members of quorum {self._asking[1]}, which a replica holds"
            return out
        decision = decide(self._situation(waiting, now_ms))
        if not isinstance(decision, Form):
            self.waiting_for = decision.reason
            return out
        return out + self._formed(decision.members, now_ms, wall_ms)

    def _situation(self, waiting: list[tuple[Replica, OpenRequest]], now_ms: int) -> Situation:
        replicas = self.liveness.replicas.values()
        return Situation(
            waiting={replica.replica_id: request.member for replica, request in waiting},
            healthy={replica.replica_id for replica in replicas if replica.healthy and replica.ready},
            healing={replica.replica_id for replica in replicas if self._heals(replica, now_ms)},
            ineligible={replica.replica_id for replica in replicas if replica.ineligible_until_ms > now_ms},
            previous=self.previous,
            min_replicas=self._config.min_replicas,
            join_timeout_ms=self._timeouts.join_timeout_ms,
            first_asked_ms=min(request.asked_ms for _, request in waiting),
            fast_only=now_ms - self._birth.now_ms < self._timeouts.reconnect_grace_ms,
            now_ms=now_ms,
        )

    def _heals(self, replica: Replica, now_ms: int) -> bool:
        since = replica.healing_since_ms
        if since is None or not replica.healthy or now_ms - since >= self._timeouts.heal_timeout_ms:
            return False
        return now_ms - max(since, replica.progress_ms) < self._timeouts.heartbeat_timeout_ms

    def _refuse_the_ahead(self) -> list[effects.LighthouseEffect]:
        """A state loaded from outside must not overtake the job's own."""
        waiting = list(self._waiting())
        live = [request.member.step for _, request in waiting if request.member.live]
        if not live:
            return []
        out: list[effects.LighthouseEffect] = []
        for replica, request in waiting:
            member = request.member
            if member.live or member.step <= max(live):
                continue
            replica.request = None
            if replica.stream is not None:
                message = (
                    f"replica {replica.replica_id} has loaded step {member.step} from outside, ahead of the job's own "
                    f"step {max(live)}; start it without that checkpoint, or restart the whole job from it"
                )
                out.append(effects.RefuseRequest(replica.stream, request.request, Refusal.AHEAD, message))
        return out

    def _formed(self, members: tuple[Member, ...], now_ms: int, wall_ms: int) -> list[effects.LighthouseEffect]:
        previous = self.previous
        reason = reason_for_new_id(previous, members, self._broken)
        out: list[effects.LighthouseEffect] = []
        if reason is None and previous is not None:
            key = previous.key
        else:
            if self.last_id >= MAX_INT64:
                raise ProtocolError(f"job {self.name} has used up its quorum ids; restart it under another job id")
            key = QuorumKey(self.last_id + 1, self._nonces())
        quorum = Quorum(key, members, wall_ms)
        self.last_id = max(self.last_id, key.quorum_id)
        self.previous = quorum
        self._formed_here = True
        self._healthy_before = None
        self._broken = None
        if reason is not None:
            out.append(effects.QuorumFormed(self.name, quorum, previous, now_ms - self._formed_ms, reason))
        self._formed_ms = now_ms
        self._asked_since = set()
        self.waiting_for = "nobody has asked"
        return out + self._answers(quorum, previous, now_ms)

    def _answers(self, quorum: Quorum, previous: Quorum | None, now_ms: int) -> list[effects.LighthouseEffect]:
        unchanged = self._unchanged(quorum, previous)
        try:
            recovering = set() if unchanged else set(assign(quorum).recovering)
        except ProtocolError:
            recovering = set()  # every member is torn; each learns it from its own plan
        out: list[effects.LighthouseEffect] = []
        for rank, member in enumerate(quorum.members):
            replica = self.liveness.replicas[member.replica_id]
            request, replica.request = replica.request, None
            replica.healing_since_ms = now_ms if rank in recovering else None
            holds = request is not None and request.held == quorum.key
            replica.held = quorum.key
            if request is None or replica.stream is None:
                continue  # its stream is broken; it asks again when it is back
            if unchanged and holds:
                out.append(effects.AnswerUnchanged(replica.stream, request.request, quorum.key))
            else:
                out.append(effects.AnswerQuorum(replica.stream, request.request, quorum))
        return out

    def _unchanged(self, quorum: Quorum, previous: Quorum | None) -> bool:
        """Whether whoever holds this key needs to be told nothing new."""
        if previous is None or previous.key != quorum.key:
            return False
        first = quorum.members[0]
        return all_at(quorum.members, first.step, first.lineage) and all(
            after.settings == before.settings for before, after in zip(previous.members, quorum.members, strict=True)
        )
