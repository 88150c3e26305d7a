"""A lighthouse that counts its received messages by type, and reports the counts on request.

Law of this file: started as a module. An order is a line, and so is its answer.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any

from benchmarks.step_worker import report
from tft_coord.compat.router import ProtocolRouter
from tft_lighthouse import LighthouseServer


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=["tft"], required=True)
    parser.add_argument("--min-replicas", dest="min_replicas", type=int, required=True)
    arguments = parser.parse_args()
    heard: Counter[str] = Counter()
    # Each message of a stream and each unary call passes here before any decision.
    for name in ("handle", "handle_unary"):
        setattr(ProtocolRouter, name, _counted(getattr(ProtocolRouter, name), heard))
    with LighthouseServer("127.0.0.1:0", min_replicas=arguments.min_replicas) as lighthouse:
        report(address=str(lighthouse.address))
        for _ in sys.stdin:
            report(heard=heard.copy())


def _counted(handle: Any, heard: Counter[str]) -> Any:
    def count(self: ProtocolRouter, event: Any, now_ms: int, wall_ms: int) -> Any:
        heard[type(event).__name__] += 1
        return handle(self, event, now_ms, wall_ms)

    return count


if __name__ == "__main__":
    main()
