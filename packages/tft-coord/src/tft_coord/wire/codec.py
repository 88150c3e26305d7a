"""Protobuf bytes to the core's values and back.

A peer may be an old version, a foreign program or an attacker, so every length and number is looked at before it is
used, and whatever does not fit raises ProtocolError with a sentence. Both directions of a stream speak the core's own
events and effects: what one side encodes is what the other side's core is given.

An absent lineage is an unknown one. torchft's members and ranks carry none of our fields; ours always say a
min_replica_size, so that its absence tells the two apart, and torchft's get the settings that torchft has.

Law of this file: bytes in, values out, and back; no I/O, no state, nothing that decides.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from tft_coord.core.effects import (
    AnnounceNewcomer,
    AnswerQuorum,
    AnswerUnchanged,
    AskForQuorum,
    AskToLeave,
    NotifyLoss,
    RefuseRequest,
    RefuseSession,
    Release,
    TellLost,
    Welcome,
)
from tft_coord.core.events import (
    BeatReceived,
    DeathReported,
    DrainRequested,
    HelloReceived,
    LeaveReceived,
    LighthouseEvent,
    QuorumReported,
    QuorumRequested,
    RequestWithdrawn,
    StreamClosed,
)
from tft_coord.core.fingerprint import Fingerprint, FingerprintPart
from tft_coord.core.fingerprint import check as check_fingerprint
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.types import (
    MAX_INT64,
    MAX_UINT64,
    Hello,
    KillOrder,
    LeaveRequest,
    LossNotice,
    Member,
    NewcomerAsks,
    Plan,
    Purpose,
    Quorum,
    QuorumKey,
    RankRequest,
    Refusal,
    Released,
    Source,
    Verdict,
)
from tft_coord.errors import ProtocolError
from tft_coord.views import DescribedJob, LighthouseDescription
from tft_coord.wire import coordination_pb2 as pb
from tft_coord.wire.limits import (
    MAX_ADDRESS_BYTES,
    MAX_COUNT,
    MAX_DATA_BYTES,
    MAX_HANDLES_BYTES,
    MAX_HEALED_BYTES,
    MAX_JOBS_DESCRIBED,
    MAX_MEMBERS,
    MAX_METADATA_BYTES,
    MAX_NAME_BYTES,
    MAX_SENTENCE_BYTES,
    MAX_WORLD_SIZE,
)

_M = TypeVar("_M", bound=Message)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RankHello:
    """The first message of a group rank's stream. `session` tells one process of that rank from the next."""

    group_rank: int
    session: int


@dataclass(frozen=True, slots=True)
class RankBeat:
    """Bytes of live state that the rank's process has received so far, ever rising, and where in its step it is."""

    healed_bytes: int
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class RankGoodbye:
    """The rank leaves on purpose."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A rank's question for the next quorum."""

    group_rank: int
    request: RankRequest


@dataclass(frozen=True, slots=True)
class Vote:
    """A rank's vote. `key` is None from a client that names no quorum; `leaving`: it wishes that the group leaves."""

    group_rank: int
    step: int
    yes: bool
    key: QuorumKey | None
    purpose: Purpose
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Leave:
    """A rank leaves, and with it its group; the answer is a verdict that says so."""

    group_rank: int
    reason: str
    serve_ms: int


@dataclass(frozen=True, slots=True)
class RankCall:
    """A call on a rank's stream. `call` is the rank's number, rising; the answer must be there in `timeout_ms`."""

    call: int
    timeout_ms: int
    asked: Ask | Vote | Leave


@dataclass(frozen=True, slots=True)
class RankWithdraw:
    """The rank gave that call up."""

    call: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A call failed. `code` is a Refusal's value, "deadline", "group_lost" or "stale"."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """The answer to a call: a plan, the key of the plan that stands, a verdict, or why there is none."""

    call: int
    answer: Plan | QuorumKey | Verdict | Failure


@dataclass(frozen=True, slots=True)
class RanksLost:
    """The rank's own group is lost, one sentence; `left`: another rank said goodbye, and nobody died."""

    message: str
    left: bool = False


FromRank = RankHello | RankBeat | RankGoodbye | RankCall | RankWithdraw
ToRank = (
    Welcome | RefuseSession | RankAnswer | LossNotice | NewcomerAsks | RanksLost | LeaveRequest | Released | KillOrder
)


# --- a manager server's stream to the lighthouse ---------------------------------------------------------------------


def encode_to_lighthouse(event: LighthouseEvent, said: Member | None = None) -> bytes:
    """What the lighthouse shall be told; the stream's number stays at home.

    Args:
        said: the member of the last request on this stream, or None; what it says of itself again is left out.
    """
    match event:
        case BeatReceived():
            beat = pb.Beat(healed_bytes=event.healed_bytes, progress=_progress_to_wire(event.progress))
            return pb.ToLighthouse(beat=beat).SerializeToString()
        case QuorumRequested():
            member = event.member
            same = said is not None and replace(said, step=member.step, lineage=member.lineage) == member
            asked = pb.QuorumRequest(
                request=event.request,
                member=_state_to_wire(member) if same else _member_to_wire(member),
                as_before=same,
                held=_key_to_wire(event.held),
                fingerprint=_fingerprint_to_wire(event.fingerprint),
            )
            return pb.ToLighthouse(quorum_request=asked).SerializeToString()
        case RequestWithdrawn():
            return pb.ToLighthouse(withdraw=pb.Withdraw(request=event.request)).SerializeToString()
        case HelloReceived():
            hello = event.hello
            greeting = pb.Hello(
                job=hello.job,
                replica_id=hello.replica_id,
                session=hello.session,
                address=hello.address,
                replaces=hello.replaces,
                ready=hello.ready,
                held=_key_to_wire(hello.held),
                lighthouse_started_ms=hello.lighthouse_started_ms,
                cluster_id=hello.cluster_id,
                left=hello.left,
                num_answers=hello.num_answers,
            )
            return pb.ToLighthouse(hello=greeting).SerializeToString()
        case QuorumReported():
            report = pb.QuorumReport(quorum=None if event.quorum is None else _quorum_to_wire(event.quorum))
            return pb.ToLighthouse(quorum_report=report).SerializeToString()
        case DeathReported():
            return pb.ToLighthouse(death=pb.Death(reason=_clip(event.reason))).SerializeToString()
        case LeaveReceived():
            leave = pb.Leave(reason=_clip(event.reason), serve_ms=event.serve_ms)
            return pb.ToLighthouse(leave=leave).SerializeToString()
        case StreamClosed():
            raise AssertionError("a closed stream is not a message")


