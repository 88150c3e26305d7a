"""One replica of the step benchmark, for each of the compared systems.

Model, data, optimizer and clock are the same for all systems, and only the wrapping differs. The worker runs under the
interpreter that has the system installed. It prints one JSON line: the time of each committed step, in milliseconds.

Law of this file: it imports no package of either system before it knows the requested one.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

BATCH = 4
LAYERS = 4
SECRET = "benchmark"  # without a secret other hosts are not served
Closer = Callable[[], None]


def make_model(hidden: int) -> nn.Module:
    """Return LAYERS linear layers of `hidden` by `hidden`, with ReLU between them, equal on every replica."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def wrap_ddp(arguments: argparse.Namespace, model: nn.Module) -> tuple[nn.Module, Any, Closer]:
    """Wrap the model in torch's own DistributedDataParallel over Gloo."""
    host, port = arguments.store.rsplit(":", 1)
    store = TCPStore(host, int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=arguments.rank, world_size=arguments.replicas)
    wrapped = nn.parallel.DistributedDataParallel(model)
    return wrapped, torch.optim.AdamW(model.parameters()), dist.destroy_process_group


def wrap_torchft(arguments: argparse.Namespace, model: nn.Module) -> tuple[nn.Module, Any, Closer]:
    """Wrap the model with the peer's public API, constructed in the order of its own examples: the Manager first."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=arguments.replicas,
        replica_id=f"replica_{arguments.rank}",
        lighthouse_addr=arguments.lighthouse,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
        init_sync=False,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    return DistributedDataParallel(manager, model), Optimizer(manager, optimizer), manager.shutdown


def wrap_tft(arguments: argparse.Namespace, model: nn.Module) -> tuple[nn.Module, Any, Closer]:
    """Wrap the model with tft's public API, with the same settings."""
    from tft_suite import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=arguments.replicas,
        replica_id=f"replica_{arguments.rank}",
        lighthouse_addr=arguments.lighthouse,
        hostname="127.0.0.1",
        init_sync=False,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    return DistributedDataParallel(manager, model), Optimizer(manager, optimizer), manager.shutdown


WRAPPERS = {"ddp": wrap_ddp, "torchft": wrap_torchft, "tft": wrap_tft}


def one_layer(arguments: argparse.Namespace) -> tuple[nn.Module, Any, torch.Tensor]:
    """Return a layer of `hidden` by `hidden` and its optimizer, wrapped, and the batch of this replica."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, optimizer, _ = WRAPPERS[arguments.system](arguments, nn.Linear(arguments.hidden, arguments.hidden))
    return model, optimizer, batch_of(arguments)


def batch_of(arguments: argparse.Namespace) -> torch.Tensor:
    """Return the replica's batch, equal in each run of a rank."""
    return torch.randn(BATCH, arguments.hidden, generator=torch.Generator().manual_seed(arguments.rank))


def report(**facts: object) -> None:
    """Print one line for the parent."""
    json.dump(facts, sys.stdout)
    sys.stdout.write("\n")
    sys.stdout.flush()


def main() -> None:
    """Train, and print the step times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=sorted(WRAPPERS), required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--store", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    model, optimizer, close = WRAPPERS[arguments.system](arguments, make_model(arguments.hidden))
    data = batch_of(arguments)
    times_ms: list[float] = []
    before = time.perf_counter()
    for step in range(arguments.warmup + arguments.steps):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        now = time.perf_counter()
        if step >= arguments.warmup:
            times_ms.append((now - before) * 1e3)
        before = now
    manager = getattr(optimizer, "manager", None)
    committed = manager.current_step() if manager is not None else arguments.warmup + arguments.steps
    report(times_ms=times_ms, committed=committed)
    sys.stdin.readline()  # the other replica may still need this one
    del model  # torch's DDP must not hold the last reference to a Gloo group (docs/troubleshooting.md)
    gc.collect()
    close()


if __name__ == "__main__":
    main()
