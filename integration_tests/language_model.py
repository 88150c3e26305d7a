"""The example's language model in many processes, a supervisor that restarts dead ones, and the commits of each.

A trainer is the loop of `examples/train_lm.py` with an injector at every place. It reports the digest of its whole
state with each commit. The supervisor works like torchrun or a cluster's scheduler. When a process of a replica group
has ended, it waits for the others to end and restarts the group.

Law of this file: starting trainers, injecting faults and receiving events. The tests hold the requirements.
"""

from __future__ import annotations

import logging
import multiprocessing.connection
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, Final

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from examples.train_lm import Settings, Training
from integration_tests.conftest import Spawn
from tft_algos import Manager, Optimizer, extend_mesh
from tft_algos.manager.interfaces import ProcessGroupLike
from tft_algos.testing import Action, EventInjector, Fault, Place, digest
from tft_ckpt import HTTPTransport
from tft_coord.core.types import Plan, QuorumKey, RankRequest
from tft_coord.timeouts import Timeouts
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo, init_group

PATIENCE_S: Final = 60.0
MARGIN_STEPS: Final = 60  # margin so that no trainer has passed the step at which all must stop
TIMEOUT: Final = timedelta(seconds=2)
JOIN_TIMEOUT_MS: Final = 1_000
HEARTBEAT_TIMEOUT_MS: Final = 2_000
# A rank that alone lacks a quorum meets the other rank in the model's forward pass, after that one's timeout as well.
QUORUM_TIMEOUT_MS: Final = 10_000
TIMEOUTS: Final = Timeouts(
    quorum_timeout_ms=QUORUM_TIMEOUT_MS,
    heal_timeout_ms=3_000,
    heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
    beat_interval_ms=500,
)
FOR_EVER: Final = 1_000_000
HANGS_FOR: Final = 1.5 * TIMEOUT
TINY: Final = Settings(steps=FOR_EVER, batch=12, context=16, characters=50_000, width=16, layers=1, heads=2)
NAMES: Final = "abcde"
OF_RANK_ZERO: Final = (Place.BACKWARD, Place.VOTE, Place.HEALING)


@dataclass(frozen=True)
class Event:
    """An event that a trainer reports.

    Args:
        kind: "ready", "commit", "failed", "struck", "loss" or "end".
        step: committed steps, after a commit.
        lineage: identifies the commits that led there, after a commit.
        digest: of this process's part of parameters and optimizer.
        participants: of the step.
        requests: number of quorum requests so far in its life.
        loss: on text that is never trained on, at the end.
        text: the error of a failed step or of the end.
    """

    kind: str
    step: int = 0
    lineage: int = 0
    digest: str = ""
    participants: int = 0
    requests: int = 0
    loss: float = 0.0
    text: str = ""


@dataclass(frozen=True)
class Spec:
    """The settings of a trainer.

    Args:
        lighthouse: address.
        name: of the replica group.
        settings: the example's flags. The trainer stops at `steps`, or at another last step that it receives.
        hold_at: number of committed steps at which it waits for the last step.
        environment: of a launcher. RANK and WORLD_SIZE make it one process of several.
        details: for a trainer that another file defines.
    """

    lighthouse: str
    name: str
    settings: Settings
    hold_at: int = FOR_EVER
    environment: dict[str, str] = field(default_factory=dict)
    details: Any = None


# --- what a trainer does ---


def manager_with_faults(
    spec: Spec,
    report: Callable[[Event], None],
    *,
    timeouts: Timeouts = TIMEOUTS,
    around: Callable[[ProcessGroupLike], ProcessGroupLike] = lambda group: group,
    **settings: Any,
) -> tuple[Manager, EventInjector]:
    """Return a Manager with an injector on every part. Each injected fault is reported.

    Args:
        spec: of the trainer.
        report: receives the events.
        timeouts: of the Manager.
        around: wraps its process group further.
        settings: for the Manager.
    """
    injector = EventInjector(
        on_strike=lambda fault: report(Event("struck", manager.current_step(), text=fault.describe()))
    )
    transport = HTTPTransport[Any](timedelta(seconds=60), num_chunks=0, advertise_addr="localhost")
    manager = Manager(
        around(injector.group(ProcessGroupGloo())),
        replica_id=spec.name,
        lighthouse_addr=spec.lighthouse,
        hostname="localhost",
        timeouts=timeouts,
        coordinator=injector.coordinator,
        checkpoint_transport=injector.transport(transport),
        **{"timeout": TIMEOUT, **settings},
    )
    injector.attach(manager)
    return manager, injector


