"""Fault-tolerant data parallelism: start it in any number of shells, kill any of them, start it again.

    (umask 077; openssl rand -hex 32 > tft-token)                                    # once
    export TFT_TOKEN_FILE=$PWD/tft-token                                             # in each shell
    tft-lighthouse --min_replicas 1                                                  # shell 1
    TFT_LIGHTHOUSE=http://localhost:29510 REPLICA_GROUP_ID=0 python train_ddp.py     # shell 2
    TFT_LIGHTHOUSE=http://localhost:29510 REPLICA_GROUP_ID=1 python train_ddp.py     # shell 3

Or, with two processes a replica group, `torchrun --standalone --nproc_per_node=2 train_ddp.py` in shells 2 and 3.
"""

import argparse
import logging
import os

import torch

from tft_algos import ConfigError, DistributedDataParallel, Manager, Optimizer
from tft_coord.errors import CoordinationError
from tft_pg import ProcessGroupGloo, init_group


def main(steps: int, replica: int, replicas: int) -> None:
    if not 0 <= replica < replicas:
        raise ConfigError(f"REPLICA_GROUP_ID is {replica} of NUM_REPLICA_GROUPS {replicas}; it counts from 0")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(0)  # the data is the same everywhere, and each process takes its own share of each batch
    inputs, teacher = torch.randn(4096, 32), torch.nn.Linear(32, 10)
    labels = teacher(inputs).argmax(dim=1)

    torch.manual_seed(replica)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Manager(ProcessGroupGloo(), replica_id=f"replica_{replica}") as manager:
        manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
        manager.register_state_dict_fn("optimizer", adam.load_state_dict, adam.state_dict)
        status = manager.status()
        rank, ranks = status.group_rank, status.group_world_size
        inside = init_group("cpu") if ranks > 1 else None  # the processes of this replica group
        ddp = DistributedDataParallel(manager, model, inside)
        optimizer = Optimizer(manager, adam)
        while manager.current_step() < steps:
            share = torch.arange(replica * ranks + rank, len(inputs), replicas * ranks)
            batch = share[torch.randint(len(share), (64,))]
            optimizer.zero_grad()  # starts the quorum
            loss = torch.nn.functional.cross_entropy(ddp(inputs[batch]), labels[batch])
            loss.backward()  # averages the gradients
            optimizer.step()  # steps if the group commits
            if (step := manager.current_step()) % 100 == 0:  # flushed at once, so that a killed process has printed it
                print(f"step {step} participants {manager.num_participants()} loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)
    parser.add_argument("steps", type=int, nargs="?", default=2000)
    for field, name, default in (("replica", "REPLICA_GROUP_ID", "0"), ("replicas", "NUM_REPLICA_GROUPS", "2")):
        parser.add_argument(f"--{name.lower()}", dest=field, type=int, default=os.environ.get(name, default))
    try:
        main(**vars(parser.parse_args()))
    except (ConfigError, CoordinationError) as error:  # a traceback would not help with these
        parser.exit(2, f"{parser.prog}: {error}\n")