def decode_to_lighthouse(
    stream: int, data: bytes, said: Member | None = None, *, was_asked: bool = True
) -> LighthouseEvent:
    """A message that came on that stream.

    Args:
        said: the member of the last request that came on it, or None.
        was_asked: for the quorum that it holds. Thousands of members take long to look at, and nobody shall make the
            lighthouse do so who was not asked.
    Raises: ProtocolError: it is damaged or breaks a bound.
    """
    message = _parse(pb.ToLighthouse, data)
    match message.WhichOneof("message"):
        case "beat":
            healed_bytes = _count("healed_bytes", message.beat.healed_bytes, MAX_INT64)
            return BeatReceived(stream, healed_bytes, _progress_from_wire(message.beat))
        case "quorum_request":
            asked = message.quorum_request
            held = _key_from_wire(asked.held) if asked.HasField("held") else None
            fingerprint = _fingerprint_from_wire(asked.fingerprint)
            member = _member_as_before(asked.member, said) if asked.as_before else _member_from_wire(asked.member)
            return QuorumRequested(stream, asked.request, member, held, fingerprint)
        case "withdraw":
            return RequestWithdrawn(stream, message.withdraw.request)
        case "hello":
            return HelloReceived(stream, _hello_from_wire(message.hello))
        case "quorum_report":
            if not was_asked:
                raise ProtocolError("a quorum is reported that was not asked for")
            report = message.quorum_report
            return QuorumReported(stream, _quorum_from_wire(report.quorum) if report.HasField("quorum") else None)
        case "death":
            return DeathReported(stream, _sentence("reason", message.death.reason))
        case "leave":
            leave = message.leave
            return LeaveReceived(stream, _sentence("reason", leave.reason), _count("serve_ms", leave.serve_ms))
        case _:
            raise ProtocolError("a message to the lighthouse says nothing that this version knows")


# --- the lighthouse's stream to a manager server ---------------------------------------------------------------------

ToldEffect = (
    Welcome
    | RefuseSession
    | TellLost
    | NotifyLoss
    | AnnounceNewcomer
    | AskForQuorum
    | AnswerQuorum
    | AnswerUnchanged
    | RefuseRequest
    | AskToLeave
    | Release
)


def encode_from_lighthouse(effect: ToldEffect) -> bytes:
    """What a manager server shall be told; the stream's number stays at home.

    A whole quorum that goes to many is cheaper by `encode_quorum` once and `frame_quorum_answer` for each.
    """
    match effect:
        case AnswerUnchanged():
            answer = pb.QuorumAnswer(request=effect.request, unchanged=_key_to_wire(effect.key))
            return pb.FromLighthouse(answer=answer).SerializeToString()
        case AnswerQuorum():
            return frame_quorum_answer(effect.request, encode_quorum(effect.quorum))
        case RefuseRequest():
            refused = pb.Refused(code=effect.refusal.value, message=_clip(effect.message))
            answer = pb.QuorumAnswer(request=effect.request, refused=refused)
            return pb.FromLighthouse(answer=answer).SerializeToString()
        case Welcome():
            welcome = pb.Welcome(
                session=effect.session,
                lighthouse_started_ms=effect.lighthouse_started_ms,
                cluster_id=effect.cluster_id,
                heartbeat_timeout_ms=effect.heartbeat_timeout_ms,
                join_timeout_ms=effect.join_timeout_ms,
            )
            return pb.FromLighthouse(welcome=welcome).SerializeToString()
        case RefuseSession():
            refused = pb.Refused(code=effect.refusal.value, message=_clip(effect.message))
            return pb.FromLighthouse(refused=refused).SerializeToString()
        case TellLost():
            lost = pb.Lost(session=effect.session, message=_clip(effect.message))
            return pb.FromLighthouse(lost=lost).SerializeToString()
        case NotifyLoss():
            return pb.FromLighthouse(loss_notice=_notice_to_wire(effect.notice)).SerializeToString()
        case AnnounceNewcomer():
            return pb.FromLighthouse(newcomer_asks=pb.NewcomerAsks(replica_id=effect.replica_id)).SerializeToString()
        case AskForQuorum():
            return pb.FromLighthouse(ask_for_quorum=_key_to_wire(effect.key)).SerializeToString()
        case AskToLeave():
            wish = pb.AskToLeave(reason=_clip(effect.reason), serve_ms=effect.serve_ms)
            return pb.FromLighthouse(ask_to_leave=wish).SerializeToString()
        case Release():
            return pb.FromLighthouse(released=pb.Released()).SerializeToString()


def encode_quorum(quorum: Quorum) -> bytes:
    """The quorum alone, to be framed for each who is told of it."""
    return _quorum_to_wire(quorum).SerializeToString()


def frame_quorum_answer(request: int, encoded: bytes) -> bytes:
    """The same bytes as `encode_from_lighthouse(AnswerQuorum(...))`, around a quorum that is encoded already."""
    # Protobuf's own framing, by hand: field 1 of QuorumAnswer is the request, field 2 the quorum, and the answer is
    # field 5 of FromLighthouse. A default value (0) is left out, as everywhere in proto3.
    head = (b"\x08" + _varint(request) if request else b"") + b"\x12" + _varint(len(encoded))
    return b"\x2a" + _varint(len(head) + len(encoded)) + head + encoded


