"""The handwritten digits of scikit-learn, and the samples of each replica in each step.

There are 1,797 real images of 8 x 8 pixels. A stratified fifth is kept for the test. The batch of a replica is drawn
anew in each step from (seed, replica, step). So a run can be repeated, and no two replicas do the same work. The draw
is with replacement, because a demo does not need each sample exactly once.

Law of this file: functions of their arguments. The data set comes from the installed package, and nothing is
downloaded.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import final

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

TEST_PART = 0.2
TEST_SEED = 0
PIXEL_MAX = 16.0


@final
@dataclass(frozen=True, slots=True)
class Samples:
    """Images with labels. `images`: float32 [n, 1, 8, 8], 0 to 1. `labels`: int64 [n], 0 to 9."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, indices: Tensor) -> Samples:
        return Samples(self.images[indices], self.labels[indices])


def load() -> tuple[Samples, Samples]:
    """Return the training part (1,437 samples) and the test part (360). Every call returns the same split."""
    digits = load_digits()
    labels = torch.tensor(digits.target.tolist())
    images = torch.tensor(digits.images.tolist()).unsqueeze(1) / PIXEL_MAX
    train, test = train_test_split(range(len(labels)), test_size=TEST_PART, stratify=labels, random_state=TEST_SEED)
    everything = Samples(images, labels)
    return everything.at(torch.tensor(train)), everything.at(torch.tensor(test))


def draw(samples: Samples, *, batch: int, seed: int, replica: int, step: int) -> Samples:
    """Draw the batch of one replica in one step, with replacement. Equal arguments give equal batches."""
    key = hashlib.blake2b(f"{seed}/{replica}/{step}".encode(), digest_size=7).digest()
    rng = torch.Generator().manual_seed(int.from_bytes(key, "big"))
    return samples.at(torch.randint(len(samples), (batch,), generator=rng))
