"""What an operator is told of a job: its state, its replicas, and what it waits for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tft_coord.compat.rule import TorchftCore
from tft_coord.core import events
from tft_coord.core.lighthouse import LighthouseConfig, LighthouseCore
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.status import JobState, JobStatus, ReplicaState, ReplicaStatus
from tft_coord.core.types import Hello, Member, QuorumKey
from tft_coord.testing.snapshots import frozen
from tft_coord.timeouts import Timeouts

NAMES = "abcd"


class Job:
    """A lighthouse with one job, whose replicas are letters."""

    def __init__(self, *, min_replicas: int = 1) -> None:
        config = LighthouseConfig(min_replicas=min_replicas, timeouts=Timeouts())
        nonces = itertools.count(1)
        self.core = LighthouseCore(config, started_ms=1_000, cluster_id="c", nonces=lambda: next(nonces), now_ms=0)
        self.now_ms = 0
        self.held: dict[str, QuorumKey | None] = {}
        self.requests: dict[str, int] = {}

    def give(self, event: events.LighthouseEvent) -> None:
        self.core.handle(event, self.now_ms, 1_000 + self.now_ms)
        quorum = self.core.quorum("job")
        if quorum is not None:
            self.held |= dict.fromkeys(quorum.replica_ids, quorum.key)

    def pass_ms(self, ms: int, *beating: str) -> None:
        for _ in range(ms // 100):
            self.now_ms += 100
            for name in beating:
                self.give(events.BeatReceived(self.stream(name)))
            self.core.tick(self.now_ms, 1_000 + self.now_ms)

    def stream(self, name: str) -> int:
        return NAMES.index(name) + 1

    def hello(self, name: str, pid: int = 0, replaces: str = "") -> None:
        hello = Hello("job", name, session=1, address=f"{name}:1", ready=True, pid=pid, replaces=replaces)
        self.give(events.HelloReceived(self.stream(name), hello))

    def ask(self, name: str, step: int) -> None:
        self.requests[name] = self.requests.get(name, 0) + 1
        member = Member(name, address=f"{name}:1", step=step, lineage=step, live=step > 0, init_sync=False)
        self.give(events.QuorumRequested(self.stream(name), self.requests[name], member, self.held.get(name)))

    def beat(self, name: str, step: int, phase: Phase, since_ms: int = 0, own_ms: int = 0) -> None:
        progress = Progress(step, phase, since_ms, own_ms=own_ms)
        self.give(events.BeatReceived(self.stream(name), progress=progress))

    def trains(self, *names: str, step: int = 5) -> None:
        self.pass_ms(400)
        for name in names:
            self.hello(name, pid=100 + self.stream(name))
        for name in names:
            self.ask(name, step)
        assert self.status.quorum is not None
        assert self.status.quorum.replica_ids == names

    @property
    def status(self) -> JobStatus:
        (status,) = self.core.status(self.now_ms)
        return status

    def replica(self, name: str) -> ReplicaStatus:
        (found,) = (each for each in self.status.replicas if each.replica_id == name)
        return found

    @property
    def states(self) -> dict[str, str]:
        return {each.replica_id: each.state.value for each in self.status.replicas}


def test_a_job_that_trains() -> None:
    job = Job()
    job.trains("a", "b")
    job.now_ms += 100
    job.beat("a", 7, Phase.OWN, since_ms=40, own_ms=300)
    job.beat("b", 7, Phase.REDUCING, since_ms=10)
    job.now_ms += 250
    status = job.status
    assert (status.name, status.state, status.step, status.is_torchft) == ("job", JobState.TRAINING, 7, False)
    assert (status.quorum_age_ms, status.broken, status.ended) == (350, None, None)
    a = job.replica("a")
    assert (a.state, a.rank, a.address, a.pid, a.session) == (ReplicaState.TRAINING, 0, "a:1", 101, 1)
    assert (a.step, a.phase, a.phase_ms, a.own_ms, a.heard_ms) == (7, Phase.OWN, 290, 300, 250)
    assert status.wait is not None, "b waits for a, inside the step"
    assert status.wait.lasted_ms == 260
    assert "waits for a at a:1 (step 7, busy with its own part of the step for 0 s)" in status.wait.sentence


def test_what_is_waited_for_and_since_when() -> None:
    job = Job(min_replicas=2)
    job.pass_ms(400)
    job.hello("a")
    assert job.status.state is JobState.STARTING
    assert job.states == {"a": "joining"}
    job.ask("a", 0)
    job.pass_ms(3_000, "a")
    assert job.status.state is JobState.WAITING
    assert job.states == {"a": "waiting"}
    assert job.status.wait is not None
    assert job.status.wait.lasted_ms == 3_000
    assert job.status.wait.sentence.startswith("1 of min_replicas 2 have asked; no other replica is known")


def test_lost_left_finished_and_stopped_read_differently() -> None:
    job = Job()
    job.trains("a", "b", "c", "d")
    job.give(events.DeathReported(job.stream("a"), "exit code 1"))
    job.give(events.LeaveReceived(job.stream("b"), "it is drained", 0))
    job.give(events.LeaveReceived(job.stream("c"), "its training is over", 0, finished_step=9))
    job.now_ms += 500
    assert job.states == {"a": "lost", "b": "left", "c": "finished", "d": "training"}
    assert (job.replica("a").reason, job.replica("a").gone_ms) == ("its manager server reports: exit code 1", 500)
    assert job.replica("b").reason == "it is drained"
    assert job.status.broken == "a was lost"
    job.give(events.DeathReported(job.stream("d"), "exit code 1"))
    assert job.status.state is JobState.ENDED
    assert job.status.ended is not None
    assert job.status.ended.step == 9


def test_a_job_whose_members_are_all_lost_has_stopped() -> None:
    job = Job()
    job.trains("a")
    job.give(events.DeathReported(job.stream("a"), "exit code 1"))
    assert job.status.state is JobState.STOPPED


def test_a_newcomer_heals_until_its_beat_says_that_it_has() -> None:
    job = Job()
    job.trains("a", "b")
    job.hello("c")
    for name, step in (("c", 0), ("a", 6), ("b", 6)):
        job.ask(name, step)
    assert job.states == {"a": "training", "b": "training", "c": "healing"}
    job.beat("c", 7, Phase.OUTSIDE)
    assert job.states["c"] == "training"


def test_left_out_and_kept_out_read_differently() -> None:
    job = Job()
    job.trains("a", "b")
    for name in "cd":
        job.hello(name)
    (known,) = job.core._jobs.values()
    known.stragglers.left_out = frozenset({"a", "c"})
    known._exclusions = replace(known._exclusions, out=frozenset({"d"}))
    assert job.states == {"a": "training", "b": "training", "c": "left_out", "d": "kept_out"}


def test_a_member_that_another_one_names_after_a_restart_is_unheard() -> None:
    job = Job()
    job.trains("a", "b")
    before = job.core.quorum("job")
    again = Job()
    again.give(events.HelloReceived(1, Hello("job", "a", session=1, address="a:1", held=job.held["a"], ready=True)))
    again.give(events.QuorumReported(1, before))
    assert again.states == {"a": "training", "b": "unheard"}
    assert again.replica("b").heard_ms is None


def test_to_ask_changes_nothing() -> None:
    job = Job(min_replicas=2)
    job.trains("a", "b")
    job.hello("c")
    job.ask("a", 6)
    job.pass_ms(2_500, "a", "b", "c")
    before = frozen(job.core)
    assert job.core.status(job.now_ms) == job.core.status(job.now_ms)
    assert frozen(job.core) == before


@pytest.mark.parametrize("silent_ms", [4_999, 5_000])
def test_a_job_of_torchft(silent_ms: int) -> None:
    core = TorchftCore(LighthouseConfig(min_replicas=2), started_ms=1_000)
    assert core.status("default", 0) is None
    core.handle(events.UnaryQuorumRequested(1, Member("a", address="a:1", step=3)), 0, 0)
    waiting = core.status("default", 2_500)
    assert waiting is not None
    assert (waiting.state, waiting.is_torchft) == (JobState.WAITING, True)
    assert waiting.wait is not None
    assert (waiting.wait.sentence, waiting.wait.lasted_ms) == ("1 of min_replicas 2 have asked", 2_500)
    core.handle(events.UnaryQuorumRequested(2, Member("b", address="b:1", step=4)), 2_500, 0)
    core.handle(events.HeartbeatReceived("a"), 2_500, 0)
    core.handle(events.HeartbeatReceived("b"), 2_500 + silent_ms, 0)
    status = core.status("default", 2_500 + silent_ms)
    assert status is not None
    assert (status.step, status.quorum_age_ms, status.wait) == (4, silent_ms, None)
    a, b = status.replicas
    assert (b.state, b.rank, b.address, b.step, b.heard_ms) == (ReplicaState.TRAINING, 1, "b:1", 4, 0)
    lost = silent_ms >= 5_000
    assert (a.state is ReplicaState.LOST, bool(a.reason)) == (lost, lost)