def decode_from_lighthouse(data: bytes) -> ToldEffect:
    """A message from the lighthouse, as if for stream 0. Raises: ProtocolError: it is damaged or breaks a bound."""
    message = _parse(pb.FromLighthouse, data)
    match message.WhichOneof("message"):
        case "answer":
            return _answer_from_wire(message.answer)
        case "welcome":
            welcome = message.welcome
            started = _count("lighthouse_started_ms", welcome.lighthouse_started_ms, MAX_INT64)
            cluster_id = _printable("cluster_id", welcome.cluster_id, MAX_NAME_BYTES)
            return Welcome(
                0, welcome.session, started, cluster_id, welcome.heartbeat_timeout_ms, welcome.join_timeout_ms
            )
        case "refused":
            refusal, sentence = _refused_from_wire(message.refused)
            return RefuseSession(0, refusal, sentence)
        case "lost":
            lost = message.lost
            return TellLost(0, lost.session, _sentence("message", lost.message))
        case "loss_notice":
            return NotifyLoss(0, _notice_from_wire(message.loss_notice))
        case "newcomer_asks":
            return AnnounceNewcomer(0, _name("replica_id", message.newcomer_asks.replica_id))
        case "ask_for_quorum":
            return AskForQuorum(0, _key_from_wire(message.ask_for_quorum))
        case "ask_to_leave":
            wish = message.ask_to_leave
            return AskToLeave(0, _sentence("reason", wish.reason), _count("serve_ms", wish.serve_ms))
        case "released":
            return Release(0)
        case _:
            raise ProtocolError("a message from the lighthouse says nothing that this version knows")


def encode_drain(request: DrainRequested) -> bytes:
    """Somebody's wish that a replica leave."""
    return pb.DrainRequest(
        job=request.job,
        replica_id=request.replica,
        reason=_clip(request.reason),
        serve_ms=_count("serve_ms", request.serve_ms),
    ).SerializeToString()


def decode_drain(call: int, data: bytes) -> DrainRequested:
    """Who shall leave, for that call. Raises: ProtocolError: damaged, out of bounds, or nobody."""
    message = _parse(pb.DrainRequest, data)
    return DrainRequested(
        call,
        _name("job", message.job),
        _name("replica_id", message.replica_id),
        _sentence("reason", message.reason),
        _count("serve_ms", message.serve_ms),
    )


# --- torchft's unary calls to the lighthouse -------------------------------------------------------------------------


def encode_lighthouse_request(member: Member) -> bytes:
    """A unary quorum request, with torchft's fields only."""
    return pb.LighthouseQuorumRequest(requester=_member_to_wire(member, ours=False)).SerializeToString()


def decode_lighthouse_request(data: bytes) -> Member:
    """Who asks for a quorum. Raises: ProtocolError: damaged, out of bounds, or nobody."""
    message = _parse(pb.LighthouseQuorumRequest, data)
    if not message.HasField("requester"):
        raise ProtocolError("missing requester: a quorum request names the member that asks")
    return _member_from_wire(message.requester)


def encode_lighthouse_response(quorum: Quorum) -> bytes:
    """A quorum for torchft's members, with torchft's fields only."""
    return pb.LighthouseQuorumResponse(quorum=_quorum_to_wire(quorum, ours=False)).SerializeToString()


def decode_lighthouse_response(data: bytes) -> Quorum:
    """The quorum that the lighthouse gave. Raises: ProtocolError: damaged or out of bounds."""
    message = _parse(pb.LighthouseQuorumResponse, data)
    if not message.HasField("quorum"):
        raise ProtocolError("the lighthouse answered without a quorum; it speaks another protocol")
    return _quorum_from_wire(message.quorum)


def encode_description(description: LighthouseDescription) -> bytes:
    """What a lighthouse says of itself; of more jobs than MAX_JOBS_DESCRIBED the first in order of their names."""
    jobs = [
        pb.DescribedJob(
            name=job.name, quorum_id=job.quorum_id, num_members=job.num_members, waiting_for=_clip(job.waiting_for)
        )
        for job in sorted(description.jobs, key=lambda job: job.name)[:MAX_JOBS_DESCRIBED]
    ]
    return pb.DescribeResponse(
        version=description.version,
        started_ms=description.started_ms,
        now_ms=description.now_ms,
        cluster_id=description.cluster_id,
        min_replicas=description.min_replicas,
        join_timeout_ms=description.join_timeout_ms,
        heartbeat_timeout_ms=description.heartbeat_timeout_ms,
        quorum_tick_ms=description.quorum_tick_ms,
        jobs=jobs,
    ).SerializeToString()


def decode_description(data: bytes) -> LighthouseDescription:
    """What a lighthouse says of itself. Raises: ProtocolError: damaged or out of bounds."""
    message = _parse(pb.DescribeResponse, data)
    jobs = tuple(
        DescribedJob(
            name=_printable("job", job.name, MAX_NAME_BYTES),
            quorum_id=_count("quorum_id", job.quorum_id, MAX_INT64),
            num_members=_count("num_members", job.num_members, MAX_MEMBERS),
            waiting_for=_printable("waiting_for", job.waiting_for, MAX_SENTENCE_BYTES),
        )
        for job in message.jobs[:MAX_JOBS_DESCRIBED]
    )
    return LighthouseDescription(
        version=_printable("version", message.version, MAX_NAME_BYTES),
        started_ms=_count("started_ms", message.started_ms, MAX_INT64),
        now_ms=_count("now_ms", message.now_ms, MAX_INT64),
        cluster_id=_printable("cluster_id", message.cluster_id, MAX_NAME_BYTES),
        min_replicas=message.min_replicas,
        join_timeout_ms=message.join_timeout_ms,
        heartbeat_timeout_ms=message.heartbeat_timeout_ms,
        quorum_tick_ms=message.quorum_tick_ms,
        jobs=jobs,
    )


