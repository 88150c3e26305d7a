"""Wrong state, in real processes: it is detected in the first step, corrected after a recovery, or ends a replica."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy
import pytest
import torch

from integration_tests.conftest import Spawn
from integration_tests.training import Event, Job, Trainer, heard_of_the_manager, steps_until_told
from tft_algos import DistributedDataParallel, Manager, Optimizer
from tft_algos.testing import digest
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

TIMEOUT = timedelta(seconds=20)


@dataclass(frozen=True)
class Spec:
    """The settings of a trainer.

    Args:
        lighthouse: address.
        name: of the replica group. It seeds the weights.
        wrong: "nothing": no state is registered. "object": a leaf can't be transferred. "load": the load function
            raises. "optimizer": the optimizer is not registered. "low": none of these, but the moments are bfloat16.
        use_async_quorum: of the Manager.
    """

    lighthouse: str
    name: str
    wrong: str = ""
    use_async_quorum: bool = True


class LowMoments(torch.optim.AdamW):
    """An AdamW that keeps its moments in bfloat16, beside float32 parameters."""

    def step(self, closure: Any = None) -> Any:
        self._keep_in(torch.float32)
        loss = super().step(closure)
        self._keep_in(torch.bfloat16)
        return loss

    def _keep_in(self, dtype: torch.dtype) -> None:
        for entries in self.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                entries[key] = entries[key].to(dtype)


def train(spec: Spec, connection: Connection) -> None:
    """Train until told to stop. Report each commit, each quorum, and at the end the Manager's warnings."""
    torch.set_num_threads(1)
    told = heard_of_the_manager()
    try:
        _train(spec, connection)
    except Exception as error:
        while not told.empty():
            record = told.get()
            connection.send(Event("log", text=record.getMessage()))
        connection.send(Event("end", text=f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None
    while not told.empty():
        record = told.get()
        if record.levelno >= logging.WARNING:
            connection.send(Event("log", text=record.getMessage()))
    connection.send(Event("end"))


def _train(spec: Spec, connection: Connection) -> None:
    torch.manual_seed(sum(spec.name.encode()))
    model = torch.nn.Linear(8, 8)
    adam = (LowMoments if spec.wrong == "low" else torch.optim.AdamW)(model.parameters(), lr=1e-2)
    best = {"loss": numpy.float32(0.1), "history": numpy.arange(3.0), "at": object() if spec.wrong == "object" else 0}

    def load(state: dict[str, Any]) -> None:
        if spec.wrong == "load":
            raise KeyError("model")
        model.load_state_dict(state["net"])
        if "optimizer" in state:
            adam.load_state_dict(state["optimizer"])
        best.update(state["best"])
        connection.send(Event("healed", text=f"{type(best['loss']).__name__} {type(best['history']).__name__}"))

    def take() -> dict[str, Any]:
        own = {} if spec.wrong == "optimizer" else {"optimizer": adam.state_dict()}
        return {"net": model.state_dict(), "best": dict(best), **own}

    functions = (None, None) if spec.wrong == "nothing" else (load, take)
    with Manager(
        ProcessGroupGloo(),
        *functions,
        replica_id=spec.name,
        lighthouse_addr=spec.lighthouse,
        hostname="localhost",
        timeout=TIMEOUT,
        use_async_quorum=spec.use_async_quorum,
    ) as manager:
        ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adam)
        quorums: list[Any] = []
        for before in steps_until_told(connection, manager, pause_s=0.005):
            optimizer.zero_grad()
            ddp(torch.randn(4, 8)).square().mean().backward()
            stepped = optimizer.step()
            quorum = manager.status().quorum
            if quorum is not None and quorum not in quorums:
                quorums.append(quorum)
                connection.send(Event("quorum", before, text=str(quorum)))
            if stepped:
                state = digest(model.state_dict(), adam.state_dict())
                connection.send(Event("commit", manager.current_step(), state, manager.num_participants()))
            else:
                connection.send(Event("failed", before, text="; ".join(map(str, manager.status().errors))))


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=5_000, heartbeat_timeout_ms=3_000) as server:
        yield server


