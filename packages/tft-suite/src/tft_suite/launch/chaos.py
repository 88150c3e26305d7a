"""`tft chaos`: break the replicas of a running job on this host, and print what that costs.

The lighthouse names the replicas and their processes. A process is signalled only if its manager server listens here at
the address that the lighthouse knows. So a process of another host with the same number is never touched.

Law of this file: signals, the clock and the lighthouse. The plan and the report come from `faults`.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, final

import psutil

from tft_coord.core.names import shorten
from tft_coord.transport.address import host_of
from tft_suite.errors import ConfigError
from tft_suite.launch.cut import Cut, check_cut
from tft_suite.launch.faults import ChaosSettings, Fault, FaultKind, Progress, draw_faults, goodput_text, pick_victim
from tft_suite.launch.run import caught_signals
from tft_suite.operate.client import fetch

LOOK_EVERY_S: Final = 1.0
CYCLE_S: Final = 0.1
TIMEOUT_S: Final = 5.0
UNREACHABLE_MOST_S: Final = 60.0
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@final
@dataclass(slots=True)
class Disturbance:
    """A process that is stopped now and then, or cut off, until `until_s`."""

    replica_id: str
    process: psutil.Process
    kind: FaultKind
    began_s: float
    until_s: float
    is_stopped: bool = False
    cut: Cut | None = None

    def keep_up(self, now_s: float, slowness: float) -> bool:
        """Stop, continue or cut the process off as its fault asks. Return False at the fault's end."""
        over = now_s >= self.until_s
        if self.cut is not None:
            if over:
                self.cut.end()
            else:
                self.cut.refresh()
            return not over
        phase = (now_s - self.began_s) % CYCLE_S / CYCLE_S
        stopped = not over and (self.kind is FaultKind.STOP or phase < slowness)
        if stopped != self.is_stopped:
            self.is_stopped = stopped
            with suppress(psutil.Error):
                self.process.send_signal(signal.SIGSTOP if stopped else signal.SIGCONT)
        return not over

    def end(self) -> None:
        """Let the process continue."""
        if self.cut is not None:
            self.cut.end()
        with suppress(psutil.Error):
            self.process.send_signal(signal.SIGCONT)


