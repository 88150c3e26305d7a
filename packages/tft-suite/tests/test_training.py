"""The data, the net and the digest."""

from __future__ import annotations

import pytest
import torch

from tft_suite.demo.data import draw, load
from tft_suite.demo.model import accuracy, digest_of, make_net


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


def test_the_digest_sees_one_bit_and_the_optimizer() -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()

    def digest() -> str:
        return digest_of(net.state_dict(), optimizer.state_dict())

    before = digest()
    assert before == digest()
    assert len(before) == 32
    bits = net.weight.data.view(torch.int32)
    bits[0, 0] ^= 1
    assert digest() != before
    bits[0, 0] ^= 1
    assert digest() == before
    optimizer.param_groups[0]["lr"] *= 2
    assert digest() != before


def test_the_digest_tells_dtypes_and_structure_apart() -> None:
    states: list[dict[str, object]] = [
        {"a": torch.zeros(2)},
        {"a": torch.zeros(2, dtype=torch.int32)},
        {"a": torch.zeros(1, 2)},
        {"b": torch.zeros(2)},
        {"a": 1},
        {"a": 1.0},
        {"a": True},
        {"a": "1"},
        {"a": None},
        {"a": [1]},
        {"a": [[1]]},
        {1: 1},
        {"1": 1},
    ]
    assert len({digest_of(state) for state in states}) == len(states)


def test_the_digest_refuses_what_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="set"):
        digest_of({"a": {1, 2}})
