"""The orders of the controller, and their order, for made-up events."""

from __future__ import annotations

from signal import SIGKILL, SIGSEGV

from demo_script import committed, done, ended, killed, started, together

from tft_suite.demo.demo_controller import (
    FRUITLESS_STARTS_MAX,
    HOLD_AFTER_S,
    SILENCE_MAX_S,
    DemoController,
    EndRun,
    HoldReplica,
    KillReplica,
    Order,
    StartReplica,
    StopReplica,
)
from tft_suite.demo.events import Event, ReplicaFailed, StepDiscarded
from tft_suite.demo.schedule import Kill


def director_of(*kills: Kill, replicas: int = 3) -> DemoController:
    controller = DemoController(replicas=replicas, kills=kills)
    assert controller.begin() == tuple(StartReplica(replica) for replica in range(replicas))
    for replica in range(replicas):
        assert controller.on_event(started(replica)) == ()
    return controller


def told(controller: DemoController, *events: Event) -> list[Order]:
    return [order for event in events for order in controller.on_event(event)]


def test_a_replica_is_killed_when_it_reports_its_step() -> None:
    controller = director_of(Kill(replica=1, step=3))
    assert told(controller, *together([0, 1, 2], [1, 2], participants=3), committed(0, 3, 3.0)) == []
    assert told(controller, committed(1, 3, 3.01)) == [KillReplica(1, 3)]
    assert told(controller, killed(1, 3, 3.02), committed(2, 3, 3.03)) == []


def test_a_replica_that_healed_past_its_step_is_killed_at_its_next_commit() -> None:
    controller = director_of(Kill(replica=1, step=3))
    assert told(controller, committed(0, 1, 1), committed(1, 5, 5)) == [KillReplica(1, 5)]


def test_the_last_one_that_holds_the_state_is_not_killed_until_another_trains() -> None:
    controller = director_of(Kill(replica=0, step=2), Kill(replica=1, step=3), replicas=2)
    told(controller, *together([0, 1], [1], participants=2))
    assert told(controller, committed(1, 2, 2), committed(0, 2, 2.01)) == [KillReplica(0, 2)]
    told(controller, killed(0, 2, 2.02), ended(0, 2.03, -SIGKILL), started(0, 2.04))
    assert told(controller, committed(1, 3, 3, participants=1), committed(1, 4, 4, participants=1)) == []
    assert told(controller, committed(0, 5, 5, took_part=False), committed(1, 5, 5.01)) == [KillReplica(1, 5)]


def test_a_killed_replica_is_started_again_whoever_killed_it() -> None:
    controller = director_of()
    told(controller, *together([0, 1, 2], [1], participants=3))
    assert told(controller, ended(2, 1.5, -SIGKILL)) == [StartReplica(2)]


def test_a_replica_that_died_otherwise_ends_the_run() -> None:
    for exit_code, words in ((-SIGSEGV, "by SIGSEGV"), (0, "exit code 0"), (3, "exit code 3")):
        controller = director_of()
        (order,) = told(controller, ended(2, 1.5, exit_code))
        assert order == EndRun(f"replica 2 ended unexpectedly: {words}.")
        assert told(controller, ended(0, 1.6, -SIGKILL)) == []


def test_a_replica_that_failed_ends_the_run_with_its_error() -> None:
    controller = director_of()
    (order,) = told(controller, ReplicaFailed(at_s=1, replica=2, error="ValueError: no"))
    assert order == EndRun("replica 2 failed: ValueError: no")
    assert told(controller, ended(2, 1.1, 1)) == []


def test_a_replica_that_is_killed_again_and_again_before_it_commits_ends_the_run() -> None:
    controller = director_of()
    for attempt in range(1, FRUITLESS_STARTS_MAX):
        assert told(controller, ended(2, attempt, -SIGKILL)) == [StartReplica(2)]
        told(controller, started(2, attempt))
    (order,) = told(controller, ended(2, 9, -SIGKILL))
    assert isinstance(order, EndRun)
    assert "replica 2 was killed 3 times in a row" in str(order.error)


def test_nobody_leaves_before_all_are_at_the_last_step() -> None:
    controller = director_of()
    assert told(controller, done(0, 5, 5), done(1, 5, 5.1)) == []
    assert told(controller, done(2, 5, 5.2)) == [StopReplica(0), StopReplica(1), StopReplica(2)]
    assert told(controller, done(2, 5, 5.3), ended(0, 6), ended(1, 6)) == []
    assert told(controller, ended(2, 6)) == [EndRun(None)]


def test_a_replica_that_ends_badly_after_the_stop_fails_the_run() -> None:
    controller = director_of(replicas=1)
    assert told(controller, done(0, 5, 5), ended(0, 6, 1)) == [
        StopReplica(0),
        EndRun("replica 0 ended with an error: exit code 1."),
    ]


def test_all_hold_when_one_stays_behind_the_others_and_who_is_behind_is_told_first() -> None:
    controller = director_of()
    told(controller, committed(1, 4, 4.9), done(0, 5, 5), done(2, 5, 5))
    assert controller.tick(5 + HOLD_AFTER_S / 2) == ()
    assert controller.tick(5 + HOLD_AFTER_S) == (HoldReplica(1), HoldReplica(0), HoldReplica(2))
    assert controller.tick(5 + HOLD_AFTER_S + 1) == ()
    assert told(controller, done(0, 5, 7.5), done(1, 5, 7.5)) == [StopReplica(0), StopReplica(1), StopReplica(2)]


def test_a_replica_that_starts_while_others_hold_holds_too() -> None:
    controller = director_of()
    told(controller, done(0, 5, 5), done(1, 5, 5), ended(2, 5, -SIGKILL))
    assert controller.tick(5 + HOLD_AFTER_S) == (HoldReplica(0), HoldReplica(1))
    assert told(controller, started(2, 8)) == [HoldReplica(2)]


def test_holding_has_an_end() -> None:
    controller = director_of()
    told(controller, done(0, 5, 5), done(2, 5, 5))
    assert controller.tick(5 + HOLD_AFTER_S)
    told(controller, done(0, 5, 60))  # repeated, so no news
    (order,) = controller.tick(5 + HOLD_AFTER_S + SILENCE_MAX_S)
    assert isinstance(order, EndRun)
    assert order.error


def test_nobody_holds_while_all_still_train() -> None:
    controller = director_of()
    told(controller, *together([0, 1, 2], [1], participants=3))
    assert controller.tick(60) == ()


def test_a_run_in_which_nothing_happens_is_given_up() -> None:
    controller = director_of()
    told(controller, *together([0, 1], [1], participants=2))
    assert controller.tick(SILENCE_MAX_S) == ()
    told(controller, StepDiscarded(at_s=100, replica=1, step=1, reason="again"))  # no news
    (order,) = controller.tick(2 + SILENCE_MAX_S)
    assert isinstance(order, EndRun)
    assert "after step 1 (replica 0 training, replica 1 training, replica 2 starting)" in str(order.error)
    assert controller.tick(3 + SILENCE_MAX_S) == ()
