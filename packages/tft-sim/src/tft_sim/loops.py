"""The user's training loop as a script: one step after another, with a gradient in each.

Law of this file: the user's actions and their order. The step core decides the consequences.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from tft_coord.core.step import Phase
from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.types import Plan
from tft_sim.invariants import InvariantError, Reduced, Round
from tft_sim.waiting import Life, UserError

if TYPE_CHECKING:
    from tft_sim.trainer import Trainer

NUM_BUCKETS = 2  # reductions in a step, so that one death can come between them
POLL_MS = 50


class Loop:
    """A training loop, and the common part of all kinds of loops.

    Args:
        trainer: the trainer that runs the loop.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def run(self) -> Life:
        """Train to the end."""
        trainer = self.trainer
        while trainer.alive and not self._is_over:
            yield from self.between_steps()
            yield from self.one_step()
        if trainer.finished_step is not None:
            trainer.mark("a trainer finished")
        yield from trainer.end_of_job()

    @property
    def _is_over(self) -> bool:
        status = self.trainer.status
        if self.trainer.ends_early and status.wishes and not status.is_open:
            return True
        return status.left or (self.trainer.finished_step is not None and status.verdict is True)

    def one_step(self) -> Life:
        """Ask, compute, reduce and vote. The plan comes before the forward pass, or while it runs."""
        trainer = self.trainer
        yield from self.load_by_hand()
        if not (yield from trainer.quorum.start()):
            return
        if trainer.settings.weighted:
            trainer.report(on.WeightSet(float(1 + trainer.outside.chance.samples(trainer.outside.name))))
        if not trainer.outside.chance.overlaps(trainer.name) or not trainer.status.is_asynchronous:
            yield from trainer.quorum.wait()
        if not trainer.status.is_asynchronous and trainer.status.plan is not None:
            yield from trainer.recovery.exchange()
        yield from self.forward()
        yield from trainer.quorum.wait()
        if trainer.loads_inside:
            trainer.loads_inside = False
            yield from self.load_by_hand()
        plan, reduced = trainer.status.plan, None
        if plan is not None:
            reduced = yield from self._reduce(plan)
        self.fail_if_asked()
        concluded, vote = yield from trainer.should_commit()
        yield from self.concluded(concluded, vote, reduced)

    def forward(self) -> Life:
        """Compute for a while. A step without a quorum is cut short."""
        trainer = self.trainer
        trainer.phase = "forward"
        step_ms = round(trainer.outside.chance.step_ms(trainer.outside.name) * trainer.share)
        yield trainer.sleep(POLL_MS if trainer.status.phase is Phase.FAILED else step_ms)
        if trainer.clock.now_ms - trainer.phase_since_ms >= trainer.outside.timeouts.slowest_step_ms:
            trainer.mark("a first step took longer than slowest_step")
        yield from trainer.hang_if_asked("forward")

    def _reduce(self, plan: Plan) -> Life:
        """Reduce all buckets. Returns: the combined result. None: a reduction was lost."""
        trainer = self.trainer
        gradients: list[str] = []
        numbers: list[int] = []
        for bucket in range(NUM_BUCKETS):
            trainer.phase = "reduction"
            reduced_bucket = yield from trainer.reduce(
                f"bucket {bucket}", f"{trainer.replica_id}:{trainer.step}:{bucket}"
            )
            if reduced_bucket is None:
                numbers.clear()
                continue
            numbers += reduced_bucket.numbers
            gradients += reduced_bucket.gradients
        complete = len(numbers) == NUM_BUCKETS
        return Reduced(plan.key, trainer.rank, tuple(numbers), tuple(gradients)) if complete else None

    # --- in common --------------------------------------------------------------------------------------------------

    def between_steps(self) -> Life:
        """Pause between two steps, if a script or a fault wants it."""
        trainer = self.trainer
        if trainer.late_ms:
            late_ms, trainer.late_ms = trainer.late_ms, 0
            if late_ms >= trainer.outside.timeouts.slowest_step_ms:
                trainer.mark("a trainer was late for longer than slowest_step")
            trainer.phase = "between steps"
            yield trainer.sleep(late_ms)

    def load_by_hand(self) -> Life:
        """Load another state, if the user is about to. A pending request is answered first: it is about the old
        state."""
        trainer = self.trainer
        self._save_or_load()
        if trainer.loads_step is None or trainer.loads_inside:
            return
        yield from trainer.quorum.wait()
        step, trainer.loads_step = trainer.loads_step, None
        trainer.mark("a state was loaded by hand")
        trainer.report(on.StateLoaded({"step": step, "batches_committed": step}))
        trainer.weights = f"by hand/{trainer.rank}"

    def _save_or_load(self) -> None:
        """Save a durable checkpoint, or load it if a commit has failed since."""
        trainer = self.trainer
        if trainer.save_once and not trainer.torn:
            trainer.save_once = False
            trainer.saved = trainer.weights, trainer.status.state_dict()
        elif trainer.saved is not None and trainer.status.commit_failures > 0:
            (weights, state), trainer.saved = trainer.saved, None
            trainer.mark("a durable checkpoint was loaded")
            trainer.report(on.StateLoaded(state))
            trainer.weights = weights

    def fail_if_asked(self, number: int = 0) -> None:
        """Report an error of the user's own. `number`: of a deferred step. 0: the open step."""
        trainer = self.trainer
        if not trainer.fails_once:
            return
        trainer.fails_once = False
        trainer.note("reports an error of its own in this step")
        aside = trainer.status.attempt(number)
        if aside is None:
            trainer.report_error()
        else:
            trainer.report(on.ErrorReported(UserError("the user's own"), aside.name))

    def concluded(self, result: do.Concluded, vote: Round | None, reduced: Reduced | None) -> Life:
        """Let the optimizer step after a yes."""
        trainer = self.trainer
        if result.committed:
            if reduced is None or vote is None or result.plan is None:
                raise InvariantError("I5", f"{trainer.name} commits step {trainer.step}, which was not reduced")
            self.commit(result.plan, vote, reduced)
        elif vote is not None:
            self.not_committed(vote, result.plan.step if result.plan is not None else vote.step)
        trainer.recovery.step_ended()
        if result.committed and not trainer.left:
            yield from trainer.hang_if_asked("optimizer")

    def commit(self, plan: Plan, vote: Round, reduced: Reduced) -> None:
        """Step the optimizer."""
        trainer, outside = self.trainer, self.trainer.outside
        text = "|".join((trainer.weights, *reduced.gradients))
        trainer.weights = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        outside.invariants.committed(trainer.host, trainer.rank, vote, plan.replica_world_size, trainer.state_held)
        outside.invariants.applied(trainer.replica_id, trainer.rank, vote, reduced)
        mean_of = len({gradient.rsplit(":", 2)[0] for gradient in reduced.gradients})
        trainer.note(
            f"commits step {trainer.step}, " + (f"a mean of {mean_of}" if reduced.numbers else "with nothing to reduce")
        )
        if outside.invariants.num_lineages(trainer.rank, trainer.step) > 1:
            trainer.mark("a lost step was committed again by others")
        tears, trainer.tears_once = trainer.tears_once, False
        if tears or outside.chance.optimizer_raises(outside.name):
            # A part of the parameters may have been written.
            trainer.note("raises in its optimizer: its state is torn")
            trainer.report(on.StateTorn())
            trainer.weights = f"torn/{trainer.name}"

    def not_committed(self, vote: Round, step: int) -> None:
        """Record a step that was not committed."""
        trainer = self.trainer
        trainer.mark("a commit failed")
        if trainer.outside.invariants.was_committed(vote, trainer.rank):
            trainer.mark("one group committed what another lost")
        trainer.note(f"does not commit step {max(vote.step, step) + 1}")
