"""A Manager with its stand-ins: the test is the lighthouse, the other replicas and the wire."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tft_algos import Manager
from tft_algos.testing import FakeGroup, MemoryTransport, ScriptedCoordinator
from tft_coord.core.types import Plan, QuorumKey


class Weights:
    """User state that is one tensor, and remembers on which thread it was touched."""

    def __init__(self, value: float) -> None:
        self.tensor = torch.full((2,), value)
        self.threads: list[str] = []

    def take(self) -> dict[str, torch.Tensor]:
        self.threads.append(threading.current_thread().name)
        return {"tensor": self.tensor.clone()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        self.threads.append(threading.current_thread().name)
        self.tensor.copy_(state["tensor"])


class Rig:
    """A Manager with its stand-ins."""

    def __init__(
        self,
        *answers: Plan | QuorumKey | Exception,
        verdicts: Any = (),
        others: float = 0.0,
        looks: bool = False,
        registers: bool = True,
        **settings: Any,
    ):
        self.weights = Weights(1.0)
        self.group = FakeGroup(others)
        self.coordinator = ScriptedCoordinator(answers, verdicts)
        self.transport = settings.pop("checkpoint_transport", MemoryTransport())
        self.manager = Manager(
            self.group,
            self.weights.load if registers else None,
            self.weights.take if registers else None,
            coordinator=self.coordinator,
            checkpoint_transport=self.transport,
            lighthouse_addr="localhost:1",
            hostname="localhost",
            **settings,
        )
        if not looks:  # most tests count the calls of the user's functions; test_audit.py has this look
            self.manager._audit.step_begins = lambda: None  # type: ignore[method-assign]

    def step(self) -> bool:
        self.manager.start_quorum()
        self.manager.allreduce(torch.ones(2)).wait()
        return self.manager.should_commit()


@pytest.fixture
def rigs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes rigs, outside of any launcher, and shuts them down."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHFT_TIMEOUT_SEC"):
        monkeypatch.delenv(name, raising=False)
    made: list[Rig] = []

    def make(*answers: Any, **settings: Any) -> Rig:
        made.append(Rig(*answers, **settings))
        return made[-1]

    yield make
    for rig in made:
        rig.manager.shutdown()
    for thread in threading.enumerate():
        if thread.name == "tft-pg-timer":
            thread.join(5)  # it ends by itself, once nothing is pending any more
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tft-")]


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def use_async_quorum(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
