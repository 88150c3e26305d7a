"""The divergence guard, in real processes: a diverged replica is found, named and healed, or stopped."""

from __future__ import annotations

import logging
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from integration_tests.conftest import Spawn
from tft_algos import DistributedDataParallel, Manager, Optimizer, StateDivergedError
from tft_algos.testing import digest
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

PATIENCE_S = 50.0
EVERY = 4
MARGIN_STEPS = 60  # margin so that no replica has passed the step at which all must stop


@dataclass(frozen=True)
class Spec:
    """The settings of a replica.

    Args:
        lighthouse: address.
        name: of the replica group.
        steps: last step. None: the test gives it.
        learning_rate: at its start.
        spoil: what is spoiled after five commits: "lr", or "bit": the last bit of one weight.
        cures: its load function loads the learning rate too.
        environment: of a launcher.
    """

    lighthouse: str
    name: str
    steps: int | None = 30
    learning_rate: float = 0.01
    spoil: str = ""
    cures: bool = True
    environment: dict[str, str] = field(default_factory=dict)


class Telling(logging.Handler):
    """A handler that sends each logged error as text."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(logging.ERROR)
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        self._connection.send(record.getMessage())


def train(spec: Spec, connection: Connection) -> None:
    """Run the life of a trainer. It reports (step, digest) of each commit, each error as text, and its end."""
    torch.set_num_threads(1)
    os.environ.update(spec.environment)
    logging.getLogger("tft_algos.manager").addHandler(Telling(connection))
    rank = int(spec.environment.get("RANK", "0"))
    torch.manual_seed(sum(spec.name.encode()) + 1000 * rank)
    model = torch.nn.Linear(16, 16)
    adam = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate)

    def load(state: dict[str, Any]) -> None:
        kept = adam.param_groups[0]["lr"]
        adam.load_state_dict(state)
        if not spec.cures:
            adam.param_groups[0]["lr"] = kept

    try:
        with Manager(
            ProcessGroupGloo(),
            replica_id=spec.name,
            lighthouse_addr=spec.lighthouse,
            hostname="localhost",
            timeout=timedelta(seconds=20),
            check_state_every=EVERY,
        ) as manager:
            manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
            manager.register_state_dict_fn("optimizer", load, adam.state_dict)
            manager.register_state_dict_fn("place", lambda _: None, lambda: {"name": spec.name}, compared=False)
            ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adam)
            last = spec.steps
            while last is None or manager.current_step() < last:
                if connection.poll():
                    last = connection.recv()
                before = manager.current_step()
                optimizer.zero_grad()
                ddp(torch.randn(4, 16)).square().mean().backward()
                optimizer.step()
                step = manager.current_step()
                if before < step == 5 and spec.spoil == "lr":
                    adam.param_groups[0]["lr"] *= 2
                elif before < step == 5 and spec.spoil == "bit":
                    model.weight.detach().view(torch.int32)[3, 3] ^= 1
                if step > before:
                    connection.send((step, digest(model.state_dict(), adam.state_dict())))
    except StateDivergedError as error:
        connection.send(error.paths)
        connection.send(f"StateDivergedError: {error}")
    connection.send(None)


class Replica:
    """The test's end of a trainer."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.digests: dict[int, str] = {}
        self.errors: list[str] = []
        self.paths: tuple[str, ...] | None = None
        self.ended = False

    def take_in(self) -> None:
        match self.connection.recv():
            case None:
                self.ended = True
            case (int(step), str(text)):
                self.digests[step] = text
            case str(error):
                self.errors.append(error)
            case paths:
                self.paths = paths


Run = Callable[..., list[Replica]]


@pytest.fixture
def run(spawn: Spawn) -> Iterator[Run]:
    """Return `run(*specs, min_replicas=3)`, which trains the replicas to their ends.

    If the first has no last step, the last is a newcomer. It starts when all others train, and they end when it has
    ended.
    """
    lighthouses: list[LighthouseServer] = []

    def start(*specs: dict[str, Any], min_replicas: int = 2) -> list[Replica]:
        lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=min_replicas, join_timeout_ms=20_000)
        lighthouses.append(lighthouse)
        replicas: list[Replica] = []
        deadline = time.monotonic() + PATIENCE_S

        def take_in(waiting: list[Replica]) -> None:
            by_connection = {each.connection: each for each in waiting}
            ready = multiprocessing.connection.wait(list(by_connection), max(deadline - time.monotonic(), 0))
            assert ready, [(each.digests, each.errors) for each in replicas]
            for connection in ready:
                by_connection[connection].take_in()  # type: ignore[index]

        joins_later = specs[0].get("steps", 0) is None
        for spec in specs:
            while joins_later and spec is specs[-1] and not all(each.digests for each in replicas):
                take_in(replicas)
            ours, theirs = multiprocessing.connection.Pipe()
            spawn(train, Spec(str(lighthouse.address), **spec), theirs)
            theirs.close()
            replicas.append(Replica(ours))
        told = False
        while waiting := [each for each in replicas if not each.ended]:
            take_in(waiting)
            if joins_later and replicas[-1].ended and not told:
                told = True
                last = max(max(each.digests) for each in replicas) + MARGIN_STEPS
                for each in replicas[:-1]:
                    each.connection.send(last)
        return replicas

    yield start
    for lighthouse in lighthouses:
        lighthouse.shutdown()


