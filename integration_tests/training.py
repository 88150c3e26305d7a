"""Replica groups as real processes, and the test's view of them: the commits of each, step by step.

A trainer trains until it is told where to stop. It reports every commit, every failed step and every healing with the
digest of its whole state. The test receives these events until the awaited condition holds.

Law of this file: starting trainers and receiving events. The tests hold the requirements.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import logging.handlers
import multiprocessing.connection
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, final

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from integration_tests.conftest import Spawn
from tft_algos import DistributedDataParallel, Manager, Optimizer
from tft_algos.testing import EventInjector, Fault, InjectedError, Place, digest
from tft_ckpt import CheckpointTransport, HTTPTransport, PGTransport
from tft_lighthouse import LighthouseServer
from tft_pg import (
    Collective,
    ProcessGroupBabyGloo,
    ProcessGroupGloo,
    WrappingProcessGroup,
    forward,
    init_group,
)
from tft_pg.testing import fork_child, reconfigurable_gloo

PATIENCE_S = 50.0
MARGIN_STEPS = 60  # margin so that no trainer has passed the step at which all must stop


@dataclass(frozen=True)
class Event:
    """An event that a trainer reports.

    Args:
        kind: "commit", "failed", "healed", "ready", "struck" or "end".
        step: committed steps, after a commit. For a healing: those of the source.
        digest: of parameters and optimizer state.
        participants: of the step.
        text: the error of a failed step or of the end.
        at_s: time of the event, in seconds since 1970.
    """

    kind: str
    step: int = 0
    digest: str = ""
    participants: int = 0
    text: str = ""
    at_s: float = field(default_factory=time.time, compare=False)


def steps_until_told(connection: Connection, manager: Manager, pause_s: float) -> Iterator[int]:
    """Yield the number of committed steps before each step, until the last step, which comes over the connection."""
    last: int | None = None
    while last is None or manager.current_step() < last:
        if connection.poll():
            last = connection.recv()
            continue
        time.sleep(pause_s)
        yield manager.current_step()


def heard_of_the_manager(level: int = logging.NOTSET) -> queue.SimpleQueue[logging.LogRecord]:
    """Collect the log records of this process's Manager from now on, with tracebacks in the messages."""
    heard: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    log = logging.getLogger("tft_algos.manager")
    log.addHandler(logging.handlers.QueueHandler(heard))
    log.setLevel(level)
    return heard


@dataclass(frozen=True)
class Spec:
    """The settings of a trainer.

    Args:
        lighthouse: address.
        name: of the replica group. It seeds the weights, so that only healing makes them equal.
        model: "small", or "buckets": several buckets, with modules used in another order than defined.
        fail_at: number of committed steps at which an error is reported once, after the reductions.
        faults: faults that strike this trainer. The test may send more. A number of seconds that is sent makes the
            trainer hold its interpreter lock for that time. None: its Manager's parts are not wrapped.
        batch_s: time to get a batch.
        waits: wait for a message between "ready" and the first step.
        leaves: leave on SIGTERM, or when drained.
        forks: ways to make a child at each fault, before it strikes. A "forked" event reports them.
        over_group: live state goes over the process group instead of HTTP.
        child_group: the group is a ProcessGroupBabyGloo.
        loses_child_at: number of committed steps at which that group's child is killed once, in a reduction.
        handle_store: the port of a store on loopback. The trainer gives its Manager a torch group that reconfigures by
            handles, made in that store. None: a group of tft_pg.
        environment: of a launcher. RANK and WORLD_SIZE make it one process of several.
        settings: for the Manager.
    """

    lighthouse: str
    name: str
    model: str = "small"
    fail_at: int | None = None
    faults: tuple[Fault, ...] | None = None
    batch_s: float = 0.0
    waits: bool = False
    leaves: bool = False
    forks: tuple[str, ...] = ()
    over_group: bool = False
    child_group: bool = False
    loses_child_at: int | None = None
    handle_store: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


