"""The messages between a group rank and its manager server: protobuf bytes to values and back.

A peer may be an old version, a foreign program or an attacker. Every length and number is therefore checked before use,
and a message that does not fit raises ProtocolError with a sentence.

An absent lineage is an unknown one. torchft's ranks carry none of this project's fields. This project's ranks always
send a min_replica_size, so its absence tells the two apart, and torchft's ranks get torchft's settings.

Law of this file: bytes in, values out, and back; no I/O, no state, no decisions. A trainer imports this file at its
start, so it needs nothing of the lighthouse.
"""

from __future__ import annotations

from dataclasses import dataclass

from tft_coord.core.progress import Progress
from tft_coord.core.stops import LocalProcess
from tft_coord.core.stragglers import StragglerNotice
from tft_coord.core.types import (
    MAX_INT64,
    DrainComplete,
    KillOrder,
    LeaveRequest,
    LossNotice,
    NewcomerAsks,
    Plan,
    Purpose,
    QuorumKey,
    QuorumNews,
    RankRequest,
    Refusal,
    Source,
    Verdict,
    WaitsFor,
)
from tft_coord.errors import ProtocolError
from tft_coord.wire import coordination_pb2 as pb
from tft_coord.wire import fields, reports, table
from tft_coord.wire.limits import (
    MAX_HEALED_BYTES,
    MAX_MEMBERS,
    MAX_METADATA_BYTES,
    MAX_NAME_BYTES,
    MAX_WORLD_SIZE,
)

_PURPOSES = {
    Purpose.COMMIT: pb.COMMIT,
    Purpose.STAGED: pb.STAGED,
    Purpose.WITHOUT_OWN: pb.WITHOUT_OWN,
    Purpose.MATCHED: pb.MATCHED,
    Purpose.SPREAD: pb.SPREAD,
    Purpose.TAKEN: pb.TAKEN,
    Purpose.LOADED: pb.LOADED,
}


@dataclass(frozen=True, slots=True)
class RankHello:
    """The first message of a group rank's stream. `session` tells one process of that rank from the next."""

    group_rank: int
    session: int


@dataclass(frozen=True, slots=True)
class RankBeat:
    """The bytes of live state that the rank's process has received so far (never falling), and the rank's progress."""

    healed_bytes: int
    progress: Progress | None = None
    number: int = 0  # the answer carries it; 0: no answer is wanted


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of the rank, for a manager server on the same host."""

    process: LocalProcess


@dataclass(frozen=True, slots=True)
class RankLate:
    """The report that the rank has waited for `join_timeout` in the round of that step of a standing quorum."""

    key: QuorumKey
    step: int


@dataclass(frozen=True, slots=True)
class RankGoodbye:
    """The goodbye of a rank that leaves on purpose."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A rank's request for the next quorum."""

    group_rank: int
    request: RankRequest


@dataclass(frozen=True, slots=True)
class Vote:
    """A rank's vote. `key` is None from a client that names no quorum.

    `leaving`: the rank wishes that the group leaves. `stands`: by the word of the round, no replica asked, left or
    recovered.
    """

    group_rank: int
    step: int
    yes: bool
    key: QuorumKey | None
    purpose: Purpose
    leaving: bool = False
    stands: bool = False


@dataclass(frozen=True, slots=True)
class Leave:
    """The leave of a rank and with it of its group; the answer is a verdict to leave."""

    group_rank: int
    reason: str
    serve_ms: int
    finished_step: int | None = None  # as in `events.LeaveReceived`


@dataclass(frozen=True, slots=True)
class RankCall:
    """A call on a rank's stream. `call` is the rank's number, rising; the answer must arrive within `timeout_ms`."""

    call: int
    timeout_ms: int
    asked: Ask | Vote | Leave


@dataclass(frozen=True, slots=True)
class RankWithdraw:
    """The withdrawal of that call."""

    call: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a call. `code` is a Refusal's value, "deadline", "group_lost" or "stale"."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class RankWelcome:
    """The welcome: the manager server knows the rank, by this session of its process."""

    session: int


@dataclass(frozen=True, slots=True)
class RankRefused:
    """The refusal of the rank's stream, which ends."""

    refusal: Refusal
    message: str


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """The answer to a call: a plan, the key of the plan that stands, a verdict, or a failure."""

    call: int
    answer: Plan | QuorumKey | Verdict | Failure