@final
class Chaos:
    """One run of faults.

    Args:
        addresses: of the lighthouses' HTTP ports.
        environ: has the job's secret.
        job: break the replicas of this job.
        say: takes each line of the output.
    """

    def __init__(
        self,
        settings: ChaosSettings,
        addresses: Sequence[str],
        environ: Mapping[str, str],
        job: str,
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._addresses = addresses
        self._environ = environ
        self._job = job
        self._say = say
        self._disturbances: list[Disturbance] = []
        self._killed: set[str] = set()
        self._step = 0
        self._batches = 0
        self._heard_s = time.monotonic()

    def run(self) -> int:
        """Break replicas until the plan is over or a signal comes. Return 0, or 128 + n after signal n.

        Raises: ConfigError: the lighthouse does not answer, or knows no replica of the job that runs here; nothing can
            be cut off here, although `kinds` has a cut.
        """
        settings = self._settings
        if FaultKind.CUT in settings.kinds:
            check_cut()
        if not self._victims(self._replicas()):
            raise ConfigError(
                f"no replica of job {self._job} trains on this host; start tft chaos on the host of the replicas"
            )
        with caught_signals() as caught:
            try:
                began = self._mark()
                self._wait(time.monotonic() + settings.baseline_s, caught)
                before = self._since(began)
                faults_began = self._mark()
                numbers = self._break(time.monotonic(), caught)
                during = self._since(faults_began)
            finally:
                for each in self._disturbances:
                    each.end()
            done = ", ".join(f"{number} {kind.value}" for kind, number in numbers.items())
            self._say(f"{done}, {numbers_left_out(numbers, settings)} left out")
            self._say(goodput_text(before, during))
            return 128 + caught[0] if caught else 0

    def _mark(self) -> tuple[int, int, float]:
        self._replicas()
        return self._step, self._batches, time.monotonic()

    def _since(self, began: tuple[int, int, float]) -> Progress:
        now = self._mark()
        return Progress(now[0] - began[0], now[1] - began[1], now[2] - began[2])

    def _break(self, began_s: float, caught: Sequence[int]) -> dict[FaultKind, int]:
        """Carry the plan out. Return how many faults of each kind there were."""
        numbers = dict.fromkeys(self._settings.kinds, 0)
        for fault in draw_faults(self._settings):
            self._wait(began_s + fault.at_s, caught)
            if caught:
                return numbers
            numbers[fault.kind] += self._hit(fault)
        self._wait(began_s + self._settings.duration_s, caught)
        return numbers

    def _wait(self, until_s: float, caught: Sequence[int]) -> None:
        """Wait, keep the slow processes slow, and look at the job once a second."""
        look_s = 0.0
        while (now_s := time.monotonic()) < until_s and not caught:
            self._disturbances = [each for each in self._disturbances if each.keep_up(now_s, self._settings.slowness)]
            if now_s >= look_s and not any(each.kind is FaultKind.SLOW for each in self._disturbances):
                self._replicas()
                look_s = now_s + LOOK_EVERY_S
            time.sleep(min(CYCLE_S / 20 if self._disturbances else CYCLE_S, max(0.0, until_s - now_s)))

    def _hit(self, fault: Fault) -> bool:
        """Carry one fault out. Return False if too few replicas train undisturbed."""
        victims = self._victims(self._replicas())
        disturbed = [each.replica_id for each in self._disturbances]
        name = pick_victim(fault, list(victims), disturbed, self._settings.spare)
        if name is None:
            self._say(f"left out a {fault.kind.value}: too few replicas train undisturbed here (--spare)")
            return False
        process, now_s = victims[name], time.monotonic()
        with suppress(psutil.Error):
            if fault.kind is FaultKind.KILL:
                process.kill()
                self._killed.add(name)
                lasts = ""
            else:
                until_s = now_s + self._settings.lasts_s
                cut = Cut(process, self._settings.lasts_s) if fault.kind is FaultKind.CUT else None
                self._disturbances.append(Disturbance(name, process, fault.kind, now_s, until_s, cut=cut))
                lasts = f" for {self._settings.lasts_s:g} s"
            self._say(f"{fault.kind.value} {shorten(name)} (pid {process.pid}) at step {self._step}{lasts}")
            return True
        return False

    def _replicas(self) -> list[dict[str, Any]]:
        """Return the job's replicas that train, or [] while the lighthouse does not answer. Note the job's progress.

        Raises: ConfigError: no lighthouse has answered for long.
        """
        try:
            status = fetch(self._addresses, "/api/v1/status", self._environ, timeout_s=TIMEOUT_S)
        except ConfigError:
            if not self._step or time.monotonic() - self._heard_s > UNREACHABLE_MOST_S:
                raise
            return []
        self._heard_s = time.monotonic()
        try:
            return self._training(status)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{', '.join(self._addresses)} does not answer like a lighthouse ({error!r})") from error

    def _training(self, status: Mapping[str, Any]) -> list[dict[str, Any]]:
        for job in status["jobs"]:
            if job["name"] == self._job:
                step, members = int(job["step"]), job["quorum"]["num_members"] if job["quorum"] is not None else 0
                if self._step:  # else this is the first look
                    self._batches += max(0, step - self._step) * members
                self._step = max(self._step, step)
                return [
                    {
                        "replica_id": str(each["replica_id"]),
                        "address": str(each["address"]),
                        "pid": int(each["pid"] or 0),
                    }
                    for each in job["replicas"]
                    if each["state"] == "training"
                ]
        return []

    def _victims(self, replicas: Sequence[Mapping[str, Any]]) -> dict[str, psutil.Process]:
        """Return the processes of the replicas that run on this host and were not killed."""
        found = {}
        for each in replicas:
            process = process_here(each["address"], each["pid"])
            if process is not None and each["replica_id"] not in self._killed:
                found[each["replica_id"]] = process
        return found


def numbers_left_out(numbers: Mapping[FaultKind, int], settings: ChaosSettings) -> int:
    return len(draw_faults(settings)) - sum(numbers.values())


def process_here(address: str, pid: int) -> psutil.Process | None:
    """Return a trainer's process if it runs on this host, else None.

    Args:
        address: of its manager server, which is a child of the process or a thread in it.
    """
    try:
        host, port = host_of(address).strip("[]"), int(address.rpartition(":")[2])
        if pid <= 1 or not is_this_host(host):
            return None
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                for connection in each.net_connections(kind="tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                        return process
    except (psutil.Error, ValueError):
        return None
    return None


def is_this_host(host: str) -> bool:
    """Return whether a name or an address is of this host."""
    if host in LOOPBACK or host in (socket.gethostname(), socket.getfqdn()):
        return True
    own = {each.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for each in addresses}
    try:
        return any(str(info[4][0]) in own for info in socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False
