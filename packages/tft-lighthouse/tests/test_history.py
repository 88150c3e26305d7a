"""Incidents as records: which there are, what their phases are, and that they are bounded."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import pytest

from tft_coord import Member, PaceKind, QuorumKey, StragglerNotice, Timeouts
from tft_coord.core.types import Hello
from tft_coord.lighthouse import (
    JobEnded,
    LighthouseConfig,
    LighthouseCore,
    PaceChanged,
    Quorum,
    QuorumFormed,
    ReplicaLost,
    Spent,
    Stall,
    TorchftCore,
    WaitNoticed,
    events,
)
from tft_lighthouse import history, log
from tft_lighthouse.history import History, Incident, IncidentKind, Phase
from tft_lighthouse.journal import Journal
from tft_lighthouse.timeline import Lane
from tft_lighthouse.view import incident_as_json

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


def test_a_name_with_spaces_forges_no_field_of_the_line(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    job.trains("a", "b")
    with caplog.at_level(logging.INFO, "tft_lighthouse"):
        log.incident(replace(job.last, replica_ids=("a kind=loss", "b")))
    (line,) = (record.getMessage() for record in caplog.records if record.getMessage().startswith("incident="))
    assert ' replicas="a kind=loss,b" reason=' in line


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


def test_a_replica_that_comes_back_after_a_failed_round_is_one_join() -> None:
    job = Job()
    job.trains("a", "b")
    job.hello("c")
    job.ask("c", 5, commit_failures=1)
    job.ask("a", 7)
    job.ask("b", 7)
    kinds = [each.kind for each in job.journal.history.incidents()]
    assert IncidentKind.JOIN in kinds
    assert IncidentKind.FAILED_ROUND not in kinds


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


def a_history(closed: list[Incident], steps: list[int] | None = None) -> History:
    return History(
        job_of=lambda _: "job",
        step_of=lambda _: (steps or [0])[-1],
        healing_of=lambda _: frozenset(),
        closed=closed.append,
    )


def test_a_long_wait_is_noted_in_the_incident() -> None:
    found = a_history([])
    found.note(QuorumFormed("job", quorum(1, "a", "b"), None, 0, "it is the first quorum"), 0, 0)
    found.note(ReplicaLost("job", "a", 1, "gone", 10), 100, 100)
    found.note(WaitNoticed("job", 5, False, "b waits for a"), 5_100, 5_100)
    found.note(WaitNoticed("other", 5, False, "something else"), 5_200, 5_200)
    assert [each.waited_for for each in found.incidents()] == ["b waits for a"] * 2
    found.note(JobEnded("job", 4, ("b",)), 6_000, 6_000)
    assert not found.is_any_open


def a_standing_history(closed: list[Incident] | None = None, steps: list[int] | None = None) -> History:
    """A history in which three have formed their first quorum and committed a step in it."""
    found = a_history([] if closed is None else closed, steps)
    found.note(QuorumFormed("job", quorum(1, "a", "b", "c"), None, 0, "it is the first quorum"), 0, 0)
    found.look(100)
    return found


def test_a_wait_that_no_incident_explains_is_a_record_when_it_is_over() -> None:
    closed: list[Incident] = []
    found = a_standing_history(closed, steps=[1])
    closed.clear()
    found.note(WaitNoticed("job", 5, False, "a has not asked", ("a",)), 25_000, 25_000)
    assert len(found.incidents()) == 1, "it is not over"
    found.note(WaitNoticed("job", 7, True, "a has not asked"), 27_000, 27_000)
    (wait,) = closed
    assert (wait.kind, wait.replica_ids, wait.reason, wait.is_open) == (
        IncidentKind.WAIT,
        ("a",),
        "a has not asked",
        False,
    )
    assert (wait.began_ms, wait.phases, wait.lasted_ms, wait.cost_ms) == (20_000, {Phase.WAIT: 7_000}, 7_000, 7_000)
    assert (wait.quorum_before, wait.quorum_after, wait.members_before, wait.members_after) == (1, 1, 3, 3)
    found.note(WaitNoticed("job", 9, True, "again"), 30_000, 30_000)
    assert len(closed) == 1, "each wait is one record"


def test_a_wait_belongs_to_the_loss_in_it() -> None:
    found = a_standing_history(steps=[1])
    found.note(WaitNoticed("job", 5, False, "b waits for a", ("a",)), 25_000, 25_000)
    found.note(ReplicaLost("job", "a", 1, "gone", 10), 26_000, 26_000)
    assert of_kind(found, IncidentKind.LOSS).waited_for == "b waits for a"
    found.note(WaitNoticed("job", 8, True, "b waits for a"), 28_000, 28_000)
    assert IncidentKind.WAIT not in {each.kind for each in found.incidents()}


def test_a_wait_belongs_to_the_failed_round_before_it() -> None:
    found = a_standing_history(steps=[1])
    standing = quorum(1, "a", "b", "c")
    failed = Quorum(QuorumKey(2, 1), tuple(Member(name, step=1, commit_failures=1) for name in "abc"), 0)
    found.note(QuorumFormed("job", failed, standing, 0, "a failed to commit"), 20_000, 20_000)
    found.note(WaitNoticed("job", 5, False, "b waits for a", ("a",)), 25_000, 25_000)
    found.note(WaitNoticed("job", 8, True, "b waits for a"), 28_000, 28_000)
    assert of_kind(found, IncidentKind.FAILED_ROUND).waited_for == "b waits for a"
    assert IncidentKind.WAIT not in {each.kind for each in found.incidents()}


def test_a_wait_after_the_members_went_on_is_not_the_joins() -> None:
    """A newcomer may heal for minutes, beside members that wait for somebody else."""
    steps, healing = [0], {"d"}
    found = History(
        job_of=lambda _: "job", step_of=lambda _: steps[-1], healing_of=lambda _: healing, closed=lambda _: None
    )
    found.note(QuorumFormed("job", quorum(1, "a", "b", "c"), None, 0, "first"), 0, 0)
    found.note(QuorumFormed("job", quorum(2, "a", "b", "c", "d"), quorum(1, "a", "b", "c"), 0, "d joined"), 1, 1)
    steps.append(1)
    found.look(1_000)
    assert of_kind(found, IncidentKind.JOIN).is_open
    found.note(WaitNoticed("job", 5, False, "b waits for a", ("a",)), 25_000, 25_000)
    found.note(WaitNoticed("job", 8, True, "b waits for a"), 28_000, 28_000)
    assert of_kind(found, IncidentKind.JOIN).waited_for == ""
    assert of_kind(found, IncidentKind.WAIT).replica_ids == ("a",)


def test_those_who_wait_in_vain_and_those_without_a_quorum_have_no_record_of_a_wait() -> None:
    found = a_standing_history(steps=[1])
    for job, missing in (("job", None), ("another", ("a",))):
        found.note(WaitNoticed(job, 5, False, "left out", missing), 25_000, 25_000)
        found.note(WaitNoticed(job, 8, True, "left out"), 28_000, 28_000)
    assert [each.kind for each in found.incidents()] == [IncidentKind.START]


def test_waits_do_not_drive_the_other_records_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "INCIDENTS_MOST", 8)
    monkeypatch.setattr(history, "WAITS_MOST", 3)
    found = a_standing_history(steps=[1])
    for number in range(20):
        found.note(WaitNoticed("job", 5, False, "each step", ("a",)), number, number)
        found.note(WaitNoticed("job", 6, True, "each step"), number, number)
    kinds = [each.kind for each in found.incidents()]
    assert (kinds.count(IncidentKind.START), kinds.count(IncidentKind.WAIT)) == (1, 3)
    assert [each.number for each in found.incidents()] == [1, 19, 20, 21]


def test_a_resumed_quorum_is_one_record_of_each_job() -> None:
    closed: list[Incident] = []
    found = a_history(closed)
    found.resumed("job", quorum(17, "a", "b", "c"), "b", 5_000)
    found.resumed("job", quorum(18, "a", "b", "c"), "b", 6_000)
    found.resumed("other", quorum(3, "x"), "x", 7_000)
    assert [(each.job, each.kind) for each in closed] == [
        ("job", IncidentKind.LIGHTHOUSE),
        ("other", IncidentKind.LIGHTHOUSE),
    ]
    one = closed[0]
    assert one.reason == "this lighthouse has started; it resumed quorum 17 with 3 members, as reported by b"
    assert (one.replica_ids, one.began_ms, one.quorum_before, one.quorum_after) == ((), 5_000, 17, 17)
    found.note(QuorumFormed("job", quorum(19, "a", "b"), quorum(18, "a", "b", "c"), 0, "c is gone"), 8_000, 8_000)
    assert IncidentKind.START not in {each.kind for each in found.incidents()}


def test_a_straggler_that_is_left_out_keeps_its_numbers() -> None:
    found = a_standing_history(steps=[1])
    news = StragglerNotice("c", PaceKind.LEFT_OUT, own_ms=320, median_ms=80, pause_ms=5_000)
    found.note(PaceChanged("job", news), 1_000, 1_000)
    found.note(PaceChanged("job", replace(news, replica_id="b", kind=PaceKind.SLOW)), 1_000, 1_000)
    reason = "b is left out as a straggler, c is left out as a straggler"
    found.note(QuorumFormed("job", quorum(2, "a"), quorum(1, "a", "b", "c"), 0, reason), 1_100, 1_100)
    assert of_kind(found, IncidentKind.CHANGE).reason == (
        "b is left out as a straggler, c is left out as a straggler: "
        "its own part of a step takes 0.32 s (median of the others: 0.08 s)"
    )


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


# --- what replicas report of their own stalls -------------------------------------------------------------------------


def a_loss(*reporters: str, closed: list[Incident] | None = None, steps: list[int] | None = None) -> History:
    """A history in which "a" of three was lost, and the others have formed the next quorum."""
    found = History(
        job_of=lambda _: "job",
        step_of=lambda _: (steps or [0])[-1],
        healing_of=lambda _: frozenset(),
        closed=(closed if closed is not None else []).append,
    )
    for name in reporters:
        found.reported("job", name, (), 0)
    found.note(QuorumFormed("job", quorum(1, "a", "b", "c"), None, 0, "it is the first quorum"), 0, 0)
    found.note(ReplicaLost("job", "a", 1, "gone", 300), 1_000, 1_000)
    found.note(QuorumFormed("job", quorum(2, "b", "c"), quorum(1, "a", "b", "c"), 0, "a is lost"), 1_100, 1_100)
    return found


def of_kind(found: History, kind: IncidentKind) -> Incident:
    return next(each for each in found.incidents() if each.kind is kind)


def stall(number: int = 2, before: int | None = 1, after: int = 2, **spent_ms: int) -> Stall:
    return Stall(number, before, after, 7, 1, {Spent(name): ms for name, ms in spent_ms.items()})


def test_the_slowest_survivor_says_what_the_incident_cost(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[Incident] = []
    steps = [0]
    found = a_loss("a", "b", "c", closed=closed, steps=steps)
    found.reported("job", "b", [stall(detect=300, redo=90, commit=110, serve=1, heal=1)], 1_500)
    loss = of_kind(found, IncidentKind.LOSS)
    assert (loss.slowest, loss.lasted_ms, loss.num_reports, loss.failed_rounds) == ("b", 502, 1, 1)
    assert loss.phases == {Phase.DETECT: 300, Phase.REDO: 90, Phase.COMMIT: 110, Phase.TRANSFER: 2}
    steps.append(1)
    found.look(1_600)
    assert of_kind(found, IncidentKind.LOSS).is_open, "the other survivor has not reported yet"
    found.reported("job", "c", [stall(detect=400, commit=120, quorum=5)], 1_500)
    found.look(1_700)
    loss = of_kind(found, IncidentKind.LOSS)
    assert (loss.slowest, loss.lasted_ms, loss.num_reports, loss.is_open) == ("c", 525, 2, False)
    with caplog.at_level(logging.INFO, "tft_lighthouse"):
        log.incident(loss)
    assert (
        "lasted_s=0.525 detect_s=0.400 quorum_s=0.005 commit_s=0.120 failed_rounds=1 slowest=c replicas=a"
        in (caplog.messages[0])
    )
    assert [each.number for each in closed if each.kind is IncidentKind.LOSS] == [loss.number]


def test_a_report_is_repeated_and_counts_once() -> None:
    found = a_loss("b", "c")
    for _ in range(3):
        found.reported("job", "b", [stall(1, None, 1, quorum=5), stall(commit=7)], 1_500)
    assert of_kind(found, IncidentKind.LOSS).num_reports == 1
    assert of_kind(found, IncidentKind.START).num_reports == 1
    known = found.last_change
    found.reported("job", "b", [stall(commit=7)], 1_500)
    assert found.last_change == known


def test_the_step_that_committed_is_no_cost_and_the_phases_are_in_their_order() -> None:
    found = a_loss("b", "c")
    found.reported("job", "b", [stall(commit=110, quorum=20, redo=90, detect=300, heal=1)], 1_500)
    loss = of_kind(found, IncidentKind.LOSS)
    assert (loss.lasted_ms, loss.cost_ms) == (521, 411)
    told = incident_as_json(loss)
    assert list(told["phases_ms"].items()) == [
        ("detect", 300),
        ("redo", 90),
        ("quorum", 20),
        ("transfer", 1),
        ("commit", 110),
    ]
    assert told["cost_ms"] == 411
    assert set(history.IN_ORDER) == set(Phase)


def test_an_incident_waits_for_reports_only_for_a_while() -> None:
    steps = [0]
    found = a_loss("b", "c", steps=steps)
    steps.append(1)
    found.look(2_000)
    assert of_kind(found, IncidentKind.LOSS).is_open
    found.look(2_000 + history.REPORTS_WITHIN_MS)
    loss = of_kind(found, IncidentKind.LOSS)
    assert not loss.is_open
    assert (loss.slowest, loss.phases) == ("", {Phase.DETECT: 300, Phase.QUORUM: 100, Phase.RESUME: 900})
    found.reported("job", "b", [stall(commit=7)], 1_500)
    assert of_kind(found, IncidentKind.LOSS).slowest == "b", "a late report counts too"
    assert not of_kind(found, IncidentKind.LOSS).is_open


def test_who_was_lost_and_who_is_a_stranger_say_nothing_about_the_stall() -> None:
    found = a_loss("a", "b", "c")
    found.reported("job", "a", [stall(commit=10)], 1_500)
    found.reported("job", "stranger", [stall(commit=10)], 1_500)
    found.reported("other", "b", [stall(commit=10)], 1_500)
    found.reported("job", "b", [stall(3, 5, 9, commit=10), stall(4, 2, 2, commit=10)], 1_500)
    assert of_kind(found, IncidentKind.LOSS).slowest == ""


def test_a_newcomer_says_how_long_it_waited_for_the_state() -> None:
    found = a_loss("b", "c")
    found.note(QuorumFormed("job", quorum(3, "b", "c", "d"), quorum(2, "b", "c"), 0, "d joins"), 3_000, 3_000)
    found.reported("job", "d", [stall(1, None, 3, heal=900, quorum=20)], 1_500)
    found.reported("job", "b", [stall(3, 2, 3, serve=40, commit=60)], 1_500)
    join = of_kind(found, IncidentKind.JOIN)
    assert join.phases == {Phase.HEAL: 900, Phase.TRANSFER: 40, Phase.COMMIT: 60}
    assert (join.slowest, join.lasted_ms) == ("b", 100), "heal goes on beside the others"


def test_incidents_that_run_into_one_another_have_the_same_stall() -> None:
    found = a_loss("b", "c")
    found.note(ReplicaLost("job", "c", 1, "gone", 0), 1_200, 1_200)
    found.note(QuorumFormed("job", quorum(3, "b"), quorum(2, "b", "c"), 0, "c is lost"), 1_300, 1_300)
    found.reported("job", "b", [stall(2, 1, 3, detect=800)], 1_500)
    assert [each.lasted_ms for each in found.incidents() if each.kind is IncidentKind.LOSS] == [800, 800]


def test_reporters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "REPORTERS_MOST", 10)
    found = a_history([])
    for number in range(100):
        found.reported("job", f"replica {number}", [stall()], 0)
    for number in range(100):
        names = (f"a{number}", f"b{number}")
        found.note(QuorumFormed(f"job {number}", quorum(1, *names), None, 0, "first"), 0, 0)
    assert len(found._reporters) == 10
    assert len(found._survivors) == history.JOINED_MOST


def test_a_stall_that_is_longer_than_the_replica_is_known_is_nonsense() -> None:
    found = a_loss("b", "c")
    found.reported("job", "b", [stall(commit=1_500 + history.KNOWN_BEFORE_MS + 1)], 1_500)
    assert of_kind(found, IncidentKind.LOSS).slowest == ""
    found.reported("job", "c", [stall(commit=1_500 + history.KNOWN_BEFORE_MS)], 1_500)
    assert of_kind(found, IncidentKind.LOSS).slowest == "c"


def test_of_many_reports_only_those_of_a_slower_replica_are_news() -> None:
    found = a_loss("b", "c")
    found.reported("job", "b", [stall(commit=70)], 1_500)
    known = found.last_change
    found.reported("job", "c", [stall(commit=60)], 1_500)
    assert found.last_change == known
    assert of_kind(found, IncidentKind.LOSS).num_reports == 2


def test_hundreds_that_are_lost_together_cost_the_lighthouse_little() -> None:
    names = tuple(f"replica_{number:04}" for number in range(1_000))
    found = a_history([])
    found.note(QuorumFormed("job", quorum(1, *names), None, 0, "first"), 0, 0)
    for name in names:
        found.reported("job", name, (), 0)
    for name in names[:300]:
        found.note(ReplicaLost("job", name, 1, "gone", 0), 1, 1)
    found.note(QuorumFormed("job", quorum(2, *names[300:]), quorum(1, *names), 0, "lost"), 2, 2)
    assert len({id(each.awaited) for each in found._open.values() if each.incident.kind is IncidentKind.LOSS}) == 1
    for name in names[300:]:
        found.reported("job", name, [stall(commit=5)], 1_500)
    assert {each.num_reports for each in found.incidents() if each.kind is IncidentKind.LOSS} >= {700}


def test_a_lighthouse_that_begins_again_keeps_its_records_and_closes_those_that_go_on() -> None:
    job = Job()
    job.trains("a", "b")
    job.give(events.StreamClosed(job.stream("b"), True))
    job.pass_ms(10_000, "a")
    assert job.last.kind is IncidentKind.LOSS
    assert job.last.is_open
    again = Job()
    job.journal.renew(again.core, TorchftCore(LighthouseConfig(), started_ms=2_000))
    job.core = again.core
    job.pass_ms(500)
    assert [each.is_open for each in job.records()] == [False, False]
    lanes = job.journal.timeline.lanes("job")
    assert {name: runs[-1][1] for name, runs in lanes.items()} == dict.fromkeys("ab", Lane.GONE)
    assert job.journal.timeline.points("job"), "the page still shows what was"
    job.held.clear()
    job.trains("c")
    assert (job.last.kind, job.last.quorum_before) == (IncidentKind.START, None), "the quorums of before are forgotten"
