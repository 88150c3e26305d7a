"""Several steps in flight in one quorum, in real processes: after any death, failure, join or leave, all states agree.

The strategy here is minimal. Its fragments have different lengths, so members that reduced different ones would end
with an error. Each commit applies an update. The strategy begins a step, defers it, and ends the oldest when the
maximum number is in flight.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest
import torch

from integration_tests.conftest import Kill, Spawn
from integration_tests.training import Event, Job, Launcher, Trainer
from tft_algos import DeferredStep, Manager
from tft_algos.testing import digest
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

IN_FLIGHT = 2  # beside the open one
LENGTHS = (257, 5, 64, 1031)


@dataclass(frozen=True)
class Flyer:
    """The settings of a trainer.

    Args:
        lighthouse, name, environment: as in `training.Spec`.
        fail_at: number of commits with others after which an error is reported once, for the newest step in flight, on
            rank 0. The first trainer of the job trains alone before.
        leaves: leave on SIGTERM.
        settings: for the Manager.
        settings: for the Manager.
    """

    lighthouse: str
    name: str
    environment: dict[str, str] = field(default_factory=dict)
    fail_at: int | None = None
    leaves: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def fly(flyer: Flyer, connection: Connection) -> None:
    """Run the life of a trainer, in its own process."""
    torch.set_num_threads(1)
    logging.getLogger("tft_ckpt").setLevel(logging.ERROR)
    os.environ.update(flyer.environment)
    try:
        _fly(flyer, connection)
    except Exception as error:
        connection.send(Event("end", text=f"{type(error).__name__}: {error}"))
    else:
        connection.send(Event("end"))


def _fly(flyer: Flyer, connection: Connection) -> None:
    generator = torch.Generator().manual_seed(sum(flyer.name.encode()))
    weights = [torch.randn(length, generator=generator) for length in LENGTHS]

    def take() -> dict[str, Any]:
        return {"weights": weights}

    def load(state: dict[str, Any]) -> None:
        for weight, healed in zip(weights, state["weights"], strict=True):
            weight.copy_(healed)
        connection.send(Event("healed", digest=digest(take())))

    flight: list[tuple[DeferredStep, int, torch.Tensor]] = []
    last, fail_at, with_others = None, flyer.fail_at, 0
    settings: dict[str, Any] = {"timeout": timedelta(seconds=10), "hostname": "localhost"} | flyer.settings
    pg = ProcessGroupGloo()
    with Manager(pg, load, take, replica_id=flyer.name, lighthouse_addr=flyer.lighthouse, **settings) as manager:
        if flyer.leaves:
            manager.leave_on_signal()
        connection.send(Event("ready", text=manager.replica_id))
        while (last is None or manager.current_step() < last) and not manager.left:
            if connection.poll():
                last = connection.recv()
            if len(flight) == IN_FLIGHT:
                step, index, mean = flight.pop(0)
                if not step.should_commit():
                    connection.send(Event("failed", manager.current_step(), text=str(step.failure)))
                    flight.clear()
                    continue
                weights[index].add_(mean, alpha=0.1)
                assert step.plan is not None
                text = f"{len(flight)} in flight"
                participants = step.plan.num_participants
                with_others += participants > 1
                connection.send(Event("commit", manager.current_step(), digest(take()), participants, text))
                continue
            manager.start_quorum(use_async_quorum=True)
            plan = manager.strategy.wait_plan()
            flight = [each for each in flight if not each[0].is_abandoned]
            if plan is not None and plan.step == 0:  # all begin with the same weights
                manager.strategy.exchange_state()
                manager.should_commit()
                continue
            index = 0 if plan is None else (plan.step - 1 + manager.strategy.num_deferred) % len(weights)
            sent = torch.randn(LENGTHS[index], generator=generator)
            manager.allreduce(sent)
            flight.append((manager.strategy.defer(), index, sent))
            if fail_at is not None and fail_at <= with_others and manager.status().group_rank == 0:
                fail_at = None
                flight[-1][0].report_error(RuntimeError("injected"))


class Flight:
    """A starter of these trainers, as `Job.start` is for the other kind."""

    def __init__(self, job: Job, lighthouse: LighthouseServer) -> None:
        self.job = job
        self._address = str(lighthouse.address)

    def start(
        self,
        name: str,
        *,
        environment: dict[str, str] | None = None,
        fail_at: int | None = None,
        leaves: bool = False,
        model: str = "",
        **settings: Any,
    ) -> Trainer:
        flyer = Flyer(self._address, name, environment or {}, fail_at, leaves, settings)
        return self.job.add(name, fly, flyer)


@pytest.fixture
def flight(spawn: Spawn) -> Iterator[Flight]:
    with LighthouseServer("127.0.0.1:0", join_timeout_ms=5_000, heartbeat_timeout_ms=3_000) as lighthouse:
        yield Flight(Job(spawn, lighthouse), lighthouse)


def are_together(trainers: list[Trainer], members: int | None = None) -> bool:
    return all(trainer.committed_with(members or len(trainers)) for trainer in trainers)


def test_members_die_and_come_back_and_all_hold_the_same_after_each_commit(flight: Flight, kill: Kill) -> None:
    job = flight.job
    survivors = [flight.start(name) for name in ("a", "b")]
    victim = flight.start("c")
    job.until(lambda: are_together([*survivors, victim]), "all three commit together")
    assert survivors[0].of_kind("commit")[-1].text == f"{IN_FLIGHT - 1} in flight"
    kill(victim.process.pid or 0)
    job.until(lambda: are_together(survivors), "the survivors go on")
    again = flight.start("c")
    job.until(lambda: are_together([*survivors, again]), "all three commit together again")
    job.finish()
    assert len(again.of_kind("healed")) == 1, "its first sync fails what the others have in flight, and no other heals"


def test_an_error_of_one_step_in_flight_fails_those_after_it_on_every_member(flight: Flight) -> None:
    job = flight.job
    first = flight.start("a")
    second = flight.start("b", fail_at=20)
    job.until(lambda: bool(second.of_kind("failed")) and are_together([first, second]), "both commit together again")
    job.finish()
    failed = second.of_kind("failed")
    assert [event.text for event in failed] == ["injected"]
    # Both committed the step that began before it.
    step = failed[0].step
    assert second.commits[step].digest == first.commits[step].digest


@pytest.mark.in_parts
def test_who_leaves_costs_the_others_what_is_in_flight_and_no_more(flight: Flight) -> None:
    job = flight.job
    stay, leave = [flight.start(name) for name in ("a", "b")], flight.start("c", leaves=True)
    job.until(lambda: are_together([*stay, leave]), "all three commit together")
    assert leave.process.pid is not None
    healed = [len(trainer.of_kind("healed")) for trainer in stay]  # as they came together
    os.kill(leave.process.pid, 15)
    job.until(lambda: leave.ended is not None, "it has left")
    assert leave.ended == Event("end")
    job.until(lambda: are_together(stay), "the others go on")
    job.finish(stay)
    assert [len(trainer.of_kind("healed")) for trainer in stay] == healed


@pytest.mark.in_parts
def test_groups_of_two_vote_on_each_step_in_its_order(flight: Flight, kill: Kill) -> None:
    job = flight.job
    launchers = [Launcher(cast(Job, flight), name) for name in ("a", "b")]
    first = launchers[0].start()
    job.until(lambda: all(trainer.step >= 5 for trainer in first), "the first group trains alone")
    second = launchers[1].start(fail_at=10)
    job.until(lambda: all(trainer.of_kind("failed") for trainer in second), "an error of one rank fails both")
    job.until(lambda: are_together(first + second, 2), "both groups commit together again")
    kill(second[1].process.pid or 0)
    job.until(lambda: second[0].ended is not None, "the other rank ends")
    assert "ReplicaGroupLostError" in second[0].events[-1].text
    again = launchers[1].start()
    job.until(lambda: are_together(first + again, 2), "both groups commit together again")
    job.finish(first + again)
    assert [len(trainer.of_kind("healed")) for trainer in again] == [1, 1]
