"""The messages between the lighthouse and a manager server, of this project or of torchft: protobuf bytes to values and
back.

A peer may be an old version, a foreign program or an attacker. Every length and number is therefore checked before use,
and a message that does not fit raises ProtocolError with a sentence. Both directions of a stream use the core's own
events and effects: the value that one side encodes is the value that the other side's core gets.

An absent lineage is an unknown one. torchft's members and ranks carry none of this project's fields. This project's
always send a min_replica_size, so its absence tells the two apart, and torchft's get torchft's settings.

Law of this file: bytes in, values out, and back; no I/O, no state, no decisions.
"""

from __future__ import annotations

from dataclasses import replace

from tft_coord.compat.views import DescribedJob, LighthouseDescription
from tft_coord.core.effects import (
    AnnounceNewcomer,
    AnswerQuorum,
    AnswerUnchanged,
    AskForQuorum,
    AskToLeave,
    NotifyLoss,
    Probe,
    RefuseRequest,
    RefuseSession,
    Release,
    TellLost,
    TellNewest,
    TellStraggler,
    TellWait,
    TryPeers,
    Welcome,
)
from tft_coord.core.events import (
    BeatReceived,
    DeathReported,
    DrainRequested,
    HelloReceived,
    LateReported,
    LeaveReceived,
    LighthouseEvent,
    PeersTried,
    ProbeAnswered,
    QuorumReported,
    QuorumRequested,
    RequestWithdrawn,
    StreamClosed,
)
from tft_coord.core.types import MAX_INT64, MAX_UINT64, Member, Quorum, QuorumKey
from tft_coord.errors import ProtocolError
from tft_coord.wire import coordination_pb2 as pb
from tft_coord.wire import fields, reports, table
from tft_coord.wire.limits import (
    MAX_JOBS_DESCRIBED,
    MAX_MEMBERS,
    MAX_NAME_BYTES,
    MAX_SENTENCE_BYTES,
    MAX_UNASKED_BYTES,
    MAX_WARNINGS_DESCRIBED,
)
from tft_coord.wire.packing import unpacked


def encode_to_lighthouse(event: LighthouseEvent, previous: Member | None = None) -> bytes:
    """Encode a message to the lighthouse, without the stream's number.

    Args:
        previous: the member of the last request on this stream, or None; the fields that repeat it are left out.
    """
    match event:
        case BeatReceived():
            progress = fields.progress_to_wire(event.progress)
            beat = pb.Beat(
                healed_bytes=event.healed_bytes,
                progress=progress,
                own_ms=fields.own_ms_to_wire(event.progress),
                waits=event.waits,
                number=event.number,
                report=reports.report_to_wire(event.progress),
            )
            return pb.ToLighthouse(beat=beat).SerializeToString()
        case QuorumRequested():
            member = event.member
            same = previous is not None and replace(previous, step=member.step, lineage=member.lineage) == member
            asked = pb.QuorumRequest(
                request=event.request,
                member=_state_to_wire(member) if same else table.MEMBER.encode(member),
                as_before=same,
                held=fields.key_to_wire(event.held),
                fingerprint=fields.fingerprint_to_wire(event.fingerprint),
            )
            return pb.ToLighthouse(quorum_request=asked).SerializeToString()
        case RequestWithdrawn():
            return pb.ToLighthouse(withdraw=pb.Withdraw(request=event.request)).SerializeToString()
        case HelloReceived():
            return pb.ToLighthouse(hello=table.HELLO.encode(event.hello)).SerializeToString()
        case QuorumReported():
            report = pb.QuorumReport(quorum=None if event.quorum is None else _quorum_to_wire(event.quorum))
            return pb.ToLighthouse(quorum_report=report).SerializeToString()
        case PeersTried():
            tried = pb.PeersTried(number=event.number, unreached=fields.unreached_to_wire(event.unreached))
            return pb.ToLighthouse(peers_tried=tried).SerializeToString()
        case LateReported():
            late = pb.Late(key=fields.key_to_wire(event.key), step=event.step)
            return pb.ToLighthouse(late=late).SerializeToString()
        case DeathReported():
            return pb.ToLighthouse(death=pb.Death(reason=fields.clip(event.reason))).SerializeToString()
        case ProbeAnswered():
            probed = pb.Probed(number=event.number, stopped=fields.clip(event.stopped), stopped_ms=event.stopped_ms)
            return pb.ToLighthouse(probed=probed).SerializeToString()
        case LeaveReceived():
            leave = pb.Leave(
                reason=fields.clip(event.reason), serve_ms=event.serve_ms, finished_step=event.finished_step
            )
            return pb.ToLighthouse(leave=leave).SerializeToString()
        case StreamClosed():
            raise AssertionError("a closed stream is not a message")


