"""Run the simulator for any number of seeds: `python -m tft_sim --seeds 100000`.

All CPU cores take part, or as many as `--processes` says. `--seed 17 --story` runs one seed and prints its transcript.
`--seed 17 --trace` prints every event of it. With `--stragglers` replicas become slow for a while, and few other faults
occur.

`--explore 4 --replicas 3` leaves nothing to chance. It tries every order of four events on the lighthouse's core alone,
with three replicas, and on the core of a group. Six events take hours. With the kinds limited by
`--kinds ask,die,leave,hang,wake,grace` they take minutes.

The command exits with 1 at the first failing seed or order, with its transcript and the last events. It exits with 2
and one sentence after a wrong call. It exits silently with 141 if the reader of its output is gone.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final, NoReturn, final

from tft_sim.explore import ExplorationError, Explored, explore
from tft_sim.many import run_many, story
from tft_sim.simulator import STANDING, STRAGGLERS, SimulationConfig, SimulationError, simulate
from tft_sim.worlds import KINDS, STARTS, GroupWorld, LighthouseWorld

SEED_OPTIONS: Final = ("seeds", "seed", "trace", "story", "stragglers", "standing")
EXPLORE_OPTIONS: Final = ("replicas", "start", "kinds")
EXIT_CODE_SIGPIPE: Final = 128 + signal.SIGPIPE  # the shell's exit code for a command that SIGPIPE ended


@final
class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the error in one sentence, without the usage that argparse prints before it."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _options(arguments)
    try:
        code = _run(options)
        sys.stdout.flush()  # at the interpreter's end a flush error would be printed
    except BrokenPipeError:
        # Unwritten output goes nowhere. SIGPIPE's default action would also end this process after a worker's broken
        # pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CODE_SIGPIPE
    return code


def _options(arguments: list[str] | None) -> argparse.Namespace:
    """Return the parsed arguments, with `kinds` as a list. Invalid arguments end the process."""
    parser = _Parser(prog="python -m tft_sim", description="Run the cluster simulator.", allow_abbrev=False)
    parser.add_argument("--seeds", type=int, metavar="N", help="number of seeds to run; default 1")
    parser.add_argument("--seed", type=int, metavar="N", help="first seed; default 0")
    parser.add_argument(
        "--processes", type=int, default=0, metavar="N", help="number of processes; 0: one for each core"
    )
    parser.add_argument("--trace", action="store_true", default=None, help="print all events of one seed")
    parser.add_argument("--story", action="store_true", default=None, help="print one seed as a transcript")
    parser.add_argument("--stragglers", action="store_true", default=None, help="replicas become slow for a while")
    parser.add_argument("--standing", action="store_true", default=None, help="quorums stand without requests")
    parser.add_argument("--explore", type=int, metavar="N", help="try every order of N events instead of seeds")
    parser.add_argument("--replicas", type=int, metavar="N", help="number of replicas, 1 to 3; default 3")
    parser.add_argument("--start", choices=(*STARTS, "group"), help="start of the exploration; default: each in turn")
    parser.add_argument("--kinds", metavar="A,B", help="kinds of events, such as ask,die,leave; default all")
    options = parser.parse_args(arguments)
    explores = options.explore is not None
    for name in SEED_OPTIONS if explores else EXPLORE_OPTIONS:
        if getattr(options, name) is not None:
            parser.error(
                f"--explore and --{name} exclude each other; give one of the two"
                if explores
                else f"--{name} needs --explore; give --explore too, or remove --{name}"
            )
    _set_defaults(options)
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}; give at least 1")
    if options.processes < 0:
        parser.error(f"--processes is {options.processes}; give at least 1, or 0 for one for each core")
    if explores and (options.explore < 1 or not 1 <= options.replicas <= 3):
        parser.error(f"--explore is {options.explore} of {options.replicas} replicas; give at least 1, of 1 to 3")
    for name in ("trace", "story"):
        if getattr(options, name) and options.seeds > 1:
            parser.error(f"--{name} prints one seed, and --seeds is {options.seeds}; give --seed alone")
    kinds = [kind for kind in options.kinds.split(",") if kind]
    if not set(kinds) <= set(KINDS) or (kinds and options.start == "group"):
        parser.error(f"--kinds is {options.kinds}; of the lighthouse's events there are {', '.join(KINDS)}")
    options.kinds = kinds
    return options


def _set_defaults(options: argparse.Namespace) -> None:
    """Fill in the defaults of options that only one mode has: argparse's own hide whether an option was given."""
    defaults = {
        "seeds": 1,
        "seed": 0,
        "trace": False,
        "story": False,
        "stragglers": False,
        "standing": False,
        "replicas": 3,
        "kinds": "",
    }
    for name, default in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, default)


def _run(options: argparse.Namespace) -> int:
    processes = options.processes or os.cpu_count() or 1
    if options.explore is not None:
        return _explore(options.explore, "abc"[: options.replicas], options.start, options.kinds, processes)
    config = STRAGGLERS if options.stragglers else STANDING if options.standing else SimulationConfig()
    try:
        if options.seeds == 1:
            _run_one(options.seed, config, trace=options.trace, tell=options.story)
        else:
            seeds = range(options.seed, options.seed + options.seeds)
            marks = run_many(seeds, processes=processes, config=config)
            print(f"{options.seeds} seeds from {options.seed}: all invariants hold; marks reached:\n{marks}")
    except SimulationError as failed:
        if isinstance(failed.cause, BrokenPipeError):  # the pipe of the trace broke, and the seed is fine
            raise failed.cause from None
        transcript = story(failed.seed, config)
        print(f"the transcript of seed {failed.seed}:", *transcript, "", failed, sep="\n", file=sys.stderr)
        return 1
    return 0


def _explore(num_events: int, names: str, only: str | None, kinds: Sequence[str], processes: int) -> int:
    """Explore every order of that many events, and print the progress after each length, because the last takes
    longest."""
    all_starts = STARTS if kinds else (*STARTS, "group")
    for start in all_starts if only is None else (only,):
        world = GroupWorld if start == "group" else partial(LighthouseWorld, names, start=start)
        what = "a group of 2 ranks" if start == "group" else f"{len(names)} replicas, {start}"

        def tell(length: int, seen: Explored, what: str = what) -> None:
            found = f"{seen.num_states} states after every order of {length} events, {seen.num_events} tried"
            print(f"{what}: {found}", flush=True)

        try:
            explore(world, num_events, kinds=kinds, on_length=tell, processes=processes)
        except ExplorationError as failed:
            print(f"{what}: {failed}", file=sys.stderr)
            return 1
    return 0


def _run_one(seed: int, config: SimulationConfig, *, trace: bool, tell: bool) -> None:
    report = simulate(seed, config, on_line=print if trace else None)
    if tell:
        print(*story(seed, config), sep="\n")
    print(
        f"seed {seed}: {report.num_commits} commits, {report.num_events} events, first commit "
        f"{report.calm_to_commit_ms} ms and whole {report.calm_to_whole_ms} ms after the faults, "
        f"trace {report.trace_digest}"
    )


if __name__ == "__main__":
    sys.exit(main())
