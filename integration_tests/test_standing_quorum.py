"""A standing quorum over the real wire: rounds without a request, a recall, and an absent lighthouse."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Final

import pytest

from tft_coord import ManagerClient, ManagerServer, Plan, RankRequest, Timeouts
from tft_coord.core.lineage import fold_lineage, initial_lineage
from tft_coord.core.standing import Ask, StandingQuorum, Word
from tft_coord.core.types import LossNotice, QuorumNews
from tft_coord.notifications import Notification
from tft_lighthouse import LighthouseServer

LATE: Final = timedelta(seconds=30)
TIMEOUTS: Final = Timeouts(heartbeat_timeout_ms=1_500, beat_interval_ms=100, lease_ms=20_000)


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Rank:
    """The only rank of a replica group, as far as rounds need it. The test acts as its process group."""

    def __init__(self, name: str, lighthouse: str) -> None:
        self.server = ManagerServer(name, lighthouse, "127.0.0.1", "127.0.0.1:0", "", 1, timeouts=TIMEOUTS)
        self.core = StandingQuorum(TIMEOUTS)
        self.num_asked = 0
        self.num_answers = 0  # answers to beats
        self.step, self.lineage, self.live = 0, initial_lineage("default"), False
        self.plan: Plan | None = None
        self.client = ManagerClient(
            self.server.address(),
            LATE,
            group_rank=0,
            timeouts=TIMEOUTS,
            listener=self._told,
            beat_number=lambda: self.core.beat(now_ms()),
        )

    def _told(self, news: Notification) -> None:
        match news:
            case QuorumNews():
                self.num_answers += news.beat > 0
                self.core.told(news)
            case LossNotice(key):
                self.core.broke(key)

    def begin(self) -> None:
        """Begin a round."""
        if not isinstance(self.core.next_round(now_ms()), Ask):
            return
        self.num_asked += 1
        self.core.asked(now_ms())
        held = self.plan.key if self.plan is not None else None
        request = RankRequest(
            step=self.step,
            lineage=self.lineage,
            live=self.live,
            held=held,
            init_sync=False,
            attempt=self.num_asked,
            lease_ms=TIMEOUTS.lease_ms,
        )
        answer = self.client.quorum(0, request, LATE)
        if isinstance(answer, Plan):
            self.plan = answer
        else:
            assert self.plan is not None
            self.plan = replace(self.plan, step=self.step, lineage=self.lineage)
        self.core.planned(self.plan, now_ms())
        self.step, self.lineage = self.plan.step, self.plan.lineage  # it recovers at once here

    def word(self) -> Word:
        """Return its word at the end of the round."""
        assert self.plan is not None
        participates = self.plan.participating_rank is not None
        return self.core.word(now_ms(), ok=True, lineage=self.lineage, participates=participates)

    def end(self, total: Sequence[int]) -> None:
        """End the round, with the sum of all words."""
        assert self.plan is not None
        vote = self.core.summed(total, self.lineage)
        assert vote.yes, vote.why
        self.core.decided(yes=True, stands=vote.stands)
        self.step += 1
        self.lineage = fold_lineage(self.lineage, self.plan.key, self.step)
        self.live = True

    def close(self) -> None:
        self.client.close()
        self.server.shutdown()


class Job:
    """Ranks that train together."""

    def __init__(self, threads: ThreadPoolExecutor, *ranks: Rank) -> None:
        self.threads, self.ranks = threads, list(ranks)

    def rounds(self, number: int, *, apart_s: float = 0.0) -> None:
        for _ in range(number):
            list(self.threads.map(Rank.begin, self.ranks))
            total = [sum(each) for each in zip(*(rank.word().values() for rank in self.ranks), strict=True)]
            for rank in self.ranks:
                rank.end(total)
            time.sleep(apart_s)

    @property
    def num_asked(self) -> list[int]:
        return [rank.num_asked for rank in self.ranks]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def lighthouse_at(bind: str) -> LighthouseServer:
    return LighthouseServer(bind, min_replicas=2, quorum_tick_ms=20, join_timeout_ms=10_000, heartbeat_timeout_ms=1_500)


def test_rounds_ask_nobody_until_a_newcomer_does(stack: ExitStack) -> None:
    lighthouse = stack.enter_context(lighthouse_at("127.0.0.1:0"))
    threads = stack.enter_context(ThreadPoolExecutor(3))
    ranks = [Rank(name, lighthouse.address()) for name in "ab"]
    for rank in ranks:
        stack.callback(rank.close)
    job = Job(threads, *ranks)
    job.rounds(3)
    assert job.num_asked == [1, 1]
    job.rounds(300, apart_s=0.005)
    assert job.num_asked == [1, 1]
    assert all(rank.num_answers > 5 for rank in ranks), "each beat is answered"

    newcomer = Rank("c", lighthouse.address())
    stack.callback(newcomer.close)
    joins = threads.submit(newcomer.begin)
    given_up_at = time.monotonic() + 20
    while job.num_asked == [1, 1] and time.monotonic() < given_up_at:
        job.rounds(1, apart_s=0.005)
        if not all(rank.core.state.value == "asks" for rank in ranks):
            continue
        list(threads.map(Rank.begin, ranks))  # the next round includes the newcomer
        break
    joins.result(20)
    assert {rank.plan.replica_ids for rank in (*ranks, newcomer) if rank.plan is not None} == {("a", "b", "c")}
    assert job.num_asked == [2, 2]


@pytest.mark.in_parts
def test_a_lighthouse_that_is_started_anew_costs_no_round(stack: ExitStack) -> None:
    lighthouse = lighthouse_at("127.0.0.1:0")
    address = lighthouse.address()
    threads = stack.enter_context(ThreadPoolExecutor(2))
    ranks = [Rank(name, address) for name in "ab"]
    for rank in ranks:
        stack.callback(rank.close)
    job = Job(threads, *ranks)
    job.rounds(20, apart_s=0.005)
    lighthouse.shutdown()
    job.rounds(100, apart_s=0.005)
    with lighthouse_at(address.removeprefix("http://")):
        answered = [rank.num_answers for rank in ranks]
        job.rounds(400, apart_s=0.005)
        assert all(rank.num_answers > before for rank, before in zip(ranks, answered, strict=True))
        assert job.num_asked == [1, 1]
