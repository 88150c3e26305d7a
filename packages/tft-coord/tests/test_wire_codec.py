"""What is encoded comes back as it was; what is damaged or out of bounds is refused with a sentence."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    Welcome,
)
from tft_coord.core.events import (
    BeatReceived,
    DeathReported,
    DrainRequested,
    HelloReceived,
    LateReported,
    LeaveReceived,
    ProbeAnswered,
    QuorumReported,
    QuorumRequested,
    RequestWithdrawn,
)
from tft_coord.core.fingerprint import MAX_FINGERPRINT_BYTES, MAX_PARTS, FingerprintPart
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.stops import LocalProcess
from tft_coord.core.stragglers import PaceKind, StragglerNotice
from tft_coord.core.types import (
    MAX_INT64,
    MAX_UINT64,
    UNREACHED_MOST,
    DrainComplete,
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
    QuorumNews,
    RankRequest,
    Refusal,
    Source,
    Unreached,
    Verdict,
    Via,
)
from tft_coord.errors import ProtocolError
from tft_coord.timeouts import LONGEST_MS
from tft_coord.wire import codec, packing, rank_codec, table
from tft_coord.wire import coordination_pb2 as pb
from tft_coord.wire.limits import (
    MAX_COUNT,
    MAX_HEALED_BYTES,
    MAX_MEMBERS,
    MAX_SENTENCE_BYTES,
    MAX_UNASKED_BYTES,
    MAX_UNPACKED_BYTES,
    MAX_WORLD_SIZE,
)

characters = st.characters(exclude_categories=["Cs"])
# Names stand in log lines: printable only.
names = st.text(characters.filter(str.isprintable), min_size=1, max_size=20)
texts = st.text(characters, max_size=20)
lines = st.text(characters.filter(str.isprintable), max_size=20)  # addresses, and sentences for somebody's log
steps = st.integers(0, MAX_INT64)
numbers = st.integers(0, MAX_UINT64)
counts = st.integers(0, MAX_COUNT)
lineages = st.none() | numbers
progresses = st.builds(Progress, steps, st.sampled_from(Phase), steps, st.booleans(), steps, steps)
keys = st.builds(QuorumKey, steps, numbers)
sizes = st.integers(1, 1000)
leases = st.none() | st.integers(0, LONGEST_MS)
quorum_news = st.builds(QuorumNews, st.none() | keys, st.booleans(), st.booleans(), steps, steps)
unreached = st.lists(st.builds(Unreached, names, st.sampled_from(Via), lines), max_size=3).map(tuple)
OF_KIND: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "int": counts,
    "str": lines,
    "tuple[str, ...]": st.lists(names, max_size=3).map(tuple),
    "tuple[Unreached, ...]": unreached,
    "QuorumKey | None": st.none() | keys,
}
OF_NAME: dict[str, st.SearchStrategy[Any]] = {
    "job": names,
    "replica_id": names,
    "session": numbers,
    "step": steps,
    "lineage": lineages,
    "lease_ms": leases,
    "world_size": sizes,
    "min_replica_size": sizes,
    "fingerprint": st.just(()),
    "data": texts,
    "checkpoint_metadata": texts,
    "reconfigure_handle": texts,
    "reconfigure_handles": st.lists(texts, max_size=3).map(tuple),
}


def any_of(kind: type[Any], **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return values of that class; each field is drawn by its name or else by its type."""
    drawn = {**OF_NAME, **special}
    fields = dataclasses.fields(kind)
    return st.builds(
        kind, **{field.name: drawn[field.name] if field.name in drawn else OF_KIND[str(field.type)] for field in fields}
    )


