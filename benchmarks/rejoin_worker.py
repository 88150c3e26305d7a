"""One replica of the rejoin benchmark, of tft or of torchft: it trains until it is killed.

The worker prints a JSON line when the training loop's parts are constructed, and one for each commit. A healing replica
takes weights and optimizer state from another, as every replica does that starts in a running job.

Law of this file: started as a module under the interpreter that has the system installed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from benchmarks.step_worker import WRAPPERS, batch_of, make_model, report


def main() -> None:
    """Train for ever."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=["tft", "torchft"], required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--min-replicas", dest="replicas", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--lighthouse", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    module = make_model(arguments.hidden)
    model, optimizer, _ = WRAPPERS[arguments.system](arguments, module)
    manager, adam = optimizer.manager, optimizer.optim

    def take() -> dict[str, Any]:
        return {"model": module.state_dict(), "optimizer": adam.state_dict()}

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager.register_state_dict_fn("training", load, take)
    data = batch_of(arguments)
    report(kind="constructed", at_s=time.time())
    step = 0
    while True:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        if manager.current_step() > step:
            step = manager.current_step()
            report(kind="commit", step=step, participants=manager.num_participants(), at_s=time.time())


if __name__ == "__main__":
    main()
