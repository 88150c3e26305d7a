"""The command that prints the whole table: tft's figure, the peer's, the ratio, the bar.

python -m benchmarks.run             every row
python -m benchmarks.run p1 p14      some rows
python -m benchmarks.run p1 p1t p14 p14t   two rows, each with the same over TLS below it
python -m benchmarks.run --short     few turns, for a quick look (only the full run judges the bars)
"""

from __future__ import annotations

import argparse
import compileall
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, final

from benchmarks import (
    chain,
    child_process,
    failure_stall,
    lighthouse_scale,
    lighthouse_start,
    page_readers,
    reconfigure,
    rejoin,
    serving,
    slow_link,
    slow_rounds,
    standing_join,
    steady_steps,
    step_overhead,
    transfer,
)
from benchmarks.row import Row

ROWS: dict[str, Callable[[bool], Row]] = {
    "p1": lambda short: step_overhead.measure_small(turns=1 if short else 9, steps=100 if short else 300),
    "p1t": lambda short: step_overhead.measure_tls(turns=1 if short else 9, steps=100 if short else 300),
    "p2": lambda short: step_overhead.measure_large(turns=1 if short else 5, steps=10 if short else 30),
    "p3": lambda short: failure_stall.measure(turns=1 if short else 6),
    "p4": lambda short: rejoin.measure_survivors(turns=1 if short else 6),
    "p5": lambda short: rejoin.measure_newcomer(turns=1 if short else 6),
    "p6": lambda short: transfer.measure_warm(turns=1 if short else 5),
    "p7": lambda short: transfer.measure_first(turns=1 if short else 5),
    "p8": lambda short: serving.measure(turns=1 if short else 3),
    "p8s": lambda short: serving.measure_slow_readers(turns=1 if short else 5),
    "p9": lambda short: transfer.measure_memory(turns=1 if short else 5),
    "two": lambda short: chain.measure_two(turns=1 if short else 5),
    "chain": lambda short: chain.measure_chain(turns=1 if short else 5),
    "p10": lambda short: lighthouse_scale.measure_rounds(rounds=3 if short else 7),
    "p11": lambda short: lighthouse_scale.measure_bytes(rounds=1 if short else 3),
    "p12": lambda short: lighthouse_scale.measure_heartbeats(turns=1 if short else 5, seconds=2 if short else 5),
    "p13": lambda short: lighthouse_scale.measure_streams(seconds=5.0 if short else 30.0),
    "p14": lambda short: lighthouse_start.measure(turns=3 if short else 7),
    "p14t": lambda short: lighthouse_start.measure_tls(turns=3 if short else 7),
    "p15": lambda short: reconfigure.measure(turns=1 if short else 7, configures=5 if short else 20),
    "p16": lambda short: child_process.measure(
        turns=1 if short else 9, large=3 if short else 10, small=50 if short else 300
    ),
    "p17": lambda short: steady_steps.measure_messages(steps=200 if short else 1_000),
    "p18": lambda short: steady_steps.measure_away(seconds=5.0 if short else 30.0),
    "p19": lambda short: standing_join.measure({1_000: 1} if short else standing_join.TURNS),
    "page": lambda short: page_readers.measure(turns=1 if short else 5, rounds=7 if short else 21),
    "slow": lambda short: slow_link.measure(turns=2 if short else 14),
    "rounds": lambda short: slow_rounds.measure(
        {"float32": 1, "int4": 2, "top k": 4} if short else {"float32": 5, "int4": 20, "top k": 60}
    ),
}
if reconfigure.HAS_NATIVE:
    ROWS["p15n"] = lambda short: reconfigure.measure_native(turns=1 if short else 7, configures=5 if short else 20)
LAYOUT = "{:<5} {:<30} {:>16} {:>16} {:>22} {:>6}  {:<4} {}"


def compile_sources() -> None:
    """Write bytecode beside the project's sources, as pip does for installed packages such as the peer.

    Otherwise each process would first compile all its imports, if the environment keeps Python from writing bytecode.

    Raises: RuntimeError: a file can't be compiled, or its bytecode can't be written.
    """
    root = Path(__file__).resolve().parent.parent
    for tree in ("packages", "benchmarks", "examples", "integration_tests"):
        if not compileall.compile_dir(root / tree, quiet=1):
            raise RuntimeError(f"{root / tree} can't be compiled; the error is above")


@final
class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the error in one sentence, without the usage that argparse prints before it."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def main() -> int:
    """Run the command. Returns: 0 if every bar is met, else 1."""
    parser = _Parser(
        prog="python -m benchmarks.run",
        description="measure what must be fast, side by side with its peers",
        allow_abbrev=False,
    )
    parser.add_argument("rows", nargs="*", metavar="row", help=f"of {', '.join(ROWS)}; all without any")
    parser.add_argument("--short", action="store_true", help="few turns, for a quick look")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.rows if name.lower() not in ROWS]
    if unknown:
        parser.error(f"there is no row {', '.join(unknown)}; choose of {', '.join(ROWS)}")
    compile_sources()
    print(LAYOUT.format("row", "what", "ours", "torchft", "other", "ratio", "met", "bar"))
    missed = 0
    for name in [name.lower() for name in arguments.rows] or list(ROWS):
        row = ROWS[name](arguments.short)
        met = "yes" if row.met else "NO"
        print(
            LAYOUT.format(row.name, row.what, row.ours, row.peer, row.other, f"{row.ratio:.2f}", met, row.bar),
            flush=True,
        )
        missed += not row.met
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
