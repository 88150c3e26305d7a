"""The step core as hypothesis drives it with several attempts in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tft_algos.manager.attempt import Attempt
from tft_algos.manager.core import CoreSettings, Phase, StepCore
from tft_algos.testing import plan_of
from tft_coord.core.lineage import fold_lineage
from tft_coord.core.types import QuorumKey


@dataclass
class Flying:
    """What the test knows of one attempt."""

    quorum_id: int | None
    step: int
    attempt: Attempt | None = None
    errors: list[Exception] = field(default_factory=list)
    alive: bool = True


class Flights(RuleBasedStateMachine):
    """One rank with a few in flight, and a book that is kept beside it: who may still commit, and as which step."""

    def __init__(self) -> None:
        super().__init__()
        self.core = StepCore(CoreSettings())
        self.quorum_id = 0
        self.step, self.lineage = 0, self.core.lineage
        self.flying: list[Flying] = []  # deferred and alive, oldest first
        self.abandoned: list[Flying] = []  # deferred, and not ended
        self.open: Flying | None = None
        self.unsaid_no = False  # a no that no newer quorum has answered
        self.must_break = False  # the others may have in flight, or wait in, what failed here alone

    def _fail_all(self) -> None:
        for each in [*self.flying, *([self.open] if self.open else [])]:
            each.alive = False
        self.abandoned += self.flying
        self.flying = []

    @precondition(lambda self: self.open is None)
    @rule(new=st.booleans(), fails=st.integers(0, 9))
    def begins(self, new: bool, fails: int) -> None:
        request = self.core.quorum_started(checkpoint_metadata="here", group_usable=True)
        assert (request.step, request.lineage) == (self.step, self.lineage), "committed steps only"
        assert (request.commit_failures > 0) == (self.core.commit_failures > 0 and (self.unsaid_no or not self.flying))
        assert request.needs_configure == self.must_break
        if fails == 0:
            error = RuntimeError("nobody came")
            self.core.quorum_failed(error, others_go_on=True)
            for each in self.flying:
                each.errors.append(error)
            self.must_break = self.quorum_id > 0  # the others may have been answered
            self.open = Flying(None, self.step, errors=[error])
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
        arrival = self.core.plan_arrived(
            plan_of(self.quorum_id, step=self.step, lineage=self.lineage, size=2, participants=[0, 1])
        )
        if arrival.configure:
            self.core.group_configured()
        self.open = Flying(self.quorum_id, self.step + len(self.flying))
        assert self.core.name.step == self.open.step

    @precondition(lambda self: self.open is not None and len(self.flying) < 4)
    @rule()
    def defers(self) -> None:
        assert self.open is not None
        self.open.attempt = self.core.defer()
        (self.flying if self.open.alive else self.abandoned).append(self.open)
        self.open = None

    @precondition(lambda self: bool(self.flying))
    @rule(which=st.integers(0, 3))
    def has_an_error(self, which: int) -> None:
        each = self.flying[which % len(self.flying)]
        assert each.attempt is not None
        error = RuntimeError("a reduction failed")
        assert self.core.error_reported(error, each.attempt.name)
        each.errors.append(error)

    @precondition(lambda self: bool(self.abandoned))
    @rule(counts=st.just(False))
    def has_an_error_that_is_late(self, counts: bool) -> None:
        attempt = self.abandoned[0].attempt
        assert attempt is not None
        assert self.core.error_reported(RuntimeError("too late"), attempt.name) is counts

    @precondition(lambda self: bool(self.flying))
    @rule(others=st.booleans())
    def ends_the_oldest(self, others: bool) -> None:
        oldest = self.flying[0]
        assert oldest.attempt is not None
        assert self.core.is_oldest(oldest.attempt)
        vote = self.core.vote_on(oldest.attempt)
        assert vote.yes == (not oldest.errors and oldest.quorum_id is not None)
        yes = vote.yes and others
        assert self.core.verdict_on(oldest.attempt, yes).committed == yes
        self.flying.pop(0)
        if yes:
            assert oldest.step == self.step, "it is the step that it was named after"
            assert oldest.quorum_id == self.quorum_id, "in the quorum that stands"
            self.step += 1
            assert self.lineage is not None
            self.lineage = fold_lineage(self.lineage, QuorumKey(self.quorum_id, self.quorum_id), self.step)
            return
        if oldest.quorum_id is not None:
            self.unsaid_no = True
            self.must_break = self.must_break or bool(oldest.errors) or (self.open is not None and self.open.alive)
        if self.open is not None and self.open.alive and self.open.quorum_id is not None:
            self.must_break = True
        self._fail_all()

    @precondition(lambda self: bool(self.abandoned))
    @rule()
    def ends_one_that_failed_with_others(self) -> None:
        each = self.abandoned.pop()
        assert each.attempt is not None
        assert each.attempt.abandoned is not None
        before = (self.core.step, self.core.commit_failures, self.core.num_deferred)
        assert not self.core.verdict_on(each.attempt, False).committed
        assert (self.core.step, self.core.commit_failures, self.core.num_deferred) == before

    @precondition(lambda self: self.open is not None and not self.flying)
    @rule(others=st.booleans())
    def ends_the_open_one(self, others: bool) -> None:
        assert self.open is not None
        yes = others and self.core.vote().yes
        assert self.core.vote().yes == (self.open.alive and not self.open.errors)
        self.core.verdict_arrived(yes)
        if yes:
            self.step += 1
            assert self.lineage is not None
            self.lineage = fold_lineage(self.lineage, QuorumKey(self.quorum_id, self.quorum_id), self.step)
        elif self.open.alive and self.open.quorum_id is not None:
            self.unsaid_no = True
        self.open = None

    @invariant()
    def the_books_agree(self) -> None:
        core = self.core
        assert (core.step, core.lineage) == (self.step, self.lineage)
        assert core.num_deferred == len(self.flying)
        assert (core.phase is Phase.IDLE) == (self.open is None)
        assert self.open is None or core.is_abandoned == (not self.open.alive)
        assert all(each.attempt is not None and each.attempt.abandoned is None for each in self.flying)


TestFlights = Flights.TestCase
TestFlights.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
