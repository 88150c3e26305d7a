"""One replica of the failure benchmark, of tft or of torchft: it trains until it is killed.

The worker prints a JSON line whenever it commits with a different number of participants. It prints one more when it
has committed with all of them for a while, so the parent knows that all train.

Law of this file: started as a module under the interpreter that has the system installed.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.step_worker import one_layer, report

STEADY_STEPS = 50


def main() -> None:
    """Train for ever."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=["tft", "torchft"], required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--members", type=int, required=True)
    parser.add_argument("--min-replicas", dest="replicas", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--lighthouse", required=True)
    arguments = parser.parse_args()

    model, optimizer, data = one_layer(arguments)
    manager = optimizer.manager
    step, participants, steps_together = 0, 0, 0
    while True:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        if manager.current_step() == step:
            continue
        step = manager.current_step()
        if manager.num_participants() != participants:
            participants, steps_together = manager.num_participants(), 0
            report(participants=participants, steady=False, at_s=time.time())
        steps_together += 1
        if participants == arguments.members and steps_together == STEADY_STEPS:
            report(participants=participants, steady=True, at_s=time.time())


if __name__ == "__main__":
    main()
