"""The settings of `tft launch`.

Law of this file: values that check themselves when they are made.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import final

from tft_suite.errors import ConfigError

REPLICAS_MOST = 1_000
NPROC_MOST = 256
SECONDS_MOST = 86_400.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When a replica group that has ended is started again.

    Args:
        max_restarts: restarts in a row, before a group is given up.
        backoff_s: seconds before the first restart; each further one in a row doubles them.
        backoff_most_s: the most seconds before a restart.
        good_after_s: a group that has run this many seconds counts as healthy. Its next restart is its first again.
        grace_s: seconds that processes get to end after a request, before they are killed.
    Raises: ConfigError: a value is out of its range.
    """

    max_restarts: int = 10
    backoff_s: float = 1.0
    backoff_most_s: float = 60.0
    good_after_s: float = 300.0
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.max_restarts <= 1_000_000:
            raise ConfigError(f"--max-restarts is {self.max_restarts}; give 0 to 1000000")
        for flag, value in (
            ("--backoff", self.backoff_s),
            ("--backoff-most", self.backoff_most_s),
            ("--good-after", self.good_after_s),
            ("--grace", self.grace_s),
        ):
            if not 0 <= value <= SECONDS_MOST:
                raise ConfigError(f"{flag} is {value:g}; give seconds, 0 to {SECONDS_MOST:g}")
        if self.backoff_most_s < self.backoff_s:
            raise ConfigError(
                f"--backoff {self.backoff_s:g} exceeds --backoff-most {self.backoff_most_s:g}; lower the first or "
                "raise the second"
            )

    def delay_s(self, failures: int) -> float:
        """Return the seconds before the next start, after this many failures in a row (1 or more)."""
        return min(self.backoff_most_s, self.backoff_s * 2.0 ** min(failures - 1, 30))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """What `tft launch` starts on this host.

    Args:
        command: the script (`train.py`) or the command, with its arguments.
        is_module: the first word names a module, as after `python -m`.
        replicas: replica groups on this host.
        nproc: processes of each group.
        first: number of this host's first group in the job.
        total: groups of the whole job; None: those of this host.
        min_replicas: the smallest quorum of a lighthouse that is started here; None: 1.
        bind: where a lighthouse that is started here listens; "": a free port of this machine.
        lighthouse: addresses of a running lighthouse; "": start one.
        logs: the folder of all runs' logs.
        restarts: when a group is started again.
    Raises: ConfigError: a value is out of its range, or the script or the module does not exist.
    """

    command: tuple[str, ...]
    is_module: bool = False
    replicas: int = 2
    nproc: int = 1
    first: int = 0
    total: int | None = None
    min_replicas: int | None = None
    bind: str = ""
    lighthouse: str = ""
    logs: Path = Path("tft-logs")
    restarts: RestartPolicy = RestartPolicy()

    def __post_init__(self) -> None:
        if not self.command or not self.command[0]:
            raise ConfigError("there is nothing to launch; give a script after --, as in: tft launch -- train.py")
        if any("\0" in word for word in self.command):
            raise ConfigError("a word of the command has a NUL character; remove it")
        for flag, value, most in (
            ("--replicas", self.replicas, REPLICAS_MOST),
            ("--nproc", self.nproc, NPROC_MOST),
            ("--min-replicas", self.smallest_quorum, REPLICAS_MOST),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{flag} is {value}; give 1 to {most}")
        if self.first < 0 or self.first + self.replicas > self.num_groups:
            raise ConfigError(
                f"the groups {self.first} to {self.first + self.replicas - 1} of this host are not among the "
                f"{self.num_groups} of the job, which count from 0; correct --first, --replicas or --total"
            )
        if self.smallest_quorum > self.num_groups:
            raise ConfigError(
                f"--min-replicas {self.smallest_quorum} exceeds the {self.num_groups} replicas of the job, so no "
                "quorum would form; lower it"
            )
        for flag, is_given in (("--bind", bool(self.bind)), ("--min-replicas", self.min_replicas is not None)):
            if self.lighthouse and is_given:
                raise ConfigError(f"{flag} is for a lighthouse that is started here; leave it out with --lighthouse")
        if self.is_script and not Path(self.command[0]).is_file():
            raise ConfigError(f"there is no script {self.command[0]!r}; correct the path")
        if self.is_module and not _is_found(self.command[0]):
            raise ConfigError(f"there is no module {self.command[0]!r}; correct the name, or install its package")

    @property
    def smallest_quorum(self) -> int:
        """Return the smallest quorum of a lighthouse that is started here."""
        return 1 if self.min_replicas is None else self.min_replicas

    @property
    def num_groups(self) -> int:
        """Return how many groups the whole job has."""
        return self.first + self.replicas if self.total is None else self.total

    @property
    def is_script(self) -> bool:
        """Return whether the command is a Python file, which this Python runs."""
        return not self.is_module and self.command[0].endswith(".py")


def _is_found(module: str) -> bool:
    """Return whether `python -m` finds that module here. Nothing is imported."""
    first, *others = module.split(".")
    # A folder of that name is a package only if none of the paths has a real one, so all paths are given together.
    spec = PathFinder.find_spec(first, [os.getcwd(), *sys.path])
    if spec is None:
        with suppress(ValueError):  # the name is empty or __main__
            spec = importlib.util.find_spec(first)  # the finders of editable installs, for example
    for each in others:
        inside = spec.submodule_search_locations if spec is not None else None
        spec = PathFinder.find_spec(each, list(inside)) if inside is not None else None
    return spec is not None
