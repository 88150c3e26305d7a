"""A small conv net for the digits, and the digest of all that training changes.

Intuition: the net has no state that differs between replicas (no batch statistics, no dropout), so equal steps leave
equal bits, and one digest says whether they did.

Law of this file: the net and figures about it; no process, no replica.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tft_suite.demo.data import Samples

CHANNELS = 96
LEARNING_RATE = 2e-3


def make_net() -> nn.Sequential:
    """float32 [n, 1, 8, 8] to logits [n, 10]; the initial weights come from torch's global dice."""
    return nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * CHANNELS * 4, 10),
    )


@torch.no_grad()
def accuracy(net: nn.Module, samples: Samples) -> float:
    """The part of `samples` that `net` reads rightly, 0 to 1."""
    return float((net(samples.images).argmax(1) == samples.labels).float().mean())


def digest_of(*states: Mapping[str, Any]) -> str:
    """32 hexadecimal digits over every key, number, dtype, shape and bit of the state dicts, in canonical order."""
    hasher = hashlib.blake2b(digest_size=16)

    def walk(value: Any) -> None:
        match value:
            case Tensor():
                hasher.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
                hasher.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
            case Mapping():
                hasher.update(f"map {len(value)} ".encode())
                for key in sorted(value, key=repr):
                    walk(key)
                    walk(value[key])
            case list() | tuple():
                hasher.update(f"list {len(value)} ".encode())
                for item in value:
                    walk(item)
            case None | bool() | int() | float() | str():
                hasher.update(f"{type(value).__name__} {value!r} ".encode())
            case _:
                raise TypeError(f"a state dict holds a {type(value).__name__}, which has no digest here.")

    for state in states:
        walk(state)
    return hasher.hexdigest()
