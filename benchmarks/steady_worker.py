"""One replica of the steady-step benchmarks: it trains until it is killed, and reports its steps on request.

Law of this file: started as a module. An order is a line, and so is its answer. The worker is silent between two
orders, so its steps are not disturbed.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time

from benchmarks.step_worker import one_layer, report


def main() -> None:
    """Train for ever."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=["tft"], required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--lighthouse", required=True)
    arguments = parser.parse_args()

    model, optimizer, data = one_layer(arguments)
    manager = optimizer.manager
    steps: list[tuple[float, int]] = []  # end of each step, and the number of committed steps at that time

    def answer() -> None:
        for _ in sys.stdin:
            report(steps=steps[:], participants=manager.num_participants())

    threading.Thread(target=answer, name="benchmark-answers", daemon=True).start()
    while True:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        steps.append((time.time(), manager.current_step()))


if __name__ == "__main__":
    main()
