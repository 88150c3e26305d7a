"""A newcomer whose sources hear its request, and take their state at the step boundary."""

from __future__ import annotations

import logging
import threading
from multiprocessing.connection import Connection

import pytest

from integration_tests.conftest import Spawn
from integration_tests.training import Event, Job, Spec, Trainer, _train
from tft_algos.manager.recovery.speculative import LOOK_AFTER_ATTEMPTS
from tft_lighthouse import LighthouseServer

LIVES = 6  # in each of them a newcomer may ask when the others have just begun to wait for it
BATCH_S = 0.1  # long enough that a newcomer's request is most often heard before the next boundary


def train_and_tell(spec: Spec, connection: Connection) -> None:
    """Run the life of a trainer that also reports each state offered before the forward pass."""
    lock = threading.Lock()

    def tell(event: Event) -> None:
        with lock:
            connection.send(event)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "taken at the step boundary" in record.getMessage():
                tell(Event("early"))

    logger = logging.getLogger("tft_algos.manager")
    logger.setLevel(logging.INFO)
    logger.addHandler(Handler())
    logger.propagate = False
    try:
        _train(spec, connection, tell)
    except Exception as error:
        tell(Event("end", text=f"{type(error).__name__}: {error}"))
    else:
        tell(Event("end"))


@pytest.mark.in_parts
@pytest.mark.timeout(150)
def test_a_newcomer_takes_what_was_taken_when_it_asked(spawn: Spawn) -> None:
    with LighthouseServer(min_replicas=2) as lighthouse:
        job = Job(spawn, lighthouse)

        def start(name: str) -> Trainer:
            spec = Spec(lighthouse=str(lighthouse.address), name=name, batch_s=BATCH_S)
            return job.add(name, train_and_tell, spec)

        survivors = [start("a"), start("b")]
        job.until(
            lambda: all(
                each.step > LOOK_AFTER_ATTEMPTS + 2 and each.committed_with(2, LOOK_AFTER_ATTEMPTS + 2)
                for each in survivors
            ),
            "both have looked at their state",
        )
        for _ in range(LIVES):
            newcomer = start("c")
            job.until(lambda: newcomer.committed_with(3), "the newcomer trains with them")  # noqa: B023
            assert len(newcomer.of_kind("healed")) == 1
            if any(each.of_kind("early") for each in survivors):
                break
            newcomer.process.kill()
            newcomer.process.join()
            job.until(lambda: all(each.committed_with(2) for each in survivors), "the others go on")
        assert any(each.of_kind("early") for each in survivors), job.history()
        job.finish([*survivors, newcomer])
        assert job.check_digests() > 10
