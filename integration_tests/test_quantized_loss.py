"""The loss of a language model whose gradients or syncs travel quantized is that of the same training in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F

from examples.train_lm import Decoder, Settings, read_text
from integration_tests.conftest import Spawn
from integration_tests.training import Event, Job
from tft_algos import DiLoCo, Manager, Optimizer
from tft_algos.quantization import ErrorFeedback, TopK
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

NAMES: Final = ("a", "b")
WITHIN: Final = 0.01  # of float32's loss
SYNCS_WITHIN: Final = 0.02
SYNC_EVERY: Final = 10
RUN_S: Final = 1_500.0


@dataclass(frozen=True)
class Loss:
    """The loss of a replica at the end, on text that is never trained on."""

    value: float
    kind: str = "loss"


def train(lighthouse: str, name: str, kind: str, settings: Settings, connection: Connection) -> None:
    """Train one of two replicas, which share the batch of each step."""
    torch.set_num_threads(1)
    text = read_text(settings.characters)
    length = settings.context + 1
    torch.manual_seed(settings.seed)
    model = Decoder(settings)
    adam = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    with Manager(
        ProcessGroupGloo(),
        model.load_state_dict,
        model.state_dict,
        2,
        replica_id=name,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        timeout=timedelta(seconds=60),
    ) as manager:
        chosen: Any = {"float32": False, "int8": True, "int4": None}[kind]
        if chosen is None:
            chosen = ErrorFeedback(manager).of("gradient")
        optimizer = Optimizer(manager, adam)
        while (step := manager.current_step()) < settings.steps:
            optimizer.zero_grad()
            draw = torch.Generator().manual_seed(1_000_003 * settings.seed + step)
            starts = torch.randint(len(text) * 9 // 10 - length, (settings.batch,), generator=draw)
            share = text[starts[NAMES.index(name) :: 2, None] + torch.arange(length)]
            F.cross_entropy(model(share[:, :-1]).flatten(0, 1), share[:, 1:].flatten()).backward()
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            manager.allreduce(flat, chosen).wait()
            for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(part.view(gradient.shape))
            optimizer.step()
        connection.send(Loss(loss_on_unseen(model, text, length)))
    connection.send(Event("end"))


def loss_on_unseen(model: torch.nn.Module, text: torch.Tensor, length: int) -> float:
    """Return the loss on text that is never trained on."""
    unseen = text[len(text) * 9 // 10 :]
    unseen = unseen[: len(unseen) // length * length].view(-1, length)[:512]
    with torch.no_grad():
        return F.cross_entropy(model(unseen[:, :-1]).flatten(0, 1), unseen[:, 1:].flatten()).item()


def train_apart(lighthouse: str, name: str, kind: str, settings: Settings, connection: Connection) -> None:
    """Train one of two replicas, which synchronize with DiLoCo. Each has a batch of its own in each inner step."""
    torch.set_num_threads(1)
    text = read_text(settings.characters)
    length = settings.context + 1
    torch.manual_seed(settings.seed)
    model = Decoder(settings)
    adam = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    if kind == "diloco":
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    else:
        outer = torch.optim.SGD(model.parameters(), lr=1.4 if kind == "top k" else 1.0)
    with Manager(
        ProcessGroupGloo(),
        min_replica_size=2,
        replica_id=name,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        timeout=timedelta(seconds=60),
    ) as manager:
        chosen: Any = ErrorFeedback(manager, TopK(256)) if kind == "top k" else False
        with DiLoCo(manager, [model], adam, outer, SYNC_EVERY, use_bucketization=True, should_quantize=chosen):
            for step in range(settings.steps):
                adam.zero_grad()
                draw = torch.Generator().manual_seed(1_000_003 * settings.seed + 2 * step + NAMES.index(name))
                starts = torch.randint(len(text) * 9 // 10 - length, (settings.batch // 2,), generator=draw)
                share = text[starts[:, None] + torch.arange(length)]
                F.cross_entropy(model(share[:, :-1]).flatten(0, 1), share[:, 1:].flatten()).backward()
                adam.step()
            assert manager.current_step() == 1 + settings.steps // SYNC_EVERY
        connection.send(Loss(loss_on_unseen(model, text, length)))
    connection.send(Event("end"))


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=5_000) as server:
        yield server


def loss_of(
    spawn: Spawn, lighthouse: LighthouseServer, kind: str, settings: Settings, run: Callable[..., None] = train
) -> float:
    """Train two replicas and return their loss, which is the same."""
    job = Job(spawn, lighthouse)
    trainers = [job.add(name, run, str(lighthouse.address), name, kind, settings) for name in NAMES]
    job.until(lambda: all(trainer.ended for trainer in trainers), f"{kind} has trained", within_s=RUN_S)
    assert all(trainer.ended == Event("end") for trainer in trainers), job.history()
    losses: list[Any] = [loss for trainer in trainers for loss in trainer.of_kind("loss")]
    assert len(losses) == 2
    assert losses[0].value == losses[1].value
    print(f"{kind}, seed {settings.seed}, {settings.steps} steps: loss {losses[0].value:.4f}")
    return float(losses[0].value)


@pytest.mark.soak
@pytest.mark.timeout(3 * RUN_S)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_loss_after_1000_steps_is_within_one_percent(spawn: Spawn, lighthouse: LighthouseServer, seed: int) -> None:
    settings = Settings(steps=1_000, batch=16, context=32, characters=300_000, width=48, layers=2, seed=seed)
    exact = loss_of(spawn, lighthouse, "float32", settings)
    for kind in ("int8", "int4"):
        assert loss_of(spawn, lighthouse, kind, settings) <= (1 + WITHIN) * exact


@pytest.mark.soak
@pytest.mark.timeout(3 * RUN_S)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_loss_of_sparse_syncs_is_within_two_percent(spawn: Spawn, lighthouse: LighthouseServer, seed: int) -> None:
    """Within two percent of DiLoCo as its paper has it, and of the mean of the weights, both in float32."""
    settings = Settings(steps=1_000, batch=16, context=32, characters=300_000, width=48, layers=2, seed=seed)
    exact = loss_of(spawn, lighthouse, "diloco", settings, train_apart)
    sparse = loss_of(spawn, lighthouse, "top k", settings, train_apart)
    averaged = loss_of(spawn, lighthouse, "averaged", settings, train_apart)
    assert sparse <= (1 + SYNCS_WITHIN) * min(exact, averaged)