class OtherOrder(torch.nn.Module):
    """Several buckets of different sizes, whose gradients come in another order than that of the definition."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.second = torch.nn.Linear(64, 96)
        self.third = torch.nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.first(torch.relu(self.third(torch.relu(self.second(x)))))
        return result


def train(spec: Spec, connection: Connection) -> None:
    """Run the life of a trainer, in its own process."""
    torch.set_num_threads(1)
    logging.getLogger("tft_ckpt").setLevel(logging.ERROR)
    lock = threading.Lock()  # faults strike on any thread

    def report(event: Event) -> None:
        with lock:
            connection.send(event)

    try:
        _train(spec, connection, report)
    except Exception as error:
        report(Event("end", text=f"{type(error).__name__}: {error}"))
    else:
        report(Event("end"))


def _make_group(spec: Spec, is_due: Callable[[], bool], report: Callable[[Event], None]) -> Any:
    if spec.handle_store is not None:
        return reconfigurable_gloo(spec.handle_store)
    return _LosesItsChild(ProcessGroupBabyGloo(), is_due, report) if spec.child_group else ProcessGroupGloo()


@final
class _LosesItsChild(WrappingProcessGroup):
    """Kills the child of its group once, in the middle of a reduction, when that is due."""

    def __init__(self, pg: ProcessGroupBabyGloo, is_due: Callable[[], bool], report: Callable[[Event], None]) -> None:
        super().__init__(pg)
        self._is_due = is_due
        self._report = report
        self._has_lost = False

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        group = self.parent
        assert isinstance(group, ProcessGroupBabyGloo)
        if self._has_lost or collective.name != "allreduce" or not self._is_due():
            return forward(group, collective, args, kwargs)
        self._has_lost = True
        child = group.child_pid
        assert child is not None
        os.kill(child, signal.SIGSTOP)  # so that the reduction does not end before the child is killed
        work = forward(group, collective, args, kwargs)
        os.kill(child, signal.SIGKILL)
        self._report(Event("struck", text=f"the child {child} was killed"))
        return work


def _train(spec: Spec, connection: Connection, report: Callable[[Event], None]) -> None:
    os.environ.update(spec.environment)
    rank = int(spec.environment.get("RANK", "0"))
    inside: dist.ProcessGroup | None = None
    if "WORLD_SIZE" in spec.environment:
        # Torch's timeout of half an hour stays, because a rank may wait for its part of a quorum longer than the other.
        inside = init_group("cpu")
    seed = sum(spec.name.encode()) + 1000 * rank
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(64, 64)) if spec.model == "small" else OtherOrder()
    adam = torch.optim.AdamW(module.parameters(), lr=1e-2)
    manager: Manager

    def take() -> dict[str, Any]:
        return {"module": module.state_dict(), "optimizer": adam.state_dict()}

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["module"])
        adam.load_state_dict(state["optimizer"])
        report(Event("healed", digest=digest(take())))

    settings: dict[str, Any] = {"timeout": timedelta(seconds=10), "hostname": "localhost"} | spec.settings
    pg = _make_group(spec, lambda: manager.current_step() == spec.loses_child_at, report)

    def on_strike(fault: Fault) -> None:
        report(Event("struck", manager.current_step(), text=fault.describe()))
        if spec.forks:
            children = [fork_child(way) for way in spec.forks]
            report(Event("forked", manager.current_step(), text=" ".join(map(str, children))))

    injector = EventInjector(*(spec.faults or ()), on_strike=on_strike)
    if spec.faults is not None:
        transport: CheckpointTransport[Any] = (
            PGTransport(pg, timedelta(seconds=60), torch.device("cpu"))
            if spec.over_group
            else HTTPTransport(
                timedelta(seconds=60),
                num_chunks=0,
                advertise_addr=settings["hostname"],
                token=os.environ.get("TFT_TOKEN"),
            )
        )
        pg = injector.group(pg)
        settings |= {"coordinator": injector.coordinator, "checkpoint_transport": injector.transport(transport)}
        injector.module(module)
        injector.optimizer(adam)
    with Manager(pg, load, take, replica_id=spec.name, lighthouse_addr=spec.lighthouse, **settings) as manager:
        injector.attach(manager)
        ddp = DistributedDataParallel(manager, module, inside, bucket_cap_mb=0.02)
        optimizer = Optimizer(manager, adam)
        report(Event("ready", text=manager.replica_id))
        if spec.waits:
            connection.recv()
        fail_at = spec.fail_at
        last = None
        holds_s = 0.0
        if spec.leaves:
            manager.leave_on_signal()
        while (last is None or manager.current_step() < last) and not manager.left:
            if connection.poll():
                match connection.recv():
                    case Fault() as fault:
                        injector.inject(fault)
                    case int(step):
                        last = step
                    case float(seconds):
                        holds_s = seconds
                continue
            time.sleep(spec.batch_s)
            before = manager.current_step()
            optimizer.zero_grad()
            if holds_s:
                participants = manager.num_participants()  # the quorum is here, so this rank is on its own from now on
                report(Event("struck", before, participants=participants, text="it holds the interpreter's lock"))
                ctypes.PyDLL(None).usleep(int(holds_s * 1e6))  # a PyDLL function keeps the lock, unlike one of CDLL
                holds_s = 0.0
            ddp(torch.randn(4, 64)).square().mean().backward()
            if manager.current_step() == fail_at:
                fail_at = None
                manager.report_error(RuntimeError("injected"))
            error: Exception | None = manager.errored()
            try:
                optimizer.step()
            except InjectedError as raised:
                if raised.fault.place is not Place.OPTIMIZER:
                    raise
                error = raised  # a loop that continues after its optimizer raised: this replica heals
            step, participants = manager.current_step(), manager.num_participants()
            if step > before and error is None:
                report(Event("commit", step, digest(take()), participants))
            else:
                report(Event("failed", step, text=str(error)))
    if inside is not None:
        dist.destroy_process_group()


def is_manager_server(process: psutil.Process) -> bool:
    """Return whether the process is a running manager server."""
    try:
        return "tft-manager-server" in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


class Trainer:
    """The test's end of a trainer, with its events so far."""

    def __init__(self, name: str, process: ForkServerProcess, connection: Connection) -> None:
        self.name = name
        self.process = process
        self.connection = connection
        self.events: list[Event] = []
        self.step = 0  # the highest step that it has committed

    def hear(self, event: Event) -> None:
        """Record an event of the trainer."""
        self.events.append(event)
        if event.kind == "commit":
            self.step = max(self.step, event.step)

    @property
    def commits(self) -> dict[int, Event]:
        """Return its commits by step."""
        return {event.step: event for event in self.events if event.kind == "commit"}

    @property
    def ended(self) -> Event | None:
        return self.events[-1] if self.events and self.events[-1].kind == "end" else None

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def committed_with(self, participants: int, times: int = 5, *, since_s: float = 0.0) -> bool:
        """Return whether its last commits had that many participants, and came after that time."""
        commits = (event for event in reversed(self.events) if event.kind == "commit" and event.at_s > since_s)
        last = list(itertools.islice(commits, times))
        return len(last) == times and all(event.participants == participants for event in last)

    def manager_server(self) -> psutil.Process:
        """Return its manager server's process. A killed but unreaped process does not count.

        Raises:
            StopIteration: it has none at present.
        """
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if is_manager_server(child))

    @property
    def has_manager_server(self) -> bool:
        """Return whether its manager server's process runs."""
        return any(is_manager_server(child) for child in psutil.Process(self.process.pid).children())


