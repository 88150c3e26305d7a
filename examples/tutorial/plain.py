"""Train a classifier in one process: data from worker processes, a validation pass, a checkpoint on disk."""

import os
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 400
EVERY = 100  # steps from one validation pass and checkpoint to the next
CHECKPOINT = "plain.pt"


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(training, batch_size=64, shuffle=True, num_workers=2)
    step = 0
    if os.path.exists(CHECKPOINT):
        saved = torch.load(CHECKPOINT)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
        print(f"resumed step {step}", flush=True)
    while step < STEPS:
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            if step % EVERY == 0:
                print(f"step {step} loss {loss:.3f} accuracy {accuracy(model, validation):.3f}", flush=True)
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, CHECKPOINT)
            if step >= STEPS:
                break


if __name__ == "__main__":
    main()