def encode_heartbeat(replica_id: str) -> bytes:
    """A unary heartbeat."""
    return pb.LighthouseHeartbeatRequest(replica_id=replica_id).SerializeToString()


def decode_heartbeat(data: bytes) -> str:
    """Whose heartbeat it is. Raises: ProtocolError: damaged, out of bounds, or nobody's."""
    return _name("replica_id", _parse(pb.LighthouseHeartbeatRequest, data).replica_id)


# --- a group rank and its manager server -----------------------------------------------------------------------------


def encode_rank_request(ask: Ask) -> bytes:
    """A rank's question for the next quorum."""
    return _ask_to_wire(ask).SerializeToString()


def decode_rank_request(data: bytes) -> Ask:
    """A rank's question. Raises: ProtocolError: damaged or out of bounds."""
    return _ask_from_wire(_parse(pb.ManagerQuorumRequest, data))


def _ask_to_wire(ask: Ask) -> pb.ManagerQuorumRequest:
    request = ask.request
    return pb.ManagerQuorumRequest(
        group_rank=ask.group_rank,
        step=request.step,
        checkpoint_metadata=request.checkpoint_metadata,
        shrink_only=request.shrink_only,
        init_sync=request.init_sync,
        commit_failures=request.commit_failures,
        reconfigure_handle=request.reconfigure_handle,
        lineage=request.lineage,
        live=request.live,
        torn=request.torn,
        needs_configure=request.needs_configure,
        failed_heals=request.failed_heals,
        allow_heal=request.allow_heal,
        use_async_quorum=request.use_async_quorum,
        fixed_with_spares=request.fixed_with_spares,
        min_replica_size=request.min_replica_size,
        data=request.data,
        held=_key_to_wire(request.held),
        attempt=request.attempt,
        fingerprint=_fingerprint_to_wire(request.fingerprint),
    )


def _ask_from_wire(message: pb.ManagerQuorumRequest) -> Ask:
    ours = message.min_replica_size > 0
    rank = _count("group_rank", message.group_rank, MAX_WORLD_SIZE)
    request = RankRequest(
        step=_count("step", message.step, MAX_INT64),
        lineage=message.lineage if message.HasField("lineage") else None,
        live=message.live,
        torn=message.torn,
        held=_key_from_wire(message.held) if message.HasField("held") else None,
        checkpoint_metadata=_text("checkpoint_metadata", message.checkpoint_metadata, MAX_METADATA_BYTES),
        commit_failures=_count("commit_failures", message.commit_failures),
        needs_configure=message.needs_configure,
        failed_heals=_count("failed_heals", message.failed_heals),
        shrink_only=message.shrink_only,
        init_sync=message.init_sync,
        allow_heal=message.allow_heal if ours else True,
        use_async_quorum=message.use_async_quorum if ours else True,
        fixed_with_spares=message.fixed_with_spares,
        min_replica_size=_count("min_replica_size", message.min_replica_size, MAX_MEMBERS) if ours else 1,
        data=_text("data", message.data, MAX_DATA_BYTES),
        reconfigure_handle=_text("reconfigure_handle", message.reconfigure_handle, MAX_METADATA_BYTES),
        attempt=_count("attempt", message.attempt, MAX_INT64),
        fingerprint=_fingerprint_from_wire(message.fingerprint),
    )
    return Ask(rank, request)


def encode_plan(plan: Plan) -> bytes:
    """A rank's plan, in torchft's fields as far as they reach and in ours beyond."""
    return _plan_to_wire(plan).SerializeToString()


def encode_unchanged(key: QuorumKey) -> bytes:
    """The short answer to a rank: its plan of that key stands."""
    return _unchanged_to_wire(key).SerializeToString()


def decode_plan(data: bytes) -> Plan | QuorumKey:
    """A rank's plan, or the key of the one that stands. Raises: ProtocolError: damaged or out of bounds."""
    return _plan_from_wire(_parse(pb.ManagerQuorumResponse, data))


def _plan_to_wire(plan: Plan) -> pb.ManagerQuorumResponse:
    first = plan.sources[0] if plan.sources else None
    return pb.ManagerQuorumResponse(
        quorum_id=plan.key.quorum_id,
        nonce=plan.key.nonce,
        recover_src_manager_address=first.address if first else "",
        recover_src_replica_rank=first.replica_rank if first else None,
        recover_dst_replica_ranks=plan.recover_dst_replica_ranks,
        store_address=plan.store_address,
        max_step=plan.step,
        max_replica_rank=plan.participating_rank,
        max_world_size=len(plan.participants),
        replica_rank=plan.replica_rank,
        replica_world_size=plan.replica_world_size,
        heal=plan.heal,
        commit_failures=plan.commit_failures,
        replica_ids=plan.replica_ids,
        reconfigure_handles=plan.reconfigure_handles,
        lineage=plan.lineage,
        sources=[
            pb.Source(replica_rank=source.replica_rank, replica_id=source.replica_id, address=source.address)
            for source in plan.sources
        ],
        serve=plan.serve,
        up_to_date=plan.up_to_date,
        participants=plan.participants,
        min_replica_size=plan.min_replica_size,
    )


def _unchanged_to_wire(key: QuorumKey) -> pb.ManagerQuorumResponse:
    return pb.ManagerQuorumResponse(quorum_id=key.quorum_id, nonce=key.nonce, unchanged=True)