@dataclass(frozen=True, slots=True)
class RanksLost:
    """The loss of the rank's own group, in one sentence; `left`: another rank said goodbye, and no process died."""

    message: str
    left: bool = False


FromRank = RankHello | RankProcess | RankBeat | RankLate | RankGoodbye | RankCall | RankWithdraw
ToRank = (
    RankWelcome
    | RankRefused
    | RankAnswer
    | LossNotice
    | NewcomerAsks
    | RanksLost
    | LeaveRequest
    | DrainComplete
    | KillOrder
    | WaitsFor
    | StragglerNotice
    | QuorumNews
)


def encode_rank_request(ask: Ask) -> bytes:
    """Encode a rank's request for the next quorum."""
    return _ask_to_wire(ask).SerializeToString()


def decode_rank_request(data: bytes) -> Ask:
    """Decode a rank's request. Raises: ProtocolError: damaged or out of bounds."""
    return _ask_from_wire(fields.parse(pb.ManagerQuorumRequest, data))


def _ask_to_wire(ask: Ask) -> pb.ManagerQuorumRequest:
    return table.RANK_REQUEST.encode(ask.request, group_rank=ask.group_rank)


def _ask_from_wire(message: pb.ManagerQuorumRequest) -> Ask:
    rank = fields.checked_count("group_rank", message.group_rank, MAX_WORLD_SIZE)
    return Ask(rank, table.RANK_REQUEST.decode(message))


def encode_plan(plan: Plan) -> bytes:
    """Encode a rank's plan, in torchft's fields as far as they reach and in this project's beyond."""
    return _plan_to_wire(plan).SerializeToString()


def encode_unchanged(key: QuorumKey) -> bytes:
    """Encode the short answer to a rank: its plan of that key stands."""
    return _unchanged_to_wire(key).SerializeToString()


def decode_plan(data: bytes) -> Plan | QuorumKey:
    """Decode a rank's plan, or the key of the one that stands. Raises: ProtocolError: damaged or out of bounds."""
    return _plan_from_wire(fields.parse(pb.ManagerQuorumResponse, data))


def _plan_to_wire(plan: Plan) -> pb.ManagerQuorumResponse:
    first = plan.sources[0] if plan.sources else None
    return table.PLAN.encode(
        plan,
        quorum_id=plan.key.quorum_id,
        nonce=plan.key.nonce,
        recover_src_manager_address=first.address if first else "",
        recover_src_replica_rank=first.replica_rank if first else None,
        recover_dst_replica_ranks=plan.recover_dst_replica_ranks,
        max_replica_rank=plan.participating_rank,
        max_world_size=len(plan.participants),
        replica_rank=plan.replica_rank,
        replica_world_size=plan.replica_world_size,
        replica_ids=plan.replica_ids,
        reconfigure_handles=plan.reconfigure_handles,
        sources=[
            pb.Source(replica_rank=source.replica_rank, replica_id=source.replica_id, address=source.address)
            for source in plan.sources
        ],
        up_to_date=plan.up_to_date,
        participants=plan.participants,
    )


def _unchanged_to_wire(key: QuorumKey) -> pb.ManagerQuorumResponse:
    return pb.ManagerQuorumResponse(quorum_id=key.quorum_id, nonce=key.nonce, unchanged=True)


def _plan_from_wire(message: pb.ManagerQuorumResponse) -> Plan | QuorumKey:
    key = QuorumKey(message.quorum_id, message.nonce)
    if message.unchanged:
        return key
    size = fields.checked_count("replica_world_size", message.replica_world_size, MAX_MEMBERS)
    ids = tuple(fields.checked_name("replica_id", name) for name in fields.few("replica_ids", message.replica_ids))
    rank = fields.checked_count("replica_rank", message.replica_rank, MAX_MEMBERS)
    if len(ids) != size or rank >= size:
        raise ProtocolError(f"a plan names {len(ids)} replicas of {size} and rank {rank}; check the peer's version")
    return table.PLAN.decode(
        message,
        key=key,
        replica_id=ids[rank],
        replica_rank=rank,
        replica_world_size=size,
        replica_ids=ids,
        sources=tuple(
            Source(
                fields.checked_rank("source", source.replica_rank, size),
                fields.checked_name("replica_id", source.replica_id),
                fields.checked_address("address", source.address),
            )
            for source in fields.few("sources", message.sources)
        ),
        recover_dst_replica_ranks=fields.checked_ranks(
            "recover_dst_replica_ranks", message.recover_dst_replica_ranks, size
        ),
        up_to_date=fields.checked_ranks("up_to_date", message.up_to_date, size),
        participants=fields.checked_ranks("participants", message.participants, size),
        participating_rank=(
            fields.checked_rank("max_replica_rank", message.max_replica_rank, size)
            if message.HasField("max_replica_rank")
            else None
        ),
        reconfigure_handles=tuple(
            fields.checked_text("reconfigure_handle", handle, MAX_METADATA_BYTES)
            for handle in fields.few("reconfigure_handles", message.reconfigure_handles)
        ),
    )


