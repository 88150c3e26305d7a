"""Durable checkpoints of real jobs: writers that are killed anywhere, jobs that resume with other numbers of groups."""

from __future__ import annotations

import multiprocessing.connection
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from integration_tests.conftest import Kill, Launch, Spawn
from integration_tests.scripts import SECRET, WATCHED
from tft_algos import DistributedDataParallel, Manager, Optimizer
from tft_algos.durable import REMOVING, WRITING, DurableCheckpoint
from tft_algos.errors import DurableCheckpointError
from tft_algos.testing import digest
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

PATIENCE_S: Final = 50.0
EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "durable_checkpoint.py"


# --- a writer that is killed anywhere --------------------------------------------------------------------------------

CALLS: Final = frozenset(
    {
        "open",
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.listdir",
        "os.scandir",
        "shutil.rmtree",
        "fcntl.flock",
    }
)
MOST_CALLS: Final = 400


class Committed(SimpleNamespace):
    """The part of a Manager that a checkpoint uses, after the commit of a step."""

    def current_step(self) -> int:
        return int(self.attempt)

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(
            group_rank=self.rank,
            group_world_size=self.world_size,
            step=self.attempt,
            attempt=self.attempt,
            committed=True,
            is_torn=self.torn,
            participating_rank=0,
        )

    def participating_rank(self) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.attempt, "batches_committed": self.attempt, "lineage": "0" * 16}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.attempt = state["step"]


def checkpoint_of(directory: Path, step: int) -> tuple[DurableCheckpoint, torch.nn.Linear]:
    """Return a checkpoint and a model at that step, whose weights all equal that number."""
    model = torch.nn.Linear(8, 8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(step))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    committed: Any = Committed(
        replica_id=f"writer {os.getpid()}",
        attempt=step,
        torn=False,
        rank=0,
        world_size=1,
    )
    return DurableCheckpoint(committed, directory, model=model, optimizers=optimizer, keep=2), model


def die_at(number: int) -> None:
    """Count this process's file operations from now on, and kill it with SIGKILL at the start of number `number`."""
    count = 0

    def reached(what: str) -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def audited(event: str, _: object) -> None:
        if event in CALLS:
            reached(event)

    fsync, create_stream = os.fsync, FileSystem.create_stream

    def counted_fsync(fd: Any) -> None:
        reached("fsync")
        fsync(fd)

    @contextmanager
    def counted_stream(self: FileSystem, path: Any, mode: str) -> Iterator[Any]:
        with create_stream(self, path, mode) as stream:
            write = stream.write

            class Proxy:
                def __getattr__(self, name: str) -> Any:
                    return getattr(stream, name)

                def write(self, data: Any) -> Any:
                    reached("write")
                    written = write(data)
                    stream.flush()
                    return written

            yield Proxy()

    os.fsync = counted_fsync
    FileSystem.create_stream = counted_stream  # type: ignore[method-assign]
    sys.addaudithook(audited)


def write_and_die(directory: Path, stride: int, connection: Connection) -> None:
    """Fork one writer after another, and let each die some calls later than the one before, until one lives."""
    torch.set_num_threads(1)
    first, _ = checkpoint_of(directory, 1)
    first.save()
    connection.send((0, 0, 1))
    for turn, number in enumerate(range(1, MOST_CALLS, stride), start=1):
        step = turn + 1
        child = os.fork()
        if child == 0:
            checkpoint, _ = checkpoint_of(directory, step)
            die_at(number)
            checkpoint.save()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        reader, model = checkpoint_of(directory, 0)
        loaded = reader.load() or 0
        assert all(bool((parameter == loaded).all()) for parameter in model.parameters())
        connection.send((step, status, loaded))
        if status == 0:
            return


@pytest.mark.in_parts
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_a_writer_killed_at_any_call_leaves_a_whole_checkpoint(spawn: Spawn, tmp_path: Path, stride: int) -> None:
    ours, theirs = multiprocessing.connection.Pipe()
    process = spawn(write_and_die, tmp_path, stride, theirs)
    theirs.close()
    last, written, num_killed = 0, 0, 0
    status = -1
    while status != 0:
        assert ours.poll(PATIENCE_S)
        step, status, loaded = ours.recv()
        if step == 0:
            status, last = -1, loaded
            continue
        # It is either the checkpoint that was being written, or the one before it.
        assert loaded in (last, step), f"killed while it wrote step {step}"
        written += loaded == step
        last = loaded
        num_killed += status == signal.SIGKILL
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    assert num_killed > 30
    assert 1 <= written < num_killed
    assert len(list(tmp_path.iterdir())) == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((WRITING, REMOVING))]


