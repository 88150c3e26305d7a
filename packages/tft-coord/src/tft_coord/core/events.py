"""The events of the cores: frozen facts in the past tense.

A `stream` is a number that the shell gives to each connection and never reuses in a process's life. A `call` is the
same for a request that waits for an answer. The numbers stand for objects that a core can't hold itself.

Law of this file: frozen dataclasses without behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tft_coord.core.fingerprint import Fingerprint
from tft_coord.core.progress import Progress
from tft_coord.core.stragglers import StragglerNotice
from tft_coord.core.types import (
    Hello,
    LossNotice,
    Member,
    Purpose,
    Quorum,
    QuorumKey,
    QuorumNews,
    RankRequest,
    Unreached,
)

# --- to the lighthouse ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HelloReceived:
    """The first message of a stream, or a later one with a newer session after the loss of the last one."""

    stream: int
    hello: Hello


@dataclass(frozen=True, slots=True)
class BeatReceived:
    """A heartbeat of a replica group.

    `healed_bytes` counts the bytes of live state that its trainers have received, never falling. `progress` is the
    trainers' progress in their step; None: not said. `waits`: all of them have reported that they wait. `number`: the
    answer (`TellNewest`) carries it; 0: no answer is wanted.
    """

    stream: int
    healed_bytes: int = 0
    progress: Progress | None = None
    waits: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class LateReported:
    """A rank of that stream's group has waited for `join_timeout` in a round of a standing quorum.

    Args:
        stream: of its manager server.
        key, step: of the quorum and the round.
    """

    stream: int
    key: QuorumKey
    step: int


@dataclass(frozen=True, slots=True)
class QuorumRequested:
    """A replica group's request for the next quorum; `request` is its own number, rising; `member.session` is ignored.

    The first request on a stream carries `fingerprint`, and so does the request after a change; empty: no change.
    """

    stream: int
    request: int
    member: Member
    held: QuorumKey | None
    fingerprint: Fingerprint = ()


@dataclass(frozen=True, slots=True)
class RequestWithdrawn:
    """The withdrawal of a request."""

    stream: int
    request: int


@dataclass(frozen=True, slots=True)
class QuorumReported:
    """The answer to `AskForQuorum`: the quorum that the hello named, or None if it is no longer held."""

    stream: int
    quorum: Quorum | None


@dataclass(frozen=True, slots=True)
class PeersTried:
    """The answer to `TryPeers`: the members that the manager server of that stream did not reach."""

    stream: int
    number: int
    unreached: tuple[Unreached, ...] = ()


@dataclass(frozen=True, slots=True)
class DeathReported:
    """A manager server's report that a trainer of its group ended."""

    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """The manager server's answer to a probe, or a later report of what it has found after that one.

    `number`: of the newest probe that came; 0: none did. `stopped` names the stopped ranks, one phrase; "": no rank is
    known to be stopped. `stopped_ms`: for how long, at least.
    """

    stream: int
    number: int
    stopped: str = ""
    stopped_ms: int = 0


@dataclass(frozen=True, slots=True)
class LeaveReceived:
    """The group has left the job, and serves its state to healing replicas, for `serve_ms` at most.

    `finished_step` is the last step of its finished training; None: other replicas may train on.
    """

    stream: int
    reason: str
    serve_ms: int
    finished_step: int | None = None


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The connection is closed, by either side.

    `told`: the host at the other end has closed it, as it does for a process that ends. A sick network or a sick
    lighthouse breaks connections without such a close.
    """

    stream: int
    told: bool = False


LighthouseEvent = (
    HelloReceived
    | BeatReceived
    | LateReported
    | QuorumRequested
    | RequestWithdrawn
    | QuorumReported
    | PeersTried
    | DeathReported
    | ProbeAnswered
    | LeaveReceived
    | StreamClosed
)


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """A unary request that a replica leave its job; `replica` is its id, or the name in it."""

    call: int
    job: str
    replica: str
    reason: str
    serve_ms: int = 0


# --- to the lighthouse, from clients without a stream (torchft's wire) ----------------------------------------------


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    """A unary heartbeat."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class UnaryQuorumRequested:
    """A unary quorum request; it waits as `call` until answered or withdrawn."""

    call: int
    member: Member


@dataclass(frozen=True, slots=True)
class UnaryRequestWithdrawn:
    """The caller of a unary request disconnected, or its deadline passed."""

    call: int


UnaryEvent = HeartbeatReceived | UnaryQuorumRequested | UnaryRequestWithdrawn

# --- to the manager server's core -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankConnected:
    """A group rank opened its stream. `session` tells one process of that rank from the next; a redial keeps it."""

    rank: int
    stream: int
    session: int