def _plan_from_wire(message: pb.ManagerQuorumResponse) -> Plan | QuorumKey:
    key = QuorumKey(message.quorum_id, message.nonce)
    if message.unchanged:
        return key
    size = _count("replica_world_size", message.replica_world_size, MAX_MEMBERS)
    ids = tuple(_name("replica_id", name) for name in _few("replica_ids", message.replica_ids))
    rank = _count("replica_rank", message.replica_rank, MAX_MEMBERS)
    if len(ids) != size or rank >= size:
        raise ProtocolError(f"a plan names {len(ids)} replicas of {size} and gives rank {rank}; the peer is broken")
    return Plan(
        key=key,
        replica_id=ids[rank],
        replica_rank=rank,
        replica_world_size=size,
        replica_ids=ids,
        step=_count("max_step", message.max_step, MAX_INT64),
        lineage=message.lineage,
        heal=message.heal,
        sources=tuple(
            Source(
                _rank("source", source.replica_rank, size),
                _name("replica_id", source.replica_id),
                _address("address", source.address),
            )
            for source in _few("sources", message.sources)
        ),
        recover_dst_replica_ranks=_ranks("recover_dst_replica_ranks", message.recover_dst_replica_ranks, size),
        serve=message.serve,
        store_address=_address("store_address", message.store_address),
        up_to_date=_ranks("up_to_date", message.up_to_date, size),
        participants=_ranks("participants", message.participants, size),
        participating_rank=(
            _rank("max_replica_rank", message.max_replica_rank, size) if message.HasField("max_replica_rank") else None
        ),
        min_replica_size=_count("min_replica_size", message.min_replica_size, MAX_MEMBERS),
        commit_failures=_count("commit_failures", message.commit_failures),
        reconfigure_handles=tuple(
            _text("reconfigure_handle", handle, MAX_METADATA_BYTES)
            for handle in _few("reconfigure_handles", message.reconfigure_handles)
        ),
    )


def encode_vote(vote: Vote) -> bytes:
    """A rank's vote."""
    return _vote_to_wire(vote).SerializeToString()


def decode_vote(data: bytes) -> Vote:
    """A rank's vote. Raises: ProtocolError: damaged or out of bounds."""
    return _vote_from_wire(_parse(pb.ShouldCommitRequest, data))


_PURPOSES = {
    Purpose.COMMIT: pb.COMMIT,
    Purpose.STAGED: pb.STAGED,
    Purpose.WITHOUT_OWN: pb.WITHOUT_OWN,
    Purpose.MATCHED: pb.MATCHED,
    Purpose.SPREAD: pb.SPREAD,
    Purpose.TAKEN: pb.TAKEN,
}


def _vote_to_wire(vote: Vote) -> pb.ShouldCommitRequest:
    return pb.ShouldCommitRequest(
        should_commit=vote.yes,
        group_rank=vote.group_rank,
        step=vote.step,
        key=_key_to_wire(vote.key),
        purpose=_PURPOSES[vote.purpose],
        leaving=vote.leaving,
    )


def _vote_from_wire(message: pb.ShouldCommitRequest) -> Vote:
    purpose = next((purpose for purpose, number in _PURPOSES.items() if number == message.purpose), None)
    if purpose is None:
        raise ProtocolError(f"a vote's purpose is {message.purpose}; this version knows 0 to {max(_PURPOSES.values())}")
    return Vote(
        group_rank=_count("group_rank", message.group_rank, MAX_WORLD_SIZE),
        step=_count("step", message.step, MAX_INT64),
        yes=message.should_commit,
        key=_key_from_wire(message.key) if message.HasField("key") else None,
        purpose=purpose,
        leaving=message.leaving,
    )


def encode_verdict(verdict: Verdict) -> bytes:
    """The verdict of a vote."""
    return _verdict_to_wire(verdict).SerializeToString()


def decode_verdict(data: bytes) -> Verdict:
    """The verdict of a vote. Raises: ProtocolError: damaged."""
    return _verdict_from_wire(_parse(pb.ShouldCommitResponse, data))


def _verdict_to_wire(verdict: Verdict) -> pb.ShouldCommitResponse:
    return pb.ShouldCommitResponse(should_commit=verdict.yes, leaves=verdict.leaves)


def _verdict_from_wire(message: pb.ShouldCommitResponse) -> Verdict:
    return Verdict(message.should_commit, message.leaves)


def encode_kill(message: str) -> bytes:
    """Somebody's wish that a group's processes end, and why."""
    return pb.KillRequest(msg=_clip(message)).SerializeToString()


def decode_kill(data: bytes) -> str:
    """Why a group's processes shall end. Raises: ProtocolError: damaged or out of bounds."""
    return _sentence("msg", _parse(pb.KillRequest, data).msg)


def encode_metadata_request(rank: int) -> bytes:
    """Where does that rank's live state lie?"""
    return pb.CheckpointMetadataRequest(rank=rank).SerializeToString()


def decode_metadata_request(data: bytes) -> int:
    """The rank that is asked about. Raises: ProtocolError: damaged or out of bounds."""
    return _count("rank", _parse(pb.CheckpointMetadataRequest, data).rank, MAX_WORLD_SIZE)


def encode_metadata(metadata: str) -> bytes:
    """Where a rank's live state lies."""
    return pb.CheckpointMetadataResponse(checkpoint_metadata=metadata).SerializeToString()


def decode_metadata(data: bytes) -> str:
    """Where a rank's live state lies. Raises: ProtocolError: damaged or out of bounds."""
    message = _parse(pb.CheckpointMetadataResponse, data)
    return _text("checkpoint_metadata", message.checkpoint_metadata, MAX_METADATA_BYTES)


