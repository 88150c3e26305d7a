"""The lighthouse: it receives sessions, requests and losses, and answers with quorums.

A `Job` holds the state of one job: the living replicas, the waiting requests, the newest quorum. `LighthouseCore` only
finds the job of a stream and keeps the time. A restarted lighthouse has no memory. It asks the replica that holds the
newest quorum for the members of that quorum, and resumes from there. The restart of a lighthouse therefore costs the
job nothing.

Law of this file: decisions only. The caller gives the time (`now_ms` of a monotonic clock; `wall_ms` since 1970, for
ids and logs) and random nonces, and performs the effects in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from tft_coord.core import effects, events
from tft_coord.core.assignment import Assignment, all_at, assign
from tft_coord.core.config import LighthouseConfig
from tft_coord.core.handshake import Handshake, MemoryBudget, Precedence
from tft_coord.core.job_end import JobEnd
from tft_coord.core.liveness import Accepted, Liveness, Lost, OpenRequest, Rejected, Replica
from tft_coord.core.living_quorum import UNKNOWN_MEMBERS, LivingQuorum
from tft_coord.core.names import base_name, listed, shorten
from tft_coord.core.poor_sources import PoorSources
from tft_coord.core.progress import HangWatch, Phase, Progress, hang_reason, stuck_reason
from tft_coord.core.quorum import Form, Situation, Wait, decide, reason_for_new_id
from tft_coord.core.reach import Exclusions, Reach, peers_of
from tft_coord.core.room import full_for
from tft_coord.core.status import JobStatus, job_status
from tft_coord.core.stragglers import QuorumContext, StragglerWatch, left_out_reason
from tft_coord.core.suspicion import (
    STOP_VALID_MS,
    WAIT_VALID_MS,
    WAITS_MS,
    Sighting,
    Suspicion,
    most_wait,
)
from tft_coord.core.troubles import Troubles
from tft_coord.core.types import MAX_INT64, Hello, LossNotice, Member, Quorum, QuorumKey, Refusal
from tft_coord.core.waits import JobWait, NameWatch, WaitBoard, left_out_wait, quorum_wait, step_wait, waits_since
from tft_coord.errors import ProtocolError

INELIGIBLE_FIRST_MS = 1_000
INELIGIBLE_MOST_MS = 60_000
# Sessions and start times are milliseconds since 1970. The clocks of hosts differ, but not by more than this.
CLOCKS_DIFFER_MOST_MS = 365 * 24 * 3_600_000
# Quorum ids rise by one from the start time of a lighthouse in milliseconds. An id far ahead of the clock would leave
# no ids to the job. A request may name a quorum that was formed since the hello.
HIGHEST_ID_AHEAD = CLOCKS_DIFFER_MOST_MS + 2**32
# The number of earlier quorums whose losses are remembered.
BROKEN_QUORUMS_KEPT = 16
NAMES_SHOWN_MOST = 20
MEMBERS_IN_A_MS = 10  # a look at n members that a beat or the clock causes happens at most once in n/10 ms
LINK_WARNINGS_MOST = 3  # warnings about other replicas that one replica gets at once
CHECK_LINKS = "Check the addresses, the interfaces and the firewalls on both sides"
NO_REQUEST = "a replica to ask for a quorum"
TRAINING = "nothing; the job is training"  # `wait_sentence` says this of a quorum that stands


@dataclass(frozen=True, slots=True)
class _Incarnation:
    """The identity of this lighthouse: its start time and its cluster.

    `listens_ms`: since when it has listened to all replicas without a break, that is since its start or its last pause.
    `had_earlier_life`: a durable counter says that a lighthouse ran here before.
    """

    started_ms: int
    cluster_id: str
    now_ms: int
    listens_ms: int
    had_earlier_life: bool = False


class LighthouseCore:
    """All jobs of one lighthouse.

    Args:
        config: limits and timeouts.
        started_ms: wall-clock milliseconds since 1970 at the start; the first quorum id is above it.
        cluster_id: of the lighthouses that share one memory; random for a single one.
        nonces: returns a random 64-bit number for each new quorum.
        now_ms: the time at the start.
        had_earlier_life: a durable counter says that a lighthouse served these jobs before, and its memory is lost.
    """

    def __init__(
        self,
        config: LighthouseConfig,
        *,
        started_ms: int,
        cluster_id: str,
        nonces: Callable[[], int],
        now_ms: int,
        had_earlier_life: bool = False,
    ) -> None:
        self._config = config
        self._incarnation = _Incarnation(started_ms, cluster_id, now_ms, now_ms, had_earlier_life)
        self._nonces = nonces
        self._jobs: dict[str, Job] = {}
        self._budget = MemoryBudget()
        self._job_of_stream: dict[int, Job] = {}
        self._last_tick_ms = now_ms
        self._forgotten_id = started_ms
        self._superseded_by_ms = 0
        # the times of the first and the last replica that was sent to a newer lighthouse
        self._redirected_ms: tuple[int, int] | None = None

    @property
    def jobs(self) -> tuple[str, ...]:
        """Return the names of the known jobs."""
        return tuple(self._jobs)

    @property
    def cluster_id(self) -> str:
        """Return the id of the lighthouses that share one memory."""
        return self._incarnation.cluster_id

    @property
    def started_ms(self) -> int:
        """Return the wall-clock milliseconds since 1970 at the start, or when this lighthouse began to replace a newer
        one."""
        return self._incarnation.started_ms

    @property
    def is_replaced(self) -> bool:
        """Return whether a newer lighthouse of this cluster serves its jobs, as far as this one has heard."""
        return self._superseded_by_ms > self._incarnation.started_ms

    def quorum(self, job: str) -> Quorum | None:
        """Return the newest quorum of that job."""
        return self._jobs[job].previous if job in self._jobs else None

    def newest_step(self, job: str) -> int | None:
        """Return the highest step that a member of that job's newest quorum has reported; None: no such job."""
        return self._jobs[job].newest_step if job in self._jobs else None

    def any_alive(self, job: str, now_ms: int) -> str | None:
        """Return one healthy replica of that job, or None.

        A replica whose stream has just broken counts for heartbeat_timeout after its last sign of life, because it may
        be redialing.
        """
        timeout_ms = self._config.timeouts.heartbeat_timeout_ms
        replicas = self._jobs[job].liveness.replicas.values() if job in self._jobs else ()
        for replica in replicas:
            may_come_back = not replica.dead and replica.left is None and now_ms - replica.last_sign_ms < timeout_ms
            if replica.healthy or may_come_back:
                return replica.replica_id
        return None

    def has_trained(self, job: str) -> bool:
        """Return whether that job has a quorum, or one of its replicas holds an earlier one."""
        known = self._jobs.get(job)
        return known is not None and (
            known.previous is not None or any(each.held is not None for each in known.liveness.replicas.values())
        )

    def evict(self, job: str, refusal: Refusal, message_to: Callable[[str], str]) -> list[effects.LighthouseEffect]:
        """Refuse all replicas of a job, each with its own message, and forget the job."""
        known = self._jobs.pop(job, None)
        if known is None:
            return []
        self._forget(known)
        streams = [stream for stream, its_job in self._job_of_stream.items() if its_job is known]
        out: list[effects.LighthouseEffect] = []
        for stream in streams:
            del self._job_of_stream[stream]
            replica = known.liveness.of_stream(stream)
            who = replica.replica_id if replica is not None else "of an older stream"
            out.append(effects.RefuseSession(stream, refusal, message_to(who)))
        return out

    def replica_of(self, stream: int) -> str | None:
        """Return the id of the replica that said hello on that stream, if it is the replica's newest stream."""
        job = self._job_of_stream.get(stream)
        replica = job.liveness.of_stream(stream) if job is not None else None
        return replica.replica_id if replica is not None else None

    def job_of(self, stream: int) -> str | None:
        """Return the name of the job to which that stream has said hello."""
        job = self._job_of_stream.get(stream)
        return job.name if job is not None else None

    def waiting_for(self, job: str) -> str:
        """Return a phrase that says what the job's next quorum waits for."""
        return self._jobs[job].waiting_for if job in self._jobs else "no replica of this job has connected"

    def wait_sentence(self, job: str, now_ms: int) -> str:
        """Return the sentence of `waiting_for`, with the missing replicas and where each was last seen."""
        wait = self._jobs[job].wait(now_ms) if job in self._jobs else None
        if wait is not None:
            return wait.sentence
        waiting_for = self.waiting_for(job)
        return TRAINING if waiting_for == NO_REQUEST and self._jobs[job].trains else waiting_for

    def warnings(self, job: str) -> tuple[str, ...]:
        """Return what is wrong with the job now, one sentence for each problem.

        Problems are two living replicas of one name, a straggler, and replicas that are lost or left out.
        """
        known = self._jobs.get(job)
        return known.names.warnings + known.stragglers.warnings + known.troubles.warnings if known is not None else ()

    def status(self, now_ms: int) -> tuple[JobStatus, ...]:
        """Return the state of each job, for an operator. It changes nothing."""
        return tuple(
            replace(job.status(now_ms, self.warnings(name)), min_replicas=self._config.of_job(name).min_replicas)
            for name, job in self._jobs.items()
        )

    def look_at_waits(self, now_ms: int) -> list[effects.TellWait | effects.WaitNoticed | effects.Warned]:
        """Return which replicas to tell now about their wait, and what to log. Call it once a second."""
        out: list[effects.TellWait | effects.WaitNoticed | effects.Warned] = []
        for job in self._jobs.values():
            wait = job.wait(now_ms)
            due, notice, sentence = job.board.look(wait, now_ms)
            if due is not None:
                out += [effects.TellWait(stream, due.sentence) for stream in due.streams]
            if notice is not None:
                missing = wait.missing if wait is not None and not notice.is_over else None
                out.append(effects.WaitNoticed(job.name, notice.seconds, notice.is_over, sentence, missing))
            job.look_at_troubles(now_ms)
            for warning in job.names.look(job.liveness.replicas.values(), now_ms):
                out.append(effects.Warned(job.name, warning))
                # All replicas of the job hear the warning, because two replicas of one name harm the others too.
                living = (each for each in job.liveness.replicas.values() if each.healthy)
                out += [effects.TellWait(each.stream, warning, True) for each in living if each.stream is not None]
        return out

    def reconfigure(self, config: LighthouseConfig) -> None:
        """Use other settings from now on. Only min_replicas, the limits and the settings of single jobs may differ from
        those at the start; a replica that is connected stays, whatever the limits are."""
        self._config = config
        for job in self._jobs.values():
            job.reconfigure(config.of_job(job.name))

    def handle(self, event: events.LighthouseEvent, now_ms: int, wall_ms: int) -> list[effects.LighthouseEffect]:
        """Handle one event; return the effects, in order."""
        self._note_time(now_ms)
        if isinstance(event, events.StreamClosed):
            job = self._job_of_stream.pop(event.stream, None)
        elif isinstance(event, events.HelloReceived):
            return self._hello(event, now_ms, wall_ms)
        else:
            job = self._job_of_stream.get(event.stream)
        if job is None:
            # The stream has not said hello yet, or was refused: its messages do not count.
            return []
        return job.handle(event, now_ms, wall_ms)

    def drain(
        self, event: events.DrainRequested
    ) -> list[effects.AskToLeave | effects.TellNewest | effects.RefuseUnary]:
        """Handle an operator's request that a replica leave.

        Returns: the effect that asks the replica (none while it has no stream), or the reason of a refusal.
        """
        job = self._jobs.get(event.job)
        if job is None:
            known = _listed(self._jobs) or "none so far"
            message = f"this lighthouse knows no job {event.job!r}; known jobs: {known}"
            return [effects.RefuseUnary(event.call, Refusal.UNKNOWN, message)]
        return job.drain(event)

    def tick(self, now_ms: int, wall_ms: int) -> list[effects.LighthouseEffect]:
        """Handle the passage of time; call it every quorum_tick_ms."""
        self._note_time(now_ms)
        out: list[effects.LighthouseEffect] = []
        for job in self._jobs.values():
            try:
                out += job.tick(now_ms, wall_ms)
            except Exception as error:  # a fault in one job must not cost the other jobs their answers
                out.append(effects.JobFailed(job.name, error))
        for name in [name for name, job in self._jobs.items() if not job.liveness.replicas]:
            self._forget(self._jobs.pop(name))
        return out

    def _forget(self, job: Job) -> None:
        """Free what is kept of a job; a job of the same name that returns must not see a quorum id again."""
        self._forgotten_id = max(self._forgotten_id, job.last_id)
        job.forget_fingerprints()

    def _note_time(self, now_ms: int) -> None:
        """Note the time. A pause of this process for longer than a grace must not make replicas lost."""
        timeouts = self._config.timeouts
        if now_ms - self._last_tick_ms >= timeouts.quorum_tick_ms + timeouts.reconnect_grace_ms:
            self._incarnation = replace(self._incarnation, listens_ms=now_ms)
            for job in self._jobs.values():
                job.excuse_pause(now_ms, now_ms - self._last_tick_ms)
        self._last_tick_ms = now_ms

    def _is_superseded(self, hello: Hello) -> bool:
        """Return whether a newer lighthouse of this cluster is in use, as this replica or an earlier one has
        reported."""
        if hello.cluster_id == self._incarnation.cluster_id:
            self._superseded_by_ms = max(self._superseded_by_ms, hello.lighthouse_started_ms)
        return self.is_replaced

    def _resumes_service(self, now_ms: int, wall_ms: int) -> bool:
        """Return whether the newer lighthouse is presumed gone, because replicas have been coming here for
        heartbeat_timeout.

        In that case this lighthouse behaves from now on as if it had just started, without memory. Replicas that come
        here for only a moment, because they can't reach the newer lighthouse, are no reason: the rest of the job
        would have to follow them.
        """
        patience_ms = self._config.timeouts.heartbeat_timeout_ms
        since_ms, last_ms = self._redirected_ms or (now_ms, now_ms)
        if now_ms - last_ms > patience_ms:
            since_ms = now_ms
        if now_ms - since_ms < patience_ms:
            self._redirected_ms = since_ms, now_ms
            return False
        self._redirected_ms = None
        started_ms = max(wall_ms, self._superseded_by_ms + 1)
        self._incarnation = replace(self._incarnation, started_ms=started_ms, now_ms=now_ms, listens_ms=now_ms)
        self._forgotten_id = max(self._forgotten_id, self._incarnation.started_ms)
        return True

    def _retire(self, stream: int) -> list[effects.LighthouseEffect]:
        """Refuse and forget all replicas, because a newer lighthouse serves them."""
        message = (
            f"a lighthouse that started at {self._superseded_by_ms} ms has replaced this one, which started at "
            f"{self._incarnation.started_ms} ms; use the newer one. This one resumes if replicas keep dialing it for "
            f"{self._config.timeouts.heartbeat_timeout_ms} ms"
        )
        streams = {stream, *self._job_of_stream}
        self._job_of_stream.clear()
        while self._jobs:
            _, job = self._jobs.popitem()
            self._forget(job)
        return [effects.RefuseSession(each, Refusal.OLD_LIGHTHOUSE, message) for each in sorted(streams)]

    def _hello(self, event: events.HelloReceived, now_ms: int, wall_ms: int) -> list[effects.LighthouseEffect]:
        hello = event.hello
        behind = _clock_behind(hello, wall_ms, self._incarnation.cluster_id)
        if behind is not None:
            return [effects.RefuseSession(event.stream, Refusal.CLOCK, behind)]
        if self._is_superseded(hello) and not self._resumes_service(now_ms, wall_ms):
            return self._retire(event.stream)
        current = self._job_of_stream.get(event.stream)
        if current is not None and current.name != hello.job:
            message = f"the stream of replica {hello.replica_id} changes from job {current.name} to {hello.job}"
            return [effects.RefuseSession(event.stream, Refusal.MALFORMED, message + "; open another stream")]
        job = self._jobs.get(hello.job)
        full = full_for(hello, job.liveness if job is not None else None, len(self._jobs), self._config)
        if full is not None:
            return [effects.RefuseSession(event.stream, Refusal.FULL, full)]
        if job is None:
            job = self._jobs[hello.job] = Job(
                hello.job,
                self._config.of_job(hello.job),
                self._incarnation,
                self._nonces,
                self._budget,
                now_ms=now_ms,
                last_id=self._forgotten_id,
            )
        self._job_of_stream[event.stream] = job
        return job.hello(event.stream, hello, now_ms, wall_ms)


