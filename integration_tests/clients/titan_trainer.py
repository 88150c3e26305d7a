"""A trainer that calls torchft as torchtitan's fault-tolerance experiment does. It does not know of tft.

The model is sharded over the replica group. The optimizer is a container that calls back into itself. State is
registered after the Manager is made. Nothing shuts the Manager down: the process ends.

It prints one line for each commit: the step, the participants, the sum of ones over the replicas after the vote (0: not
reduced), and a digest of this rank's share of the weights that the commit made equal.

Law of this file: torchft's public names, in the order in which torchtitan calls them.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import torchft

PACE_S: Final = 0.05


class Manager:
    """torchtitan's holder of a Manager: it has no state yet, and averages over replicas by a registered group.

    Args:
        number: of this replica group.
        is_per_step: gradients are averaged in each step. False: a strategy synchronizes weights.
    """

    def __init__(self, number: int, is_per_step: bool) -> None:
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=20)),
            min_replica_size=1,
            load_state_dict=None,
            state_dict=None,
            use_async_quorum=is_per_step,
            replica_id=f"titan_{number}",
        )
        self.replicas: dist.ProcessGroup | None = None
        if is_per_step:
            self.replicas = torchft.process_group.ManagedProcessGroup(self.manager)
            self.replicas.register("dp_replicate")

    def average_gradients_of(self, model: nn.Module) -> None:
        """Average gradients over replicas in the backward pass, after they were reduced in the replica group."""
        if self.replicas is not None:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_all_reduce_hook(
                        lambda gradients: dist.all_reduce(gradients, group=self.replicas, op=dist.ReduceOp.AVG)
                    )


class Optimizers(torch.optim.Optimizer):
    """Some optimizers as one, whose step goes through torchft's optimizer and comes back.

    Args:
        holder: of the Manager.
        model: its layers have one optimizer each.
    """

    def __init__(self, holder: Manager, model: nn.Module) -> None:
        self.optimizers = [torch.optim.AdamW(layer.parameters(), lr=0.01) for layer in model.children()]
        super().__init__(model.parameters(), {})  # for its hooks
        for optimizer in self.optimizers:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()  # makes its state
            optimizer.zero_grad()
        self._cache: list[dict[str, Any]] = []
        self._through_manager = torchft.Optimizer(holder.manager, self)
        self._is_per_step = holder.replicas is not None

    def cache_state(self) -> None:
        self._cache = [optimizer.state_dict() for optimizer in self.optimizers]

    def state_dict(self) -> dict[str, Any]:
        return {str(number): state for number, state in enumerate(self._cache)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for number, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state_dict[str(number)])
        self.cache_state()

    def step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        if self._is_per_step:
            self._is_per_step = False
            self._through_manager.step(*args, **kwargs)
            self._is_per_step = True
        else:
            for optimizer in self.optimizers:
                optimizer.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._is_per_step:
            self._is_per_step = False
            self._through_manager.zero_grad(*args, **kwargs)
            self._is_per_step = True
        else:
            for optimizer in self.optimizers:
                optimizer.zero_grad(*args, **kwargs)


class Trainer:
    """One rank of a replica group.

    Args:
        algorithm: step, local_sgd, diloco, or streaming for DiLoCo with two fragments.
        number: of this replica group.
    """

    def __init__(self, algorithm: str, number: int) -> None:
        dist.init_process_group("gloo")
        self._holder = Manager(number, algorithm == "step")
        self._manager = self._holder.manager
        torch.manual_seed(number)  # its own weights
        self._model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        for layer in (*self._model.children(), self._model):
            fully_shard(layer, mesh=mesh)
        self._holder.average_gradients_of(self._model)
        self._optimizers = Optimizers(self._holder, self._model)
        self._steps = 0
        self._optimizers.cache_state()
        self._manager.set_state_dict_fns(self._load, self._take)
        self._fragments: list[nn.Module] = [*self._model.children()] if algorithm == "streaming" else [self._model]
        self._strategy = self._strategy_of(algorithm)

    def _strategy_of(self, algorithm: str) -> AbstractContextManager[Any]:
        if algorithm == "step":
            return nullcontext()
        from torchft import local_sgd

        if algorithm == "local_sgd":
            return local_sgd.LocalSGD(self._manager, self._model, self._optimizers, sync_every=4)
        outer = [
            torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.7, momentum=0.9, nesterov=True)
            for each in self._fragments
        ]
        return local_sgd.DiLoCo(
            manager=self._manager,
            model_fragments=self._fragments,
            inner_optimizer=self._optimizers,
            outer_optimizer=outer,
            sync_every=4,
            should_quantize=False,
            fragment_sync_delay=0,
            fragment_update_alpha=0.0,
        )

    def _take(self) -> dict[str, Any]:
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizers.state_dict(),
            "train_state": {"step": torch.tensor(self._steps)},
        }

    def _load(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._optimizers.load_state_dict(state["optimizer"])
        self._steps = int(state["train_state"]["step"])

    def train(self, last: Path) -> None:
        """Train until the commit whose number is in the file `last`, which a test writes."""
        generator = torch.Generator().manual_seed(dist.get_rank())
        with self._strategy:
            while not last.exists() or self._manager.current_step() < int(last.read_text()):
                self._steps += 1
                time.sleep(PACE_S)
                before = self._manager.current_step()
                self._optimizers.zero_grad()
                batch = torch.randn(4, 8, generator=generator)
                self._model(batch).square().mean().backward()
                nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
                self._optimizers.step()
                counted = 0 if self._holder.replicas is None else self._count_replicas(self._holder.replicas)
                if (step := self._manager.current_step()) > before:
                    # The first step of a strategy is its opening.
                    equal = self._fragments[(step - 2) % len(self._fragments)]
                    print(f"commit {step} {self._manager.num_participants()} {counted} {digest(equal.parameters())}",
                          flush=True)  # fmt: skip

    @staticmethod
    def _count_replicas(replicas: dist.ProcessGroup) -> int:
        return round(float(funcol.all_reduce(torch.ones(()), reduceOp="sum", group=replicas)))


def digest(parameters: Iterable[nn.Parameter]) -> str:
    """Return a digest of this rank's shares of the parameters."""
    shares = (each.to_local() if isinstance(each, DTensor) else each for each in parameters)
    return hashlib.sha256(b"".join(share.detach().numpy().tobytes() for share in shares)).hexdigest()[:16]


if __name__ == "__main__":
    torch.set_num_threads(1)
    Trainer(sys.argv[1], int(sys.argv[2])).train(Path(sys.argv[3]))
    dist.destroy_process_group()
