"""The word of a round: what is sent, how it passes over a group's connections, and what else can come over them."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from tft_pg import (
    AbortedError,
    CollectiveTimeoutError,
    ConfigError,
    ConfigureError,
    ErrorSwallowingProcessGroupWrapper,
    ManagedProcessGroup,
    PeerDisconnectedError,
    ProcessGroup,
    ProcessGroupError,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    UnsupportedOperationError,
    WordExchange,
    WrappingProcessGroup,
    exchange_word_by_allreduce,
)
from tft_pg.backends import word_line, word_setup
from tft_pg.backends.attempt import Attempt
from tft_pg.backends.lifeline import Lifeline
from tft_pg.backends.word_line import WordLine
from tft_pg.backends.word_round import DIRECT_MOST, BadFrameError, WordRound, steps_of
from tft_pg.backends.word_setup import attach, detach
from tft_pg.errors import Where
from tft_pg.forwarding import forward
from tft_pg.ops import Collective
from tft_pg.testing import Bench, FakeAccelerator, Subject
from tft_pg.testing.wording import CHECKS

GUARD_S = 20.0
GUARD = timedelta(seconds=GUARD_S)
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33)


# --- what is sent --------------------------------------------------------------------------------------------------


class Network:
    """Ranks in one thread, whose frames come in an order of chance."""

    def __init__(self, size: int, rng: random.Random, *, direct_most: int, victim: int | None = None) -> None:
        self._rng = rng
        self._victim = victim  # ends at a moment of chance
        self.rounds = [
            WordRound(steps_of(rank, size, direct_most=direct_most), 3, (1, rank, -(1 << 62))) for rank in range(size)
        ]
        self.ended: set[int] = set()
        self._mail: dict[tuple[int, int], list[bytes]] = {}

    def run(self) -> set[int]:
        """Returns the ranks whose exchange has ended."""
        waiting = set(range(len(self.rounds)))
        unstarted = set(waiting)
        while True:
            if self._victim is not None and self._rng.random() < 1 / len(self.rounds):
                waiting.discard(self._victim)
            ready = [
                rank
                for rank in sorted(waiting)
                if rank in unstarted or not self.rounds[rank].missing or self._due(rank)
            ]
            if not ready:
                return self.ended
            rank = self._rng.choice(ready)
            round_ = self.rounds[rank]
            if rank in unstarted:
                unstarted.remove(rank)
                self._send(rank)
            elif round_.missing:
                sender = self._rng.choice(self._due(rank))
                assert round_.receive(sender, self._mail[sender, rank].pop(0))
            elif round_.advance():
                self._send(rank)
            else:
                waiting.discard(rank)
                self.ended.add(rank)

    def _send(self, rank: int) -> None:
        for other in self.rounds[rank].recipients:
            self._mail.setdefault((rank, other), []).append(self.rounds[rank].frame())

    def _due(self, rank: int) -> list[int]:
        return [sender for sender in sorted(self.rounds[rank].missing) if self._mail.get((sender, rank))]


@pytest.mark.parametrize("direct_most", [1, DIRECT_MOST, 1000])
@pytest.mark.parametrize("size", SIZES[1:])
def test_every_rank_comes_to_the_same_sums_in_whatever_order_frames_come(size: int, direct_most: int) -> None:
    for seed in range(20):
        network = Network(size, random.Random(seed), direct_most=direct_most)
        assert network.run() == set(range(size))
        assert {each.sums for each in network.rounds} == {(size, size * (size - 1) // 2, -size << 62)}


@pytest.mark.parametrize("direct_most", [1, 1000])
def test_who_ends_beside_a_rank_that_died_has_the_sum_of_all(direct_most: int) -> None:
    some_ended = some_did_not = False
    for seed in range(200):
        size = 2 + seed % 11
        network = Network(size, random.Random(seed), direct_most=direct_most, victim=seed % size)
        ended = network.run()
        assert {network.rounds[rank].sums[0] for rank in ended} <= {size}
        some_ended |= 0 < len(ended) < size
        some_did_not |= not ended
    assert some_ended
    assert some_did_not


def test_the_number_of_messages_grows_with_the_logarithm() -> None:
    messages = [sum(len(step.sends_to) for step in steps_of(rank, 1000)) for rank in range(1000)]
    assert max(messages) <= 11
    assert steps_of(0, 1) == ()
    assert [len(steps_of(rank, DIRECT_MOST)) for rank in range(DIRECT_MOST)] == [1] * DIRECT_MOST


def test_a_frame_that_is_not_due_is_told_by_its_head() -> None:
    due = WordRound(steps_of(0, 2), 7, (1, 2))

    def frame_of(rank: int, size: int, number: int, values: tuple[int, ...], direct_most: int = DIRECT_MOST) -> bytes:
        return WordRound(steps_of(rank, size, direct_most=direct_most), number, values).frame()

    for frame, words in (
        (b"\0" * 28, "an unknown frame"),
        (frame_of(1, 2, 8, (1, 2)), "round 8, but this rank is in round 7"),
        (frame_of(1, 2, 6, (1, 2)), "round 6"),
        (frame_of(1, 2, 7, (1, 2, 3)), "a word of 3 values, but this rank's has 2"),
        (struct.pack("!BBHQ", 0x57, 0, 0xFFFF, 7), "a word of 65535 values"),
        (frame_of(1, 2, 7, (1, 2), direct_most=1), "step 2 of the word, but this rank is at step 0"),
    ):
        with pytest.raises(BadFrameError, match=words):
            due.receive(1, frame)
    assert due.missing == {1}
    assert due.due_bytes(1) == len(frame_of(1, 2, 7, (5, -5)))
    assert due.receive(1, frame_of(1, 2, 7, (5, -5)))
    assert not due.advance()
    assert due.sums == (6, -3)


def test_a_sum_that_needs_more_bits_on_its_way_comes_in_a_longer_frame() -> None:
    largest = (1 << 63) - 1
    rounds = [WordRound(steps_of(rank, 4, direct_most=1), 1, (largest, -largest)) for rank in (0, 1)]
    frames = [each.frame() for each in rounds]
    assert rounds[0].receive(1, frames[1])
    assert rounds[1].receive(0, frames[0])
    assert all(each.advance() for each in rounds)
    other = WordRound(steps_of(2, 4, direct_most=1), 1, (-largest, largest))
    assert other.receive(3, WordRound(steps_of(3, 4, direct_most=1), 1, (-largest, 5)).frame())
    assert other.advance()
    frame = rounds[0].frame()
    assert len(frame) > len(frames[0])
    for at in range(len(frame) - 1):  # never more is asked for than what is left
        assert 0 < other.due_bytes(0) <= len(frame) - at
        assert not other.receive(0, frame[at : at + 1])
    assert other.due_bytes(0) == 1
    assert other.receive(0, frame[-1:])
    assert other.sums == (0, largest + 5 - 2 * largest)


def test_an_invitation_travels_behind_gloos_record() -> None:
    for invitation in (b"", b"x", b"00ff 80 127.0.0.1 replica", b"y" * 200):
        published = attach(b"gloo's record", invitation)
        assert detach(published) == (b"gloo's record", invitation)
        assert (len(published) - len(b"gloo's record")) % 8 == 0
    for foreign in (b"", b"short", b"gloo's record" * 20, b"tft-pg" + b"\xff\xff"):
        assert detach(foreign) == (foreign, None)


# --- over connections ------------------------------------------------------------------------------------------------


def unchanged(error: ProcessGroupError) -> ProcessGroupError:
    return error


class Group:
    """Ranks of this process that are connected; each word by each of them."""

    def __init__(self, size: int, *, direct_most: int = DIRECT_MOST) -> None:
        self.lifelines = [Lifeline(rank, size, "127.0.0.1", f"replica_{rank}") for rank in range(size)]
        records = [line.record() for line in self.lifelines]
        with Attempt(Where(0, size), GUARD) as attempt:
            for line in self.lifelines:
                line.connect_lower(records, attempt)
            for line in self.lifelines:
                line.accept_callers(attempt)
        self.lines = [
            WordLine(line, Where(rank, size), direct_most=direct_most) for rank, line in enumerate(self.lifelines)
        ]

    def start(self, rank: int, number: int, words: Sequence[int] = (1,), limit: timedelta = GUARD) -> WordExchange:
        return self.lines[rank].start(tuple(words), round_number=number, timeout=limit, fail=unchanged)

    def send(self, rank: int, to: int, data: bytes) -> None:
        self.lifelines[rank]._peers[to].sendall(data)

    def close(self) -> None:
        for line in self.lifelines:
            line.end()


@pytest.fixture
def group_of() -> Iterator[Callable[..., Group]]:
    made: list[Group] = []

    def make(size: int, **settings: Any) -> Group:
        made.append(Group(size, **settings))
        return made[-1]

    yield make
    for group in made:
        group.close()


def frame_of(rank: int, size: int, number: int, words: Sequence[int] = (1,)) -> bytes:
    return WordRound(steps_of(rank, size), number, tuple(words)).frame()


@pytest.mark.parametrize("direct_most", [1, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 17])
def test_sums_of_every_size_each_way(size: int, direct_most: int, group_of: Callable[..., Group]) -> None:
    group = group_of(size, direct_most=direct_most)
    found: dict[tuple[int, int], tuple[int, ...]] = {}

    def act(rank: int) -> None:
        for number in range(20):
            found[rank, number] = group.start(rank, number, (1, rank, number)).wait()

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
    ranks = size * (size - 1) // 2
    assert found == {(rank, number): (size, ranks, size * number) for rank in range(size) for number in range(20)}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "sent an unknown frame"),
        (frame_of(1, 2, 6), "sent the word of round 6, but this rank is in round 7"),
        (frame_of(1, 2, 8), "sent the word of round 8"),
        (frame_of(1, 2, 7, (1, 2)), "sent a word of 2 values"),
        (struct.pack("!BBHQ", 0x57, 0, 0xFFFF, 7), "sent a word of 65535 values"),
    ],
)
def test_what_is_no_word_of_this_round_names_its_sender(
    data: bytes, words: str, group_of: Callable[..., Group]
) -> None:
    group = group_of(2)
    exchange = group.start(0, 7)
    group.send(1, 0, data)
    with pytest.raises(PeerDisconnectedError, match=words) as caught:
        exchange.wait()
    assert "rank 1 (replica replica_1)" in str(caught.value)
    assert caught.value.rank == 1
    with pytest.raises(PeerDisconnectedError, match="the word of round 7 failed"):
        group.start(0, 8)


def test_a_frame_may_come_in_pieces(group_of: Callable[..., Group]) -> None:
    group = group_of(2)
    frame = frame_of(1, 2, 1, (5, 6))
    exchange = group.start(0, 1, (1, 1))
    sender = threading.Thread(
        target=lambda: [(group.send(1, 0, frame[at : at + 1]), time.sleep(0.0005)) for at in range(len(frame))]
    )
    sender.start()
    assert exchange.wait() == (6, 7)
    assert exchange.wait() == (6, 7)
    sender.join()


def test_a_rank_that_ends_in_the_middle_of_its_word_is_named(group_of: Callable[..., Group]) -> None:
    group = group_of(3)
    exchange = group.start(0, 1)
    group.send(1, 0, frame_of(1, 3, 1)[:5])
    group.lifelines[1].end()
    with pytest.raises(
        PeerDisconnectedError, match=r"the connection to rank 1 \(replica replica_1\) ended before its word arrived"
    ) as caught:
        exchange.wait()
    assert caught.value.rank == 1


def test_a_rank_that_has_said_its_word_may_go(group_of: Callable[..., Group]) -> None:
    group = group_of(3)
    exchanges = [group.start(rank, 1) for rank in range(3)]
    assert exchanges[0].wait() == (3,)
    group.lifelines[0].end()
    assert exchanges[1].wait() == (3,)
    group.lifelines[1].end()
    assert exchanges[2].wait() == (3,)


def test_a_rank_that_ends_leaves_a_moment_for_the_words_under_way(group_of: Callable[..., Group]) -> None:
    group = group_of(3)
    exchange = group.start(0, 1)
    group.start(1, 1)
    group.lifelines[1].end()
    with pytest.raises(PeerDisconnectedError, match=r"rank 1 \(.*\) ended, and the word of rank 2 did not arrive"):
        exchange.wait()


def test_a_word_that_starts_when_a_rank_has_ended_can_not_end_well(group_of: Callable[..., Group]) -> None:
    """That rank got no word of this one, so it has not ended its exchange, though its own word is here."""
    group = group_of(3)
    for rank in (1, 2):
        group.start(rank, 1)
    group.lifelines[1].end()
    with pytest.raises(PeerDisconnectedError, match=r"the connection to rank 1 \(.*\) ended before the exchange"):
        group.start(0, 1)


def test_the_deadline_names_who_is_late(group_of: Callable[..., Group]) -> None:
    group = group_of(4)
    exchange = group.start(0, 1, limit=timedelta(milliseconds=30))
    group.start(2, 1)
    with pytest.raises(CollectiveTimeoutError, match=r"word of ranks 1, 3 for round 1 did not arrive within 0\.03 s"):
        exchange.wait()
    with pytest.raises(CollectiveTimeoutError):
        exchange.wait()


def test_a_failure_spreads_to_ranks_that_wait_for_others(group_of: Callable[..., Group]) -> None:
    group = group_of(9, direct_most=1)
    errors: list[BaseException] = []

    def act(rank: int) -> None:
        try:
            group.start(rank, 1).wait()
        except PeerDisconnectedError as error:
            errors.append(error)

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(9) if rank != 5]
    for thread in threads:
        thread.start()
    begun_s = time.monotonic()
    group.lifelines[5].end()
    for thread in threads:
        thread.join(GUARD_S)
    assert len(errors) == 8
    assert time.monotonic() - begun_s < GUARD_S / 4


def test_an_end_from_another_thread_wakes_who_waits_and_closes_all(group_of: Callable[..., Group]) -> None:
    group = group_of(3)
    exchange = group.start(0, 1)
    errors: list[BaseException] = []
    entered = threading.Event()

    def wait() -> None:
        entered.set()
        try:
            exchange.wait()
        except PeerDisconnectedError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert entered.wait(GUARD_S)
    group.lifelines[0].end("for a test")
    waiting.join(GUARD_S)
    assert "for a test" in str(errors[0])
    assert [peer.fileno() for peer in group.lifelines[0]._peers.values()] == [-1, -1]
    with pytest.raises(PeerDisconnectedError, match="for a test"):
        group.start(0, 2)


def test_a_peer_whose_machine_acknowledges_nothing_is_named(
    group_of: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(2)
    monkeypatch.setattr(word_line, "_LOOK_S", 0.01)
    exchange = group.start(0, 1, limit=timedelta(milliseconds=50))
    with pytest.raises(CollectiveTimeoutError):  # everything was acknowledged
        exchange.wait()
    group = group_of(2)
    monkeypatch.setattr(word_line, "_RETRANSMITS_MAX", 0)
    with pytest.raises(PeerDisconnectedError, match=r"rank 1 .* is unreachable: no acknowledgement") as caught:
        group.start(0, 1).wait()
    assert list(caught.value.unreached) == [1]


def test_a_peer_that_reads_nothing_is_no_wait(group_of: Callable[..., Group]) -> None:
    group = group_of(2)
    connection = group.lifelines[0]._peers[1]
    with suppress(BlockingIOError):
        while True:
            connection.send(b"\0" * (1 << 16))
    with pytest.raises(PeerDisconnectedError, match="does not read, so its buffers are full"):
        group.start(0, 1)


def test_a_round_comes_once_and_after_the_one_before(group_of: Callable[..., Group]) -> None:
    group = group_of(1)
    assert group.start(0, 5).wait() == (1,)
    for number in (5, 4):
        with pytest.raises(ConfigError, match=f"round_number is {number}, but the last one was 5"):
            group.start(0, number)
    assert group.start(0, 6).wait() == (1,)
    pair = group_of(2)
    exchange = pair.start(0, 1)
    with pytest.raises(ConfigError, match="round 2 was called while round 1 is still running"):
        pair.start(0, 2)
    assert pair.start(1, 1).wait() == exchange.wait() == (2,)
    assert [exchange.wait() for exchange in [pair.start(rank, 2) for rank in range(2)]] == [(2,), (2,)]


# --- the last word of a rank that leaves -----------------------------------------------------------------------------


def test_a_leaver_stays_until_all_others_have_gone_on(group_of: Callable[..., Group]) -> None:
    group = group_of(3)
    for exchange in [group.start(rank, 1) for rank in range(3)]:
        exchange.wait()
    left: list[bool] = []
    leaver = threading.Thread(target=lambda: left.append(group.lines[0].linger(GUARD)))
    leaver.start()
    group.lifelines[1].end()  # it configures its group again
    leaver.join(0.05)
    assert leaver.is_alive()
    group.send(2, 0, frame_of(2, 3, 2))  # it is in the next round
    leaver.join(GUARD_S)
    assert left == [True]


def test_ranks_that_leave_together_do_not_wait_for_each_other(group_of: Callable[..., Group]) -> None:
    group = group_of(3)
    for exchange in [group.start(rank, 1) for rank in range(3)]:
        exchange.wait()
    left: list[bool] = []
    leavers = [threading.Thread(target=lambda line=line: left.append(line.linger(GUARD))) for line in group.lines]
    for leaver in leavers:
        leaver.start()
    for leaver in leavers:
        leaver.join(GUARD_S)
    assert left == [True] * 3


def test_the_last_word_reaches_one_that_reads_it_late(group_of: Callable[..., Group]) -> None:
    """It finds the byte of whoever lingers behind that word, and fails in the next round."""
    group = group_of(2)
    last = [group.start(rank, 1) for rank in range(2)]
    assert last[0].wait() == (2,)
    leaver = threading.Thread(target=lambda: group.lines[0].linger(timedelta(seconds=0.2)))
    leaver.start()
    leaver.join(GUARD_S)
    assert last[1].wait() == (2,)
    later = group.start(1, 2)
    group.lifelines[0].end()
    with pytest.raises(PeerDisconnectedError):
        later.wait()


def test_a_leaver_does_not_stay_for_ever(group_of: Callable[..., Group]) -> None:
    group = group_of(2)
    assert not group.lines[0].linger(timedelta(milliseconds=20))
    group.lifelines[0].end()
    assert group.lines[0].linger(GUARD)
    group = group_of(2)
    stopped: list[bool] = []
    leaver = threading.Thread(target=lambda: stopped.append(group.lines[0].linger(GUARD)))
    leaver.start()
    group.lifelines[0].end()
    leaver.join(GUARD_S)
    assert not leaver.is_alive()


# --- groups ----------------------------------------------------------------------------------------------------------


class ByAllreduce(WrappingProcessGroup):
    """A group as another package may have it: collectives, and nothing that knows of words."""

    exchange_word = ProcessGroup.exchange_word
    linger = ProcessGroup.linger

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Any) -> Any:
        return forward(self.parent, collective, args, kwargs)


def by_allreduce() -> ProcessGroup:
    return ByAllreduce(ProcessGroupGloo())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_group_without_connections_for_words_has_words_too(check: Callable[[Subject], None]) -> None:
    check(Subject(by_allreduce))


def test_large_groups_of_gloo_have_words() -> None:
    sums, _, deaths = CHECKS[0], CHECKS[1], CHECKS[9]
    assert deaths.__name__ == "all_or_an_error_wherever_a_rank_dies"
    for check in (sums, deaths):
        check(Subject(ProcessGroupGloo, (4, 8)))


def test_a_torch_group_that_swallows_an_operation_gives_no_sum() -> None:
    with Bench(ProcessGroupGloo, timeout=GUARD) as bench:
        groups = bench.configured(2)
        swallowing = ErrorSwallowingProcessGroupWrapper(groups[0])
        swallowing.report_error(RuntimeError("from before"))
        with pytest.raises(PeerDisconnectedError, match="1 of 2 ranks were summed"):
            exchange_word_by_allreduce(swallowing, [1], round_number=1, timeout=GUARD).wait()


def test_a_swallowing_group_tells_of_a_word_that_failed_and_has_one_after_an_error() -> None:
    with Bench(lambda: ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo()), timeout=GUARD) as bench:
        groups = bench.configured(2)
        for group in groups:
            assert isinstance(group, ErrorSwallowingProcessGroupWrapper)
            group.report_error(RuntimeError("this rank's step failed"))
        found = bench.all(groups, lambda rank, group: group.exchange_word([0], round_number=1, timeout=GUARD).wait())
        assert found == [(0,), (0,)]
        bench.configure(groups)
        groups[1].abort()
        with pytest.raises(PeerDisconnectedError):
            groups[0].exchange_word([1], round_number=1, timeout=GUARD).wait()
        assert isinstance(groups[0].error(), PeerDisconnectedError)  # type: ignore[attr-defined]


def test_a_managed_group_leaves_words_to_its_manager() -> None:
    group = ManagedProcessGroup(None)  # type: ignore[arg-type]
    for act in (lambda: group.exchange_word([1], round_number=1, timeout=GUARD), group.linger):
        with pytest.raises(UnsupportedOperationError, match="its Manager does that"):
            act()


def test_a_failed_word_is_known_to_the_group_and_names_the_replica() -> None:
    with Bench(ProcessGroupGloo, timeout=GUARD) as bench:
        groups = bench.configured(2)
        exchange = groups[0].exchange_word([1], round_number=3, timeout=GUARD)
        groups[1].abort()
        with pytest.raises(
            PeerDisconnectedError, match=r"quorum 1.* in round 3: the connection to rank 1 \(replica replica_1\)"
        ):
            exchange.wait()
        assert isinstance(groups[0].errored(), PeerDisconnectedError)


def test_a_group_with_a_foreign_gloo_in_it_uses_an_allreduce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_setup, "attach", lambda record, invitation: record)
    with Bench(ProcessGroupGloo, timeout=GUARD) as bench:
        groups = bench.configured(3)
        for number in range(3):
            found = bench.all(
                groups,
                lambda rank, group, number=number: group.exchange_word(  # type: ignore[misc]
                    [rank, 1], round_number=number, timeout=GUARD
                ).wait(),
            )
            assert found == [(3, 3)] * 3
        assert all(group._live.words is None for group in groups)  # type: ignore[attr-defined]


def test_a_group_whose_data_connections_end_still_has_the_words_that_need_nobody_who_is_gone() -> None:
    with Bench(ProcessGroupGloo, timeout=GUARD) as bench:
        groups = bench.configured(3)
        exchanges = [group.exchange_word([1], round_number=1, timeout=GUARD) for group in groups]
        assert exchanges[0].wait() == (3,)
        groups[0].shutdown()
        with pytest.raises(PeerDisconnectedError):  # the watch has ended all of Gloo's connections
            groups[1].allreduce([torch.ones(1)]).wait()
        assert [exchange.wait() for exchange in exchanges[1:]] == [(3,), (3,)]


def test_over_a_device_a_peer_that_leaves_after_its_word_ends_no_word() -> None:
    with Bench(lambda: ProcessGroupNCCL(backend=FakeAccelerator()), timeout=GUARD) as bench:
        groups = bench.configured(3)
        exchanges = [group.exchange_word([1], round_number=1, timeout=GUARD) for group in groups]
        assert exchanges[0].wait() == (3,)
        groups[0].shutdown()
        threading.Event().wait(0.1)  # the others' watches have heard of it
        assert [exchange.wait() for exchange in exchanges[1:]] == [(3,), (3,)]
        errors = bench.all(groups[1:], lambda rank, group: until_errored(group))
        assert all(isinstance(error, ProcessGroupError) for error in errors)


def until_errored(group: ProcessGroup) -> BaseException:
    """What a reduction says as soon as the group has noticed that a peer left."""
    for _ in range(int(GUARD_S / 0.01)):
        try:
            group.allreduce([torch.ones(1)]).wait(GUARD)
        except ProcessGroupError as error:
            return error
        threading.Event().wait(0.01)
    raise AssertionError("the group works on without a peer")


def test_an_address_where_nobody_can_listen_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigureError, match="can't listen on 192"):
        Lifeline(0, 2, "192.0.2.7")


def test_an_aborted_word_is_aborted_in_a_group_over_a_device() -> None:
    with Bench(lambda: ProcessGroupNCCL(backend=FakeAccelerator()), timeout=GUARD) as bench:
        groups = bench.configured(2)
        exchange = groups[0].exchange_word([1], round_number=1, timeout=GUARD)
        waiting = bench.start(exchange.wait)
        groups[0].abort()
        assert isinstance(waiting().error, AbortedError)
        groups[0].linger()  # of a group that is gone: returns at once


def test_words_wait_for_no_look_of_a_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are numeric, so that a configure asks nobody for them."""
    asked: list[object] = []
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, *rest: Any, **more: Any) -> Any:
        if host not in (None, "127.0.0.1"):
            asked.append(host)
        return real(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with Bench(ProcessGroupGloo, timeout=GUARD) as bench:
        groups = bench.configured(2)
        bench.all(groups, partial(lambda rank, group: group.exchange_word([1], round_number=1, timeout=GUARD).wait()))
    assert asked == []
