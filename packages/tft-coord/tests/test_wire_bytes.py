"""The bytes on the wire are those that released versions read and write.

A value whose name begins with FULL sets every field. An empty or small one sets only what it must.

When a field is added, set it in the full values. Their recorded bytes gain the bytes of that field, and the lengths of
the messages around it grow. A length is the byte, or the two, after the tag of a message. All other bytes of the full
values stay. The bytes of the empty and small values, and of the messages for torchft, stay as they are. Any other
change breaks older versions.
"""

from __future__ import annotations

import pytest

from tft_coord.core.events import HelloReceived, QuorumRequested
from tft_coord.core.types import Hello, Member, Plan, Quorum, QuorumKey, RankRequest, Source, Unreached, Via
from tft_coord.wire import codec, rank_codec

KEY = QuorumKey(7, 2**63 + 1)
FULL_MEMBER = Member(
    replica_id="b:1",
    session=300,
    address="h:1",
    store_address="h:2",
    step=5,
    lineage=0,
    world_size=2,
    shrink_only=True,
    commit_failures=1,
    needs_configure=True,
    live=True,
    torn=True,
    failed_heals=3,
    poor_sources=("c", "d"),
    init_sync=True,
    allow_heal=True,
    use_async_quorum=True,
    fixed_with_spares=True,
    min_replica_size=2,
    data="{}",
    reconfigure_handles=("x", ""),
    unreached=(Unreached("c", Via.STORE, "no"), Unreached("d", Via.STATE)),
    store_failed=True,
    lease_ms=0,
)
QUORUM = Quorum(KEY, (Member("a", init_sync=False, allow_heal=False, use_async_quorum=False), FULL_MEMBER), 1_001)
FULL_REQUEST = RankRequest(
    step=5,
    lineage=9,
    live=True,
    torn=True,
    held=KEY,
    checkpoint_metadata="here",
    commit_failures=1,
    needs_configure=True,
    failed_heals=3,
    poor_sources=("c",),
    shrink_only=True,
    fixed_with_spares=True,
    min_replica_size=2,
    data="{}",
    reconfigure_handle="x",
    attempt=4,
    unreached=(Unreached("c", Via.GROUP, "no"),),
    lease_ms=60_000,
)
FULL_HELLO = Hello(
    job="j",
    replica_id="a",
    session=300,
    address="h:1",
    replaces="b",
    ready=True,
    held=KEY,
    lighthouse_started_ms=8,
    cluster_id="c",
    left=True,
    num_answers=4,
    pid=44,
    answers_probes=True,
    tries_peers=True,
    lease_ms=5,
)
FULL_PLAN = Plan(
    key=KEY,
    replica_id="b",
    replica_rank=1,
    replica_world_size=2,
    replica_ids=("a", "b"),
    step=5,
    lineage=9,
    heal=True,
    sources=(Source(0, "a", "h:1"),),
    recover_dst_replica_ranks=(1,),
    serve=True,
    store_address="h:2",
    up_to_date=(0,),
    participants=(0, 1),
    participating_rank=0,
    min_replica_size=2,
    commit_failures=1,
    reconfigure_handles=("", "x"),
    store_replica_id="a",
    lease_ms=0,
)
SMALL_PLAN = Plan(
    key=QuorumKey(1, 0),
    replica_id="a",
    replica_rank=0,
    replica_world_size=1,
    replica_ids=("a",),
    step=0,
    lineage=0,
    heal=False,
    sources=(),
    recover_dst_replica_ranks=(),
    serve=False,
    store_address="",
    up_to_date=(0,),
    participants=(),
    participating_rank=None,
)
RECORDED = {
    "quorum": (
        "080712080a01612801f0060112690a03623a311203683a311a03683a322005280230013a027b7d40014a01784a00a006"
        "ac02a9060000000000000000b00601b80601c00601c80603d00601d80601e00601e80601f00602fa06070a01631a026e"
        "6ffa06050a016410028007018a0701638a0701649007001a06080110c0843da1060100000000000080"
    ),
    "request": (
        "1a7a080212690a03623a311203683a311a03683a322005280230013a027b7d40014a01784a00a006ac02a90600000000"
        "00000000b00601b80601c00601c80603d00601d80601e00601e80601f00602fa06070a01631a026e6ffa06050a016410"
        "028007018a0701638a0701649007001a0b0807110100000000000080"
    ),
    "torchft_request": "0a200a03623a311203683a311a03683a322005280230013a027b7d40014a01784a00",
    "torchft_response": (
        "0a33080712050a0161280112200a03623a311203683a311a03683a322005280230013a027b7d40014a01784a001a06080110c0843d"
    ),
    "rank_request": (
        "080110051a04686572652001280130013a0178a1060900000000000000a80601b00601b80601c00603c80601d00601d8"
        "0601e00602ea06027b7df2060b0807110100000000000080f806048a07090a016310011a026e6f920701639807e0d403"
    ),
    "empty_rank_request": "2801c80601d00601e00601",
    "hello": (
        "0a370a016a12016118ac022203683a312a016230013a0b080711010000000000008040084a016350015804602ca00101"
        "a80101b00105b80101"
    ),
    "empty_hello": "0a060a016a120161",
    "plan": (
        "08071203683a3118002201012a03683a3230053800400248015002580160016a01616a01627200720178a10601000000"
        "00000080b1060900000000000000ba06081201611a03683a31c00601ca060100d206020001d80602e2060161e80600"
    ),
    "small_plan": "080150016a0161ca060100d80601",
}


def encoded() -> dict[str, bytes]:
    return {
        "quorum": codec.encode_quorum(QUORUM),
        "request": codec.encode_to_lighthouse(QuorumRequested(0, 2, FULL_MEMBER, KEY)),
        "torchft_request": codec.encode_lighthouse_request(FULL_MEMBER),
        "torchft_response": codec.encode_lighthouse_response(QUORUM),
        "rank_request": rank_codec.encode_rank_request(rank_codec.Ask(1, FULL_REQUEST)),
        "empty_rank_request": rank_codec.encode_rank_request(rank_codec.Ask(0, RankRequest(step=0))),
        "hello": codec.encode_to_lighthouse(HelloReceived(0, FULL_HELLO)),
        "empty_hello": codec.encode_to_lighthouse(HelloReceived(0, Hello("j", "a", 0, "", unpacks=False))),
        "plan": rank_codec.encode_plan(FULL_PLAN),
        "small_plan": rank_codec.encode_plan(SMALL_PLAN),
    }


@pytest.mark.parametrize("name", list(RECORDED))
def test_bytes_are_the_recorded_ones(name: str) -> None:
    assert encoded()[name].hex() == RECORDED[name]


def test_recorded_bytes_are_read() -> None:
    data = {name: bytes.fromhex(text) for name, text in RECORDED.items()}
    assert codec.decode_to_lighthouse(0, data["request"]) == QuorumRequested(0, 2, FULL_MEMBER, KEY)
    assert codec.decode_to_lighthouse(0, data["hello"]) == HelloReceived(0, FULL_HELLO)
    assert rank_codec.decode_rank_request(data["rank_request"]) == rank_codec.Ask(1, FULL_REQUEST)
    assert rank_codec.decode_plan(data["plan"]) == FULL_PLAN
    assert rank_codec.decode_plan(data["small_plan"]) == SMALL_PLAN
