"""The training data of the client programs: short sequences in which each token follows from the one before.

Law of this file: samples, and the output of a program for its test.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tft_algos.testing import digest
from tft_suite import Manager

TOKENS: Final = 16
LENGTH: Final = 12
STEPS: Final = 100


def sequences(number: int, seed: int) -> Tensor:
    """Return sequences of tokens: (number, LENGTH). The next token is 5 x + 3, modulo TOKENS."""
    rows = [torch.randint(TOKENS, (number,), generator=torch.Generator().manual_seed(seed))]
    for _ in range(LENGTH - 1):
        rows.append((5 * rows[-1] + 3) % TOKENS)
    return torch.stack(rows, dim=1)


class Share(Dataset[Tensor]):
    """The training data of one replica. The folder's file `pace`, if any, has the seconds that each sample takes.

    Augmentation: each sample starts at a random place of its sequence.
    """

    def __init__(self, replica: int, folder: Path) -> None:
        self._sequences = sequences(200, seed=replica + 1)
        self._pace = folder / "pace"

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> Tensor:
        with contextlib.suppress(FileNotFoundError):
            time.sleep(float(self._pace.read_text()))
        return self._sequences[index].roll(-int(torch.randint(LENGTH - 8, ())))[:8]


def as_inputs(samples: list[Tensor]) -> dict[str, Tensor]:
    """Return a batch in the format of transformers models."""
    tokens = torch.stack(samples)
    return {"input_ids": tokens, "labels": tokens}


def network() -> nn.Module:
    """Return a model from tokens (batch, positions) to logits of the next ones (batch, positions, TOKENS)."""
    return nn.Sequential(nn.Embedding(TOKENS, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, TOKENS))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy of the next tokens."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def replica() -> int:
    """Return the number of this process's replica, from 0."""
    return int(os.environ["REPLICA_GROUP_ID"])


def print_step(manager: Manager, step: int, loss: float) -> None:
    """Print the facts that the test compares between replicas. `step` is the trainer's own count."""
    print(f"step {step} participants {manager.num_participants()} loss {loss:.6f}", flush=True)


def print_end(manager: Manager, step: int, *states: Any) -> None:
    """Print the digest of the whole state."""
    assert step == manager.current_step(), f"the trainer is at step {step}, its Manager at {manager.current_step()}"
    print(f"end step {step} digest {digest(*states)}", flush=True)
