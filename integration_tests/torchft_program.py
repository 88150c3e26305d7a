"""A training script as torchft's users write it, for torchft's own interpreter. It does not know of tft.

The script prints one line for each commit: the step, the participants, a digest of the weights.

Law of this file: torchft's public names only, as its documentation shows them.
"""

from __future__ import annotations

import hashlib
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main(name: str, lighthouse: str) -> None:
    """Train for ever."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    torch.manual_seed(sum(name.encode()))
    module = torch.nn.Linear(16, 16)
    adam = torch.optim.AdamW(module.parameters())

    def take() -> dict[str, Any]:
        return {"model": module.state_dict(), "optimizer": adam.state_dict()}

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=take,
        min_replica_size=1,
        replica_id=name,
        lighthouse_addr=lighthouse,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=10),
    )
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, adam)
    step = 0
    while True:
        time.sleep(0.02)
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        if manager.current_step() > step:
            step = manager.current_step()
            weights = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
            digest = hashlib.sha256(weights).hexdigest()[:16]
            print(f"commit {step} {manager.num_participants()} {digest}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
