"""What a run is said to have come to, counted from its events."""

from __future__ import annotations

import json
from signal import SIGKILL

from demo_script import a_good_run, committed, done, ended, killed, started, together

from tft_suite.demo.events import Event, ProcessEnded, ProcessKilled, StepCommitted, TrainingEnded
from tft_suite.demo.report import Fault, make_report, problems_of


def wrong_with(events: list[Event], *, kills: int = 1, error: str | None = None) -> tuple[str, ...]:
    report = make_report(events, replicas=3, steps=10, wall_s=11.0)
    return problems_of(report, events, kills=kills, error=error)


def test_a_good_run() -> None:
    report = make_report(a_good_run(), replicas=3, steps=10, wall_s=11.00049)
    assert report.to_json() == {
        "replicas": 3,
        "steps": 10,
        "faults": ({"replica": 1, "at_step": 4, "stall_s": 1.2, "rejoin_s": 2.5},),
        "digests": ("d", "d", "d"),
        "identical": True,
        "test_accuracy": 0.98,
        "wall_s": 11.0,
    }
    assert wrong_with(a_good_run()) == ()


def test_the_report_is_json_with_exactly_these_keys() -> None:
    report = json.loads(json.dumps(make_report(a_good_run(), replicas=3, steps=10, wall_s=1.0).to_json()))
    assert list(report) == ["replicas", "steps", "faults", "digests", "identical", "test_accuracy", "wall_s"]
    assert list(report["faults"][0]) == ["replica", "at_step", "stall_s", "rejoin_s"]


def test_a_survivor_that_had_yet_to_report_the_step_of_the_kill_has_not_stalled_for_nothing() -> None:
    events: list[Event] = [
        *together([0, 1, 2], range(1, 4), participants=3),
        committed(1, 4, 4.0),
        killed(1, 4, 4.001),
        committed(0, 4, 4.002),
        committed(2, 4, 4.003),
        committed(0, 5, 6.0, participants=2),
        committed(2, 5, 6.001, participants=2),
    ]
    assert make_report(events, replicas=3, steps=10, wall_s=9.0).faults == (
        Fault(replica=1, at_step=4, stall_s=2.0, rejoin_s=None),
    )


def test_a_survivor_that_is_killed_itself_is_waited_for_no_more() -> None:
    events: list[Event] = [
        *together([0, 1, 2], range(1, 5), participants=3),
        killed(1, 4, 5.0),
        killed(2, 4, 5.5),
        committed(0, 5, 6.0, participants=1),
    ]
    assert [fault.stall_s for fault in make_report(events, replicas=3, steps=9, wall_s=9.0).faults] == [1.0, 0.5]


def test_survivors_that_never_commit_again_have_no_stall() -> None:
    events: list[Event] = [*together([0, 1, 2], range(1, 5), participants=3), killed(1, 4, 5.0)]
    assert make_report(events, replicas=3, steps=9, wall_s=9.0).faults[0].stall_s is None


def test_a_kill_from_outside_is_a_fault_too() -> None:
    events = [event for event in a_good_run() if not isinstance(event, ProcessKilled)]
    (fault,) = make_report(events, replicas=3, steps=10, wall_s=11.0).faults
    assert (fault.replica, fault.at_step) == (1, 4)
    assert wrong_with(events, kills=0) == ()


def without(events: list[Event], *kinds: type[Event], replica: int) -> list[Event]:
    return [event for event in events if event.replica != replica or not isinstance(event, kinds)]


def test_a_replica_that_did_not_come_to_the_end() -> None:
    assert wrong_with(without(a_good_run(), TrainingEnded, ProcessEnded, replica=2)) == (
        "replica 2 did not reach its last step; see its log.",
    )


def test_a_replica_that_was_killed_at_the_end_is_not_there() -> None:
    events = [*a_good_run()[:-3], killed(2, 10, 10.6), ended(2, 10.6, -SIGKILL), started(2, 10.7)]
    assert "replica 2 did not reach its last step; see its log." in wrong_with(events, kills=2)


def test_a_replica_that_ended_elsewhere() -> None:
    events = [*without(a_good_run(), TrainingEnded, replica=2), done(2, 9, 10.6)]
    assert wrong_with(events) == ("replica 2 ended at step 9 instead of 10.",)
    assert not make_report(events, replicas=3, steps=10, wall_s=1.0).identical


def test_replicas_that_differ() -> None:
    events = [*without(a_good_run(), TrainingEnded, replica=2), done(2, 10, 10.6, digest="e")]
    assert wrong_with(events) == ("the replicas hold different parameters or optimizer state: their digests differ.",)
    report = make_report(events, replicas=3, steps=10, wall_s=1.0)
    assert (report.identical, report.digests) == (False, ("d", "d", "e"))


def test_a_net_that_reads_badly() -> None:
    events = [*without(a_good_run(), TrainingEnded, replica=2), done(2, 10, 10.6, accuracy=0.9494)]
    assert wrong_with(events) == ("the test accuracy is 0.949; at least 0.95 is required.",)


def test_a_killed_replica_that_only_watched() -> None:
    events = [
        committed(1, event.step, event.at_s, took_part=False)
        if isinstance(event, StepCommitted) and event.replica == 1 and event.at_s > 6
        else event
        for event in a_good_run()
    ]
    assert wrong_with(events) == (
        "replica 1 was killed at step 4 and committed no later step with other replicas; raise --steps.",
    )


def test_kills_whose_turn_never_came() -> None:
    assert wrong_with(a_good_run(), kills=3) == ("only 1 of 3 scheduled kills happened; raise --steps.",)


def test_a_run_that_was_given_up_says_why_and_not_what_follows_from_it() -> None:
    assert wrong_with(a_good_run()[:20], error="replica 2 failed: ValueError: no") == (
        "replica 2 failed: ValueError: no",
    )
