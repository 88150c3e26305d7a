"""The command `tft-lighthouse`.

Law of this file: command-line arguments to settings, signals to an end. The server is imported after the arguments are
parsed, so that --help and a wrong flag get an answer at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final, NoReturn, final

from tft_lighthouse import __version__, defaults

USAGE_ERROR = 2
ENDED_BY: Final = (signal.SIGINT, signal.SIGTERM)
# Each replica group holds a connection, and so does each of torchft's.
FEW_DESCRIPTORS: Final = 4096
DESCRIPTORS_OF_ONE: Final = 2  # a replica's stream, and its socket
OTHER_DESCRIPTORS: Final = 64  # logs, the listening sockets, grpc's own


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a lighthouse until SIGINT or SIGTERM.

    Args:
        arguments: the words after the command; None takes the process's own.
    Returns: 0 after a signal, 2 when a setting is wrong or the port is in use.
    """
    settings = _parser().parse_args(arguments)
    # The signals are blocked, in every thread that starts from here on too, until `sigwait` takes one. A handler would
    # run when the interpreter next checks for signals. It would not run at all if this thread has just checked and is
    # about to wait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDED_BY)
    try:
        return _serve(settings)
    finally:
        while signal.sigpending() & set(ENDED_BY):  # the process is ending already
            signal.sigwait(ENDED_BY)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(settings: argparse.Namespace) -> int:
    # grpc's own log lines about a port in use or a disconnected client would repeat this program's.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from tft_coord import ConfigError, StragglerAction, StragglerPolicy
    from tft_coord.lighthouse import TLS, JobTokens, configure_process, raise_limit, read_insecure, read_token
    from tft_lighthouse.server import LighthouseServer

    configure_process(logging.getLevelName(settings.log_level.upper()), as_json=settings.log_format == "json")
    descriptors = raise_limit()
    job_tokens = settings.job_tokens or os.environ.get(defaults.JOB_TOKENS_ENV, "")
    try:
        if settings.stragglers == "off" and settings.straggler_ratio != defaults.STRAGGLER_RATIO:
            raise ConfigError(
                f"--straggler_ratio {settings.straggler_ratio:g} has no effect with --stragglers off; leave one of the "
                "two out"
            )
        server = LighthouseServer(
            bind=settings.bind,
            min_replicas=settings.min_replicas,
            join_timeout_ms=settings.join_timeout_ms,
            quorum_tick_ms=settings.quorum_tick_ms,
            heartbeat_timeout_ms=settings.heartbeat_timeout_ms,
            on_lost_state=settings.on_lost_state,
            lost_state_timeout_ms=settings.lost_state_timeout_ms,
            cluster_id=settings.cluster_id,
            stragglers=StragglerPolicy(action=StragglerAction(settings.stragglers), ratio=settings.straggler_ratio),
            token=read_token(os.environ),
            job_tokens=JobTokens(job_tokens) if job_tokens else None,
            tls=TLS.from_environment(os.environ),
            insecure=settings.insecure or read_insecure(os.environ),
            http_bind=http_bind_of(settings.http_bind or os.environ.get(defaults.HTTP_BIND_ENV, ""), settings.bind),
        )
    except ConfigError as error:
        print(f"tft-lighthouse: {error}", file=sys.stderr)
        return USAGE_ERROR
    if descriptors < FEW_DESCRIPTORS:
        logging.getLogger("tft_lighthouse").warning(
            "this process may open %d files, enough for about %d replicas at once; more replicas get no answer. Raise "
            "the hard limit (ulimit -Hn, LimitNOFILE=) for more",
            descriptors,
            max(descriptors - OTHER_DESCRIPTORS, 0) // DESCRIPTORS_OF_ONE,
        )
    with server:
        number = signal.sigwait(ENDED_BY)
        logging.getLogger("tft_lighthouse").info(
            "received %s and shuts down: replicas train on in their quorums, and wait for a lighthouse before the next "
            "change of members",
            signal.Signals(number).name,
        )
    return 0