def decode_to_lighthouse(
    stream: int, data: bytes, previous: Member | None = None, *, was_asked: bool = True
) -> LighthouseEvent:
    """Decode a message that came on that stream.

    Args:
        previous: the member of the last request that came on it, or None.
        was_asked: the lighthouse has asked the stream for the quorum that it holds. Decoding thousands of members takes
            long, so an unasked report is rejected.
    Raises: ProtocolError: it is damaged or breaks a bound.
    """
    if not was_asked and len(data) > MAX_UNASKED_BYTES:
        raise ProtocolError(f"an unrequested message has {len(data)} bytes; at most {MAX_UNASKED_BYTES} are allowed")
    message = fields.parse(pb.ToLighthouse, data)
    match message.WhichOneof("message"):
        case "beat":
            healed_bytes = fields.checked_count("healed_bytes", message.beat.healed_bytes, MAX_INT64)
            number = fields.checked_count("number", message.beat.number, MAX_INT64)
            progress = fields.progress_from_wire(message.beat)
            return BeatReceived(stream, healed_bytes, progress, message.beat.waits, number)
        case "quorum_request":
            asked = message.quorum_request
            held = fields.key_from_wire(asked.held) if asked.HasField("held") else None
            fingerprint = fields.fingerprint_from_wire(asked.fingerprint)
            member = _member_as_before(asked.member, previous) if asked.as_before else table.MEMBER.decode(asked.member)
            return QuorumRequested(stream, asked.request, member, held, fingerprint)
        case "withdraw":
            return RequestWithdrawn(stream, message.withdraw.request)
        case "hello":
            return HelloReceived(stream, table.HELLO.decode(message.hello))
        case "quorum_report":
            if not was_asked:
                raise ProtocolError("a quorum report arrived without a request")
            report = message.quorum_report
            return QuorumReported(stream, _quorum_from_wire(report.quorum) if report.HasField("quorum") else None)
        case "peers_tried":
            tried = message.peers_tried
            return PeersTried(stream, tried.number, fields.unreached_from_wire(tried.unreached))
        case "late":
            step = fields.checked_count("step", message.late.step, MAX_INT64)
            return LateReported(stream, fields.key_from_wire(message.late.key), step)
        case "death":
            return DeathReported(stream, fields.checked_sentence("reason", message.death.reason))
        case "probed":
            probed = message.probed
            stopped = fields.checked_sentence("stopped", probed.stopped)
            return ProbeAnswered(
                stream, probed.number, stopped, fields.checked_count("stopped_ms", probed.stopped_ms, MAX_INT64)
            )
        case "leave":
            leave = message.leave
            return LeaveReceived(
                stream,
                fields.checked_sentence("reason", leave.reason),
                fields.checked_count("serve_ms", leave.serve_ms),
                fields.finished_step_from_wire(leave),
            )
        case _:
            raise ProtocolError("a message to the lighthouse has no content that this version knows")


SentEffect = (
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
    | TellWait
    | TellNewest
    | TellStraggler
    | TryPeers
    | Release
    | Probe
)


