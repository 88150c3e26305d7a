"""A group whose allreduce is a Manager's: the mean over the participants of the current step.

With this group, code that uses only process groups takes part in fault tolerance. Examples are `dist.all_reduce(tensor,
group=managed)` and FSDP2's hooks.

Law of this file: the Manager is known by the small protocol below; the Manager owns the life of its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, final

import torch
import torch.distributed as dist

from tft_pg.base import ProcessGroup
from tft_pg.errors import ConfigError, UnsupportedOperationError
from tft_pg.ops import Collective
from tft_pg.word import LINGER, WordExchange
from tft_pg.work import DummyWork

__all__ = ["ManagedProcessGroup", "ReducesOverParticipants"]


class ReducesOverParticipants(Protocol):
    """The methods that a managed group needs of a Manager."""

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: dist.ReduceOp.RedOpType) -> dist.Work:
        """Reduce one tensor, in place, over the participants of this step."""
        ...

    def num_participants(self) -> int:
        """Return the number of replicas that take part in this step."""
        ...


_PREMUL_SUM: Any = dist.ReduceOp.RedOpType.PREMUL_SUM  # type: ignore[attr-defined]  # torch's stub lacks this member

# Collectives that run in a group of one: each replica group is alone in this mesh dimension and already has all
# weights.
_RUN_ALONE = frozenset(
    {
        "allgather",
        "allgather_coalesced",
        "_allgather_base",
        "allgather_into_tensor_coalesced",
        "broadcast",
        "gather",
        "gather_into_tensor",
        "scatter",
        "barrier",
    }
)
_ROOTED = frozenset({"broadcast", "gather", "gather_into_tensor", "scatter"})

# Alternatives, for collectives whose typical caller is known.
_SHARDED = (
    "if FSDP calls it, FSDP shards over this dimension: pass mesh['dp', 'shard'], with the dimension across replica "
    "groups first, or use the replicate of replicate_with_fsdp"
)
_OBJECTS = "if all_gather_object or gather_object calls it, pass a group inside the replica group"
_ALTERNATIVES = {
    "_allgather_base": f"{_SHARDED}; {_OBJECTS}",
    "allgather_into_tensor_coalesced": _SHARDED,
    "_reduce_scatter_base": _SHARDED,
    "reduce_scatter_tensor_coalesced": _SHARDED,
    "allgather": f"if torch's DistributedDataParallel calls it, use that of tft-algos; {_OBJECTS}",
}


@final
class ManagedProcessGroup(ProcessGroup):
    """A group that reduces over the participants of a Manager. For all other collectives each replica group is alone.

    `size()` is the number of participants. Allreduce (also coalesced) reduces over them, with the Manager's reductions.
    Replica groups hold the same weights, and their ranks change from step to step. So the collectives that move weights
    (broadcast, the allgathers, gather, scatter) and barrier run in a group of one. All other collectives are refused.
    The Manager configures and aborts its own group, so this group refuses `configure`, `reconfigure`, `abort`,
    `set_timeout`, `exchange_word` and `linger`. `shutdown` has no effect on the Manager's group.

    Args:
        manager: reduces, and knows the number of participants.
    """

    def __init__(self, manager: ReducesOverParticipants) -> None:
        super().__init__()
        self._manager = manager

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        if collective.name in _RUN_ALONE:
            return self._run_alone(collective, args, kwargs)
        tensors = collective.results(args, kwargs)
        if collective.name == "allreduce":
            if len(tensors) != 1:
                raise ConfigError(
                    f"a managed allreduce takes one tensor, but got {len(tensors)}; call it for each tensor"
                )
        elif collective.name != "allreduce_coalesced":
            raise UnsupportedOperationError(
                f"a managed group does not support {collective.name}, because it only reduces over the participants; "
                f"{_alternative(collective)}"
            )
        reduce_op = _reduce_op(collective.argument(1, args, kwargs))
        works = [self._manager.allreduce(tensor, reduce_op=reduce_op) for tensor in tensors]
        return works[0] if len(works) == 1 else _AllOf(works, tensors)

    def _run_alone(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        if collective.name in _ROOTED:
            place = next(place for place, names in enumerate(collective.parameters) if "root" in names)
            value = collective.argument(place, args, kwargs)
            root = getattr(value, "rootRank", value)
            if root not in (None, 0):
                raise ConfigError(
                    f"{collective.name} of a managed group got root {root}, but each replica group is alone there; "
                    "pass root 0"
                )
        try:
            collective.copy_to_self(args, kwargs)
        except ConfigError as error:
            raise UnsupportedOperationError(
                f"a managed group does not support {collective.name} over the participants, because each replica group "
                f"is alone there and gets only its own tensor ({error}); {_alternative(collective)}"
            ) from None
        return DummyWork(collective.results(args, kwargs))

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
        raise self._not_supported("configure")

    @property
    def supports_reconfigure(self) -> bool:
        """Return False, because the Manager configures its own group."""
        return False

    def get_reconfigure_handle(self) -> str:
        raise self._not_supported("get_reconfigure_handle")

    def abort(self) -> None:
        raise self._not_supported("abort")

    def set_timeout(self, timeout: timedelta) -> None:
        raise self._not_supported("set_timeout")

    def exchange_word(self, words: Sequence[int], *, round_number: int, timeout: timedelta) -> WordExchange:
        raise self._not_supported("exchange_word")

    def linger(self, timeout: timedelta = LINGER) -> bool:
        raise self._not_supported("linger")

    def _not_supported(self, operation: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(f"a managed group does not support {operation}, because its Manager does that")

    def errored(self) -> Exception | None:
        """Return None always. Errors go to the Manager, which votes against the step."""
        return None

    def shutdown(self) -> None:
        """Do nothing, because the group belongs to the Manager."""

    def size(self) -> int:
        """Return the number of participants in this step, at least 1 because torch divides by it. Waits for the
        quorum.
        """
        return max(self._manager.num_participants(), 1)

    def rank(self) -> int:
        """Return 0, because the participants change from step to step and a reduction does not use the rank."""
        return 0

    def getBackendName(self) -> str:
        return "tft-managed"

    def __repr__(self) -> str:
        return f"ManagedProcessGroup({self._manager!r})"


def _alternative(collective: Collective) -> str:
    return _ALTERNATIVES.get(collective.name, "use allreduce, or a group inside the replica group")


def _reduce_op(value: object) -> dist.ReduceOp.RedOpType:
    """Return the reduction of either call form. Torch's default is a sum."""
    op: Any = getattr(value, "reduceOp", value)
    reduce_op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM if op is None else getattr(op, "op", op)
    if reduce_op == _PREMUL_SUM:
        raise UnsupportedOperationError("a managed group does not support PREMUL_SUM; multiply the tensor and use SUM")
    return reduce_op


@final
class _AllOf(dist.Work):
    """The reductions of several tensors, as one Work."""

    def __init__(self, works: list[dist.Work], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._works = works
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        ended_well = [work.wait(timeout) if timeout else work.wait() for work in self._works]
        return all(ended_well)

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(lambda _: self._tensors)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        for work in self._works:
            work.synchronize()

    def block_current_stream(self) -> None:
        for work in self._works:
            work.block_current_stream()