members = any_of(Member)
quorums = st.builds(
    lambda key, some, created_ms: Quorum(
        key, tuple(sorted({one.replica_id: one for one in some}.values(), key=lambda one: one.replica_id)), created_ms
    ),
    keys,
    st.lists(members, min_size=1, max_size=4),
    st.integers(0, 10**13),
)
hellos = any_of(Hello, lease_ms=st.integers(0, LONGEST_MS))
requests = any_of(RankRequest)
asks = st.builds(rank_codec.Ask, st.integers(0, 1000), requests)
votes = st.builds(
    rank_codec.Vote,
    st.integers(0, 1000),
    steps,
    st.booleans(),
    st.none() | keys,
    st.sampled_from(Purpose),
    st.booleans(),
    st.booleans(),
)
finished = st.none() | st.integers(0, MAX_INT64)
leaves = st.builds(rank_codec.Leave, st.integers(0, 1000), lines, counts, finished)
verdicts = st.builds(Verdict, st.booleans(), st.booleans(), st.booleans())


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ids = tuple(draw(st.lists(names, min_size=1, max_size=4, unique=True)))
    ranks = st.integers(0, len(ids) - 1)
    some = st.lists(ranks, max_size=4).map(tuple)
    own = draw(ranks)
    by_hand: dict[str, Any] = {
        "key": draw(keys),
        "replica_id": ids[own],
        "replica_rank": own,
        "replica_world_size": len(ids),
        "replica_ids": ids,
        "lineage": draw(numbers),
        "sources": tuple(Source(rank, ids[rank], draw(lines)) for rank in draw(some)),
        "recover_dst_replica_ranks": draw(some),
        "up_to_date": draw(some),
        "participants": draw(some),
        "participating_rank": draw(st.none() | ranks),
        "store_replica_id": draw(st.sampled_from(("", *ids))),
    }
    # Any other field, also a new one, is drawn by its name or type. A list with one text for each member has "" where a
    # member says nothing.
    of_kind = {**OF_KIND, "tuple[str, ...]": st.lists(lines, max_size=3).map(tuple)}
    for field in dataclasses.fields(Plan):
        if field.name not in by_hand:
            by_hand[field.name] = draw(OF_NAME[field.name] if field.name in OF_NAME else of_kind[str(field.type)])
    return Plan(**by_hand)


told_to_lighthouse = st.one_of(
    st.builds(HelloReceived, st.just(7), hellos),
    st.builds(BeatReceived, st.just(7), st.integers(0, MAX_INT64), st.none() | progresses, st.booleans(), steps),
    st.builds(LateReported, st.just(7), keys, steps),
    st.builds(ProbeAnswered, st.just(7), numbers, lines, steps),
    st.builds(QuorumRequested, st.just(7), numbers, members, st.none() | keys),
    st.builds(RequestWithdrawn, st.just(7), numbers),
    st.builds(QuorumReported, st.just(7), st.none() | quorums),
    st.builds(DeathReported, st.just(7), lines),
    st.builds(LeaveReceived, st.just(7), lines, counts, finished),
)
refusals = st.sampled_from(Refusal)
notices = st.builds(LossNotice, keys, names, numbers, lines, st.booleans())
paces = st.builds(
    StragglerNotice,
    names,
    st.sampled_from(PaceKind),
    steps,
    steps,
    st.floats(0.0, 1.0, exclude_min=True),
    steps,
    lines,
)
told_by_lighthouse = st.one_of(
    st.builds(TellNewest, st.just(0), quorum_news),
    st.builds(TellStraggler, st.just(0), paces),
    st.builds(Welcome, st.just(0), numbers, steps, lines),
    st.builds(RefuseSession, st.just(0), refusals, lines, st.integers(0, MAX_INT64)),
    st.builds(TellLost, st.just(0), numbers, lines),
    st.builds(NotifyLoss, st.just(0), notices),
    st.builds(AnnounceNewcomer, st.just(0), names),
    st.builds(AskForQuorum, st.just(0), keys),
    st.builds(AnswerQuorum, st.just(0), numbers, quorums),
    st.builds(AnswerUnchanged, st.just(0), numbers, keys),
    st.builds(RefuseRequest, st.just(0), numbers, refusals, lines),
    st.builds(AskToLeave, st.just(0), lines, counts),
    st.just(Release(0)),
    st.builds(Probe, st.just(0), numbers),
)
told_by_rank = st.one_of(
    st.builds(rank_codec.RankHello, st.integers(0, 1000), numbers),
    st.builds(
        rank_codec.RankProcess,
        st.builds(LocalProcess, st.integers(0, 2**32 - 1), numbers, lines, numbers),
    ),
    st.builds(rank_codec.RankBeat, st.integers(0, MAX_HEALED_BYTES), st.none() | progresses, steps),
    st.builds(rank_codec.RankLate, keys, steps),
    st.just(rank_codec.RankGoodbye()),
    st.builds(rank_codec.RankCall, numbers, counts, asks | votes | leaves),
    st.builds(rank_codec.RankWithdraw, numbers),
)
told_to_rank = st.one_of(
    st.builds(rank_codec.RankWelcome, numbers),
    st.builds(rank_codec.RankRefused, refusals, lines),
    notices,
    st.builds(NewcomerAsks, names),
    st.builds(rank_codec.RanksLost, lines, st.booleans()),
    st.builds(
        rank_codec.RankAnswer, numbers, st.one_of(plans(), keys, verdicts, st.builds(rank_codec.Failure, names, lines))
    ),
    st.builds(LeaveRequest, lines, counts),
    st.just(DrainComplete()),
    st.builds(KillOrder, lines),
    paces,
    quorum_news,
)