def start(job: Job, lighthouse: LighthouseServer, name: str, wrong: str = "", **settings: Any) -> Trainer:
    return job.add(name, train, Spec(str(lighthouse.address), name, wrong, **settings))


def end_of(job: Job, trainer: Trainer) -> str:
    """Return the text of the error with which a trainer ended by itself."""
    job.until(lambda: trainer.ended is not None, f"{trainer.name} ends")
    trainer.process.join(10)
    assert trainer.process.exitcode == 1
    assert trainer.ended is not None
    return trainer.ended.text


@pytest.mark.in_parts
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("nothing", "ConfigError: replica a:.*, rank 0, trains Linear, AdamW, and no state is registered"),
        (
            "object",
            r"UserStateError: .*state\['default'\]\['best'\]\['at'\] is a builtins.object, which can't be transferred",
        ),
    ],
)
def test_wrong_state_ends_a_replica_before_its_second_step(
    spawn: Spawn, lighthouse: LighthouseServer, wrong: str, says: str
) -> None:
    job = Job(spawn, lighthouse)
    alone = start(job, lighthouse, "a", wrong)
    assert re.match(says, end_of(job, alone))
    assert alone.step == (1 if wrong == "nothing" else 0), "state may be registered when the first step is over"


@pytest.mark.in_parts
def test_a_forgotten_optimizer_is_named_once(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    job = Job(spawn, lighthouse)
    alone = start(job, lighthouse, "a", "optimizer")
    job.until(lambda: alone.step >= 5, "it trains")
    job.finish()
    logs = [event.text for event in alone.of_kind("log") if "are missing in the registered state" in event.text]
    assert len(logs) == 1
    assert "6 of 8 tensors of wrapped models and optimizers" in logs[0]
    assert "AdamW.exp_avg of Linear.weight" in logs[0]


@pytest.mark.in_parts
@pytest.mark.parametrize("use_async_quorum", [True, False], ids=["asynchronous", "synchronous"])
def test_a_load_function_that_raises_ends_its_process_and_disturbs_the_healthy_no_further(
    spawn: Spawn, lighthouse: LighthouseServer, use_async_quorum: bool
) -> None:
    job = Job(spawn, lighthouse)
    healthy = start(job, lighthouse, "a", use_async_quorum=use_async_quorum)
    job.until(lambda: healthy.step >= 5, "it trains")
    newcomer = start(job, lighthouse, "b", "load", use_async_quorum=use_async_quorum)
    error = end_of(job, newcomer)
    assert error.startswith("UserStateError: replica b:")
    assert "load_state_dict of the state registered under 'default' raised KeyError('model')" in error
    tracebacks = [event.text for event in newcomer.of_kind("log") if "Traceback (most recent call last)" in event.text]
    assert len(tracebacks) == 1
    assert "raise KeyError" in tracebacks[0]
    at = healthy.step
    job.until(lambda: healthy.step >= at + 20, "the other trains on")
    job.finish([healthy])
    # The quorums are: alone, with the newcomer, for its second attempt, and after its end.
    assert len(healthy.of_kind("quorum")) <= 4, healthy.of_kind("quorum")


@pytest.mark.in_parts
def test_moments_that_torch_casts_are_those_of_the_source_after_a_recovery(
    spawn: Spawn, lighthouse: LighthouseServer
) -> None:
    job = Job(spawn, lighthouse)
    source = start(job, lighthouse, "a", "low")
    job.until(lambda: source.step >= 5, "it trains")
    newcomer = start(job, lighthouse, "b", "low")
    job.until(lambda: all(each.committed_with(2, 10) for each in (source, newcomer)), "two commit together")
    job.finish()
    assert job.check_digests() > 10
    assert [event.text for event in newcomer.of_kind("healed")] == ["float32 ndarray"]
    assert [event.text for each in (source, newcomer) for event in each.of_kind("log") if "state" in event.text] == []
