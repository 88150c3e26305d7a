"""A custom outer update: replicas train on their own, and move their common weights by the sign of a momentum.

DiLoCo steps a torch optimizer with the replicas' mean progress. Here each weight moves by a fixed amount against the
sign of that mean and a momentum of it (Lion, arXiv 2302.06675). So one replica with a huge gradient can't throw the
others off. This file defines only what is sent, and the use of the mean. OuterLoop decides when a sync begins and ends,
which replicas take part, what a failure undoes, and how a newcomer heals.

    (umask 077; openssl rand -hex 32 > tft-token) # once, and in each shell: export TFT_TOKEN_FILE=$PWD/tft-token
    tft-lighthouse --min_replicas 2                                                                     # shell 1
    TFT_LIGHTHOUSE=http://localhost:29510 python own_outer_update.py --replica 0                     # shells 2, 3, ...
"""

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from tft_algos import Manager, OuterFragment, OuterLoop, OuterUpdate
from tft_algos.testing import digest
from tft_pg import ProcessGroupGloo


class SignOfMomentum(OuterUpdate):
    """An update that moves each weight by `lr` against the sign of the mean pseudogradient and its momentum."""

    def __init__(self, model: torch.nn.Module, lr: float = 2e-3, beta: float = 0.9) -> None:
        self._lr = lr
        self._beta = beta
        self._momentum = [torch.zeros_like(each, requires_grad=False) for each in model.parameters()]

    def capture(self, index: int, fragment: OuterFragment) -> None:
        fragment.capture_difference()  # the global weights minus the weights that this replica has trained

    def apply(self, index: int, fragment: OuterFragment) -> None:
        fragment.restore()  # start from the global weights, as on every replica
        for weight, mean, momentum in zip(fragment.local(), fragment.sent, self._momentum, strict=True):
            weight.sub_(torch.lerp(mean, momentum, self._beta).sign_(), alpha=self._lr)
            momentum.lerp_(mean, 1 - self._beta)

    def fingerprint(self) -> Mapping[str, str]:
        return {"outer lr and beta": f"{self._lr} {self._beta}"}  # a replica with other values is refused by name

    def state_dict(self, index: int) -> dict[str, Any]:
        return {"momentum": self._momentum}  # a newcomer fetches it with the global weights

    def load_state_dict(self, index: int, state: Mapping[str, Any]) -> None:
        for momentum, fetched in zip(self._momentum, state["momentum"], strict=True):
            momentum.copy_(fetched)


def main(syncs: int, replica: int, sync_every: int) -> None:
    torch.manual_seed(0)
    teacher = torch.nn.Linear(32, 1)
    torch.manual_seed(1 + replica)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    update = SignOfMomentum(model)
    with (
        Manager(ProcessGroupGloo(), min_replica_size=1, replica_id=f"replica_{replica}") as manager,
        OuterLoop(manager, [model], inner, update, sync_every) as loop,
    ):
        while manager.current_step() < syncs:  # the opening makes all replicas equal, and counts as one
            step = manager.current_step()
            inputs = torch.randn(64, 32)
            inner.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
            loss.backward()
            inner.step()  # a sync runs in here when it is due
            if manager.current_step() > step:
                members = manager.num_participants()
                print(f"sync {step + 1} of {members}, {digest(loop.state_dict())}, loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("syncs", type=int, nargs="?", default=50)
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--sync_every", type=int, default=10, help="steps of the optimizer from one sync to the next")
    main(**vars(parser.parse_args()))
