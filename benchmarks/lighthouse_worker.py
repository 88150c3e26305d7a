"""A lighthouse on its own host: it prints its address, and serves until it is killed."""

from __future__ import annotations

import argparse
import sys

from benchmarks.step_worker import SECRET, report
from tft_lighthouse import LighthouseServer


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=["tft"], required=True)
    parser.add_argument("--hostname", required=True)
    parser.add_argument("--min-replicas", dest="min_replicas", type=int, required=True)
    arguments = parser.parse_args()
    bind = f"{arguments.hostname}:0"
    with LighthouseServer(
        bind, hostname=arguments.hostname, min_replicas=arguments.min_replicas, token=SECRET
    ) as lighthouse:
        report(address=str(lighthouse.address))
        sys.stdin.read()


if __name__ == "__main__":
    main()
