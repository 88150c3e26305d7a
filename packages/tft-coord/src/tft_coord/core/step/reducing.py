"""The inputs of a reduction: which members give what, and the divisor.

Inside a step a member either gives its tensor or, while it heals or is a spare, takes part with values that change
nothing. After an error of the step it takes no part, and aborts the reductions in which the others would wait. Between
a verdict and the next quorum no step can fail any more. Each member with a usable group takes part, and gives if it has
committed the step, so that a mean is over those that did. Their number is unknown beforehand, so that mean is always a
weighted one.

Law of this file: numbers about a reduction; tensors are the shell's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, final

from tft_coord.core.step import effects as do
from tft_coord.core.step import events as on
from tft_coord.core.step.effects import Effects
from tft_coord.core.step.errors import UsageError
from tft_coord.core.step.state import StepState
from tft_coord.core.step.values import Phase, StepName
from tft_coord.core.types import Plan

# Weights are counts (samples, tokens), and their sum is known only after the reduction. This factor keeps products with
# any float32 or bfloat16 in range as long as the weights sum to at most 2**32. A power of two causes no rounding.
WEIGHT_SCALE: Final = 2.0**-32

_LOST_RESULT: Final[Effects] = (do.LoseReduction(),)
_ABORTED_RESULT: Final[Effects] = (do.LoseReduction(aborts=True),)
_KEPT: Final[Effects] = (do.KeepTensor(),)


def mean_factors(num_participants: int) -> tuple[float, float]:
    """Return the factor of each participant's tensor before a sum, and the divisor of the sum after it.

    A sum overflows where its mean does not, so the scaling comes first. The factor is a power of two, which causes no
    rounding. The mean is therefore bit for bit that of a sum divided afterwards, as torch's hybrid sharding makes it.
    For 2, 4 or 8 participants the divisor is 1: there is one pass over the memory.
    """
    number = max(num_participants, 1)
    power = 1 << (number - 1).bit_length()  # the smallest power of two that is not below `number`
    return 1.0 / power, number / power


@final
class Reducing:
    """The reductions of one rank.

    Args:
        state: the facts about the rank's steps, which all handlers share.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state

    def weight_set(self, event: on.WeightSet, now_ms: int) -> Effects:
        """Set the weight of this step.

        Raises: UsageError: no step is open, or a reduction of this step has used another weight.
        """
        attempts = self._state.attempts
        attempt = attempts.last
        if attempts.phase is Phase.IDLE:
            raise UsageError("set_weight was called outside a step; call it after start_quorum, before backward")
        if attempt.is_weighted and event.weight != attempt.weight:
            raise UsageError(
                f"set_weight was called with {event.weight:g} after a reduction of this step was weighted with "
                f"{attempt.weight:g}; set one weight per step, before its first reduction"
            )
        attempt.weight = event.weight
        return ()

    def reduction_asked(self, event: on.ReductionAsked, now_ms: int) -> Effects:
        """Decide about a reduction.

        Raises: UsageError: this rank has already told the others that its reductions have succeeded.
        """
        state, attempts = self._state, self._state.attempts
        attempt = attempts.last
        plan, name = attempt.plan, attempt.name
        inside = attempts.phase is not Phase.IDLE
        if inside:
            if attempt.sent_word is not None:
                raise UsageError(
                    f"a reduction was asked for in {name} after exchange_state, which has told the other replicas that "
                    "the step's reductions are done; call exchange_state after the last reduction of a step"
                )
            attempt.num_reductions += 1
        else:
            name = replace(name, attempt=0)  # of no attempt: the last one may be in flight, and does not fail by it
        if plan is None:
            return _LOST_RESULT
        if inside and attempt.error is not None:
            return _ABORTED_RESULT if plan.replica_world_size > 1 else _LOST_RESULT
        if state.settings.is_passive_rank:
            return _KEPT
        gives = attempt.is_participating and (inside or attempts.verdict is True)
        weight = None
        if event.average:
            weight = self._weight_part(event.weight, plan, gives=gives, inside=inside)
        if gives and plan.replica_world_size == 1:
            return (do.ReduceAlone(name, weight),)
        broken = state.losses.broken
        if broken is not None:
            return self._lose(broken, name, inside=inside)
        if weight is not None:
            factor, divide_by = weight, 1.0
        else:
            factor, divide_by = mean_factors(plan.num_participants) if event.average else (1.0, 1.0)
        shared = inside and weight is not None and event.weight is None
        attempt.is_weighted = attempt.is_weighted or shared
        return (
            do.Reduce(
                name,
                attempt.num_reductions,
                gives,
                factor,
                divide_by,
                weight,
                shared,
                inside,
                plan.replica_world_size - 1,
            ),
        )

    def _lose(self, error: Exception, name: StepName, *, inside: bool) -> Effects:
        if inside:
            self._state.attempts.last.note(error)
        return do.ReportError(name, error, inside), *_LOST_RESULT

    def _weight_part(self, weight: float | None, plan: Plan, *, gives: bool, inside: bool) -> float | None:
        """Return this member's part of the sum of the weights of a mean, scaled; None: the mean has no weights.

        The only participant's gradient is the mean, to the last bit, whatever its weight; that weight is therefore one.
        """
        if weight is None and not inside:  # only the sum shows how many members give
            return 1.0 / max(plan.num_participants, 1) if gives else 0.0
        weight = self._state.attempts.last.weight if weight is None else weight
        if weight is None:
            return None
        if not gives:
            return 0.0
        return weight * WEIGHT_SCALE if plan.num_participants != 1 else float(weight > 0.0)