def encode_vote(vote: Vote) -> bytes:
    """Encode a rank's vote."""
    return _vote_to_wire(vote).SerializeToString()


def decode_vote(data: bytes) -> Vote:
    """Decode a rank's vote. Raises: ProtocolError: damaged or out of bounds."""
    return _vote_from_wire(fields.parse(pb.ShouldCommitRequest, data))


def _vote_to_wire(vote: Vote) -> pb.ShouldCommitRequest:
    return pb.ShouldCommitRequest(
        should_commit=vote.yes,
        group_rank=vote.group_rank,
        step=vote.step,
        key=fields.key_to_wire(vote.key),
        purpose=_PURPOSES[vote.purpose],
        leaving=vote.leaving,
        stands=vote.stands,
    )


def _vote_from_wire(message: pb.ShouldCommitRequest) -> Vote:
    purpose = next((purpose for purpose, number in _PURPOSES.items() if number == message.purpose), None)
    if purpose is None:
        raise ProtocolError(f"a vote's purpose is {message.purpose}; this version knows 0 to {max(_PURPOSES.values())}")
    return Vote(
        group_rank=fields.checked_count("group_rank", message.group_rank, MAX_WORLD_SIZE),
        step=fields.checked_count("step", message.step, MAX_INT64),
        yes=message.should_commit,
        key=fields.key_from_wire(message.key) if message.HasField("key") else None,
        purpose=purpose,
        leaving=message.leaving,
        stands=message.stands,
    )


def encode_verdict(verdict: Verdict) -> bytes:
    """Encode the verdict of a vote."""
    return _verdict_to_wire(verdict).SerializeToString()


def decode_verdict(data: bytes) -> Verdict:
    """Decode the verdict of a vote. Raises: ProtocolError: damaged."""
    return _verdict_from_wire(fields.parse(pb.ShouldCommitResponse, data))


def _verdict_to_wire(verdict: Verdict) -> pb.ShouldCommitResponse:
    return pb.ShouldCommitResponse(should_commit=verdict.yes, leaves=verdict.leaves, stands=verdict.stands)


def _verdict_from_wire(message: pb.ShouldCommitResponse) -> Verdict:
    return Verdict(message.should_commit, message.leaves, message.stands)


def encode_kill(message: str) -> bytes:
    """Encode the request that a group's processes end, with its reason."""
    return pb.KillRequest(msg=fields.clip(message)).SerializeToString()


def decode_kill(data: bytes) -> str:
    """Decode the reason why a group's processes are to end. Raises: ProtocolError: damaged or out of bounds."""
    return fields.checked_sentence("msg", fields.parse(pb.KillRequest, data).msg)


def encode_metadata_request(rank: int) -> bytes:
    """Encode the request for the location of that rank's live state."""
    return pb.CheckpointMetadataRequest(rank=rank).SerializeToString()


def decode_metadata_request(data: bytes) -> int:
    """Decode the rank that the request is about. Raises: ProtocolError: damaged or out of bounds."""
    return fields.checked_count("rank", fields.parse(pb.CheckpointMetadataRequest, data).rank, MAX_WORLD_SIZE)


def encode_metadata(metadata: str) -> bytes:
    """Encode the location of a rank's live state."""
    return pb.CheckpointMetadataResponse(checkpoint_metadata=metadata).SerializeToString()


def decode_metadata(data: bytes) -> str:
    """Decode the location of a rank's live state. Raises: ProtocolError: damaged or out of bounds."""
    message = fields.parse(pb.CheckpointMetadataResponse, data)
    return fields.checked_text("checkpoint_metadata", message.checkpoint_metadata, MAX_METADATA_BYTES)