def count_requests(manager: Manager) -> Callable[[], int]:
    """Count the Manager's quorum requests from now on. Returns: a function that returns the count."""
    asked: list[int] = []  # the step of each request
    coordinator = manager._parts.shared.coordinator
    asks = coordinator.quorum

    def counted(request: RankRequest, timeout: timedelta) -> Plan | QuorumKey:
        asked.append(request.step)
        return asks(request, timeout)

    coordinator.quorum = counted  # type: ignore[method-assign]
    return lambda: len(asked)


def live(training: Callable[[Callable[[Event], None]], None], connection: Connection) -> None:
    """Run a trainer's life in its own process, and report its end, whatever the cause."""
    torch.set_num_threads(1)
    logging.getLogger("tft_ckpt").setLevel(logging.ERROR)
    lock = threading.Lock()  # faults strike on any thread

    def report(event: Event) -> None:
        with lock:
            connection.send(event)

    try:
        training(report)
    except Exception as error:
        report(Event("end", text=f"{type(error).__name__}: {error}"))
        os._exit(1)  # as after a traceback, because torch's own group may be in a collective that never ends
    report(Event("end"))


def join_own_group() -> tuple[int, int]:
    """Initialize torch's default group for this start of the replica group, and return rank and size."""
    group = init_group("cpu")
    return group.rank(), group.size()


def train(spec: Spec, connection: Connection) -> None:
    """Run the life of a language model trainer, in its own process."""
    os.environ.update(spec.environment)
    live(lambda report: _train(spec, connection, report), connection)


def _train(spec: Spec, connection: Connection, report: Callable[[Event], None]) -> None:
    rank, ranks = join_own_group()
    manager, injector = manager_with_faults(spec, report)
    requests = count_requests(manager)
    with manager:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
        training = Training(spec.settings, extend_mesh(manager, mesh))
        manager.register_state_dict_fn("model", training.model.load_state_dict, training.model.state_dict)
        manager.register_state_dict_fn("optimizer", training.adam.load_state_dict, training.adam.state_dict)
        injector.module(training.model)
        optimizer = Optimizer(manager, injector.optimizer(training.adam))
        report(Event("ready"))
        last: int | None = None
        while manager.current_step() < (last or spec.settings.steps):
            while connection.poll() or (last is None and manager.current_step() == spec.hold_at):
                match connection.recv():
                    case Fault() as fault:
                        injector.inject(fault)
                    case int(step):
                        last = step
            step = manager.current_step()
            training.set_learning_rate(step)
            optimizer.zero_grad()
            place = (manager.participating_rank() or 0) * ranks + rank
            training.backward(step, place, max(manager.num_participants(), 1) * ranks)
            error = manager.errored()
            optimizer.step()
            if manager.status().committed:
                lineage = manager.state_dict()["lineage"]
                state_digest = digest(local(training.model.state_dict()), local(training.adam.state_dict()))
                participants = manager.num_participants()
                report(Event("commit", manager.current_step(), lineage, state_digest, participants, requests()))
            else:
                report(Event("failed", manager.current_step(), text=str(error)))
        report(Event("loss", manager.current_step(), loss=training.validation_loss()))
    dist.destroy_process_group()


def local(value: Any) -> Any:
    """Return a state with each DTensor replaced by this process's part."""
    if isinstance(value, DTensor):
        return value.to_local()
    return {key: local(item) for key, item in value.items()} if isinstance(value, dict) else value


# --- the supervisor's view of them ---