def http_bind_of(text: str, bind: str) -> str | None:
    """Return where the HTTP port listens, or None for no such port.

    Args:
        text: `host:port`, or a port on the interface of `bind`; "0" for none. "": the port after that of `bind`, or a
            free one if `bind` takes a free one.
        bind: where the lighthouse listens for its replicas.
    """
    if text == "0":
        return None
    if ":" in text:
        return text
    host, _, port = bind.rpartition(":")
    if not text and port.isascii() and port.isdigit():
        text = str(int(port) + 1 if int(port) else 0)
    return f"{host}:{text}"


@final
class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one sentence and exit; argparse would print the usage before it."""
        self.exit(USAGE_ERROR, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tft-lighthouse",
        description="The server that decides membership for fault-tolerant training. It ends by SIGINT or SIGTERM.",
        epilog="TFT_TOKEN, or TFT_TOKEN_FILE, sets a secret that every process of the job must share; make one with "
        "openssl rand -hex 32. Without a secret only this machine is served. TFT_TLS_CERT, TFT_TLS_KEY and TFT_TLS_CA "
        "name certificates: all connections are encrypted then. TFT_TLS_CLIENT_AUTH=1 requires one of every caller.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--bind", default=defaults.BIND, metavar="HOST:PORT", help="where to listen")
    _add_numbers(parser)
    parser.add_argument(
        "--on_lost_state",
        "--on-lost-state",
        choices=defaults.LOST_STATE_CHOICES,
        default=defaults.ON_LOST_STATE,
        help="if all holders of the newest state fell silent: wait for them, or restart from an older state",
    )
    parser.add_argument(
        "--cluster_id",
        "--cluster-id",
        metavar="NAME",
        help="name shared by all lighthouses of a job; without it this lighthouse gets a random one",
    )
    parser.add_argument(
        "--stragglers",
        choices=defaults.STRAGGLERS,
        default=defaults.STRAGGLERS[0],
        help="action against a replica whose own part of a step takes much longer than the others'",
    )
    parser.add_argument(
        "--straggler_ratio",
        "--straggler-ratio",
        type=float,
        default=defaults.STRAGGLER_RATIO,
        metavar="X",
        help="a straggler takes more than this times the median of the others",
    )
    parser.add_argument(
        "--http_bind",
        "--http-bind",
        default="",
        metavar="HOST:PORT",
        help="where to serve status, metrics and health over HTTP: an address, a port, or 0 for none; without it the "
        f"port after that of --bind (env {defaults.HTTP_BIND_ENV})",
    )
    _add_trust(parser)
    _add_log(parser)
    parser.add_argument("-V", "--version", action="version", version=f"tft-lighthouse {__version__}")
    return parser


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--job_tokens",
        "--job-tokens",
        default="",
        metavar="FILE",
        help="lines `JOB = secret`, of secrets that open one job each; TFT_TOKEN opens all (env "
        f"{defaults.JOB_TOKENS_ENV})",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="serve all machines without a secret; the default serves only this machine then (env TFT_INSECURE=1)",
    )


def _add_numbers(parser: argparse.ArgumentParser) -> None:
    numbers = {
        "min_replicas": (defaults.MIN_REPLICAS, "smallest quorum"),
        "quorum_tick_ms": (defaults.QUORUM_TICK_MS, "how often the lighthouse checks its timeouts"),
        "join_timeout_ms": (
            defaults.JOIN_TIMEOUT_MS,
            "how long a quorum waits for healthy replicas that have not asked",
        ),
        "heartbeat_timeout_ms": (defaults.HEARTBEAT_TIMEOUT_MS, "silence after which a replica is lost"),
        "lost_state_timeout_ms": (
            defaults.LOST_STATE_TIMEOUT_MS,
            "with --on-lost-state wait, how long to wait for the newest state if all its holders fell silent",
        ),
    }
    for name, (default, help_text) in numbers.items():
        spellings = (f"--{name}", f"--{name.replace('_', '-')}")
        parser.add_argument(*spellings, dest=name, type=int, default=default, metavar="N", help=help_text)


def _add_log(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log_format",
        "--log-format",
        choices=defaults.LOG_FORMATS,
        default=defaults.LOG_FORMATS[0],
        help="log lines for people, or one JSON object a line",
    )
    parser.add_argument(
        "--log_level",
        "--log-level",
        choices=defaults.LOG_LEVELS,
        default="info",
        help="the least severe lines that are logged",
    )
