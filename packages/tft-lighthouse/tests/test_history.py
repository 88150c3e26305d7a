"""Incidents as records: which there are, what their phases are, and that they are bounded."""

from __future__ import annotations

import itertools
import logging

import pytest

from tft_coord import Member, QuorumKey, Timeouts
from tft_coord.core.types import Hello
from tft_coord.lighthouse import (
    JobEnded,
    LighthouseConfig,
    LighthouseCore,
    Quorum,
    QuorumFormed,
    ReplicaLost,
    TorchftCore,
    WaitNoticed,
    events,
)
from tft_lighthouse import history
from tft_lighthouse.history import History, Incident, IncidentKind, Phase
from tft_lighthouse.journal import Journal

NAMES = "abcdefgh"


class Job:
    """A lighthouse with a journal and one job, whose replicas are letters."""

    def __init__(self) -> None:
        nonces = itertools.count(1)
        config = LighthouseConfig(timeouts=Timeouts())
        self.core = LighthouseCore(config, started_ms=1_000, cluster_id="c", nonces=lambda: next(nonces), now_ms=0)
        self.now_ms = 0
        self.journal = Journal(
            self.core, TorchftCore(config, started_ms=1_000), now_ms=lambda: self.now_ms, wall_ms=lambda: self.now_ms
        )
        self.held: dict[str, QuorumKey | None] = {}
        self.requests: dict[str, int] = {}

    def give(self, event: events.LighthouseEvent) -> None:
        for decision in self.core.handle(event, self.now_ms, 1_000 + self.now_ms):
            self.journal.note(decision)
        quorum = self.core.quorum("job")
        if quorum is not None:
            self.held |= dict.fromkeys(quorum.replica_ids, quorum.key)

    def pass_ms(self, ms: int, *beating: str) -> None:
        for _ in range(ms // 100):
            self.now_ms += 100
            for name in beating:
                self.give(events.BeatReceived(self.stream(name)))
            for decision in self.core.tick(self.now_ms, 1_000 + self.now_ms):
                self.journal.note(decision)
            self.journal.tick()

    def stream(self, name: str) -> int:
        return NAMES.index(name) + 1

    def hello(self, name: str, replaces: str = "") -> None:
        hello = Hello("job", name, session=1, address=f"{name}:1", ready=True, replaces=replaces)
        self.give(events.HelloReceived(self.stream(name), hello))

    def ask(self, name: str, step: int, commit_failures: int = 0) -> None:
        self.requests[name] = self.requests.get(name, 0) + 1
        member = Member(
            name,
            address=f"{name}:1",
            step=step,
            lineage=step,
            live=step > 0,
            init_sync=False,
            commit_failures=commit_failures,
        )
        self.give(events.QuorumRequested(self.stream(name), self.requests[name], member, self.held.get(name)))

    def trains(self, *names: str) -> None:
        """A first quorum at step 5, and a step."""
        self.pass_ms(400)
        for name in names:
            self.hello(name)
        for name in names:
            self.ask(name, 5)
        self.pass_ms(100, *names)
        for name in names:
            self.ask(name, 6)
        self.pass_ms(100, *names)
        assert not self.journal.history.is_any_open

    def records(self) -> list[Incident]:
        return sorted(self.journal.history.incidents(), key=lambda each: each.number)

    @property
    def last(self) -> Incident:
        return self.records()[-1]


def test_a_first_quorum_is_a_start() -> None:
    job = Job()
    job.trains("a", "b")
    (start,) = job.records()
    assert (start.kind, start.replica_ids, start.is_open) == (IncidentKind.START, ("a", "b"), False)
    assert (start.quorum_before, start.quorum_after, start.members_before, start.members_after) == (None, 1_001, 0, 2)
    assert start.phases == {Phase.RESUME: 200}


def test_a_loss_has_its_phases_and_they_sum_to_the_stall(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    job.trains("a", "b", "c")
    heard_ms = job.now_ms
    job.pass_ms(700, "b", "c")
    with caplog.at_level(logging.INFO, "tft_lighthouse"):
        job.give(events.DeathReported(job.stream("a"), "exit code 1"))
        lost = job.last
        assert (lost.kind, lost.replica_ids, lost.is_open) == (IncidentKind.LOSS, ("a",), True)
        assert (lost.reason, lost.step) == ("its manager server reports: exit code 1", 6)
        job.pass_ms(300, "b", "c")
        job.ask("b", 6, commit_failures=1)
        job.ask("c", 6, commit_failures=1)
        job.pass_ms(400, "b", "c")
        assert job.last.is_open, "no step was committed yet"
        job.ask("b", 7)
        job.ask("c", 7)
        job.pass_ms(100, "b", "c")
    lost = job.last
    assert (lost.kind, lost.is_open) == (IncidentKind.LOSS, False), "the failed round is its consequence"
    assert (lost.quorum_before, lost.quorum_after, lost.members_before, lost.members_after) == (1_001, 1_002, 3, 2)
    assert lost.phases == {Phase.DETECT: 0, Phase.QUORUM: 300, Phase.RESUME: 500}
    assert lost.lasted_ms == 800
    assert heard_ms + 700 == lost.began_ms
    (line,) = (record.getMessage() for record in caplog.records if record.getMessage().startswith("incident="))
    assert line == (
        "incident=2 job=job kind=loss step=6 quorum=1001->1002 members=3->2 lasted_s=0.800 detect_s=0.000 "
        'quorum_s=0.300 resume_s=0.500 replicas=a reason="its manager server reports: exit code 1"'
    )


def test_silence_is_part_of_the_loss() -> None:
    job = Job()
    job.trains("a", "b")
    began_ms = job.now_ms
    job.pass_ms(5_100, "b")
    lost = job.last
    assert lost.kind is IncidentKind.LOSS
    assert lost.began_ms == began_ms
    assert lost.phases[Phase.DETECT] == 5_000


def test_the_break_of_a_stream_is_part_of_the_loss() -> None:
    job = Job()
    job.trains("a", "b")
    job.pass_ms(900, "b")
    job.give(events.StreamClosed(1, told=True))
    job.pass_ms(400, "b")
    assert job.last.reason == "its stream disconnected and did not return within 300 ms"
    assert job.last.phases == {Phase.DETECT: 300}


def test_a_newcomer_joins_and_heals_while_the_others_resume() -> None:
    job = Job()
    job.trains("a", "b")
    job.hello("c")
    job.ask("c", 0)
    job.ask("a", 7)
    job.ask("b", 7)
    join = job.last
    assert (join.kind, join.replica_ids, join.is_open) == (IncidentKind.JOIN, ("c",), True)
    job.pass_ms(300, "a", "b", "c")
    job.ask("a", 8)
    job.ask("b", 8)
    job.pass_ms(1_000, "a", "b", "c")
    assert job.last.phases == {Phase.RESUME: 400}
    assert job.last.is_open, "it heals still"
    job.ask("c", 8)
    job.pass_ms(1_100, "a", "b", "c")
    assert not job.last.is_open
    assert job.last.phases[Phase.RESUME] == 400
    assert 1_300 <= job.last.phases[Phase.HEAL] <= 2_400
    assert job.last.lasted_ms == 400, "heal goes on beside resume"


def test_a_leave_a_finish_and_the_end_read_differently() -> None:
    job = Job()
    job.trains("a", "b", "c")
    job.give(events.LeaveReceived(job.stream("a"), "it is drained", 0))
    job.ask("b", 7)
    job.ask("c", 7)
    job.pass_ms(100, "b", "c")
    job.ask("b", 8)
    job.ask("c", 8)
    job.pass_ms(100, "b", "c")
    leave = job.last
    assert (leave.kind, leave.reason, leave.is_open) == (IncidentKind.LEAVE, "it is drained", False)
    assert Phase.DETECT not in leave.phases
    for name in "bc":
        job.give(events.LeaveReceived(job.stream(name), "its training is over", 0, finished_step=9))
    job.pass_ms(100)
    kinds = [each.kind for each in job.records()]
    assert kinds[-3:] == [IncidentKind.FINISH, IncidentKind.FINISH, IncidentKind.END]
    assert (job.last.step, job.last.replica_ids, job.last.reason) == (9, ("b", "c"), "ended at step 9")
    assert not job.journal.history.is_any_open


def test_a_failed_round_without_a_loss_is_a_record_of_its_own() -> None:
    job = Job()
    job.trains("a", "b")
    job.ask("a", 6, commit_failures=1)
    job.ask("b", 6, commit_failures=1)
    failed = job.last
    assert (failed.kind, failed.replica_ids) == (IncidentKind.FAILED_ROUND, ("a", "b"))
    assert failed.reason == "a failed to commit (1 in a row), b failed to commit (1 in a row)"


def test_the_loss_of_a_replica_that_is_in_no_quorum_costs_nothing() -> None:
    job = Job()
    job.trains("a", "b")
    job.hello("c")
    job.give(events.DeathReported(job.stream("c"), "exit code 1"))
    assert (job.last.kind, job.last.is_open, job.last.lasted_ms) == (IncidentKind.LOSS, False, 0)


def test_an_incident_of_a_job_that_is_forgotten_ends() -> None:
    job = Job()
    job.trains("a")
    job.give(events.DeathReported(1, "exit code 1"))
    job.give(events.StreamClosed(1))
    assert job.last.is_open
    job.pass_ms(3 * 60_000)
    assert job.core.jobs == ()
    assert not job.last.is_open


# --- the records themselves -------------------------------------------------------------------------------------------


def quorum(number: int, *names: str) -> Quorum:
    return Quorum(QuorumKey(number, 1), tuple(Member(name) for name in names), 0)


def a_history(closed: list[Incident]) -> History:
    return History(job_of=lambda _: "job", step_of=lambda _: 0, healing_of=lambda _: frozenset(), closed=closed.append)


def test_a_long_wait_is_noted_in_the_incident() -> None:
    found = a_history([])
    found.note(QuorumFormed("job", quorum(1, "a", "b"), None, 0, "it is the first quorum"), 0, 0)
    found.note(ReplicaLost("job", "a", 1, "gone", 10), 100, 100)
    found.note(WaitNoticed("job", 5, False, "b waits for a"), 5_100, 5_100)
    found.note(WaitNoticed("other", 5, False, "something else"), 5_200, 5_200)
    assert [each.waited_for for each in found.incidents()] == ["b waits for a"] * 2
    found.note(JobEnded("job", 4, ("b",)), 6_000, 6_000)
    assert not found.is_any_open


def test_only_what_has_changed_is_given_again() -> None:
    found = a_history([])
    found.note(QuorumFormed("job", quorum(1, "a", "b"), None, 0, "it is the first quorum"), 0, 0)
    known = found.last_change
    assert found.incidents(known) == []
    found.note(ReplicaLost("job", "a", 1, "gone", 10), 100, 100)
    (lost,) = found.incidents(known)
    assert (lost.number, lost.change) == (2, found.last_change)


def test_records_names_and_jobs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "INCIDENTS_MOST", 20)
    monkeypatch.setattr(history, "JOBS_MOST", 7)
    closed: list[Incident] = []
    found = a_history(closed)
    names = tuple(f"replica_{number:04}" for number in range(1_000))
    for number in range(100):
        found.note(QuorumFormed(f"job {number}", quorum(1, *names), None, 0, "x" * 10_000), 0, 0)
        found.note(ReplicaLost(f"job {number}", names[0], 1, "y" * 10_000, 0), 1, 1)
    kept = found.incidents()
    assert [each.number for each in sorted(kept, key=lambda each: each.number)] == list(range(181, 201))
    assert {len(each.replica_ids) for each in kept} == {1, history.REPLICAS_NAMED_MOST}
    assert {each.num_replicas for each in kept} == {1, 1_000}
    assert max(len(each.reason) for each in kept) == history.REASON_MOST
    assert len(found._quorums) == 7
    assert len(found._open) == 20
