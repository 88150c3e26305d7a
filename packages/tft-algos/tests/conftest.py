"""A Manager with its stand-ins: the test is the lighthouse, the other replicas and the wire."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import tft_algos.manager
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
            self.manager._parts.audit.step_begins = lambda: None  # type: ignore[method-assign]

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


# --- races ------------------------------------------------------------------------------------------------------------

SHELL = str(Path(tft_algos.manager.__file__).parent)
YIELDS_AT = 0.05  # of the shell's lines
RACES = int(os.environ.get("TFT_RACES", "0"))


@contextmanager
def yielding(seed: int) -> Iterator[None]:
    """Give way to other threads between any two lines of the shell, at random, and as often as Python can."""
    dice = random.Random(seed)

    def line(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and dice.random() < YIELDS_AT:
            time.sleep(0 if dice.random() < 0.9 else 0.0005)
        return line

    def call(frame: FrameType, event: str, arg: object) -> Any:
        return line if frame.f_code.co_filename.startswith(SHELL) else None

    interval, before, before_here = sys.getswitchinterval(), threading.gettrace(), sys.gettrace()
    sys.setswitchinterval(1e-6)
    threading.settrace(call)
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before_here)
        threading.settrace(before)  # type: ignore[arg-type]
        sys.setswitchinterval(interval)


@pytest.fixture
def yields() -> Callable[[int], AbstractContextManager[None]]:
    """Makes contexts in which other threads run between any two lines of the shell; `yields(seed)`."""
    return yielding


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if RACES and "rigs" in metafunc.fixturenames:
        metafunc.fixturenames.append("race")
        metafunc.parametrize("race", range(RACES), indirect=True)


@pytest.fixture
def race(request: pytest.FixtureRequest) -> Iterator[None]:
    """One run of a test in another order of threads, where TFT_RACES asks for it."""
    with yielding(request.param):
        yield
