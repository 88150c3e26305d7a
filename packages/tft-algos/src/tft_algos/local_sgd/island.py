"""Synchronizing an island through its group rank 0: the ranks put together what it sends, and share what came back.

Each rank has a part of a sharded tensor, or all of one that is the same on every rank, as under data parallelism inside
the island. Rank 0 gets whole tensors, for it alone meets the other islands, whose tensors are cut otherwise; and what
came of them it gives to all, of whom each cuts out its own part.

Both are collectives of torch's own groups, in which nothing is swallowed: if one fails, it raises, and the process
should end, as it should after any failed collective inside a replica group.

Law of this file: moving tensors inside one replica group; what is in them, and when, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist

from tft_algos.dtensors import cut_like, is_dtensor
from tft_algos.errors import SettingError
from tft_algos.manager import Manager


@final
class Island:
    """One rank's part in it.

    Args:
        rank: in torch's default group, which is that of the island.
    """

    def __init__(self, rank: int) -> None:
        self.is_first = rank == 0

    @torch.no_grad()
    def gather(self, tensors: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None) -> None:
        """Put the parts of all ranks together, on rank 0.

        Args:
            tensors: of this rank; DTensors, or tensors that are the same on every rank.
            into: on rank 0, of the whole shapes.
        """
        for index, tensor in enumerate(tensors):
            whole: torch.Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
            if into is not None:
                into[index].copy_(whole)

    @torch.no_grad()
    def scatter(self, wholes: Sequence[torch.Tensor] | None, into: Sequence[torch.Tensor]) -> None:
        """Give every rank its part of what rank 0 has.

        Args:
            wholes: on rank 0.
            into: of this rank; DTensors, or tensors that become the same on every rank; dense, each of its own memory.
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
            # One at a time: nobody has all of the whole tensors but rank 0.
            if wholes is not None:
                whole = wholes[index].to(part.device)
            else:
                whole = torch.empty(tensor.shape, dtype=part.dtype, device=part.device)
            dist.broadcast(whole, src=0)
            part.copy_(cut_like(whole, tensor).to_local())


def island_of(manager: Manager) -> Island | None:
    """Return the island of this rank. None: every rank synchronizes for itself, or the group has one rank.

    Raises: SettingError: torch's default group is not the group of this replica group's ranks.
    """
    config = manager.strategy.config
    if not config.rank0_synchronization_only or config.world_size == 1:
        return None
    found = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    if found != (config.rank, config.world_size):
        is_ = "does not exist" if found is None else f"has this process as rank {found[0]} of {found[1]}"
        raise SettingError(
            f"with rank0_synchronization_only the ranks of a replica group meet in torch's default group, which {is_}, "
            f"and this is rank {config.rank} of {config.world_size}; call torch.distributed.init_process_group with "
            "the ranks of this replica group before"
        )
    return Island(config.rank)