def encode_from_rank(message: FromRank) -> bytes:
    """A message on a rank's stream."""
    match message:
        case RankCall(call, timeout_ms, Ask() as asked):
            asks = pb.RankCall(call=call, timeout_ms=timeout_ms, quorum=_ask_to_wire(asked))
            return pb.ToManagerServer(call=asks).SerializeToString()
        case RankCall(call, timeout_ms, Vote() as vote):
            votes = pb.RankCall(call=call, timeout_ms=timeout_ms, vote=_vote_to_wire(vote))
            return pb.ToManagerServer(call=votes).SerializeToString()
        case RankCall(call, timeout_ms, Leave() as leave):
            serve_ms = _count("serve_ms", leave.serve_ms)
            leaves = pb.RankLeaves(reason=_clip(leave.reason), serve_ms=serve_ms, group_rank=leave.group_rank)
            said = pb.RankCall(call=call, timeout_ms=timeout_ms, leaves=leaves)
            return pb.ToManagerServer(call=said).SerializeToString()
        case RankHello():
            hello = pb.RankHello(group_rank=message.group_rank, session=message.session)
            return pb.ToManagerServer(hello=hello).SerializeToString()
        case RankBeat():
            beat = pb.RankBeat(healed_bytes=message.healed_bytes, progress=_progress_to_wire(message.progress))
            return pb.ToManagerServer(beat=beat).SerializeToString()
        case RankWithdraw():
            return pb.ToManagerServer(withdraw=pb.RankWithdraw(call=message.call)).SerializeToString()
        case RankGoodbye():
            return pb.ToManagerServer(goodbye=pb.RankGoodbye()).SerializeToString()
    raise AssertionError(f"{message} is no message of a rank")


def decode_from_rank(data: bytes) -> FromRank:
    """A message that came on a rank's stream. Raises: ProtocolError: damaged or out of bounds."""
    message = _parse(pb.ToManagerServer, data)
    match message.WhichOneof("message"):
        case "call":
            return _call_from_wire(message.call)
        case "hello":
            return RankHello(_count("group_rank", message.hello.group_rank, MAX_WORLD_SIZE), message.hello.session)
        case "beat":
            healed_bytes = _count("healed_bytes", message.beat.healed_bytes, MAX_HEALED_BYTES)
            return RankBeat(healed_bytes, _progress_from_wire(message.beat))
        case "withdraw":
            return RankWithdraw(message.withdraw.call)
        case "goodbye":
            return RankGoodbye()
        case _:
            raise ProtocolError("a message to the manager server says nothing that this version knows")


def encode_to_rank(message: ToRank) -> bytes:
    """A manager server's message to a rank."""
    match message:
        case RankAnswer(call, Verdict() as verdict):
            answer = pb.RankAnswer(call=call, verdict=_verdict_to_wire(verdict))
            return pb.FromManagerServer(answer=answer).SerializeToString()
        case RankAnswer(call, QuorumKey() as key):
            answer = pb.RankAnswer(call=call, plan=_unchanged_to_wire(key))
            return pb.FromManagerServer(answer=answer).SerializeToString()
        case RankAnswer(call, Plan() as plan):
            answer = pb.RankAnswer(call=call, plan=_plan_to_wire(plan))
            return pb.FromManagerServer(answer=answer).SerializeToString()
        case RankAnswer(call, Failure(code, sentence)):
            answer = pb.RankAnswer(call=call, refused=pb.Refused(code=code, message=_clip(sentence)))
            return pb.FromManagerServer(answer=answer).SerializeToString()
        case Welcome():
            welcome = pb.Welcome(session=message.session)
            return pb.FromManagerServer(welcome=welcome).SerializeToString()
        case RefuseSession():
            refused = pb.Refused(code=message.refusal.value, message=_clip(message.message))
            return pb.FromManagerServer(refused=refused).SerializeToString()
        case LossNotice():
            return pb.FromManagerServer(loss_notice=_notice_to_wire(message)).SerializeToString()
        case NewcomerAsks():
            asks = pb.NewcomerAsks(replica_id=message.replica_id)
            return pb.FromManagerServer(newcomer_asks=asks).SerializeToString()
        case RanksLost():
            lost = pb.GroupLost(message=_clip(message.message), left=message.left)
            return pb.FromManagerServer(group_lost=lost).SerializeToString()
        case LeaveRequest():
            wish = pb.AskToLeave(reason=_clip(message.reason), serve_ms=message.serve_ms)
            return pb.FromManagerServer(ask_to_leave=wish).SerializeToString()
        case Released():
            return pb.FromManagerServer(released=pb.Released()).SerializeToString()
        case KillOrder():
            return pb.FromManagerServer(kill=pb.KillRank(message=_clip(message.message))).SerializeToString()
    raise AssertionError(f"{message} is no message to a rank")


def decode_to_rank(data: bytes) -> ToRank:
    """A manager server's message to a rank. Raises: ProtocolError: damaged or out of bounds."""
    message = _parse(pb.FromManagerServer, data)
    match message.WhichOneof("message"):
        case "answer":
            return RankAnswer(message.answer.call, _rank_answer_from_wire(message.answer))
        case "welcome":
            return Welcome(0, message.welcome.session, 0, "")
        case "refused":
            refusal, sentence = _refused_from_wire(message.refused)
            return RefuseSession(0, refusal, sentence)
        case "loss_notice":
            return _notice_from_wire(message.loss_notice)
        case "newcomer_asks":
            return NewcomerAsks(_name("replica_id", message.newcomer_asks.replica_id))
        case "group_lost":
            return RanksLost(_sentence("message", message.group_lost.message), message.group_lost.left)
        case "ask_to_leave":
            wish = message.ask_to_leave
            return LeaveRequest(_sentence("reason", wish.reason), _count("serve_ms", wish.serve_ms))
        case "released":
            return Released()
        case "kill":
            return KillOrder(_sentence("message", message.kill.message))
        case _:
            raise ProtocolError("a message from the manager server says nothing that this version knows")


# --- parts -----------------------------------------------------------------------------------------------------------


