"""The step core as transcripts: what happened, line by line, and what it decided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tft_algos.errors import HealingFailed, StateUnavailable, UsageError
from tft_algos.manager.core import MAX_NOTICES_KEPT, CoreSettings, Healing, Phase, StepCore
from tft_algos.testing import plan_of
from tft_coord.core.lineage import fold_lineage, initial_lineage
from tft_coord.core.types import LossNotice, QuorumKey, RankRequest
from tft_coord.errors import StaleQuorum

FRESH = initial_lineage("default")


def core(**settings: object) -> StepCore:
    return StepCore(CoreSettings(**settings))  # type: ignore[arg-type]


def ask(step: StepCore, *, group_usable: bool = True) -> RankRequest:
    return step.quorum_started(checkpoint_metadata="here", group_usable=group_usable)


def commit(step: StepCore, quorum_id: int = 1, **plan: object) -> None:
    """One whole step that commits."""
    ask(step)
    facts = {"step": step.step, "lineage": step.lineage, **plan}
    arrival = step.plan_arrived(plan_of(quorum_id, **facts))  # type: ignore[arg-type]
    if arrival.configure:
        step.group_configured()
    assert step.vote().yes
    step.verdict_arrived(True)


def test_a_fresh_replica_asks_with_the_jobs_lineage_and_holds_nothing() -> None:
    request = ask(core(job="a"))
    assert (request.step, request.lineage, request.held, request.live) == (0, initial_lineage("a"), None, False)
    assert not request.needs_configure


def test_a_commit_counts_the_step_adds_the_participants_and_folds_the_lineage() -> None:
    step = core()
    commit(step, 7, size=3)
    assert (step.step, step.batches_committed, step.live) == (1, 3, True)
    assert step.lineage == fold_lineage(FRESH, QuorumKey(7, 7), 1)


def test_a_no_changes_nothing_but_the_failures_in_a_row() -> None:
    step = core()
    ask(step)
    step.plan_arrived(plan_of(size=2))
    assert not step.verdict_arrived(False).committed
    assert (step.step, step.batches_committed, step.lineage, step.commit_failures) == (0, 0, FRESH, 1)
    assert ask(step).commit_failures == 1


def test_the_group_is_configured_once_for_each_key() -> None:
    step = core()
    commit(step, 7, size=2)
    ask(step)
    assert not step.unchanged_arrived(QuorumKey(7, 7)).configure
    step.verdict_arrived(True)
    ask(step)
    assert step.plan_arrived(plan_of(8, size=2, step=2)).configure


def test_unchanged_means_the_plan_of_that_key_at_my_step() -> None:
    step = core()
    ask(step)
    step.plan_arrived(plan_of(7, size=3, healing=[2], rank=0))
    step.group_configured()
    assert step.num_participants == 2
    step.verdict_arrived(True)
    ask(step)
    arrival = step.unchanged_arrived(QuorumKey(7, 7))
    assert (arrival.plan.step, arrival.plan.lineage) == (1, step.lineage)
    assert (arrival.heal, arrival.serve, arrival.plan.participants) == (False, False, (0, 1, 2))


def test_unchanged_leaves_spares_out() -> None:
    step = core(fixed_with_spares=True, min_replica_size=2)
    ask(step)
    step.plan_arrived(plan_of(7, size=3, rank=2, participants=[0, 1], min_replica_size=2))
    step.group_configured()
    step.verdict_arrived(True)
    ask(step)
    plan = step.unchanged_arrived(QuorumKey(7, 7)).plan
    assert (plan.participants, plan.participating_rank, step.is_participating) == ((0, 1), None, False)


def test_unchanged_of_a_quorum_that_is_not_held_is_no_plan() -> None:
    step = core()
    ask(step)
    with pytest.raises(StaleQuorum, match="this rank holds None"):
        step.unchanged_arrived(QuorumKey(7, 7))
    assert step.plan is None


def test_a_group_that_could_not_be_configured_asks_for_a_new_id() -> None:
    step = core()
    ask(step)
    step.plan_arrived(plan_of(7, size=2))
    step.configure_failed(RuntimeError("nobody came"))
    assert not step.vote().yes
    step.verdict_arrived(False)
    request = ask(step)
    assert (request.needs_configure, request.held) == (True, QuorumKey(7, 7))


def test_a_group_that_failed_outside_a_step_asks_for_a_new_id() -> None:
    step = core()
    commit(step, 7, size=2)
    assert not ask(step).needs_configure
    step.verdict_arrived(False)
    assert ask(step, group_usable=False).needs_configure


def test_every_attempt_has_a_number_whatever_became_of_the_one_before() -> None:
    step = core()
    assert ask(step).attempt == 1
    step.quorum_failed(TimeoutError("no answer"))
    step.verdict_arrived(False)
    assert ask(step).attempt == 2


def test_a_verdict_belongs_to_its_attempt() -> None:
    step = core()
    assert step.verdict is None
    commit(step)
    assert step.verdict is True
    ask(step)
    assert step.verdict is None
    step.plan_arrived(plan_of(2, size=2, step=1))
    step.verdict_arrived(False)
    assert step.verdict is False


def test_an_error_fails_its_own_attempt() -> None:
    step = core()
    ask(step)
    step.plan_arrived(plan_of(7, size=2))
    assert step.error_reported(RuntimeError("first"))
    assert step.error_reported(RuntimeError("second"))
    vote = step.vote()
    assert (vote.yes, vote.enough_replicas, str(vote.error)) == (False, True, "first")
    assert [str(error) for error in step.errors] == ["first", "second"]


def test_an_error_of_an_earlier_attempt_comes_too_late_to_count() -> None:
    step = core()
    ask(step)
    step.plan_arrived(plan_of(7, size=2))
    name = step.name
    step.verdict_arrived(False)
    assert not step.error_reported(RuntimeError("between two steps"), name)
    ask(step)
    step.plan_arrived(plan_of(8, size=2))
    assert not step.error_reported(RuntimeError("late"), name)
    assert step.vote().yes


def test_after_a_failed_quorum_the_next_one_starts_afresh() -> None:
    step = core()
    ask(step)
    step.quorum_failed(TimeoutError("no answer"))
    assert (step.phase, step.num_participants, step.vote().yes) == (Phase.FAILED, 0, False)
    step.verdict_arrived(False)
    request = ask(step)
    assert (request.commit_failures, step.error) == (0, None)
    step.plan_arrived(plan_of(7))
    assert step.vote().yes


def test_too_few_participants_vote_no_without_an_error() -> None:
    step = core(min_replica_size=2)
    ask(step)
    step.plan_arrived(plan_of(7, size=2, healing=[1], min_replica_size=2))
    vote = step.vote()
    assert (vote.yes, vote.enough_replicas, vote.error) == (False, False, None)


def test_at_step_0_the_plan_may_need_fewer_than_later() -> None:
    step = core(min_replica_size=2)
    ask(step)
    step.plan_arrived(plan_of(7, size=2, healing=[1], min_replica_size=1))
    step.group_configured()
    assert step.vote().yes
    step.verdict_arrived(True)
    ask(step)
    assert step.unchanged_arrived(QuorumKey(7, 7)).plan.min_replica_size == 2


def test_max_retries_counts_failures_in_a_row_of_both_kinds() -> None:
    step = core(max_retries=1)
    ask(step)
    step.plan_arrived(plan_of(7))
    assert not step.verdict_arrived(False).exhausted
    ask(step)
    step.quorum_failed(TimeoutError("no answer"))
    outcome = step.verdict_arrived(False)
    assert (outcome.failures, outcome.exhausted) == (2, True)


def test_a_commit_ends_the_row_of_failures() -> None:
    step = core(max_retries=1)
    ask(step)
    step.plan_arrived(plan_of(7))
    step.verdict_arrived(False)
    commit(step, 8)
    assert step.commit_failures == 0


def test_who_heals_gives_zeros_and_takes_the_sources_step_batches_and_lineage() -> None:
    source, member = core(), core()
    for quorum_id in (1, 2):
        commit(source, quorum_id, size=2)
    facts = {"step": 2, "lineage": source.lineage, "size": 2, "healing": [1]}
    ask(source)
    assert source.plan_arrived(plan_of(3, rank=0, **facts)).serve  # type: ignore[arg-type]
    ask(member)
    assert member.plan_arrived(plan_of(3, rank=1, **facts)).heal  # type: ignore[arg-type]
    assert (member.is_participating, member.num_participants) == (False, 1)
    state = source.snapshot_state()
    member.check_staged(state)
    member.load_began()
    member.healed(state)
    for each in (source, member):
        assert each.vote().yes
        each.verdict_arrived(True)
    assert (member.step, member.batches_committed, member.lineage) == (3, 5, source.lineage)
    assert (member.live, member.torn, member.healing) == (True, False, Healing.LOADED)


def test_a_healing_that_succeeded_stays_when_the_step_does_not_commit() -> None:
    member = core()
    ask(member)
    member.plan_arrived(plan_of(3, rank=1, size=2, healing=[1], step=9, lineage=99))
    member.healed({"step": 9, "batches_committed": 18, "lineage": f"{99:016x}"})
    member.verdict_arrived(False)
    request = ask(member)
    assert (request.step, request.lineage, request.live, request.failed_heals) == (9, 99, True, 0)


def test_a_healing_that_failed_changes_nothing_and_is_told() -> None:
    member = core()
    ask(member)
    member.plan_arrived(plan_of(3, rank=1, size=2, healing=[1], step=9, lineage=99))
    member.heal_failed(HealingFailed("the source died"))
    assert not member.vote().yes
    member.verdict_arrived(False)
    request = ask(member)
    assert (request.step, request.lineage, request.failed_heals, request.torn) == (0, FRESH, 1, False)


def test_a_fetched_state_of_another_lineage_is_refused() -> None:
    member = core()
    ask(member)
    member.plan_arrived(plan_of(3, rank=1, size=2, healing=[1], step=9, lineage=99))
    with pytest.raises(HealingFailed, match="it was dropped"):
        member.check_staged({"step": 9, "batches_committed": 18, "lineage": f"{98:016x}"})
    assert member.step == 0


def test_a_load_that_broke_off_leaves_a_torn_state_that_asks_to_heal() -> None:
    member = core()
    ask(member)
    member.plan_arrived(plan_of(3, rank=1, size=2, healing=[1], step=9, lineage=99))
    member.load_began()
    member.heal_failed(HealingFailed("load_state_dict raised"))
    member.verdict_arrived(False)
    assert ask(member).torn


def test_an_optimizer_that_raised_after_the_commit_leaves_a_torn_state_until_it_heals() -> None:
    step = core()
    commit(step, 1, size=2)
    step.optimizer_raised()
    assert ask(step).torn
    step.plan_arrived(plan_of(2, rank=1, size=2, healing=[1], step=1, lineage=step.lineage))
    step.healed({"step": 1, "batches_committed": 2, "lineage": ""})
    assert not step.torn


def test_a_state_from_outside_is_not_live_and_keeps_its_lineage() -> None:
    first, second = core(), core()
    commit(first, 1, size=2)
    second.state_loaded(first.state_dict())
    assert (second.step, second.batches_committed, second.lineage, second.live) == (1, 2, first.lineage, False)


def test_a_state_without_a_lineage_takes_the_one_that_its_first_quorum_gives_it() -> None:
    step = core()
    step.state_loaded({"step": 5, "batches_committed": 10})
    assert ask(step).lineage is None
    step.plan_arrived(plan_of(3, size=2, healing=[1], step=5, lineage=77))
    assert step.lineage == 77
    step.verdict_arrived(False)
    assert ask(step).lineage == 77


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"step": -1, "batches_committed": 0},
        {"step": True, "batches_committed": 0},
        {"step": 1, "batches_committed": "2"},
    ],
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(state: dict[str, object]) -> None:
    step = core()
    with pytest.raises(StateUnavailable, match="whole numbers"):
        step.state_loaded(state)
    assert step.step == 0


def test_a_lineage_that_is_none_is_refused() -> None:
    with pytest.raises(StateUnavailable, match="hexadecimal"):
        core().state_loaded({"step": 1, "batches_committed": 2, "lineage": "what?"})


def test_a_vote_without_a_quorum_is_a_mistake_of_the_loop() -> None:
    with pytest.raises(UsageError, match="start_quorum first"):
        core().vote()


def test_a_new_manager_server_holds_no_quorum() -> None:
    step = core()
    commit(step, 7, size=2)
    ask(step)
    step.server_restarted()
    request = ask(step)
    assert (request.held, request.needs_configure) == (None, False)
    assert step.plan_arrived(plan_of(7, size=2, step=1, lineage=step.lineage)).configure


def test_a_member_that_holds_another_state_and_may_not_heal_never_folds_the_references_lineage() -> None:
    step = core()
    ask(step)
    plan = replace(plan_of(3, size=2, lineage=5), up_to_date=(1,), participants=(1,), participating_rank=None)
    step.plan_arrived(plan)
    step.verdict_arrived(True)
    assert step.lineage == fold_lineage(FRESH, QuorumKey(3, 3), 1)


def test_what_fails_again_and_again_is_asked_for_ever_more_slowly() -> None:
    step = core()
    pauses = []
    for _ in range(12):
        ask(step)
        step.quorum_failed(RuntimeError("refused at once"))
        step.verdict_arrived(False)
        pauses.append(step.pause_ms)
    assert pauses == [0, 10, 20, 40, 80, 160, 320, 640, 1_000, 1_000, 1_000, 1_000]
    commit(step)
    assert step.pause_ms == 0


# --- losses of others -------------------------------------------------------------------------------------------------


def notice(quorum_id: int, replica_id: str = "replica_1", **facts: Any) -> LossNotice:
    return LossNotice(QuorumKey(quorum_id, quorum_id), replica_id, **({"session": 1, "reason": "killed"} | facts))


def holding(quorum_id: int) -> StepCore:
    step = core()
    ask(step)
    step.plan_arrived(plan_of(quorum_id, size=2))
    return step


def test_the_same_loss_in_other_words_is_the_same_loss() -> None:
    step = holding(7)
    assert step.loss_noticed(notice(7))
    assert not step.loss_noticed(notice(7, reason="its connection ended"))
    assert step.losses == (notice(7),)


@pytest.mark.parametrize("facts", [{"lives": True}, {"session": 2}, {"replica_id": "replica_2"}])
def test_another_loss_in_the_same_words_is_another_loss(facts: dict[str, Any]) -> None:
    step = holding(7)
    assert step.loss_noticed(notice(7))
    assert step.loss_noticed(notice(7, **facts))
    assert len(step.losses) == 2


def test_notices_of_later_quorums_never_push_out_those_of_the_held_one() -> None:
    step = holding(7)
    assert step.loss_noticed(notice(7))
    for later in range(8, 18 + MAX_NOTICES_KEPT):
        assert not step.loss_noticed(notice(later))
    assert step.losses == (notice(7),)
    assert step.loss_noticed(notice(7, "replica_2"))
    assert len(step.losses) == 2
    ask(step)
    step.plan_arrived(plan_of(8, size=2))
    assert step.losses == (notice(8),)
