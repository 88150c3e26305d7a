"""The decisions of the cores: orders to the shell, frozen, performed in the order given.

Law of this file: frozen dataclasses without behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tft_coord.core.fingerprint import Fingerprint
from tft_coord.core.stragglers import StragglerNotice
from tft_coord.core.types import (
    DrainComplete,
    KillOrder,
    LeaveRequest,
    LossNotice,
    Member,
    PeerAddresses,
    Plan,
    Quorum,
    QuorumKey,
    QuorumNews,
    Refusal,
    Verdict,
    WaitsFor,
)

# --- of the lighthouse -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """The order to tell the stream that its session is accepted, by which lighthouse, and with which timeouts.

    A timeout of 0 is not said.
    """

    stream: int
    session: int
    lighthouse_started_ms: int
    cluster_id: str
    heartbeat_timeout_ms: int = 0
    join_timeout_ms: int = 0


@dataclass(frozen=True, slots=True)
class RefuseSession:
    """The order to tell the stream why it is refused, then end it.

    `silent_ms`: for how long the process that keeps its place has been silent, if there is one. `leader`: address of
    the lighthouse to use instead; "": it is unknown.
    """

    stream: int
    refusal: Refusal
    message: str
    silent_ms: int = 0
    leader: str = ""


@dataclass(frozen=True, slots=True)
class TellLost:
    """The order to tell the stream that its session was declared lost; it may open a newer one on the same stream."""

    stream: int
    session: int
    message: str


@dataclass(frozen=True, slots=True)
class NotifyLoss:
    """The order to tell the stream at once that a member of its quorum was lost."""

    stream: int
    notice: LossNotice


@dataclass(frozen=True, slots=True)
class AnnounceNewcomer:
    """The order to tell the stream about a newcomer that will heal in the next quorum, so that its trainer may take a
    snapshot early."""

    stream: int
    replica_id: str


@dataclass(frozen=True, slots=True)
class TryPeers:
    """The order to ask the stream's manager server whether it reaches these members; `PeersTried` has the same
    number."""

    stream: int
    number: int
    peers: tuple[PeerAddresses, ...]


@dataclass(frozen=True, slots=True)
class CloseStream:
    """The order to end a stream that a newer one of the same replica has replaced."""

    stream: int


@dataclass(frozen=True, slots=True)
class AskForQuorum:
    """The order to ask the stream for the members of the quorum that its hello named."""

    stream: int
    key: QuorumKey


@dataclass(frozen=True, slots=True)
class AnswerQuorum:
    """The order to give the whole quorum as the answer to the stream's request."""

    stream: int
    request: int
    quorum: Quorum


@dataclass(frozen=True, slots=True)
class AnswerUnchanged:
    """The order to give the short answer to the stream's request."""

    stream: int
    request: int
    key: QuorumKey


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """The order to fail the stream's request."""

    stream: int
    request: int
    refusal: Refusal
    message: str


@dataclass(frozen=True, slots=True)
class AskToLeave:
    """The order to ask the group on the stream to leave after its running step."""

    stream: int
    reason: str
    serve_ms: int


@dataclass(frozen=True, slots=True)
class Release:
    """The order to tell the stream of a group that has left that no replica heals from it any more."""

    stream: int


@dataclass(frozen=True, slots=True)
class Probe:
    """The order to probe the manager server on the stream; it answers with that number."""

    stream: int
    number: int


@dataclass(frozen=True, slots=True)
class TellNewest:
    """The order to tell the stream which quorum is the newest: as the answer to a beat, or at once when its members are
    recalled."""

    stream: int
    news: QuorumNews


@dataclass(frozen=True, slots=True)
class TellWait:
    """The order to tell the stream which replicas its replica waits for, or with `warns` a warning for its user.

    No decision depends on it.
    """

    stream: int
    sentence: str
    warns: bool = False


@dataclass(frozen=True, slots=True)
class TellStraggler:
    """The order to tell the stream what has changed in its replica's pace."""

    stream: int
    news: StragglerNotice


@dataclass(frozen=True, slots=True)
class PaceChanged:
    """The order to log and publish that a replica became a straggler, or stopped being one."""

    job: str
    news: StragglerNotice


@dataclass(frozen=True, slots=True)
class Warned:
    """The order to log a warning for the users of a job's replicas."""

    job: str
    sentence: str


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The order to log an exception in the handling of that job, which is a bug of this program.

    No decision was made for that job; the other jobs go on.
    """

    job: str
    error: Exception


@dataclass(frozen=True, slots=True)
class WaitNoticed:
    """The order to log that members of a job have waited for so many seconds, or that their wait is over.

    `missing`: for whom, sorted; None: those who wait are left out while the others train, or the wait is over.
    """

    job: str
    seconds: int
    is_over: bool
    sentence: str
    missing: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class QuorumFormed:
    """The order to log and publish that the key rose.

    Args:
        job: of the quorum.
        quorum: the new one.
        previous: the one before, or None.
        age_ms: of the previous one, 0 without.
        reason: why the id rose, one phrase.
        recovering: the members that get the live state; of torchft's replicas it is not known.
    """

    job: str
    quorum: Quorum
    previous: Quorum | None
    age_ms: int
    reason: str
    recovering: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """The order to log and publish that a replica was declared lost.

    `detect_ms`: how long before that its silence began or its stream broke; 0: its end was reported.
    """

    job: str
    replica_id: str
    session: int
    reason: str
    detect_ms: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ReplicaLeft:
    """The order to log and publish that a replica has left, and serves its state for `serve_ms` at most.

    `finished`: its training is over.
    """

    job: str
    replica_id: str
    session: int
    reason: str
    serve_ms: int
    finished: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The order to log and publish that no replica trains any more, and that these have finished at that step."""

    job: str
    step: int
    replica_ids: tuple[str, ...]


