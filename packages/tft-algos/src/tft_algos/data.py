"""A sampler that divides a dataset among all processes of all replica groups.

The division is fixed when the sampler is made. Each process has its own share for good, even while replica groups are
absent. This is simple and needs no communication, but it loses samples when replica groups come and go. See
`DistributedSampler`.

Law of this file: the process of each sample. No Manager, no communication.
"""

from __future__ import annotations

import os
from typing import Any, final

import torch.distributed as dist
import torch.utils.data
from torch.utils.data import Dataset

from tft_algos.errors import ConfigError


@final
class DistributedSampler(torch.utils.data.DistributedSampler[Any]):
    """A sampler that gives each process of each replica group its own share of a dataset.

    This sampler is lossy. It keeps no record of what was trained:

    - While a replica group is absent, its share is not trained. Its samples of that time are skipped.
    - A step that does not commit has consumed its batch. The samples of that batch are skipped in this epoch.
    - A replica group that restarts begins its share from the start of the epoch that `set_epoch` names. It trains some
      samples twice.
    - Replica groups can be at different places of an epoch, and in different epochs.

    Shuffling makes the loss harmless for most training runs of many epochs. Do not use it where each sample must count
    exactly once. A batch that is a function of the committed step has none of these losses: see docs/data.md.

    Call `set_epoch` before each epoch with a number that all replica groups share. A number that follows from
    `manager.current_step()` is the same for a newcomer as for the others. A counter of the loop is not.

    Args:
        dataset: has a length.
        replica_rank: the number of this replica group, 0-based and fixed, such as REPLICA_GROUP_ID. This is not the
            replica rank in a quorum, which changes.
        num_replica_groups: how many replica groups the job has when all are present.
        group_rank: of this process in its replica group. None: its rank in torch's default group, or 0 without one.
        num_replicas: processes in each replica group. None: the size of torch's default group, or 1 without one.
        kwargs: `shuffle`, `seed` and `drop_last`, as for torch's DistributedSampler.
    Attributes:
        global_rank: group_rank + num_replicas * replica_rank.
        global_world_size: num_replicas * num_replica_groups.
    Raises: ConfigError: a rank is out of range, or this replica group has several processes and torch's default group
        does not exist yet.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        replica_rank: int,
        num_replica_groups: int,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        **kwargs: Any,
    ) -> None:
        if group_rank is None or num_replicas is None:
            own_rank, own_size = _place_in_group()
            group_rank = own_rank if group_rank is None else group_rank
            num_replicas = own_size if num_replicas is None else num_replicas
        for name, rank, limit in (
            ("replica_rank", replica_rank, num_replica_groups),
            ("group_rank", group_rank, num_replicas),
        ):
            if not 0 <= rank < limit:
                raise ConfigError(f"{name} is {rank}; give a rank from 0 to {limit - 1}")
        self.global_rank = group_rank + num_replicas * replica_rank
        self.global_world_size = num_replicas * num_replica_groups
        super().__init__(dataset, num_replicas=self.global_world_size, rank=self.global_rank, **kwargs)


def _place_in_group() -> tuple[int, int]:
    """Return the rank of this process in its replica group, and the size of that group."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"this replica group has {os.environ['WORLD_SIZE']} processes and torch's default process group does not "
            "exist yet; call init_group first, or pass group_rank and num_replicas"
        )
    return 0, 1
