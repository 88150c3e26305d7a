"""The data and the net."""

from __future__ import annotations

import torch

from tft_suite.demo.data import draw, load
from tft_suite.demo.model import accuracy, make_net


def test_the_test_part_is_a_stratified_fifth_and_shares_nothing_with_the_train_part() -> None:
    train, test = load()
    assert (len(train), len(test)) == (1437, 360)
    assert train.images.shape == (1437, 1, 8, 8)
    assert train.images.min() == 0.0
    assert train.images.max() == 1.0
    counts = torch.bincount(test.labels, minlength=10)
    assert counts.min() >= 34
    assert counts.max() <= 37
    again, _ = load()
    assert torch.equal(train.images, again.images)


def test_each_replica_and_each_step_has_its_own_batch_and_always_the_same() -> None:
    train, _ = load()
    keys = [(seed, replica, step) for seed in (0, 1) for replica in (0, 1) for step in (0, 1)]
    batches = [draw(train, batch=64, seed=s, replica=r, step=n).images for s, r, n in keys]
    assert batches[0].shape == (64, 1, 8, 8)
    assert all(not torch.equal(a, b) for i, a in enumerate(batches) for b in batches[:i])
    assert torch.equal(draw(train, batch=64, seed=1, replica=1, step=1).images, batches[-1])


def test_an_untrained_net_reads_badly() -> None:
    torch.manual_seed(0)
    _, test = load()
    assert accuracy(make_net(), test) < 0.5