@given(told_to_lighthouse)
def test_what_a_manager_server_says_comes_back(event: Any) -> None:
    assert codec.decode_to_lighthouse(7, codec.encode_to_lighthouse(event)) == event


@given(members, st.lists(st.tuples(members, st.booleans(), st.integers(0, 2**40), st.none() | keys), max_size=5))
def test_a_member_that_is_as_before_is_said_once(first: Member, others: list[tuple[Member, bool, int, Any]]) -> None:
    last, said, heard = first, None, None
    for request, (other, same, step, held) in enumerate([(first, False, 0, None), *others]):
        last = replace(last, step=step, lineage=step or None) if same else other
        event = QuorumRequested(0, request, last, held)
        data = codec.encode_to_lighthouse(event, said)
        assert codec.decode_to_lighthouse(0, data, heard) == event
        if same:
            assert len(data) < 80
        said = heard = last


def test_a_member_as_before_where_there_was_none_is_refused() -> None:
    member = Member("a", step=3)
    data = codec.encode_to_lighthouse(QuorumRequested(0, 1, member, None), member)
    with pytest.raises(ProtocolError, match="refers to an earlier member, but is the first one on its stream"):
        codec.decode_to_lighthouse(0, data)


@given(told_by_lighthouse)
def test_what_the_lighthouse_says_comes_back(effect: Any) -> None:
    assert codec.decode_from_lighthouse(codec.encode_from_lighthouse(effect)) == effect


@given(told_by_rank)
def test_what_a_rank_says_comes_back(message: Any) -> None:
    assert rank_codec.decode_from_rank(rank_codec.encode_from_rank(message)) == message


@given(told_to_rank)
def test_what_a_rank_is_told_comes_back(message: Any) -> None:
    assert rank_codec.decode_to_rank(rank_codec.encode_to_rank(message)) == message


@given(verdicts, lines, st.builds(DrainRequested, st.just(3), names, names, lines, counts))
def test_what_is_said_of_leaving_and_killing_comes_back(verdict: Verdict, why: str, drain: DrainRequested) -> None:
    assert rank_codec.decode_verdict(rank_codec.encode_verdict(verdict)) == verdict
    assert rank_codec.decode_kill(rank_codec.encode_kill(why)) == why
    assert codec.decode_drain(3, codec.encode_drain(drain)) == drain


@given(asks, votes, plans(), keys)
def test_unary_calls_come_back(ask: rank_codec.Ask, vote: rank_codec.Vote, plan: Plan, key: QuorumKey) -> None:
    assert rank_codec.decode_rank_request(rank_codec.encode_rank_request(ask)) == ask
    assert rank_codec.decode_vote(rank_codec.encode_vote(vote)) == vote
    assert rank_codec.decode_plan(rank_codec.encode_plan(plan)) == plan
    assert rank_codec.decode_plan(rank_codec.encode_unchanged(key)) == key


@given(quorums, st.sampled_from([0, 1, 127, 128, 2**32, MAX_UINT64]))
def test_a_quorum_framed_by_hand_is_what_protobuf_writes(quorum: Quorum, request: int) -> None:
    answer = pb.QuorumAnswer(request=request, quorum=pb.Quorum.FromString(codec.encode_quorum(quorum)))
    expected = pb.FromLighthouse(answer=answer).SerializeToString()
    assert codec.frame_quorum_answer(request, codec.encode_quorum(quorum)) == expected


