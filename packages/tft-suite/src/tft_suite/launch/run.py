"""One launch from its settings to its exit code.

Law of this file: the loop that turns the world into events for the core, and carries its actions out.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, final

from tft_coord.core.names import shorten
from tft_suite.drain import LIGHTHOUSE
from tft_suite.errors import ConfigError
from tft_suite.launch.core import (
    DrainGroup,
    EndRanks,
    Event,
    Finish,
    KillRanks,
    LaunchCore,
    Note,
    RankEnded,
    StartFailed,
    StartGroup,
    StopAsked,
    TimePassed,
)
from tft_suite.launch.jobs import Watcher
from tft_suite.launch.processes import Processes, make_logs, rank_command, rank_environment, rank_log, tail
from tft_suite.launch.services import Service, start_lighthouse, start_stores
from tft_suite.launch.settings import LaunchSettings
from tft_suite.launch.view import View
from tft_suite.operate.client import http_addresses

LOOK_EVERY_S: Final = 0.1
STOPPED_BY: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_launch(settings: LaunchSettings, environ: Mapping[str, str]) -> int:
    """Launch the groups, and return the exit code: 0 done, 1 a group was given up, 3 a group must not be restarted,
    128 + n ended by signal n.

    Raises: ConfigError: nothing can be started.
    """
    lighthouse = settings.lighthouse or next((environ[name] for name in LIGHTHOUSE if environ.get(name)), "")
    if lighthouse and not settings.bind and settings.min_replicas is not None:
        # A second lighthouse would split the job.
        raise ConfigError(
            f"--min-replicas is for a lighthouse that is started here, and the environment names one, {lighthouse}; "
            "leave it out, or start another one with --bind"
        )
    view = View(sys.stdout, is_live=sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb")
    logs = make_logs(settings.logs, time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}"))
    with ExitStack() as stack:
        caught = stack.enter_context(caught_signals())
        processes = stack.enter_context(Processes(logs, environ))
        stack.callback(view.close)
        view.note(f"logs in {logs}")
        services: list[Service] = []
        stack.callback(close_all, processes, services)
        if lighthouse and not settings.bind:
            addresses = http_addresses(environ, lighthouse=lighthouse, http=None)
            view.note(f"using the lighthouse at {lighthouse}")
        else:
            service, lighthouse, http = start_lighthouse(
                processes, bind=settings.bind, min_replicas=settings.smallest_quorum, logs=logs, environ=environ
            )
            services.append(service)
            addresses = (http,)
            scheme = lighthouse.partition(":")[0]
            view.note(f"started a lighthouse at {lighthouse}, its page is {scheme}://{http}")
        ports: list[int | None] = [None] * settings.replicas
        if settings.nproc > 1:
            service, found = start_stores(processes, num_groups=settings.replicas, logs=logs, environ=environ)
            services.append(service)
            ports = [*found]
        watcher = stack.enter_context(Watcher(addresses, environ, processes.mark))
        launch = Launch(settings, processes, services, watcher, view, logs=logs, lighthouse=lighthouse, ports=ports)
        return launch.run(caught)


def close_all(processes: Processes, services: list[Service]) -> None:
    """End the services. A lighthouse gets SIGTERM first, so that its log ends well."""
    for service in services:
        if service.process is not None:
            service.process.terminate()
    time.sleep(LOOK_EVERY_S)
    for service in services:
        processes.kill(service.name)
        service.close()


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Catch the signals that end a launcher. A signal only adds its number to the yielded list."""
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    # nohup asks to ignore SIGHUP
    numbers = [number for number in STOPPED_BY if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, catch) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@final
class Launch:
    """A running launch.

    Args:
        lighthouse: its address, for the ranks.
        ports: of the groups' stores, by their place on this host.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        processes: Processes,
        services: list[Service],
        watcher: Watcher,
        view: View,
        *,
        logs: Path,
        lighthouse: str,
        ports: list[int | None],
    ) -> None:
        self._settings = settings
        self._processes = processes
        self._services = services
        self._watcher = watcher
        self._view = view
        self._logs = logs
        self._lighthouse = lighthouse
        self._ports = ports
        self._attempts: dict[int, int] = {}
        self._seen: dict[int, str] = {}  # the ids under which the groups are in the job
        self._code: int | None = None
        replicas = range(settings.first, settings.first + settings.replicas)
        self._core = LaunchCore(replicas, settings.nproc, settings.restarts, socket.gethostname())

    def run(self, caught: list[int]) -> int:
        """Run to the end, and return the exit code. `caught`: signals, from `caught_signals`."""
        self._handle(TimePassed())
        while self._code is None:
            time.sleep(LOOK_EVERY_S)
            while caught:
                self._handle(StopAsked(caught.pop(0)))
            for replica, rank, code in self._processes.ended_ranks():
                self._handle(RankEnded(replica, self._attempts[replica], rank, code))
            self._handle(TimePassed())
            for service in self._services:
                note = service.look(self._processes, self._settings.restarts, time.monotonic())
                if note is not None:
                    self._view.note(note, is_bad=True)
            self._note_members()
            self._view.show(self._core.groups, self._watcher.replicas, time.monotonic())
        return self._code

    def _handle(self, event: Event) -> None:
        to_drain: list[int] = []
        failed: list[StartFailed] = []
        for action in self._core.handle(event, time.monotonic()):
            match action:
                case Note():
                    self._note(action)
                case StartGroup(replica, attempt):
                    reason = self._start(replica, attempt)
                    if reason is not None:
                        failed.append(StartFailed(replica, attempt, reason))
                case DrainGroup(replica):
                    to_drain.append(replica)
                case EndRanks(replica):
                    self._processes.ask_to_end(replica)
                case KillRanks(replica):
                    self._processes.kill(str(replica))
                case Finish(code):
                    self._code = code
        for replica in self._watcher.drain(to_drain, "the launcher ends") if to_drain else ():
            self._processes.ask_to_end(replica)  # the lighthouse does not know it
        for each in failed:
            self._handle(each)

    def _note(self, note: Note) -> None:
        self._view.note(note.text, is_bad=note.is_bad)
        if note.failed is not None:
            replica, attempt, rank = note.failed
            log = rank_log(self._logs, replica=replica, attempt=attempt, rank=rank)
            self._view.note(f"its last output, from {log}:")
            for line in tail(log):
                self._view.note(f"    {line}")

    def _note_members(self) -> None:
        for group, replica in self._watcher.replicas.items():
            if self._seen.get(group) != replica.replica_id:
                self._seen[group] = replica.replica_id
                self._view.note(f"replica {group} has joined job {replica.job} as {shorten(replica.replica_id)}")

    def _start(self, replica: int, attempt: int) -> str | None:
        """Start all ranks of a group. Return why this failed, or None."""
        self._attempts[replica] = attempt
        command = rank_command(self._settings)
        for rank in range(self._settings.nproc):
            environment = rank_environment(
                self._settings,
                replica=replica,
                rank=rank,
                attempt=attempt,
                lighthouse=self._lighthouse,
                port=self._ports[replica - self._settings.first],
                run=self._processes.mark,
            )
            log = rank_log(self._logs, replica=replica, attempt=attempt, rank=rank)
            try:
                self._processes.start_rank(command, environment, replica=replica, rank=rank, log=log)
            except (OSError, ValueError) as error:
                self._processes.kill(str(replica))
                return f"{command[0]!r}: {error}"
        return None