def encode_from_lighthouse(effect: SentEffect) -> bytes:
    """Encode a message to a manager server, without the stream's number.

    A whole quorum for many streams is cheaper by `encode_quorum` once and `frame_quorum_answer` for each.
    """
    match effect:
        case AnswerUnchanged():
            answer = pb.QuorumAnswer(request=effect.request, unchanged=fields.key_to_wire(effect.key))
            return pb.FromLighthouse(answer=answer).SerializeToString()
        case AnswerQuorum():
            return frame_quorum_answer(effect.request, encode_quorum(effect.quorum))
        case RefuseRequest():
            refused = pb.Refused(code=effect.refusal.value, message=fields.clip(effect.message))
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
            refused = pb.Refused(
                code=effect.refusal.value, message=fields.clip(effect.message), silent_ms=effect.silent_ms
            )
            return pb.FromLighthouse(refused=refused).SerializeToString()
        case TellLost():
            lost = pb.Lost(session=effect.session, message=fields.clip(effect.message))
            return pb.FromLighthouse(lost=lost).SerializeToString()
        case NotifyLoss():
            return pb.FromLighthouse(loss_notice=fields.notice_to_wire(effect.notice)).SerializeToString()
        case AnnounceNewcomer():
            return pb.FromLighthouse(newcomer_asks=pb.NewcomerAsks(replica_id=effect.replica_id)).SerializeToString()
        case AskForQuorum():
            return pb.FromLighthouse(ask_for_quorum=fields.key_to_wire(effect.key)).SerializeToString()
        case AskToLeave():
            wish = pb.AskToLeave(reason=fields.clip(effect.reason), serve_ms=effect.serve_ms)
            return pb.FromLighthouse(ask_to_leave=wish).SerializeToString()
        case TellWait():
            waits = pb.Waits(sentence=fields.clip(effect.sentence), warns=effect.warns)
            return pb.FromLighthouse(waits=waits).SerializeToString()
        case TellNewest():
            return pb.FromLighthouse(quorum_news=fields.quorum_news_to_wire(effect.news)).SerializeToString()
        case TellStraggler():
            return pb.FromLighthouse(straggler=fields.straggler_to_wire(effect.news)).SerializeToString()
        case Probe():
            return pb.FromLighthouse(probe=pb.Probe(number=effect.number)).SerializeToString()
        case TryPeers():
            return pb.FromLighthouse(try_peers=fields.trial_to_wire(effect.number, effect.peers)).SerializeToString()
        case Release():
            return pb.FromLighthouse(released=pb.Released()).SerializeToString()


def encode_quorum(quorum: Quorum) -> bytes:
    """Encode the quorum alone, to be framed for each stream."""
    return _quorum_to_wire(quorum).SerializeToString()


def frame_quorum_answer(request: int, encoded: bytes, *, packed: bool = False) -> bytes:
    """Return the same bytes as `encode_from_lighthouse(AnswerQuorum(...))`, around an encoded quorum.

    Args:
        request: the number of the answered request.
        encoded: by `encode_quorum`.
        packed: it went through `packing.pack_quorum` as well.
    """
    # This is protobuf's own framing, by hand. Field 1 of QuorumAnswer is the request, field 2 the quorum, field 5 the
    # packed one; the answer is field 5 of FromLighthouse. A default value (0) is left out, as everywhere in proto3.
    field = b"\x2a" if packed else b"\x12"
    head = (b"\x08" + _varint(request) if request else b"") + field + _varint(len(encoded))
    return b"\x2a" + _varint(len(head) + len(encoded)) + head + encoded


def decode_from_lighthouse(data: bytes) -> SentEffect:
    """Decode a message from the lighthouse, for stream 0. Raises: ProtocolError: it is damaged or breaks a bound."""
    message = fields.parse(pb.FromLighthouse, data)
    match message.WhichOneof("message"):
        case "answer":
            return _answer_from_wire(message.answer)
        case "welcome":
            welcome = message.welcome
            started = fields.checked_count("lighthouse_started_ms", welcome.lighthouse_started_ms, MAX_INT64)
            cluster_id = fields.checked_printable("cluster_id", welcome.cluster_id, MAX_NAME_BYTES)
            return Welcome(
                0, welcome.session, started, cluster_id, welcome.heartbeat_timeout_ms, welcome.join_timeout_ms
            )
        case "refused":
            refusal, sentence = fields.refused_from_wire(message.refused)
            silent_ms = fields.checked_count("silent_ms", message.refused.silent_ms, MAX_INT64)
            return RefuseSession(0, refusal, sentence, silent_ms)
        case "lost":
            lost = message.lost
            return TellLost(0, lost.session, fields.checked_sentence("message", lost.message))
        case "loss_notice":
            return NotifyLoss(0, fields.notice_from_wire(message.loss_notice))
        case "newcomer_asks":
            return AnnounceNewcomer(0, fields.checked_name("replica_id", message.newcomer_asks.replica_id))
        case "ask_for_quorum":
            return AskForQuorum(0, fields.key_from_wire(message.ask_for_quorum))
        case "ask_to_leave":
            wish = message.ask_to_leave
            return AskToLeave(
                0, fields.checked_sentence("reason", wish.reason), fields.checked_count("serve_ms", wish.serve_ms)
            )
        case "waits":
            sentence = fields.checked_sentence("sentence", message.waits.sentence)
            return TellWait(0, sentence, message.waits.warns)
        case "quorum_news":
            return TellNewest(0, fields.quorum_news_from_wire(message.quorum_news))
        case "straggler":
            return TellStraggler(0, fields.straggler_from_wire(message.straggler))
        case "probe":
            return Probe(0, message.probe.number)
        case "try_peers":
            return TryPeers(0, message.try_peers.number, fields.peers_from_wire(message.try_peers))
        case "released":
            return Release(0)
        case _:
            raise ProtocolError("a message from the lighthouse has no content that this version knows")