def _takes_early(member: Member) -> bool:
    """Return whether an early announcement of a newcomer is useful to this member.

    In a synchronous quorum the member takes its snapshot at the boundary anyway, and a torn member has no state to
    give.
    """
    return member.use_async_quorum and not member.torn


def _assignment_of(quorum: Quorum) -> Assignment | None:
    """Return the common part of the plan; None if every member is torn, which each learns from its own plan."""
    try:
        return assign(quorum)
    except ProtocolError:
        return None


def _recovering_in(quorum: Quorum) -> tuple[str, ...]:
    """Return the members that get the live state; nobody if every member is torn."""
    common = _assignment_of(quorum)
    return tuple(quorum.members[rank].replica_id for rank in common.recovering) if common is not None else ()


def _holders_of(quorum: Quorum, step: int) -> list[str]:
    """Return the members of the quorum that were at that step.

    A member that had to heal because its state might differ still has that state, which is better than none.
    """
    return [member.replica_id for member in quorum.members if member.step == step and not member.torn]


def _listed(names: Iterable[str]) -> str:
    return listed(names, NAMES_SHOWN_MOST)


def _describe_end(replica: Replica) -> str:
    how = f"left the job ({replica.left})" if replica.left is not None else f"is lost ({replica.lost}): end its process"
    return f"{replica.replica_id} {how}"


def _clock_behind(hello: Hello, wall_ms: int, cluster_id: str) -> str | None:
    """Return why the lighthouse's clock or the replica's must be wrong, or None.

    A number far in the future is rejected, because no replica could open a newer session, and no lighthouse could be
    newer. The start time of another cluster is not used.
    """
    latest_ms = wall_ms + CLOCKS_DIFFER_MOST_MS
    reported = {"session": hello.session}
    if hello.held is not None:
        reported["quorum id"] = hello.held.quorum_id  # ids rise by one from the start time of a lighthouse
    if hello.cluster_id == cluster_id:
        reported["lighthouse_started_ms"] = hello.lighthouse_started_ms
    for what, at_ms in reported.items():
        if at_ms > latest_ms:
            days = (at_ms - wall_ms) // 86_400_000
            return (
                f"replica {hello.replica_id} reports {what} {at_ms}, {days} days ahead of the lighthouse's clock; "
                "correct the clock on the lighthouse's host or on the replica's host"
            )
    return None


# A quorum's key, and how often a member was given that quorum or told that it stands.
_Answer: TypeAlias = tuple[QuorumKey, int]