class Trainer:
    """One process, and its events so far."""

    def __init__(self, process: ForkServerProcess, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.events: list[Event] = []

    @property
    def commits(self) -> dict[int, Event]:
        """Return its commits by step."""
        return {event.step: event for event in self.events if event.kind == "commit"}

    @property
    def step(self) -> int:
        """Return the step of its last commit."""
        return max(self.commits, default=0)

    @property
    def has_ended(self) -> bool:
        return self.connection.closed


class ReplicaGroup:
    """The processes of one replica group. `trainers` are those of its last start.

    Args:
        spawn: the fixture.
        spec: of each process. The environment is set here.
        ranks: number of processes.
        trainer: target of each process.
    """

    def __init__(self, spawn: Spawn, spec: Spec, ranks: int, trainer: Callable[[Spec, Connection], None]) -> None:
        self.name = spec.name
        self._spawn = spawn
        self._spec = spec
        self._ranks = ranks
        self._trainer = trainer
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
        self.starts = 0
        self.trainers: list[Trainer] = []
        self.all_trainers: list[tuple[int, Trainer]] = []  # with their ranks

    def start(self) -> None:
        """Start the group, or restart it."""
        self.starts += 1
        self.trainers = [self._start(rank) for rank in range(self._ranks)]
        self.all_trainers += enumerate(self.trainers)

    def _start(self, rank: int) -> Trainer:
        environment: dict[str, str] = {}
        if self._store is not None:
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self._ranks),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": self.name,
                "TORCHELASTIC_RESTART_COUNT": str(self.starts),
            }
        ours, theirs = multiprocessing.connection.Pipe()
        trainer = Trainer(self._spawn(self._trainer, replace(self._spec, environment=environment), theirs), ours)
        theirs.close()
        return trainer

    @property
    def has_finished(self) -> bool:
        """Return whether all its processes have ended as they were told."""
        return all(trainer.events[-1:] == [Event("end")] for trainer in self.trainers)

    def send(self, message: object) -> None:
        for trainer in self.trainers:
            with suppress(BrokenPipeError):  # it has ended, and is restarted
                trainer.connection.send(message)

    def close(self) -> None:
        """Release its store, which listens."""
        self._store = None