@given(quorums, st.sampled_from([0, 1, 127, 128, 2**32, MAX_UINT64]))
def test_a_packed_quorum_is_unpacked(quorum: Quorum, request: int) -> None:
    packed = packing.pack_quorum(codec.encode_quorum(quorum))
    answer = pb.QuorumAnswer(request=request, packed=pb.Packed.FromString(packed))
    framed = codec.frame_quorum_answer(request, packed, packed=True)
    assert framed == pb.FromLighthouse(answer=answer).SerializeToString()
    assert codec.decode_from_lighthouse(framed) == AnswerQuorum(0, request, quorum)


@pytest.mark.parametrize(
    ("size", "data", "says"),
    [
        (0, b"", "outside 1.."),
        (2**31, b"", "outside 1.."),
        (5, b"no zlib", "not a packed quorum"),
        (5, zlib.compress(b"123456"), "its real size differs"),
        (6, zlib.compress(b"12345"), "its real size differs"),
        (5, zlib.compress(b"12345")[:-1], "its real size differs"),
        (5, zlib.compress(b"12345") + b"6", "its real size differs"),
        (1_000, zlib.compress(bytes(50_000_000)), "its real size differs"),
        (5, zlib.compress(b"\xff" * 5), "not a Quorum"),
    ],
)
def test_a_damaged_packed_quorum_is_refused(size: int, data: bytes, says: str) -> None:
    packed = pb.Packed(size=size, data=data).SerializeToString()
    with pytest.raises(ProtocolError, match=says):
        codec.decode_from_lighthouse(codec.frame_quorum_answer(1, packed, packed=True))


