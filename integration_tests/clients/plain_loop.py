"""A plain training loop with forked loader workers, augmentation, validation and checkpoints: one replica of a job."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import torch
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
from tft_algos.durable import DurableCheckpoint
from tft_suite import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main(folder: Path) -> None:
    net = network()
    adam = torch.optim.AdamW(net.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 - step / STEPS)
    validation = sequences(64, seed=0)
    manager = Manager(pg=ProcessGroupGloo(), replica_id=f"replica_{replica()}", min_replica_size=1)
    for name, part in (("model", net), ("optimizer", adam), ("scheduler", schedule)):
        manager.register_state_dict_fn(name, part.load_state_dict, part.state_dict)
    checkpoint = DurableCheckpoint(
        manager, folder / "checkpoints", model=net, optimizers=adam, others={"scheduler": schedule}, every=20, keep=2
    )
    checkpoint.load()
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, adam)
    loader = DataLoader(
        Share(replica(), folder),
        batch_size=8,
        shuffle=True,
        num_workers=2,  # forked again in each epoch of 25 batches
        multiprocessing_context=multiprocessing.get_context("fork"),
    )
    while manager.current_step() < STEPS and not manager.left:
        for tokens in loader:
            optimizer.zero_grad()
            loss_of(model(tokens), tokens).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            if optimizer.step():
                schedule.step()
                checkpoint.save_if_due()
                with torch.no_grad():  # on every replica, after the same steps
                    print_step(manager, manager.current_step(), loss_of(net(validation), validation).item())
            if manager.current_step() >= STEPS or manager.left:
                break
    manager.shutdown()
    print_end(manager, schedule.last_epoch, net.state_dict(), adam.state_dict())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
