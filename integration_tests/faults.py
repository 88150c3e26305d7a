"""A job whose hosts suffer random faults of every kind, from a seed, and its progress.

Each group is on a separate host, and so is the lighthouse. A group that was hit comes back by itself, or is restarted.
A group that ends without a fault, or after it has recovered from one, fails the test.

Law of this file: faults, and times without a commit. The tests hold the number of faults and the requirements.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Final, cast

import psutil

from integration_tests.conftest import Spawn, spawning
from integration_tests.hosts import Hosts, hosts, on_host
from integration_tests.jobs_on_hosts import ENVIRONMENT, SECRET, job_of
from integration_tests.training import Event, Trainer
from tft_algos.testing import Action, Fault, Place
from tft_coord.timeouts import Timeouts
from tft_lighthouse import LighthouseServer

# Faults of a host or a process, as they come from outside.
OF_HOSTS: Final = ("kill", "stop", "cut", "leave", "lighthouse")
# The same, and faults of parts of a group, of one link, and of the user's own code.
ALL_KINDS: Final = (
    *OF_HOSTS,
    "stop all",
    "kill server",
    "stop server",
    "half a link",
    "link",
    "slow",
    "error",
    "stop lighthouse",
)
PORT: Final = 29510  # each host has its own ports
AWAY_S: Final = (0.2, 4.0)  # how long a process is stopped, a host cut off, or the lighthouse dead
STALL_S: Final = 0.5  # a longer time without a commit is a stall
DEFAULTS: Final = Timeouts()


def serve(bind: str, heartbeat_timeout_ms: int, join_timeout_ms: int) -> None:
    """Run a lighthouse until it is killed."""
    with LighthouseServer(
        bind,
        hostname=bind.rpartition(":")[0],
        heartbeat_timeout_ms=heartbeat_timeout_ms,
        join_timeout_ms=join_timeout_ms,
        min_replicas=1,
        token=SECRET,
    ):
        threading.Event().wait()


@dataclass(frozen=True)
class Stall:
    """A time without a commit of any trainer.

    Args:
        at_s: its start, in seconds since 1970.
        seconds: its length.
        faults: the faults that began shortly before or in it.
    """

    at_s: float
    seconds: float
    faults: tuple[str, ...]


class Group:
    """One replica group through all its lives.

    Args:
        name: of the group and of its host.
        start: starts a new life.
    """

    def __init__(self, name: str, start: Callable[[str], Trainer]) -> None:
        self.name = name
        self._start = start
        self.trainer = start(name)
        self.struck = 0  # number of faults in this life, since all groups last committed together
        self.was_sent_away = False

    def start_again(self) -> None:
        """Start a new life."""
        self.trainer = self._start(self.name)
        self.struck = 0
        self.was_sent_away = False

    @property
    def has_ended(self) -> bool:
        return self.trainer.ended is not None or self.trainer.connection.closed

    @property
    def is_leaving(self) -> bool:
        """Return whether the group was told to leave, and has not ended yet."""
        return self.was_sent_away and not self.has_ended

    def send(self, fault: Fault) -> None:
        """Send a fault to this life. A life that is about to end ignores it."""
        with suppress(BrokenPipeError):
            self.trainer.connection.send(fault)

    def processes(self) -> list[psutil.Process]:
        """Return its trainer, and then its manager server if that lives."""
        trainer = psutil.Process(self.trainer.process.pid)
        with suppress(StopIteration, psutil.NoSuchProcess):
            return [trainer, self.trainer.manager_server()]
        return [trainer]

    def end(self) -> None:
        """Kill this life now."""
        self.trainer.process.kill()
        self.trainer.process.join()


class Run:
    """A job with faults.

    Args:
        cluster: one host for each group, and one for the lighthouse.
        spawn: the fixture.
        names: of the groups.
        rng: makes the random choices.
        kinds: of faults that may happen.
        timeouts: of the lighthouse and of every trainer.
        batch_s: how long a trainer takes to get a batch.
    """

    def __init__(
        self,
        cluster: Hosts,
        spawn: Spawn,
        names: Sequence[str],
        rng: random.Random,
        *,
        kinds: Sequence[str] = OF_HOSTS,
        timeouts: Timeouts = DEFAULTS,
        batch_s: float = 0.02,
    ) -> None:
        self._cluster = cluster
        self._spawn = spawn
        self._rng = rng
        self._kinds = kinds
        self._timeouts = timeouts
        self._batch_s = batch_s
        self.log: list[tuple[float, str]] = []  # time of each fault in seconds since 1970, and its description
        self._bind = f"{cluster.address('lighthouse')}:{PORT}"
        self._lighthouse = self._start_lighthouse()
        self.job = job_of(cluster, spawn, f"http://{self._bind}")
        self.groups = [Group(name, self._start) for name in names]
        self.happened: Counter[str] = Counter()
        self._due: list[tuple[float, Callable[[], None]]] = []  # ends of the current faults
        self._over_s = 0.0  # end of the last fault, in seconds since 1970
        self._down: set[str] = set()

    def _start_lighthouse(self) -> ForkServerProcess:
        return self._spawn(
            on_host,
            self._cluster.namespace("lighthouse"),
            serve,
            self._bind,
            self._timeouts.heartbeat_timeout_ms,
            self._timeouts.join_timeout_ms,
        )

    def _start(self, name: str) -> Trainer:
        return self.job.start(
            name,
            model="buckets",
            faults=(),
            batch_s=self._batch_s,
            leaves=True,
            environment=ENVIRONMENT,
            hostname=self._cluster.address(name),
            timeouts=self._timeouts,
            timeout=timedelta(milliseconds=self._timeouts.timeout_ms),
        )

    def strike(self) -> None:
        """Inject one fault, of a random kind and on a random victim."""
        kind = self._rng.choice(self._kinds)
        self.happened[kind] += 1
        if kind in ("lighthouse", "stop lighthouse"):
            self.log.append((time.time(), kind))
            self._strike_lighthouse(kind)
            return
        group = self._rng.choice([group for group in self.groups if group.name not in self._down])
        group.struck += 1
        self._down.add(group.name)
        self.log.append((time.time(), f"{kind} {group.name}"))
        if kind in ("half a link", "link"):
            self._strike_link(group, both=kind == "link")
        elif kind in ("kill server", "stop server", "stop all", "stop"):
            self._strike_processes(group, kind)
        else:
            self._strike_group(group, kind)

    def _strike_group(self, group: Group, kind: str) -> None:
        away_s = self._rng.uniform(*AWAY_S)
        match kind:
            case "kill":
                group.end()
                self._later(self._rng.uniform(0, 1), group.start_again)
            case "leave":
                group.was_sent_away = True
                group.trainer.process.terminate()  # it ends by itself, and is then restarted
            case "cut":
                self._cluster.cut(group.name)
                self._later(away_s, lambda: self._cluster.mend(group.name))
            case "slow":
                hang = timedelta(seconds=away_s)
                group.send(Fault(action=Action.HANG, place=Place.FORWARD, replica=group.name, hang_for=hang))
            case "error":
                group.send(Fault(action=Action.FAIL, place=Place.REDUCTION, replica=group.name))

    def _strike_processes(self, group: Group, kind: str) -> None:
        processes = group.processes()
        chosen = {"stop": processes[:1], "stop all": processes}.get(kind, processes[1:])
        if kind == "kill server":
            for process in chosen:
                process.kill()
            return
        for process in chosen:
            process.suspend()

        def resume() -> None:
            for process in chosen:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

        self._later(self._rng.uniform(*AWAY_S), resume)

    def _strike_link(self, group: Group, *, both: bool) -> None:
        other = self._rng.choice([other for other in self.groups if other is not group])
        ways = [(group.name, other.name), (other.name, group.name)]
        ways = ways if both else [self._rng.choice(ways)]
        other.struck += 1  # the other group may be left out instead
        self.log[-1] = (self.log[-1][0], f"{self.log[-1][1]}: {', '.join(' to '.join(way) for way in ways)}")
        for way in ways:
            self._cluster.lose(*way)

        def mend() -> None:
            for way in ways:
                self._cluster.find(*way)

        self._later(self._rng.uniform(*AWAY_S), mend)

    def _strike_lighthouse(self, kind: str) -> None:
        struck = self._lighthouse
        if kind == "stop lighthouse":
            os.kill(cast(int, struck.pid), signal.SIGSTOP)
            self._later(self._rng.uniform(*AWAY_S), lambda: _continue(struck))
            return
        struck.kill()
        struck.join()

        def again() -> None:
            self._lighthouse = self._start_lighthouse()

        self._later(self._rng.uniform(*AWAY_S), again)

    def _later(self, after_s: float, end: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + after_s, end))

    def pump(self, seconds: float) -> None:
        """Let time pass, end the faults that are due, and restart groups that a fault has ended."""
        until = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for at, end in [one for one in self._due if one[0] <= now]:
                self._due.remove((at, end))
                end()
                self._over_s = time.time()
            self.look()
            if now >= until:
                return
            self.job.take_in(min(0.05, until - now))

    def look(self) -> None:
        """Check that an ended group was hit by a fault from which it has not recovered, and restart it."""
        for group in self.groups:
            if group.has_ended and group.trainer.process.exitcode != -signal.SIGKILL:
                last_events = [event.text for event in group.trainer.events[-3:]]
                assert group.struck, (
                    f"{group.name} has ended, and nothing had struck: {last_events}; {dict(self.happened)}"
                )
                group.end()
                group.start_again()

    def all_together(self, patience_s: float) -> bool:
        """Return whether all groups commit together within that time. If so, no group counts as hit any more."""
        give_up_at = time.monotonic() + patience_s
        began_s = time.time()
        while time.monotonic() < give_up_at:
            self.pump(0.05)
            if self._due or any(group.is_leaving for group in self.groups):
                continue
            # Commits from before or during the last fault do not count, even if their events arrive only now.
            since_s = max(began_s, self._over_s)
            if all(group.trainer.committed_with(len(self.groups), 3, since_s=since_s) for group in self.groups):
                self._down.clear()
                for group in self.groups:
                    group.struck = 0
                return True
        return False

    def suffer_for(self, seconds: float, every_s: float) -> None:
        """Inject a fault every `every_s` seconds, whatever became of the one before, while one group stays unhit."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.pump(every_s)
            self._recover()
            if len(self._down) < len(self.groups) - 1:
                self.strike()

    def _recover(self) -> None:
        """Clear the hit mark of groups that commit with all others after the end of the last fault."""
        if not self._due and not any(group.is_leaving for group in self.groups):
            for group in self.groups:
                if group.trainer.committed_with(len(self.groups), 2, since_s=self._over_s):
                    self._down.discard(group.name)
                    group.struck = 0

    def commits(self) -> list[Event]:
        """Return the commits of all trainers that ever lived, ordered by time."""
        found = [event for trainer in self.job.trainers for event in trainer.events if event.kind == "commit"]
        return sorted(found, key=lambda event: event.at_s)

    def stalls(self, since_s: float, until_s: float) -> list[Stall]:
        """Return the times without any commit that exceed STALL_S, longest first."""
        times = [since_s, *(event.at_s for event in self.commits() if since_s < event.at_s < until_s), until_s]
        found = []
        for before, after in itertools.pairwise(times):
            if after - before > STALL_S:
                causes = tuple(what for at_s, what in self.log if before - 2 * STALL_S <= at_s < after)
                found.append(Stall(before, after - before, causes))
        return sorted(found, key=lambda stall: -stall.seconds)

    @property
    def may_strike(self) -> bool:
        """Return whether a majority is left when one more group goes."""
        return 2 * (len(self.groups) - len(self._down) - 1) > len(self.groups)


def _continue(process: ForkServerProcess) -> None:
    with suppress(ProcessLookupError):
        os.kill(cast(int, process.pid), signal.SIGCONT)


@contextmanager
def running(forkserver: ForkServerContext, num_groups: int, seed: int, **settings: Any) -> Iterator[Run]:
    """Yield a run of that many groups, each on a separate host. `settings` are those of `Run`."""
    names = [f"g{number}" for number in range(num_groups)]
    with hosts("lighthouse", *names) as cluster, spawning(forkserver) as spawn:
        yield Run(cluster, spawn, names, random.Random(seed), **settings)
