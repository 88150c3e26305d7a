"""One island of the slow-link benchmark: a language model trained in three ways, piece by piece, on request.

The ways are: alone, without synchronization, with torch's own DistributedDataParallel, and with Streaming DiLoCo. Each
way has its own model. All models start equal, and see the same text in the same steps. An order is a JSON line, and so
is its answer.

Law of this file: one process and its computation. The parent owns the link, the order of the ways and the figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from benchmarks.step_worker import SECRET, report
from examples.train_lm import Decoder, Settings, read_text
from integration_tests.hosts import INTERFACE
from tft_suite import DiLoCo, Manager, ProcessGroupGloo, fragment_model

ISLANDS: Final = 2
SEQUENCES: Final = 18  # in a step, of each island
LEARNING_RATE: Final = 3e-3
OUTER_LEARNING_RATE: Final = 0.9
OUTER_MOMENTUM: Final = 0.5
MODEL: Final = Settings(width=64, layers=4, heads=4, context=64)


def make_model() -> nn.Module:
    """Return the model, equal on every island."""
    torch.manual_seed(0)
    return Decoder(MODEL)


class Text:
    """The training text of an island, and the validation text."""

    def __init__(self, island: int) -> None:
        text = read_text(MODEL.characters)
        self._train, self._validation = text[: -len(text) // 10], text[-len(text) // 10 :]
        self._island = island

    def at(self, step: int) -> Tensor:
        """Return the island's share of a step: (sequences, context + 1)."""
        drawn = torch.Generator().manual_seed(ISLANDS * step + self._island)
        starts = torch.randint(len(self._train) - MODEL.context, (SEQUENCES,), generator=drawn)
        return self._train[starts[:, None] + torch.arange(MODEL.context + 1)]

    def validation(self) -> Tensor:
        """Return 512 sequences of the validation text."""
        length = MODEL.context + 1
        return self._validation[: len(self._validation) // length * length].view(-1, length)[:512]


def loss_of(model: nn.Module, sequences: Tensor) -> Tensor:
    """Return the mean loss of predicting each next character."""
    return F.cross_entropy(model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())


class Way:
    """One way to train: a model and its progress.

    Args:
        text: of the island.
        steps: of the whole run. The learning rate depends on it.
        wrap: maps a model and its optimizer to the module that is called instead of the model.
    """

    def __init__(self, text: Text, steps: int, wrap: Callable[[nn.Module, torch.optim.Optimizer], nn.Module]) -> None:
        self._text = text
        self._steps = steps
        self._step = 0
        self._model = make_model()
        self._adam = torch.optim.AdamW(self._model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        self._wrapped = wrap(self._model, self._adam)

    def obey(self, order: dict[str, Any]) -> float:
        """Train if the order has a number of steps, else return the loss."""
        return self.train(order["steps"]) if "steps" in order else self.loss()

    def train(self, steps: int) -> float:
        """Train that many more steps. Returns: their duration in seconds."""
        began_s = time.perf_counter()
        for _ in range(steps):
            self._train()
        return time.perf_counter() - began_s

    def _train(self) -> None:
        cosine = 0.55 + 0.45 * math.cos(math.pi * min(self._step / self._steps, 1.0))
        for group in self._adam.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (self._step + 1) / 20) * cosine
        self._adam.zero_grad()
        loss_of(self._wrapped, self._text.at(self._step)).backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._adam.step()
        self._step += 1

    @torch.no_grad()
    def loss(self) -> float:
        """Return the loss on text that is never trained on."""
        losses = [loss_of(self._model, part).item() for part in self._text.validation().split(64)]
        return sum(losses) / len(losses)


def ddp_of_torch(model: nn.Module, _: torch.optim.Optimizer) -> nn.Module:
    """Wrap the model in torch's own DistributedDataParallel, over the default group."""
    return nn.parallel.DistributedDataParallel(model)


@contextmanager
def ways(arguments: argparse.Namespace) -> Iterator[dict[str, Way]]:
    """Yield all three ways, by name."""
    text = Text(arguments.island)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    store = TCPStore(arguments.store, arguments.port, is_master=arguments.island == 0, wait_for_workers=False)
    if arguments.island == 0:
        report(port=store.port)
    dist.init_process_group("gloo", store=store, rank=arguments.island, world_size=ISLANDS)
    with ExitStack() as stack:

        def streaming_diloco(model: nn.Module, adam: torch.optim.Optimizer) -> nn.Module:
            manager = stack.enter_context(
                Manager(
                    ProcessGroupGloo(timeout=timedelta(seconds=60)),
                    replica_id=f"island_{arguments.island}",
                    lighthouse_addr=arguments.lighthouse,
                    hostname=arguments.hostname,
                    token=SECRET,
                    min_replica_size=ISLANDS,
                )
            )
            fragments = fragment_model(model, arguments.fragments)
            outer = [
                torch.optim.SGD(each.parameters(), lr=OUTER_LEARNING_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
                for each in fragments
            ]
            stack.enter_context(
                DiLoCo(
                    manager,
                    fragments,
                    adam,
                    outer,
                    sync_every=arguments.sync_every,
                    fragment_sync_delay=arguments.delay,
                    use_bucketization=True,
                )
            )
            return model

        made = {
            "alone": Way(text, arguments.steps, lambda model, _: model),
            "ddp": Way(text, arguments.steps, ddp_of_torch),
            "diloco": Way(text, arguments.steps, streaming_diloco),
        }
        try:
            yield made
        finally:
            made.clear()  # torch's DDP must not hold the last reference to a Gloo group (docs/troubleshooting.md)
            gc.collect()
    dist.destroy_process_group()


def main() -> None:
    """Perform orders until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=["tft"], required=True)
    for flag in ("island", "port", "steps", "fragments", "sync-every", "delay"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    for flag in ("hostname", "lighthouse", "store"):
        parser.add_argument(f"--{flag}", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with ways(arguments) as trained:
        report(gradient_bytes=sum(parameter.nbytes for parameter in make_model().parameters()))
        for line in sys.stdin:
            order: dict[str, Any] = json.loads(line)
            report(answer=trained[order["way"]].obey(order))


if __name__ == "__main__":
    main()
