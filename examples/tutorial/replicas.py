"""Train a classifier in two replicas. Each of them, or both, may be killed and started again at any time."""

import logging
import os
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from tft_algos.durable import DurableCheckpoint
from tft_algos.testing import digest
from tft_suite import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

REPLICA, REPLICAS = int(os.environ["REPLICA_GROUP_ID"]), 2
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
EVERY = 100  # steps from one validation pass and checkpoint to the next


def make_data() -> tuple[TensorDataset, TensorDataset]:
    torch.manual_seed(0)
    inputs = torch.randn(10_240, 256)
    labels = torch.nn.Linear(256, 10)(inputs).argmax(dim=1)
    return TensorDataset(inputs[:8192], labels[:8192]), TensorDataset(inputs[8192:], labels[8192:])


@torch.no_grad()
def accuracy(model: torch.nn.Module, data: TensorDataset) -> float:
    model.eval()
    num_right = sum(int((model(x).argmax(dim=1) == y).sum()) for x, y in DataLoader(data, batch_size=512))
    model.train()
    return num_right / len(data)


def main() -> None:
    training, validation = make_data()
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager = Manager(ProcessGroupGloo(), replica_id=f"replica_{REPLICA}")
    manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
    manager.register_state_dict_fn("optimizer", adam.load_state_dict, adam.state_dict)
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, adam)
    checkpoint = DurableCheckpoint(manager, "checkpoints", model=model, optimizers=optimizer, every=EVERY)
    print(f"resumed step {checkpoint.load()}", flush=True)  # None: there is no checkpoint yet
    sampler = DistributedSampler(training, REPLICA, REPLICAS)
    loader = DataLoader(training, batch_size=64, sampler=sampler, num_workers=2)
    while (step := manager.current_step()) < STEPS:
        sampler.set_epoch(step // len(loader))
        for x, y in loader:
            optimizer.zero_grad()  # starts the quorum: the replicas that take part in this step
            loss = torch.nn.functional.cross_entropy(ddp(x), y)
            loss.backward()  # averages the gradients over these replicas
            committed = optimizer.step()  # False: a replica was lost in this step, and nothing has changed
            step = manager.current_step()
            if committed and step % EVERY == 0:
                print(f"step {step} loss {loss:.3f} accuracy {accuracy(model, validation):.3f}", end=" ")
                state = digest(model.state_dict(), adam.state_dict())[:12]
                print(f"participants {manager.num_participants()} state {state}", flush=True)
            checkpoint.save_if_due()  # one replica writes for all
            if step >= STEPS:
                break
    manager.shutdown()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main()