def test_what_nobody_asked_for_is_bounded_before_it_is_parsed() -> None:
    """Two bytes on the wire are an empty member, which takes ninety in memory."""
    empty = pb.Quorum(participants=[pb.QuorumMember()] * (MAX_UNASKED_BYTES // 2))
    report = pb.ToLighthouse(quorum_report=pb.QuorumReport(quorum=empty)).SerializeToString()
    with pytest.raises(ProtocolError, match="an unrequested message has"):
        codec.decode_to_lighthouse(1, report, was_asked=False)


def test_no_valid_request_is_longer_than_an_unasked_message() -> None:
    """The table gives the bound of each field, so a new field can't outgrow the limit unnoticed."""
    held_and_number = 100
    assert table.MEMBER.most_bytes() + MAX_FINGERPRINT_BYTES + held_and_number <= MAX_UNASKED_BYTES


def test_a_field_without_a_row_or_a_place_in_the_message_is_named() -> None:
    @dataclasses.dataclass(frozen=True)
    class WithMore(Member):
        no_row: str = ""

    @dataclasses.dataclass(frozen=True)
    class WithJob(Member):
        job: str = ""

    with pytest.raises(TypeError, match=r"WithMore\.no_row has no row in FIELDS of tft_coord/wire/table\.py"):
        table.Codec(WithMore, pb.QuorumMember)
    with pytest.raises(TypeError, match=r"WithJob\.job is no field of message QuorumMember; add it to"):
        table.Codec(WithJob, pb.QuorumMember)


def test_a_list_of_texts_may_have_empty_ones_and_a_list_of_names_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    message = pb.QuorumMember(replica_id="a", min_replica_size=1, poor_sources=["", "zone-b", ""])
    with pytest.raises(ProtocolError, match="poor_sources is empty; give it a name"):
        table.MEMBER.decode(message)

    monkeypatch.setitem(table.FIELDS, "poor_sources", table.printables(3))
    codec_of_texts = table.Codec(Member, pb.QuorumMember, marks_ours="min_replica_size")
    member = codec_of_texts.decode(message)
    assert member.poor_sources == ("", "zone-b", "")
    assert codec_of_texts.decode(codec_of_texts.encode(member)) == member
    message.poor_sources.append("")
    with pytest.raises(ProtocolError, match="poor_sources has 4 texts, above the limit of 3"):
        codec_of_texts.decode(message)
    with pytest.raises(ProtocolError, match=r"poor_sources is 'a\\nb'; give printable characters only"):
        codec_of_texts.decode(pb.QuorumMember(replica_id="a", poor_sources=["a\nb"]))


def test_the_longest_request_is_no_unasked_message() -> None:
    """The parameters of a large model are named in a fingerprint of a megabyte."""
    value = "x" * (MAX_FINGERPRINT_BYTES // MAX_PARTS - 5)
    parts = tuple(FingerprintPart(f"{number:05}", value) for number in range(MAX_PARTS))
    unreached = tuple(Unreached(f"r{number}", Via.GROUP, "x" * 4_000) for number in range(UNREACHED_MOST))
    handles = ("x" * 4_000,) * 60
    member = Member("a:1", data="x" * 65_000, reconfigure_handles=handles, unreached=unreached)
    asked = QuorumRequested(1, 1, member, None, parts)
    assert codec.decode_to_lighthouse(1, codec.encode_to_lighthouse(asked), was_asked=False) == asked


def test_a_quorum_that_is_longer_than_the_others_unpack_is_not_packed() -> None:
    assert not packing.is_packed(bytes(packing.PACKED_FROM_BYTES - 1))
    assert packing.is_packed(bytes(packing.PACKED_FROM_BYTES))
    assert packing.is_packed(bytes(MAX_UNPACKED_BYTES))
    assert not packing.is_packed(bytes(MAX_UNPACKED_BYTES + 1))


@given(members, texts)
def test_torchfts_wire_carries_torchfts_fields_only(member: Member, metadata: str) -> None:
    theirs = Member(
        member.replica_id,
        address=member.address,
        store_address=member.store_address,
        step=member.step,
        world_size=member.world_size,
        shrink_only=member.shrink_only,
        commit_failures=member.commit_failures,
        data=member.data,
        reconfigure_handles=member.reconfigure_handles,
    )
    assert codec.decode_lighthouse_request(codec.encode_lighthouse_request(member)) == theirs
    quorum = Quorum(QuorumKey(3, 99), (member,), created_ms=1234)
    answer = codec.decode_lighthouse_response(codec.encode_lighthouse_response(quorum))
    assert answer == Quorum(QuorumKey(3, 0), (theirs,), created_ms=1234)
    assert codec.decode_heartbeat(codec.encode_heartbeat(member.replica_id)) == member.replica_id
    assert rank_codec.decode_metadata(rank_codec.encode_metadata(metadata)) == metadata


def test_a_rank_that_says_none_of_our_fields_gets_torchfts_settings() -> None:
    message = pb.ManagerQuorumRequest(group_rank=1, step=5, checkpoint_metadata="here", init_sync=True)
    ask = rank_codec.decode_rank_request(message.SerializeToString())
    assert ask == rank_codec.Ask(1, RankRequest(step=5, checkpoint_metadata="here", init_sync=True))


def test_a_member_without_lineage_is_not_one_with_lineage_zero() -> None:
    unknown, zero = Member("a", lineage=None), Member("a", lineage=0)
    for member in (unknown, zero):
        event = QuorumRequested(1, 1, member, None)
        assert codec.decode_to_lighthouse(1, codec.encode_to_lighthouse(event)) == event


def test_what_a_lighthouse_says_of_itself() -> None:
    jobs = tuple(DescribedJob(f"job{number:04}", number, 2, "nobody has asked") for number in range(1_100))
    said = LighthouseDescription(
        version="0.1.0",
        started_ms=1,
        now_ms=2,
        cluster_id="c",
        min_replicas=1,
        join_timeout_ms=0,
        heartbeat_timeout_ms=5_000,
        quorum_tick_ms=100,
        jobs=jobs,
        lost_state_timeout_ms=30_000,
        stragglers="warn (ratio 2)",
    )
    assert codec.decode_description(codec.encode_description(said)) == replace(said, jobs=jobs[:1_000])
    theirs = replace(said, jobs=(), torchft=DescribedJob("default", 7, 2, "nobody has asked", ("two replicas",)))
    assert codec.decode_description(codec.encode_description(theirs)) == theirs
    with pytest.raises(ProtocolError, match="version"):
        codec.decode_description(pb.DescribeResponse(version="two\nlines").SerializeToString())


DECODERS: list[Callable[[bytes], object]] = [
    lambda data: codec.decode_to_lighthouse(1, data),
    codec.decode_from_lighthouse,
    rank_codec.decode_from_rank,
    rank_codec.decode_to_rank,
    rank_codec.decode_rank_request,
    rank_codec.decode_vote,
    rank_codec.decode_plan,
    codec.decode_lighthouse_request,
    codec.decode_lighthouse_response,
    codec.decode_description,
    codec.decode_heartbeat,
    rank_codec.decode_metadata,
    rank_codec.decode_metadata_request,
    rank_codec.decode_verdict,
    rank_codec.decode_kill,
    lambda data: codec.decode_drain(1, data),
]


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_random_bytes_never_do_more_than_raise_protocol_error(data: bytes) -> None:
    for decode in DECODERS:
        with suppress(ProtocolError):
            decode(data)


@given(told_to_lighthouse, st.data())
@settings(max_examples=200)
def test_a_damaged_message_never_does_more_than_raise_protocol_error(event: Any, data: st.DataObject) -> None:
    encoded = bytearray(codec.encode_to_lighthouse(event))
    if encoded:
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded[at] = data.draw(st.integers(0, 255))
    for decode in DECODERS:
        with suppress(ProtocolError):
            decode(bytes(encoded))


GOOD = pb.QuorumMember(replica_id="a", world_size=1, min_replica_size=1)


def member_with(**fields: Any) -> bytes:
    message = pb.QuorumMember()
    message.CopyFrom(GOOD)
    message.MergeFrom(pb.QuorumMember(**fields))
    return pb.ToLighthouse(quorum_request=pb.QuorumRequest(member=message)).SerializeToString()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (member_with(replica_id="x" * 257), "replica_id is longer than 256 bytes"),
        (member_with(replica_id="é" * 129), "replica_id is longer than 256 bytes"),
        (member_with(address="x" * 513), "address is longer than 512 bytes"),
        (member_with(data="x" * (64 * 1024 + 1)), "data is longer than 65536 bytes"),
        (member_with(step=-1), "step is -1"),
        (member_with(world_size=2**40), "world_size is"),
        (member_with(commit_failures=-1), "commit_failures is -1"),
        (member_with(reconfigure_handles=["x" * 5000]), "reconfigure_handle is longer"),
        (member_with(lease_ms=LONGEST_MS + 1), "lease_ms is"),
        (pb.ToLighthouse(beat=pb.Beat(number=2**63)).SerializeToString(), "number is"),
        (pb.ToLighthouse(late=pb.Late(step=-1)).SerializeToString(), "step is -1"),
        (pb.ToLighthouse(hello=pb.Hello(replica_id="a")).SerializeToString(), "job is empty"),
        (pb.ToLighthouse(hello=pb.Hello(job="j" * 300, replica_id="a")).SerializeToString(), "job is longer"),
        (
            pb.ToLighthouse(
                hello=pb.Hello(job="j", replica_id="a", held=pb.QuorumKey(quorum_id=-5))
            ).SerializeToString(),
            "quorum id -5 is outside",
        ),
        (pb.ToLighthouse().SerializeToString(), "has no content"),
        (b"\xff\xff\xff", "are not a ToLighthouse message"),
        (
            pb.ToLighthouse(
                quorum_report=pb.QuorumReport(quorum=pb.Quorum(participants=[GOOD, GOOD]))
            ).SerializeToString(),
            "out of order or twice",
        ),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_name(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        codec.decode_to_lighthouse(1, data)


def test_members_that_say_no_lease_speak_no_word() -> None:
    """Older members of ours and torchft's: the quorum asks in every step, as it did before there were leases."""
    older = codec.decode_to_lighthouse(1, member_with())
    assert isinstance(older, QuorumRequested)
    assert older.member.lease_ms is None
    asks_always = codec.decode_to_lighthouse(1, member_with(lease_ms=0))
    assert isinstance(asks_always, QuorumRequested)
    assert asks_always.member.lease_ms == 0
    assert Quorum(QuorumKey(1, 1), (Member("a", lease_ms=5), Member("b", lease_ms=3))).lease_ms == 3
    assert Quorum(QuorumKey(1, 1), (Member("a", lease_ms=5), Member("b"))).lease_ms is None


def test_news_of_a_quorum_that_breaks_a_bound_is_refused() -> None:
    news = pb.QuorumNews(key=pb.QuorumKey(quorum_id=-5))
    with pytest.raises(ProtocolError, match="quorum id -5 is outside"):
        codec.decode_from_lighthouse(pb.FromLighthouse(quorum_news=news).SerializeToString())
    with pytest.raises(ProtocolError, match="age_ms is"):
        rank_codec.decode_to_rank(pb.FromManagerServer(quorum_news=pb.QuorumNews(age_ms=2**63)).SerializeToString())


def test_healed_bytes_whose_sum_over_a_group_would_not_fit_are_refused_by_name() -> None:
    assert MAX_WORLD_SIZE * MAX_HEALED_BYTES <= MAX_INT64
    with pytest.raises(ProtocolError, match=rf"healed_bytes is .*; it must be 0\.\.{MAX_HEALED_BYTES}"):
        rank_codec.decode_from_rank(rank_codec.encode_from_rank(rank_codec.RankBeat(MAX_HEALED_BYTES + 1)))
    with pytest.raises(ProtocolError, match=rf"healed_bytes is .*; it must be 0\.\.{MAX_INT64}"):
        codec.decode_to_lighthouse(7, codec.encode_to_lighthouse(BeatReceived(7, MAX_INT64 + 1)))


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (pb.Progress(phase=4), "a beat reports phase 4, which this version does not know"),  # type: ignore[arg-type]
        (pb.Progress(step=-1), "step is -1; it must be 0"),
        (pb.Progress(since_ms=2**63), f"since_ms is {2**63}; it must be 0"),
        (pb.Progress(slowest_step_ms=2**63), f"slowest_step_ms is {2**63}; it must be 0"),
    ],
)
def test_a_beat_that_tells_nonsense_of_a_step_is_refused(said: pb.Progress, sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        rank_codec.decode_from_rank(pb.ToManagerServer(beat=pb.RankBeat(progress=said)).SerializeToString())
    with pytest.raises(ProtocolError, match=sentence):
        codec.decode_to_lighthouse(7, pb.ToLighthouse(beat=pb.Beat(progress=said)).SerializeToString())


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (pb.Straggler(kind=5), "a straggler notice has kind 5, which this version does not know"),  # type: ignore[arg-type]
        (pb.Straggler(replica_id="a", share=0.0), "share is 0.0; it must be above 0 and at most 1"),
        (pb.Straggler(replica_id="a", share=1.5), "share is 1.5; it must be above 0 and at most 1"),
        (pb.Straggler(replica_id="a", share=float("nan")), "share is nan; it must be above 0 and at most 1"),
        (pb.Straggler(share=1.0), "replica_id is empty"),
        (pb.Straggler(replica_id="a", share=1.0, own_ms=2**63), f"own_ms is {2**63}; it must be 0"),
    ],
)
def test_nonsense_about_a_pace_is_refused(said: pb.Straggler, sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        codec.decode_from_lighthouse(pb.FromLighthouse(straggler=said).SerializeToString())
    with pytest.raises(ProtocolError, match=sentence):
        rank_codec.decode_to_rank(pb.FromManagerServer(straggler=said).SerializeToString())


def test_a_quorum_of_too_many_members_is_refused_before_they_are_looked_at() -> None:
    crowd = pb.Quorum(participants=[pb.QuorumMember()] * (MAX_MEMBERS + 1))
    report = pb.ToLighthouse(quorum_report=pb.QuorumReport(quorum=crowd)).SerializeToString()
    with pytest.raises(ProtocolError, match=r"participants has 100001 entries; at most 100000 are allowed"):
        codec.decode_to_lighthouse(1, report)


def test_a_sentence_that_is_too_long_or_no_text_is_cut_not_refused() -> None:
    for reason in ("x" * 10_000, "é" * 10_000, "\ud800 broken"):
        decoded = codec.decode_to_lighthouse(1, codec.encode_to_lighthouse(DeathReported(1, reason)))
        assert isinstance(decoded, DeathReported)
        assert 0 < len(decoded.reason.encode()) <= MAX_SENTENCE_BYTES


def test_a_sentence_with_line_breaks_becomes_one_line_of_a_log() -> None:
    forged = pb.ToLighthouse(death=pb.Death(reason="gone\n2026-01-01 ERROR forged\x1b[31m")).SerializeToString()
    assert codec.decode_to_lighthouse(1, forged) == DeathReported(1, "gone 2026-01-01 ERROR forged [31m")


@pytest.mark.parametrize(
    ("member", "says"),
    [
        (pb.QuorumMember(replica_id="a\nb"), r"replica_id is 'a\\nb'; give printable characters only"),
        (pb.QuorumMember(replica_id="a", address="h:1\n"), r"address is 'h:1\\n'; give printable characters only"),
        (pb.QuorumMember(replica_id="a", step=-1), "step is -1"),
        (pb.QuorumMember(replica_id="a", world_size=2**63 - 1), "world_size is 9223372036854775807"),
        (pb.QuorumMember(replica_id="x" * 10_000_000), "replica_id is longer than 256 bytes"),
        (pb.QuorumMember(replica_id="a", reconfigure_handles=["x" * 4096] * 65), "reconfigure_handles are longer"),
        (pb.QuorumMember(replica_id="a", reconfigure_handles=[""] * 1_000_000), "reconfigure_handles are longer"),
    ],
)
def test_an_absurd_member_is_refused_by_the_field_that_is(member: pb.QuorumMember, says: str) -> None:
    with pytest.raises(ProtocolError, match=says) as refused:
        codec.decode_lighthouse_request(pb.LighthouseQuorumRequest(requester=member).SerializeToString())
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_so_is_the_reason_of_a_loss() -> None:
    notice = LossNotice(QuorumKey(1, 2), "a", 3, "x" * 10_000)
    for decoded in (
        codec.decode_from_lighthouse(codec.encode_from_lighthouse(NotifyLoss(0, notice))),
        rank_codec.decode_to_rank(rank_codec.encode_to_rank(notice)),
        rank_codec.decode_to_rank(rank_codec.encode_to_rank(rank_codec.RanksLost("x" * 10_000))),
    ):
        assert MAX_SENTENCE_BYTES // 2 < len(str(decoded)) < MAX_SENTENCE_BYTES + 200


@pytest.mark.parametrize(
    ("notice", "says"),
    [
        (pb.LossNotice(key=pb.QuorumKey(quorum_id=1)), "replica_id is empty"),
        (pb.LossNotice(replica_id="x" * 257), "replica_id is longer than 256 bytes"),
        (pb.LossNotice(replica_id="a", key=pb.QuorumKey(quorum_id=-1)), "quorum id -1 is outside"),
        (pb.LossNotice(replica_id="a", reason="x" * 10_000), "reason is longer"),
    ],
)
def test_a_notice_out_of_bounds_is_refused_by_name(notice: pb.LossNotice, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        codec.decode_from_lighthouse(pb.FromLighthouse(loss_notice=notice).SerializeToString())
    with pytest.raises(ProtocolError, match=says):
        rank_codec.decode_to_rank(pb.FromManagerServer(loss_notice=notice).SerializeToString())


def test_a_group_lost_out_of_bounds_is_refused_by_name() -> None:
    lost = pb.FromManagerServer(group_lost=pb.GroupLost(message="x" * 10_000)).SerializeToString()
    with pytest.raises(ProtocolError, match="message is longer"):
        rank_codec.decode_to_rank(lost)


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    plan = pb.ManagerQuorumResponse(quorum_id=1, replica_world_size=2, replica_ids=["a", "b"], participants=[2])
    with pytest.raises(ProtocolError, match="participants is replica rank 2 in a quorum of 2"):
        rank_codec.decode_plan(plan.SerializeToString())
    plan.replica_ids.pop()
    with pytest.raises(ProtocolError, match="names 1 replicas of 2"):
        rank_codec.decode_plan(plan.SerializeToString())


def test_an_unchanged_answer_is_small_whatever_the_quorum() -> None:
    answer = codec.encode_from_lighthouse(AnswerUnchanged(1, 1_000_000, QuorumKey(2**62, 2**63)))
    assert len(answer) < 40


def test_user_data_is_forwarded_as_it_is() -> None:
    data = json.dumps({"rate": 0.1, "name": "ü"})
    member = replace(Member("a"), data=data)
    assert codec.decode_lighthouse_request(codec.encode_lighthouse_request(member)).data == data
