"""The step as transcripts: what happened, event by event, and what it decided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import pytest

from tft_coord.core.lineage import checked_lineage, fold_lineage, initial_lineage
from tft_coord.core.step import Effects, Healing, Phase, Stage, StepCore, StepName, StepSettings
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.step.attempt import MAX_ERRORS_KEPT
from tft_coord.core.step.errors import HealingError, StepAbandonedError, SyncAbandonedError, UsageError, UserStateError
from tft_coord.core.step.losses import MAX_NOTICES_KEPT
from tft_coord.core.step.starting import standing_plan
from tft_coord.core.types import LossNotice, Plan, Purpose, QuorumKey, RankRequest, Refusal, Source
from tft_coord.errors import RefusedError, ReplicaGroupLostError, StaleQuorumError

FRESH = initial_lineage("default")
T = TypeVar("T")


def plan_of(
    quorum_id: int = 1,
    *,
    step: int = 0,
    lineage: int | None = None,
    rank: int = 0,
    size: int = 1,
    healing: Sequence[int] = (),
    participants: Sequence[int] | None = None,
    min_replica_size: int = 1,
) -> Plan:
    """A plan, as replica `rank` of `size` gets it; those in `healing` heal, all others hold the reference."""
    names = tuple(f"replica_{member}" for member in range(size))
    holders = tuple(member for member in range(size) if member not in healing)
    counted = tuple(participants) if participants is not None else holders
    heal = rank in healing
    return Plan(
        key=QuorumKey(quorum_id, quorum_id),
        replica_id=names[rank],
        replica_rank=rank,
        replica_world_size=size,
        replica_ids=names,
        step=step,
        lineage=FRESH if lineage is None else lineage,
        heal=heal,
        sources=tuple(Source(member, names[member], names[member]) for member in holders) if heal else (),
        recover_dst_replica_ranks=tuple(healing) if rank == holders[0] else (),
        serve=bool(healing) and rank in holders,
        store_address="localhost:1",
        up_to_date=holders,
        participants=counted,
        participating_rank=counted.index(rank) if rank in counted else None,
        min_replica_size=min_replica_size,
    )


def one(kind: type[T], effects: Iterable[object]) -> T:
    """The only effect of that kind."""
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, (kind, effects)
    return found[0]


def none(kind: type[object], effects: Iterable[object]) -> bool:
    return not any(isinstance(effect, kind) for effect in effects)


class Rank:
    """A core, and a shell that does what is asked of it."""

    def __init__(self, **settings: Any) -> None:
        self.core = StepCore(StepSettings(**settings))
        self.now_ms = 0

    @property
    def status(self) -> Any:
        return self.core.status

    @property
    def number(self) -> int:
        return self.core.status.name.attempt

    def tell(self, event: Any) -> Effects:
        return self.core.handle(event, self.now_ms)

    def ask(self, **facts: Any) -> RankRequest:
        return one(do.Ask, self.tell(on.StepStarted(checkpoint_metadata="here", **facts))).request

    def plan(self, plan: Plan | QuorumKey, *, builds: bool = True) -> Effects:
        """The answer comes, and the process group is built for it."""
        number = self.number
        arrived = on.PlanArrived(number, plan) if isinstance(plan, Plan) else on.UnchangedArrived(number, plan)
        effects = self.tell(arrived)
        if builds and not none(do.Configure, effects):
            self.tell(on.GroupConfigured(number, self.status.held))
        return effects

    def begin(self, plan: Plan | QuorumKey, **facts: Any) -> Effects:
        self.ask(**facts)
        return self.plan(plan)

    def vote(self, number: int = 0) -> do.CastVote:
        """To the vote of an attempt that exchanges no state."""
        self.tell(on.EndAsked(number))
        assert self.tell(on.ReductionsEnded(number)) == (do.SynchronizeDevice(),)
        effects = self.tell(on.DeviceSynchronized(number))
        if not none(do.ExchangeState, effects):
            assert self.tell(on.ExchangeAsked()) == ()
            effects = self.tell(on.VoteAsked())
        return one(do.CastVote, effects)

    def end(self, yes: bool = True, number: int = 0, *, leaves: bool = False) -> do.Concluded:
        return one(do.Concluded, self.tell(on.VerdictArrived(number, yes, leaves)))

    def commit(self, quorum_id: int = 1, **plan: Any) -> None:
        """One whole step that commits."""
        status = self.status
        self.begin(plan_of(quorum_id, **{"step": status.step, "lineage": status.lineage, **plan}))
        assert self.vote().yes
        assert self.end().committed

    def fails_alone(self, error: Exception | None = None) -> do.Concluded:
        """An attempt without a quorum."""
        self.ask()
        self.tell(on.QuorumFailed(self.number, error or TimeoutError("no answer")))
        return one(do.Concluded, self.tell(on.ReductionsEnded()))

    def defer(self) -> int:
        return one(do.PutAside, self.tell(on.DeferAsked())).name.attempt


# --- asking and the state ---------------------------------------------------------------------------------------------


def test_a_fresh_replica_asks_with_the_jobs_lineage_and_holds_nothing() -> None:
    request = Rank(job="a").ask()
    assert (request.step, request.lineage, request.held, request.live) == (0, initial_lineage("a"), None, False)
    assert not request.needs_configure


def test_a_commit_counts_the_step_adds_the_participants_and_folds_the_lineage() -> None:
    rank = Rank()
    rank.commit(7, size=3)
    assert (rank.status.step, rank.status.batches_committed, rank.status.live) == (1, 3, True)
    assert rank.status.lineage == fold_lineage(FRESH, QuorumKey(7, 7), 1)


def test_a_no_changes_nothing_but_the_failures_in_a_row() -> None:
    rank = Rank()
    rank.begin(plan_of(size=2))
    assert not rank.end(False).committed
    status = rank.status
    assert (status.step, status.batches_committed, status.lineage, status.commit_failures) == (0, 0, FRESH, 1)
    assert rank.ask().commit_failures == 1


def test_the_group_is_configured_once_for_each_key() -> None:
    rank = Rank()
    rank.commit(7, size=2)
    assert none(do.Configure, rank.begin(QuorumKey(7, 7)))
    rank.end(True)
    assert one(do.Configure, rank.begin(plan_of(8, size=2, step=2))).attempt == 3


def test_unchanged_means_the_plan_of_that_key_at_my_step() -> None:
    rank = Rank()
    rank.begin(plan_of(7, size=3, healing=[2], rank=0))
    assert rank.status.num_participants == 2
    rank.end(True)
    effects = rank.begin(QuorumKey(7, 7))
    plan = one(do.UsePlan, effects).plan
    assert (plan.step, plan.lineage) == (1, rank.status.lineage)
    assert (plan.heal, plan.serve, plan.participants) == (False, False, (0, 1, 2))


def test_a_quorum_that_stands_keeps_all_of_its_plan_but_the_step() -> None:
    first = replace(
        plan_of(7, size=3, rank=1, healing=[2]),
        reconfigure_handles=("a", "b", "c"),
        store_replica_id="replica_2",
        lease_ms=60_000,
    )
    plan = standing_plan(first, 5, 77, StepSettings(min_replica_size=2))
    changes = {"step": 5, "lineage": 77, "serve": False, "up_to_date": (0, 1, 2), "participants": (0, 1, 2)}
    assert plan == replace(first, **changes, min_replica_size=2)  # type: ignore[arg-type]
    assert standing_plan(plan, 6, 78, StepSettings()).up_to_date is plan.up_to_date


def test_unchanged_leaves_spares_out() -> None:
    rank = Rank(fixed_with_spares=True, min_replica_size=2)
    rank.begin(plan_of(7, size=3, rank=2, participants=[0, 1], min_replica_size=2))
    rank.end(True)
    rank.begin(QuorumKey(7, 7))
    plan = rank.status.plan
    assert (plan.participants, plan.participating_rank, rank.status.is_participating) == ((0, 1), None, False)


def test_unchanged_of_a_quorum_that_is_not_held_is_no_plan() -> None:
    rank = Rank()
    rank.ask()
    with pytest.raises(StaleQuorumError, match="this rank has None"):
        rank.plan(QuorumKey(7, 7))
    assert rank.status.plan is None


def test_a_group_that_could_not_be_configured_asks_for_a_new_id() -> None:
    rank = Rank()
    rank.ask()
    rank.plan(plan_of(7, size=2), builds=False)
    rank.tell(on.ConfigureFailed(rank.number, RuntimeError("nobody came")))
    assert not rank.vote().yes
    rank.end(False)
    request = rank.ask()
    assert (request.needs_configure, request.held) == (True, QuorumKey(7, 7))


def test_a_group_that_failed_outside_a_step_asks_for_a_new_id() -> None:
    rank = Rank()
    rank.commit(7, size=2)
    assert not rank.ask().needs_configure
    rank.plan(QuorumKey(7, 7))
    rank.end(False)
    assert rank.ask(group_usable=False).needs_configure


def test_every_attempt_has_a_number_whatever_became_of_the_one_before() -> None:
    rank = Rank()
    rank.fails_alone()
    assert rank.ask().attempt == 2


def test_an_answer_to_an_earlier_attempt_changes_nothing() -> None:
    rank = Rank()
    rank.fails_alone()
    rank.ask()
    before = rank.status
    for event in (
        on.PlanArrived(1, plan_of(7)),
        on.UnchangedArrived(1, QuorumKey(7, 7)),
        on.QuorumFailed(1, TimeoutError("late")),
    ):
        assert rank.tell(event) == ()
        assert rank.status == before


def test_a_state_that_is_loaded_in_a_step_changes_no_name_of_its_vote() -> None:
    """A group that goes back to an earlier step would be given the verdict that it had there."""
    rank = Rank()
    for _ in range(3):
        rank.commit(7, size=2)
    rank.begin(QuorumKey(7, 7))
    rank.tell(on.StateLoaded({"step": 1, "batches_committed": 2}))
    vote = rank.vote()
    assert (vote.step, vote.yes) == (3, False)


def test_a_verdict_belongs_to_its_attempt() -> None:
    rank = Rank()
    assert rank.status.verdict is None
    rank.commit()
    assert rank.status.verdict is True
    rank.ask()
    assert rank.status.verdict is None
    rank.plan(plan_of(2, size=2, step=1))
    rank.end(False)
    assert rank.status.verdict is False


def test_after_a_failed_quorum_the_next_one_starts_afresh() -> None:
    rank = Rank()
    rank.ask()
    rank.tell(on.QuorumFailed(1, TimeoutError("no answer")))
    assert (rank.status.phase, rank.status.num_participants) == (Phase.FAILED, 0)
    assert not one(do.Concluded, rank.tell(on.ReductionsEnded())).committed
    request = rank.ask()
    assert (request.commit_failures, rank.status.error) == (0, None)
    rank.plan(plan_of(7))
    assert rank.vote().yes


def test_a_new_manager_server_holds_no_quorum_and_is_asked_again() -> None:
    rank = Rank()
    rank.commit(7, size=2)
    before = rank.ask()
    again = one(do.Ask, rank.tell(on.ServerRestarted())).request
    assert before.held == QuorumKey(7, 7)
    # The request still names the quorum, whose id the next one must exceed.
    assert (again.held, again.needs_configure, again.attempt) == (before.held, False, before.attempt)
    assert not none(do.Configure, rank.plan(plan_of(7, size=2, step=1, lineage=rank.status.lineage)))
    rank.end(False)
    assert rank.tell(on.ServerRestarted()) == (), "nobody waits for an answer"
    assert not rank.ask().needs_configure


def test_a_member_that_holds_another_state_and_may_not_heal_never_folds_the_references_lineage() -> None:
    rank = Rank()
    plan = replace(plan_of(3, size=2, lineage=5), up_to_date=(1,), participants=(1,), participating_rank=None)
    rank.begin(plan)
    rank.end(True)
    assert rank.status.lineage == fold_lineage(FRESH, QuorumKey(3, 3), 1)


def test_a_step_that_is_open_beside_others_is_put_aside_before_the_next() -> None:
    rank = Rank()
    rank.begin(plan_of(7, size=2))
    rank.defer()
    assert rank.tell(on.StartAsked()) == ()
    rank.ask()
    with pytest.raises(UsageError, match="call defer"):
        rank.tell(on.StartAsked())


def test_what_fails_again_and_again_is_asked_for_ever_more_slowly() -> None:
    rank = Rank()
    pauses = []
    for _ in range(12):
        rank.fails_alone(RuntimeError("refused at once"))
        pauses.append(sum(effect.ms for effect in rank.tell(on.StartReady()) if isinstance(effect, do.Pause)))
    assert pauses == [0, 10, 20, 40, 80, 160, 320, 640, 1_000, 1_000, 1_000, 1_000]
    assert rank.tell(on.StartReady(urgent=True)) == (), "the lighthouse hears at once whom this rank does not reach"
    rank.commit()
    assert rank.tell(on.StartReady()) == ()


def test_the_first_attempt_of_a_quorum_is_excused_and_those_of_a_recovery_and_after() -> None:
    rank = Rank()
    seen = []
    for plan in (
        plan_of(7, size=2),
        QuorumKey(7, 7),
        plan_of(8, size=2, step=2),
        plan_of(8, rank=1, size=2, healing=[1], step=9, lineage=99),
        QuorumKey(8, 8),
        QuorumKey(8, 8),
    ):
        effects = rank.begin(plan)
        seen.append(rank.status.excused)
        assert none(do.ForgetPace, effects) is not rank.status.excused
        if rank.status.healing is Healing.FETCHING:
            heals(rank)
        rank.end(True)
    assert seen == [True, False, True, True, True, False]
    rank.fails_alone()
    assert rank.status.excused


def test_a_rank_prepares_to_serve_a_few_attempts_after_it_began_or_healed() -> None:
    rank = Rank()
    prepares = []
    for number in range(1, 13):
        prepares.append(one(do.Ask, rank.tell(on.StepStarted())).prepares_to_serve)
        rank.plan(plan_of(3, rank=1, size=2, healing=[1] if number == 7 else [], step=9, lineage=99))
        if number == 7:
            heals(rank)
        rank.end(False)
    assert [number for number, each in enumerate(prepares, start=1) if each] == [5, 11]


def test_a_state_may_be_taken_early_where_no_other_rank_has_to_know() -> None:
    def may(rank: Rank, **facts: Any) -> bool:
        return one(do.Ask, rank.tell(on.StepStarted(**facts))).may_take_early

    assert may(Rank())
    assert not may(Rank(world_size=2))
    assert not may(Rank(use_async_quorum=False))
    assert may(Rank(use_async_quorum=False), use_async_quorum=True)
    rank = Rank()
    rank.ask()
    rank.tell(on.StrategyExchanges())
    assert not may(rank)


def test_a_rank_waits_for_its_quorum_until_the_group_is_built() -> None:
    rank = Rank()
    assert not rank.status.pends
    rank.ask()
    assert rank.status.pends
    rank.plan(plan_of(7, size=2), builds=False)
    assert rank.status.pends
    rank.tell(on.GroupConfigured(1, QuorumKey(7, 7)))
    assert not rank.status.pends
    rank.end(True)
    rank.ask()
    rank.plan(QuorumKey(7, 7), builds=False)
    assert not rank.status.pends, "nothing is built for a quorum that stands"


# --- errors and the vote ----------------------------------------------------------------------------------------------


def test_an_error_fails_its_own_attempt() -> None:
    rank = Rank()
    rank.begin(plan_of(7, size=2))
    for words in ("first", "second"):
        report = one(do.ReportError, rank.tell(on.ErrorReported(RuntimeError(words))))
        assert report.counts
    vote = rank.vote()
    assert (vote.yes, vote.enough_replicas, str(vote.error)) == (False, True, "first")
    assert [str(error) for error in rank.status.errors] == ["first", "second"]


def test_an_error_of_an_earlier_attempt_comes_too_late_to_count() -> None:
    rank = Rank()
    rank.begin(plan_of(7, size=2))
    name = rank.status.name
    rank.end(False)
    assert not one(do.ReportError, rank.tell(on.ErrorReported(RuntimeError("between two steps"), name))).counts
    rank.begin(plan_of(8, size=2))
    assert not one(do.ReportError, rank.tell(on.ErrorReported(RuntimeError("late"), name))).counts
    assert rank.vote().yes


def test_an_attempt_keeps_a_bounded_number_of_errors() -> None:
    rank = Rank()
    rank.begin(plan_of(7))
    for number in range(2 * MAX_ERRORS_KEPT):
        rank.tell(on.ErrorReported(RuntimeError(str(number))))
    assert [str(error) for error in rank.status.errors] == [str(number) for number in range(MAX_ERRORS_KEPT)]


def test_what_this_process_cant_go_on_with_is_raised_before_the_vote_whatever_came_before() -> None:
    rank = Rank()
    rank.begin(plan_of(7))
    rank.tell(on.ErrorReported(RuntimeError("first")))
    rank.tell(on.ErrorReported(RefusedError("a wrong secret")))
    assert "a wrong secret" in str(one(do.Raise, rank.tell(on.ReductionsEnded())).error)


def test_a_lost_group_fails_this_and_every_later_attempt_with_the_words_of_the_manager_server() -> None:
    rank = Rank()
    rank.begin(plan_of(7))
    rank.tell(on.ErrorReported(ReplicaGroupLostError("a rank is lost")))
    effects = rank.tell(on.GroupWasLost(ReplicaGroupLostError("rank 1 is lost")))
    assert not none(do.BreakAll, effects)
    assert "rank 1 is lost" in str(one(do.Raise, rank.tell(on.ReductionsEnded())).error)
    rank.begin(plan_of(8))
    assert "rank 1 is lost" in str(one(do.Raise, rank.tell(on.ReductionsEnded())).error)


def test_too_few_participants_vote_no_without_an_error_and_are_reported_once() -> None:
    rank = Rank(min_replica_size=2)
    reported = []
    for plan in (plan_of(7, size=2, healing=[1], min_replica_size=2), plan_of(8, size=1, min_replica_size=2)):
        rank.begin(plan)
        rank.tell(on.ReductionsEnded())
        rank.tell(on.DeviceSynchronized())
        rank.tell(on.ExchangeAsked(offers=True))
        effects = rank.tell(on.VoteAsked())
        vote = one(do.CastVote, effects)
        assert (vote.yes, vote.enough_replicas, vote.error) == (False, False, None)
        reported.append(not none(do.ReportTooFew, effects))
        rank.end(False)
    assert reported == [True, False]


def test_at_step_0_the_plan_may_need_fewer_than_later() -> None:
    rank = Rank(min_replica_size=2)
    rank.begin(plan_of(7, size=2, participants=[0], min_replica_size=1))
    assert rank.vote().yes
    rank.end(True)
    rank.begin(QuorumKey(7, 7))
    assert rank.status.plan.min_replica_size == 2


@pytest.mark.parametrize(("broken", "on_device", "fails"), [(False, False, 1), (True, False, 0), (True, True, 1)])
def test_a_group_that_failed_fails_the_step_unless_a_loss_has_aborted_it_after_the_reductions(
    broken: bool, on_device: bool, fails: int
) -> None:
    rank = Rank()
    rank.begin(plan_of(7, size=2))
    if broken:
        rank.tell(on.LossNoticed(notice(7)))
    rank.tell(on.ReductionsEnded())
    effects = rank.tell(on.DeviceSynchronized(0, RuntimeError("aborted"), on_device))
    assert len([effect for effect in effects if isinstance(effect, do.ReportError)]) == fails
    assert (rank.status.error is not None) == bool(fails)


def test_max_retries_counts_failures_in_a_row_of_both_kinds() -> None:
    rank = Rank(max_retries=1)
    rank.begin(plan_of(7))
    assert not rank.end(False).exhausted
    outcome = rank.fails_alone()
    assert (outcome.failures, outcome.exhausted) == (2, True)


def test_a_commit_ends_the_row_of_failures() -> None:
    rank = Rank(max_retries=1)
    rank.begin(plan_of(7))
    rank.end(False)
    rank.commit(8)
    assert rank.status.commit_failures == 0


def test_a_quorum_that_does_not_come_for_a_straggler_is_no_failure() -> None:
    rank = Rank(max_retries=0)
    rank.tell(on.PaceHeard(left_out=True))
    outcome = rank.fails_alone()
    assert (outcome.failures, outcome.exhausted) == (0, False)
    rank.commit()
    assert not rank.status.is_left_out, "whoever is given a quorum is let back"


def test_a_vote_without_a_quorum_is_a_mistake_of_the_loop() -> None:
    rank = Rank()
    with pytest.raises(UsageError, match="start_quorum first"):
        rank.tell(on.EndAsked())
    with pytest.raises(UsageError, match="call it after start_quorum"):
        rank.tell(on.DeferAsked())
    with pytest.raises(UsageError, match="outside a step"):
        rank.tell(on.ExchangeAsked())


def test_a_verdict_that_comes_twice_counts_once() -> None:
    rank = Rank()
    rank.commit()
    assert rank.tell(on.VerdictArrived(0, True)) == ()
    assert rank.status.step == 1


# --- reductions -------------------------------------------------------------------------------------------------------


def reduce(rank: Rank, **facts: Any) -> do.Reduce:
    return one(do.Reduce, rank.tell(on.ReductionAsked(**facts)))


@pytest.mark.parametrize(("size", "factor", "divide_by"), [(2, 0.5, 1.0), (3, 0.25, 0.75), (4, 0.25, 1.0)])
def test_a_mean_is_scaled_by_a_power_of_two_before_the_sum(size: int, factor: float, divide_by: float) -> None:
    rank = Rank()
    rank.begin(plan_of(7, size=size))
    order = reduce(rank)
    assert (order.gives, order.factor, order.divide_by, order.weight) == (True, factor, divide_by, None)
    assert (order.number, order.num_others, order.inside) == (1, size - 1, True)
    assert reduce(rank, average=False).factor == 1.0
    assert reduce(rank).number == 3


def test_who_heals_and_a_spare_give_nothing_and_divide_as_the_others_do() -> None:
    for plan in (plan_of(7, size=3, rank=2, healing=[2]), plan_of(7, size=3, rank=2, participants=[0, 1])):
        rank = Rank()
        rank.begin(plan)
        order = reduce(rank)
        assert (order.gives, order.divide_by) == (False, 1.0)
        rank.tell(on.WeightSet(5.0))
        assert (reduce(rank).gives, reduce(rank).weight) == (False, 0.0)


def test_after_an_error_of_the_step_it_stays_out_and_ends_it_for_the_others() -> None:
    rank = Rank()
    rank.begin(plan_of(7, size=2))
    rank.tell(on.ErrorReported(RuntimeError("mine")))
    assert rank.tell(on.ReductionAsked()) == (do.LoseReduction(aborts=True),)
    alone = Rank()
    alone.begin(plan_of(7))
    alone.tell(on.ErrorReported(RuntimeError("mine")))
    assert alone.tell(on.ReductionAsked()) == (do.LoseReduction(),)


def test_nothing_is_started_in_a_broken_quorum_and_the_step_fails_by_it() -> None:
    rank = Rank()
    rank.begin(plan_of(7, size=2))
    rank.tell(on.LossNoticed(notice(7)))
    effects = rank.tell(on.ReductionAsked())
    assert one(do.ReportError, effects).counts
    assert one(do.LoseReduction, effects) == do.LoseReduction()
    assert not rank.vote().yes


def test_without_a_quorum_nothing_is_reduced() -> None:
    rank = Rank()
    rank.ask()
    rank.tell(on.QuorumFailed(1, TimeoutError("no answer")))
    assert rank.tell(on.ReductionAsked()) == (do.LoseReduction(),)


def test_the_only_member_has_the_mean_already_whatever_its_weight() -> None:
    rank = Rank()
    rank.begin(plan_of(7))
    assert one(do.ReduceAlone, rank.tell(on.ReductionAsked())).weight is None
    rank.tell(on.WeightSet(7.0))
    assert one(do.ReduceAlone, rank.tell(on.ReductionAsked())).weight == 1.0
    assert one(do.ReduceAlone, rank.tell(on.ReductionAsked(weight=0.0))).weight == 0.0


def test_a_weight_is_said_once_a_step_before_it_is_used() -> None:
    rank = Rank()
    with pytest.raises(UsageError, match="outside a step"):
        rank.tell(on.WeightSet(1.0))
    rank.begin(plan_of(7, size=2))
    rank.tell(on.WeightSet(1.0))
    rank.tell(on.WeightSet(4.0))
    order = reduce(rank)
    assert (order.weight, order.factor, order.shared) == (4.0 * 2.0**-32, 4.0 * 2.0**-32, True)
    rank.tell(on.WeightSet(4.0))
    with pytest.raises(UsageError, match="set one weight per step"):
        rank.tell(on.WeightSet(5.0))
    assert not reduce(rank, weight=8.0).shared
    rank.end(True)
    rank.begin(QuorumKey(7, 7))
    assert reduce(rank).weight is None, "the step's end forgets the weight"


@pytest.mark.parametrize(("yes", "weight"), [(True, 0.5), (False, 0.0)])
def test_between_two_steps_those_give_that_committed(yes: bool, weight: float) -> None:
    rank = Rank()
    rank.begin(plan_of(7, size=2))
    rank.end(yes)
    order = reduce(rank)
    assert (order.inside, order.gives, order.weight, order.shared) == (False, yes, weight, False)
    assert order.name.attempt == 0, "it fails no attempt"
    assert not one(do.ReportError, rank.tell(on.ErrorReported(RuntimeError("lost"), order.name))).counts


def test_a_rank_for_which_another_one_reduces_keeps_its_tensor() -> None:
    rank = Rank(is_rank0_only=True, is_passive_rank=True, world_size=2, rank=1)
    rank.begin(plan_of(7, size=2))
    assert rank.tell(on.ReductionAsked()) == (do.KeepTensor(),)


def test_a_step_is_untouched_until_something_is_reduced_or_fails() -> None:
    rank = Rank()
    assert not rank.status.is_untouched
    rank.ask()
    assert rank.status.is_untouched
    rank.plan(plan_of(7, size=2))
    assert rank.status.is_untouched
    rank.tell(on.ReductionAsked())
    assert not rank.status.is_untouched
    rank.end(True)
    assert not rank.status.is_untouched
    rank.ask()
    rank.tell(on.ErrorReported(RuntimeError("mine")))
    assert not rank.status.is_untouched


# --- recovery ---------------------------------------------------------------------------------------------------------


def source_at(step: int) -> Rank:
    source = Rank()
    for _ in range(step):
        source.commit(1, size=2)
    return source


def heals(rank: Rank, own: dict[str, Any] | None = None) -> Effects:
    """Take the reference, as a group of one; up to the end, or to what keeps it from loading."""
    plan = rank.status.plan
    state = own or {"step": plan.step, "batches_committed": 7, "lineage": f"{plan.lineage:016x}"}
    one(do.StageState, rank.tell(on.ExchangeAsked()))
    effects = rank.tell(on.StageEnded(Stage.FETCH, own=state))
    if not none(do.ExplainDivergence, effects):
        effects = rank.tell(on.DivergenceExplained())
    if none(do.LoadState, effects):
        return effects
    return rank.tell(on.StageEnded(Stage.LOAD))


def test_who_heals_gives_zeros_and_takes_the_sources_step_batches_and_lineage() -> None:
    source, member = source_at(2), Rank()
    facts = {"step": 2, "lineage": source.status.lineage, "size": 2, "healing": [1]}
    source.begin(plan_of(3, rank=0, **facts))
    state = one(do.Serve, source.tell(on.ExchangeAsked())).own
    source.tell(on.StateServed(source.number))
    assert one(do.Fetch, member.begin(plan_of(3, rank=1, **facts))).plan.heal
    assert (member.status.is_participating, member.status.num_participants) == (False, 1)
    assert not none(do.ReportHealed, heals(member, dict(state)))
    for each in (source, member):
        assert each.vote().yes
        each.end(True)
    status = member.status
    assert (status.step, status.batches_committed, status.lineage) == (3, 5, source.status.lineage)
    assert (status.live, status.torn, status.healing, status.healed_in) == (True, False, Healing.LOADED, 1)


def test_a_state_is_given_once_and_refused_where_its_step_ends_before() -> None:
    source = Rank()
    source.begin(plan_of(3, size=2, healing=[1]))
    assert not none(do.RefuseState, source.tell(on.AttemptSettled()))
    assert source.tell(on.AttemptSettled(offers=True)) == (), "it was offered before the forward pass"
    source.tell(on.ExchangeAsked())
    source.tell(on.StateServed(source.number))
    assert source.tell(on.ExchangeAsked()) == ()
    assert source.tell(on.AttemptSettled()) == ()


def over_group() -> tuple[Rank, Effects]:
    """A rank whose plan says to heal over the process group, before the group is configured."""
    member = Rank(heals_over_group=True)
    member.ask()
    return member, member.plan(plan_of(3, rank=1, size=2, healing=[1], step=9, lineage=99), builds=False)


def test_a_recovery_over_the_process_group_begins_when_the_group_is_configured() -> None:
    member, arrived = over_group()
    assert none(do.Fetch, arrived)
    assert one(do.Fetch, member.tell(on.GroupConfigured(member.number, QuorumKey(3, 3)))).plan.heal
    assert one(do.StageState, member.tell(on.ExchangeAsked())).in_vain is None


def test_a_state_over_the_process_group_is_not_waited_for_without_the_group() -> None:
    member, _ = over_group()
    member.tell(on.LossNoticed(notice(3)))
    assert member.tell(on.ConfigureFailed(member.number, member.status.broken)) == ()
    assert "has ended" in str(one(do.StageState, member.tell(on.ExchangeAsked())).in_vain)
    member, _ = over_group()
    member.tell(on.LossNoticed(notice(3)))
    assert none(do.Fetch, member.tell(on.GroupConfigured(member.number, QuorumKey(3, 3)))), "it is about to be aborted"
    order = one(do.StageState, member.tell(on.ExchangeAsked()))
    member.tell(on.StageEnded(Stage.FETCH, order.in_vain))
    assert not member.vote().yes
    member.end(False)
    assert member.ask().failed_heals == 0, "no source is at fault"


def test_a_state_that_needs_no_process_group_is_waited_for_in_a_broken_quorum() -> None:
    member = Rank()
    member.begin(plan_of(3, rank=1, size=2, healing=[1], step=9, lineage=99))
    member.tell(on.LossNoticed(notice(3)))
    assert one(do.StageState, member.tell(on.ExchangeAsked())).in_vain is None


def test_a_fetch_ends_with_its_attempt() -> None:
    member = Rank()
    member.begin(plan_of(3, rank=1, size=2, healing=[1], step=9, lineage=99))
    assert member.tell(on.AttemptSettled()) == (do.EndFetch(),)


def test_a_recovery_that_succeeded_stays_when_the_step_does_not_commit() -> None:
    member = Rank()
    member.begin(plan_of(3, rank=1, size=2, healing=[1], step=9, lineage=99))
    heals(member)
    member.end(False)
    request = member.ask()
    assert (request.step, request.lineage, request.live, request.failed_heals) == (9, 99, True, 0)


def test_a_recovery_that_failed_changes_nothing_and_is_told() -> None:
    member = Rank()
    member.begin(plan_of(3, rank=1, size=2, healing=[1], step=9, lineage=99))
    member.tell(on.ExchangeAsked())
    effects = member.tell(on.StageEnded(Stage.FETCH, HealingError("the source died")))
    assert not one(do.ReportHealFailed, effects).is_over
    assert not member.vote().yes
    member.end(False)
    request = member.ask()
    assert (request.step, request.lineage, request.failed_heals, request.torn) == (0, FRESH, 1, False)


def test_a_fetched_state_of_another_lineage_is_refused() -> None:
    member = Rank()
    member.begin(plan_of(3, rank=1, size=2, healing=[1], step=9, lineage=99))
    effects = heals(member, {"step": 9, "batches_committed": 18, "lineage": f"{98:016x}"})
    assert "it was discarded" in str(one(do.ReportHealFailed, effects).error)
    assert member.status.step == 0


def test_a_load_that_broke_off_leaves_a_torn_state_that_asks_to_heal() -> None:
    member = Rank()
    member.begin(plan_of(3, rank=1, size=2, healing=[1], step=9, lineage=99))
    member.tell(on.ExchangeAsked())
    own = {"step": 9, "batches_committed": 7, "lineage": f"{99:016x}"}
    assert not none(do.LoadState, member.tell(on.StageEnded(Stage.FETCH, own=own)))
    assert member.status.torn, "from the first load on"
    member.tell(on.StageEnded(Stage.LOAD, HealingError("load_state_dict raised")))
    member.end(False)
    assert member.ask().torn


def test_a_source_is_not_waited_for_that_waits_for_this_rank() -> None:
    member = Rank()
    member.ask()
    member.plan(plan_of(3, rank=1, size=2, healing=[1], step=9, lineage=99), builds=False)
    member.tell(on.ConfigureFailed(1, RuntimeError("the store was not reached")))
    in_vain = one(do.StageState, member.tell(on.ExchangeAsked())).in_vain
    assert isinstance(in_vain, HealingError)
    member.tell(on.StageEnded(Stage.FETCH, in_vain))
    member.end(False)
    assert member.ask().failed_heals == 0, "the sources have nothing to do with it"


def test_a_failed_recovery_in_a_synchronous_step_ends_the_reduction_for_the_others() -> None:
    for asynchronous in (True, False):
        member = Rank(use_async_quorum=asynchronous)
        member.begin(plan_of(3, rank=1, size=2, healing=[1], step=9, lineage=99))
        member.tell(on.ExchangeAsked())
        effects = member.tell(on.StageEnded(Stage.FETCH, HealingError("the source died")))
        assert none(do.AbortGroup, effects) is asynchronous


def test_a_load_that_fails_twice_for_the_same_reason_ends_the_process() -> None:
    member = Rank(replica_id="a", rank=1)
    own = {"step": 9, "batches_committed": 7, "lineage": f"{99:016x}"}
    ends = []
    for reason in ("<Model object at 0x12>", "<Other>", "<Model object at 0x34>", "<Model object at 0x56>"):
        member.begin(plan_of(3, rank=1, size=2, healing=[1], step=9, lineage=99))
        member.tell(on.ExchangeAsked())
        member.tell(on.StageEnded(Stage.FETCH, own=own))
        effects = member.tell(on.StageEnded(Stage.LOAD, HealingError(reason), again=reason))
        ends.append([str(effect.error) for effect in effects if isinstance(effect, do.Raise)])
        assert one(do.ReportHealFailed, effects).is_over is bool(ends[-1])
        member.end(False)
    assert ends[:3] == [[], [], []]
    (words,) = ends[3] or [""]
    assert "replica a, rank 1, failed to recover step 9 twice for the same reason" in words


STAGES = [
    (Stage.FETCH, Purpose.STAGED, "fetch"),
    (Stage.MATCH, Purpose.MATCHED, "find the meshes for"),
    (Stage.LOAD, Purpose.LOADED, "load"),
]


def through_stages(member: Rank, says_no: Purpose | None = None) -> tuple[list[Purpose], Effects]:
    """A group of several heals. `says_no`: in this vote another rank says no. Returns the votes, and the end."""
    plan = member.status.plan
    own = {"step": plan.step, "batches_committed": 7, "lineage": f"{plan.lineage:016x}"}
    votes: list[Purpose] = []
    effects = member.tell(on.ExchangeAsked())
    while True:
        (order,) = (effect for effect in effects if not isinstance(effect, do.AbortGroup))
        match order:
            case do.StageState():
                effects = member.tell(on.StageEnded(Stage.FETCH, own=own, needs_own=True))
            case do.SpreadState():
                effects = member.tell(on.StageEnded(Stage.SPREAD, own=own, needs_own=True))
            case do.MatchState():
                effects = member.tell(on.StageEnded(Stage.MATCH))
            case do.LoadState():
                effects = member.tell(on.StageEnded(Stage.LOAD))
            case do.Agree():
                votes.append(order.purpose)
                effects = member.tell(on.Agreed(order.purpose, order.yes and order.purpose is not says_no))
            case _:
                return votes, effects


def healing_group(**settings: Any) -> Rank:
    member = Rank(replica_id="a", world_size=2, **settings)
    member.begin(plan_of(3, rank=1, size=2, healing=[1], step=9, lineage=99))
    return member


def test_a_group_heals_whole_in_four_votes() -> None:
    votes, effects = through_stages(healing_group())
    assert votes == [Purpose.STAGED, Purpose.WITHOUT_OWN, Purpose.MATCHED, Purpose.LOADED]
    assert not none(do.ReportHealed, effects)
    votes, _ = through_stages(healing_group(is_rank0_only=True))
    assert votes == [Purpose.STAGED, Purpose.SPREAD, Purpose.MATCHED, Purpose.LOADED]


@pytest.mark.parametrize(("stage", "purpose", "words"), STAGES)
def test_one_rank_that_cant_keeps_the_whole_group_from_it(stage: Stage, purpose: Purpose, words: str) -> None:
    member = healing_group()
    votes, effects = through_stages(member, says_no=purpose)
    assert votes[-1] is purpose
    assert f"another rank of replica a could not {words} step 9" in str(one(do.ReportHealFailed, effects).error)
    assert member.status.torn is (stage is Stage.LOAD), "what was not loaded is not torn"
    assert (member.status.step, member.status.healing) == (0, Healing.FAILED)


def test_a_state_without_shards_needs_no_look_at_the_own_one() -> None:
    member = healing_group()
    own = {"step": 9, "batches_committed": 7, "lineage": f"{99:016x}"}
    member.tell(on.ExchangeAsked())
    member.tell(on.StageEnded(Stage.FETCH, own=own))
    order = one(do.Agree, member.tell(on.Agreed(Purpose.STAGED, True)))
    assert (order.purpose, order.yes) == (Purpose.WITHOUT_OWN, True)
    assert not none(do.LoadState, member.tell(on.Agreed(Purpose.WITHOUT_OWN, True)))


@pytest.mark.parametrize("purpose", [Purpose.WITHOUT_OWN, Purpose.LOADED])
def test_a_group_that_was_lost_meanwhile_heals_no_more(purpose: Purpose) -> None:
    member = healing_group()
    own = {"step": 9, "batches_committed": 7, "lineage": f"{99:016x}"}
    member.tell(on.ExchangeAsked())
    member.tell(on.StageEnded(Stage.FETCH, own=own))
    member.tell(on.Agreed(Purpose.STAGED, True))
    if purpose is Purpose.LOADED:
        member.tell(on.Agreed(Purpose.WITHOUT_OWN, True))
        member.tell(on.StageEnded(Stage.LOAD))
    member.tell(on.GroupWasLost(ReplicaGroupLostError("rank 1 is lost")))
    assert "rank 1 is lost" in str(one(do.Raise, member.tell(on.Agreed(purpose, False))).error)
    assert member.status.healing is Healing.FETCHING


def test_an_optimizer_that_raised_after_the_commit_leaves_a_torn_state_until_it_heals() -> None:
    rank = Rank()
    rank.commit(1, size=2)
    rank.tell(on.StateTorn())
    assert rank.ask().torn
    rank.plan(plan_of(2, rank=1, size=2, healing=[1], step=1, lineage=rank.status.lineage))
    heals(rank)
    assert not rank.status.torn


def test_state_that_is_registered_after_a_recovery_is_healed_once_more() -> None:
    member = Rank()
    assert member.tell(on.StateRegistered()) == ()
    member.begin(plan_of(3, rank=1, size=2, healing=[1], step=9, lineage=99))
    heals(member)
    assert member.tell(on.StateRegistered()) == (do.HealAgain(),)
    assert member.status.torn
    other = Rank()
    other.commit()
    assert other.tell(on.StateRegistered()) == ()
    other.commit()
    assert other.tell(on.StateRegistered()) == (do.WarnLateState(),)
    assert other.tell(on.StateRegistered(compared=False)) == ()


def test_a_state_from_outside_is_not_live_and_keeps_its_lineage() -> None:
    first, second = Rank(), Rank()
    first.commit(1, size=2)
    second.tell(on.StateLoaded(first.status.state_dict()))
    status = second.status
    assert (status.step, status.batches_committed, status.lineage, status.live) == (1, 2, first.status.lineage, False)


def test_a_state_without_a_lineage_takes_the_one_that_its_first_quorum_gives_it() -> None:
    rank = Rank()
    rank.tell(on.StateLoaded({"step": 5, "batches_committed": 10}))
    assert rank.ask().lineage is None
    rank.plan(plan_of(3, size=2, healing=[1], step=5, lineage=77))
    assert rank.status.lineage == 77
    rank.end(False)
    assert rank.ask().lineage == 77


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({}, "whole numbers"),
        ({"step": -1, "batches_committed": 0}, "whole numbers"),
        ({"step": True, "batches_committed": 0}, "whole numbers"),
        ({"step": 1, "batches_committed": "2"}, "whole numbers"),
        ({"step": 1, "batches_committed": 2, "lineage": "what?"}, "hexadecimal"),
        ([1, 2], "is a dict"),
    ],
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(state: Any, words: str) -> None:
    rank = Rank()
    rank.commit()
    before = rank.status
    with pytest.raises(UserStateError, match=words):
        rank.tell(on.StateLoaded(state))
    assert rank.status == before


# --- whether all hold the same state ----------------------------------------------------------------------------------


def checked(step: int, digest: bytes | None = None, **settings: Any) -> Rank:
    rank = Rank(check_every=1, **settings)
    for _ in range(step):
        rank.commit()
    if digest is not None:
        rank.tell(on.StateCompared(digest))
    return rank


def test_a_check_is_due_once_at_every_multiple() -> None:
    rank, due = Rank(check_every=3), []
    for step in range(8):
        if not none(do.CompareState, rank.tell(on.StartReady())):
            due.append(step)
        rank.commit()
    assert due == [3, 6]
    assert none(do.CompareState, Rank().tell(on.StartReady()))
    rank = checked(3)
    assert one(do.CompareState, rank.tell(on.StartReady())).name == "check 3, attempt 4"
    rank.tell(on.StateCompared(None))
    assert rank.tell(on.StartReady()) == ()


def test_a_quorum_that_failed_is_asked_for_again_with_the_same_lineage() -> None:
    rank = checked(2)
    before = rank.status.lineage
    rank.tell(on.StateCompared(b"state"))
    first = rank.ask().lineage
    rank.tell(on.QuorumFailed(rank.number, TimeoutError("nobody")))
    rank.tell(on.ReductionsEnded())
    assert rank.tell(on.StartReady()) == ()
    assert rank.ask().lineage == first == checked_lineage(before, b"state") != before


def test_a_durable_checkpoint_has_the_lineage_from_before_the_check() -> None:
    rank = checked(2)
    before = rank.status.state_dict()
    rank.tell(on.StateCompared(b"state"))
    assert rank.status.state_dict() == before
    again = Rank(check_every=1)
    again.tell(on.StateLoaded(rank.status.state_dict()))
    assert not none(do.CompareState, again.tell(on.StartReady()))
    again.tell(on.StateCompared(b"state"))
    assert again.status.lineage == rank.status.lineage


def heals_from(member: Rank, source: Rank) -> do.ExplainDivergence | None:
    """In a quorum of both; what is said of their difference."""
    facts = {"step": source.status.step, "lineage": source.status.lineage, "size": 2, "healing": [1]}
    source.begin(plan_of(3, **facts))
    member.begin(plan_of(3, rank=1, **facts))
    own = dict(one(do.Serve, source.tell(on.ExchangeAsked())).own)
    member.tell(on.ExchangeAsked())
    effects = member.tell(on.StageEnded(Stage.FETCH, own=own))
    told = next((effect for effect in effects if isinstance(effect, do.ExplainDivergence)), None)
    if told is not None and not told.stops:
        effects = member.tell(on.DivergenceExplained())
    if not none(do.LoadState, effects):
        member.tell(on.StageEnded(Stage.LOAD))
    for each in (source, member):
        each.end(not none(do.LoadState, effects))
    return told


def test_only_what_a_check_told_apart_has_diverged() -> None:
    source, same = checked(2, b"a"), checked(2, b"a")
    assert same.status.lineage == source.status.lineage
    assert heals_from(checked(2, b"b"), source) is not None
    assert heals_from(checked(1, b"b"), source) is None
    other_history = Rank(check_every=1)
    other_history.commit(9)
    other_history.commit(9)
    other_history.tell(on.StateCompared(b"b"))
    assert heals_from(other_history, source) is None


def test_who_diverges_heals_once_and_stops_where_that_has_not_cured_it() -> None:
    source, astray = checked(2, b"a"), checked(2, b"b")
    told = heals_from(astray, source)
    assert told is not None
    assert (told.stops, told.again) == (False, False)
    source.tell(on.StateCompared(b"c"))
    astray.tell(on.StateCompared(b"d"))
    told = heals_from(astray, source)
    assert told is not None
    assert (told.stops, told.again) == (True, True)
    assert not astray.status.torn, "nothing was loaded"


def test_who_is_not_to_heal_stops_at_once() -> None:
    told = heals_from(checked(2, b"b", heals_divergence=False), checked(2, b"a"))
    assert told is not None
    assert (told.stops, told.again) == (True, False)


def test_a_divergence_is_counted_once_after_a_failed_fetch() -> None:
    source, astray = checked(2, b"a"), checked(2, b"b")
    for fails in (True, False):
        facts = {"step": 2, "lineage": source.status.lineage, "size": 2, "healing": [1]}
        astray.begin(plan_of(3, rank=1, **facts))
        astray.tell(on.ExchangeAsked())
        own = source.status.own_state()
        assert not none(do.ExplainDivergence, astray.tell(on.StageEnded(Stage.FETCH, own=own)))
        if fails:
            astray.tell(on.DivergenceExplained())
            astray.tell(on.StageEnded(Stage.LOAD, HealingError("no")))
            astray.core._state.own.torn = False  # it was put right by hand
        astray.end(False)
    assert astray.status.divergences == 1


def test_a_check_that_finds_no_difference_forgives_the_one_before() -> None:
    source, astray = checked(2), checked(2)
    for ours, theirs in ((b"a", b"b"), (b"c", b"c"), (b"d", b"e"), (b"f", b"g")):
        source.tell(on.StateCompared(ours))
        astray.tell(on.StateCompared(theirs))
        if ours != theirs:
            heals_from(astray, source)
            continue
        for place, rank in enumerate((source, astray)):
            rank.begin(plan_of(4, step=rank.status.step, lineage=rank.status.lineage, rank=place, size=2))
            rank.end(True)
        assert astray.status.divergences == 0
    assert astray.status.divergences == 2


# --- losses of others -------------------------------------------------------------------------------------------------


def notice(quorum_id: int, replica_id: str = "replica_1", **facts: Any) -> LossNotice:
    return LossNotice(QuorumKey(quorum_id, quorum_id), replica_id, **({"session": 1, "reason": "killed"} | facts))


def holding(quorum_id: int) -> Rank:
    rank = Rank()
    rank.begin(plan_of(quorum_id, size=2))
    return rank


def breaks(rank: Rank, told: LossNotice) -> bool:
    (effect,) = rank.tell(on.LossNoticed(told))
    assert effect in (do.BreakQuorum(told), do.ReportLateLoss(told))
    return isinstance(effect, do.BreakQuorum)


def test_a_loss_in_a_quorum_breaks_it_and_asks_for_another() -> None:
    rank = holding(7)
    assert breaks(rank, notice(7))
    assert "the next step asks for another" in str(rank.status.broken)
    rank.end(False)
    assert rank.ask().needs_configure


def test_the_same_loss_in_other_words_is_the_same_loss() -> None:
    rank = holding(7)
    assert breaks(rank, notice(7))
    assert not breaks(rank, notice(7, reason="its connection ended"))


@pytest.mark.parametrize("facts", [{"lives": True}, {"session": 2}, {"replica_id": "replica_2"}])
def test_another_loss_in_the_same_words_is_another_loss(facts: dict[str, Any]) -> None:
    rank = holding(7)
    assert breaks(rank, notice(7))
    assert breaks(rank, notice(7, **facts))


def test_a_notice_that_comes_before_its_quorum_is_kept_for_it_and_one_of_an_older_is_not() -> None:
    rank = holding(7)
    assert not breaks(rank, notice(6))
    assert not breaks(rank, notice(8))
    rank.end(False)
    assert one(do.BreakQuorum, rank.begin(plan_of(8, size=2))).notice == notice(8)
    assert rank.status.broken is not None


def test_notices_of_later_quorums_never_push_out_those_of_the_held_one() -> None:
    rank = holding(7)
    assert breaks(rank, notice(7))
    for later in range(8, 18 + MAX_NOTICES_KEPT):
        assert not breaks(rank, notice(later))
    assert breaks(rank, notice(7, "replica_2"))
    rank.end(False)
    assert one(do.BreakQuorum, rank.begin(plan_of(8, size=2))).notice == notice(8)


# --- several in flight ------------------------------------------------------------------------------------------------


def flying(number: int) -> tuple[Rank, list[int]]:
    """A rank with so many steps in flight, in one quorum."""
    rank = Rank()
    numbers = []
    for _ in range(number):
        rank.begin(plan_of(7, size=2) if not numbers else QuorumKey(7, 7))
        numbers.append(rank.defer())
    return rank, numbers


def test_steps_in_flight_end_in_order_each_as_the_step_that_it_was_named_after() -> None:
    rank, numbers = flying(3)
    assert [each.name.step for each in rank.status.aside] == [0, 1, 2]
    with pytest.raises(UsageError, match="not the oldest"):
        rank.tell(on.EndAsked(numbers[1]))
    for step, number in enumerate(numbers):
        assert rank.vote(number).step == step
        assert rank.end(True, number).committed
    assert (rank.status.step, rank.status.num_deferred, rank.status.aside) == (3, 0, ())


def test_steps_in_flight_are_named_after_the_step_that_they_will_be() -> None:
    rank, _ = flying(2)
    rank.ask()
    assert rank.status.name.step == 2
    rank.plan(QuorumKey(7, 7))
    assert rank.status.name.step == 2


def test_the_open_step_does_not_end_before_those_in_flight() -> None:
    rank, _ = flying(2)
    rank.begin(QuorumKey(7, 7))
    with pytest.raises(UsageError, match="2 earlier steps are in flight"):
        rank.tell(on.EndAsked())


def test_one_no_fails_all_that_were_begun_after_it() -> None:
    rank, (first, second) = flying(2)
    rank.begin(QuorumKey(7, 7))
    rank.end(False, first)
    assert isinstance(rank.status.attempt(second).abandoned, SyncAbandonedError)
    assert rank.status.is_abandoned
    effects = rank.tell(on.ReductionsEnded(second))
    assert not none(do.ReportAbandoned, effects)
    assert not one(do.Concluded, effects).committed
    assert rank.status.commit_failures == 1, "counted once, with what it failed with"
    assert rank.ask().needs_configure, "the others have theirs in flight"


def test_another_quorum_fails_all_that_are_in_flight_and_counts_once() -> None:
    rank, numbers = flying(2)
    rank.begin(plan_of(8, size=2))
    assert rank.status.num_deferred == 0
    assert all(rank.status.attempt(number).abandoned is not None for number in numbers)
    assert rank.status.name.step == 0, "nothing before it may commit any more"
    assert rank.end(False).failures == 2


def test_a_failed_commit_is_said_once_while_others_are_in_flight_that_were_begun_since() -> None:
    rank = Rank()
    rank.begin(plan_of(7, size=2))
    rank.end(False)
    assert rank.ask().commit_failures == 1
    rank.plan(plan_of(8, size=2))
    rank.defer()
    assert rank.ask().commit_failures == 0


def test_without_a_quorum_those_in_flight_fail_here_alone_and_the_others_are_told() -> None:
    rank, (number,) = flying(1)
    rank.tell(on.StartAsked())
    rank.ask()
    rank.tell(on.QuorumFailed(rank.number, TimeoutError("no answer")))
    assert rank.status.attempt(number).abandoned is None, "the other ranks of this group may not know it"
    assert not rank.vote(number).yes


def test_an_error_of_one_in_flight_fails_that_one() -> None:
    rank, (first, second) = flying(2)
    name = rank.status.attempt(second).name
    assert one(do.ReportError, rank.tell(on.ErrorReported(RuntimeError("lost"), name))).counts
    assert rank.vote(first).yes
    rank.end(True, first)
    assert not rank.vote(second).yes


def test_what_a_strategy_gives_up_breaks_the_quorum_of_the_others() -> None:
    rank, (number,) = flying(1)
    rank.tell(on.FlightsGivenUp())
    assert "discarded its steps" in str(rank.status.attempt(number).abandoned)
    rank.tell(on.FlightsDropped((number,)))
    assert rank.status.attempt(number) is None
    assert rank.ask().needs_configure
    assert not one(do.Concluded, rank.tell(on.ReductionsEnded(number))).committed, "may still be ended"


def test_one_that_may_still_commit_is_not_dropped() -> None:
    rank, (number,) = flying(1)
    rank.tell(on.FlightsDropped((number,)))
    assert rank.status.attempt(number) is not None


def test_a_state_loaded_by_hand_fails_what_is_in_flight() -> None:
    rank, (number,) = flying(1)
    rank.tell(on.StateLoaded({"step": 5, "batches_committed": 10}))
    assert isinstance(rank.status.attempt(number).error, UserStateError)
    assert rank.ask().needs_configure


def test_what_is_in_flight_is_not_committed_to_a_torn_state() -> None:
    """The optimizer raised after a commit, and the recovery fails: nothing may be added to what is left."""
    rank, (number,) = flying(1)
    rank.tell(on.StateTorn())
    rank.begin(plan_of(7, rank=1, size=2, healing=[1], step=1, lineage=rank.status.lineage))
    rank.tell(on.StrategyExchanges())
    one(do.StageState, rank.tell(on.ExchangeAsked()))
    one(do.ReportHealFailed, rank.tell(on.StageEnded(Stage.FETCH, HealingError("no source"))))
    assert isinstance(rank.status.attempt(number).error, HealingError)
    assert not rank.vote(number).yes
    rank.end(False, number)
    assert rank.ask().needs_configure


def test_a_state_loaded_by_hand_in_a_step_gives_nothing_to_that_step() -> None:
    """The others reduce from the state that this rank asked with, and its gradient would be of another one."""
    rank = Rank()
    rank.begin(plan_of(7, size=2))
    rank.tell(on.StateLoaded({"step": 5, "batches_committed": 10}))
    assert rank.tell(on.ReductionAsked()) == (do.LoseReduction(aborts=True),)
    assert not rank.vote().yes
    rank.end(False)
    assert rank.ask().needs_configure


def test_a_state_loaded_by_hand_while_the_quorum_is_asked_for_fails_that_step() -> None:
    rank, _ = flying(1)
    rank.ask()
    rank.tell(on.StateLoaded({"step": 5, "batches_committed": 10}))
    assert isinstance(rank.status.error, UserStateError)


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_a_wish_travels_in_the_vote_and_the_group_leaves_after_the_step() -> None:
    rank = Rank()
    rank.begin(plan_of(7, size=2))
    rank.tell(on.LeaveWished("a signal", 5_000))
    rank.tell(on.LeaveWished("another", 1))
    assert rank.vote().leaving
    effects = rank.tell(on.VerdictArrived(0, True, leaves=True))
    assert one(do.TellLeaving, effects) == do.TellLeaving("a signal", 0)
    assert one(do.Concluded, effects).committed
    assert rank.status.left
    assert rank.tell(on.StartAsked()) == (do.EndLoop("a signal"),)


def test_who_alone_holds_the_state_stays_until_others_do_or_its_time_is_over() -> None:
    rank = Rank()
    rank.tell(on.LeaveWished("a signal", 5_000))
    rank.begin(plan_of(7, size=2, healing=[1]))
    rank.tell(on.ExchangeAsked())
    rank.tell(on.StateServed(1))
    assert not rank.vote().leaving
    rank.now_ms = 5_000
    assert rank.vote().leaving
    rank.now_ms = 0
    rank.end(True)
    rank.begin(plan_of(7, size=2, step=1))
    assert rank.vote().leaving


def test_who_leaves_serves_those_that_heal_from_it_for_the_rest_of_its_time() -> None:
    rank = Rank()
    rank.tell(on.LeaveWished("a signal", 5_000))
    rank.begin(plan_of(7, size=3, healing=[2]))
    rank.now_ms = 2_000
    assert one(do.TellLeaving, rank.tell(on.VerdictArrived(0, True, leaves=True))).serve_ms == 3_000
    assert one(do.ServeOn, rank.tell(on.EndingAsked(clean=True, serve_ms=9))) == do.ServeOn(5_000, meets=False)


def test_who_leaves_fails_what_it_has_in_flight() -> None:
    rank, (first, second) = flying(2)
    rank.tell(on.LeaveWished("a signal", 5_000))
    rank.tell(on.VerdictArrived(first, True, leaves=True))
    assert isinstance(rank.status.attempt(second).abandoned, StepAbandonedError)


def test_a_quorum_that_does_not_come_before_the_deadline_is_waited_for_no_more() -> None:
    rank = Rank()
    rank.ask()
    rank.tell(on.LeaveWished("a signal", 5_000))
    assert rank.tell(on.Looked()) == ()
    rank.now_ms = 5_000
    assert rank.tell(on.Looked()) == (do.TellLeaving("a signal", 0, waits=False),)
    assert rank.tell(on.Looked()) == (), "once"
    effects = rank.tell(on.QuorumFailed(1, RefusedError("it has left", code=Refusal.LEFT.value)))
    assert isinstance(one(do.ReportNoQuorum, effects).error, StepAbandonedError)
    assert not none(do.TellLeaving, rank.tell(on.ReductionsEnded()))
    assert rank.status.left


def test_a_straggler_that_is_left_out_leaves_without_a_step_of_its_own() -> None:
    rank = Rank()
    rank.ask()
    assert rank.tell(on.Looked(hears_left_out=True)) == ()
    rank.tell(on.LeaveWished("a signal", 5_000))
    assert not none(do.TellLeaving, rank.tell(on.Looked(hears_left_out=True)))


def test_a_rank_whose_group_has_left_without_it_leaves_too() -> None:
    rank = Rank()
    rank.ask()
    rank.tell(on.QuorumFailed(1, RefusedError("it has left", code=Refusal.LEFT.value)))
    effects = rank.tell(on.ReductionsEnded())
    assert one(do.TellLeaving, effects).reason == "another rank of the group leaves"


def test_a_loop_that_ends_by_itself_after_a_commit_has_finished() -> None:
    rank = Rank(world_size=2)
    rank.commit()
    effects = rank.tell(on.EndingAsked(clean=True, serve_ms=600_000))
    assert one(do.TellLeaving, effects).finished_step == 1
    assert one(do.ServeOn, effects) == do.ServeOn(0, meets=False)


@pytest.mark.parametrize(
    "case",
    ["not clean", "no step", "open", "a no", "an error since", "a start that failed", "torn", "lost", "in flight"],
)
def test_a_loop_that_ends_otherwise_has_not_finished(case: str) -> None:
    rank = Rank()
    if case != "no step":
        rank.commit()
    match case:
        case "open":
            rank.ask()
        case "a no":
            rank.begin(QuorumKey(1, 1))
            rank.end(False)
        case "an error since":
            rank.tell(on.UserReportedError(RuntimeError("mine")))
        case "a start that failed":
            rank.tell(on.StartAsked())
        case "torn":
            rank.tell(on.StateTorn())
        case "lost":
            rank.tell(on.GroupWasLost(ReplicaGroupLostError("rank 1 is lost")))
        case "in flight":
            rank.begin(QuorumKey(1, 1))
            rank.defer()
    assert rank.tell(on.EndingAsked(clean=case != "not clean", serve_ms=600_000)) == ()


# --- values -----------------------------------------------------------------------------------------------------------


def test_events_and_effects_are_frozen_and_each_event_is_handled() -> None:
    handled = StepCore(StepSettings())._handlers
    for module in (on, do):
        kinds = [
            kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__
        ]
        assert len(kinds) > 30
        for kind in kinds:
            assert is_dataclass(kind)
            assert kind.__dataclass_params__.frozen, kind  # type: ignore[attr-defined]
            assert hasattr(kind, "__slots__") or not fields(kind), kind
            assert module is do or kind in handled, kind


def test_a_status_is_made_once_between_two_events() -> None:
    rank = Rank()
    assert rank.status is rank.status
    before = rank.status
    rank.ask()
    assert before.phase is Phase.IDLE
    assert rank.status.phase is Phase.ASKED
    assert str(rank.status.name) == "step 0, without a quorum"
    assert str(StepName(1, 2, QuorumKey(7, 7))) == "step 2, quorum 7.0000000000000007"