def encode_from_rank(message: FromRank) -> bytes:
    """Encode a message on a rank's stream."""
    match message:
        case RankCall(call, timeout_ms, Ask() as asked):
            asks = pb.RankCall(call=call, timeout_ms=timeout_ms, quorum=_ask_to_wire(asked))
            return pb.ToManagerServer(call=asks).SerializeToString()
        case RankCall(call, timeout_ms, Vote() as vote):
            votes = pb.RankCall(call=call, timeout_ms=timeout_ms, vote=_vote_to_wire(vote))
            return pb.ToManagerServer(call=votes).SerializeToString()
        case RankCall(call, timeout_ms, Leave() as leave):
            serve_ms = fields.checked_count("serve_ms", leave.serve_ms)
            leaves = pb.RankLeaves(
                reason=fields.clip(leave.reason),
                serve_ms=serve_ms,
                group_rank=leave.group_rank,
                finished_step=leave.finished_step,
            )
            leave_call = pb.RankCall(call=call, timeout_ms=timeout_ms, leaves=leaves)
            return pb.ToManagerServer(call=leave_call).SerializeToString()
        case RankHello():
            hello = pb.RankHello(group_rank=message.group_rank, session=message.session)
            return pb.ToManagerServer(hello=hello).SerializeToString()
        case RankBeat():
            beat = pb.RankBeat(
                healed_bytes=message.healed_bytes,
                progress=fields.progress_to_wire(message.progress),
                own_ms=fields.own_ms_to_wire(message.progress),
                number=message.number,
                report=reports.report_to_wire(message.progress),
            )
            return pb.ToManagerServer(beat=beat).SerializeToString()
        case RankLate():
            late = pb.Late(key=fields.key_to_wire(message.key), step=message.step)
            return pb.ToManagerServer(late=late).SerializeToString()
        case RankWithdraw():
            return pb.ToManagerServer(withdraw=pb.RankWithdraw(call=message.call)).SerializeToString()
        case RankProcess(process):
            named = pb.RankProcess(
                pid=process.pid,
                started=process.started,
                boot_id=process.boot_id,
                pid_namespace=process.pid_namespace,
            )
            return pb.ToManagerServer(process=named).SerializeToString()
        case RankGoodbye():
            return pb.ToManagerServer(goodbye=pb.RankGoodbye()).SerializeToString()
    raise AssertionError(f"{message} is no message of a rank")


def decode_from_rank(data: bytes) -> FromRank:
    """Decode a message that came on a rank's stream. Raises: ProtocolError: damaged or out of bounds."""
    message = fields.parse(pb.ToManagerServer, data)
    match message.WhichOneof("message"):
        case "call":
            return _call_from_wire(message.call)
        case "hello":
            return RankHello(
                fields.checked_count("group_rank", message.hello.group_rank, MAX_WORLD_SIZE), message.hello.session
            )
        case "beat":
            healed_bytes = fields.checked_count("healed_bytes", message.beat.healed_bytes, MAX_HEALED_BYTES)
            number = fields.checked_count("number", message.beat.number, MAX_INT64)
            return RankBeat(healed_bytes, fields.progress_from_wire(message.beat), number)
        case "late":
            step = fields.checked_count("step", message.late.step, MAX_INT64)
            return RankLate(fields.key_from_wire(message.late.key), step)
        case "withdraw":
            return RankWithdraw(message.withdraw.call)
        case "process":
            named = message.process
            boot_id = fields.checked_printable("boot_id", named.boot_id, MAX_NAME_BYTES)
            return RankProcess(LocalProcess(named.pid, named.started, boot_id, named.pid_namespace))
        case "goodbye":
            return RankGoodbye()
        case _:
            raise ProtocolError("a message to the manager server has no content that this version knows")


