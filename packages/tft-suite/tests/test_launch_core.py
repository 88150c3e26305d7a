"""The decisions of a launcher: when groups start, restart, drain and are given up. Time is an argument."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence

import pytest

from tft_suite.errors import ConfigError
from tft_suite.launch.core import (
    Action,
    DrainGroup,
    EndRanks,
    Event,
    Finish,
    GroupState,
    KillRanks,
    LaunchCore,
    Note,
    RankEnded,
    StartFailed,
    StartGroup,
    StopAsked,
    TimePassed,
)
from tft_suite.launch.exit_codes import describe
from tft_suite.launch.settings import RestartPolicy

POLICY = RestartPolicy(max_restarts=3, backoff_s=1, backoff_most_s=3, good_after_s=100, grace_s=10)


def core_of(replicas: int = 1, nproc: int = 1, policy: RestartPolicy = POLICY) -> LaunchCore:
    core = LaunchCore(range(replicas), nproc, policy, "host")
    started = core.handle(TimePassed(), 0)
    assert [each for each in started if isinstance(each, StartGroup)] == [StartGroup(it, 1) for it in range(replicas)]
    return core


def orders(actions: Sequence[Action]) -> list[Action]:
    return [each for each in actions if not isinstance(each, Note)]


def texts(actions: Sequence[Action]) -> list[str]:
    return [each.text for each in actions if isinstance(each, Note)]


def test_a_start_says_what_where_and_which_attempt() -> None:
    core = LaunchCore([1], 1, POLICY, "node7")
    assert texts(core.handle(TimePassed(), 0)) == ["launching replica 1 (attempt 1) on node7"]
    core.handle(RankEnded(1, 1, 0, 1), 1)
    assert texts(core.handle(TimePassed(), 2)) == ["launching replica 1 (attempt 2) on node7"]


def test_groups_that_end_with_0_are_done_and_the_last_one_ends_the_launcher() -> None:
    core = core_of(2)
    assert orders(core.handle(RankEnded(0, 1, 0, 0), 5)) == [KillRanks(0)]
    assert orders(core.handle(RankEnded(1, 1, 0, 0), 6)) == [KillRanks(1), Finish(0)]


def test_the_pause_doubles_up_to_the_most_and_then_the_group_is_given_up() -> None:
    core, now_s, pauses = core_of(), 0.0, []
    for attempt in range(1, 4):
        core.handle(RankEnded(0, attempt, 0, 1), now_s)
        pauses.append(core.groups[0].until_s - now_s)
        assert orders(core.handle(TimePassed(), core.groups[0].until_s - 0.01)) == []
        now_s = core.groups[0].until_s
        assert orders(core.handle(TimePassed(), now_s)) == [KillRanks(0), StartGroup(0, attempt + 1)]
    assert pauses == [1, 2, 3]
    last = core.handle(RankEnded(0, 4, 0, 1), now_s)
    assert orders(last) == [KillRanks(0), Finish(1)]
    assert texts(last)[-1] == "replica 0 is given up after 4 failures in a row (--max-restarts)"


def test_after_a_good_while_failures_count_from_0_again() -> None:
    core, now_s = core_of(), 0.0
    for attempt in range(1, 20):
        now_s += POLICY.good_after_s
        core.handle(RankEnded(0, attempt, 0, -9), now_s)
        assert core.groups[0].until_s == now_s + 1
        now_s += 1
        assert orders(core.handle(TimePassed(), now_s)) == [KillRanks(0), StartGroup(0, attempt + 1)]


def test_exit_code_3_is_never_restarted_and_the_others_go_on() -> None:
    core = core_of(2)
    actions = core.handle(RankEnded(0, 1, 0, 3), 1)
    assert orders(actions) == [KillRanks(0)]
    assert texts(actions)[-1] == "replica 0 is not restarted: exit code 3 says that a restart can't help"
    assert orders(core.handle(TimePassed(), 1000)) == []
    assert orders(core.handle(RankEnded(1, 1, 0, 0), 1001)) == [KillRanks(1), Finish(3)]


def test_a_failed_rank_ends_its_whole_group_which_starts_again_when_all_have_ended() -> None:
    core = core_of(nproc=3)
    assert orders(core.handle(RankEnded(0, 1, 1, -9), 1)) == [EndRanks(0)]
    assert orders(core.handle(RankEnded(0, 1, 0, -15), 2)) == []
    assert orders(core.handle(TimePassed(), 8)) == []
    assert orders(core.handle(RankEnded(0, 1, 2, -15), 8)) == []
    assert orders(core.handle(TimePassed(), 9)) == [KillRanks(0), StartGroup(0, 2)]


def test_any_rank_of_a_group_may_say_never() -> None:
    core = core_of(nproc=2)
    core.handle(RankEnded(0, 1, 1, -9), 1)
    assert orders(core.handle(RankEnded(0, 1, 0, 3), 2)) == [KillRanks(0), Finish(3)]


def test_ranks_that_do_not_end_within_the_grace_are_killed_once() -> None:
    core = core_of(nproc=2)
    core.handle(RankEnded(0, 1, 1, 1), 1)
    assert orders(core.handle(TimePassed(), 10.9)) == []
    assert orders(core.handle(TimePassed(), 11)) == [KillRanks(0)]
    assert orders(core.handle(TimePassed(), 12)) == []
    assert orders(core.handle(RankEnded(0, 1, 0, -9), 13)) == []
    assert core.groups[0].state is GroupState.WAITING


def test_a_rank_that_ends_with_0_waits_for_the_others() -> None:
    core = core_of(nproc=2)
    assert orders(core.handle(RankEnded(0, 1, 0, 0), 1)) == []
    assert orders(core.handle(RankEnded(0, 1, 1, 0), 2)) == [KillRanks(0), Finish(0)]


def test_a_signal_drains_and_the_second_one_kills() -> None:
    core = core_of(2)
    assert orders(core.handle(StopAsked(signal.SIGINT), 1)) == [DrainGroup(0), DrainGroup(1)]
    assert orders(core.handle(RankEnded(0, 1, 0, 0), 2)) == [KillRanks(0)]
    assert orders(core.handle(StopAsked(signal.SIGINT), 3)) == [KillRanks(1)]
    assert orders(core.handle(RankEnded(1, 1, 0, -9), 4)) == [Finish(130)]


def test_two_signals_at_almost_the_same_time_are_one_request() -> None:
    core = core_of()
    assert orders(core.handle(StopAsked(signal.SIGTERM), 1)) == [DrainGroup(0)]
    assert core.handle(StopAsked(signal.SIGTERM), 1.9) == []
    assert orders(core.handle(StopAsked(signal.SIGTERM), 2)) == [KillRanks(0)]


def test_a_drained_group_is_not_restarted_and_not_done() -> None:
    core = core_of()
    core.handle(StopAsked(signal.SIGTERM), 1)
    assert orders(core.handle(RankEnded(0, 1, 0, 0), 2)) == [KillRanks(0), Finish(143)]
    assert core.groups[0].state is GroupState.DRAINED


def test_a_drain_that_takes_too_long_ends_in_a_kill() -> None:
    core = core_of()
    core.handle(StopAsked(signal.SIGTERM), 1)
    assert orders(core.handle(TimePassed(), 11)) == [KillRanks(0)]


def test_a_signal_during_a_pause_ends_the_launcher_at_once() -> None:
    core = core_of()
    core.handle(RankEnded(0, 1, 0, 1), 1)
    assert orders(core.handle(StopAsked(signal.SIGINT), 1.5)) == [Finish(130)]


def test_a_signal_while_a_group_ends_does_not_restart_it() -> None:
    core = core_of(nproc=2)
    core.handle(RankEnded(0, 1, 0, 1), 1)
    assert orders(core.handle(StopAsked(signal.SIGINT), 2)) == []
    assert orders(core.handle(RankEnded(0, 1, 1, 0), 3)) == [KillRanks(0), Finish(130)]


def test_a_command_that_can_not_be_started_is_not_tried_again() -> None:
    core = core_of()
    actions = core.handle(StartFailed(0, 1, "no such file"), 0)
    assert texts(actions) == ["replica 0 can't be started: no such file"]
    assert orders(actions) == [Finish(3)]


def test_a_late_end_of_an_earlier_attempt_changes_nothing() -> None:
    core = core_of()
    core.handle(RankEnded(0, 1, 0, 1), 1)
    core.handle(TimePassed(), 2)
    assert core.handle(RankEnded(0, 1, 0, 1), 3) == []


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_the_launcher_finishes_once_and_no_group_starts_over_a_running_one(seed: int) -> None:
    dice = random.Random(seed)
    replicas, nproc = dice.randint(1, 4), dice.randint(1, 3)
    core = LaunchCore(range(replicas), nproc, POLICY, "host")
    running: set[tuple[int, int, int]] = set()
    now_s, finishes, killed = 0.0, 0, set[int]()
    for step in range(3_000):
        now_s += dice.random() * 5
        event: Event = TimePassed()
        doomed = [each for each in running if each[0] in killed]
        if running and (doomed or dice.random() < 0.3):
            ended = dice.choice(sorted(doomed or running))
            running.remove(ended)
            event = RankEnded(*ended, code=dice.choice([0, 0, 1, -9, 3]))
        elif dice.random() < 0.003 or step == 2_000:
            event = StopAsked(signal.SIGTERM)
        for action in core.handle(event, now_s):
            match action:
                case StartGroup(replica, attempt):
                    assert not [each for each in running if each[0] == replica]
                    assert finishes == 0
                    running |= {(replica, attempt, rank) for rank in range(nproc)}
                    killed.discard(replica)
                case KillRanks(replica):
                    killed.add(replica)
                case Finish():
                    finishes += 1
                    assert not running
        if finishes:
            break
    assert finishes == 1


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"max_restarts": -1}, "--max-restarts is -1"),
        ({"backoff_s": -1.0}, "--backoff is -1"),
        ({"backoff_s": float("nan")}, "--backoff is nan"),
        ({"backoff_s": 5.0, "backoff_most_s": 2.0}, "exceeds --backoff-most"),
        ({"grace_s": float("inf")}, "--grace is inf"),
    ],
)
def test_a_policy_checks_itself(values: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RestartPolicy(**values)  # type: ignore[arg-type]


def test_an_end_in_words() -> None:
    assert [describe(code) for code in (0, 3, -9, -1000)] == ["exit code 0", "exit code 3", "SIGKILL", "signal 1000"]
