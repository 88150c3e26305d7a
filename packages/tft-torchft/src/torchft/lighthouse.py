"""The command `torchft_lighthouse`: tft's lighthouse with torchft's flags and log lines.

Law of this file: flags, and the text of log lines. The server is tft_lighthouse's.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn, final

from tft_lighthouse import __version__
from tft_lighthouse.cli import main as serve

_FLAGS: Final = {
    "min_replicas": (None, "smallest quorum"),
    "join_timeout_ms": (60_000, "how long a quorum waits for healthy replicas that have not asked"),
    "quorum_tick_ms": (100, "how often the lighthouse checks its timeouts"),
    "heartbeat_timeout_ms": (5_000, "silence after which a replica is lost"),
}
_LEVELS: Final = {
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a lighthouse until SIGINT or SIGTERM.

    Args:
        arguments: the words after the command. None: this process's own.
    Returns: 0 after a signal, 2 if a setting is wrong or the port is in use.
    Raises: SystemExit: with 1, if a flag is missing or wrong, as torchft's command ends.
    """
    settings = _parser().parse_args(arguments)
    # tft's own logging is configured with the level INFO by its command, and a logger's level comes first.
    logging.getLogger("tft_lighthouse").setLevel(_LEVELS.get(os.environ.get("RUST_LOG", "").lower(), logging.INFO))
    logging.getLogger("tft_lighthouse").addHandler(QuorumLines())
    return serve([word for name, value in vars(settings).items() for word in (f"--{name}", str(value))])


@final
class QuorumLines(logging.Handler):
    """A handler that writes torchft's two lines about a new quorum after tft's own."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._log = logging.getLogger("torchft.lighthouse")

    def emit(self, record: logging.LogRecord) -> None:
        facts = vars(record)
        if "age_ms" in facts:
            self._log.info("Quorum! %s", record.getMessage().replace("new quorum", "Quorum", 1))
        elif "reason" in facts and "quorum_id" in facts:
            self._log.info("Detected quorum change, bumping quorum_id to %d", facts["quorum_id"])


@final
class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one sentence and exit with 1, as torchft's command does."""
        self.exit(1, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torchft_lighthouse",
        description="The lighthouse of fault-tolerant training, with torchft's flags. It ends by SIGINT or SIGTERM.",
        epilog="TFT_TOKEN, or TFT_TOKEN_FILE, sets a secret that every process of the job must share. Without one, "
        "only this machine is served, unless TFT_INSECURE=1 is set.",
        allow_abbrev=False,
    )
    parser.add_argument("--bind", default="[::]:29510", metavar="ADDR", help="where to listen (default: %(default)s)")
    for name, (default, help_text) in _FLAGS.items():
        told = help_text if default is None else f"{help_text} (default: %(default)s)"
        parser.add_argument(f"--{name}", type=int, required=default is None, default=default, metavar="N", help=told)
    parser.add_argument("-V", "--version", action="version", version=f"torchft {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
