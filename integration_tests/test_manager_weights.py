"""Replica groups with unequal batches: weighted by samples, their gradient is that of one process over all batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final

import pytest
import torch

from integration_tests.conftest import Spawn
from integration_tests.training import Event, Job, Trainer
from tft_algos import DistributedDataParallel, Manager, Optimizer, WorldSizeMode
from tft_algos.testing import digest
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

SAMPLES: Final = {"a": 1, "b": 4, "c": 7}
FEATURES: Final = 8
TOLERANCE: Final = 1e-6


@dataclass(frozen=True)
class Gradient:
    """The gradient of a replica after a backward pass whose step was committed.

    Args:
        name: of the replica.
        step: committed steps, after that commit.
        participating: whether its own batch counted.
        parameters: before the step, flat.
        gradient: flat.
        kind: the kind for `Trainer.of_kind`.
    """

    name: str
    step: int
    participating: bool
    # The fields are not tensors. A tensor would be fetched from its sender on arrival, and that may have ended by then.
    parameters: list[float]
    gradient: list[float]
    kind: str = "gradient"


def new_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def batch_of(*names: str) -> torch.Tensor:
    """Return the samples of these replicas, the same in every step."""
    everybody = torch.randn(sum(SAMPLES.values()), FEATURES, generator=torch.Generator().manual_seed(5))
    own = dict(zip(SAMPLES, everybody.split(list(SAMPLES.values())), strict=True))
    return torch.cat([own[name] for name in names])


def flat(tensors: Iterator[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors if tensor is not None])


def train(lighthouse: str, name: str, settings: dict[str, Any], connection: Connection) -> None:
    """Run a replica whose batch has its own number of samples, until the test gives the last step."""
    torch.set_num_threads(1)
    torch.manual_seed(sum(name.encode()))
    model = new_model()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = batch_of(name)
    with Manager(
        ProcessGroupGloo(),
        model.load_state_dict,
        model.state_dict,
        replica_id=name,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        timeout=timedelta(seconds=20),
        **settings,
    ) as manager:
        ddp = DistributedDataParallel(manager, model, bucket_cap_mb=0.0005)
        optimizer = Optimizer(manager, sgd)
        last = None
        while last is None or manager.current_step() < last:
            if connection.poll():
                last = connection.recv()
            time.sleep(0.005)  # leaves the machine's cores to starting processes
            step, parameters = manager.current_step(), flat(iter(model.parameters()))
            optimizer.zero_grad()
            manager.set_weight(len(batch))
            ddp(batch).square().mean().backward()
            gradient = flat(parameter.grad for parameter in model.parameters())
            participating = manager.is_participating()
            error = manager.errored()
            optimizer.step()
            if manager.current_step() == step:
                connection.send(Event("failed", step, text=str(error)))
                continue
            step = manager.current_step()
            connection.send(Gradient(name, step, participating, parameters.tolist(), gradient.tolist()))
            connection.send(Event("commit", step, digest(model.state_dict()), manager.num_participants()))
    connection.send(Event("end"))


def start(job: Job, lighthouse: LighthouseServer, name: str, **settings: Any) -> Trainer:
    return job.add(name, train, str(lighthouse.address), name, settings)


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=5_000, heartbeat_timeout_ms=3_000) as server:
        yield server


def check_gradients(trainers: list[Trainer]) -> set[tuple[str, ...]]:
    """Check that each committed gradient is that of one process over all batches that counted. Return their owners."""
    by_step: dict[int, list[Gradient]] = {}
    for trainer in trainers:
        events: list[Any] = trainer.of_kind("gradient")
        for gradient in events:
            by_step.setdefault(gradient.step, []).append(gradient)
    seen = set()
    for step, gradients in by_step.items():
        counted = [told for told in gradients if told.participating]
        names = tuple(sorted(told.name for told in counted))
        seen.add(tuple(sorted(told.name if told.participating else f"({told.name})" for told in gradients)))
        model = new_model()
        torch.nn.utils.vector_to_parameters(torch.tensor(counted[0].parameters), model.parameters())
        model(batch_of(*names)).square().mean().backward()
        whole = flat(parameter.grad for parameter in model.parameters())
        for told in gradients:
            assert told.gradient == gradients[0].gradient, f"step {step}: {told.name}"
        torch.testing.assert_close(
            torch.tensor(gradients[0].gradient), whole, rtol=0.0, atol=TOLERANCE, msg=f"{step}: {names}"
        )
    return seen


@pytest.mark.in_parts
def test_unequal_batches_give_the_gradient_of_one_process_also_while_one_heals(
    spawn: Spawn, lighthouse: LighthouseServer
) -> None:
    job = Job(spawn, lighthouse)
    trainers = [start(job, lighthouse, name) for name in ("a", "b")]
    job.until(lambda: all(trainer.committed_with(2) for trainer in trainers), "two commit together")
    trainers.append(start(job, lighthouse, "c"))
    job.until(lambda: all(trainer.committed_with(3) for trainer in trainers), "three commit together")
    job.finish()
    assert {("a", "b"), ("(c)", "a", "b"), ("a", "b", "c")} <= check_gradients(trainers)
    assert all(trainer.of_kind("failed") == [] for trainer in trainers)


@pytest.mark.in_parts
def test_a_spare_weighs_nothing(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    job = Job(spawn, lighthouse)
    settings = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES, "min_replica_size": 2}
    trainers = [start(job, lighthouse, name, **settings) for name in ("a", "b", "c")]
    job.until(lambda: all(trainer.step >= 10 for trainer in trainers), "all three train")
    job.finish()
    seen = check_gradients(trainers)
    assert any(sum(name.startswith("(") for name in names) == 1 and len(names) == 3 for names in seen)
    assert all(sum(not name.startswith("(") for name in names) <= 2 for names in seen)
