"""One run, and every kind of fault in it, by chance, from a seed: killed, stopped, cut off, sent away, the lighthouse
killed.

Each group is on a host of its own, and so is the lighthouse. A fault strikes while all train together, or while an
earlier one is not yet got over, as long as a majority is left. Whoever is struck comes back: by itself, or started
anew. In the end all train together, have ended where they were told to, and at each step that any two of them have
committed, whoever they were, their states are equal to the last bit. Who was not struck, or has got over it, has never
ended.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Final, cast

import pytest

from integration_tests.conftest import Spawn, spawning
from integration_tests.hosts import INTERFACE, Hosts, hosts, on_host, why_not
from integration_tests.training import Address, Job, Trainer
from tft_coord.timeouts import Timeouts
from tft_lighthouse import LighthouseServer

Record = Callable[[str, object], None]

KINDS: Final = ("kill", "stop", "cut", "leave", "lighthouse")
PORT: Final = 29510  # a host's ports are its own
HEARTBEAT_TIMEOUT_MS: Final = 2_000
JOIN_TIMEOUT_MS: Final = 1_500
AWAY_S: Final = (0.2, 4.0)  # how long somebody is stopped, cut off, or the lighthouse dead
TIMEOUTS: Final = Timeouts(
    timeout_ms=10_000,
    quorum_timeout_ms=60_000,
    heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
    beat_interval_ms=500,
    heal_timeout_ms=10_000,
)


SECRET: Final = "of-this-job"  # without one other hosts are not served


def serve(bind: str) -> None:
    """A lighthouse, until it is killed."""
    with LighthouseServer(
        bind,
        hostname=bind.rpartition(":")[0],
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
        join_timeout_ms=JOIN_TIMEOUT_MS,
        min_replicas=1,
        token=SECRET,
    ):
        threading.Event().wait()


class Group:
    """One replica group through all its lives.

    Args:
        name: of its host, too.
        start: gives it a new life.
    """

    def __init__(self, name: str, start: Callable[[str], Trainer]) -> None:
        self.name = name
        self._start = start
        self.trainer = start(name)
        self.struck = 0  # how often, in this life, since all were together last
        self.was_sent_away = False

    def start_again(self) -> None:
        """A new life."""
        self.trainer = self._start(self.name)
        self.struck = 0
        self.was_sent_away = False

    @property
    def has_ended(self) -> bool:
        return self.trainer.ended is not None or self.trainer.connection.closed

    @property
    def is_leaving(self) -> bool:
        """It was sent away, and has not gone yet."""
        return self.was_sent_away and not self.has_ended

    def end(self) -> None:
        """This life, now."""
        self.trainer.process.kill()
        self.trainer.process.join()


class Run:
    """A job with faults.

    Args:
        cluster: a host a group, and one for the lighthouse.
        spawn: the fixture.
        names: of the groups.
        rng: says what happens.
    """

    def __init__(self, cluster: Hosts, spawn: Spawn, names: Sequence[str], rng: random.Random) -> None:
        self._cluster = cluster
        self._spawn = spawn
        self._rng = rng
        self._bind = f"{cluster.address('lighthouse')}:{PORT}"
        self._lighthouse = self._start_lighthouse()

        def spawn_on_host(target: Callable[..., object], spec: Any, connection: Connection) -> ForkServerProcess:
            return spawn(on_host, cluster.namespace(spec.name), target, spec, connection)

        self.job = Job(spawn_on_host, cast(LighthouseServer, Address(f"http://{self._bind}")))
        self.groups = [Group(name, self._start) for name in names]
        self.happened: Counter[str] = Counter()
        self._due: list[tuple[float, Callable[[], None]]] = []  # what ends a fault that is under way
        self._over_s = 0.0  # when the last fault ended, in seconds since 1970
        self._down: set[str] = set()

    def _start_lighthouse(self) -> ForkServerProcess:
        return self._spawn(on_host, self._cluster.namespace("lighthouse"), serve, self._bind)

    def _start(self, name: str) -> Trainer:
        return self.job.start(
            name,
            model="buckets",
            batch_s=0.02,
            leaves=True,
            environment={"GLOO_SOCKET_IFNAME": INTERFACE, "TFT_TOKEN": SECRET},
            hostname=self._cluster.address(name),
            timeouts=TIMEOUTS,
            timeout=timedelta(milliseconds=TIMEOUTS.timeout_ms),
        )

    def strike(self) -> None:
        """One fault, of a kind and on a victim by chance."""
        kind = self._rng.choice(KINDS)
        self.happened[kind] += 1
        if kind == "lighthouse":
            self._strike_lighthouse()
            return
        group = self._rng.choice([group for group in self.groups if group.name not in self._down])
        group.struck += 1
        self._down.add(group.name)
        match kind:
            case "kill":
                group.end()
                self._later(self._rng.uniform(0, 1), group.start_again)
            case "leave":
                group.was_sent_away = True
                group.trainer.process.terminate()  # it ends by itself, and is then started again
            case "stop":
                process = group.trainer.process
                os.kill(cast(int, process.pid), signal.SIGSTOP)
                self._later(self._rng.uniform(*AWAY_S), lambda: os.kill(cast(int, process.pid), signal.SIGCONT))
            case "cut":
                self._cluster.cut(group.name)
                self._later(self._rng.uniform(*AWAY_S), lambda: self._cluster.mend(group.name))

    def _strike_lighthouse(self) -> None:
        self._lighthouse.kill()
        self._lighthouse.join()

        def again() -> None:
            self._lighthouse = self._start_lighthouse()

        self._later(self._rng.uniform(*AWAY_S), again)

    def _later(self, after_s: float, end: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + after_s, end))

    def pump(self, seconds: float) -> None:
        """Let time pass: faults that are over end, and whoever has ended by a fault is started again."""
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
        """Who has ended must have been struck, and not have got over it."""
        for group in self.groups:
            if group.has_ended and group.trainer.process.exitcode != -signal.SIGKILL:
                told = [event.text for event in group.trainer.events[-3:]]
                assert group.struck, f"{group.name} has ended, and nothing had struck: {told}; {dict(self.happened)}"
                group.end()
                group.start_again()

    def all_together(self, patience_s: float) -> bool:
        """Whether all commit together again within that time; then nobody is down any more, and has an excuse."""
        give_up_at = time.monotonic() + patience_s
        began_s = time.time()
        while time.monotonic() < give_up_at:
            self.pump(0.05)
            if self._due or any(group.is_leaving for group in self.groups):
                continue
            # Not what was committed before the last fault, or in it, and is only heard of now.
            since_s = max(began_s, self._over_s)
            if all(group.trainer.committed_with(len(self.groups), 3, since_s=since_s) for group in self.groups):
                self._down.clear()
                for group in self.groups:
                    group.struck = 0
                return True
        return False

    @property
    def may_strike(self) -> bool:
        """A majority is left when one more goes."""
        return 2 * (len(self.groups) - len(self._down) - 1) > len(self.groups)


@contextmanager
def running(forkserver: ForkServerContext, num_groups: int, seed: int) -> Iterator[Run]:
    names = [f"g{number}" for number in range(num_groups)]
    with hosts("lighthouse", *names) as cluster, spawning(forkserver) as spawn:
        yield Run(cluster, spawn, names, random.Random(seed))


def suffer(run: Run, faults: int, record: Record) -> None:
    """So many faults; every third or so comes while the one before is not yet got over."""
    rng = random.Random(faults)
    assert run.all_together(60), f"they never trained together; {run.job.story()}"
    longest_s = 0.0
    for number in range(faults):
        run.strike()
        if run.may_strike and rng.random() < 0.35:
            run.pump(rng.uniform(0, 1.5))
            continue
        started = time.monotonic()
        assert run.all_together(60), f"fault {number + 1}, {dict(run.happened)}: not together again; {run.job.story()}"
        longest_s = max(longest_s, time.monotonic() - started)
        run.job.check_digests()
    assert run.all_together(60), run.job.story()
    run.job.finish([group.trainer for group in run.groups])
    assert all(run.happened[kind] for kind in KINDS), f"not every kind of fault: {run.happened}"
    record("faults", dict(run.happened))
    record("steps_in_common", run.job.check_digests())
    record("longest_until_together_s", round(longest_s, 2))


@pytest.fixture
def needs_hosts() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.usefixtures("needs_hosts")
@pytest.mark.timeout(180)
def test_a_few_faults(forkserver: ForkServerContext, record_testsuite_property: Record) -> None:
    with running(forkserver, num_groups=3, seed=3) as run:
        suffer(run, 8, record_testsuite_property)


@pytest.mark.soak
@pytest.mark.usefixtures("needs_hosts")
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("num_groups", [3, 8])
def test_fifty_faults(forkserver: ForkServerContext, num_groups: int, record_testsuite_property: Record) -> None:
    with running(forkserver, num_groups=num_groups, seed=num_groups) as run:
        suffer(run, 50, record_testsuite_property)