def encode_to_rank(message: ToRank) -> bytes:
    """Encode a manager server's message to a rank."""
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
            answer = pb.RankAnswer(call=call, refused=pb.Refused(code=code, message=fields.clip(sentence)))
            return pb.FromManagerServer(answer=answer).SerializeToString()
        case RankWelcome():
            welcome = pb.Welcome(session=message.session)
            return pb.FromManagerServer(welcome=welcome).SerializeToString()
        case RankRefused():
            refused = pb.Refused(code=message.refusal.value, message=fields.clip(message.message))
            return pb.FromManagerServer(refused=refused).SerializeToString()
        case LossNotice():
            return pb.FromManagerServer(loss_notice=fields.notice_to_wire(message)).SerializeToString()
        case NewcomerAsks():
            asks = pb.NewcomerAsks(replica_id=message.replica_id)
            return pb.FromManagerServer(newcomer_asks=asks).SerializeToString()
        case RanksLost():
            lost = pb.GroupLost(message=fields.clip(message.message), left=message.left)
            return pb.FromManagerServer(group_lost=lost).SerializeToString()
        case LeaveRequest():
            wish = pb.AskToLeave(reason=fields.clip(message.reason), serve_ms=message.serve_ms)
            return pb.FromManagerServer(ask_to_leave=wish).SerializeToString()
        case DrainComplete():
            return pb.FromManagerServer(released=pb.Released()).SerializeToString()
        case WaitsFor():
            waits = pb.Waits(sentence=fields.clip(message.sentence), warns=message.warns)
            return pb.FromManagerServer(waits=waits).SerializeToString()
        case QuorumNews():
            return pb.FromManagerServer(quorum_news=fields.quorum_news_to_wire(message)).SerializeToString()
        case StragglerNotice():
            return pb.FromManagerServer(straggler=fields.straggler_to_wire(message)).SerializeToString()
        case KillOrder():
            return pb.FromManagerServer(kill=pb.KillRank(message=fields.clip(message.message))).SerializeToString()
    raise AssertionError(f"{message} is no message to a rank")


def decode_to_rank(data: bytes) -> ToRank:
    """Decode a manager server's message to a rank. Raises: ProtocolError: damaged or out of bounds."""
    message = fields.parse(pb.FromManagerServer, data)
    match message.WhichOneof("message"):
        case "answer":
            return RankAnswer(message.answer.call, _rank_answer_from_wire(message.answer))
        case "welcome":
            return RankWelcome(message.welcome.session)
        case "refused":
            refusal, sentence = fields.refused_from_wire(message.refused)
            return RankRefused(refusal, sentence)
        case "loss_notice":
            return fields.notice_from_wire(message.loss_notice)
        case "newcomer_asks":
            return NewcomerAsks(fields.checked_name("replica_id", message.newcomer_asks.replica_id))
        case "group_lost":
            return RanksLost(fields.checked_sentence("message", message.group_lost.message), message.group_lost.left)
        case "ask_to_leave":
            wish = message.ask_to_leave
            return LeaveRequest(
                fields.checked_sentence("reason", wish.reason), fields.checked_count("serve_ms", wish.serve_ms)
            )
        case "released":
            return DrainComplete()
        case "waits":
            return WaitsFor(fields.checked_sentence("sentence", message.waits.sentence), message.waits.warns)
        case "quorum_news":
            return fields.quorum_news_from_wire(message.quorum_news)
        case "straggler":
            return fields.straggler_from_wire(message.straggler)
        case "kill":
            return KillOrder(fields.checked_sentence("message", message.kill.message))
        case _:
            raise ProtocolError("a message from the manager server has no content that this version knows")


def _call_from_wire(message: pb.RankCall) -> RankCall:
    timeout_ms = fields.checked_count("timeout_ms", message.timeout_ms)
    match message.WhichOneof("asked"):
        case "quorum":
            return RankCall(message.call, timeout_ms, _ask_from_wire(message.quorum))
        case "vote":
            return RankCall(message.call, timeout_ms, _vote_from_wire(message.vote))
        case "leaves":
            leaves = message.leaves
            rank = fields.checked_count("group_rank", leaves.group_rank, MAX_WORLD_SIZE)
            leave = Leave(
                rank,
                fields.checked_sentence("reason", leaves.reason),
                fields.checked_count("serve_ms", leaves.serve_ms),
                fields.finished_step_from_wire(leaves),
            )
            return RankCall(message.call, timeout_ms, leave)
        case _:
            raise ProtocolError("a rank's call has no content that this version knows")


def _rank_answer_from_wire(message: pb.RankAnswer) -> Plan | QuorumKey | Verdict | Failure:
    match message.WhichOneof("answer"):
        case "plan":
            return _plan_from_wire(message.plan)
        case "verdict":
            return _verdict_from_wire(message.verdict)
        case "refused":
            refused = message.refused
            return Failure(
                fields.checked_name("code", refused.code), fields.checked_sentence("message", refused.message)
            )
        case _:
            raise ProtocolError("an answer of the manager server has no content that this version knows")
