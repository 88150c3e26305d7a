"""Fault-tolerant data parallelism: start it in as many shells as you like, kill any of them, start it again.

    tft-lighthouse --min_replicas 1                                                  # shell 1
    TFT_LIGHTHOUSE=http://localhost:29510 REPLICA_GROUP_ID=0 python train_ddp.py     # shell 2
    TFT_LIGHTHOUSE=http://localhost:29510 REPLICA_GROUP_ID=1 python train_ddp.py     # shell 3

Or, with two processes a replica group, `torchrun --standalone --nproc_per_node=2 train_ddp.py` in shells 2 and 3.
"""

import logging
import os
import sys

import torch
import torch.distributed as dist

from tft_algos import DistributedDataParallel, Manager, Optimizer
from tft_pg import ProcessGroupGloo


def main(steps: int) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    replica, replicas = int(os.environ.get("REPLICA_GROUP_ID", "0")), int(os.environ.get("NUM_REPLICA_GROUPS", "2"))
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:  # the processes of this replica group
        dist.init_process_group("gloo")

    torch.manual_seed(0)  # the data, the same everywhere; each process takes its own share of each batch
    inputs, teacher = torch.randn(4096, 32), torch.nn.Linear(32, 10)
    labels = teacher(inputs).argmax(dim=1)

    torch.manual_seed(replica)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load_state(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    def take_state() -> dict[str, dict[str, object]]:
        return {"model": model.state_dict(), "optimizer": adam.state_dict()}

    with Manager(ProcessGroupGloo(), load_state, take_state, replica_id=f"replica_{replica}") as manager:
        ddp = DistributedDataParallel(manager, model, dist.group.WORLD if ranks > 1 else None)
        optimizer = Optimizer(manager, adam)
        while manager.current_step() < steps:
            share = torch.arange(replica * ranks + rank, len(inputs), replicas * ranks)
            batch = share[torch.randint(len(share), (64,))]
            optimizer.zero_grad()  # starts the quorum
            loss = torch.nn.functional.cross_entropy(ddp(inputs[batch]), labels[batch])
            loss.backward()  # averages the gradients
            optimizer.step()  # steps if the group commits
            if manager.current_step() % 100 == 0:
                print(f"step {manager.current_step()} participants {manager.num_participants()} loss {loss:.4f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