LighthouseEffect = (
    Welcome
    | RefuseSession
    | TellLost
    | NotifyLoss
    | AnnounceNewcomer
    | TryPeers
    | CloseStream
    | AskForQuorum
    | AnswerQuorum
    | AnswerUnchanged
    | RefuseRequest
    | AskToLeave
    | Release
    | Probe
    | TellNewest
    | TellWait
    | TellStraggler
    | PaceChanged
    | QuorumFormed
    | ReplicaLost
    | ReplicaLeft
    | JobEnded
    | JobFailed
    | Warned
)


@dataclass(frozen=True, slots=True)
class AnswerUnaryQuorum:
    """The order to give the quorum to a unary caller (torchft's wire)."""

    call: int
    quorum: Quorum


@dataclass(frozen=True, slots=True)
class RefuseUnary:
    """The order to fail a unary caller."""

    call: int
    refusal: Refusal
    message: str


UnaryEffect = AnswerUnaryQuorum | RefuseUnary | QuorumFormed

# --- of the manager server's core ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskLighthouse:
    """The order to send the group's merged request. `fingerprint` is the group's new one; empty: no change."""

    request: int
    member: Member
    held: QuorumKey | None
    fingerprint: Fingerprint = ()


@dataclass(frozen=True, slots=True)
class WithdrawFromLighthouse:
    """The order to withdraw the group's request."""

    request: int


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The order to give a rank its plan, and the quorum it comes from."""

    call: int
    rank: int
    plan: Plan
    quorum: Quorum


@dataclass(frozen=True, slots=True)
class AnswerRankUnchanged:
    """The order to tell a rank that its plan of that key stands, at the step that it reported."""

    call: int
    rank: int
    key: QuorumKey


@dataclass(frozen=True, slots=True)
class FailRank:
    """The order to fail a rank's quorum request or vote. `code` is a Refusal's value, "deadline", "group_lost" or
    "stale"."""

    call: int
    rank: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class AnswerVote:
    """The order to give a rank the verdict of its round."""

    call: int
    rank: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class ReportDeath:
    """The order to tell the lighthouse that this group lost a rank."""

    reason: str


@dataclass(frozen=True, slots=True)
class SayWaits:
    """The order to tell the lighthouse now, ahead of the next beat, that this group waits for other replicas."""


@dataclass(frozen=True, slots=True)
class ReportLate:
    """The order to tell the lighthouse that a round of a standing quorum waits for a member for longer than
    `join_timeout`."""

    key: QuorumKey
    step: int


@dataclass(frozen=True, slots=True)
class ReportStop:
    """The order to tell the lighthouse that ranks of this group are stopped, and for how long at least.

    `is_news` is False for a repeat. `probe`: the number of the newest probe that came, which shows the lighthouse the
    maximum age of the report.
    """

    reason: str
    stopped_ms: int = 0
    is_news: bool = True
    probe: int = 0


@dataclass(frozen=True, slots=True)
class NotifyRank:
    """The order to tell a rank that the quorum of that key is broken."""

    rank: int
    notice: LossNotice


@dataclass(frozen=True, slots=True)
class TellNewcomer:
    """The order to tell a rank about a newcomer that will heal."""

    rank: int
    replica_id: str


@dataclass(frozen=True, slots=True)
class TellGroupLost:
    """The order to tell a rank that its own group is lost, one sentence; `left`: another rank said goodbye, and no
    process died."""

    rank: int
    message: str
    left: bool = False


@dataclass(frozen=True, slots=True)
class LeaveJob:
    """The order to tell the lighthouse that this group has left; `finished_step` as in `events.LeaveReceived`."""

    reason: str
    serve_ms: int
    finished_step: int | None = None


@dataclass(frozen=True, slots=True)
class TellRank:
    """The order to give a rank a request, a warning or news, or the release to end."""

    rank: int
    news: LeaveRequest | DrainComplete | KillOrder | WaitsFor | StragglerNotice | QuorumNews


GroupEffect = (
    AskLighthouse
    | WithdrawFromLighthouse
    | AnswerPlan
    | AnswerRankUnchanged
    | FailRank
    | AnswerVote
    | ReportDeath
    | SayWaits
    | ReportLate
    | ReportStop
    | NotifyRank
    | TellNewcomer
    | TellGroupLost
    | RefuseSession
    | LeaveJob
    | TellRank
)
