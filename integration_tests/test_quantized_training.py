"""Training with quantized gradients: kills and recoveries leave every replica with equal weights."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch

from integration_tests.conftest import Spawn
from integration_tests.training import Event, Job, Trainer
from tft_algos import DiLoCo, Manager, Optimizer
from tft_algos.quantization import Codec, ErrorFeedback, Int4, Int8, TopK
from tft_algos.testing import digest
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo, ProcessGroupNCCL

FAIL_EVERY = 7  # attempts of replica "a" that fail after their reductions


def train(lighthouse: str, name: str, device: str, connection: Connection) -> None:
    """Run a replica until the test gives the last step. Weights go with four bits and feedback, biases with eight."""
    torch.set_num_threads(1)
    torch.manual_seed(sum(name.encode()))
    if device == "cuda":  # NCCL takes two ranks on one device only if it thinks that they are on two machines
        os.environ.update(NCCL_HOSTID=f"machine-{name}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).to(device)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    with Manager(
        ProcessGroupNCCL() if device == "cuda" else ProcessGroupGloo(),
        load,
        lambda: {"model": model.state_dict(), "adam": adam.state_dict()},
        replica_id=name,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        timeout=timedelta(seconds=20),
    ) as manager:
        feedback = ErrorFeedback(manager)
        optimizer = Optimizer(manager, adam)
        last, attempt = None, 0
        while last is None or manager.current_step() < last:
            if connection.poll():
                last = connection.recv()
            time.sleep(0.005)  # leaves the machine's cores to starting processes
            step, attempt = manager.current_step(), attempt + 1
            optimizer.zero_grad()
            model(torch.randn(4, 32, device=device)).square().mean().backward()
            for key, parameter in model.named_parameters():
                assert parameter.grad is not None
                manager.allreduce(parameter.grad, feedback.of(key) if parameter.dim() > 1 else Int8())
            if name == "a" and attempt % FAIL_EVERY == 0:
                manager.report_error(RuntimeError("injected"))
            error = manager.errored()
            optimizer.step()
            if manager.current_step() == step:
                connection.send(Event("failed", step, text=str(error)))
                continue
            state = digest({"model": model.state_dict(), "adam": adam.state_dict()})
            connection.send(Event("commit", manager.current_step(), state, manager.num_participants()))
    connection.send(Event("end"))


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=5_000, heartbeat_timeout_ms=3_000) as server:
        yield server


@pytest.mark.in_parts
def test_kill_and_heal_with_error_feedback_gives_equal_digests(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    job = Job(spawn, lighthouse)

    def start(name: str) -> Trainer:
        return job.add(name, train, str(lighthouse.address), name, "cpu")

    trainers = [start(name) for name in ("a", "b", "c")]
    job.until(lambda: all(trainer.committed_with(3) for trainer in trainers), "three commit together")
    for _ in range(2):
        victim = trainers.pop()
        victim.process.kill()
        job.until(lambda: all(trainer.committed_with(2) for trainer in trainers), "two commit without the killed one")
        trainers.append(start("c"))
        job.until(lambda: all(trainer.committed_with(3) for trainer in trainers), "three commit together again")
    job.finish(trainers)
    assert job.check_digests() > 20
    assert any("injected" in event.text for event in trainers[0].of_kind("failed"))


@pytest.mark.gpu
@pytest.mark.timeout(180)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_gpu_replicas_over_nccl_have_equal_digests(spawn: Spawn, lighthouse: LighthouseServer) -> None:
    job = Job(spawn, lighthouse)
    trainers = [job.add(name, train, str(lighthouse.address), name, "cuda") for name in ("a", "b")]
    job.until(lambda: all(trainer.committed_with(2, 20) for trainer in trainers), "two commit together")
    job.finish()
    assert job.check_digests() > 20


def train_apart(lighthouse: str, name: str, codec: Codec, connection: Connection) -> None:
    """Run a replica whose syncs go with a codec and feedback, several in flight, until the test gives the last."""
    torch.set_num_threads(1)
    torch.manual_seed(sum(name.encode()))
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    fragments = [model[0], model[2]]
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with Manager(
        ProcessGroupGloo(),
        replica_id=name,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        timeout=timedelta(seconds=20),
    ) as manager:
        feedback = ErrorFeedback(manager, codec)
        with DiLoCo(manager, fragments, inner, outer, 4, fragment_sync_delay=3, should_quantize=feedback) as diloco:
            last, step = None, manager.current_step()
            while last is None or manager.current_step() < last:
                if connection.poll():
                    last = connection.recv()
                time.sleep(0.005)  # leaves the machine's cores to starting processes
                inner.zero_grad()
                model(torch.randn(4, 32)).square().mean().backward()
                inner.step()
                if manager.current_step() != step:
                    step = manager.current_step()
                    connection.send(Event("commit", step, digest(diloco.state_dict()), manager.num_participants()))
    connection.send(Event("end"))


@pytest.mark.in_parts
@pytest.mark.parametrize("codec", [Int4(), TopK()], ids=["int4", "top k"])
def test_kill_and_heal_of_quantized_syncs_gives_equal_digests(
    spawn: Spawn, lighthouse: LighthouseServer, codec: Codec
) -> None:
    job = Job(spawn, lighthouse)

    def start(name: str) -> Trainer:
        return job.add(name, train_apart, str(lighthouse.address), name, codec)

    trainers = [start(name) for name in ("a", "b", "c")]
    job.until(lambda: all(trainer.committed_with(3) for trainer in trainers), "three commit together")
    trainers.pop().process.kill()
    job.until(lambda: all(trainer.committed_with(2) for trainer in trainers), "two commit without the killed one")
    trainers.append(start("c"))
    job.until(lambda: all(trainer.committed_with(3) for trainer in trainers), "three commit together again")
    job.finish(trainers)
    assert job.check_digests() > 20
