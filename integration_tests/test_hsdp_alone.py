"""One replica group of two processes, alone: plain FSDP2 bit for bit, with each of torch's optimizers, at no cost."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from integration_tests.conftest import spawning
from integration_tests.sharded import Event, Place, batch, initialize, listening, local, make_manager, telling
from tft_algos import Manager, Optimizer, extend_mesh, reduce_across
from tft_lighthouse import LighthouseServer

STEPS = 3
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ASGD": (torch.optim.ASGD, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "Muon": (torch.optim.Muon, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}
# These fail with FSDP2 alone already: they use operations that DTensor lacks, sparse gradients, or a closure.
UNSUPPORTED_BY_TORCH = {"Adafactor", "Rprop", "SparseAdam", "LBFGS"}

pytestmark = pytest.mark.timeout(120)  # for all optimizers together, which the first test waits for


def sharded_model(mesh: DeviceMesh) -> nn.Module:
    """Return a model of matrices alone, which every optimizer accepts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 12, bias=False))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def compare(name: str, manager: Manager, place: Place, meshes: dict[str, DeviceMesh]) -> None:
    """Train with an optimizer in each way, in the same steps."""
    kind, options = OPTIMIZERS[name]
    models = {way: sharded_model(mesh) for way, mesh in meshes.items()}
    reduce_across(manager, models["hook"])
    optimizers = {way: kind(model.parameters(), lr=1e-2, **options) for way, model in models.items()}
    stepped = {
        way: each if way == "torch" else Optimizer(manager, each) for way, each in optimizers.items()
    }  # both others in one step of the Manager
    for step in range(STEPS):
        for optimizer in stepped.values():
            optimizer.zero_grad()
        for model in models.values():
            model(batch(step, place)).square().mean().backward()
        for optimizer in stepped.values():
            optimizer.step()
        assert manager.status().committed
        states = {way: state_of(model, optimizers[way]) for way, model in models.items()}
        for way, state in states.items():
            assert len(state) == len(states["torch"])
            for one, expected in zip(state, states["torch"], strict=True):
                assert torch.equal(one, expected), f"{way} differs after step {step}"


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return this process's part of parameters, gradients and optimizer."""
    return [
        torch.as_tensor(local(each))
        for parameter in model.parameters()
        for each in (parameter.detach(), parameter.grad, *optimizer.state[parameter].values())
    ]


def train(place: Place, connection: Connection) -> None:
    """Run one process through all optimizers."""
    initialize(place.port, place.rank, place.world_size)
    with telling(connection), make_manager(place, min_replica_size=1) as manager:
        inner = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        meshes = {"mesh": extend_mesh(manager, inner)["dp", "shard"], "hook": inner, "torch": inner}
        for name in OPTIMIZERS:
            compare(name, manager, place, meshes)
            connection.send(Event("passed", text=name))
        assert manager.current_step() == STEPS * len(OPTIMIZERS)
    dist.destroy_process_group()
    connection.send(Event("end"))


@pytest.fixture(scope="module")
def passed(forkserver: ForkServerContext) -> Iterator[tuple[set[str], str]]:
    """Yield the optimizers that both processes have passed, and the first failure or the empty string."""
    with (
        LighthouseServer("127.0.0.1:0", join_timeout_ms=10_000, heartbeat_timeout_ms=20_000) as server,
        spawning(forkserver) as spawn,
        listening(spawn) as processes,
    ):
        places = processes.start(train, shape=(2, 1), replicas=(0,), lighthouse=str(server.address))
        failure = processes.failure_until_end(places)
        yield processes.passed(places), failure


@pytest.mark.in_parts(fixture="passed")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_replica_group_alone_is_plain_fsdp2_bit_for_bit(passed: tuple[set[str], str], name: str) -> None:
    names, failure = passed
    assert name in names, failure


def test_no_optimizer_of_torchs_is_forgotten() -> None:
    kinds = {
        name
        for name, each in inspect.getmembers(torch.optim, inspect.isclass)
        if issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
    }
    assert {kind.__name__ for kind, _ in OPTIMIZERS.values()} == kinds - UNSUPPORTED_BY_TORCH
