"""Synchronizing an island through its group rank 0: gather what the island sends, and scatter the result.

Each rank has a part of a sharded tensor, or all of a tensor that is the same on every rank (data parallelism inside the
island). Rank 0 gets whole tensors, because only rank 0 communicates with other islands, which may shard differently.
Rank 0 gives the result to all ranks, and each rank takes its own part.

Both steps are collectives of torch's own groups, without error handling. A failed collective raises. The process should
then end, as after any failed collective inside a replica group.

Law of this file: moving tensors inside one replica group. Their content, and the time of the move, are decided
elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist

from tft_algos.dtensors import is_dtensor, shard_like
from tft_algos.errors import ConfigError
from tft_algos.manager import Manager


@final
class Rank0Sync:
    """One rank's part in an island.

    Args:
        rank: the rank in torch's default group, which is the group of the island.
    """

    def __init__(self, rank: int) -> None:
        self.is_first = rank == 0

    @torch.no_grad()
    def gather(self, tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None) -> None:
        """Gather the parts of all ranks on rank 0.

        Args:
            tensors: the tensors of this rank. DTensors, or tensors that are the same on every rank.
            into: on rank 0, tensors of the whole shapes. None on other ranks.
        """
        for index, tensor in enumerate(tensors):
            whole: torch.Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
            if into is not None:
                into[index].copy_(whole)

    @torch.no_grad()
    def scatter(self, wholes: Sequence[torch.Tensor] | None, into: Sequence[torch.Tensor]) -> None:
        """Give every rank its part of the tensors of rank 0.

        Args:
            wholes: on rank 0, the whole tensors. None on other ranks.
            into: the tensors of this rank. DTensors, or tensors that become the same on every rank. Dense, each with
                memory of its own.
        """
        for index, tensor in enumerate(into):
            if not tensor.numel():
                continue
            if not is_dtensor(tensor):
                if wholes is not None:
                    tensor.copy_(wholes[index])
                dist.broadcast(tensor, src=0)
                continue
            part = tensor.to_local()
            # One tensor at a time, so that only rank 0 holds all whole tensors.
            if wholes is not None:
                whole = wholes[index].to(part.device)
            else:
                whole = torch.empty(tensor.shape, dtype=part.dtype, device=part.device)
            dist.broadcast(whole, src=0)
            part.copy_(shard_like(whole, tensor).to_local())


def rank0_sync_of(manager: Manager) -> Rank0Sync | None:
    """Return the island of this rank. None: every rank synchronizes for itself, or the group has one rank.

    Raises: ConfigError: torch's default group is not the group of this replica group's ranks.
    """
    config = manager.strategy.config
    if not config.rank0_synchronization_only or config.world_size == 1:
        return None
    found = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    if found != (config.rank, config.world_size):
        is_ = "does not exist" if found is None else f"has this process as rank {found[0]} of {found[1]}"
        raise ConfigError(
            f"rank0_synchronization_only needs torch's default group of this replica group's ranks, which {is_}, and "
            f"this is rank {config.rank} of {config.world_size}; call torch.distributed.init_process_group with the "
            "ranks of this replica group first"
        )
    return Rank0Sync(config.rank)
