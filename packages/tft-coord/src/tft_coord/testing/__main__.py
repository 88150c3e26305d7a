"""Run the simulator for as long as one likes: `python -m tft_coord.testing --seeds 100000`.

All cores take part, or as many as `--processes` says. `--seed 17 --story` runs one seed and tells it as a transcript,
`--seed 17 --trace` prints every event of it. Exits 1 at the first seed that fails, with its transcript and with what
happened last, and 2, with one sentence, if the call was wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn, final

from tft_coord.testing.many import run_many, story
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
    parser.add_argument("--processes", type=int, default=0, metavar="N", help="that run them; 0: one for each core")
    parser.add_argument("--trace", action="store_true", help="print every event and effect; of one seed")
    parser.add_argument("--story", action="store_true", help="tell what happens, as the transcripts do; of one seed")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}; give at least 1")
    if options.processes < 0:
        parser.error(f"--processes is {options.processes}; give at least 1, or 0 for one for each core")
    for name in ("trace", "story"):
        if getattr(options, name) and options.seeds > 1:
            parser.error(f"--{name} prints one seed, and --seeds is {options.seeds}; give --seed alone")
    try:
        if options.seeds == 1:
            _run_one(options.seed, trace=options.trace, tell=options.story)
        else:
            seeds = range(options.seed, options.seed + options.seeds)
            marks = run_many(seeds, processes=options.processes or os.cpu_count() or 1)
            print(f"{options.seeds} seeds from {options.seed}: all invariants hold; they came by\n{marks}")
    except SimulationFailed as failed:
        print(f"the transcript of seed {failed.seed}:", *story(failed.seed), "", failed, sep="\n", file=sys.stderr)
        return 1
    return 0


def _run_one(seed: int, *, trace: bool, tell: bool) -> None:
    report = simulate(seed, on_line=print if trace else None)
    if tell:
        print(*story(seed), sep="\n")
    print(
        f"seed {seed}: {report.num_commits} commits, {report.num_events} events, first commit "
        f"{report.calm_to_commit_ms} ms and whole {report.calm_to_whole_ms} ms after the faults, "
        f"trace {report.trace_digest}"
    )


if __name__ == "__main__":
    sys.exit(main())
