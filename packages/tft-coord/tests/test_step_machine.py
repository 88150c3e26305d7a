"""The step as hypothesis drives it: any order of plans, losses, errors, recoveries and verdicts, some in flight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tft_coord.core.lineage import fold_lineage
from tft_coord.core.step import Healing, Phase, Stage, StepCore, StepSettings
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.types import LossNotice, Plan, QuorumKey, RankRequest, Source


def plan_of(quorum_id: int, *, step: int, lineage: int | None, size: int, healing: Sequence[int] = ()) -> Plan:
    """A plan, as the first of `size` replicas gets it; those in `healing` heal, all others hold the reference."""
    names = tuple(f"replica_{member}" for member in range(size))
    holders = tuple(member for member in range(size) if member not in healing)
    heals = 0 in healing
    return Plan(
        key=QuorumKey(quorum_id, quorum_id),
        replica_id=names[0],
        replica_rank=0,
        replica_world_size=size,
        replica_ids=names,
        step=step,
        lineage=lineage or 0,
        heal=heals,
        sources=tuple(Source(member, names[member], names[member]) for member in holders) if heals else (),
        recover_dst_replica_ranks=tuple(healing) if not heals else (),
        serve=bool(healing) and not heals,
        store_address="localhost:1",
        up_to_date=holders,
        participants=holders,
        participating_rank=None if heals else 0,
    )


def one(kind: type[T], effects: Iterable[object]) -> T:
    """The only effect of that kind."""
    (found,) = (effect for effect in effects if isinstance(effect, kind))
    return found


T = TypeVar("T")


class OneRank(RuleBasedStateMachine):
    """What both machines have: a core, and the events of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.core = StepCore(StepSettings())
        self.quorum_id = 0
        self.step, self.lineage = 0, self.core.status.lineage

    def tell(self, event: Any) -> tuple[Any, ...]:
        return self.core.handle(event, 0)

    def ask(self, *, usable: bool = True) -> RankRequest:
        assert self.tell(on.StartAsked()) == ()
        return one(do.Ask, self.tell(on.StepStarted(checkpoint_metadata="here", group_usable=usable))).request

    def vote(self, number: int = 0) -> do.CastVote | do.Concluded:
        """To the vote of an attempt, or to its end without one."""
        assert self.tell(on.EndAsked(number)) == ()
        effects = self.tell(on.ReductionsEnded(number))
        if effects == (do.SynchronizeDevice(),):
            effects = self.tell(on.DeviceSynchronized(number))
        if effects == (do.ExchangeState(),):
            assert self.tell(on.ExchangeAsked(offers=True)) == ()
            effects = self.tell(on.VoteAsked())
        end = effects[-1]
        assert isinstance(end, do.CastVote | do.Concluded)
        return end

    def commits(self, key: QuorumKey) -> None:
        """By the count that is kept beside it."""
        assert self.lineage is not None
        self.step += 1
        self.lineage = fold_lineage(self.lineage, key, self.step)