def assert_equal_digests(replicas: list[Replica], steps: range) -> None:
    for step in steps:
        assert len({replica.digests[step] for replica in replicas}) == 1, f"step {step}"


@pytest.mark.in_parts(always=["bit"])
@pytest.mark.parametrize("spoil", ["lr", "bit"])
def test_who_has_gone_astray_is_named_with_what_differs_and_healed(run: Run, spoil: str) -> None:
    replicas = run(*({"name": name, "spoil": spoil if name == "b" else ""} for name in "abc"), min_replicas=3)
    first, astray, last = replicas
    assert_equal_digests([first, last], range(1, 31))
    # The spoiling after step 5 is found at the next multiple of four. The replicas are equal from the following commit
    # on.
    assert all(astray.digests[step] != first.digests[step] for step in range(6, 9))
    assert_equal_digests(replicas, range(9, 31))
    (error,) = astray.errors
    assert "the state of replica b:" in error
    assert "at step 8 differs from that of " in error
    assert error.endswith("this replica heals")
    if spoil == "lr":
        assert "optimizer.param_groups.0.lr: 0.02 here, 0.01 at the source" in error
    else:
        assert "model.weight: " in error
        assert "param_groups" not in error
    assert "place" not in error
    assert (first.errors, last.errors) == ([], [])


@pytest.mark.in_parts
def test_a_newcomer_that_kept_its_own_learning_rate_is_named_and_stopped(run: Run) -> None:
    """The first check after the healing finds what the load function leaves out. At the second check the newcomer
    ends."""
    newcomer_state = {"learning_rate": 0.5, "cures": False}
    first, second, newcomer = run(
        *({"name": name, "steps": None} for name in "ab"), {"name": "c", "steps": None, **newcomer_state}
    )
    assert_equal_digests([first, second], range(max(newcomer.digests), max(first.digests)))
    found, end = newcomer.errors
    for error in (found, end):
        assert "the state of replica c:" in error
        assert "optimizer.param_groups.0.lr: 0.5 here, 0.01 at the source" in error
    assert found.endswith("this replica heals")
    assert end.startswith("StateDivergedError: ")
    assert end.endswith(
        "the last healing did not fix this, because load_state_dict did not restore the received values "
        "(optimizer.param_groups.0.lr: 0.5 here, 0.01 at the source); fix load_state_dict"
    )
    at_steps = [int(error.partition("at step ")[2].split()[0]) for error in (found, end)]
    assert at_steps == [at_steps[0], at_steps[0] + EVERY]
    assert max(newcomer.digests) == at_steps[1]
    assert newcomer.paths is not None
    assert "optimizer.param_groups.0.lr" in newcomer.paths
    assert (first.errors, second.errors) == ([], [])


@pytest.mark.in_parts
def test_a_group_of_two_ranks_is_compared_and_healed_whole(run: Run) -> None:
    stores = {name: TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for name in "ab"}
    replicas = run(
        *(
            {
                "name": name,
                "spoil": "bit" if (name, rank) == ("b", 1) else "",
                "environment": {
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "localhost",
                    "MASTER_PORT": str(stores[name].port),
                },
            }
            for name in "ab"
            for rank in range(2)
        )
    )
    for rank in range(2):
        assert_equal_digests([replicas[rank], replicas[2 + rank]], range(9, 31))
    sound, spoilt = replicas[2:]
    assert "rank 0, at step 8 differs from that of a:" in sound.errors[0]
    assert "(no difference on this rank); this replica heals" in sound.errors[0]
    assert "model.weight: " in spoilt.errors[0]
    assert [len(replica.errors) for replica in replicas] == [0, 0, 1, 1]
