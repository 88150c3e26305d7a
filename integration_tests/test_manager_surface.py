"""Single calls of Managers in separate processes, in the order of the test."""

from __future__ import annotations

import logging
import multiprocessing.connection
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final

import pytest
import torch

from integration_tests.conftest import Spawn
from tft_algos import Manager
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

PATIENCE_S: Final = 50.0


class Last(logging.Handler):
    """A handler that keeps the last record of a Manager's quorums."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: dict[str, Any] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.facts = vars(record)


def obey(lighthouse: str, name: str, settings: dict[str, Any], connection: Connection) -> None:
    """Perform orders, one call after the other, and report the result or the error of each."""
    torch.set_num_threads(1)
    weights = torch.zeros(1)
    with Manager(
        ProcessGroupGloo(),
        lambda state: weights.copy_(state["weights"]),
        lambda: {"weights": weights},
        replica_id=name,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        **settings,
    ) as manager:
        last = Last()
        manager.quorum_logger.addHandler(last)
        manager.quorum_logger.setLevel(logging.DEBUG)
        while (order := connection.recv()) is not None:
            call, arguments = order
            try:
                if call == "allreduce":
                    tensor = torch.full((1,), arguments.pop("value"))
                    answer: Any = (manager.allreduce(tensor, **arguments).wait(), tensor.item())
                elif call == "errors":
                    answer = [type(error).__name__ for error in manager.status().errors]
                elif call == "members":
                    answer = last.facts["replica_world_size"]
                else:
                    answer = getattr(manager, call)(**arguments)
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            connection.send(answer)


class Puppet:
    """A Manager in another process."""

    def __init__(self, spawn: Spawn, lighthouse: LighthouseServer, name: str, settings: dict[str, Any]) -> None:
        self._connection, theirs = multiprocessing.connection.Pipe()
        self._process = spawn(obey, str(lighthouse.address), name, settings, theirs)
        theirs.close()

    def begin(self, call: str, **arguments: Any) -> None:
        self._connection.send((call, arguments))

    def answer(self) -> Any:
        assert self._connection.poll(PATIENCE_S), "no answer"
        return self._connection.recv()

    def has_answered(self) -> bool:
        return self._connection.poll()

    def call(self, call: str, **arguments: Any) -> Any:
        self.begin(call, **arguments)
        return self.answer()

    def end(self) -> None:
        self._connection.send(None)
        self._process.join(PATIENCE_S)
        assert self._process.exitcode == 0


def all_call(puppets: list[Puppet], call: str, **arguments: Any) -> list[Any]:
    """Let all make the call at the same time."""
    for puppet in puppets:
        puppet.begin(call, **arguments)
    return [puppet.answer() for puppet in puppets]


def step(puppets: list[Puppet], **arguments: Any) -> list[Any]:
    """Run one step of all. Return each verdict, or the error of its quorum."""
    all_call(puppets, "start_quorum", **arguments)
    all_call(puppets, "allreduce", value=1.0)
    return all_call(puppets, "should_commit")


NewPuppet = Callable[..., Puppet]


@pytest.fixture
def new_puppet(spawn: Spawn) -> Iterator[NewPuppet]:
    """Return `new_puppet("a", min_replica_size=2)`. All are of one job, whose first quorum waits for two."""
    puppets: list[Puppet] = []
    with LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=5_000) as lighthouse:

        def start(name: str, **settings: Any) -> Puppet:
            puppets.append(Puppet(spawn, lighthouse, name, {"timeout": timedelta(seconds=20)} | settings))
            return puppets[-1]

        yield start
        for puppet in puppets:
            puppet.end()


@pytest.mark.in_parts
def test_a_newcomer_waits_while_the_others_only_shrink(new_puppet: NewPuppet) -> None:
    old = [new_puppet(name) for name in ("a", "b")]
    assert step(old) == [True, True]
    newcomer = new_puppet("c", quorum_timeout=timedelta(seconds=1))
    assert newcomer.call("num_participants") == 0
    newcomer.begin("start_quorum")
    assert newcomer.answer() is None
    newcomer.begin("wait_quorum")
    while not newcomer.has_answered():
        assert step(old, shrink_only=True) == [True, True]
        assert all_call(old, "num_participants") == [2, 2]
    # Its quorum fails, and costs it nothing else. It asks again, and this time it is admitted.
    assert "RequestTimeoutError" in newcomer.answer()
    assert newcomer.call("should_commit") is False
    assert (newcomer.call("num_participants"), newcomer.call("participating_rank")) == (0, None)
    assert newcomer.call("start_quorum", timeout=timedelta(seconds=30)) is None
    newcomer.begin("wait_quorum")
    everybody = [*old, newcomer]
    for _ in range(1_000):
        all_call(old, "start_quorum")
        all_call(old, "wait_quorum")
        if old[0].call("members") == 3:
            break
        all_call(old, "allreduce", value=1.0)
        assert all_call(old, "should_commit") == [True, True]
    assert newcomer.answer() is None
    assert all_call(everybody, "allreduce", value=3.0) == [(True, 3.0)] * 3
    # The newcomer heals, so two of the three participate. After the step the participants can still be queried.
    assert all_call(everybody, "should_commit") == [True, True, True]
    assert all_call(everybody, "num_participants") == [2, 2, 2]
    assert all_call(everybody, "participating_rank") == [0, 1, None]
    assert len(set(all_call(everybody, "current_step"))) == 1


@pytest.mark.in_parts
def test_a_reduction_that_takes_too_long_ends_for_all_and_the_next_step_commits(new_puppet: NewPuppet) -> None:
    both = [new_puppet(name) for name in ("a", "b")]
    assert step(both) == [True, True]
    all_call(both, "start_quorum")
    all_call(both, "wait_quorum")
    first, second = both
    worked, _ = first.call("allreduce", value=1.0, timeout=timedelta(milliseconds=300))
    assert not worked
    assert first.call("errors")[0] == "CollectiveTimeoutError"
    # The other one comes later. Its partner no longer waits, and it does not wait for its own 20 seconds.
    worked, _ = second.call("allreduce", value=1.0, timeout=timedelta(seconds=15))
    assert not worked
    assert "CollectiveTimeoutError" not in second.call("errors")
    assert all_call(both, "should_commit") == [False, False]
    assert step(both) == [True, True]
    assert all_call(both, "current_step") == [2, 2]
