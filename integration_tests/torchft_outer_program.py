"""LocalSGD and DiLoCo as torchft's users write them. The script does not know of tft.

The script prints one line for each sync: the step, the participants, a digest of the weights that were synchronized.

Law of this file: torchft's public names only, as its documentation shows them.
"""

from __future__ import annotations

import hashlib
import sys
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import nn


def digest_of(module: nn.Module) -> str:
    """Return a digest of the parameters of a module."""
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
    return hashlib.sha256(weights).hexdigest()[:16]


def main(algorithm: str, name: str, lighthouse: str) -> None:
    """Train for ever. `algorithm`: local_sgd, diloco, or streaming for DiLoCo with two fragments."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo, LocalSGD

    torch.set_num_threads(1)
    torch.manual_seed(sum(name.encode()))
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    model = nn.Sequential(*layers)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=10)),
        None,
        None,
        1,
        use_async_quorum=False,
        replica_id=name,
        lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=20),
    )
    fragments: list[nn.Module] = [*layers] if algorithm == "streaming" else [model]
    strategy: AbstractContextManager[Any]
    if algorithm == "local_sgd":
        strategy = LocalSGD(manager, model, inner, sync_every=4)
    else:
        outer = [torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True) for each in fragments]
        strategy = DiLoCo(manager, fragments, inner, outer, sync_every=4)
    with strategy:
        manager.register_state_dict_fn(f"own of {algorithm}", lambda _: None, lambda: {"seed": torch.tensor(0)})
        inner.step()  # the first one opens the job, or joins it; it has no gradients
        step = manager.current_step()
        while True:
            time.sleep(0.005)
            inner.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            inner.step()
            if manager.current_step() > step:
                step = manager.current_step()
                synchronized = fragments[(step - 2) % len(fragments)]
                print(f"commit {step} {manager.num_participants()} {digest_of(synchronized)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
