"""What happens to the cores: frozen facts in the past tense.

A `stream` is a number that the shell gives to each connection and never uses twice in a process's life; a `call` is
the same for a request that waits for an answer. They are how a core names what it can't hold itself.

Law of this file: frozen dataclasses without behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tft_coord.core.fingerprint import Fingerprint
from tft_coord.core.progress import Progress
from tft_coord.core.stragglers import StragglerNews
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
    """A stream's first message (or a later one, with a newer session, after it was told that it is lost)."""

    stream: int
    hello: Hello


@dataclass(frozen=True, slots=True)
class BeatReceived:
    """A sign of life; `healed_bytes` counts the bytes of live state that its trainers have received, ever rising.
    `progress` is where they are in their step; None: not said. `waits`: all of them have said that they wait.
    `number`: the answer (`TellNewest`) carries it; 0: none is wanted."""

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
    """A replica group asks for the next quorum; `request` is its own number, rising; `member.session` is ignored.

    `fingerprint` comes with the first request on a stream, and again when a part is added; empty: said before.
    """

    stream: int
    request: int
    member: Member
    held: QuorumKey | None
    fingerprint: Fingerprint = ()


@dataclass(frozen=True, slots=True)
class RequestWithdrawn:
    """The asker gave its request up."""

    stream: int
    request: int


@dataclass(frozen=True, slots=True)
class QuorumReported:
    """The answer to `AskForQuorum`: the quorum that the hello named, or None if it is no longer held."""

    stream: int
    quorum: Quorum | None


@dataclass(frozen=True, slots=True)
class PeersTried:
    """The answer to `TryPeers`: whom the manager server of that stream did not reach."""

    stream: int
    number: int
    unreached: tuple[Unreached, ...] = ()


@dataclass(frozen=True, slots=True)
class DeathReported:
    """The manager server of that stream says that a trainer of its group ended."""

    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """The manager server of that stream answers a probe, or says once more what it has found after that one.

    `number`: of the newest probe that came; 0: none did. `stopped` names the stopped ranks, one phrase; "": none is
    known to be. `stopped_ms`: for how long, at least.
    """

    stream: int
    number: int
    stopped: str = ""
    stopped_ms: int = 0


@dataclass(frozen=True, slots=True)
class LeaveReceived:
    """The group has left the job, and serves its state to those that heal from it, for `serve_ms` at most.

    `finished_step` is the last step of its training, which is over; None: it leaves others to train on.
    """

    stream: int
    reason: str
    serve_ms: int
    finished_step: int | None = None


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The connection is gone, whoever closed it.

    `told` says that the host at its other end has closed it, as it does for a process that ends. A network or a
    lighthouse that is sick breaks connections without a word.
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
    """Somebody asks, without a stream, that a replica leave its job; `replica` is its id, or the name in it."""

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
    """The caller of a unary request went away or its deadline passed."""

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
    """A group rank's beat says where in its step it is."""

    rank: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class RankBeat:
    """A group rank's beat has come that wants an answer with its number."""

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
    """The lighthouse names the newest quorum. `sent_ms`: when the beat was sent that it answers; None: it answers
    none."""

    news: QuorumNews
    sent_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ProbeCame:
    """The lighthouse asks after this group, because others wait for it. It was answered already."""

    number: int


@dataclass(frozen=True, slots=True)
class RanksLookedAt:
    """The processes of some ranks were looked at: whether each is stopped."""

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
    """The caller of a quorum request went away."""

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
    leaving: bool = False  # this rank wishes that the group leaves after this step
    stands: bool = False  # in the word of the round nobody asked, left or recovered


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
    """The lighthouse asks this group to leave, because somebody drains it."""

    reason: str
    serve_ms: int


@dataclass(frozen=True, slots=True)
class NobodyHeals:
    """The lighthouse says that nobody heals any more from this group, which has left."""


@dataclass(frozen=True, slots=True)
class WaitTold:
    """Whom this group waits for, in words: the lighthouse says so, or what keeps the lighthouse from being reached."""

    sentence: str
    warns: bool = False  # it is no wait, but what the user is to be warned of


@dataclass(frozen=True, slots=True)
class PaceTold:
    """The lighthouse says what has changed with this group's pace."""

    news: StragglerNews


@dataclass(frozen=True, slots=True)
class KillAsked:
    """Somebody asks that the processes of this group end; `message` says why, and who."""

    message: str


@dataclass(frozen=True, slots=True)
class QuorumArrived:
    """The lighthouse's whole answer to `request`."""

    request: int
    quorum: Quorum


@dataclass(frozen=True, slots=True)
class UnchangedArrived:
    """The lighthouse's short answer to `request`: the quorum of that key stands, all are at the asker's state."""

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
    """The lighthouse says that a member of a quorum was lost."""

    notice: LossNotice


@dataclass(frozen=True, slots=True)
class NewcomerAnnounced:
    """The lighthouse says that somebody asks who will heal in the next quorum."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The lighthouse took this group's own session for lost, so its quorum is broken for the others."""

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