class Cluster:
    """Replica groups that train together. A group that ends is restarted.

    Args:
        spawn: the fixture.
        lighthouse: of the job.
        groups: number of groups.
        ranks: processes in every group, or in each.
        settings: the example's flags.
        hold_at: step at which all wait for the last step.
        trainer: target of each process: that of this file, or another with the same events.
        details: for that target.
    """

    def __init__(
        self,
        spawn: Spawn,
        lighthouse: LighthouseServer,
        *,
        groups: int,
        ranks: int | Sequence[int] = 1,
        settings: Settings = TINY,
        hold_at: int = FOR_EVER,
        trainer: Callable[[Spec, Connection], None] = train,
        details: Any = None,
    ) -> None:
        self.groups = [
            ReplicaGroup(spawn, Spec(str(lighthouse.address), name, settings, hold_at, details=details), size, trainer)
            for name, size in zip(NAMES, [ranks] * groups if isinstance(ranks, int) else ranks, strict=False)
        ]
        for group in self.groups:
            group.start()

    @property
    def trainers(self) -> list[Trainer]:
        """Return the trainers of the last start of each group."""
        return [trainer for group in self.groups for trainer in group.trainers]

    @property
    def step(self) -> int:
        """Return the highest step that a trainer has reported."""
        return max(trainer.step for trainer in self.trainers)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Receive events, and restart ended groups, until the condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"not within {PATIENCE_S:g} s: {what}; {self.history()}"
            self._take_in(left_s)
            for group in self.groups:
                if all(trainer.has_ended for trainer in group.trainers) and not group.has_finished:
                    assert all(trainer.commits for trainer in group.trainers), f"ended at once; {self.history()}"
                    group.start()

    def _take_in(self, timeout_s: float) -> None:
        by_connection = {trainer.connection: trainer for trainer in self.trainers if not trainer.has_ended}
        for connection in multiprocessing.connection.wait(list(by_connection), timeout_s):
            assert isinstance(connection, Connection)
            try:
                by_connection[connection].events.append(connection.recv())
            except (EOFError, ConnectionResetError):
                connection.close()

    def are_together(self, after: int = 0, steps: int = 2) -> bool:
        """Return whether all groups have committed together, for `steps` steps after step `after`."""

        def together(trainer: Trainer) -> bool:
            last = list(trainer.commits.values())[-steps:]
            return len(last) == steps and all(
                each.participants == len(self.groups) and each.step > after for each in last
            )

        return all(together(trainer) for trainer in self.trainers)

    def until_together(self, after: int = 0, unless_at: int = FOR_EVER) -> None:
        """Wait until they have, or until a trainer has reached the step `unless_at`."""
        self.until(
            lambda: self.step >= unless_at or self.are_together(after), f"all commit together after step {after}"
        )

    def until_it_stands(self, after: int = 0) -> None:
        """Wait until all groups commit together, and no rank has sent a request for the last step."""

        def stands() -> bool:
            last = [list(trainer.commits.values())[-2:] for trainer in self.trainers]
            return self.are_together(after) and all(before.requests == step.requests for before, step in last)

        self.until(stands, f"all commit together after step {after}, and ask nobody")

    def until_step(self, step: int) -> None:
        """Wait until a trainer has committed that step."""
        self.until(lambda: self.step >= step, f"somebody commits step {step}")

    def until_others_go_on(self, group: ReplicaGroup, steps: int = 2) -> None:
        """Wait until the other groups have committed that many further steps."""
        others = [trainer for each in self.groups if each is not group for trainer in each.trainers]
        last = self.step + steps
        self.until(lambda: all(trainer.step >= last for trainer in others), f"all but {group.name} go on to {last}")

    def strike(self, group: ReplicaGroup, rank: int, action: Action, place: Place, **details: Any) -> None:
        """Inject a fault into one rank of a group, and wait until it strikes."""
        trainer, seen = group.trainers[rank], len(group.trainers[rank].events)
        fault = Fault(action=action, place=place, replica=group.name, rank=rank, **details)
        for asked in [*what_leads_to(fault), fault]:
            trainer.connection.send(asked)
        if place is Place.SERVING:
            # A group must heal: another group's state is declared torn.
            other = next(each for each in self.groups if each is not group)
            other.trainers[0].connection.send(Fault(action=Action.FAIL, place=Place.OPTIMIZER, replica=other.name))
        self.until(
            lambda: any(each.kind == "struck" and each.text == fault.describe() for each in trainer.events[seen:]),
            fault.describe(),
        )

    def until_stopped(self, process: psutil.Process) -> None:
        """Wait until SIGSTOP has arrived, which no event reports."""
        deadline = time.monotonic() + PATIENCE_S
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline, f"process {process.pid} does not stop; {self.history()}"
            time.sleep(0.01)

    def kill(self, trainer: Trainer) -> None:
        """Kill a trainer with kill -9, in any phase."""
        trainer.process.kill()
        self.until(lambda: trainer.has_ended, "who was killed has ended")

    def finish(self, last: int | None = None) -> list[float]:
        """Stop all trainers at one step, and check that they have. Returns: the final losses of each process."""
        last = last or self.step + MARGIN_STEPS
        self.until(lambda: all(trainer.events for trainer in self.trainers), "all are ready")
        for group in self.groups:
            group.send(last)
        for step in range(self.step, last, MARGIN_STEPS):  # each wait within the patience for one wait
            self.until_step(step)
        self.until(lambda: all(trainer.has_ended for trainer in self.trainers), "all end")
        for trainer in self.trainers:
            assert trainer.events[-1] == Event("end"), self.history()
            assert trainer.step == last, self.history()
            trainer.process.join(PATIENCE_S)
            assert trainer.process.exitcode == 0
        # The first to end is gone. A late one may lose its last reduction by that, and commit that step without it.
        assert len({trainer.commits[last - 1].lineage for trainer in self.trainers}) == 1, self.history()
        self.check_digests()
        return [trainer.events[-2].loss for trainer in self.trainers]

    def check_digests(self) -> int:
        """Check that equal steps after equal commits have equal states. Returns: number of such commits by several."""
        seen: dict[tuple[int, int, int], dict[str, str]] = {}
        for group in self.groups:
            for rank, trainer in group.all_trainers:
                for event in trainer.events:
                    if event.kind == "commit":
                        digests = seen.setdefault((rank, event.step, event.lineage), {})
                        digests[f"{group.name}, process {trainer.process.pid}"] = event.digest
        for (rank, step, _), digests in seen.items():
            assert len(set(digests.values())) == 1, f"rank {rank}, step {step}: {digests}"
        return sum(len(digests) > 1 for digests in seen.values())

    def history(self) -> str:
        """Return the last events of all trainers, ended ones included."""
        return "; ".join(
            f"{group.name}/{rank}: {[f'{each.kind} {each.step} {each.text}'.strip() for each in trainer.events[-3:]]}"
            for group in self.groups
            for rank, trainer in group.all_trainers[-3 * len(group.trainers) :]
        )

    def close(self) -> None:
        for group in self.groups:
            group.close()


def what_leads_to(fault: Fault) -> list[Fault]:
    """Return the faults that must happen first, so that the fault's place is reached."""
    before = {Place.CONFIGURE: Place.REDUCTION, Place.HEALING: Place.OPTIMIZER}.get(fault.place)
    if before is None:
        return []
    return [Fault(action=Action.FAIL, place=before, replica=fault.replica, rank=fault.rank)]


@contextmanager
def training_together(spawn: Spawn, **details: Any) -> Iterator[Cluster]:
    """Yield a Cluster with these details and a lighthouse, after its first common commits."""
    with LighthouseServer(
        "127.0.0.1:0", join_timeout_ms=JOIN_TIMEOUT_MS, heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS
    ) as lighthouse:
        cluster = Cluster(spawn, lighthouse, **details)
        try:
            cluster.until_together()
            yield cluster
        finally:
            cluster.close()
