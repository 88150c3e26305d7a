"""The step core as hypothesis drives it: any order of plans, losses, errors, healings and verdicts."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tft_algos.manager.core import CoreSettings, Healing, Phase, StepCore
from tft_algos.testing import plan_of
from tft_coord.core.lineage import fold_lineage
from tft_coord.core.types import LossNotice, QuorumKey


class Steps(RuleBasedStateMachine):
    """One rank. What it reports must be what happened to it, by a count that is kept beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.core = StepCore(CoreSettings())
        self.quorum_id = 0
        self.step, self.lineage = 0, self.core.lineage
        self.failures = 0  # in a row
        self.failed_heals = 0
        self.torn = False
        self.errors = 0  # of this attempt
        self.broken: set[int] = set()  # ids of quorums that a notice has broken
        self.configured: int | None = None

    # --- a step -----------------------------------------------------------------------------------------------------

    @rule(usable=st.booleans())
    def asks(self, usable: bool) -> None:
        left_others = self.core.plan is not None and self.errors > 0
        request = self.core.quorum_started(checkpoint_metadata="here", group_usable=usable)
        self.errors = 0
        assert (request.step, request.lineage, request.torn) == (self.step, self.lineage, self.torn)
        assert (request.commit_failures, request.failed_heals) == (self.failures, self.failed_heals)
        held = request.held.quorum_id if request.held is not None else None
        works = usable and self.configured == held and held not in self.broken and not left_others
        assert request.needs_configure == (held is not None and not works)

    @precondition(lambda self: self.core.phase is Phase.ASKED)
    @rule(new=st.booleans(), heals=st.booleans(), ahead=st.integers(0, 3), size=st.integers(1, 3))
    def gets_a_plan(self, new: bool, heals: bool, ahead: int, size: int) -> None:
        self.quorum_id += new or self.quorum_id == 0
        heals = heals or self.torn
        # Who does not heal holds the reference.
        step, lineage = (self.step + ahead, 1_000 + ahead) if heals else (self.step, self.lineage)
        size = size + 1 if heals else size
        healing = [0] if heals else []
        plan = plan_of(self.quorum_id, step=step, lineage=lineage, size=size, healing=healing)
        arrival = self.core.plan_arrived(plan)
        assert arrival.heal == heals
        assert arrival.configure == (self.configured != self.quorum_id)
        if arrival.configure:
            self.core.group_configured()
            self.configured = self.quorum_id

    @precondition(lambda self: self.core.healing is Healing.FETCHING)
    @rule(well=st.booleans())
    def heals(self, well: bool) -> None:
        plan = self.core.plan
        assert plan is not None
        if not well:
            self.core.heal_failed(RuntimeError("the source is gone"))
            self.failed_heals += 1
            self.errors += 1
            return
        state = {"step": plan.step, "batches_committed": 7, "lineage": f"{plan.lineage:016x}"}
        self.core.check_staged(state)
        self.core.load_began()
        self.core.healed(state)
        self.step, self.lineage = plan.step, plan.lineage
        self.failures = self.failed_heals = 0
        self.torn = False

    @precondition(lambda self: self.core.phase is Phase.PLANNED and self.core.healing is not Healing.FETCHING)
    @rule(others=st.booleans(), raises=st.booleans())
    def votes(self, others: bool, raises: bool) -> None:
        plan = self.core.plan
        assert plan is not None
        vote = self.core.vote()
        assert vote.yes == (self.errors == 0 and plan.num_participants >= 1)
        verdict = vote.yes and others
        outcome = self.core.verdict_arrived(verdict)
        assert outcome.committed == verdict
        if verdict:
            assert self.lineage is not None
            self.step += 1
            self.lineage = fold_lineage(self.lineage, plan.key, self.step)
            self.failures = 0
            if raises:
                self.core.optimizer_raised()
                self.torn = True
        else:
            self.failures += 1
        assert outcome.failures == self.failures + self.core.failed_quorums

    # --- what goes wrong --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.core.phase is not Phase.IDLE)
    @rule(late=st.booleans())
    def has_an_error(self, late: bool) -> None:
        name = self.core.name
        if late:
            name = type(name)(attempt=name.attempt - 1, step=name.step, key=name.key)
        counts = self.core.error_reported(RuntimeError("a reduction failed"), name)
        assert counts is not late
        self.errors += counts

    @rule(of=st.integers(-1, 1))
    def hears_of_a_loss(self, of: int) -> None:
        """In an older quorum, in the one that is held, or in one to come."""
        quorum_id = max(1, self.quorum_id + of)
        held = self.core.held.quorum_id if self.core.held is not None else 0
        breaks = self.core.loss_noticed(LossNotice(QuorumKey(quorum_id, quorum_id), "other", 1, "gone"))
        assert breaks == (quorum_id == held and quorum_id not in self.broken)
        if quorum_id >= held:
            self.broken.add(quorum_id)

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def the_state_is_what_was_committed(self) -> None:
        assert (self.core.step, self.core.lineage, self.core.torn) == (self.step, self.lineage, self.torn)

    @invariant()
    def a_broken_quorum_is_known_for_what_it_is(self) -> None:
        held = self.core.held.quorum_id if self.core.held is not None else None
        assert (self.core.broken is not None) == (held in self.broken)


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None)
