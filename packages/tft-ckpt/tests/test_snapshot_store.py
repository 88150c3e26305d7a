"""Who gets which state, and when memory is used again: without threads."""

from __future__ import annotations

import torch

from tft_ckpt.key import StateKey
from tft_ckpt.state.buffers import Buffer, BufferPool
from tft_ckpt.state.snapshot import Snapshot
from tft_ckpt.state.tree import Limits
from tft_ckpt.transfer.snapshot_store import Found, NotYet, Refused, SnapshotStore


def key(quorum_id: int, step: int, lineage: int = 0, nonce: int = 0) -> StateKey:
    return StateKey(quorum_id=quorum_id, nonce=nonce, step=step, lineage=lineage)


def put(store: SnapshotStore, at: StateKey, num_bytes: int = 4096) -> Snapshot:
    store.begin(at)
    snapshot = Snapshot.take(
        [torch.ones(num_bytes // 4)], key=at, chunk_bytes=4096, limits=Limits(), allocate=store.allocate
    )
    store.publish(snapshot)
    return snapshot


def test_an_empty_shelf_asks_for_patience() -> None:
    assert shelf_says(SnapshotStore(), key(1, 1)) == "NotYet"


def shelf_says(store: SnapshotStore, wanted: StateKey) -> str:
    return type(store.look_up(wanted)).__name__


def test_who_asks_gets_the_state_or_is_told_to_wait_or_to_go() -> None:
    store = SnapshotStore()
    snapshot = put(store, key(3, 5, lineage=9, nonce=1))
    assert store.look_up(key(3, 5, lineage=9, nonce=1)) == Found(snapshot)
    assert store.look_up(key(3, 6)) == NotYet()
    assert store.look_up(key(4, 2)) == NotYet()
    for gone in (key(3, 4), key(2, 8), key(3, 5, lineage=8, nonce=1), key(3, 5, lineage=9, nonce=2)):
        answer = store.look_up(gone)
        assert isinstance(answer, Refused)
        assert answer.offered == snapshot.key


def test_while_a_state_is_taken_its_readers_wait_and_older_ones_go() -> None:
    store = SnapshotStore()
    put(store, key(1, 1))
    store.begin(key(1, 2))
    assert shelf_says(store, key(1, 1)) == "Refused"
    assert shelf_says(store, key(1, 2)) == "NotYet"
    store.fail("a sentence")
    answer = store.look_up(key(1, 2))
    assert isinstance(answer, Refused)
    assert answer.offered == key(1, 2)
    assert "a sentence" in answer.sentence


def test_memory_is_used_again_when_nobody_reads() -> None:
    store = SnapshotStore()
    first = put(store, key(1, 1))
    second = put(store, key(1, 2))
    assert second.buffer is first.buffer


def test_memory_under_a_reader_is_left_alone() -> None:
    store = SnapshotStore()
    first = put(store, key(1, 1))
    assert store.lease(first)
    assert store.lease(first)
    second = put(store, key(1, 2))
    assert second.buffer is not first.buffer
    store.release(first)
    third = put(store, key(1, 3))
    assert third.buffer is second.buffer, "one reader is still there"
    store.release(first)
    assert put(store, key(1, 4)).buffer in (first.buffer, third.buffer), "both are free now"
    assert not store.lease(first), "taken down"


def test_a_state_that_is_still_read_can_be_had() -> None:
    store = SnapshotStore()
    first = put(store, key(1, 1))
    store.lease(first)
    second = put(store, key(1, 2))
    assert store.look_up(first.key) == Found(first)
    assert store.keys == {first.key, second.key}
    assert store.lease(first)
    store.release(first)
    store.release(first)
    assert shelf_says(store, first.key) == "Refused"
    assert store.keys == {second.key}


def test_a_state_of_the_same_name_takes_the_place_of_the_one_that_is_still_read() -> None:
    store = SnapshotStore()
    first = put(store, key(1, 1))
    store.lease(first)
    store.begin(key(1, 1))
    assert store.look_up(key(1, 1)) == NotYet()


def test_a_state_that_is_still_offered_keeps_its_memory_after_its_readers() -> None:
    store = SnapshotStore()
    first = put(store, key(1, 1))
    store.lease(first)
    store.release(first)
    assert store.look_up(first.key) == Found(first)
    assert store.allocate(4096) is not first.buffer


def test_readers_of_states_long_gone_are_sent_off() -> None:
    store = SnapshotStore()
    held = []
    for step in range(1, 4):
        held.append(put(store, key(1, step)))
        store.lease(held[-1])
    assert store.begin(key(1, 4)) == [held[0]]
    store.release(held[0])
    assert store.begin(key(1, 5)) == []


def test_a_cleared_shelf_keeps_no_memory() -> None:
    store = SnapshotStore()
    snapshot = put(store, key(1, 1))
    store.lease(snapshot)
    assert store.clear() == [snapshot]
    store.release(snapshot)
    assert store.allocate(4096) is not snapshot.buffer


def test_a_buffer_is_kept_only_where_it_fits() -> None:
    pool = BufferPool()
    kept = Buffer(32 << 20)
    pool.give(kept)
    assert pool.take(20 << 20) is kept
    pool.give(kept)
    small = pool.take(1 << 20)
    assert small is not kept, "a small state must not hold on to a large buffer"
    pool.give(small)
    pool.clear()
    assert pool.take(1 << 20) is not small
    assert Buffer(0).capacity_bytes == 1


def test_a_buffer_that_was_made_ready_is_the_next_states_memory() -> None:
    store, ready = SnapshotStore(), Buffer(4096)
    assert store.wants_memory(4096)
    store.keep(ready)
    assert not store.wants_memory(4096)
    assert put(store, key(1, 1)).buffer is ready
    assert not store.wants_memory(4096)  # what is on offer now is taken down for the next one
    store.keep(Buffer(4096))
    assert put(store, key(1, 2)).buffer is ready


def test_no_buffer_is_kept_once_the_shelf_was_cleared() -> None:
    store = SnapshotStore()
    store.clear()
    late = Buffer(4096)
    store.keep(late)
    assert not store.wants_memory(4096)
    assert store.allocate(4096) is not late


def test_a_buffer_is_touched_to_its_end_unless_nobody_wants_it_any_more() -> None:
    buffer = Buffer(100)
    buffer.tensor.fill_(1)
    buffer.touch(lambda: True)
    assert buffer.tensor.sum() == 100
    buffer.touch(lambda: False)
    assert buffer.tensor.sum() == 0


def test_room_is_made_for_a_state_without_a_name_unless_the_one_on_offer_is_read() -> None:
    store = SnapshotStore()
    first = put(store, key(1, 1))
    assert store.lease(first)
    store.retire_unread()
    assert store.look_up(key(1, 1)) == Found(first)
    store.release(first)
    store.retire_unread()
    answer = store.look_up(key(1, 1))
    assert isinstance(answer, Refused)
    assert "its memory was needed for the next state" in answer.sentence
    assert shelf_says(store, key(1, 2)) == "NotYet"
    assert store.allocate(4096) is first.buffer


def test_the_memory_of_a_state_that_was_never_put_up_is_used_again() -> None:
    store = SnapshotStore()
    buffer = store.allocate(4096)
    store.recycle(buffer)
    assert store.allocate(4096) is buffer