@dataclass(frozen=True)
class Address:
    """The part of a lighthouse in another process that a Job needs."""

    address: str


class Job:
    """The trainers of one lighthouse.

    Args:
        spawn: the fixture.
        lighthouse: of the trainers.
    """

    def __init__(self, spawn: Spawn, lighthouse: LighthouseServer) -> None:
        self._spawn = spawn
        self._lighthouse = lighthouse
        self.trainers: list[Trainer] = []

    def start(
        self,
        name: str,
        *,
        model: str = "small",
        fail_at: int | None = None,
        faults: tuple[Fault, ...] | None = None,
        batch_s: float = 0.0,
        waits: bool = False,
        leaves: bool = False,
        forks: tuple[str, ...] = (),
        over_group: bool = False,
        child_group: bool = False,
        loses_child_at: int | None = None,
        handle_store: int | None = None,
        environment: dict[str, str] | None = None,
        **settings: Any,
    ) -> Trainer:
        """Start a trainer. Keywords are its Manager's settings."""
        spec = Spec(
            lighthouse=str(self._lighthouse.address),
            name=name,
            model=model,
            fail_at=fail_at,
            faults=faults,
            batch_s=batch_s,
            waits=waits,
            leaves=leaves,
            forks=forks,
            over_group=over_group,
            child_group=child_group,
            loses_child_at=loses_child_at,
            handle_store=handle_store,
            environment=environment or {},
            settings=settings,
        )
        return self.add(name, train, spec)

    def add(self, name: str, target: Callable[..., None], *arguments: object) -> Trainer:
        """Start a custom trainer of the test: `target(*arguments, connection)`, which reports its events."""
        ours, theirs = multiprocessing.connection.Pipe()
        trainer = Trainer(name, self._spawn(target, *arguments, theirs), ours)
        theirs.close()
        self.trainers.append(trainer)
        return trainer

    def until(self, condition: Callable[[], bool], what: str, *, within_s: float = PATIENCE_S) -> None:
        """Receive events until the condition holds."""
        deadline = time.monotonic() + within_s
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"not within {within_s:g} s: {what}; {self.history()}"
            self.take_in(left)

    def take_in(self, timeout_s: float) -> None:
        """Receive the next events, with at most that long a wait."""
        by_connection = {trainer.connection: trainer for trainer in self.trainers if not trainer.connection.closed}
        assert by_connection, f"nobody is left; {self.history()}"
        for connection in multiprocessing.connection.wait(list(by_connection), timeout_s):
            assert isinstance(connection, Connection)
            try:
                by_connection[connection].hear(connection.recv())
            except (EOFError, ConnectionResetError):
                connection.close()

    def finish(self, trainers: Iterable[Trainer] | None = None) -> None:
        """Stop all trainers at one step, and check that they have."""
        alive = [trainer for trainer in (trainers or self.trainers) if not trainer.connection.closed]
        while any(trainer.connection.poll() for trainer in alive):
            self.take_in(0)
        last = max(trainer.step for trainer in alive) + MARGIN_STEPS
        for trainer in alive:
            trainer.connection.send(last)
        self.until(lambda: all(trainer.ended for trainer in alive), "all trainers end")
        for trainer in alive:
            assert trainer.ended == Event("end"), self.history()
            assert trainer.step == last, self.history()
            trainer.process.join(PATIENCE_S)
            assert trainer.process.exitcode == 0
        self.check_digests()

    def check_digests(self) -> int:
        """Check that trainers that committed the same step have equal digests. Return the number of such steps."""
        by_step: dict[int, dict[str, str]] = {}
        for trainer in self.trainers:
            for step, event in trainer.commits.items():
                by_step.setdefault(step, {})[f"{trainer.name}, process {trainer.process.pid}"] = event.digest
        for step, digests in by_step.items():
            assert len(set(digests.values())) == 1, f"step {step}: {digests}"
        return sum(len(digests) > 1 for digests in by_step.values())

    def history(self) -> str:
        """Return the last events of all trainers."""
        return "; ".join(f"{trainer.name}: {[*trainer.events[-3:]]}" for trainer in self.trainers)


class Launcher:
    """The part of torchrun for a group: a store that outlives its processes, and their ranks.

    Args:
        job: of the group.
        name: of the group.
        world_size: number of processes.
    """

    def __init__(self, job: Job, name: str, world_size: int = 2) -> None:
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._job = job
        self._name = name
        self._world_size = world_size
        self._starts = 0

    def start(self, **options: Any) -> list[Trainer]:
        """Start the group, or restart it. Options are those of `Job.start`."""
        return self.start_each([options] * self._world_size)

    def start_each(self, options: Sequence[dict[str, Any]]) -> list[Trainer]:
        """Start the group with separate options for each rank."""
        self._starts += 1
        return [
            self._job.start(
                self._name,
                environment={
                    "RANK": str(rank),
                    "WORLD_SIZE": str(self._world_size),
                    "MASTER_ADDR": "localhost",
                    "MASTER_PORT": str(self.store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    "TORCHELASTIC_RUN_ID": self._name,
                    "TORCHELASTIC_RESTART_COUNT": str(self._starts),
                },
                **({"model": "buckets"} | of_rank),
            )
            for rank, of_rank in enumerate(options)
        ]
