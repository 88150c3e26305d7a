"""Which connection fetches what, and when one is broken off: without sockets or a clock."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tft_ckpt.key import StateKey
from tft_ckpt.state.manifest import Layout, Manifest, Segment
from tft_ckpt.transfer.chunks import FIRST_PART_BYTES, GRACE_S, PART_BYTES_MAX, STUCK_S, ChunkPlan

KEY = StateKey(quorum_id=1, nonce=2, step=3, lineage=4)
CHUNK = 1 << 20


def manifest(checksums: Iterable[int], *, chunk_bytes: int = CHUNK, last_bytes: int = 100) -> Manifest:
    checksums = tuple(checksums)
    length = (len(checksums) - 1) * chunk_bytes + last_bytes
    layout = Layout(key=KEY, chunk_bytes=chunk_bytes, segments=(Segment(0, length),), root=None)
    return Manifest(layout, checksums)


def made(num_chunks: int, *, own: str = "") -> ChunkPlan:
    plan = ChunkPlan(own)
    plan.adopt(manifest(range(num_chunks)))
    return plan


def whole(plan: ChunkPlan, source: str = "a", now_s: float = 0.0) -> int:
    return plan.join(source, now_s, has_all=True, is_peer=False)


def peer(plan: ChunkPlan, source: str, *have: int, now_s: float = 0.0) -> int:
    worker = plan.join(source, now_s, has_all=False, is_peer=True)
    plan.set_chunks(worker, sum(1 << chunk for chunk in have), now_s)
    return worker


def fetch(plan: ChunkPlan, worker: int, now_s: float, took_s: float) -> range:
    """One part, from claim to arrival."""
    part = plan.claim(worker, now_s)
    assert part is not None
    for chunk in part:
        plan.arrived(worker, chunk, now_s + took_s)
    return part


def test_alone_a_connection_fetches_all_in_order_in_parts_that_grow_with_its_rate() -> None:
    plan = made(200)
    worker, now_s, parts = whole(plan), 0.0, []
    while not plan.complete:
        parts.append(fetch(plan, worker, now_s, took_s=0.001))
        now_s += 0.001
    assert plan.claim(worker, now_s) is None
    assert [chunk for part in parts for chunk in part] == list(range(200))
    assert len(parts[0]) * CHUNK == FIRST_PART_BYTES
    assert max(len(part) for part in parts) * CHUNK == PART_BYTES_MAX
    assert plan.good_bytes == 199 * CHUNK + 100
    assert plan.missing_bytes == 0


def test_a_slow_connection_gets_small_parts() -> None:
    plan = made(200)
    worker = whole(plan)
    fetch(plan, worker, 0.0, took_s=4.0)
    assert plan.claim(worker, 4.0) == range(4, 5)


def test_what_a_connection_held_is_missing_when_it_ends() -> None:
    plan = made(6)
    worker = whole(plan)
    assert plan.claim(worker, 0.0) == range(4)
    plan.arrived(worker, 0, 0.1)
    plan.leave(worker, 0.1)
    other = whole(plan, "b")
    assert plan.claim(other, 0.1) == range(1, 5)
    assert plan.good_bytes == CHUNK


def test_the_quick_one_gets_more_and_no_chunk_is_held_twice() -> None:
    plan = made(400)
    workers = {whole(plan, "quick"): 0.002, whole(plan, "slow"): 0.02}
    free_s = dict.fromkeys(workers, 0.0)
    fetched: dict[int, list[int]] = {worker: [] for worker in workers}
    while not plan.complete:
        worker = min(free_s, key=lambda each: free_s[each])
        part = plan.claim(worker, free_s[worker])
        if part is None:
            free_s[worker] += 1.0
            continue
        fetched[worker] += part
        for chunk in part:
            free_s[worker] += workers[worker]
            plan.arrived(worker, chunk, free_s[worker])
    quick, slow = fetched.values()
    assert sorted(quick + slow) == list(range(400))
    assert 6 < len(quick) / len(slow) < 14, "ten times as quick"


def test_the_source_is_asked_for_what_no_fellow_has() -> None:
    plan = made(8, own="m")
    source = whole(plan)
    friend = peer(plan, "x", 0, 1, 2, 3)
    assert plan.claim(source, 0.0) is not None
    taken = {chunk for each in plan._workers.values() for chunk in each.part}
    assert taken <= {4, 5, 6, 7}
    part = plan.claim(friend, 0.0)
    assert part is not None
    assert set(part) <= {0, 1, 2, 3}


def test_the_source_helps_out_when_the_fellows_are_too_slow() -> None:
    plan = made(100, own="m")
    source, friend = whole(plan), peer(plan, "x", *range(100))
    for now_s in range(2):
        fetch(plan, friend, float(4 * now_s), took_s=4.0)
    assert plan.claim(source, 8.0) is not None


def test_the_source_waits_for_no_fellow_that_gives_nothing_of_what_it_has() -> None:
    """Else one that is slower than its word would hold up all: it is broken off when the source is done."""
    plan = made(24, own="m")
    source, slow = whole(plan), peer(plan, "x", *range(24))
    part = plan.claim(slow, 0.0)
    assert part is not None
    assert plan.claim(source, 0.1) is None, "the fellow has all of it"
    now_s = 2 * GRACE_S
    while fetched := plan.claim(source, now_s):
        for chunk in fetched:
            plan.arrived(source, chunk, now_s)
    assert plan.missing_bytes == sum(CHUNK if chunk < 23 else 100 for chunk in part)
    assert plan.too_slow(now_s + 1.0) == [slow]


def test_the_source_waits_for_no_fellow_that_does_not_say_more() -> None:
    """It asks the fellow what it has now, and gets no answer."""
    plan = made(8, own="m")
    source, silent, gone = whole(plan), peer(plan, "x", 0, 1), peer(plan, "y", 0, 1)
    assert plan.claim(gone, 0.1) == range(2)
    plan.leave(gone, 0.2)
    while fetched := plan.claim(source, 0.3):
        for chunk in fetched:
            plan.arrived(source, chunk, 0.3)
    assert plan.missing_bytes == 2 * CHUNK, "a fellow has these, and should be asked"
    assert plan.num_known(silent) == 2
    while fetched := plan.claim(source, 2.0):
        for chunk in fetched:
            plan.arrived(source, chunk, 2.0)
    assert plan.complete


def test_the_cost_of_a_chunk_does_not_grow_with_their_number() -> None:
    def cost_s(num_chunks: int) -> float:
        plan = made(num_chunks)
        worker = whole(plan)
        part = plan.claim(worker, 0.0, is_alone=True)
        assert part == range(num_chunks)
        began_s = time.process_time()
        for chunk in part[:2000]:
            plan.arrived(worker, chunk, 0.1)
            assert not plan.complete
        return time.process_time() - began_s

    assert min(cost_s(2_000_000) for _ in range(3)) < 20 * min(cost_s(4000) for _ in range(3))


def test_newcomers_begin_at_different_places_and_meet_from_the_other_side() -> None:
    urls = ["k", "m", "x", "z"]
    firsts: dict[str, list[range]] = {}
    for own in urls:
        plan = made(40, own=own)
        source = whole(plan)
        for other in urls:
            if other != own:
                peer(plan, other)
        firsts[own] = []
        while len(firsts[own]) < 7:
            firsts[own].append(fetch(plan, source, 0.1, took_s=0.1))
    starts = [parts[0].start for parts in firsts.values()]
    assert starts == [0, 10, 20, 30]
    taken = [chunk for part in firsts["k"] for chunk in part]
    assert set(range(10)) <= set(taken), "the own share first"
    assert set(taken) - set(range(10)) <= set(range(20, 40)), "then from the end that its owner reaches last"


def test_one_who_is_alone_asks_for_all_in_a_row() -> None:
    plan = made(50, own="m")
    worker = whole(plan)
    assert plan.claim(worker, 0.0, is_alone=True) == range(50)
    for chunk in range(30):
        plan.arrived(worker, chunk, 0.1)
    for chunk in range(20):
        plan.mark_missing(chunk)
    plan.leave(worker, 0.1)
    worker = whole(plan)
    assert plan.claim(worker, 0.1, is_alone=True) == range(20)


def test_a_stalled_connection_is_broken_off_for_an_idle_one() -> None:
    plan = made(4)
    stalled, idle = whole(plan, "stalled"), whole(plan, "idle")
    plan.claim(stalled, 0.0)
    fetch(plan, idle, 0.0, took_s=0.01)
    while (part := plan.claim(idle, 0.01)) is not None:
        for chunk in part:
            plan.arrived(idle, chunk, 0.02)
    assert plan.too_slow(GRACE_S / 2) == []
    assert plan.too_slow(2 * GRACE_S) == [stalled]
    plan.leave(stalled, 2 * GRACE_S)
    assert plan.claim(idle, 2 * GRACE_S) is not None


def test_a_connection_whose_rate_fell_is_broken_off_though_it_still_delivers() -> None:
    plan = made(200)
    fallen, idle = whole(plan, "fallen"), whole(plan, "idle")
    fetch(plan, fallen, 0.0, took_s=0.01)
    part = plan.claim(fallen, 0.01)
    assert part is not None
    now_s = 0.01
    while (other := plan.claim(idle, now_s)) is not None:
        for chunk in other:
            now_s += 0.0001
            plan.arrived(idle, chunk, now_s)
    plan.arrived(fallen, part[0], 0.3)
    assert plan.too_slow(0.4) == []
    plan.arrived(fallen, part[1], 0.9)
    assert plan.too_slow(1.0) == [fallen]


def test_nobody_is_broken_off_for_one_who_has_not_got_the_chunks_or_is_slower() -> None:
    plan = made(8)
    stalled, helper = whole(plan, "stalled"), peer(plan, "helper", 7)
    plan.claim(stalled, 0.0)
    assert plan.too_slow(100.0) == []
    plan = made(64)
    first, second = whole(plan, "first"), whole(plan, "slow")
    fetch(plan, second, 0.0, took_s=40.0)
    fetch(plan, first, 0.0, took_s=0.4)
    assert plan.claim(first, 40.0) is not None
    assert plan.too_slow(41.0) == []
    assert helper != stalled


def test_those_that_have_only_parts_do_not_wait_for_each_other_for_ever() -> None:
    plan = made(8, own="m")
    friend = peer(plan, "x", 1)
    fetch(plan, friend, 0.0, took_s=0.1)
    assert plan.claim(friend, 0.1) is None
    assert not plan.is_stuck(0.1 + STUCK_S / 2)
    assert plan.is_stuck(0.2 + STUCK_S)
    plan.set_chunks(friend, 0b110, 0.2 + STUCK_S)
    assert not plan.is_stuck(0.3 + STUCK_S)
    source = whole(plan, now_s=0.3)
    assert not plan.is_stuck(100.0)
    plan.leave(source, 100.0)
    assert plan.is_stuck(100.0)


def test_nor_for_one_that_comes_again_and_again_and_has_nothing() -> None:
    plan = made(8, own="m")
    now_s = 0.0
    while now_s <= STUCK_S:
        assert not plan.is_stuck(now_s)
        friend = peer(plan, "x", now_s=now_s)
        now_s += STUCK_S / 3
        plan.leave(friend, now_s)
    assert plan.is_stuck(now_s)
    peer(plan, "y", now_s=now_s)
    assert not plan.is_stuck(now_s)


def test_the_next_lead_confirms_what_is_here() -> None:
    plan = ChunkPlan()
    assert not plan.complete
    assert not plan.adopt(manifest([1, 2, 3, 4]))
    worker = whole(plan)
    assert plan.claim(worker, 0.0) == range(4)
    for chunk in range(4):
        plan.arrived(worker, chunk, 0.1)
    plan.mark_missing(2)
    plan.leave(worker, 0.1)
    assert plan.adopt(manifest([1, 99, 3, 4]))
    assert list(plan.good()) == [0, 3]
    assert plan.good_bytes == CHUNK + 100
    plan.mark_missing(0)
    assert list(plan.good()) == [3]
    assert plan.claim(whole(plan), 0.1) == range(3)


def test_another_layout_starts_over() -> None:
    plan = ChunkPlan()
    plan.adopt(manifest([1, 2]))
    worker = whole(plan)
    plan.claim(worker, 0.0)
    plan.arrived(worker, 0, 0.1)
    plan.leave(worker, 0.1)
    assert not plan.adopt(manifest([1, 2], chunk_bytes=2 * CHUNK))
    assert plan.good_bytes == 0
    assert list(plan.good()) == []


@pytest.mark.parametrize("own", ["", "m"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_whatever_happens_every_chunk_comes_once_from_one_that_has_it(own: str, data: st.DataObject) -> None:
    num_chunks = data.draw(st.integers(1, 40))
    plan = made(num_chunks, own=own)
    has: dict[int, int] = {whole(plan): (1 << num_chunks) - 1}
    held: dict[int, list[int]] = {}
    good: set[int] = set()
    now_s = 0.0
    for _ in range(data.draw(st.integers(1, 60))):
        now_s += data.draw(st.floats(0, 1))
        match data.draw(st.sampled_from(["join", "told", "claim", "arrive", "leave"])):
            case "join" if len(has) < 6:
                has[peer(plan, data.draw(st.sampled_from("abxyz")), now_s=now_s)] = 0
            case "told":
                worker = data.draw(st.sampled_from(sorted(has)))
                if worker != 1:
                    has[worker] |= data.draw(st.integers(0, (1 << num_chunks) - 1))
                    plan.set_chunks(worker, has[worker], now_s)
            case "claim":
                worker = data.draw(st.sampled_from(sorted(has)))
                if worker not in held and (part := plan.claim(worker, now_s)) is not None:
                    held[worker] = list(part)
                    assert all(has[worker] >> chunk & 1 for chunk in part)
                    others = [chunk for each, chunks in held.items() if each != worker for chunk in chunks]
                    assert not set(part) & (good | set(others))
            case "arrive" if held:
                worker = data.draw(st.sampled_from(sorted(held)))
                chunk = held[worker].pop(0)
                plan.arrived(worker, chunk, now_s)
                good.add(chunk)
                if not held[worker]:
                    del held[worker]
            case "leave" if len(has) > 1:
                worker = data.draw(st.sampled_from(sorted(set(has) - {1})))
                plan.leave(worker, now_s)
                del has[worker]
                held.pop(worker, None)
    for worker in [each for each in has if each != 1]:
        plan.leave(worker, now_s)
    for chunk in held.get(1, []):
        plan.arrived(1, chunk, now_s)
        good.add(chunk)
    while not plan.complete:
        part = fetch(plan, 1, now_s, took_s=0.1)
        assert not good & set(part)
        good |= set(part)
    assert good == set(range(num_chunks))
