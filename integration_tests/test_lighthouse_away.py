"""A lighthouse is unavailable, at the start and later, while replicas train apart."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, final

import pytest
import torch

from tft_algos import DiLoCo, Manager
from tft_coord import ManagerServer
from tft_lighthouse import LighthouseServer
from tft_lighthouse.shell import LighthouseShell
from tft_pg import ProcessGroupGloo

TWO_YEARS_MS: Final = 2 * 365 * 86_400_000
WAIT_S: Final = 30.0  # for events that come at once on an idle machine

pytestmark = pytest.mark.timeout(120)


class Lighthouse:
    """A lighthouse at one address, available or not."""

    def __init__(self) -> None:
        self.server: LighthouseServer | None = LighthouseServer("127.0.0.1:0", min_replicas=1)
        self.bind = str(self.server.address).removeprefix("http://")

    def start(self) -> None:
        self.server = LighthouseServer(self.bind, min_replicas=1)

    def end(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server = None


@final
class Told(logging.Handler):
    """The Managers' messages on missing quorums."""

    def __init__(self) -> None:
        super().__init__()
        self.unreachable = threading.Event()
        self.clock_behind = threading.Event()
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "no quorum" in record.getMessage():
            self.sentences.append(record.getMessage())
            if "can't be reached" in record.getMessage():  # excludes the message that the manager server still starts
                self.unreachable.set()
            if "days ahead of the lighthouse's clock" in record.getMessage():
                self.clock_behind.set()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Told]:
    handler = Told()
    logger = logging.getLogger("tft_algos.manager")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    caplog.get_records("call").clear()  # records hold errors, and errors hold the frames that they passed


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    made = Lighthouse()
    yield made
    made.end()


class Trainer:
    """A replica with one weight. An inner step decreases it by one, and a sync takes two steps."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.weight = torch.nn.Parameter(torch.full((1,), 10.0))
        model = torch.nn.Module()
        model.weight = self.weight
        self.inner = torch.optim.SGD([self.weight], lr=1.0)
        # with one replica, this makes the global weights equal to the sent ones
        outer = torch.optim.SGD([self.weight], lr=1.0)
        self.strategy = DiLoCo(manager, [model], self.inner, outer, sync_every=4, fragment_sync_delay=2)

    def train(self, inner_steps: int) -> tuple[int, float]:
        """Train. Returns: committed steps, and the weight."""
        for _ in range(inner_steps):
            self.weight.grad = torch.ones(1)
            self.inner.step()
        return self.manager.current_step(), self.weight.item()


@contextmanager
def replica(lighthouse: Lighthouse, *, quorum_timeout_s: float) -> Iterator[Trainer]:
    with Manager(
        ProcessGroupGloo(),
        replica_id="apart",
        lighthouse_addr=lighthouse.bind,
        hostname="localhost",
        quorum_timeout=timedelta(seconds=quorum_timeout_s),
        lease=timedelta(),  # the tests are about a request that is not answered
    ) as manager:
        yield Trainer(manager)


@contextmanager
def after(event: threading.Event, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on another thread when the event is set."""

    def wait() -> None:
        event.wait(WAIT_S)
        act()

    thread = threading.Thread(target=wait, name="test-after")
    thread.start()
    yield
    thread.join(WAIT_S)


def test_a_lighthouse_that_starts_after_the_trainers_is_waited_for(lighthouse: Lighthouse, told: Told) -> None:
    """The wait is longer than for a quorum. Each timed-out wait is logged, with the address."""
    lighthouse.end()
    with (
        replica(lighthouse, quorum_timeout_s=1.0) as trainer,
        after(told.unreachable, lighthouse.start),
        trainer.strategy,
    ):
        away = f"the lighthouse at {lighthouse.bind} can't be reached: no server listens there"
        assert any(away in sentence for sentence in told.sentences)
        assert trainer.manager.current_step() == 1
        assert trainer.train(4) == (2, 8.0)


def test_training_goes_on_to_the_end_of_a_sync_and_waits_there(lighthouse: Lighthouse, told: Told) -> None:
    at_the_end = threading.Event()
    with (
        replica(lighthouse, quorum_timeout_s=WAIT_S) as trainer,
        trainer.strategy,
        after(at_the_end, lighthouse.start),
    ):
        assert trainer.train(4) == (2, 8.0)
        lighthouse.end()
        assert trainer.train(3) == (2, 5.0)
        at_the_end.set()
        assert trainer.train(1) == (3, 6.0)  # the weights that were sent two steps before
    assert told.sentences == []


def test_a_sync_that_waits_in_vain_fails_and_the_job_goes_on_from_its_global_weights(
    lighthouse: Lighthouse, told: Told
) -> None:
    with replica(lighthouse, quorum_timeout_s=1.0) as trainer, trainer.strategy:
        assert trainer.train(4) == (2, 8.0)
        lighthouse.end()
        told.sentences.clear()
        for failed in (1, 2):
            assert trainer.train(4) == (2, 8.0)
            assert len(told.sentences) == failed
        lighthouse.start()
        while trainer.manager.current_step() == 2:  # at once, or after one more wait
            trainer.train(4)
        assert trainer.train(0) == (3, 6.0)


def test_a_lighthouse_that_comes_back_with_a_clock_years_behind_is_waited_for(
    lighthouse: Lighthouse, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report D4: every trainer ended."""
    wall_ms = LighthouseShell._wall_ms
    with (
        replica(lighthouse, quorum_timeout_s=1.0) as trainer,
        trainer.strategy,
        after(told.clock_behind, lambda: monkeypatch.setattr(LighthouseShell, "_wall_ms", wall_ms)),
    ):
        assert trainer.train(4) == (2, 8.0)
        lighthouse.end()
        monkeypatch.setattr(LighthouseShell, "_wall_ms", lambda shell: wall_ms(shell) - TWO_YEARS_MS)
        lighthouse.start()
        while trainer.manager.current_step() < 4:
            trainer.train(1)
    assert told.clock_behind.is_set()


@final
class LogLine(logging.Handler):
    """The first warning of the manager server with this text in it."""

    def __init__(self, text: str) -> None:
        super().__init__(logging.WARNING)
        self._text = text
        self.logged = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self.logged.set()


def test_a_lighthouse_that_was_warned_of_is_logged_when_it_answers_again(
    lighthouse: Lighthouse,
) -> None:
    """The last word was that it can't be reached, for as long as the job ran on."""
    lighthouse.end()
    away, back = LogLine("can't be reached"), LogLine(f"the lighthouse at {lighthouse.bind} answers again, after ")
    logger = logging.getLogger("tft_coord.manager_server.absence")
    for line in (away, back):
        logger.addHandler(line)
    try:
        with ManagerServer(
            "group:1", lighthouse.bind, "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", 1, in_process=True, wait=False
        ):
            assert away.logged.wait(WAIT_S)
            assert not back.logged.is_set()
            lighthouse.start()
            assert back.logged.wait(WAIT_S)
    finally:
        for line in (away, back):
            logger.removeHandler(line)