def encode_drain(request: DrainRequested) -> bytes:
    """Encode the request that a replica leave."""
    return pb.DrainRequest(
        job=request.job,
        replica_id=request.replica,
        reason=fields.clip(request.reason),
        serve_ms=fields.checked_count("serve_ms", request.serve_ms),
    ).SerializeToString()


def decode_drain(call: int, data: bytes) -> DrainRequested:
    """Decode the request that a replica leave, for that call.

    Raises: ProtocolError: damaged, out of bounds, or without a replica.
    """
    message = fields.parse(pb.DrainRequest, data)
    return DrainRequested(
        call,
        fields.checked_name("job", message.job),
        fields.checked_name("replica_id", message.replica_id),
        fields.checked_sentence("reason", message.reason),
        fields.checked_count("serve_ms", message.serve_ms),
    )


def encode_lighthouse_request(member: Member) -> bytes:
    """Encode a unary quorum request, with torchft's fields only."""
    return pb.LighthouseQuorumRequest(requester=table.MEMBER.encode(member, ours=False)).SerializeToString()


def decode_lighthouse_request(data: bytes) -> Member:
    """Decode the member that asks for a quorum. Raises: ProtocolError: damaged, out of bounds, or without a member."""
    message = fields.parse(pb.LighthouseQuorumRequest, data)
    if not message.HasField("requester"):
        raise ProtocolError("missing requester: a quorum request names the member that asks")
    return table.MEMBER.decode(message.requester)


def encode_lighthouse_response(quorum: Quorum) -> bytes:
    """Encode a quorum for torchft's members, with torchft's fields only."""
    return pb.LighthouseQuorumResponse(quorum=_quorum_to_wire(quorum, ours=False)).SerializeToString()


def decode_lighthouse_response(data: bytes) -> Quorum:
    """Decode the quorum that the lighthouse gave. Raises: ProtocolError: damaged or out of bounds."""
    message = fields.parse(pb.LighthouseQuorumResponse, data)
    if not message.HasField("quorum"):
        raise ProtocolError("the lighthouse answered without a quorum; it speaks another protocol")
    return _quorum_from_wire(message.quorum)


def encode_description(description: LighthouseDescription) -> bytes:
    """Encode a lighthouse's description of itself; of more jobs than MAX_JOBS_DESCRIBED the first by name."""
    jobs = [_job_to_wire(job) for job in sorted(description.jobs, key=lambda job: job.name)[:MAX_JOBS_DESCRIBED]]
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
        torchft=_job_to_wire(description.torchft) if description.torchft is not None else None,
        lost_state_timeout_ms=description.lost_state_timeout_ms,
        stragglers=description.stragglers,
    ).SerializeToString()


def _job_to_wire(job: DescribedJob) -> pb.DescribedJob:
    return pb.DescribedJob(
        name=job.name,
        quorum_id=job.quorum_id,
        num_members=job.num_members,
        waiting_for=fields.clip(job.waiting_for),
        warnings=[fields.clip(warning) for warning in job.warnings[:MAX_WARNINGS_DESCRIBED]],
    )