@dataclass(frozen=True, slots=True)
class RankDisconnected:
    """A group rank's stream broke. `left` is true when the rank said goodbye first (a clean shutdown)."""

    rank: int
    stream: int
    left: bool = False


@dataclass(frozen=True, slots=True)
class RankDied:
    """A group rank's process ended, by a sign that needs no grace (the parent's pipe). `left` as above."""

    rank: int
    reason: str
    left: bool = False


@dataclass(frozen=True, slots=True)
class RankProgressed:
    """A group rank's beat that reports its progress."""

    rank: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class RankBeat:
    """A group rank's beat that wants an answer with its number."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class RankLate:
    """A group rank has waited for `join_timeout` in a round of a standing quorum."""

    rank: int
    key: QuorumKey
    step: int


@dataclass(frozen=True, slots=True)
class NewestNamed:
    """The lighthouse's name of the newest quorum. `sent_ms`: when the beat was sent that it answers; None: it answers
    none."""

    news: QuorumNews
    sent_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ProbeCame:
    """The lighthouse has probed this group, because others wait for it. The probe was answered already."""

    number: int


@dataclass(frozen=True, slots=True)
class RanksLookedAt:
    """A look at the processes of some ranks: whether each is stopped."""

    stopped: Mapping[int, bool]


@dataclass(frozen=True, slots=True)
class RankAsked:
    """A group rank asks for the next quorum and waits as `call` until `deadline_ms` (of the core's clock)."""

    rank: int
    call: int
    request: RankRequest
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class RankWithdrew:
    """The caller of a quorum request disconnected."""

    rank: int
    call: int


@dataclass(frozen=True, slots=True)
class RankVoted:
    """A group rank votes in the round (key, step, purpose) and waits as `call` until `deadline_ms`.

    `key` is None for clients that vote without naming a quorum (torchft's).
    """

    rank: int
    call: int
    key: QuorumKey | None
    step: int
    purpose: Purpose
    yes: bool
    deadline_ms: int
    leaving: bool = False  # this rank requests that the group leaves after this step
    stands: bool = False  # by the word of the round, no replica asked, left or recovered


@dataclass(frozen=True, slots=True)
class RankLeft:
    """A group rank leaves, after a verdict that says so or between two steps; it waits as `call`.

    `finished_step` as in `LeaveReceived`.
    """

    rank: int
    call: int
    reason: str
    serve_ms: int
    finished_step: int | None = None


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """The lighthouse asks this group to leave, because an operator drains it."""

    reason: str
    serve_ms: int


@dataclass(frozen=True, slots=True)
class NobodyHeals:
    """The lighthouse's news that no replica heals any more from this group, which has left."""


@dataclass(frozen=True, slots=True)
class WaitTold:
    """A sentence about this group's wait: from the lighthouse, or about what keeps the lighthouse from being
    reached."""

    sentence: str
    warns: bool = False  # a warning for the user instead of a wait


@dataclass(frozen=True, slots=True)
class PaceTold:
    """The lighthouse's news about this group's pace."""

    news: StragglerNotice


@dataclass(frozen=True, slots=True)
class KillAsked:
    """A request that the processes of this group end; `message` names the reason and the caller."""

    message: str


@dataclass(frozen=True, slots=True)
class QuorumArrived:
    """The lighthouse's whole answer to `request`."""

    request: int
    quorum: Quorum


@dataclass(frozen=True, slots=True)
class UnchangedArrived:
    """The lighthouse's short answer to `request`: the quorum of that key stands, and all are at this group's state."""

    request: int
    key: QuorumKey


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """The lighthouse refused `request`."""

    request: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class LossNoticed:
    """The lighthouse's news that a member of a quorum was lost."""

    notice: LossNotice


@dataclass(frozen=True, slots=True)
class NewcomerAnnounced:
    """The lighthouse's news about a newcomer that will heal in the next quorum."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The lighthouse declared this group's own session lost, so its quorum is broken for the others."""

    session: int
    reason: str


GroupEvent = (
    RankConnected
    | RankDisconnected
    | RankDied
    | RankProgressed
    | RankBeat
    | RankLate
    | NewestNamed
    | ProbeCame
    | RanksLookedAt
    | RankAsked
    | RankWithdrew
    | RankVoted
    | QuorumArrived
    | UnchangedArrived
    | RequestRefused
    | LossNoticed
    | NewcomerAnnounced
    | SessionLost
    | RankLeft
    | LeaveAsked
    | NobodyHeals
    | WaitTold
    | PaceTold
    | KillAsked
)
