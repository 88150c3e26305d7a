"""The command `tft-lighthouse`.

Law of this file: command-line arguments to settings, signals to a reload or an end. The server is imported after the
settings are known, so that --help and a wrong value get an answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NoReturn, final

from tft_coord import ConfigError
from tft_lighthouse import __version__, config_file
from tft_lighthouse.settings import CONFIG_VARIABLE, SETTINGS, Kind, Settings, resolve

if TYPE_CHECKING:
    from tft_lighthouse.server import LighthouseServer

USAGE_ERROR = 2
ENDED_BY: Final = (signal.SIGINT, signal.SIGTERM)
HEARD: Final = (*ENDED_BY, signal.SIGHUP)
STANDARD_ERROR: Final = 2
SECRET_FLAGS: Final = ("--token", "--secret", "--password")
FLAG_MOST: Final = 64  # characters that are shown
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
    parser = _parser()
    words, others = parser.parse_known_args(arguments)
    if others:
        parser.error(_unknown(others))
    # The signals are blocked, in every thread that starts from here on too, until `sigwait` takes one. A handler would
    # run when the interpreter next checks for signals. It would not run at all if this thread has just checked and is
    # about to wait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    try:
        return _run(words)
    finally:
        while signal.sigpending() & set(HEARD):  # the process is ending already
            signal.sigwait(HEARD)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(words: argparse.Namespace) -> int:
    settings = None
    try:
        settings = _settings(words)
        if not words.print_config:
            return _serve(words, settings)
        from tft_lighthouse.launch import check

        print(config_file.written(settings, check(settings)), end="")
        return 0
    except ConfigError as error:
        print(f"tft-lighthouse: {error}{settings.sources_of(str(error)) if settings else ''}", file=sys.stderr)
        return USAGE_ERROR


def _settings(words: argparse.Namespace) -> Settings:
    """Return the settings in force. Raises: ConfigError: one is wrong, or the file can't be read."""
    path = words.config or os.environ.get(CONFIG_VARIABLE) or None
    return resolve(vars(words), os.environ, config_file.read(path) if path is not None else {}, path)


def _serve(words: argparse.Namespace, settings: Settings) -> int:
    # grpc's own log lines about a port in use or a disconnected client would repeat this program's.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from tft_coord.lighthouse import configure_process, raise_limit
    from tft_lighthouse.launch import start

    configure_process(level_of(settings), as_json=settings["log_format"] == "json")
    descriptors = raise_limit()
    has_terminal = os.isatty(STANDARD_ERROR)  # before the first line, at which it may be closed already
    server = start(settings)
    if descriptors < FEW_DESCRIPTORS:
        logging.getLogger("tft_lighthouse").warning(
            "this process may open %d files, enough for about %d replicas at once; more replicas get no answer. Raise "
            "the hard limit (ulimit -Hn, LimitNOFILE=) for more",
            descriptors,
            max(descriptors - OTHER_DESCRIPTORS, 0) // DESCRIPTORS_OF_ONE,
        )
    with server:
        while (number := signal.sigwait(HEARD)) == signal.SIGHUP:
            if has_terminal and not os.isatty(STANDARD_ERROR):
                break  # the terminal that it was started in is closed
            settings = _reload(server, words, settings)
        logging.getLogger("tft_lighthouse").info(
            "received %s and shuts down: replicas train on in their quorums, and wait for a lighthouse before the next "
            "change of members",
            signal.Signals(number).name,
        )
    return 0


def _reload(server: LighthouseServer, words: argparse.Namespace, before: Settings) -> Settings:
    """Read the settings again, and use what may change while the jobs go on.

    Returns: the settings in force from now on; those from before if the new ones are wrong.
    """
    from tft_lighthouse.launch import apply

    now = None
    try:
        now = _settings(words)
        settings, said = apply(server, before, now)
    except ConfigError as error:
        sources = now.sources_of(str(error)) if now else ""
        logging.getLogger("tft_lighthouse").error(
            "received SIGHUP, and keeps all settings as they were: %s%s", error, sources
        )
        return before
    logging.getLogger().setLevel(min(level_of(before), level_of(settings)))
    logging.getLogger("tft_lighthouse").info("received SIGHUP: %s", said)
    logging.getLogger().setLevel(level_of(settings))
    return settings


def level_of(settings: Settings) -> int:
    """Return the level of logging that the settings name."""
    level: int = logging.getLevelName(settings["log_level"].upper())
    return level


def _unknown(words: Sequence[str]) -> str:
    """Return the sentence about words that are no flags. It repeats no value, because one may be a secret."""
    flag = next((word.partition("=")[0] for word in words if word.startswith("--")), None)
    if flag is None:
        return "there is a word that is no flag and no value of one"
    if flag in SECRET_FLAGS:
        return f"there is no flag {flag}; put the secret into a file, and name it by --token_file"
    near = difflib.get_close_matches(flag, [each for setting in SETTINGS for each in setting.flags], n=1)
    return f"there is no flag {flag[:FLAG_MOST]}{f'; did you mean {near[0]}?' if near else ''}"


@final
class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one sentence and exit; argparse would print the usage before it."""
        self.exit(USAGE_ERROR, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the words; the values of settings stay text, because the table of settings checks them."""
    parser = _Parser(
        prog="tft-lighthouse",
        description="The server that decides membership for fault-tolerant training. It ends by SIGINT or SIGTERM, and "
        "reads its file of settings again on SIGHUP.",
        epilog="A flag beats a variable of the environment (env), which beats the file. TFT_TOKEN, or --token_file, "
        "sets a secret that every process of the job must share; make one with openssl rand -hex 32. Without a secret "
        "only this machine is served. The files of secrets and certificates are read again when they change.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"TOML file of settings, by the names of the flags (env {CONFIG_VARIABLE})",
    )
    parser.add_argument(
        "--print_config",
        "--print-config",
        action="store_true",
        help="check the settings, print them as TOML with the source of each, and end",
    )
    for setting in SETTINGS:
        default = "" if setting.default in (None, False) else f" (default: {setting.default})"
        told = f"{setting.help}{default} (env {setting.environment})".replace("%", "%%")
        if setting.kind is Kind.SWITCH:
            parser.add_argument(*setting.flags, dest=setting.name, action="store_const", const="1", help=told)
        else:
            parser.add_argument(*setting.flags, dest=setting.name, metavar=setting.metavar, help=told)
    parser.add_argument("-V", "--version", action="version", version=f"tft-lighthouse {__version__}")
    return parser
