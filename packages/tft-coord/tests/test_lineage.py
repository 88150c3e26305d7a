"""Lineage: equal step numbers are not equal states."""

from __future__ import annotations

import itertools

from tft_coord.core.lineage import adopted_lineage, fold_lineage, initial_lineage
from tft_coord.core.types import MAX_UINT64, QuorumKey


def test_two_halves_of_a_job_that_commit_the_same_step_differ() -> None:
    start = initial_lineage("job")
    left = fold_lineage(start, QuorumKey(7, 1), 1001)
    right = fold_lineage(start, QuorumKey(7, 2), 1001)
    assert left != right


def test_everything_that_makes_a_state_counts() -> None:
    key = QuorumKey(7, 1)
    made = [
        initial_lineage("job"),
        initial_lineage("another"),
        fold_lineage(1, key, 3),
        fold_lineage(2, key, 3),
        fold_lineage(1, key, 4),
        fold_lineage(1, QuorumKey(8, 1), 3),
        adopted_lineage(key, 3, "a"),
        adopted_lineage(key, 3, "b"),
        adopted_lineage(key, 4, "a"),
        adopted_lineage(QuorumKey(7, 2), 3, "a"),
        adopted_lineage(key, 3, "a", created_ms=1),  # the same step loaded by hand again, under the same key
    ]
    assert all(first != second for first, second in itertools.combinations(made, 2))
    assert all(0 <= each <= MAX_UINT64 for each in made)


def test_it_is_the_same_everywhere_for_ever() -> None:
    """State dicts keep it, so another version must compute the same."""
    assert initial_lineage("job") == 2490063192379177726
    assert fold_lineage(1, QuorumKey(7, 9), 3) == 8922419564730925960
    assert adopted_lineage(QuorumKey(7, 9), 3, "a") == 5280814973294774355
