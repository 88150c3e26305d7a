"""The user's process group as one that a Manager can configure.

Law of this file: one choice; the adapter itself is in tft_pg.
"""

from __future__ import annotations

import torch.distributed as dist

from tft_algos.manager.interfaces import ProcessGroupLike
from tft_pg import ReconfigurableProcessGroup, supports_reconfigure


def adopted(group: ProcessGroupLike | dist.ProcessGroup) -> ProcessGroupLike:
    """Return the group itself, or an adapter around a torch group that reconfigures by handles (torch 2.14 and later).

    Any other object is returned unchanged, and refused by the checks that follow.

    Raises: tft_pg.UnsupportedOperationError: the torch group's tensors are not on the CPU.
    """
    if callable(getattr(group, "configure", None)) or not supports_reconfigure(group):
        return group  # type: ignore[return-value]
    assert isinstance(group, dist.ProcessGroup)
    return ReconfigurableProcessGroup(group)
