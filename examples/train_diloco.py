"""DiLoCo: replica groups train apart and synchronize now and then, for links that are too slow for every step.

    (umask 077; openssl rand -hex 32 > tft-token)                                                       # once
    export TFT_TOKEN_FILE=$PWD/tft-token                                                                # in each shell
    tft-lighthouse --min_replicas 1                                                                     # shell 1
    TFT_LIGHTHOUSE=http://localhost:29510 REPLICA_GROUP_ID=0 python train_diloco.py                     # shell 2
    TFT_LIGHTHOUSE=http://localhost:29510 REPLICA_GROUP_ID=1 python train_diloco.py                     # shell 3

With USE_STREAMING=True in the environment of all of them it is Streaming DiLoCo. The model is cut into two fragments,
which take turns, and a synchronization travels beside the next steps of the training. Kill any process, and restart it.
With two processes a group: `torchrun --standalone --nproc_per_node=2 train_diloco.py` in shells 2 and 3.
"""

import argparse
import logging
import os

import torch

from tft_algos import ConfigError, DiLoCo, Manager, fragment_model
from tft_coord.errors import CoordinationError
from tft_pg import ProcessGroupGloo, init_group

SYNC_EVERY = 20  # steps of the inner optimizer, from one synchronization of a fragment to its next


def main(synchronizations: int, replica: int, replicas: int, streaming: bool) -> None:
    if replicas < 1 or synchronizations < 1:
        raise ConfigError(f"NUM_REPLICA_GROUPS is {replicas}, synchronizations {synchronizations}; give at least 1")
    if not 0 <= replica < replicas:
        raise ConfigError(f"REPLICA_GROUP_ID is {replica} of NUM_REPLICA_GROUPS {replicas}; give 0 to {replicas - 1}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(0)  # the data is the same everywhere, and each process takes its own share of each batch
    inputs, teacher = torch.randn(4096, 32), torch.nn.Linear(32, 10)
    labels = teacher(inputs).argmax(dim=1)

    torch.manual_seed(replica)
    layers = [
        torch.nn.Linear(32, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    ]
    model = torch.nn.Sequential(*layers)
    fragments = fragment_model(model, 2 if streaming else 1)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = [torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True) for each in fragments]
    with Manager(ProcessGroupGloo(), replica_id=f"replica_{replica}") as manager:
        status = manager.status()
        rank, ranks = status.group_rank, status.group_world_size
        trained: torch.nn.Module = model
        if ranks > 1:  # the processes of this replica group
            init_group("cpu")
            trained = torch.nn.parallel.DistributedDataParallel(model)  # torch's own, inside the group, in every step
        share = torch.arange(replica * ranks + rank, len(inputs), replicas * ranks)
        # steps that a synchronization may take, and the share that stays local
        delay, alpha = (5, 0.1) if streaming else (0, 0.0)
        with DiLoCo(
            manager, fragments, inner, outer, SYNC_EVERY, fragment_sync_delay=delay, fragment_update_alpha=alpha
        ):
            while manager.current_step() < synchronizations:  # the first one makes all weights equal
                before = manager.current_step()
                batch = share[torch.randint(len(share), (64,))]
                inner.zero_grad()
                loss = torch.nn.functional.cross_entropy(trained(inputs[batch]), labels[batch])
                loss.backward()
                inner.step()  # at some steps a synchronization starts here, or ends
                if (step := manager.current_step()) > before and step % 5 == 0:
                    participants = manager.num_participants()
                    print(f"synchronization {step} participants {participants} loss {loss:.4f}", flush=True)


def truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"USE_STREAMING is {text!r}; give True or False")
    return text.lower() == "true"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("synchronizations", type=int, nargs="?", default=100)
    for field, name, default in (("replica", "REPLICA_GROUP_ID", "0"), ("replicas", "NUM_REPLICA_GROUPS", "2")):
        parser.add_argument(f"--{name.lower()}", dest=field, type=int, default=os.environ.get(name) or default)
    parser.add_argument(
        "--use_streaming", dest="streaming", type=truth, default=os.environ.get("USE_STREAMING") or "False"
    )
    try:
        main(**vars(parser.parse_args()))
    except (ConfigError, CoordinationError) as error:  # a traceback would not help with these
        parser.exit(2, f"{parser.prog}: {error}\n")