def _member_to_wire(member: Member, *, ours: bool = True) -> pb.QuorumMember:
    message = pb.QuorumMember(
        replica_id=member.replica_id,
        address=member.address,
        store_address=member.store_address,
        step=member.step,
        world_size=member.world_size,
        shrink_only=member.shrink_only,
        data=member.data,
        commit_failures=member.commit_failures,
        reconfigure_handles=member.reconfigure_handles,
    )
    if ours:
        message.session = member.session
        if member.lineage is not None:
            message.lineage = member.lineage
        message.live = member.live
        message.torn = member.torn
        message.needs_configure = member.needs_configure
        message.failed_heals = member.failed_heals
        message.init_sync = member.init_sync
        message.allow_heal = member.allow_heal
        message.use_async_quorum = member.use_async_quorum
        message.fixed_with_spares = member.fixed_with_spares
        message.min_replica_size = member.min_replica_size
    return message


def _member_from_wire(message: pb.QuorumMember) -> Member:
    ours = message.min_replica_size > 0
    return Member(
        replica_id=_name("replica_id", message.replica_id),
        session=message.session,
        address=_address("address", message.address),
        store_address=_address("store_address", message.store_address),
        step=_count("step", message.step, MAX_INT64),
        lineage=message.lineage if message.HasField("lineage") else None,
        world_size=_count("world_size", message.world_size, MAX_WORLD_SIZE),
        shrink_only=message.shrink_only,
        commit_failures=_count("commit_failures", message.commit_failures),
        needs_configure=message.needs_configure,
        live=message.live,
        torn=message.torn,
        failed_heals=_count("failed_heals", message.failed_heals),
        init_sync=message.init_sync if ours else True,
        allow_heal=message.allow_heal if ours else True,
        use_async_quorum=message.use_async_quorum if ours else True,
        fixed_with_spares=message.fixed_with_spares,
        min_replica_size=_count("min_replica_size", message.min_replica_size, MAX_MEMBERS) if ours else 1,
        data=_text("data", message.data, MAX_DATA_BYTES),
        reconfigure_handles=_handles(message.reconfigure_handles),
    )


def _state_to_wire(member: Member) -> pb.QuorumMember:
    """All that changes from one step to the next."""
    return pb.QuorumMember(step=member.step, lineage=member.lineage)


def _member_as_before(message: pb.QuorumMember, said: Member | None) -> Member:
    if said is None:
        raise ProtocolError("a request says that its member is as before, and it is the first one on its stream")
    lineage = message.lineage if message.HasField("lineage") else None
    return replace(said, step=_count("step", message.step, MAX_INT64), lineage=lineage)


def _quorum_to_wire(quorum: Quorum, *, ours: bool = True) -> pb.Quorum:
    message = pb.Quorum(
        quorum_id=quorum.key.quorum_id,
        participants=[_member_to_wire(member, ours=ours) for member in quorum.members],
        nonce=quorum.key.nonce if ours else 0,
    )
    message.created.seconds, milliseconds = divmod(quorum.created_ms, 1000)
    message.created.nanos = milliseconds * 1_000_000
    return message