def decode_description(data: bytes) -> LighthouseDescription:
    """Decode a lighthouse's description of itself. Raises: ProtocolError: damaged or out of bounds."""
    message = fields.parse(pb.DescribeResponse, data)
    return LighthouseDescription(
        version=fields.checked_printable("version", message.version, MAX_NAME_BYTES),
        started_ms=fields.checked_count("started_ms", message.started_ms, MAX_INT64),
        now_ms=fields.checked_count("now_ms", message.now_ms, MAX_INT64),
        cluster_id=fields.checked_printable("cluster_id", message.cluster_id, MAX_NAME_BYTES),
        min_replicas=message.min_replicas,
        join_timeout_ms=message.join_timeout_ms,
        heartbeat_timeout_ms=message.heartbeat_timeout_ms,
        quorum_tick_ms=message.quorum_tick_ms,
        jobs=tuple(_job_from_wire(job) for job in message.jobs[:MAX_JOBS_DESCRIBED]),
        torchft=_job_from_wire(message.torchft) if message.HasField("torchft") else None,
        lost_state_timeout_ms=message.lost_state_timeout_ms,
        stragglers=fields.checked_printable("stragglers", message.stragglers, MAX_NAME_BYTES),
    )


def _job_from_wire(job: pb.DescribedJob) -> DescribedJob:
    return DescribedJob(
        name=fields.checked_printable("job", job.name, MAX_NAME_BYTES),
        quorum_id=fields.checked_count("quorum_id", job.quorum_id, MAX_INT64),
        num_members=fields.checked_count("num_members", job.num_members, MAX_MEMBERS),
        waiting_for=fields.checked_printable("waiting_for", job.waiting_for, MAX_SENTENCE_BYTES),
        warnings=tuple(
            fields.checked_printable("warnings", warning, MAX_SENTENCE_BYTES)
            for warning in job.warnings[:MAX_WARNINGS_DESCRIBED]
        ),
    )


def encode_heartbeat(replica_id: str) -> bytes:
    """Encode a unary heartbeat."""
    return pb.LighthouseHeartbeatRequest(replica_id=replica_id).SerializeToString()


def decode_heartbeat(data: bytes) -> str:
    """Decode the replica id of a heartbeat. Raises: ProtocolError: damaged, out of bounds, or without an id."""
    return fields.checked_name("replica_id", fields.parse(pb.LighthouseHeartbeatRequest, data).replica_id)


def _state_to_wire(member: Member) -> pb.QuorumMember:
    """Encode the fields that change from one step to the next."""
    return pb.QuorumMember(step=member.step, lineage=member.lineage)


def _member_as_before(message: pb.QuorumMember, previous: Member | None) -> Member:
    if previous is None:
        raise ProtocolError("a request refers to an earlier member, but is the first one on its stream")
    lineage = message.lineage if message.HasField("lineage") else None
    return replace(previous, step=fields.checked_count("step", message.step, MAX_INT64), lineage=lineage)


def _quorum_to_wire(quorum: Quorum, *, ours: bool = True) -> pb.Quorum:
    message = pb.Quorum(
        quorum_id=quorum.key.quorum_id,
        participants=[table.MEMBER.encode(member, ours=ours) for member in quorum.members],
        nonce=quorum.key.nonce if ours else 0,
    )
    message.created.seconds, milliseconds = divmod(quorum.created_ms, 1000)
    message.created.nanos = milliseconds * 1_000_000
    return message


def _quorum_from_wire(message: pb.Quorum) -> Quorum:
    seconds = fields.checked_count("created", message.created.seconds, MAX_INT64 // 1000 - 1)
    nanos = fields.checked_count("created", message.created.nanos, 999_999_999)
    return Quorum(
        key=QuorumKey(message.quorum_id, message.nonce),
        members=tuple(table.MEMBER.decode(member) for member in fields.few("participants", message.participants)),
        created_ms=seconds * 1000 + nanos // 1_000_000,
    )


def _answer_from_wire(message: pb.QuorumAnswer) -> AnswerQuorum | AnswerUnchanged | RefuseRequest:
    match message.WhichOneof("answer"):
        case "unchanged":
            return AnswerUnchanged(0, message.request, fields.key_from_wire(message.unchanged))
        case "quorum":
            return AnswerQuorum(0, message.request, _quorum_from_wire(message.quorum))
        case "packed":
            return AnswerQuorum(
                0, message.request, _quorum_from_wire(fields.parse(pb.Quorum, unpacked(message.packed)))
            )
        case "refused":
            refusal, sentence = fields.refused_from_wire(message.refused)
            return RefuseRequest(0, message.request, refusal, sentence)
        case _:
            raise ProtocolError("an answer of the lighthouse has no content that this version knows")


def _varint(number: int) -> bytes:
    if not 0 <= number <= MAX_UINT64:
        raise ProtocolError(f"request number {number} is outside 0..2^64-1")
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
