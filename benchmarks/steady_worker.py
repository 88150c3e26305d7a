"""One replica of the steady-step benchmarks: trains until it is killed, and tells its steps when it is asked.

Law of this file: started as a module; an order is a line, and so is its answer. Between two orders it says nothing, so
that its steps are not disturbed.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time

from benchmarks.step_worker import one_layer, tell


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
    steps: list[tuple[float, int]] = []  # when each ended, and how many were committed then

    def answer() -> None:
        for _ in sys.stdin:
            tell(steps=steps[:], participants=manager.num_participants())

    threading.Thread(target=answer, name="benchmark-answers", daemon=True).start()
    while True:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        steps.append((time.time(), manager.current_step()))


if __name__ == "__main__":
    main()
