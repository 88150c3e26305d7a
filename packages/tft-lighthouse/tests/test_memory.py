"""Nothing of a lighthouse grows with time: its core, its history, its counters and its metrics, in virtual time."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import sys
import time
from collections.abc import Iterator

import pytest

from tft_coord import Member, QuorumKey, Timeouts
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.types import Hello
from tft_coord.lighthouse import (
    JobState,
    JobStatus,
    LighthouseConfig,
    LighthouseCore,
    ReplicaState,
    ReplicaStatus,
    Spent,
    TorchftCore,
    TrainerReport,
    effects,
    events,
)
from tft_lighthouse import goodput
from tft_lighthouse.history import INCIDENTS_MOST
from tft_lighthouse.http.metrics import Metrics
from tft_lighthouse.journal import Journal
from tft_lighthouse.view import LighthouseView, as_json

HOUR_MS = 3_600_000
STARTED_MS = 1_700_000_000_000
JOBS, REPLICAS = 4, 25
KILL_EVERY_MS = 60_000


class Load:
    """A hundred replicas in four jobs, of which one dies every minute and returns under another id.

    Args:
        tick_ms: how often the clock is looked at.
        beat_ms: how often each replica beats.
        scrape_ms: how often the metrics and the status are read.
    """

    def __init__(self, *, tick_ms: int, beat_ms: int, scrape_ms: int) -> None:
        timeouts = Timeouts(quorum_tick_ms=tick_ms, beat_interval_ms=beat_ms, heartbeat_timeout_ms=3 * beat_ms)
        config = LighthouseConfig(timeouts=timeouts)
        nonces = itertools.count(1)
        self.now_ms = 0
        self.core = LighthouseCore(config, started_ms=STARTED_MS, cluster_id="c", nonces=lambda: next(nonces), now_ms=0)
        self.journal = Journal(
            self.core,
            TorchftCore(config, started_ms=STARTED_MS),
            now_ms=lambda: self.now_ms,
            wall_ms=lambda: STARTED_MS + self.now_ms,
        )
        self.metrics = Metrics(self.view, self.journal.counters, self.journal.goodput)
        self.journal.on_closed = self.metrics.closed
        self._tick_ms, self._beat_ms, self._scrape_ms = tick_ms, beat_ms, scrape_ms
        self._random = random.Random(1)
        self._streams = itertools.count(1)
        self._lives = itertools.count(1)
        self._requests = itertools.count(1)
        self._replicas: dict[int, tuple[str, str]] = {}  # stream -> job and id
        self._steps = dict.fromkeys((f"job {number}" for number in range(JOBS)), 0)
        self._due_ms: dict[str, int] = {}
        self.scraped_bytes = 0

    def view(self) -> LighthouseView:
        return LighthouseView(
            version="1",
            started_ms=STARTED_MS,
            now_ms=STARTED_MS + self.now_ms,
            cluster_id="c",
            is_ready=True,
            address="a:1",
            has_secret=True,
            min_replicas=1,
            heartbeat_timeout_ms=1,
            join_timeout_ms=1,
            stragglers="warn",
            jobs=self.core.status(self.now_ms),
        )

    def start(self) -> None:
        self.now_ms = 10_000
        for job in self._steps:
            for _ in range(REPLICAS):
                self._join(job)
        self._ask_all()

    def pass_ms(self, for_ms: int) -> None:
        for _ in range(for_ms // self._tick_ms):
            self.now_ms += self._tick_ms
            if self._is_due("beat", self._beat_ms):
                self._beat()
            if self._is_due("kill", KILL_EVERY_MS):
                self._kill()
            if self._is_due("scrape", self._scrape_ms):
                self.scraped_bytes = len(self.metrics.text())
                as_json(self.view())
            self._perform(self.core.tick(self.now_ms, STARTED_MS + self.now_ms))
            self._perform(self.core.look_at_waits(self.now_ms))
            self.journal.tick()

    def _is_due(self, what: str, every_ms: int) -> bool:
        if self.now_ms < self._due_ms.get(what, 0):
            return False
        self._due_ms[what] = self.now_ms + every_ms
        return True

    def _perform(self, decisions: list[effects.LighthouseEffect] | list[effects.TellWait | object]) -> None:
        for decision in decisions:
            self.journal.note(decision)

    def _give(self, event: events.LighthouseEvent) -> None:
        self._perform(self.core.handle(event, self.now_ms, STARTED_MS + self.now_ms))

    def _join(self, job: str) -> None:
        stream, name = next(self._streams), f"replica {next(self._lives)}:{self._random.getrandbits(64):016x}"
        self._replicas[stream] = (job, name)
        self._give(events.HelloReceived(stream, Hello(job, name, 1, f"{name}:1", ready=True, lease_ms=60_000)))

    def _beat(self) -> None:
        self._steps = {job: step + 1 for job, step in self._steps.items()}
        for stream, (job, _) in self._replicas.items():
            progress = Progress(self._steps[job], Phase.OWN, since_ms=10, excused=False, slowest_step_ms=600_000)
            self._give(events.BeatReceived(stream, 1, progress))
            self.journal.reported(stream, TrainerReport({Spent.COMMIT: self.now_ms, Spent.WAIT: self.now_ms // 9}))

    def _kill(self) -> None:
        """Kill a replica, let another one take its place, and let all of its job ask."""
        stream = self._random.choice(list(self._replicas))
        job, _ = self._replicas.pop(stream)
        if self._random.random() < 0.5:
            self._give(events.DeathReported(stream, "exit code 1"))
        self._give(events.StreamClosed(stream))
        self.now_ms += 1_000  # a broken stream is judged after a grace
        self._perform(self.core.tick(self.now_ms, STARTED_MS + self.now_ms))
        self._join(job)
        self._ask_all(job)

    def _ask_all(self, only: str | None = None) -> None:
        for stream, (job, name) in self._replicas.items():
            if only in (None, job):
                step = self._steps[job]
                member = Member(name, step=step, lineage=step, live=step > 0, lease_ms=60_000, address=f"{name}:1")
                quorum = self.core.quorum(job)
                held: QuorumKey | None = quorum.key if quorum is not None and name in quorum.replica_ids else None
                self._give(events.QuorumRequested(stream, next(self._requests), member, held))


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(goodput, "REPLICAS_MOST", 2 * JOBS * REPLICAS)  # the day fills it
    logger = logging.getLogger("tft_lighthouse")
    before, logger.level = logger.level, logging.CRITICAL
    yield
    logger.setLevel(before)


def blocks() -> int:
    """Return how many blocks of memory the interpreter holds."""
    gc.collect()
    return sys.getallocatedblocks()


def flat_over(load: Load, hours: int) -> None:
    """Let a day pass, the first part of which fills what is bounded."""
    load.start()
    while len(load.journal.history.incidents()) < INCIDENTS_MOST:
        load.pass_ms(HOUR_MS)
        assert load.now_ms < 12 * HOUR_MS, "the load makes too few incidents"
    load.pass_ms(HOUR_MS)
    before, scraped_bytes = blocks(), load.scraped_bytes
    load.pass_ms(hours * HOUR_MS - load.now_ms)
    after = blocks()
    assert load.journal.counters.jobs["job 0"]["losses"] > 10 * hours
    assert len(load.core.jobs) == JOBS
    # A loss that is still remembered, and the numbers in what is kept, vary by a little.
    assert after < 1.02 * before + 500, f"{before} blocks became {after}"
    assert 0 < load.scraped_bytes < 1.05 * scraped_bytes


@pytest.mark.timeout(600)  # it takes some 20 s of CPU
def test_a_day_of_a_hundred_replicas_leaves_nothing(quiet: None) -> None:
    flat_over(Load(tick_ms=10_000, beat_ms=60_000, scrape_ms=600_000), 24)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_a_day_at_the_usual_pace_leaves_nothing(quiet: None) -> None:
    flat_over(Load(tick_ms=100, beat_ms=1_000, scrape_ms=15_000), 24)


def test_metrics_of_a_thousand_replicas_take_a_fifth_of_a_second() -> None:
    replicas = tuple(
        ReplicaStatus(
            replica_id=f"replica_{number}:{number:08x}-0000-4000-8000-000000000000",
            state=ReplicaState.TRAINING,
            rank=number,
            step=1_000_000 + number,
            own_ms=300,
            heard_ms=500,
        )
        for number in range(1_000)
    )
    view = LighthouseView(
        version="1",
        started_ms=1,
        now_ms=2,
        cluster_id="c",
        is_ready=True,
        address="a:1",
        has_secret=True,
        min_replicas=1,
        heartbeat_timeout_ms=1,
        join_timeout_ms=1,
        stragglers="warn",
        jobs=(JobStatus(name="job", state=JobState.TRAINING, replicas=replicas),),
    )
    load = Load(tick_ms=1_000, beat_ms=1_000, scrape_ms=1_000)
    metrics = Metrics(lambda: view, load.journal.counters, load.journal.goodput)
    took_s = []
    for _ in range(5):
        began_s = time.thread_time()
        assert metrics.text().count(b"tft_replica_step{") == 1_000
        took_s.append(time.thread_time() - began_s)
    assert min(took_s) < 0.2
