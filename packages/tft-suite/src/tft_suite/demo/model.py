"""A small convolutional net for the digits.

The net has no state that differs between replicas (no batch statistics, no dropout). So equal steps give equal bits,
and one digest of the state shows whether they did.

Law of this file: the net and its figures. No process, no replica.
"""

from __future__ import annotations

import torch
from torch import nn

from tft_suite.demo.data import Samples

CHANNELS = 96
LEARNING_RATE = 2e-3


def make_net() -> nn.Sequential:
    """Return the net: float32 [n, 1, 8, 8] to logits [n, 10]. Torch's global generator gives the initial weights."""
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
    """Return the fraction of `samples` that `net` classifies correctly, 0 to 1."""
    return float((net(samples.images).argmax(1) == samples.labels).float().mean())
