"""The digest of a state tells every difference, and needs no numpy."""

from __future__ import annotations

import torch

from tft_algos.testing import digest


def test_the_digest_sees_one_bit_and_the_optimizer() -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()

    def now() -> str:
        return digest(net.state_dict(), optimizer.state_dict())

    before = now()
    assert before == now()
    assert len(before) == 32
    bits = net.weight.data.view(torch.int32)
    bits[0, 0] ^= 1
    assert now() != before
    bits[0, 0] ^= 1
    assert now() == before
    optimizer.param_groups[0]["lr"] *= 2
    assert now() != before


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
    assert len({digest(state) for state in states}) == len(states)
