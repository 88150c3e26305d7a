"""The processes of a launcher: ranks, the lighthouse, the stores and the guard.

Each process has a session of its own, so that Ctrl-C reaches the launcher alone, which decides. Each writes to its own
log file. The guard kills what is left when the launcher dies.

Law of this file: processes, their environment and their files. The core decides when they start and end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from tft_suite.errors import ConfigError
from tft_suite.launch import guard
from tft_suite.launch.exit_codes import describe
from tft_suite.launch.settings import LaunchSettings

GUARD_END_S: Final = 60.0
TAIL_BYTES: Final = 16_384
TAIL_LINES: Final = 8
# A process that was started by another launcher would hand its place down.
OF_OTHER_LAUNCHERS: Final = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


@final
class Processes:
    """All processes of one launcher. Use it in a `with`: no process is left after it.

    Args:
        logs: the folder of this run's logs, which exists.
        environ: of this process.
    Raises: OSError: the guard can't be started.
    """

    def __init__(self, logs: Path, environ: Mapping[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        self._logs = logs
        self._environ = {name: value for name, value in environ.items() if name not in OF_OTHER_LAUNCHERS}
        self._ranks: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
        self._guard = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, self.mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        guard.kill_marked(self.mark)
        for process in self._ranks.values():
            process.wait()
        self._ranks.clear()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(GUARD_END_S)

    def start_rank(
        self, command: Sequence[str], environment: Mapping[str, str], *, replica: int, rank: int, log: Path
    ) -> None:
        """Start a rank, with its output in a file. Raises: OSError: it can't be started."""
        self._ranks[replica, rank] = self.start(command, environment, name=str(replica), log=log)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], *, name: str, log: Path, output: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process that has this launcher's mark.

        Args:
            name: of what the process belongs to; `kill` takes it.
            log: its errors and, without `output`, its output are appended here.
            output: where its output goes instead. Its standard input is a pipe then, so that it sees our end.
        Raises: OSError: it can't be started.
        """
        with log.open("ab") as file:
            return subprocess.Popen(
                command,
                env={**self._environ, **environment, guard.VARIABLE: f"{self.mark}/{name}"},
                stdin=subprocess.DEVNULL if output is None else subprocess.PIPE,
                stdout=file if output is None else output,
                stderr=file,
                start_new_session=True,
            )

    def ended_ranks(self) -> list[tuple[int, int, int]]:
        """Return (replica, rank, code) of the ranks that have ended since the last call."""
        ended = [
            (replica, rank, code)
            for (replica, rank), process in self._ranks.items()
            if (code := process.poll()) is not None
        ]
        for replica, rank, _ in ended:
            del self._ranks[replica, rank]
        return ended

    def ask_to_end(self, replica: int) -> None:
        """Send SIGTERM to the ranks of a group."""
        for (its_replica, _), process in self._ranks.items():
            if its_replica == replica:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                    process.send_signal(signal.SIGCONT)  # a stopped process would not see the first

    def kill(self, name: str) -> None:
        """Kill all processes of this name, also those that they have started."""
        guard.kill_marked(f"{self.mark}/{name}")


def rank_command(settings: LaunchSettings) -> list[str]:
    """Return the command of each rank."""
    wrapper = [sys.executable, "-m", "tft_suite.launch.rank"]
    if settings.is_module:
        return [*wrapper, "-m", *settings.command]
    return [*wrapper, *settings.command] if settings.is_script else list(settings.command)


def rank_environment(
    settings: LaunchSettings, *, replica: int, rank: int, attempt: int, lighthouse: str, port: int | None, run: str
) -> dict[str, str]:
    """Return the variables of a rank, beside those of the launcher.

    Args:
        port: of the group's store; None: the group is one process, and hosts its own.
        run: unique name of this launch.
    """
    found = {
        "TFT_LIGHTHOUSE": lighthouse,
        "REPLICA_GROUP_ID": str(replica),
        "NUM_REPLICA_GROUPS": str(settings.num_groups),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(settings.nproc),
        "LOCAL_WORLD_SIZE": str(settings.nproc),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": f"{run}-{replica}",
        "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),
        "PYTHONUNBUFFERED": "1",
    }
    if port is not None:
        found |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if "OMP_NUM_THREADS" not in os.environ:  # torch takes all cores in each process
        cores = len(os.sched_getaffinity(0))
        found["OMP_NUM_THREADS"] = str(max(1, cores // (settings.replicas * settings.nproc)))
    return found


def rank_log(logs: Path, *, replica: int, attempt: int, rank: int) -> Path:
    """Return the path of a rank's output."""
    return logs / f"replica-{replica}-attempt-{attempt}-rank-{rank}.log"


def make_logs(folder: Path, name: str) -> Path:
    """Make the folder of one run's logs. Raises: ConfigError: it can't be made."""
    logs = folder / name
    try:
        logs.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--logs {folder} can't be written ({error.strerror}); give another folder") from error
    return logs


def tail(log: Path) -> list[str]:
    """Return the last lines of a log, without characters that would change the terminal."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    return [clean(line) for line in lines if line.strip()][-TAIL_LINES:]


def clean(text: str) -> str:
    """Return a text without characters that would change the terminal."""
    return "".join(each if each.isprintable() else " " if each == "\t" else "?" for each in text)[:1_000]


def ended_early(what: str, process: subprocess.Popen[bytes], log: Path) -> ConfigError:
    """Return the error for a process that ended before it was ready."""
    lines = tail(log)
    reason = f": {lines[-1]}" if lines else ""
    return ConfigError(f"{what} ended with {describe(process.wait())} before it was ready{reason} (see {log})")