def _quorum_from_wire(message: pb.Quorum) -> Quorum:
    seconds = _count("created", message.created.seconds, MAX_INT64 // 1000 - 1)
    nanos = _count("created", message.created.nanos, 999_999_999)
    return Quorum(
        key=QuorumKey(message.quorum_id, message.nonce),
        members=tuple(_member_from_wire(member) for member in _few("participants", message.participants)),
        created_ms=seconds * 1000 + nanos // 1_000_000,
    )


def _hello_from_wire(message: pb.Hello) -> Hello:
    return Hello(
        job=_name("job", message.job),
        replica_id=_name("replica_id", message.replica_id),
        session=message.session,
        address=_address("address", message.address),
        replaces=_printable("replaces", message.replaces, MAX_NAME_BYTES),
        ready=message.ready,
        held=_key_from_wire(message.held) if message.HasField("held") else None,
        lighthouse_started_ms=_count("lighthouse_started_ms", message.lighthouse_started_ms, MAX_INT64),
        cluster_id=_printable("cluster_id", message.cluster_id, MAX_NAME_BYTES),
        left=message.left,
        num_answers=_count("num_answers", message.num_answers, MAX_INT64),
    )


def _call_from_wire(message: pb.RankCall) -> RankCall:
    timeout_ms = _count("timeout_ms", message.timeout_ms)
    match message.WhichOneof("asked"):
        case "quorum":
            return RankCall(message.call, timeout_ms, _ask_from_wire(message.quorum))
        case "vote":
            return RankCall(message.call, timeout_ms, _vote_from_wire(message.vote))
        case "leaves":
            leaves = message.leaves
            rank = _count("group_rank", leaves.group_rank, MAX_WORLD_SIZE)
            leave = Leave(rank, _sentence("reason", leaves.reason), _count("serve_ms", leaves.serve_ms))
            return RankCall(message.call, timeout_ms, leave)
        case _:
            raise ProtocolError("a rank's call asks nothing that this version knows")


def _rank_answer_from_wire(message: pb.RankAnswer) -> Plan | QuorumKey | Verdict | Failure:
    match message.WhichOneof("answer"):
        case "plan":
            return _plan_from_wire(message.plan)
        case "verdict":
            return _verdict_from_wire(message.verdict)
        case "refused":
            refused = message.refused
            return Failure(_name("code", refused.code), _sentence("message", refused.message))
        case _:
            raise ProtocolError("an answer of the manager server says nothing that this version knows")


def _answer_from_wire(message: pb.QuorumAnswer) -> AnswerQuorum | AnswerUnchanged | RefuseRequest:
    match message.WhichOneof("answer"):
        case "unchanged":
            return AnswerUnchanged(0, message.request, _key_from_wire(message.unchanged))
        case "quorum":
            return AnswerQuorum(0, message.request, _quorum_from_wire(message.quorum))
        case "refused":
            refusal, sentence = _refused_from_wire(message.refused)
            return RefuseRequest(0, message.request, refusal, sentence)
        case _:
            raise ProtocolError("an answer of the lighthouse says nothing that this version knows")


def _refused_from_wire(message: pb.Refused) -> tuple[Refusal, str]:
    sentence = _sentence("message", message.message)
    try:
        return Refusal(message.code), sentence
    except ValueError:
        raise ProtocolError(
            f"the lighthouse refuses for a reason that this version does not know ({message.code[:64]!r}): {sentence}"
        ) from None


def _notice_to_wire(notice: LossNotice) -> pb.LossNotice:
    return pb.LossNotice(
        key=_key_to_wire(notice.key),
        replica_id=notice.replica_id,
        session=notice.session,
        reason=_clip(notice.reason),
        lives=notice.lives,
    )


def _notice_from_wire(message: pb.LossNotice) -> LossNotice:
    return LossNotice(
        key=_key_from_wire(message.key),
        replica_id=_name("replica_id", message.replica_id),
        session=message.session,
        reason=_sentence("reason", message.reason),
        lives=message.lives,
    )


def _fingerprint_to_wire(fingerprint: Fingerprint) -> list[pb.FingerprintPart]:
    return [pb.FingerprintPart(name=name, value=value) for name, value in fingerprint]


def _fingerprint_from_wire(parts: Collection[pb.FingerprintPart]) -> Fingerprint:
    if not parts:
        return ()
    return check_fingerprint(tuple(FingerprintPart(part.name, part.value) for part in parts))


def _progress_to_wire(progress: Progress | None) -> pb.Progress | None:
    if progress is None:
        return None
    return pb.Progress(
        step=progress.step,
        phase=progress.phase.name,
        since_ms=progress.since_ms,
        excused=progress.excused,
        slowest_step_ms=progress.slowest_step_ms,
    )


def _progress_from_wire(beat: pb.Beat | pb.RankBeat) -> Progress | None:
    if not beat.HasField("progress"):
        return None
    said = beat.progress
    try:
        phase = Phase(said.phase)
    except ValueError:
        raise ProtocolError(f"a beat tells of phase {said.phase}, which this version does not know") from None
    return Progress(
        step=_count("step", said.step, MAX_INT64),
        phase=phase,
        since_ms=_count("since_ms", said.since_ms, MAX_INT64),
        excused=said.excused,
        slowest_step_ms=_count("slowest_step_ms", said.slowest_step_ms, MAX_INT64),
    )


def _key_to_wire(key: QuorumKey | None) -> pb.QuorumKey | None:
    return None if key is None else pb.QuorumKey(quorum_id=key.quorum_id, nonce=key.nonce)


def _key_from_wire(message: pb.QuorumKey) -> QuorumKey:
    return QuorumKey(message.quorum_id, message.nonce)


def _parse(kind: type[_M], data: bytes) -> _M:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"{len(data)} bytes are not a {kind.DESCRIPTOR.name} message: {error}") from None


def _text(field: str, text: str, most_bytes: int) -> str:
    # A character has at least one byte and at most four, so most texts need not be encoded to be measured.
    if len(text) > most_bytes or (4 * len(text) > most_bytes and len(text.encode()) > most_bytes):
        raise ProtocolError(f"{field} is longer than {most_bytes} bytes; shorten it")
    return text


def _name(field: str, text: str) -> str:
    if not text:
        raise ProtocolError(f"{field} is empty; give it a name")
    return _printable(field, text, MAX_NAME_BYTES)


def _address(field: str, text: str) -> str:
    return _printable(field, text, MAX_ADDRESS_BYTES)


def _printable(field: str, text: str, most_bytes: int) -> str:
    # Names and addresses stand in everybody's logs, where a line break would forge a line.
    if not _text(field, text, most_bytes).isprintable():
        raise ProtocolError(f"{field} is {text[:80]!r}; give printable characters only, without line breaks")
    return text


def _sentence(field: str, text: str) -> str:
    """A peer's sentence, for our logs: on one line, whatever it has in it."""
    if not text.isprintable():
        text = "".join(character if character.isprintable() else " " for character in text)
    return _text(field, text, MAX_SENTENCE_BYTES)


def _handles(handles: Collection[str]) -> tuple[str, ...]:
    # Of one member: the quorum carries them to every other, so that together they are bounded more tightly than each.
    if len(handles) + sum(map(len, handles)) > MAX_HANDLES_BYTES:
        raise ProtocolError(f"the reconfigure_handles are longer than {MAX_HANDLES_BYTES} bytes together; shorten them")
    return tuple(_text("reconfigure_handle", handle, MAX_METADATA_BYTES) for handle in handles)


def _count(field: str, number: int, most: int = MAX_COUNT) -> int:
    if not 0 <= number <= most:
        raise ProtocolError(f"{field} is {number}; it must be 0..{most}")
    return number


def _rank(field: str, number: int, size: int) -> int:
    if not 0 <= number < size:
        raise ProtocolError(f"{field} is replica rank {number} in a quorum of {size}; the peer is broken")
    return number


def _ranks(field: str, numbers: Collection[int], size: int) -> tuple[int, ...]:
    return tuple(_rank(field, number, size) for number in _few(field, numbers))


def _few(field: str, items: Collection[_T]) -> Collection[_T]:
    if len(items) > MAX_MEMBERS:
        raise ProtocolError(f"{field} has {len(items)} entries; at most {MAX_MEMBERS} are allowed")
    return items


def _clip(sentence: str) -> str:
    return sentence.encode("utf-8", "replace")[:MAX_SENTENCE_BYTES].decode("utf-8", "ignore")


def _varint(number: int) -> bytes:
    if not 0 <= number <= MAX_UINT64:
        raise ProtocolError(f"request number {number} is outside 0..2^64-1")
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
