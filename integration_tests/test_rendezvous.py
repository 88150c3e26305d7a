"""A member does not come to a rendezvous: the waiting members are told, at any timeout."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import pytest

from integration_tests.conftest import Spawn
from integration_tests.training import Job, Trainer
from tft_algos.testing import Action, Fault, Place
from tft_lighthouse import LighthouseServer

# Bound from the last sign of the victim to the first step that the survivors commit after it. They are told within some
# milliseconds, abort 50 ms later, and need another quorum and another rendezvous. The rest is for a busy machine.
BOUND_S: Final = 1.5


@pytest.fixture
def job(spawn: Spawn) -> Iterator[Job]:
    with LighthouseServer("127.0.0.1:0", join_timeout_ms=5_000) as lighthouse:
        yield Job(spawn, lighthouse)


def three_in_step(job: Job, victim: str) -> tuple[Trainer, list[Trainer]]:
    """Return the victim and the others of three groups that commit together, with timeouts of an hour."""
    others = [job.start(name, timeout=timedelta(hours=1), batch_s=0.01, faults=()) for name in ("m", "n")]
    struck = job.start(victim, timeout=timedelta(hours=1), batch_s=0.01, faults=())
    job.until(lambda: all(each.committed_with(3) for each in [struck, *others]), "all three commit together")
    return struck, others


def strike(job: Job, trainer: Trainer, action: Action) -> None:
    """Let its reduction fail, and then let the action happen in the following rendezvous of all three."""
    trainer.connection.send(Fault(action=action, place=Place.CONFIGURE, replica=trainer.name))
    trainer.connection.send(Fault(action=Action.FAIL, place=Place.REDUCTION, replica=trainer.name))


def stall_s(job: Job, others: list[Trainer]) -> float:
    """Return the time from now until each of these has committed a further step."""
    began, steps = time.monotonic(), {other.name: other.step for other in others}
    job.until(lambda: all(other.step > steps[other.name] for other in others), "the others go on")
    return time.monotonic() - began


@pytest.mark.in_parts
@pytest.mark.parametrize("victim", ["a", "z"], ids=["which hosts the store", "which does not"])
def test_one_that_dies_there(job: Job, victim: str) -> None:
    struck, others = three_in_step(job, victim)
    strike(job, struck, Action.KILL)
    job.until(lambda: struck.connection.closed, "the victim dies")
    assert stall_s(job, others) < BOUND_S
    job.finish(others)


@pytest.mark.in_parts
def test_one_that_fails_there_and_lives(job: Job) -> None:
    struck, others = three_in_step(job, "z")
    strike(job, struck, Action.FAIL)
    job.until(lambda: len(struck.of_kind("failed")) >= 2, "the victim's reduction fails, and then its rendezvous")
    assert stall_s(job, [*others, struck]) < BOUND_S
    job.until(lambda: all(each.committed_with(3) for each in job.trainers), "all three commit together again")
    job.finish()


@pytest.mark.in_parts
def test_a_newcomer_that_fails_there(job: Job) -> None:
    """Its source serves at the end of its step, and waits in that rendezvous, so the newcomer must not wait for it."""
    others = [job.start(name, timeout=timedelta(hours=1), batch_s=0.01) for name in ("m", "n")]
    job.until(lambda: all(each.committed_with(2) for each in others), "both commit together")
    fails = Fault(action=Action.FAIL, place=Place.CONFIGURE, replica="z")
    struck = job.start("z", timeout=timedelta(hours=1), batch_s=0.01, faults=(fails,))
    job.until(lambda: bool(struck.of_kind("struck")), "the newcomer fails")
    assert stall_s(job, others) < BOUND_S
    job.until(lambda: all(each.committed_with(3) for each in job.trainers), "it heals, and all three commit together")
    job.finish()
