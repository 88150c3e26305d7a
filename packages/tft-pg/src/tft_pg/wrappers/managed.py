"""A group whose allreduce is a Manager's: the mean over the participants, whoever they are in this step.

It lets code that knows process groups only, `dist.all_reduce(tensor, group=managed)` or FSDP2's hooks, take part in
fault tolerance. The law of this file: the Manager is known by the small protocol below; its group's life is its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, final

import torch
import torch.distributed as dist

from tft_pg.base import ProcessGroup
from tft_pg.errors import InvalidSetting, Unsupported
from tft_pg.ops import Collective

__all__ = ["ManagedProcessGroup", "ReducesOverParticipants"]


class ReducesOverParticipants(Protocol):
    """What is needed of a Manager."""

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: dist.ReduceOp.RedOpType) -> dist.Work:
        """Reduce one tensor, in place, over the participants of this step."""
        ...

    def num_participants(self) -> int:
        """How many replicas take part in this step."""
        ...


@final
class ManagedProcessGroup(ProcessGroup):
    """Reduces over the participants of a Manager.

    `size()` is the number of participants. Only allreduce of one tensor is there. The Manager configures and aborts
    its own group, so `configure`, `abort` and `set_timeout` are refused here, and `shutdown` leaves it alone.

    Args:
        manager: reduces, and knows how many take part.
    """

    def __init__(self, manager: ReducesOverParticipants) -> None:
        super().__init__()
        self._manager = manager

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        if collective.name != "allreduce":
            raise Unsupported(f"a managed group has no {collective.name}; it reduces over the participants only")
        tensors = collective.results(args, kwargs)
        if len(tensors) != 1:
            raise InvalidSetting(f"a managed allreduce takes one tensor, but got {len(tensors)}; reduce each by itself")
        return self._manager.allreduce(tensors[0], reduce_op=_reduce_op(collective.argument(1, args, kwargs)))

    def configure(
        self,
        store_addr: str,
        rank: int,
        world_size: int,
        *,
        replica_id: str = "",
        quorum_id: int | None = None,
        group_rank: int = 0,
        group_world_size: int = 1,
        global_ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        raise self._manager_does("configure")

    def abort(self) -> None:
        raise self._manager_does("abort")

    def set_timeout(self, timeout: timedelta) -> None:
        raise self._manager_does("set_timeout")

    def _manager_does(self, operation: str) -> Unsupported:
        return Unsupported(f"a managed group has no {operation}; its Manager does that")

    def errored(self) -> Exception | None:
        """None, always: an error goes to the Manager, which votes the step down."""
        return None

    def shutdown(self) -> None:
        """Nothing: the group belongs to the Manager."""

    def size(self) -> int:
        return self._manager.num_participants()

    def rank(self) -> int:
        """0: who takes part changes from step to step, and a reduction does not ask."""
        return 0

    def getBackendName(self) -> str:
        return "tft-managed"

    def __repr__(self) -> str:
        return f"ManagedProcessGroup({self._manager!r})"


def _reduce_op(value: object) -> dist.ReduceOp.RedOpType:
    """The reduction of either call form; torch's default is a sum."""
    op: Any = getattr(value, "reduceOp", value)
    return dist.ReduceOp.SUM if op is None else getattr(op, "op", op)
