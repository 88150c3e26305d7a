"""Mutants of standing quorums: each rule has mistakes that somebody could make, and each is caught by the test named.

The simulator has more of them, for what only whole rounds show (`tft-sim`, `test_standing_quorums.py`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tft_coord.core import living_quorum, standing
from tft_coord.core.commit import Votes
from tft_coord.core.living_quorum import LivingQuorum
from tft_coord.core.newest import NewestQuorum
from tft_coord.core.replica_group import ReplicaGroupCore
from tft_coord.core.session import SessionCore
from tft_coord.core.standing import Ask, GoOn, Late, Lease, StandingQuorum, Vote, Word
from tft_coord.core.types import Quorum, QuorumKey, QuorumNews
from tft_coord.timeouts import Timeouts


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RANK, GROUP, LIGHTHOUSE = load("test_standing"), load("test_standing_group"), load("test_living_quorum")
RECALL, NEWEST, LATE = LIGHTHOUSE.TestRecall(), LIGHTHOUSE.TestTheNewest(), LIGHTHOUSE.TestMembersThatDoNotCome()
OVER, MEMORY = LIGHTHOUSE.TestNobodyStartsOver(), LIGHTHOUSE.TestWithoutMemory()
VERDICT, ALONE, NEWS = GROUP.TestTheVerdict(), GROUP.TestARankThatAsksAlone(), GROUP.TestNews()

right_word, right_summed, right_next_round = StandingQuorum.word, StandingQuorum.summed, StandingQuorum.next_round
right_decided, right_told, right_broke, right_late = (
    StandingQuorum.decided,
    StandingQuorum.told,
    StandingQuorum.broke,
    StandingQuorum.late,
)
right_planned, right_answered, right_holds = StandingQuorum.planned, Lease.answered, Lease.holds
right_news, right_given, right_breaks_for = LivingQuorum.news, LivingQuorum.given, LivingQuorum.breaks_for
right_waits_for, right_named = LivingQuorum.waits_for, NewestQuorum.named


# Rules 1 and 2.
def says_ok_whatever_happened(self: StandingQuorum, now_ms: int, **said: Any) -> Word:
    return replace(right_word(self, now_ms, **said), ok=True)


def gives_no_check(self: StandingQuorum, now_ms: int, **said: Any) -> Word:
    return replace(right_word(self, now_ms, **said), check=0)


def forgets_that_it_recovers(self: StandingQuorum, now_ms: int, **said: Any) -> Word:
    return replace(right_word(self, now_ms, **said), recovering=False)


def commits_though_one_has_an_error(self: StandingQuorum, total: Sequence[int] | None, lineage: int | None) -> Vote:
    ok = self._running().plan.replica_world_size
    return right_summed(self, (ok, *total[1:]) if total is not None else None, lineage)


def commits_without_the_word(self: StandingQuorum, total: Sequence[int] | None, lineage: int | None) -> Vote:
    return Vote(yes=True, stands=True) if total is None else right_summed(self, total, lineage)


def compares_no_states(self: StandingQuorum, total: Sequence[int] | None, lineage: int | None) -> Vote:
    vote = right_summed(self, total, lineage)
    return Vote(yes=True, stands=True) if "different states" in vote.why else vote


def stands_though_others_wish_otherwise(self: StandingQuorum, total: Sequence[int] | None, lineage: int | None) -> Vote:
    vote = right_summed(self, total, lineage)
    return replace(vote, stands=vote.yes)


# Rule 3.
def goes_on_though_its_state_changed(self: StandingQuorum, now_ms: int, unfit: str = "") -> GoOn | Ask:
    return right_next_round(self, now_ms)


def breaks_nothing_when_it_asks_alone(self: StandingQuorum, now_ms: int, unfit: str = "") -> GoOn | Ask:
    found = right_next_round(self, now_ms, unfit)
    return replace(found, breaks=False) if isinstance(found, Ask) else found


def sees_nobody_recover(plan: Any) -> bool:
    return False


def stands_whatever_the_group_says(self: StandingQuorum, *, yes: bool, stands: bool) -> bool:
    return right_decided(self, yes=yes, stands=yes)


# Rule 4.
def keeps_its_process_group(self: StandingQuorum, *, yes: bool, stands: bool) -> bool:
    right_decided(self, yes=yes, stands=stands)
    return False


# Rule 5.
def tells_no_other_rank(self: ReplicaGroupCore, rank: int, held: QuorumKey | None) -> list[Any]:
    return []


def seals_nothing(self: Votes, key: QuorumKey) -> list[Any]:
    return []


def never_unseals(self: Votes) -> None:
    return None


# Rules 6 and 8.
def recalls_nobody(self: LivingQuorum) -> bool:
    return False


def recalls_all_the_time(self: LivingQuorum) -> bool:
    self._recalled = True
    return True


def repeats_no_recall(self: LivingQuorum, key: QuorumKey | None, beat: int, *, broken: bool) -> QuorumNews:
    return (
        replace(right_news(self, key, beat, broken=broken), recalled=False)
        if beat
        else right_news(self, key, beat, broken=broken)
    )


def says_nothing_of_a_break(self: LivingQuorum, key: QuorumKey | None, beat: int, *, broken: bool) -> QuorumNews:
    return right_news(self, key, beat, broken=False)


def is_deaf_to_a_recall(self: StandingQuorum, news: QuorumNews) -> bool:
    return right_told(self, replace(news, recalled=False))


def keeps_a_recall_for_ever(self: StandingQuorum, plan: Any, now_ms: int, in_flight: int = 0) -> None:
    recalled = self._recalled
    right_planned(self, plan, now_ms, in_flight)
    self._recalled = recalled


def stays_in_an_older_quorum(self: StandingQuorum, news: QuorumNews) -> bool:
    return right_told(self, replace(news, key=min(news.key, self.key)) if news.key and self.key else news)


def forgets_what_comes_early(self: StandingQuorum, key: QuorumKey) -> bool:
    return right_broke(self, key) if key == self.key else False


def passes_nothing_on(self: NewestQuorum, news: QuorumNews, sent_ms: int | None, held: QuorumKey | None) -> bool:
    right_named(self, news, sent_ms, held)
    return False


# Rule 7.
def waits_for_ever_for_the_overdue(self: LivingQuorum, members: Iterable[Any], now_ms: int) -> None:
    return None


def takes_everybody_for_waiting(replica: Any) -> bool:
    return True


# Rule 9.
def is_late_at_once(self: StandingQuorum, now_ms: int, waits_since_ms: int) -> Late | None:
    return right_late(self, now_ms + self._join_timeout_ms, waits_since_ms)


def counts_the_wait_of_the_round_before(self: StandingQuorum, now_ms: int, waits_since_ms: int) -> Late | None:
    if self._rounds:
        self._rounds[0].began_ms = 0
    return right_late(self, now_ms, waits_since_ms)


def breaks_for_nobody(self: LivingQuorum, members: Iterable[Any]) -> None:
    return None


def waits_for_the_late_once_more(self: LivingQuorum) -> int:
    return self._timeouts.join_timeout_ms


# Rule 10.
def counts_from_the_hearing(self: Lease, number: int, age_ms: int, *, renews: bool) -> None:
    right_answered(self, number, 0, renews=renews)


def believes_every_answer(self: Lease, number: int, age_ms: int, *, renews: bool) -> None:
    right_answered(self, number, age_ms, renews=True)


def goes_back_to_an_older_beat(self: Lease, number: int, age_ms: int, *, renews: bool) -> None:
    if renews and number in self._beats:
        self._from_ms = self._beats[number] - age_ms


def has_a_lease_without_end(self: Lease, now_ms: int) -> bool:
    return True


def says_nothing_before_the_lease_ends(self: Lease, now_ms: int) -> bool:
    return False


def asks_though_no_beat_failed(self: Lease, now_ms: int) -> bool:
    return 3 * (now_ms - self._from_ms) > 2 * self._lease_ms


def answers_with_no_age(self: NewestQuorum, beat: int, now_ms: int) -> list[QuorumNews]:
    return [] if self._sent_ms is None else [replace(self._news, beat=beat)]


def believes_answers_of_older_streams(self: SessionCore, number: int) -> int | None:
    return 1_000


# Rule 11.
def waits_for_nobody(self: LivingQuorum, *_: Any) -> None:
    return None


def waits_for_heartbeat_timeout_alone(self: Timeouts, lease_ms: int) -> int:
    return self.heartbeat_timeout_ms


def leaves_no_margin(self: Timeouts, lease_ms: int) -> int:
    return lease_ms


def forgets_those_of_earlier_quorums(self: LivingQuorum, quorum: Quorum, before: Quorum | None) -> None:
    right_given(self, quorum, None)


def waits_for_the_dead(replica: Any) -> bool:
    return False


def waits_though_a_member_is_there(self: LivingQuorum, waiting: Any, members: Any, replicas: Any, now_ms: int) -> Any:
    return right_waits_for(self, {name for name in waiting if name not in members}, members, replicas, now_ms)


def is_hurried_by_who_waits(self: LivingQuorum) -> int:
    return 0


def stands_without_a_lease(self: LivingQuorum) -> bool:
    return True


@dataclass(frozen=True)
class Mutant:
    """A mistake, and the test that catches it."""

    rule: int
    target: Any
    name: str
    mistake: Callable[..., Any]
    caught_by: Callable[..., None]
    arguments: tuple[Any, ...] = ()


MUTANTS = [
    Mutant(1, StandingQuorum, "word", says_ok_whatever_happened, RANK.test_a_rank_with_an_error_is_not_ok),
    Mutant(1, StandingQuorum, "word", gives_no_check, RANK.test_all_ok_at_one_state_is_a_yes),
    Mutant(1, StandingQuorum, "word", forgets_that_it_recovers, RANK.test_one_that_recovers_says_so_and_gives_no_check),
    Mutant(2, StandingQuorum, "summed", commits_though_one_has_an_error, RANK.test_one_error_fails_the_round_for_all),
    Mutant(2, StandingQuorum, "summed", commits_without_the_word, RANK.test_a_word_that_does_not_complete_is_a_no),
    Mutant(2, StandingQuorum, "summed", compares_no_states, RANK.test_participants_of_different_states_fail_the_round),
    Mutant(
        2,
        StandingQuorum,
        "summed",
        stands_though_others_wish_otherwise,
        RANK.test_a_wish_of_one_ends_the_standing_of_all,
        ("leave",),
    ),
    Mutant(
        3,
        StandingQuorum,
        "next_round",
        goes_on_though_its_state_changed,
        RANK.test_what_changed_outside_of_the_rounds_breaks_the_quorum,
    ),
    Mutant(
        3,
        StandingQuorum,
        "next_round",
        breaks_nothing_when_it_asks_alone,
        RANK.test_what_changed_outside_of_the_rounds_breaks_the_quorum,
    ),
    Mutant(
        3,
        standing,
        "_somebody_recovers",
        sees_nobody_recover,
        RANK.test_a_round_in_which_a_member_recovered_is_followed_by_a_request,
    ),
    Mutant(
        3,
        StandingQuorum,
        "decided",
        stands_whatever_the_group_says,
        RANK.test_a_group_whose_verdict_does_not_stand_asks,
    ),
    Mutant(4, StandingQuorum, "decided", keeps_its_process_group, RANK.test_a_no_aborts_the_process_group),
    Mutant(
        5,
        ReplicaGroupCore,
        "_leave_standing",
        tells_no_other_rank,
        ALONE.test_the_others_are_told_that_the_quorum_is_broken,
    ),
    Mutant(5, Votes, "seal", seals_nothing, ALONE.test_no_later_round_of_the_quorum_is_a_yes),
    Mutant(5, Votes, "seal", seals_nothing, ALONE.test_an_open_round_is_sealed),
    Mutant(
        5,
        Votes,
        "unseal",
        never_unseals,
        ALONE.test_once_all_have_asked_the_next_quorum_is_voted_on_as_ever,
    ),
    Mutant(6, LivingQuorum, "recall", recalls_nobody, RECALL.test_a_newcomer_that_asks_calls_all_members_back),
    Mutant(6, LivingQuorum, "recall", recalls_all_the_time, RECALL.test_a_newcomer_that_asks_calls_all_members_back),
    Mutant(6, LivingQuorum, "news", repeats_no_recall, RECALL.test_the_answer_to_each_beat_repeats_it),
    Mutant(
        6,
        LivingQuorum,
        "stands",
        stands_without_a_lease,
        RECALL.test_members_that_ask_in_every_step_are_not_recalled,
        (None,),
    ),
    Mutant(
        6,
        LivingQuorum,
        "joins_from_ms",
        is_hurried_by_who_waits,
        RECALL.test_a_replica_that_has_waited_for_long_does_not_hurry_the_members,
    ),
    Mutant(6, StandingQuorum, "told", is_deaf_to_a_recall, RANK.test_a_recall_is_said_in_the_next_word),
    Mutant(6, StandingQuorum, "planned", keeps_a_recall_for_ever, RANK.test_an_answer_ends_the_recall),
    Mutant(6, NewestQuorum, "named", passes_nothing_on, NEWS.test_a_recall_is_passed_on_at_once_and_once),
    Mutant(
        7,
        LivingQuorum,
        "overdue",
        waits_for_ever_for_the_overdue,
        LATE.test_one_whose_word_told_it_nothing_is_told_two_beats_later,
    ),
    Mutant(
        7,
        living_quorum,
        "_waits",
        takes_everybody_for_waiting,
        LATE.test_members_that_are_busy_or_between_two_steps_come_by_themselves,
    ),
    Mutant(8, LivingQuorum, "news", says_nothing_of_a_break, NEWEST.test_it_says_that_the_quorum_is_broken),
    Mutant(8, StandingQuorum, "told", stays_in_an_older_quorum, RANK.test_a_newer_quorum_breaks_the_one_that_is_held),
    Mutant(8, StandingQuorum, "broke", forgets_what_comes_early, RANK.test_news_that_overtakes_its_plan_is_kept),
    Mutant(8, NewestQuorum, "named", passes_nothing_on, NEWS.test_a_newer_quorum_and_a_broken_one_are_passed_on),
    Mutant(
        9, StandingQuorum, "late", is_late_at_once, RANK.test_a_standing_round_that_waits_for_join_timeout_is_late_once
    ),
    Mutant(
        9,
        StandingQuorum,
        "late",
        counts_the_wait_of_the_round_before,
        RANK.test_a_wait_of_the_round_before_does_not_count,
    ),
    Mutant(
        9,
        LivingQuorum,
        "breaks_for",
        breaks_for_nobody,
        LATE.test_a_late_round_is_broken_for_whoever_is_between_two_steps,
    ),
    Mutant(
        9,
        LivingQuorum,
        "join_timeout_ms",
        waits_for_the_late_once_more,
        LATE.test_the_others_go_on_without_it_a_moment_later,
    ),
    Mutant(10, Lease, "answered", counts_from_the_hearing, RANK.test_the_lease_counts_from_the_sending_of_the_beat),
    Mutant(
        10,
        Lease,
        "answered",
        believes_every_answer,
        RANK.test_an_answer_that_names_another_quorum_renews_nothing,
        (None,),
    ),
    Mutant(10, Lease, "answered", goes_back_to_an_older_beat, RANK.test_a_late_answer_to_an_old_beat_renews_nothing),
    Mutant(10, Lease, "holds", has_a_lease_without_end, RANK.test_without_an_answer_the_lease_ends),
    Mutant(
        10,
        Lease,
        "runs_out",
        says_nothing_before_the_lease_ends,
        RANK.test_the_others_are_asked_to_ask_when_the_lease_runs_out,
    ),
    Mutant(
        10,
        Lease,
        "runs_out",
        asks_though_no_beat_failed,
        RANK.test_a_lease_that_runs_out_while_no_beat_failed_asks_nobody,
    ),
    Mutant(
        10, NewestQuorum, "answer", answers_with_no_age, NEWS.test_a_rank_is_told_how_long_ago_the_lighthouse_was_asked
    ),
    Mutant(
        10,
        SessionCore,
        "beat_answered",
        believes_answers_of_older_streams,
        GROUP.TestTheSession().test_an_answer_to_a_beat_of_an_older_stream_counts_for_nothing,
    ),
    Mutant(
        11,
        LivingQuorum,
        "waits_for",
        waits_for_nobody,
        OVER.test_a_fresh_replica_waits_for_members_that_may_still_train,
    ),
    Mutant(
        11,
        LivingQuorum,
        "waits_for",
        waits_though_a_member_is_there,
        OVER.test_with_one_member_nobody_else_is_waited_for,
    ),
    Mutant(
        11,
        Timeouts,
        "silence_after_lease_ms",
        waits_for_heartbeat_timeout_alone,
        OVER.test_a_fresh_replica_waits_for_members_that_may_still_train,
    ),
    Mutant(
        11,
        Timeouts,
        "silence_after_lease_ms",
        leaves_no_margin,
        OVER.test_a_fresh_replica_waits_for_members_that_may_still_train,
    ),
    Mutant(
        11,
        LivingQuorum,
        "given",
        forgets_those_of_earlier_quorums,
        OVER.test_a_member_of_an_earlier_quorum_that_was_cut_off_may_hold_the_newest_state,
    ),
    Mutant(11, living_quorum, "_is_gone", waits_for_the_dead, OVER.test_whose_end_is_known_is_not_waited_for),
    Mutant(
        11,
        LivingQuorum,
        "waits_for_unnamed",
        waits_for_nobody,
        MEMORY.test_members_that_nobody_can_name_are_waited_for_as_long,
    ),
    Mutant(
        11, LivingQuorum, "waits_for_unnamed", waits_for_nobody, MEMORY.test_a_durable_counter_tells_of_an_earlier_life
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: f"{each.rule}-{each.mistake.__name__}")
def test_a_mistake_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.caught_by(*mutant.arguments)
    right = vars(mutant.target)[mutant.name]
    mistake = property(mutant.mistake) if isinstance(right, property) else mutant.mistake
    monkeypatch.setattr(mutant.target, mutant.name, mistake)
    with pytest.raises((AssertionError, ValueError)):
        mutant.caught_by(*mutant.arguments)


def test_each_rule_of_the_coordination_has_a_mutant() -> None:
    assert {mutant.rule for mutant in MUTANTS} == set(range(1, 12))