class Job:
    """One job: its sessions, its requests, its newest quorum.

    Args:
        name: job id.
        config, incarnation, nonces, room: of the lighthouse.
        now_ms: the time of the first hello.
        last_id: the first quorum's id is above it.
    """

    def __init__(
        self,
        name: str,
        config: LighthouseConfig,
        incarnation: _Incarnation,
        nonces: Callable[[], int],
        room: MemoryBudget,
        *,
        now_ms: int,
        last_id: int,
    ) -> None:
        self.name = name
        self.liveness = Liveness(config.timeouts, remember_ms=config.lost_state_ms)
        self.hangs = HangWatch(config.timeouts)
        self.stragglers = StragglerWatch(config.stragglers)
        self.suspicion = Suspicion(config.timeouts)
        self._checked_ms = now_ms  # the last look for silent replicas
        self._checked_all_ms = now_ms  # the same, in a tick
        self._waiting_members: set[str] = set()  # members whose newest beat says that they wait
        self.previous: Quorum | None = None
        self.waiting_for = NO_REQUEST
        self.board, self.names, self.troubles = WaitBoard(), NameWatch(), Troubles(config.timeouts.heartbeat_timeout_ms)
        self._config, self._timeouts = config, config.timeouts
        self._incarnation, self._nonces = incarnation, nonces
        self.last_id = last_id
        # A presumed replica has a heartbeat_timeout to show that it lives. The time counts from the start of a
        # restarted lighthouse, or from now if the lighthouse has forgotten the job since.
        late = now_ms - incarnation.listens_ms >= config.timeouts.heartbeat_timeout_ms
        self._presumed_from_ms = now_ms if late else incarnation.listens_ms
        self._unnamed_until_ms = self._presumed_from_ms + config.timeouts.heartbeat_timeout_ms
        self._members: dict[str, Member] = {}  # of the newest quorum
        self._broken: str | None = None
        self._losses: dict[str, LossNotice] = {}  # of its members, by replica id
        self._losses_before: dict[QuorumKey, tuple[LossNotice, ...]] = {}  # of the last few quorums before it
        self._formed_here = False
        self._healthy_before: int | None = None
        self._formed_ms = incarnation.now_ms  # the time of the newest answer, unchanged ones included
        self._key_formed_ms = incarnation.now_ms  # the time of the newest key
        # Members of the newest quorum that have asked for the next one. Once a member has asked, the quorum has begun
        # to end, so a lost answer is not given again.
        self._asked_since: set[str] = set()
        self.newest_step = 0  # the highest step that a member of the newest quorum has reported
        self._announced = False  # a newcomer was announced since the newest quorum formed
        self._askers: dict[str, Replica] = {}  # replicas that have asked; some of them may not wait any more
        self._requests_needed = 0  # the number of requests that must come before the rule can say yes
        self._asking: tuple[int, _Answer, int] | None = None  # (stream, last answer on that stream, since_ms)
        self._reported_last: _Answer | None = None  # set if another lighthouse formed the newest quorum
        self._now_ms = now_ms
        self._handshake = Handshake(name, self._precedence_of, room)
        self._newest_held: QuorumKey | None = None  # the newest quorum that any replica has reported
        self._unanswered: set[int] = set()  # streams that could not name the members of the quorum they hold
        self._poor_sources = PoorSources(name)
        self._serving: set[str] = set()  # replicas that have left and may still be healed from
        self._asking_replica = ""  # the replica that asks just now, if it has trained
        self._end = JobEnd()
        self._living = LivingQuorum(config.timeouts, incarnation.now_ms, had_earlier_life=incarnation.had_earlier_life)
        self._newest_held_lease_ms = 0  # of `_newest_held`, as hellos say
        self._reach = Reach(config.min_replicas)
        self._exclusions = Exclusions()  # the replicas that the last run of the rule kept out
        self._healing = ""  # the replica that the last look found healing
        self._healed_at: tuple[Quorum | None, int] | None = None  # of that quorum, see `_step_after_healing`

    def excuse_pause(self, now_ms: int, away_ms: int) -> None:
        """Note that the lighthouse was away for that long; no replica is lost by it, nor members that get named only
        now."""
        self._presumed_from_ms = now_ms
        self._unnamed_until_ms += away_ms  # a wait for a quorum that no replica names must stay bounded
        self.liveness.excuse_all(now_ms)
        self.suspicion.restart()
        self.hangs.forget()

    def _known(self, names: Iterable[str]) -> Iterator[Replica]:
        """Return the replicas of these names that this lighthouse knows."""
        replicas = self.liveness.replicas
        return (replicas[name] for name in names if name in replicas)

    def forget_fingerprints(self) -> None:
        """Free the fingerprints, because the job is forgotten."""
        self._handshake.forget_all()

    def reconfigure(self, config: LighthouseConfig) -> None:
        """Use other settings from the next quorum on; see `LighthouseCore.reconfigure`."""
        self._config, self._reach.min_replicas = config, config.min_replicas

    def hello(self, stream: int, hello: Hello, now_ms: int, wall_ms: int) -> list[effects.LighthouseEffect]:
        """Handle the hello of a stream of this job."""
        known = self.liveness.replicas.get(hello.replica_id)
        session_before = known.session if known is not None else hello.session
        had_left = known is not None and known.left is not None
        result = self.liveness.hello(stream, hello, now_ms)
        if isinstance(result, Rejected):
            if result.refusal is Refusal.LOST:
                return [effects.TellLost(stream, hello.session, result.message)]
            return [effects.RefuseSession(stream, result.refusal, result.message, result.silent_ms)]
        out = self._accepted(stream, hello, result, now_ms)
        if self._handshake.has_refused(hello.replica_id):
            result.replica.ready = False
        replica = result.replica
        if replica.left is not None:
            out += self._leaves(replica, 0, now_ms, again=had_left)
        elif replica.asked_to_leave is not None:
            out.append(effects.AskToLeave(stream, *replica.asked_to_leave))
        if hello.session > session_before and not had_left:
            # The manager server was restarted before the lighthouse noticed its end; the old session's quorum can't go
            # on.
            out += self._break_quorum(hello.replica_id, session_before, f"replaced by session {hello.session}")
        out += self._break_for_dead(hello.replaces)
        if hello.held is not None:
            self._note_reported_key(hello.held)
            if hello.held == self._newest_held:
                self._newest_held_lease_ms = max(self._newest_held_lease_ms, hello.lease_ms)
            if all((hello.held, hello.num_answers) > known for known in self._known_answers()):
                out += self._ask_for_newest(now_ms)
        # A replica that has only connected makes no quorum possible; thousands connect together.
        return out + self._form(now_ms, wall_ms) if result.lost is not None else out

    def handle(self, event: events.LighthouseEvent, now_ms: int, wall_ms: int) -> list[effects.LighthouseEffect]:
        """Handle an event of one of this job's streams."""
        out: list[effects.LighthouseEffect] = []
        match event:
            case events.StreamClosed():
                if (gone := self.liveness.of_stream(event.stream)) is not None:
                    self.suspicion.forget(gone.replica_id)
                self.liveness.stream_closed(event.stream, now_ms, by_peer=event.told)
                out += self._ask_next_holder(event.stream, now_ms)
                self._unanswered.discard(event.stream)
                return out
            case events.DeathReported():
                lost = self.liveness.death(event.stream, event.reason, now_ms)
                if lost is not None:
                    out += self._note_loss(lost)
                elif (replica := self.liveness.sign(event.stream, now_ms)) is not None:
                    out += self._break_for_dead(replica.replica_id)
                return out + self._form(now_ms, wall_ms)
        replica = self.liveness.sign(event.stream, now_ms)
        if replica is None:
            return []
        if replica.lost is not None:
            if self._asking is not None and self._asking[0] == event.stream:
                if not isinstance(event, events.QuorumReported):
                    return []  # its answer is on the way
                # The report of a lost replica is as true as before its loss, and the replica may be the last one that
                # knows it.
                out += self._reported(event, now_ms)
                out += self._form(now_ms, wall_ms)
            # The replica lives after all, and must learn that the others went on without it.
            return out + self._answer_lost(replica, event)
        match event:
            case events.BeatReceived():
                self._progress(replica, event.healed_bytes, now_ms)
                replica.where = (event.progress, now_ms) if event.progress is not None else None
                replica.has_healed = replica.has_healed or self._has_healed(replica, event.progress)
                progress = event.progress if replica.left is None else None
                self.hangs.heard(replica.replica_id, progress, now_ms, keeps_pace=self._keeps_pace(replica))
                self.stragglers.heard(replica.replica_id, progress)
                self._note_wait(replica, event.waits, now_ms)
                out += self._answer_beat(replica, event)
                # Thousands report a wait together, and each look is at all members: the next look waits for the tick.
                if event.waits and now_ms - self._checked_ms >= len(self._members) // MEMBERS_IN_A_MS:
                    out += self._check_silence(now_ms, wall_ms)
            case events.ProbeAnswered():
                self.suspicion.answered(replica.replica_id, event.number, now_ms)
                out += self._note_stop(replica, event, now_ms)
                if replica.stopped is not None:
                    out += self._check_silence(now_ms, wall_ms)
            case events.QuorumReported():
                out += self._reported(event, now_ms)
                out += self._form(now_ms, wall_ms)
            case events.LateReported(_, key, step):
                if key == self._previous_key and replica.replica_id in self._members:
                    self._living.late(replica.replica_id, step)
            case events.PeersTried():
                if self._reach.trials.answered(replica.replica_id, event.number, event.unreached, now_ms):
                    self._requests_needed = 0
                    # Thousands answer together, and each answer may matter: the rule runs once, after the last, or at
                    # the next tick.
                    if not self._reach.trials.is_any_open:
                        out += self._form(now_ms, wall_ms)
            case events.LeaveReceived():
                had_left = replica.left is not None
                self.liveness.leave(replica, event.reason, now_ms, finished=event.finished_step is not None)
                if event.finished_step is not None:
                    self._end.finished(replica.replica_id, event.finished_step, now_ms)
                out += self._leaves(replica, event.serve_ms, now_ms, again=had_left)
                out += self._form(now_ms, wall_ms)
            case events.QuorumRequested() if replica.left is not None:
                message = f"replica {replica.replica_id} has left the job ({replica.left}); end this process"
                out.append(effects.RefuseRequest(event.stream, event.request, Refusal.LEFT, message))
            case events.RequestWithdrawn():
                self._withdrawn(replica, event.request, now_ms)
            case events.QuorumRequested():
                out += self._requested(replica, event, now_ms, wall_ms)
                self._requests_needed = 0 if event.member.shrink_only else self._requests_needed - 1
                if (self._requests_needed <= 0 and self._may_form(now_ms)) or self._is_first_newcomer(replica):
                    out += self._form(now_ms, wall_ms)
        return out

    def _is_first_newcomer(self, replica: Replica) -> bool:
        """Return whether the replica's request is the only one beside a standing quorum; then its trial and the recall
        begin at once.

        If many newcomers come together, the others wait for the tick, because a look costs as much as there are
        members.
        """
        return self._living.stands and replica.replica_id not in self._members and len(self._waiting()) == 1

    def tick(self, now_ms: int, wall_ms: int) -> list[effects.LighthouseEffect]:
        """Handle the passage of time."""
        out: list[effects.LighthouseEffect] = []
        if self._asking is not None and now_ms - self._asking[2] >= self._timeouts.heartbeat_timeout_ms:
            out += self._ask_next_holder(self._asking[0], now_ms)
        out += self._judge_hung(now_ms) + self._check_paces(now_ms)
        # A look at thousands of replicas takes long while they ask, and it delays their messages.
        is_due = now_ms - self._checked_all_ms >= len(self.liveness.replicas) // MEMBERS_IN_A_MS
        if is_due:
            self._checked_all_ms = now_ms
            out += self._check_silence(now_ms)
            out += self._check_missing_members(now_ms) if self._living.has_begun_to_end else []
        out += self._judge(now_ms)
        if is_due or self._requests_needed <= 0:
            out += self._form(now_ms, wall_ms)
        return out + self._release_left(now_ms)

    def wait(self, now_ms: int) -> JobWait | None:
        """Return which replicas wait for which: for the next quorum, or inside the step of the newest one."""
        # A replica that is left out was told for how long.
        waiting = [each for each in self._waiting() if each[0].replica_id not in self.stragglers.left_out]
        if waiting:
            asked = {replica.replica_id for replica, _ in waiting}
            missing = [
                replica
                for replica in self.liveness.replicas.values()
                if replica.replica_id not in asked and replica.left is None
                if replica.replica_id not in self._exclusions.out
                if (replica.healthy and replica.ready) or replica.replica_id in self._members
            ]
            since_ms = min(request.asked_ms for _, request in waiting)
            to_tell = tuple(replica.stream for replica, _ in waiting if replica.stream is not None)
            if asked <= self._exclusions.out and self.waiting_for != NO_REQUEST:
                return JobWait(since_ms, left_out_wait(self.waiting_for), to_tell)
            how_to_lower = self._config.how_to_lower if len(waiting) < self._config.min_replicas else ""
            reason = self.waiting_for
            if reason == NO_REQUEST:  # the waiting replicas have asked since the rule ran last
                decision = decide(self._situation(waiting, now_ms))
                reason = decision.reason if isinstance(decision, Wait) else "the lighthouse's next check"
            sentence = quorum_wait(reason, missing, how_to_lower=how_to_lower, now_ms=now_ms)
            return JobWait(since_ms, sentence, to_tell, tuple(sorted(each.replica_id for each in missing)))
        members = list(self._known(self._members))
        waits = {replica.replica_id: waits_since(replica, self._formed_ms) for replica in members}
        begun = [since_ms for since_ms in waits.values() if since_ms is not None]
        if len(members) < 2 or not begun:
            return None
        missing = [replica for replica in members if waits[replica.replica_id] is None and replica.left is None]
        streams = [each.stream for each in members if waits[each.replica_id] is not None and each.stream is not None]
        names = tuple(sorted(each.replica_id for each in missing))
        return JobWait(min(begun), step_wait(self.newest_step, missing, now_ms), tuple(streams), names)

    def status(self, now_ms: int, warnings: tuple[str, ...]) -> JobStatus:
        """Return the state of the job and of its replicas, for an operator."""
        return job_status(
            self.name,
            self.liveness.replicas.values(),
            self.previous,
            formed_ms=self._key_formed_ms,
            broken=self._broken,
            excluded=(self.stragglers.left_out, self._exclusions.out),
            wait=self.wait(now_ms),
            ended=self._end.ended,
            warnings=warnings,
            now_ms=now_ms,
        )

    def look_at_troubles(self, now_ms: int) -> None:
        """Find what is wrong now, for later calls of `warnings`."""
        replicas, out = self.liveness.replicas, self._exclusions.out
        out = frozenset(name for name in out if name in replicas and replicas[name].healthy) if out else out
        self.troubles.look(
            replicas.values(),
            self._members,
            self.waiting_for,
            out,
            lambda name: self._reach.describe([name], now_ms),
            now_ms,
        )

    # --- leaving ------------------------------------------------------------------------------------------------

    def _leaves(self, replica: Replica, serve_ms: int, now_ms: int, *, again: bool) -> list[effects.LighthouseEffect]:
        """Handle a replica that has left: no replica waits for it. Its quorum goes on to its end, and so does a healing
        from it."""
        self._healthy_before = None
        self._requests_needed = 0
        replica.serves = True
        self._serving.add(replica.replica_id)
        # No replica waits for it in a step. If it counted as hung later, the others would get its hang time as well.
        self.hangs.heard(replica.replica_id, None, now_ms)
        self.stragglers.gone(replica.replica_id)
        out = self._release_left(now_ms)
        if again:
            return out
        if replica.replica_id in self._members:
            self._living.asked(replica.replica_id, now_ms)  # the others know it by its word, or wait for it
        assert replica.left is not None
        end = replica.left, serve_ms, replica.finished
        return [effects.ReplicaLeft(self.name, replica.replica_id, replica.session, *end), *out]

    def _release_left(self, now_ms: int) -> list[effects.LighthouseEffect]:
        """Release those that have left and from which no replica heals any more."""
        out: list[effects.LighthouseEffect] = []
        heals = self._is_any_healing() if self._serving else False
        for replica_id in sorted(self._serving):
            replica = self.liveness.replicas.get(replica_id)
            # A lighthouse without memory does not know yet which replica heals from which.
            needed = (heals and replica_id in self._members) or not self._formed_here
            if replica is not None and replica.lost is None and needed:
                continue
            self._serving.discard(replica_id)
            if replica is None:
                continue
            self.liveness.release(replica, now_ms)
            if replica.stream is not None and replica.lost is None:
                out.append(effects.Release(replica.stream))
        return out

    def _has_healed(self, replica: Replica, progress: Progress | None) -> bool:
        """Return whether a member that had to heal now holds the state and fetches nothing.

        Such a member is between two steps again, where it may evaluate for long before it asks.
        """
        member = self._members.get(replica.replica_id)
        if replica.healing_since_ms is None or progress is None or member is None or member.torn:
            return False
        return progress.phase is Phase.OUTSIDE and progress.step >= self._step_after_healing()

    def _step_after_healing(self) -> int:
        """Return the step at which a member of the newest quorum holds the state.

        Each beat of a healing member needs the step, and in a first quorum all members but one heal. The step is
        therefore computed once for each quorum.
        """
        if self._healed_at is None or self._healed_at[0] is not self.previous:
            step = max((each.step for each in self._members.values() if not each.torn), default=0)
            self._healed_at = self.previous, max(step, 1)
        return self._healed_at[1]

    def _is_any_healing(self) -> bool:
        """Return whether a member of the newest quorum heals.

        A job whose replicas all leave together calls this for each of them, so the last found member is checked first.
        """
        for replica_id in (self._healing, *self._members) if self._healing in self._members else self._members:
            replica = self.liveness.replicas.get(replica_id)
            heals = replica is not None and replica.healing_since_ms is not None and not replica.has_healed
            if replica is not None and heals and replica.healthy:
                self._healing = replica_id
                return True
        return False

    @property
    def trains(self) -> bool:
        """Return whether the newest quorum has a member that lives and has not left."""
        return any(member.healthy for member in self._known(self._members))

    def drain(
        self, event: events.DrainRequested
    ) -> list[effects.AskToLeave | effects.TellNewest | effects.RefuseUnary]:
        """Ask a replica to leave, now and on every new stream, until it has left. A lost or gone replica can't be
        asked."""
        known = [replica for replica in self.liveness.replicas.values() if not replica.presumed]
        found = [replica for replica in known if replica.replica_id == event.replica]
        # Logs and errors show short ids.
        found = found or [replica for replica in known if shorten(replica.replica_id) == event.replica]
        found = found or [replica for replica in known if base_name(replica.replica_id) == event.replica]
        gone = [replica for replica in found if not replica.healthy]
        found = [replica for replica in found if replica.healthy]
        if len(found) != 1:
            if found:
                what = f"has {len(found)} replicas named {event.replica!r}; give the id of one of them:"
            elif gone:
                what = f"has no running replica {event.replica!r}: {_describe_end(gone[-1])}; running replicas:"
            else:
                what = f"has no running replica {event.replica!r}; running replicas:"
            there = found or [replica for replica in known if replica.healthy]
            message = f"job {self.name} {what} {_listed(replica.replica_id for replica in there) or 'none'}"
            return [effects.RefuseUnary(event.call, Refusal.UNKNOWN, message)]
        replica = found[0]
        replica.asked_to_leave = event.reason, event.serve_ms
        asked = [] if replica.stream is None else [effects.AskToLeave(replica.stream, event.reason, event.serve_ms)]
        return [*asked, *(self._recall() if replica.replica_id in self._members else [])]

    # --- a quorum whose members go on without asking ----------------------------------------------------------------

    def _recall(self) -> list[effects.TellNewest]:
        """Recall the members of the newest quorum: they ask for a quorum after their next word."""
        if not self._living.recall():
            return []
        news = self._living.news(self._previous_key, 0, broken=self._broken is not None)
        members = self._known(self._members)
        return [effects.TellNewest(each.stream, news) for each in members if each.stream is not None and each.healthy]

    def _answer_beat(self, replica: Replica, beat: events.BeatReceived) -> list[effects.TellNewest]:
        """Name the newest quorum to a replica that trains on without asking; this renews its lease and repairs what it
        missed."""
        if not beat.number:
            return []
        if beat.progress is not None and self._living.stands and replica.replica_id in self._members:
            self.newest_step = max(self.newest_step, beat.progress.step)
        news = self._living.news(self._previous_key, beat.number, broken=self._broken is not None)
        return [effects.TellNewest(beat.stream, news)]

    def _check_missing_members(self, now_ms: int) -> list[effects.LighthouseEffect]:
        """Break the newest quorum where members wait in it for others that have asked, or that are late."""
        if self._broken is not None:
            return []
        known = self._known(name for name in self._members if name not in self._asked_since)
        members = [each for each in known if each.healthy]
        overdue = self._living.overdue(members, now_ms)
        if overdue is not None:
            who, waiting = overdue
            why = f"asked for the next quorum, and {_listed(waiting)} still waits in this one"
            return self._break_quorum(who, self._members[who].session, why, lives=True)
        late = self._living.breaks_for(members)
        if late is None:
            return []
        self._living.break_for_late()
        self._requests_needed = 0
        return self._break_for_all(f"has waited for {_listed(late[1])} for longer than join_timeout", late[0])

    def _has_moved_on(self) -> bool:
        """Return whether the members have committed steps since the newest quorum was given, which only beats
        report."""
        if not self._living.stands_whole:
            return False
        given = max((member.step for member in self._members.values()), default=0)
        return self.newest_step > given

    # --- sessions -----------------------------------------------------------------------------------------------

    def _accepted(self, stream: int, hello: Hello, result: Accepted, now_ms: int) -> list[effects.LighthouseEffect]:
        self._healthy_before = None
        self._requests_needed = 0
        out: list[effects.LighthouseEffect] = []
        if result.replaced_stream is not None:
            out.append(effects.CloseStream(result.replaced_stream))
        incarnation, timeouts = self._incarnation, self._timeouts
        out.append(
            effects.Welcome(
                stream,
                hello.session,
                incarnation.started_ms,
                incarnation.cluster_id,
                timeouts.heartbeat_timeout_ms,
                timeouts.join_timeout_ms,
            )
        )
        self._waiting_members.discard(hello.replica_id)
        if hello.answers_probes:
            out.append(effects.Probe(stream, self.suspicion.begin(hello.replica_id, now_ms)))
        if result.lost is not None:
            out += self._note_loss(result.lost)
        share = self.stragglers.share_of(hello.replica_id)
        if share is not None:
            out.append(effects.TellStraggler(stream, share))
        # A broken stream has missed these notices.
        return out + [effects.NotifyLoss(stream, notice) for notice in self._losses_in(hello.held)]

    def _judge(self, now_ms: int) -> list[effects.LighthouseEffect]:
        return [order for lost in self.liveness.judge(now_ms) for order in self._note_loss(lost)]

    def _keeps_pace(self, replica: Replica) -> bool:
        return replica.replica_id in self._members and replica.healing_since_ms is None

    def _judge_hung(self, now_ms: int) -> list[effects.LighthouseEffect]:
        """Declare a hung trainer's replica lost. Where all replicas wait for one another, break the quorum without a
        loss."""
        hung = self.hangs.hung(now_ms, self._last_holder)
        if hung is not None:
            replica_id, progress = hung
            lost = self.liveness.silence(replica_id, hang_reason(progress), now_ms)
            return self._note_loss(lost) if lost is not None else []
        step = self.hangs.stuck(self._members) if self._broken is None else None
        return [] if step is None else self._break_for_all(stuck_reason(step))

    def _note_wait(self, replica: Replica, waits: bool, now_ms: int) -> None:
        replica.wait_reported_ms = now_ms if waits else None
        if waits:
            self._waiting_members.add(replica.replica_id)
        else:
            self._waiting_members.discard(replica.replica_id)

    def _waits_long(self, replica: Replica, now_ms: int) -> bool:
        """Return whether a member has waited for others for a while, for the next quorum or inside the newest one."""
        if replica.request is not None:
            return now_ms - replica.request.asked_ms >= WAITS_MS
        said_ms = replica.wait_reported_ms
        return said_ms is not None and said_ms > self._formed_ms and now_ms - said_ms < WAIT_VALID_MS

    def _check_silence(self, now_ms: int, wall_ms: int | None = None) -> list[effects.LighthouseEffect]:
        """Probe the members that do not wait where most members do, and declare silent or stopped ones lost.

        The call is cheap while no member waits. With `wall_ms`, a loss also runs the rule for the next quorum.
        """
        if now_ms - self._formed_ms < WAITS_MS or not (self._waiting_members or self._askers):
            return []
        self._checked_ms = now_ms
        members = [each for each in self._known(self._members) if each.healthy]
        num_waiting = sum(1 for each in members if self._waits_long(each, now_ms))
        if not most_wait(num_waiting, len(members)) and not any(each.stopped for each in members):
            return []
        sightings = [self._sighting(each, now_ms) for each in members]
        found = self.suspicion.look(sightings, now_ms, self._last_holder)
        out: list[effects.LighthouseEffect] = []
        for name, number in found.probes:
            stream = self.liveness.replicas[name].stream
            assert stream is not None  # a member without a stream is never probed
            out.append(effects.Probe(stream, number))
        for name, reason in found.lost:
            lost = self.liveness.silence(name, reason, now_ms)
            out += self._note_loss(lost) if lost is not None else []
        return out + self._form(now_ms, wall_ms) if found.lost and wall_ms is not None else out

    def _note_stop(self, replica: Replica, event: events.ProbeAnswered, now_ms: int) -> list[effects.Probe]:
        """Record a stop that was seen just now; probe again where the time of the sighting is unknown."""
        replica.stopped = None
        if not event.stopped or replica.left is not None or replica.replica_id not in self._members:
            return []
        if self.suspicion.is_new(replica.replica_id, event.number, now_ms):
            replica.stopped = event.stopped, event.stopped_ms, now_ms
            return []
        number = self.suspicion.ask_again(replica.replica_id, now_ms)
        return [effects.Probe(event.stream, number)] if number is not None else []

    def _sighting(self, replica: Replica, now_ms: int) -> Sighting:
        reached = replica.stream is not None and replica.answers_probes
        stopped, stopped_ms, said_ms = replica.stopped or ("", 0, 0)
        is_stopped = stopped != "" and now_ms - said_ms < STOP_VALID_MS
        return Sighting(
            replica.replica_id,
            replica.last_sign_ms,
            replica.heard_ms,
            self._waits_long(replica, now_ms),
            may_be_probed=reached,
            may_be_lost=reached and not self.liveness.flaps(replica, now_ms),
            stopped=stopped if is_stopped else "",
            stopped_long=is_stopped and stopped_ms >= self._timeouts.heartbeat_timeout_ms,
        )

    def _last_holder(self, without: Collection[str] = ()) -> list[str]:
        """Return the only living holder of the newest quorum's state, or []: without it the others would start over.

        `without`: replicas that are about to be lost.
        """
        held = [self.previous.replica_ids[rank] for rank in self._up_to_date()] if self.previous is not None else []
        known = self._known(name for name in held if name not in without)
        alive = [each.replica_id for each in known if each.healthy]
        return alive if len(alive) == 1 else []

    def _up_to_date(self) -> tuple[int, ...]:
        """Return the replica ranks that hold the newest quorum's state; () before the first step, and where all are
        torn."""
        assert self.previous is not None
        if self._has_moved_on():
            return tuple(range(len(self.previous.members)))
        common = _assignment_of(self.previous)
        return common.up_to_date if common is not None and common.step > 0 else ()

    def _note_loss(self, lost: Lost) -> list[effects.LighthouseEffect]:
        replica = lost.replica
        self._waiting_members.discard(replica.replica_id)
        self.suspicion.forget(replica.replica_id)
        self.hangs.heard(replica.replica_id, None, lost.replica.lost_ms)
        self.stragglers.gone(replica.replica_id)
        self._healthy_before = None
        self._requests_needed = 0
        out: list[effects.LighthouseEffect] = [
            effects.ReplicaLost(self.name, replica.replica_id, replica.session, lost.reason, lost.detect_ms),
            *self._break_quorum(replica.replica_id, replica.session, lost.reason),
        ]
        message = f"replica {replica.replica_id}, session {replica.session}, was lost: {lost.reason}"
        if lost.stream is not None:
            if lost.request is not None:
                out.append(effects.RefuseRequest(lost.stream, lost.request.request, Refusal.LOST, message))
            if not replica.dead:
                out.append(effects.TellLost(lost.stream, replica.session, message))
        return out

    def _break_quorum(
        self, replica_id: str, session: int, reason: str, *, lives: bool = False
    ) -> list[effects.LighthouseEffect]:
        """Break the newest quorum, because a session has ended or can't go on in it, and tell each other member.

        One notice of a living member is enough. Of lost members each gets a notice.
        """
        member, replica = self._members.get(replica_id), self.liveness.replicas.get(replica_id)
        if self.previous is None or member is None:
            return []
        if session < member.session and not (replica is not None and replica.dead):
            return []  # the newer session may live; of a dead replica no session lives
        # The manager server may have restarted since the replica left; another replica may still heal from it.
        session = member.session
        known = self._losses.get(replica_id)
        if self._losses if lives else known is not None and not known.lives:
            return []
        # A member that has lost the answer must not enter a broken quorum.
        self._broken = self._broken or f"{replica_id} {reason if lives else 'was lost'}"
        notice = self._losses[replica_id] = LossNotice(self.previous.key, replica_id, session, reason, lives)
        others = self._known(other for other in self._members if other != replica_id)
        return [effects.NotifyLoss(other.stream, notice) for other in others if other.stream is not None]

    def _break_for_dead(self, replica_id: str) -> list[effects.LighthouseEffect]:
        """Break the quorum for a replica that was lost before, in another session than the quorum's, and is now
        dead."""
        known = self.liveness.replicas.get(replica_id)
        if known is None or not known.dead or known.lost is None:
            return []
        return self._break_quorum(replica_id, known.session, known.lost)

    def _break_for_all(self, reason: str, who: str = "") -> list[effects.LighthouseEffect]:
        """Break the newest quorum for all members without a loss. The reason is about `who`, or about any member."""
        first = self._members.get(who) or next(iter(self._members.values()))
        out = self._break_quorum(first.replica_id, first.session, reason, lives=True)
        named, notice = self.liveness.replicas.get(first.replica_id), self._losses.get(first.replica_id)
        if named is not None and named.stream is not None and notice is not None:
            out.append(effects.NotifyLoss(named.stream, notice))
        return out

    def _losses_in(self, key: QuorumKey | None) -> Iterable[LossNotice]:
        """Return the losses of that quorum: the newest, or one that a member may still be in because it heard of no
        later one."""
        if self.previous is not None and key == self.previous.key:
            return self._losses.values()
        return self._losses_before.get(key, ()) if key is not None else ()

    def _forget_losses(self) -> None:
        """Move the losses of the newest quorum to the earlier ones, because another quorum becomes the newest."""
        if self.previous is not None and self._losses:
            self._losses_before[self.previous.key] = tuple(self._losses.values())
            while len(self._losses_before) > BROKEN_QUORUMS_KEPT:
                del self._losses_before[next(iter(self._losses_before))]
        self._losses = {}

    def _answer_lost(self, replica: Replica, event: events.LighthouseEvent) -> list[effects.LighthouseEffect]:
        message = f"replica {replica.replica_id}, session {replica.session}, was lost: {replica.lost}"
        if replica.dead:
            return [effects.RefuseSession(event.stream, Refusal.DEAD, message)]
        return [effects.TellLost(event.stream, replica.session, message)]

    def _progress(self, replica: Replica, healed_bytes: int, now_ms: int) -> None:
        if healed_bytes > replica.healed_bytes:
            replica.healed_bytes = healed_bytes
            replica.progress_ms = now_ms

    # --- stragglers -------------------------------------------------------------------------------------------------

    def _check_paces(self, now_ms: int) -> list[effects.LighthouseEffect]:
        """Carry out the policy for the replicas that slow the others down."""
        out: list[effects.LighthouseEffect] = []
        for change in self.stragglers.look(self._members, now_ms, self._quorum_context):
            self._healthy_before = None
            self._requests_needed = 0
            news = change.news
            out.append(effects.PaceChanged(self.name, news))
            replica = self.liveness.replicas.get(news.replica_id)
            if replica is None or replica.stream is None:
                continue
            out.append(effects.TellStraggler(replica.stream, news))
            out += self._recall() if news.replica_id in self._members and news.pause_ms else []
            if change.ends_quorum:
                out += self._break_quorum(news.replica_id, replica.session, left_out_reason(news), lives=True)
                # The straggler's own reductions would wait for the replicas that go on without it.
                notice = self._losses.get(news.replica_id)
                out += [effects.NotifyLoss(replica.stream, notice)] if notice is not None else []
        return out

    def _left_out(self) -> frozenset[str]:
        """Return the stragglers that are left out; none if no other living member can go on from the job's state."""
        out = self.stragglers.left_out
        others = self._known(name for name in self._members if name not in out) if out else ()
        return out if any(other.healthy for other in others) else frozenset()

    def _quorum_context(self) -> QuorumContext:
        replicas = self.liveness.replicas
        return QuorumContext(
            # A replica that is unreachable replaces no other.
            healthy=[
                replica.replica_id
                for replica in replicas.values()
                if replica.healthy and replica.ready and replica.replica_id not in self._exclusions.out
            ],
            members=[each.replica_id for each in self._known(self._members) if each.healthy],
            waiting=[replica.replica_id for replica, _ in self._waiting()],
            holders=[self.previous.replica_ids[rank] for rank in self._up_to_date()] if self.previous else [],
            # With fewer participants than any member needs, no step commits.
            min_replicas=max(
                self._config.min_replicas, *(member.min_replica_size for member in self._members.values()), 1
            ),
        )

    # --- a lighthouse without memory --------------------------------------------------------------------------------

    def _ask_for_newest(self, now_ms: int) -> list[effects.LighthouseEffect]:
        """Ask the replica that holds the newest quorum from before the start of this lighthouse for the members of that
        quorum."""
        if self._formed_here:
            # A quorum that this lighthouse formed is the newest by definition; ids only rise above the others.
            return []
        known = self._known_answers()
        best: tuple[_Answer, int] | None = None
        for replica in self.liveness.replicas.values():
            if replica.stream is None or replica.held is None or replica.lost is not None:
                continue
            if replica.stream in self._unanswered:
                continue
            answer = (replica.held, replica.num_answers)
            if all(answer > each for each in known) and (best is None or answer > best[0]):
                best = (answer, replica.stream)
        if best is None:
            return []
        self._asking = (best[1], best[0], now_ms)
        return [effects.AskForQuorum(best[1], best[0][0])]

    def _note_reported_key(self, held: QuorumKey) -> None:
        self.last_id = max(self.last_id, held.quorum_id)
        if self._newest_held is None or held > self._newest_held:
            self._newest_held_lease_ms = 0
        self._newest_held = max(held, self._newest_held or held)

    @property
    def _previous_key(self) -> QuorumKey | None:
        return self.previous.key if self.previous is not None else None

    def _known_answers(self) -> list[_Answer]:
        """Return the answers of other lighthouses that this one knows or has asked for.

        Of the last answer before another lighthouse ended, some members have heard and others not. The newest answer is
        therefore looked for within one quorum too.
        """
        known = [] if self.previous is None else [self._reported_last or (self.previous.key, MAX_INT64)]
        return known if self._asking is None else [*known, self._asking[1]]

    def _ask_next_holder(self, stream: int, now_ms: int) -> list[effects.LighthouseEffect]:
        """Handle a stream that will not answer: ask the next best replica, which may hold the same quorum or an earlier
        one."""
        if self._asking is None or self._asking[0] != stream:
            return []
        self._asking = None
        self._unanswered.add(stream)
        return self._ask_for_newest(now_ms)

    def _reported(self, event: events.QuorumReported, now_ms: int) -> list[effects.LighthouseEffect]:
        """Take over the members of a quorum that formed before this lighthouse started."""
        if self._asking is None or self._asking[0] != event.stream:
            return []
        quorum, answer = event.quorum, self._asking[1]
        if quorum is None or quorum.key != answer[0]:
            return self._ask_next_holder(event.stream, now_ms)
        self._asking = None
        if quorum.key == self._previous_key:
            return self._answered_later(quorum, answer, now_ms)
        self._forget_losses()
        before, self.previous, self._reported_last = self.previous, quorum, answer
        self._members = {member.replica_id: member for member in quorum.members}
        self._begin_round(before)
        self._formed_ms = self._key_formed_ms = now_ms
        out: list[effects.LighthouseEffect] = []
        successors = {replica.replaces: replica.replica_id for replica in self.liveness.replicas.values()}
        for member in quorum.members:
            known = self.liveness.replicas.get(member.replica_id)
            if known is None:
                if member.replica_id in successors:
                    why = f"replaced by {successors[member.replica_id]}"
                    out += self._break_quorum(member.replica_id, member.session, why)
            elif known.session > member.session:
                why = f"replaced by session {known.session}"
                out += self._break_quorum(member.replica_id, member.session, why)
            elif known.lost is not None:
                out += self._break_quorum(member.replica_id, known.session, known.lost)
        self.liveness.presume(quorum.members, self._presumed_from_ms)
        return out + self._ask_for_newest(now_ms) + self._sort_waiting(now_ms)

    def _answered_later(self, quorum: Quorum, answer: _Answer, now_ms: int) -> list[effects.LighthouseEffect]:
        """Take over a later answer in the newest quorum than the one that was asked first."""
        self.previous, self._reported_last = quorum, answer
        self._members = {member.replica_id: member for member in quorum.members}
        self.newest_step = max(self.newest_step, *(member.step for member in quorum.members))
        return self._ask_for_newest(now_ms) + self._sort_waiting(now_ms)

    def _sort_waiting(self, now_ms: int) -> list[effects.LighthouseEffect]:
        """Sort the members that asked before this lighthouse knew their quorum: some have gone on from it, others never
        got it."""
        members = [replica for replica, _ in self._waiting() if replica.replica_id in self._members]
        without = [replica for replica in members if self._lost_answer(replica, replica.request)]
        self._asked_since = {replica.replica_id for replica in members if replica not in without}
        out: list[effects.LighthouseEffect] = []
        for replica in members:
            if replica not in without and replica.request is not None and replica.request.member.needs_configure:
                why = "asks for a new process group"
                out += self._break_quorum(replica.replica_id, replica.session, why, lives=True)
        for replica in without:
            request = replica.request
            assert request is not None
            if self._can_still_run(replica, request):
                replica.request = None
                out += self._answer_again(replica, request, now_ms)
            else:
                self._asked_since.add(replica.replica_id)
                out += self._break_quorum(replica.replica_id, replica.session, "did not receive it", lives=True)
        return out

    # --- requests ----------------------------------------------------------------------------------------------------

    def _requested(
        self, replica: Replica, event: events.QuorumRequested, now_ms: int, wall_ms: int
    ) -> list[effects.LighthouseEffect]:
        member = replace(event.member, session=replica.session)
        stream = event.stream
        if member.replica_id != replica.replica_id:
            message = f"replica {replica.replica_id} asked on behalf of {member.replica_id}; send only its own requests"
            return [effects.RefuseRequest(stream, event.request, Refusal.MALFORMED, message)]
        if event.held is not None and event.held.quorum_id > wall_ms + HIGHEST_ID_AHEAD:
            message = f"replica {replica.replica_id} reports quorum {event.held}, an id that no lighthouse issues"
            return [effects.RefuseRequest(stream, event.request, Refusal.MALFORMED, message + "; restart it")]
        out = self._compare(replica, event, now_ms)
        if any(isinstance(order, effects.RefuseRequest) and order.stream == stream for order in out):
            return out
        replica.ready = True
        self._note_wait(replica, False, now_ms)
        replica.stopped = None
        out += self._poor_sources.report(member, self.liveness.replicas, self._members)
        after_loss = False
        if member.unreached:
            self._requests_needed = 0
            after_loss = any(not notice.lives for notice in self._losses_in(event.held))
        known = self.liveness.replicas
        member = self._reach.heard(replica, member, event.held, self.previous, known, now_ms, after_loss=after_loss)
        self.hangs.heard(replica.replica_id, None, now_ms)  # a replica that asks has moved
        self.stragglers.heard(replica.replica_id, None)
        if event.held is not None:
            self._note_reported_key(event.held)
        patience_ms = self._timeouts.heartbeat_timeout_ms
        request = OpenRequest(event.request, member, event.held, replica.asked_ms(now_ms, patience_ms))
        if self._lost_answer(replica, request):
            if self._can_still_run(replica, request):
                return out + self._answer_again(replica, request, now_ms)
            out += self._break_quorum(replica.replica_id, replica.session, "did not receive it", lives=True)
        elif event.held == self._previous_key and (
            member.needs_configure or (self._living.stands and member.commit_failures > 0)
        ):
            # The others may wait for it in a rendezvous or a reduction that it has left.
            out += self._break_quorum(replica.replica_id, replica.session, "asks for a new process group", lives=True)
        if replica.replica_id in self._members:
            self._asked_since.add(replica.replica_id)
            self._living.asked(replica.replica_id, now_ms)
        if event.held is not None and (replica.held is None or event.held > replica.held):
            # An older key never replaces a newer one: some ranks of the replica may not have the newest yet.
            replica.held, replica.num_answers = event.held, 0
        replica.healing_since_ms = None
        replica.request = request
        self._askers[replica.replica_id] = replica
        if member.failed_heals >= 2:
            pause_ms = min(INELIGIBLE_MOST_MS, INELIGIBLE_FIRST_MS << min(member.failed_heals - 2, 16))
            replica.ineligible_until_ms = request.asked_ms + pause_ms
        else:
            replica.ineligible_until_ms = 0
        return out + self._announce(replica, member, now_ms)

    def _announce(self, replica: Replica, member: Member, now_ms: int) -> list[effects.LighthouseEffect]:
        """Announce a newcomer to the members that may be its sources, once for each quorum.

        The sources can take a snapshot of their state at their next step boundary, so that it travels while they
        compute. A member that waits has passed that boundary. One snapshot serves all newcomers.
        """
        is_member = replica.replica_id in self._members
        if is_member and not member.torn and member.step >= self.newest_step:
            self.newest_step = member.step
            return []
        if self._announced or not self._members or replica.ineligible_until_ms > now_ms:
            return []
        if replica.replica_id in self._left_out():
            return []
        self._announced = True
        takers = self._known(member.replica_id for member in self._members.values() if _takes_early(member))
        return [
            effects.AnnounceNewcomer(other.stream, replica.replica_id)
            for other in takers
            if other is not replica and other.healthy and other.stream is not None and other.request is None
        ]

    def _compare(self, replica: Replica, event: events.QuorumRequested, now_ms: int) -> list[effects.LighthouseEffect]:
        """Refuse the replicas whose fingerprint shows that they do not belong to this job, most often the one that
        asks."""
        self._now_ms = now_ms
        if len(self._handshake) > 2 * len(self.liveness.replicas) + 16:
            self._handshake.forget_gone()
        out: list[effects.LighthouseEffect] = []
        # The request counts already: a restarted manager server has said hello without a quorum.
        has_trained = event.held is not None or event.member.live
        self._asking_replica = replica.replica_id if has_trained else ""
        differing = self._handshake.asks(replica.replica_id, event.fingerprint)
        self._asking_replica = ""
        for differs in differing:
            other = self.liveness.replicas[differs.replica_id]
            request = event.request if other is replica else None
            other.ready = False  # it counts nowhere, and no replica waits for it
            if other.request is not None:
                request, other.request = request or other.request.request, None
            if request is not None and other.stream is not None:
                out.append(effects.RefuseRequest(other.stream, request, Refusal.DIFFERS, differs.message))
        return out

    def _precedence_of(self, replica_id: str) -> Precedence:
        """Return how much that replica's word counts. A lost replica may come back with its state; a dead one can't."""
        replica = self.liveness.replicas.get(replica_id)
        if replica is None or replica.dead or (replica.left is not None and not replica.serves):
            return Precedence.GONE
        if not replica.healthy and self._now_ms - replica.lost_ms >= self._patience_ms(replica):
            return Precedence.GONE
        if replica_id in self._members:
            return Precedence.MEMBER
        has_trained = replica.held is not None or replica_id == self._asking_replica
        return Precedence.HOLDS if has_trained else Precedence.NEW

    def _withdrawn(self, replica: Replica, request: int, now_ms: int) -> None:
        """Handle the withdrawal of a request: the open one, or one whose answer was on its way."""
        if replica.request is not None and replica.request.request == request:
            replica.withdraw(now_ms)
        elif replica.answered == request:
            replica.answer_void = True

    def _lost_answer(self, replica: Replica, request: OpenRequest | None) -> bool:
        """Return whether a member of the newest quorum, in this very session, has not received that quorum's answer.

        The replica does not hold the quorum, or it asks again for what the quorum has answered. The answer was lost
        with its stream, or with the lighthouse that gave it to another replica, or came after the withdrawal.
        """
        member = self._members.get(replica.replica_id)
        if request is None or self.previous is None or member is None or member.session != replica.session:
            return False
        if self._holds_newer(replica, request):
            return True  # another lighthouse gave it a newer quorum, so it won't return to this one
        if request.held != self.previous.key or replica.answered == request.request or replica.answer_void:
            return True
        known = self._reported_last
        return not self._formed_here and known is not None and (self.previous.key, replica.num_answers) < known

    def _holds_newer(self, replica: Replica, request: OpenRequest) -> bool:
        held = [key for key in (replica.held, request.held) if key is not None]
        return self.previous is not None and any(key > self.previous.key for key in held)

    def _can_still_run(self, replica: Replica, request: OpenRequest) -> bool:
        """Return whether the newest quorum can still run with a member that has not received it; if not, all members
        leave it."""
        if self._holds_newer(replica, request):
            return False
        # The lighthouse sets store_failed; no request contains it.
        before, member = replace(self._members[replica.replica_id], store_failed=False), request.member
        if request.held != self._previous_key:
            # The member's group was never configured, so it may report that its group can't be used. Any other change
            # is news to the other members.
            member = replace(member, needs_configure=before.needs_configure)
        alone = self._asked_since <= {replica.replica_id}
        return alone and self._broken is None and replica.stream is not None and member == before

    def _answer_again(self, replica: Replica, request: OpenRequest, now_ms: int) -> list[effects.LighthouseEffect]:
        """Give the newest quorum to a member that has not received it."""
        assert self.previous is not None
        assert replica.stream is not None
        replica.held = self.previous.key
        replica.num_answers = self._reported_last[1] if self._reported_last is not None else 0
        replica.answered = request.request
        replica.answer_void = False
        replica.withdrawn = None
        replica.healing_since_ms = now_ms if replica.replica_id in _recovering_in(self.previous) else None
        replica.has_healed = False
        return [effects.AnswerQuorum(replica.stream, request.request, self.previous)]

    # --- forming -----------------------------------------------------------------------------------------------------

    def _may_form(self, now_ms: int) -> bool:
        """Return whether the rule may find a quorum; cheap, because with a thousand members a request must not cost a
        thousand steps."""
        if self.previous is None:
            return True
        if self._healthy_before is None:
            out = self._left_out()
            healthy = (each.replica_id for each in self._known(self._members) if each.healthy)
            self._healthy_before = sum(name not in out for name in healthy)
        return (
            len(self._asked_since) >= self._healthy_before or now_ms - self._formed_ms >= self._timeouts.join_timeout_ms
        )

    def _waiting(self) -> list[tuple[Replica, OpenRequest]]:
        """Return the replicas that wait, in the order of their requests; cheap when there are none."""
        self._askers = {name: replica for name, replica in self._askers.items() if replica.request is not None}
        return [(each, each.request) for each in self._askers.values() if each.healthy and each.request is not None]

    def _form(self, now_ms: int, wall_ms: int) -> list[effects.LighthouseEffect]:
        """Form the next quorum if the rule allows it, and answer every waiting member."""
        out = [*self._note_job_end(now_ms), *self._refuse_late(), *self._refuse_ahead()]
        waiting = self._waiting()
        self._requests_needed = 0
        if not waiting:
            self.waiting_for = NO_REQUEST
            return out
        if self._asking is not None:
            self.waiting_for = f"the members of quorum {self._asking[1][0]}, which a replica reports"
            return out
        if self.previous is not None:
            replicas, bad_links = self.liveness.replicas, self._reach.bad_links(now_ms)
            out += self._reach.trials.look((each for each, _ in waiting), self._members, replicas, now_ms, bad_links)
        kept = self._check_links(now_ms)
        if kept.waits:
            # until the next decision, the replicas that are kept out replace no others
            self._exclusions = replace(kept, out=self._exclusions.out)
            self.waiting_for = kept.waits
            return out
        self._exclusions = kept
        self._note_barred(waiting, now_ms)
        situation = self._situation(waiting, now_ms)
        decision = decide(situation)
        if isinstance(decision, Form) and decision.kept_out:
            decision = self._fit(decision, situation)
        if not isinstance(decision, Form):
            out += self._recall_for(waiting, now_ms) if self._living.stands else []
            self.waiting_for = self._with_kept_out(decision.reason, waiting, now_ms)
            self._requests_needed = decision.more
            return out
        if self._starts_over(decision.members, now_ms):
            left_ms = self._unnamed_until_ms - now_ms
            self.waiting_for = f"{UNKNOWN_MEMBERS} {self._newest_held}, for {left_ms} ms more"
            return out
        lives = self._unreachable_trainers(waiting, now_ms)
        if lives is not None:
            self.waiting_for = lives
            return out
        if len(decision.members) < len(waiting):
            # The holder of the job's own newest state may be among those that are left out.
            ahead = self._refuse_ahead({member.replica_id for member in decision.members})
            if ahead:
                return [*out, *ahead, *self._form(now_ms, wall_ms)]
        out += self._warn_kept_out(decision.kept_out, now_ms)
        return out + self._formed(decision.members, now_ms, wall_ms)

    def _recall_for(self, waiting: list[tuple[Replica, OpenRequest]], now_ms: int) -> list[effects.TellNewest]:
        """Recall the members of the newest quorum if a replica waits that could be in the next one."""
        out = self._left_out()
        for replica, _ in waiting:
            name = replica.replica_id
            able = name not in out and name not in self._exclusions.out and replica.ineligible_until_ms <= now_ms
            if name not in self._members and able:
                return self._recall()
        return []

    def _unreachable_trainers(self, waiting: list[tuple[Replica, OpenRequest]], now_ms: int) -> str | None:
        """Return what to wait for, or None, so that no replica starts over beside a quorum that may train out
        of reach."""
        names = {replica.replica_id for replica, _ in waiting}
        lives = self._living.waits_for(names, self._members, self.liveness.replicas, now_ms)
        if lives is not None or self._formed_here:
            return lives
        holds = any(replica.held == self._newest_held for replica, _ in waiting)
        newest, lease_ms = self._newest_held, self._newest_held_lease_ms
        return self._living.waits_for_unnamed(newest, lease_ms, holds, self._previous_key, now_ms)

    # --- links -------------------------------------------------------------------------------------------------------

    def _check_links(self, now_ms: int) -> Exclusions:
        """Return which replicas are kept out of the next quorum, because others can't reach them. Cheap while no link
        is bad."""
        if not self._reach.counts(now_ms):
            return Exclusions()
        peers = peers_of(self.liveness.replicas.values(), self._members, now_ms)
        slow = self._left_out()
        if slow:
            others = {name: peer for name, peer in peers.items() if name not in slow}
            # A straggler that is left out replaces no other. If the others are too few without it, it counts:
            # unreachable replicas are kept out then, and the straggler returns in their place.
            if self._reach.fit(others, now_ms) is not None:
                peers = others
        return self._reach.look(peers, now_ms)

    def _fit(self, form: Form, situation: Situation) -> Form | Wait:
        """Refit a decision that keeps replicas out, so that it leaves out as few of the waiting replicas as possible.

        A replica that has not asked yet is not in this quorum, and a bad link to it keeps no replica out. If the refit
        leaves out other replicas, the rule runs again on the rest.
        """
        peers = peers_of(self.liveness.replicas.values(), self._members, situation.now_ms)
        able = {*form.kept_out, *(member.replica_id for member in form.members)}
        kept_out = self._reach.fit({name: peer for name, peer in peers.items() if name in able}, situation.now_ms)
        if kept_out is None:
            return Wait("a replica that all others can reach and that has the newest state of those that have asked")
        return form if kept_out == set(form.kept_out) else decide(replace(situation, kept_out=kept_out))

    def _with_kept_out(self, reason: str, waiting: list[tuple[Replica, OpenRequest]], now_ms: int) -> str:
        """Return why there is no quorum; for replicas that wait in vain, name the replicas that can't reach them."""
        kept_out = [replica.replica_id for replica, _ in waiting if replica.replica_id in self._exclusions.out]
        if not kept_out:
            return reason
        why = self._reach.describe(kept_out, now_ms)
        return why if len(kept_out) == len(waiting) else f"{reason}; left out: {why}"

    def _warn_kept_out(self, kept_out: tuple[str, ...], now_ms: int) -> list[effects.LighthouseEffect]:
        """Warn once about each replica that is left out: in the log, at the replica, and at the ends of its bad
        links."""
        new = sorted(self._reach.formed(frozenset(kept_out)))
        out: list[effects.LighthouseEffect] = []
        warned: Counter[str] = Counter()
        for name in new[:NAMES_SHOWN_MOST]:
            warning = f"{self._reach.left_out(name, now_ms)}. {CHECK_LINKS}"
            out.append(effects.Warned(self.name, warning))
            ends = [name, *(each for each in self._reach.ends_of(name) if warned[each] < LINK_WARNINGS_MOST)]
            warned.update(ends)
            out += self._tell(ends, warning)
        more = new[NAMES_SHOWN_MOST:]  # half a thousand replicas need not all be named to each other
        if more:
            are = "is" if len(more) == 1 else "are"
            why = "their links to other replicas fail"
            warning = f"{_listed(more)} {are} left out of the next quorum too: {why}. {CHECK_LINKS}"
            out += [effects.Warned(self.name, warning), *self._tell(more, warning)]
        return out

    def _tell(self, names: Iterable[str], warning: str) -> list[effects.TellWait]:
        known = self._known(names)
        return [effects.TellWait(each.stream, warning, True) for each in known if each.stream is not None]

    def _starts_over(self, members: tuple[Member, ...], now_ms: int) -> bool:
        """Return whether this quorum would start the job over while members of an earlier quorum may still come.

        The members of a quorum that some replica held before this lighthouse started have a heartbeat_timeout to come.
        This holds even if that replica went before it could name them: a fresh replica would start the job over without
        them.
        """
        newest = self._newest_held
        if newest is None or self._formed_here or (self.previous is not None and self.previous.key >= newest):
            return False
        if any(member.live and not member.torn for member in members):
            return False
        return now_ms < self._unnamed_until_ms

    def _note_barred(self, waiting: list[tuple[Replica, OpenRequest]], now_ms: int) -> None:
        """Record that these can't be in a quorum now. They may have asked long ago, and hurry no other replica."""
        out = self._exclusions.out.union(self._left_out())
        for replica in [each for each, _ in waiting if each.replica_id in out or each.ineligible_until_ms > now_ms]:
            replica.barred_ms = now_ms

    def _situation(self, waiting: list[tuple[Replica, OpenRequest]], now_ms: int) -> Situation:
        replicas, from_ms = self.liveness.replicas.values(), self._living.joins_from_ms
        asked_ms = {each.replica_id: max(request.asked_ms, each.barred_ms, from_ms) for each, request in waiting}
        first_asked_ms = min(asked_ms.values(), default=now_ms)
        reference_step, lost_sources = self._lost_sources(now_ms)
        return Situation(
            waiting={replica.replica_id: request.member for replica, request in waiting},
            healthy={replica.replica_id for replica in replicas if replica.healthy and replica.ready},
            healing={replica.replica_id for replica in replicas if self._heals(replica, first_asked_ms, now_ms)},
            stalled={replica.replica_id for replica in replicas if self._is_stalled(replica, first_asked_ms, now_ms)},
            ineligible={replica.replica_id for replica in replicas if replica.ineligible_until_ms > now_ms},
            left_out=self._left_out(),
            previous=self.previous,
            min_replicas=self._config.min_replicas,
            join_timeout_ms=self._living.join_timeout_ms(),
            asked_ms=asked_ms,
            fast_only=now_ms - self._incarnation.now_ms < self._timeouts.reconnect_grace_ms,
            reference_step=reference_step,
            lost_sources=lost_sources,
            lost_state_ms=max((self._patience_ms(self.liveness.replicas[name]) for name in lost_sources), default=0),
            left={replica.replica_id for replica in replicas if replica.left is not None},
            kept_out=self._exclusions.out,
            now_ms=now_ms,
        )

    def _lost_sources(self, now_ms: int) -> tuple[int, dict[str, int]]:
        """Return the step that the newest quorum started from, and its lost holders that may still live.

        The manager server or the link of such a holder has failed, not its trainer.
        """
        lost_ms = {
            replica.replica_id: replica.lost_ms
            for replica in self._known(self._members)
            if replica.lost is not None and replica.left is None and not replica.dead
            if now_ms - replica.lost_ms < self._patience_ms(replica)
        }
        step = self._reference_step() if lost_ms else 0
        if self.previous is None or step == 0:
            return 0, {}
        held = self._holders(step)
        return step, {replica_id: lost_ms[replica_id] for replica_id in held if replica_id in lost_ms}

    def _holders(self, step: int) -> Collection[str]:
        """Return the holders of the state of that step, which the newest quorum started from or has reached since."""
        assert self.previous is not None
        return self.previous.replica_ids if self._has_moved_on() else _holders_of(self.previous, step)

    def _patience_ms(self, replica: Replica) -> int:
        """Return for how long a lost replica may come back with its state. A replica that fell silent may only be
        paused."""
        return self._config.lost_state_ms if replica.fell_silent else self._timeouts.heartbeat_timeout_ms

    def _reference_step(self) -> int:
        """Return the step that the newest quorum started from; 0: no state is worth waiting for."""
        if self._has_moved_on():
            return self.newest_step
        common = _assignment_of(self.previous) if self.previous is not None else None
        return common.step if common is not None else 0

    def _note_lost_state(self, members: Collection[Member]) -> list[effects.Warned]:
        """Warn that the job goes on from an older state than the newest quorum's, and name the holders of that
        state."""
        step = self._reference_step()
        if self.previous is None or any(member.step >= step and not member.torn for member in members):
            return []
        known = self._known(self._holders(step))
        silent = [each.replica_id for each in known if each.lost and each.fell_silent and not each.dead]
        if not silent:
            return []
        newest = max((member.step for member in members if not member.torn), default=None)
        if newest is None:
            return []  # the job does not go on: no member holds a whole state, as the members are told
        patience = f"after a wait of {self._config.lost_state_ms} ms (--lost-state-timeout-ms)"
        sentence = (
            f"the job resumes from step {newest}, {patience}: only {_listed(silent)} had step {step}, and fell silent. "
            "If it returns, the state with more steps counts and the others recover from it"
        )
        return [effects.Warned(self.name, sentence)]

    def _heals(self, replica: Replica, first_asked_ms: int, now_ms: int) -> bool:
        since = replica.healing_since_ms
        if since is None or not replica.healthy or now_ms - since >= self._timeouts.heal_timeout_ms:
            return False
        # Its source takes the snapshot after the reductions, just before it asks for the next quorum.
        return now_ms - max(since, replica.progress_ms, first_asked_ms) < self._timeouts.heartbeat_timeout_ms

    def _is_stalled(self, replica: Replica, first_asked_ms: int, now_ms: int) -> bool:
        """Return whether the replica waits for a state of which no byte has arrived, although its source has had time
        to begin.

        Its source may hang, or may have failed silently. No replica waits for such a replica: of two replicas the
        source would otherwise wait for it without end, because one of two is no majority.
        """
        since = replica.healing_since_ms
        if since is None or not replica.healthy or replica.progress_ms >= since or replica.where is None:
            return False
        waits = replica.where[0].phase is Phase.WAITING
        return waits and now_ms - max(since, first_asked_ms) >= self._timeouts.first_byte_ms

    def _note_job_end(self, now_ms: int) -> list[effects.LighthouseEffect]:
        """Note the end of the job: the last member has finished, or one has and the others can't come back."""
        if self.previous is None:
            return []
        able = (name for name in self._members if self._can_go_on(name, now_ms))
        ended = self._end.look(self.previous.key, self._members, able)
        if ended is None:
            return []
        for replica in self.liveness.replicas.values():
            # A new run does not wait for a replica that still evaluates the old run's state. A replica that asks may
            # begin the run.
            replica.ready = replica.request is not None
        return [effects.JobEnded(self.name, ended.step, ended.replica_ids)]

    def _can_go_on(self, replica_id: str, now_ms: int) -> bool:
        """Return whether a member may train on; a lost member that may live has a heartbeat_timeout to come back."""
        replica = self.liveness.replicas.get(replica_id)
        if replica is None or replica.left is not None or replica.dead:
            return False
        return replica.lost is None or now_ms - replica.lost_ms < self._timeouts.heartbeat_timeout_ms

    def _refuse_late(self) -> list[effects.LighthouseEffect]:
        """Refuse the replicas of a run that has ended, so that the job does not get a second result."""
        ended = self._end.ended
        if ended is None:
            return []
        out: list[effects.LighthouseEffect] = []
        for replica, request in self._waiting():
            if not self._end.is_late(request.member, replica.since_ms, self._previous_key):
                continue
            replica.request = None
            replica.ready = False  # it counts nowhere, and no replica waits for it
            if replica.stream is not None:
                message = (
                    f"job {self.name} ended at step {ended.step}, finished by {_listed(ended.replica_ids)}; "
                    f"replica {replica.replica_id} of that run is at step {request.member.step}, and no replica is "
                    f"left to heal from. Use the result of step {ended.step}, or restart the whole job for a new run"
                )
                out.append(effects.RefuseRequest(replica.stream, request.request, Refusal.OVER, message))
        return out

    def _refuse_ahead(self, within: Collection[str] | None = None) -> list[effects.LighthouseEffect]:
        """Refuse replicas whose state, loaded from outside, is ahead of the job's own.

        `within`: only these replicas; None: all that wait.
        """
        waiting = [each for each in self._waiting() if within is None or each[0].replica_id in within]
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
        left = [replica.replica_id for replica in self.liveness.replicas.values() if replica.left is not None]
        slow = self.stragglers.left_out
        reason = reason_for_new_id(previous, members, self._broken, left, kept_out=self._exclusions.out, left_out=slow)
        failed = self._reach.stores_failed(now_ms)
        if failed:
            members = tuple(replace(each, store_failed=each.replica_id in failed) for each in members)
        out: list[effects.LighthouseEffect] = [*self._note_lost_state(members)] if reason is not None else []
        key = previous.key if previous is not None and reason is None else QuorumKey(self.last_id + 1, self._nonces())
        if reason is not None:
            self._forget_losses()
            self.liveness.drop_presumed()
        quorum = Quorum(key, members, wall_ms)
        out += self._note_new_run(quorum, now_ms)
        self.last_id = max(self.last_id, key.quorum_id)
        self.previous = quorum
        self._members = {member.replica_id: member for member in members}
        self._formed_here = True
        self._begin_round(previous)
        unchanged = self._unchanged(quorum, previous)
        recovering = () if unchanged else _recovering_in(quorum)
        if reason is not None:
            age_ms, self._key_formed_ms = now_ms - self._key_formed_ms, now_ms
            out.append(effects.QuorumFormed(self.name, quorum, previous, age_ms, reason, recovering))
        self._formed_ms = now_ms
        self._asked_since = set()
        self.waiting_for = NO_REQUEST
        return out + self._answers(quorum, set(recovering), now_ms, unchanged=unchanged)

    def _note_new_run(self, quorum: Quorum, now_ms: int) -> list[effects.LighthouseEffect]:
        """Start a new run, and warn if it trains from before the end of the last one, because that may be unwanted."""
        ended, step = self._end.ended, max(member.step for member in quorum.members)
        if ended is None or step >= ended.step:
            return []
        for member in quorum.members:
            # the replica belongs to the new run from now on
            self.liveness.replicas[member.replica_id].since_ms = now_ms
        if self._previous_key != ended.key:
            return []
        warning = (
            f"job {self.name} ended at step {ended.step}, finished by {_listed(ended.replica_ids)}; a new run starts "
            f"from step {step}. If you do not want it, end it and load the result of step {ended.step}"
        )
        streams = [self.liveness.replicas[member.replica_id].stream for member in quorum.members]
        warnings = [effects.TellWait(stream, warning, True) for stream in streams if stream is not None]
        return [effects.Warned(self.name, warning), *warnings]

    def _begin_round(self, before: Quorum | None) -> None:
        """Begin a round: the newest quorum is another one than before, or was given again."""
        assert self.previous is not None
        self._living.given(self.previous, before)
        self.liveness.remember(self._living.remember_ms)
        self.hangs.begin_round()
        self._healthy_before = None
        self._broken = None
        self.newest_step = max(member.step for member in self._members.values())
        self._announced = False
        self._end.trains_on(self.newest_step)

    def _answers(
        self, quorum: Quorum, recovering: set[str], now_ms: int, *, unchanged: bool
    ) -> list[effects.LighthouseEffect]:
        """Answer all members. `unchanged`: who holds the key needs no new data."""
        out: list[effects.LighthouseEffect] = []
        for member in quorum.members:
            replica = self.liveness.replicas[member.replica_id]
            request, replica.request = replica.request, None
            assert request is not None  # a waiting replica has asked, on an open stream
            assert replica.stream is not None
            replica.healing_since_ms = now_ms if member.replica_id in recovering else None
            replica.has_healed = False
            replica.held = quorum.key
            replica.answered = request.request
            replica.answer_void = False
            replica.withdrawn = None
            if unchanged and request.held == quorum.key:
                out.append(effects.AnswerUnchanged(replica.stream, request.request, quorum.key))
            else:
                out.append(effects.AnswerQuorum(replica.stream, request.request, quorum))
        return out

    def _unchanged(self, quorum: Quorum, previous: Quorum | None) -> bool:
        """Return whether a holder of this key needs no new data."""
        if previous is None or previous.key != quorum.key:
            return False
        first = quorum.members[0]
        # A group that gets "unchanged" takes these two from its own settings, where the others take the first member's.
        if any(
            (member.fixed_with_spares, member.min_replica_size) != (first.fixed_with_spares, first.min_replica_size)
            for member in quorum.members
        ):
            return False
        return all_at(quorum.members, first.step, first.lineage) and all(
            after.settings == before.settings for before, after in zip(previous.members, quorum.members, strict=True)
        )
