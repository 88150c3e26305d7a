"""A worker that calls torchft as Ray Train's TorchftConfig and its example do. It does not know of tft.

Ray starts a worker, makes torch's default group of this one process, tells it the address of the lighthouse, and runs
the training function on a thread. It prints one line for each commit: the step, the participants and a digest of the
weights.

Law of this file: torchft's public names, in the order in which Ray calls them.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing.pg_transport import PGTransport

LIMIT: Final = timedelta(seconds=30)
PACE_S: Final = 0.05


def train(number: int, last: Path) -> None:
    """Train until the commit whose number is in the file `last`, which a test writes."""
    torch.manual_seed(number)  # its own weights
    net = nn.Linear(1, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    group = ProcessGroupGloo(timeout=LIMIT)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        sgd.load_state_dict(state["optim"])

    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optim": sgd.state_dict()},
        world_size=1,
        rank=0,
        replica_id=f"train_ddp_{number}",
        timeout=2 * LIMIT,
        checkpoint_transport=PGTransport(group, timeout=LIMIT, device=torch.device("cpu")),
    )
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, sgd)
    x = torch.arange(0, 10, 0.01)[:, None]
    data = TensorDataset(x, 2 * x + 5)
    sampler = DistributedSampler(
        data, replica_rank=number, num_replica_groups=2, group_rank=0, num_replicas=1, shuffle=False
    )
    while not last.exists() or manager.current_step() < int(last.read_text()):
        for inputs, targets in DataLoader(data, batch_size=4, sampler=sampler):
            time.sleep(PACE_S)
            before = manager.current_step()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            if (step := manager.current_step()) > before:
                weights = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
                print(f"commit {step} {manager.num_participants()} {hashlib.sha256(weights).hexdigest()}", flush=True)
            if last.exists() and step >= int(last.read_text()):
                break
    manager.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    os.environ["TORCHFT_LIGHTHOUSE"] = sys.argv[1]  # after the import
    thread = threading.Thread(target=train, args=(int(sys.argv[2]), Path(sys.argv[3])), name="train")
    thread.start()
    thread.join()
    dist.destroy_process_group()
