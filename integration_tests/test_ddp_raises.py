"""One replica's backward pass raises, which costs a step everywhere, or it discards its batch, which costs none."""

from __future__ import annotations

import multiprocessing.connection
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch

from integration_tests.conftest import Spawn
from tft_algos import DistributedDataParallel, Manager, Optimizer, PureDistributedDataParallel
from tft_algos.testing import digest
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

PATIENCE_S = 40.0
TIMEOUT = timedelta(seconds=120)  # nothing here may wait for it
LAST_STEP = 30

Told = tuple[str, int, str, int]


def train(lighthouse: str, name: str, kind: str, reports: bool, connection: Connection) -> None:
    """Train and report every step.

    On "raise", the next backward pass raises. On a number, the replica ends after that step. On "throw away", it begins
    its next step and continues with another batch.
    """
    torch.set_num_threads(1)
    torch.manual_seed(sum(name.encode()))
    layers = [torch.nn.Linear(16, 16) for _ in range(6)]
    module = torch.nn.Sequential(*layers)
    with Manager(
        ProcessGroupGloo(),
        module.load_state_dict,
        module.state_dict,
        replica_id=name,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
    ) as manager:
        model: torch.nn.Module = (
            PureDistributedDataParallel(manager, module)
            if kind == "pure"
            else DistributedDataParallel(
                manager, module, bucket_cap_mb=0.0005, find_unused_parameters=kind == "find unused"
            )
        )
        optimizer = Optimizer(manager, torch.optim.SGD(module.parameters(), lr=0.01))
        raises, throws_away, last = False, False, None

        def maybe(gradient: torch.Tensor) -> torch.Tensor:
            if raises:
                raise MemoryError("no room")
            return gradient

        layers[3].weight.register_hook(maybe)
        while last is None or manager.current_step() < last:
            raises = throws_away = False
            if connection.poll():
                match connection.recv():
                    case int(step):
                        last = step
                        continue
                    case "raise":
                        raises = True
                    case "throw away":
                        throws_away = True
            optimizer.zero_grad()
            if throws_away:
                continue
            try:
                model(torch.randn(2, 16)).square().mean().backward()
            except MemoryError as error:
                if not reports:
                    connection.send(("failed", manager.current_step(), "", 0))
                    continue
                manager.report_error(error)
            happened = "committed" if optimizer.step() else "failed"
            connection.send((happened, manager.current_step(), digest(module.state_dict()), manager.num_participants()))
    connection.send(("ended", manager.current_step(), "", 0))


class Replica:
    """The test's end of one replica."""

    def __init__(self, spawn: Spawn, lighthouse: str, name: str, kind: str, reports: bool) -> None:
        self.connection, theirs = multiprocessing.connection.Pipe()
        self.process = spawn(train, lighthouse, name, kind, reports, theirs)
        theirs.close()
        self.told: list[Told] = []

    @property
    def has_ended(self) -> bool:
        return bool(self.told) and self.told[-1][0] == "ended"

    def commits(self, participants: int, since: int = 0) -> int:
        return sum(told[0] == "committed" and told[3] == participants for told in self.told[since:])


@pytest.fixture
def lighthouse() -> Iterator[str]:
    with LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=5_000, heartbeat_timeout_ms=3_000) as server:
        yield str(server.address)


@pytest.mark.in_parts
@pytest.mark.parametrize(
    ("kind", "reports"), [("buckets", True), ("find unused", True), ("pure", True), ("buckets", False)]
)
def test_the_step_is_lost_and_the_next_ones_commit_together(
    spawn: Spawn, lighthouse: str, kind: str, reports: bool
) -> None:
    replicas = [Replica(spawn, lighthouse, name, kind, reports) for name in ("a", "b")]

    def until(what: str, *, count: int = 0, since: tuple[int, int] = (0, 0)) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not all(
            replica.commits(2, start) >= count and (what != "end" or replica.has_ended)
            for replica, start in zip(replicas, since, strict=True)
        ):
            left = deadline - time.monotonic()
            assert left > 0, f"not within {PATIENCE_S:g} s: {what}; {[replica.told[-3:] for replica in replicas]}"
            for replica in replicas:
                if not replica.has_ended and replica.connection.poll(0.01):
                    replica.told.append(replica.connection.recv())

    until("both commit together", count=5)
    start = (len(replicas[0].told), len(replicas[1].told))
    replicas[1].connection.send("raise")
    until("one has failed and both commit together again", count=12, since=start)
    assert "failed" in [told[0] for told in replicas[1].told[start[1] :]]
    until("that step is far behind", count=12, since=(len(replicas[0].told), len(replicas[1].told)))
    start = (len(replicas[0].told), len(replicas[1].told))
    replicas[1].connection.send("throw away")
    until("both commit together as before", count=12, since=start)
    assert not any("failed" in [told[0] for told in r.told[since:]] for r, since in zip(replicas, start, strict=True))
    last = max(replica.told[-1][1] for replica in replicas) + LAST_STEP
    for replica in replicas:
        replica.connection.send(last)
    until("end")
    digests: dict[int, set[str]] = {}
    for replica in replicas:
        replica.process.join(PATIENCE_S)
        for happened, step, state, _ in replica.told:
            if happened == "committed":
                digests.setdefault(step, set()).add(state)
    assert all(len(each) == 1 for each in digests.values())
