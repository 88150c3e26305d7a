"""Two replicas compare each gradient with the mean that one process computes: strides, range, discarded batches."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from integration_tests.conftest import Spawn
from tft_algos import DistributedDataParallel, Manager, Optimizer, PureDistributedDataParallel
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

PATIENCE_S = 60.0
TIMEOUT = timedelta(seconds=30)
STEPS = 5
NAMES = ("a", "b")


@dataclass(frozen=True)
class Case:
    """The settings of two replicas' training.

    Args:
        wrapper: "buckets", "find unused", "pure", or "by hand": the script gives each gradient to `Manager.allreduce`.
        channels_last: these replicas convert their model.
        throws_away: these replicas discard a batch outside no_sync() before each second step.
        dtype: of the model.
        scale: of the data, so of the gradients.
        weighted: by 3 and 5.
    """

    wrapper: str
    channels_last: str = ""
    throws_away: str = ""
    dtype: torch.dtype = torch.float32
    scale: float = 1.0
    weighted: bool = False


class Net(torch.nn.Module):
    """A module whose gradients are sums of its input, so that their magnitude is equal in any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3, 4, 5))
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum() + (self.scale * x[0, :, 0, 0]).sum()


def batch(name: str, step: int, part: int, case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * NAMES.index(name) + 10 * step + part)
    return (torch.rand(2, 3, 4, 5, generator=generator) * case.scale).to(case.dtype)


def wanted(step: int, case: Case) -> torch.Tensor:
    """Return the mean of the weight's gradients. Each replica's gradient is the sum of two batches."""
    sums = [batch(name, step, 0, case).double() + batch(name, step, 1, case).double() for name in NAMES]
    shares = (3 / 8, 5 / 8) if case.weighted else (1 / 2, 1 / 2)
    return torch.stack([share * each for share, each in zip(shares, sums, strict=True)]).sum(0)


def train(lighthouse: str, name: str, case: Case, connection: Connection) -> None:
    """Report each common step: whether it committed, and the relative error of its gradient. Report the end, too."""
    torch.set_num_threads(1)
    net = Net().to(case.dtype)
    if name in case.channels_last:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        with Manager(
            ProcessGroupGloo(),
            net.load_state_dict,
            net.state_dict,
            replica_id=name,
            lighthouse_addr=lighthouse,
            hostname="localhost",
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            min_replica_size=2,
        ) as manager:
            _train(manager, net, name, case, connection)
    except Exception as error:
        connection.send(("raised", f"{type(error).__name__}: {error}"))
    else:
        connection.send(("ended", ""))


def _train(manager: Manager, net: Net, name: str, case: Case, connection: Connection) -> None:
    model: Any = net
    if case.wrapper == "pure":
        model = PureDistributedDataParallel(manager, net)
    elif case.wrapper != "by hand":
        unused = case.wrapper == "find unused"
        model = DistributedDataParallel(manager, net, bucket_cap_mb=0.0001, find_unused_parameters=unused)
    optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.0))
    while (step := manager.current_step()) < STEPS:
        optimizer.zero_grad()
        if name in case.throws_away and step % 2:
            model(batch(name, step, 2, case))
            optimizer.zero_grad()
        if case.weighted:
            manager.set_weight(3.0 if name == "a" else 5.0)
        for part in (0, 1):
            with model.no_sync() if part == 0 and model is not net else contextlib.nullcontext():
                model(batch(name, step, part, case)).backward()
        if model is net:
            for parameter in net.parameters():
                manager.allreduce(parameter.grad).wait()
        assert net.weight.grad is not None
        mean = wanted(step, case)
        error = ((net.weight.grad.double() - mean).abs().max() / mean.abs().max()).item()
        committed = optimizer.step()
        if manager.num_participants() == 2:  # in the first step one of them heals
            connection.send(("committed" if committed else "failed", error))


@pytest.fixture
def lighthouse() -> Iterator[str]:
    with LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=20_000) as server:
        yield str(server.address)


def run(spawn: Spawn, lighthouse: str, case: Case) -> list[list[tuple[str, Any]]]:
    """Return what each replica told."""
    ends = []
    for name in NAMES:
        ours, theirs = multiprocessing.connection.Pipe()
        spawn(train, lighthouse, name, case, theirs)
        theirs.close()
        ends.append(ours)
    told: dict[Connection, list[tuple[str, Any]]] = {ours: [] for ours in ends}
    while waiting := [ours for ours, heard in told.items() if not heard or heard[-1][0] != "ended"]:
        ready = multiprocessing.connection.wait(waiting, PATIENCE_S)
        assert ready, f"nothing within {PATIENCE_S:g} s; so far {[*told.values()]}"
        for ours in [each for each in waiting if each in ready]:
            told[ours].append(ours.recv())
            if told[ours][-1][0] == "raised":
                return [*told.values()]
    return [*told.values()]


HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.mark.in_parts
@pytest.mark.parametrize(
    "case",
    [
        *(Case(kind, throws_away=who) for kind in ("buckets", "find unused", "pure") for who in ("b", "ab")),
        *(Case(kind, channels_last="b") for kind in ("pure", "by hand")),
        *(Case(kind, channels_last="ab") for kind in ("buckets", "pure")),
        *(Case(kind, dtype=HALF, scale=32_000.0) for kind in ("buckets", "pure", "by hand")),
        *(Case(kind, dtype=BRAIN, scale=1.6e38) for kind in ("buckets", "by hand")),
        *(
            Case("buckets", dtype=dtype, scale=scale, weighted=True)
            for dtype, scale in ((HALF, 3.2e4), (BRAIN, 1.6e38))
        ),
    ],
    ids=str,
)
def test_each_gradient_is_the_mean_of_one_process(spawn: Spawn, lighthouse: str, case: Case) -> None:
    for heard in run(spawn, lighthouse, case):
        assert [what for what, _ in heard] == ["committed"] * (STEPS - 1) + ["ended"]
        assert max(error for what, error in heard[:-1]) < 4 * torch.finfo(case.dtype).eps


@pytest.mark.in_parts
def test_buckets_of_another_layout_are_refused_by_name_before_the_first_reduction(
    spawn: Spawn, lighthouse: str
) -> None:
    told = run(spawn, lighthouse, Case("buckets", channels_last="b"))
    (refused,) = [text for heard in told for what, text in heard if what == "raised"]
    assert refused.startswith("RefusedError: ")
    assert "parameter/0/weight is 'float32 [2, 3, 4, 5]" in refused
    assert "float32 [2, 3, 4, 5], strides [60, 1, 15, 3]'" in refused
    assert [what for heard in told for what, _ in heard] == ["raised"]
