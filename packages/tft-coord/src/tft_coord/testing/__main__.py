"""Run the simulator for as long as one likes: `python -m tft_coord.testing --seeds 100000`.

`--seed 17 --trace` runs one seed again and prints every event. Exits 1 at the first seed that fails, with what
happened last, and 2, with one sentence, if the call was wrong.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn, final

from tft_coord.testing.marks import Marks
from tft_coord.testing.simulator import SimulationFailed, simulate


@final
class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence; argparse would print the usage before it."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = _Parser(prog="python -m tft_coord.testing", description="Run the cluster simulator.", allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="how many seeds to run")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first one")
    parser.add_argument("--trace", action="store_true", help="print every event and effect; of one seed")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}; give at least 1")
    if options.trace and options.seeds > 1:
        parser.error(f"--trace prints one seed, and --seeds is {options.seeds}; give --seed alone")
    marks = Marks()
    for seed in range(options.seed, options.seed + options.seeds):
        try:
            report = simulate(seed, on_line=print if options.trace else None)
        except SimulationFailed as failed:
            print(failed, file=sys.stderr)
            return 1
        marks.add(report.marks)
        if options.seeds == 1:
            print(
                f"seed {seed}: {report.num_commits} commits, {report.num_events} events, first commit "
                f"{report.calm_to_commit_ms} ms and whole {report.calm_to_whole_ms} ms after the faults, "
                f"trace {report.trace_digest}"
            )
    if options.seeds > 1:
        print(f"{options.seeds} seeds from {options.seed}: all invariants hold; they came by\n{marks}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
