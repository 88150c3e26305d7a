"""A training loop with accelerate, as its users write one. It runs as one replica of a job."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from integration_tests.clients.data import (
    STEPS,
    Share,
    loss_of,
    network,
    print_end,
    print_step,
    replica,
    sequences,
)
from tft_suite import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from tft_suite.integrations.data import endless


def main(folder: Path) -> None:
    net = network()
    held_out = sequences(64, seed=0)
    manager = Manager(pg=ProcessGroupGloo(), replica_id=f"replica_{replica()}", min_replica_size=1)
    adam = torch.optim.AdamW(net.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 - step / STEPS)
    for name, part in (("model", net), ("optimizer", adam), ("scheduler", schedule)):
        manager.register_state_dict_fn(name, part.load_state_dict, part.state_dict)

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        DistributedDataParallel(manager, net),
        Optimizer(manager, adam),
        DataLoader(endless(Share(replica(), folder)), batch_size=8),
    )
    for tokens in loader:
        optimizer.zero_grad()  # starts the quorum, which is there before the forward pass
        loss = loss_of(model(tokens), tokens)
        accelerator.backward(loss)  # averages the gradients over the replicas
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # steps if the step commits
        if manager.status().committed:  # the step committed
            schedule.step()  # not prepared, because accelerate would step it in any case
            with torch.no_grad():
                print_step(manager, manager.current_step(), loss_of(net(held_out), held_out).item())
        if manager.left or manager.current_step() >= STEPS:
            break
    manager.shutdown()
    print_end(manager, schedule.last_epoch, net.state_dict(), adam.state_dict())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