# --- what one rank alone finds out -----------------------------------------------------------------------------------


def save_as_one_of_two(directory: Path, rank: int, port: int, what: str, connection: Connection) -> None:
    """Save as a rank, after rank 1 alone can't give its state, or is torn."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE_S))
    is_odd = rank == 1

    def state() -> dict[str, int]:
        if is_odd and what == "raises":
            raise OSError("no such place")
        return {"seen": 3}

    committed: Any = Committed(
        replica_id="both",
        attempt=4,
        torn=is_odd and what == "torn",
        rank=rank,
        world_size=2,
    )
    others: Any = {"counter": SimpleNamespace(state_dict=state, load_state_dict=lambda _: None)}
    checkpoint = DurableCheckpoint(committed, directory, model=torch.nn.Linear(8, 8), others=others)
    for _ in range(2):
        try:
            connection.send(str(checkpoint.save()))
        except DurableCheckpointError as error:
            connection.send(str(error))
        is_odd = committed.torn = False
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("torn", ("None", "None")),
        ("raises", ("another rank of replica both could not return its state of step 4", "OSError: no such place")),
    ],
)
def test_what_one_rank_alone_finds_out_keeps_all_from_saving(
    spawn: Spawn, tmp_path: Path, what: str, says: tuple[str, str]
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heard: list[Connection] = []
    for rank in range(2):
        ours, theirs = multiprocessing.connection.Pipe()
        spawn(save_as_one_of_two, tmp_path, rank, store.port, what, theirs)
        theirs.close()
        heard.append(ours)
    for connection, words in zip(heard, says, strict=True):
        assert connection.poll(PATIENCE_S)
        assert words in connection.recv()
    for connection in heard:
        assert connection.poll(PATIENCE_S)
        assert connection.recv() == str(tmp_path / "step-4"), "the next one is whole"
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]


# --- jobs that end and go on -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """The settings of a rank.

    Args:
        lighthouse: address.
        name: of the replica group. It seeds the weights.
        directory: of the checkpoints. None: this group can't see them.
        last: number of committed steps at which it ends. None: it trains until it is killed.
        sharded: the model is FSDP2's, over the ranks of the group.
        environment: of a launcher.
    """

    lighthouse: str
    name: str
    directory: Path | None
    last: int | None
    sharded: bool = False
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Told:
    """The reports of a rank: the digest of its whole state at each step that it resumed, healed to, or committed."""

    process: Any
    connection: Connection
    resumed: dict[int, str] = field(default_factory=dict)
    healed: dict[int, str] = field(default_factory=dict)
    commits: dict[int, str] = field(default_factory=dict)
    wrote: dict[int, str] = field(default_factory=dict)


def whole(state: Any) -> Any:
    """Return a state in which each DTensor is a whole tensor. All ranks call this."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def train(spec: Spec, connection: Connection) -> None:
    """Run the life of a rank: resume if there is a checkpoint, train, write."""
    torch.set_num_threads(1)
    os.environ.update(spec.environment)
    torch.manual_seed(sum(spec.name.encode()))
    model = torch.nn.Linear(16, 16)
    if spec.environment:
        dist.init_process_group("gloo")
    if spec.sharded:
        fully_shard(model, mesh=DeviceMesh("cpu", torch.arange(dist.get_world_size())))
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 7, gamma=0.9)
    counter = Counter()

    def state() -> str:
        parts = (model.state_dict(), adam.state_dict()["state"], scheduler.state_dict(), counter.state_dict())
        return digest(*(whole(part) for part in parts), adam.param_groups[0]["lr"])

    with Manager(
        ProcessGroupGloo(),
        replica_id=spec.name,
        lighthouse_addr=spec.lighthouse,
        hostname="localhost",
        timeout=timedelta(seconds=20),
    ) as manager:

        def load_last(saved: dict[str, Any]) -> None:
            scheduler.load_state_dict(saved)
            connection.send(("healed", manager.current_step(), state()))

        manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
        manager.register_state_dict_fn("optimizer", adam.load_state_dict, adam.state_dict)
        manager.register_state_dict_fn("counter", counter.load_state_dict, counter.state_dict)
        manager.register_state_dict_fn("scheduler", load_last, scheduler.state_dict)
        ddp = model if spec.sharded else DistributedDataParallel(manager, model)
        optimizer = Optimizer(manager, adam)
        checkpoint: DurableCheckpoint | None = None
        if spec.directory is not None:
            others: dict[str, Any] = {"scheduler": scheduler, "counter": counter}
            checkpoint = DurableCheckpoint(
                manager, spec.directory, model=model, optimizers=optimizer, others=others, every=5
            )
            resumed = checkpoint.load()
            if resumed is not None:
                connection.send(("resumed", resumed, state()))
        while spec.last is None or manager.current_step() < spec.last:
            before = manager.current_step()
            optimizer.zero_grad()
            ddp(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            step = manager.current_step()
            if step > before:
                scheduler.step()
                counter.seen += manager.num_participants()
                connection.send(("commits", step, state()))
            if checkpoint is not None and checkpoint.save_if_due():
                connection.send(("wrote", step, state()))
    if spec.environment:
        dist.destroy_process_group()


class Counter:
    """Another piece of state that is equal everywhere."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Jobs:
    """Jobs of ranks, each job with a fresh lighthouse, and the reports of the ranks."""

    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        self._lighthouse: LighthouseServer | None = None
        self._stores: list[TCPStore] = []

    def lighthouse(self, min_replicas: int) -> None:
        """Start a fresh lighthouse, which does not know earlier ranks."""
        self.close()
        self._lighthouse = LighthouseServer(
            "127.0.0.1:0", min_replicas=min_replicas, join_timeout_ms=20_000, heartbeat_timeout_ms=3_000
        )

    def start(self, name: str, directory: Path | None, last: int | None, **more: Any) -> Told:
        assert self._lighthouse is not None
        ours, theirs = multiprocessing.connection.Pipe()
        spec = Spec(str(self._lighthouse.address), name, directory, last, **more)
        told = Told(self._spawn(train, spec, theirs), ours)
        theirs.close()
        return told

    def start_group(self, name: str, directory: Path, last: int, num_ranks: int) -> list[Told]:
        """Start a group of several ranks, sharded over them."""
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._stores.append(store)
        environment = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        ranks = [environment | {"RANK": str(rank)} for rank in range(num_ranks)]
        return [self.start(name, directory, last, sharded=True, environment=each) for each in ranks]

    def until(self, told: list[Told], condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            open_ones = {each.connection: each for each in told if not each.connection.closed}
            ready = multiprocessing.connection.wait(list(open_ones), max(deadline - time.monotonic(), 0))
            assert ready, f"not within {PATIENCE_S:g} s: {what}; {[sorted(each.commits)[-2:] for each in told]}"
            for connection in ready:
                each = open_ones[connection]  # type: ignore[index]
                try:
                    kind, step, text = each.connection.recv()
                except (EOFError, ConnectionResetError):
                    each.connection.close()
                    continue
                getattr(each, kind)[step] = text

    def finish(self, *told: Told) -> None:
        self.until(list(told), lambda: all(each.connection.closed for each in told), "all end")
        for each in told:
            each.process.join(PATIENCE_S)
            assert each.process.exitcode == 0
        for step in range(max(min(each.commits) for each in told), max(told[0].commits) + 1):
            assert len({each.commits[step] for each in told if step in each.commits}) == 1, f"step {step}"

    def close(self) -> None:
        self._stores.clear()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


@pytest.fixture
def jobs(spawn: Spawn) -> Iterator[Jobs]:
    made = Jobs(spawn)
    yield made
    made.close()


@pytest.mark.in_parts
def test_two_groups_end_three_go_on_and_then_one(jobs: Jobs, tmp_path: Path) -> None:
    """Groups that see the directory resume without healing. A group that does not see it heals from them."""
    jobs.lighthouse(2)
    two = [jobs.start(name, tmp_path, 20) for name in "ab"]
    jobs.finish(*two)
    # One of them wrote all: the participant with the smallest replica id.
    assert (set(two[0].wrote), set(two[1].wrote)) == ({5, 10, 15, 20}, set())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-15", "step-20"]

    jobs.lighthouse(3)
    three = [jobs.start("b", tmp_path, 40), jobs.start("c", tmp_path, 40), jobs.start("z", None, 40)]
    jobs.finish(*three)
    for each in three[:2]:
        assert each.resumed == {20: two[0].commits[20]}
        assert (each.healed, min(each.commits)) == ({}, 21)
    assert three[2].resumed == {}
    assert three[2].healed.popitem()[1] == two[0].commits[20]

    jobs.lighthouse(1)
    one = jobs.start("d", tmp_path, 45)
    jobs.finish(one)
    assert one.resumed == {40: three[0].commits[40]}
    assert set(one.commits) == set(range(41, 46))


def test_when_the_elected_writer_dies_another_is_elected(jobs: Jobs, tmp_path: Path, kill: Kill) -> None:
    jobs.lighthouse(1)
    first = jobs.start("a", tmp_path, None)
    jobs.until([first], lambda: bool(first.wrote), "the first writes")
    second = jobs.start("b", tmp_path, None)
    both = [first, second]
    jobs.until(both, lambda: len(set(first.wrote) & set(second.commits)) > 2, "both train, and the first writes")
    assert second.wrote == {}
    kill(first.process.pid)
    jobs.until(both, lambda: len(second.wrote) > 2, "the second writes")
    again = jobs.start("a", tmp_path, None)
    everybody = [second, again]
    jobs.until(everybody, lambda: len(again.wrote) > 1, "the first is back, and writes again")
    # It resumed what the second had written. The job was ahead of that by then, or at the same step.
    (resumed,) = again.resumed
    assert again.resumed[resumed] == second.commits[resumed]
    for step in set(again.commits) & set(second.commits):
        assert again.commits[step] == second.commits[step], f"step {step}"


@pytest.mark.in_parts
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
def test_a_sharded_group_goes_on_with_another_number_of_ranks(
    jobs: Jobs, tmp_path: Path, before: int, after: int
) -> None:
    jobs.lighthouse(1)
    first = jobs.start_group("a", tmp_path, 5, before)
    jobs.finish(*first)
    jobs.lighthouse(1)
    again = jobs.start_group("b", tmp_path, 7, after)
    jobs.finish(*again)
    for each in again:
        assert each.resumed == {5: first[0].commits[5]}
        assert set(each.commits) == {6, 7}


# --- the example -----------------------------------------------------------------------------------------------------


@contextmanager
def lighthouse_of_one() -> Iterator[dict[str, str]]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1, token=SECRET) as lighthouse:
        yield {"TFT_LIGHTHOUSE": str(lighthouse.address), "TFT_TOKEN": SECRET}


def printed(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 0, output
    return output


@pytest.mark.in_parts
@pytest.mark.timeout(120)  # seven processes import torch one after the other
def test_the_example_resumes_what_it_saved_under_torchrun_too(launch: Launch, tmp_path: Path) -> None:
    alone = [sys.executable, WATCHED, str(EXAMPLE), "--every", "10"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *alone[1:]]
    with lighthouse_of_one() as environment:
        output = printed(launch([*alone, "20"], env=environment, cwd=tmp_path))
    assert "resumed step None" in output
    assert "step 20 participants 1" in output
    with lighthouse_of_one() as environment:
        output = printed(launch([*torchrun, "30"], env=environment, cwd=tmp_path))
    assert len(re.findall("resumed step 20(?! )", output)) == 2  # two processes may share a line, and the log goes on
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-20", "step-30"]


@pytest.mark.in_parts
@pytest.mark.timeout(60)
def test_a_replica_group_of_no_number_is_refused_in_one_sentence(launch: Launch, tmp_path: Path) -> None:
    process = launch([sys.executable, str(EXAMPLE)], env={"REPLICA_GROUP_ID": "x"}, cwd=tmp_path)
    output, _ = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 2
    assert output == "durable_checkpoint.py: error: argument --replica_group_id: invalid int value: 'x'\n"
