"""A run in which groups are killed and come back ends with the loss of the same run without faults, within seed noise.

The runs have equal numbers of committed steps and equal seeds. The loss is on text that is never trained on. A step's
training data does not depend on its participants, so only the order of additions differs.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Final

import pytest

from examples.train_lm import Settings
from integration_tests.conftest import Spawn
from integration_tests.language_model import MARGIN_STEPS, TINY, training_together

SEEDS: Final = (0, 1, 2)
STEPS_BETWEEN: Final = 30  # from the common training of all to the next kill
LONG: Final = Settings(steps=400, batch=24, context=32, characters=200_000, width=32, layers=2)
SHORT: Final = replace(TINY, steps=150, batch=10)  # three groups get unequal shares of the batch
SAME_SEED: Final = 1e-3  # share of the loss, for rounding alone, with a margin


def train(spawn: Spawn, settings: Settings, *, groups: int, kills: bool) -> tuple[float, int]:
    """Train once. Returns: the final loss, and the number of killed processes."""
    hold_at = settings.steps - MARGIN_STEPS  # steps left for a restarted group to join in
    with training_together(spawn, groups=groups, settings=settings, hold_at=hold_at) as cluster:
        killed = 0
        # The first kill comes at any step. On a busy machine one group trains far before the others have started.
        while kills and (killed == 0 or cluster.step + STEPS_BETWEEN < hold_at):
            cluster.until_step(min(cluster.step + STEPS_BETWEEN, hold_at))
            cluster.kill(cluster.groups[killed % groups].trainers[0])
            killed += 1
            cluster.until_together(after=cluster.step, unless_at=hold_at)
        losses = cluster.finish(settings.steps)
    assert len(set(losses)) == 1
    return losses[0], killed


@pytest.mark.in_parts
@pytest.mark.timeout(180)
def test_a_short_run_with_kills_reaches_the_loss_of_the_same_run_without(spawn: Spawn) -> None:
    without, _ = train(spawn, SHORT, groups=3, kills=False)
    with_kills, killed = train(spawn, SHORT, groups=3, kills=True)
    assert killed >= 1
    assert without < 4  # from ln 128 = 4.85
    assert abs(with_kills - without) < SAME_SEED


@pytest.mark.soak
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("groups", [2, 3, 5])
def test_the_means_of_three_seeds_differ_by_less_than_their_standard_deviation(spawn: Spawn, groups: int) -> None:
    runs = {
        kills: [train(spawn, replace(LONG, seed=seed), groups=groups, kills=kills) for seed in SEEDS]
        for kills in (False, True)
    }
    without, with_kills = ([loss for loss, _ in runs[kills]] for kills in (False, True))
    story = f"{groups} groups, losses without {without}, with {with_kills}, killed {[n for _, n in runs[True]]}"
    print(story)  # shown by -s: the table of losses
    assert all(killed >= 3 for _, killed in runs[True]), story
    assert all(abs(one - other) < SAME_SEED for one, other in zip(without, with_kills, strict=True)), story
    assert abs(statistics.mean(with_kills) - statistics.mean(without)) <= statistics.stdev(without), story