class Steps(OneRank):
    """One rank. What it reports must be what happened to it, by a count that is kept beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0  # in a row
        self.failed_heals = 0
        self.torn = False
        self.errors = 0  # of this attempt
        self.broken: set[int] = set()  # ids of quorums that a notice has broken
        self.configured: int | None = None

    # --- a step -----------------------------------------------------------------------------------------------------

    @rule(usable=st.booleans())
    def asks(self, usable: bool) -> None:
        peers_may_wait = self.core.status.plan is not None and self.errors > 0
        request = self.ask(usable=usable)
        self.errors = 0
        assert (request.step, request.lineage, request.torn) == (self.step, self.lineage, self.torn)
        assert (request.commit_failures, request.failed_heals) == (self.failures, self.failed_heals)
        held = request.held.quorum_id if request.held is not None else None
        works = usable and self.configured == held and held not in self.broken and not peers_may_wait
        assert request.needs_configure == (held is not None and not works)

    @precondition(lambda self: self.core.status.phase is Phase.ASKED)
    @rule(new=st.booleans(), heals=st.booleans(), ahead=st.integers(0, 3), size=st.integers(1, 3))
    def gets_a_plan(self, new: bool, heals: bool, ahead: int, size: int) -> None:
        self.quorum_id += new or self.quorum_id == 0
        heals = heals or self.torn
        # Who does not heal holds the reference.
        step, lineage = (self.step + ahead, 1_000 + ahead) if heals else (self.step, self.lineage)
        size = size + 1 if heals else size
        plan = plan_of(self.quorum_id, step=step, lineage=lineage, size=size, healing=[0] if heals else [])
        number = self.core.status.name.attempt
        effects = self.tell(on.PlanArrived(number, plan))
        assert any(isinstance(effect, do.Fetch) for effect in effects) == heals
        breaks = any(isinstance(effect, do.BreakQuorum) for effect in effects)
        assert breaks == (self.quorum_id in self.broken)
        configures = any(isinstance(effect, do.Configure) for effect in effects)
        assert configures == (self.configured != self.quorum_id)
        if configures:
            self.tell(on.GroupConfigured(number, plan.key))
            self.configured = self.quorum_id

    @precondition(lambda self: self.core.status.healing is Healing.FETCHING and self.core.status.is_open)
    @rule(well=st.booleans())
    def heals(self, well: bool) -> None:
        plan = self.core.status.plan
        assert plan is not None
        one(do.StageState, self.tell(on.ExchangeAsked()))
        if not well:
            self.tell(on.StageEnded(Stage.FETCH, RuntimeError("the source is gone")))
            self.failed_heals += 1
            self.errors += 1
            return
        own = {"step": plan.step, "batches_committed": 7, "lineage": f"{plan.lineage:016x}"}
        one(do.LoadState, self.tell(on.StageEnded(Stage.FETCH, own=own)))
        assert self.core.status.torn
        one(do.ReportHealed, self.tell(on.StageEnded(Stage.LOAD)))
        self.step, self.lineage = plan.step, plan.lineage
        self.failures = self.failed_heals = 0
        self.torn = False

    @precondition(
        lambda self: self.core.status.phase is Phase.PLANNED and self.core.status.healing is not Healing.FETCHING
    )
    @rule(others=st.booleans(), raises=st.booleans())
    def votes(self, others: bool, raises: bool) -> None:
        plan = self.core.status.plan
        assert plan is not None
        vote = self.vote()
        assert isinstance(vote, do.CastVote)
        assert vote.yes == (self.errors == 0 and plan.num_participants >= 1)
        verdict = vote.yes and others
        outcome = one(do.Concluded, self.tell(on.VerdictArrived(0, verdict)))
        assert outcome.committed == verdict
        if verdict:
            self.commits(plan.key)
            self.failures = 0
            if raises:
                self.tell(on.StateTorn())
                self.torn = True
        else:
            self.failures += 1
        assert outcome.failures == self.failures + self.core.status.failed_quorums

    # --- what goes wrong --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.core.status.is_open)
    @rule(late=st.booleans())
    def has_an_error(self, late: bool) -> None:
        name = self.core.status.name
        if late:
            name = type(name)(attempt=name.attempt - 1, step=name.step, key=name.key)
        report = one(do.ReportError, self.tell(on.ErrorReported(RuntimeError("a reduction failed"), name)))
        assert report.counts is not late
        self.errors += report.counts

    @rule(of=st.integers(-1, 1))
    def hears_of_a_loss(self, of: int) -> None:
        """In an older quorum, in the one that is held, or in one to come."""
        quorum_id = max(1, self.quorum_id + of)
        key = self.core.status.held
        held = key.quorum_id if key is not None else 0
        (effect,) = self.tell(on.LossNoticed(LossNotice(QuorumKey(quorum_id, quorum_id), "other", 1, "gone")))
        assert isinstance(effect, do.BreakQuorum) == (quorum_id == held and quorum_id not in self.broken)
        if quorum_id >= held:
            self.broken.add(quorum_id)

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def the_state_is_what_was_committed(self) -> None:
        status = self.core.status
        assert (status.step, status.lineage, status.torn) == (self.step, self.lineage, self.torn)

    @invariant()
    def a_broken_quorum_is_known_for_what_it_is(self) -> None:
        status = self.core.status
        held = status.held.quorum_id if status.held is not None else None
        assert (status.broken is not None) == (held in self.broken)


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None)


# --- several in flight ------------------------------------------------------------------------------------------------


@dataclass
class Flying:
    """What the test knows of one attempt."""

    quorum_id: int | None
    step: int
    number: int = 0
    errors: list[Exception] = field(default_factory=list)
    alive: bool = True


class Flights(OneRank):
    """One rank with a few in flight, and a book that is kept beside it: who may still commit, and as which step."""

    def __init__(self) -> None:
        super().__init__()
        self.flying: list[Flying] = []  # deferred and alive, oldest first
        self.abandoned: list[Flying] = []  # deferred, and not ended
        self.open: Flying | None = None
        self.unsaid_no = False  # a no that no newer quorum has answered
        self.must_break = False  # the others may have in flight, or wait in, what failed here alone
        self.tell(on.StepStarted())
        self.tell(on.QuorumFailed(1, RuntimeError("nobody came")))
        self.tell(on.StrategyExchanges())
        self.tell(on.ReductionsEnded())

    def _fail_all(self) -> None:
        for each in [*self.flying, *([self.open] if self.open else [])]:
            each.alive = False
        self.abandoned += self.flying
        self.flying = []

    @precondition(lambda self: self.open is None)
    @rule(new=st.booleans(), fails=st.integers(0, 9))
    def begins(self, new: bool, fails: int) -> None:
        request = self.ask()
        assert (request.step, request.lineage) == (self.step, self.lineage), "committed steps only"
        failures = self.core.status.commit_failures
        assert (request.commit_failures > 0) == (failures > 0 and (self.unsaid_no or not self.flying))
        assert request.needs_configure == self.must_break
        number = self.core.status.name.attempt
        if fails == 0:
            error = RuntimeError("nobody came")
            self.tell(on.QuorumFailed(number, error))
            for each in self.flying:
                each.errors.append(error)
            self.must_break = self.quorum_id > 0  # the others may have been answered
            self.open = Flying(None, self.step, number, errors=[error])
            return
        # Whoever says so, or has failed commits, is given another quorum.
        new = new or self.quorum_id == 0 or request.needs_configure or request.commit_failures > 0
        for each in [each for each in self.flying if each.quorum_id is None]:
            each.alive = False  # there was none for it, so it was in no other's flight
            self.flying.remove(each)
            self.abandoned.append(each)
        if new:
            self.quorum_id += 1
            self._fail_all()
            self.unsaid_no = self.must_break = False
        plan = plan_of(self.quorum_id, step=self.step, lineage=self.lineage, size=2)
        if any(isinstance(effect, do.Configure) for effect in self.tell(on.PlanArrived(number, plan))):
            self.tell(on.GroupConfigured(number, plan.key))
        self.open = Flying(self.quorum_id, self.step + len(self.flying), number)
        assert self.core.status.name.step == self.open.step

    @precondition(lambda self: self.open is not None and len(self.flying) < 4)
    @rule()
    def defers(self) -> None:
        assert self.open is not None
        assert one(do.PutAside, self.tell(on.DeferAsked())).name.attempt == self.open.number
        (self.flying if self.open.alive else self.abandoned).append(self.open)
        self.open = None

    @precondition(lambda self: bool(self.flying))
    @rule(which=st.integers(0, 3))
    def has_an_error(self, which: int) -> None:
        each = self.flying[which % len(self.flying)]
        found = self.core.status.attempt(each.number)
        assert found is not None
        error = RuntimeError("a reduction failed")
        assert one(do.ReportError, self.tell(on.ErrorReported(error, found.name))).counts
        each.errors.append(error)

    @precondition(lambda self: bool(self.abandoned))
    @rule()
    def has_an_error_that_is_late(self) -> None:
        found = self.core.status.attempt(self.abandoned[0].number)
        assert found is not None
        assert not one(do.ReportError, self.tell(on.ErrorReported(RuntimeError("too late"), found.name))).counts

    @precondition(lambda self: bool(self.flying))
    @rule(others=st.booleans())
    def ends_the_oldest(self, others: bool) -> None:
        oldest = self.flying[0]
        vote = self.vote(oldest.number)
        yes = False
        if isinstance(vote, do.CastVote):
            assert vote.yes == (not oldest.errors)
            yes = vote.yes and others
            assert one(do.Concluded, self.tell(on.VerdictArrived(oldest.number, yes))).committed == yes
        else:
            assert oldest.quorum_id is None, "only one without a quorum ends without a vote"
        self.flying.pop(0)
        if yes:
            assert oldest.step == self.step, "it is the step that it was named after"
            assert oldest.quorum_id == self.quorum_id, "in the quorum that stands"
            self.commits(QuorumKey(self.quorum_id, self.quorum_id))
            return
        if oldest.quorum_id is not None:
            self.unsaid_no = True
            self.must_break = self.must_break or bool(oldest.errors)
        if self.open is not None and self.open.alive and self.open.quorum_id is not None:
            self.must_break = True
        self._fail_all()

    @precondition(lambda self: bool(self.abandoned))
    @rule(drops=st.booleans())
    def ends_one_that_failed_with_others(self, drops: bool) -> None:
        each = self.abandoned.pop()
        found = self.core.status.attempt(each.number)
        assert found is not None
        assert found.abandoned is not None
        before = self.core.status
        if drops:
            self.tell(on.FlightsDropped((each.number,)))
            assert self.core.status.attempt(each.number) is None
        assert not one(do.Concluded, self.tell(on.ReductionsEnded(each.number))).committed
        after = self.core.status
        assert (after.step, after.commit_failures, after.num_deferred) == (
            before.step,
            before.commit_failures,
            before.num_deferred,
        )

    @precondition(lambda self: self.open is not None and not self.flying)
    @rule(others=st.booleans())
    def ends_the_open_one(self, others: bool) -> None:
        assert self.open is not None
        vote = self.vote()
        assert isinstance(vote, do.CastVote) == (self.open.alive and self.open.quorum_id is not None)
        if isinstance(vote, do.CastVote):
            assert vote.yes == (not self.open.errors)
            yes = vote.yes and others
            self.tell(on.VerdictArrived(0, yes))
            if yes:
                self.commits(QuorumKey(self.quorum_id, self.quorum_id))
            else:
                self.unsaid_no = True
        self.open = None

    @invariant()
    def the_books_agree(self) -> None:
        status = self.core.status
        assert (status.step, status.lineage) == (self.step, self.lineage)
        assert status.num_deferred == len(self.flying)
        assert status.is_open == (self.open is not None)
        assert self.open is None or status.is_abandoned == (not self.open.alive)
        found = [status.attempt(each.number) for each in self.flying]
        assert all(each is not None and each.abandoned is None for each in found)
        assert len(status.aside) == len(self.flying) + len(self.abandoned)


TestFlights = Flights.TestCase
TestFlights.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
