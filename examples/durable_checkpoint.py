"""Checkpoints on disk beside live ones: kill all replica groups at once, restart some of them, and training resumes.

    (umask 077; openssl rand -hex 32 > tft-token)                                             # once
    export TFT_TOKEN_FILE=$PWD/tft-token                                                      # in each shell
    tft-lighthouse --min_replicas 1                                                           # shell 1
    TFT_LIGHTHOUSE=http://localhost:29510 REPLICA_GROUP_ID=0 python durable_checkpoint.py     # shell 2
    TFT_LIGHTHOUSE=http://localhost:29510 REPLICA_GROUP_ID=1 python durable_checkpoint.py     # shell 3

Or, with two processes a replica group, `torchrun --standalone --nproc_per_node=2 durable_checkpoint.py` in shells 2 and
3. While one group lives, restarted groups heal from it, and read the disk only at their start.
"""

import argparse
import logging
import os

import torch
import torch.distributed as dist

from tft_algos import ConfigError, DistributedDataParallel, Manager, Optimizer
from tft_algos.durable import DurableCheckpoint
from tft_algos.errors import DurableCheckpointError
from tft_coord.errors import CoordinationError
from tft_pg import ProcessGroupGloo, init_group


def main(replica: int, steps: int, directory: str, every: int) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(replica)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    with Manager(ProcessGroupGloo(), replica_id=f"replica_{replica}", check_state_every=100) as manager:
        for key, part in (("model", model), ("optimizer", adam), ("scheduler", scheduler)):
            # restarted groups heal from live state
            manager.register_state_dict_fn(key, part.load_state_dict, part.state_dict)
        inside = (
            init_group("cpu") if manager.status().group_world_size > 1 else None
        )  # the processes of this replica group
        ddp = DistributedDataParallel(manager, model, inside)
        optimizer = Optimizer(manager, adam)
        checkpoint = DurableCheckpoint(
            manager, directory, model=model, optimizers=optimizer, others={"scheduler": scheduler}, every=every
        )
        print(f"resumed step {checkpoint.load()}")  # None: there is no checkpoint to resume from
        while manager.current_step() < steps:
            batch = torch.randn(64, 32)
            optimizer.zero_grad()  # starts the quorum
            loss = torch.nn.functional.mse_loss(ddp(batch), batch.flip(1))
            loss.backward()  # averages the gradients
            if optimizer.step():  # if the group commits
                scheduler.step()
            if checkpoint.save_if_due():  # one group writes while the others train on
                step, participants = manager.current_step(), manager.num_participants()
                print(f"step {step} participants {participants} loss {loss:.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)
    own = os.environ.get("REPLICA_GROUP_ID", "0")
    parser.add_argument("--replica_group_id", dest="replica", type=int, default=own)
    parser.add_argument("steps", type=int, nargs="?", default=2000)
    parser.add_argument("--directory", default="checkpoints")
    parser.add_argument("--every", type=int, default=100)
    try:
        main(**vars(parser.parse_args()))
    except (ConfigError, DurableCheckpointError, CoordinationError) as error:  # a traceback would not help with these
        parser.exit(2, f"{parser.prog}: {error}\n")
