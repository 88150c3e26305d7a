"""Models that are sharded inside a replica group and averaged across the groups: FSDP2 with fault tolerance.

There are two ways, and both compute the same as torch's own hybrid sharding. With `extend_mesh`, the mesh of the
replica group gets one more dimension, and FSDP2 itself reduces over it. Other code can also reduce over this dimension.
With `reduce_across`, the model is sharded over the group's own mesh. Each part averages its reduced gradients across
the groups, through FSDP2's all-reduce hook. Parameters are then the same DTensors as without fault tolerance, and so
are checkpoints.

FSDP2 continues with the content of the tensor when a hook returns. In most cases it only uses the tensor's memory as
gradients, and nothing reads those before the end of the backward pass. The reduction may then run beside the rest of
the backward pass, and the end of the pass waits for it. In other cases FSDP2 computes with the tensor at once: another
dtype, an existing gradient, other memory, or a hook of the user. The hook then waits.

Law of this file: the connection of FSDP2 to the Manager. The order of reductions, and the waiting, are in `backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tft_algos.backward import fingerprint_parameters, reductions_of
from tft_algos.errors import ConfigError, UnsupportedFeatureError
from tft_algos.manager import Manager
from tft_algos.manager.quorum.rank0_groups import refuse_strategy
from tft_pg import ManagedProcessGroup, ProcessGroup, extend_device_mesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def extend_mesh(manager: Manager, mesh: DeviceMesh, name: str = "dp", dim: int = 0) -> DeviceMesh:
    """Add a dimension across replica groups, over a Manager's participants, to the mesh of one group.

    `fully_shard(model, mesh=mesh["dp", "shard"])` then shards inside the group and replicates over the participants of
    the step. All processes of a replica group extend their meshes in the same order, after torch's default group was
    initialized.

    Args:
        manager: reduces over its participants.
        mesh: the mesh of this replica group's processes. Its dimensions have names.
        name: the name of the new dimension.
        dim: the position of the new dimension. At 0, the first, FSDP2 expects the replicas of hybrid sharding.
    Returns: a mesh whose size in the new dimension is 1. Its group there (`mesh.get_group(name)`) is a
        ManagedProcessGroup, registered as `name`.
    Raises: ConfigError: `manager` is not a Manager, or has rank0_synchronization_only. tft_pg.errors.ConfigError,
        UnsupportedOperationError: as `tft_pg.extend_device_mesh`, which describes such a mesh.
    """
    return extend_device_mesh(mesh, ManagedProcessGroup(_InOrder(_checked(manager))), name, dim)


def reduce_across(manager: Manager, *models: torch.nn.Module) -> None:
    """Average the gradients of sharded models over a Manager's participants, within their backward passes.

    This sets FSDP2's all-reduce hook in every sharded part of the models, once. Call it after `fully_shard` and before
    the first backward pass. Each part then gives the result of its reduce-scatter on this process to
    `manager.allreduce`, in reduce_dtype. A part may have parameters on several meshes (experts, for example). Torch's
    own method refuses a hook for such a part. This function sets it, because an average across replica groups is the
    same on each mesh.

    After a backward pass the gradients are averages. A failed reduction never raises: the step is voted down. A failed
    reduction inside the replica group does raise, because torch's own groups can't be rebuilt. End the process then.

    Args:
        manager: averages over its participants. A replica group alone has no extra cost.
        models: modules that fully_shard has sharded, each over its own mesh of this replica group's processes.
    Raises: ConfigError: no model is given; nothing in a model is sharded; a trainable parameter is in no sharded part,
        so each replica would keep its own; a mesh already replicates, across groups or inside; or a hook is set
        already. Nothing has changed then. UnsupportedFeatureError: this release of torch stores its sharded parts in
        another way.
    """
    _checked(manager)
    if not models:
        raise ConfigError("reduce_across was given no model; give the models that fully_shard has sharded")
    parts: dict[int, _Part] = {}
    for model in models:
        found = list(_parts_of(model))
        _check(model, found)
        parts.update((id(part.group), part) for part in found)
    for part in parts.values():
        part.set_hook(_hook(manager, part))
    fingerprint_parameters(manager, *models)


@final
class _InOrder:
    """A Manager whose reductions come after the pending reductions of its other models."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: dist.ReduceOp.RedOpType) -> dist.Work:
        reductions_of(self._manager).pass_on(self._manager)
        return self._manager.allreduce(tensor, reduce_op=reduce_op)

    def num_participants(self) -> int:
        return self._manager.num_participants()

    def __repr__(self) -> str:
        return repr(self._manager)


def _checked(manager: Manager) -> Manager:
    if not callable(getattr(manager, "allreduce", None)):  # the user may have a Manager class of their own
        raise ConfigError(f"the manager is a {type(manager).__name__}; give a Manager, and models or a mesh after it")
    refuse_strategy(manager, "hybrid sharding across replica groups")
    return manager


@final
@dataclass(frozen=True)
class _Part:
    """Parameters that FSDP2 communicates together.

    Args:
        name: the name of the sharded module in its model.
        module: the sharded module.
        group: torch's own object for the parameters.
        alone: the module has no other such group.
    """

    name: str
    module: FSDPModule
    group: Any
    alone: bool

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters' shards of this process."""
        return [each.sharded_param for each in self.group.fsdp_params]

    @property
    def places(self) -> Iterator[tuple[torch.nn.Module, str]]:
        """Yield each module and the name of a parameter in it. A shared parameter has several."""
        for each in self.group.fsdp_params:
            info = each._module_info
            yield info.module, info.param_name
            yield from zip(info.shared_modules, info.shared_param_names, strict=True)

    @property
    def replicates_over(self) -> dist.ProcessGroup | None:
        """Return the group over which FSDP2 itself reduces across replicas; None: it does not."""
        mesh_info = self.group.mesh_info
        return None if mesh_info.replicate_mesh_dim is None else mesh_info.replicate_process_group

    @property
    def sums_only(self) -> bool:
        """Return whether FSDP2 divides its sums itself, after the hook."""
        return bool(self.group.force_sum_reduction_for_comms) or self.group.device.type == "mtia"

    @property
    def has_hook(self) -> bool:
        return self.group._all_reduce_hook is not None

    def set_hook(self, hook: Callable[[torch.Tensor], None]) -> None:
        if self.alone:
            self.module.set_all_reduce_hook(hook)
        else:
            self.group._all_reduce_hook = hook

    def takes_memory_of(self, tensor: torch.Tensor) -> bool:
        """Return whether FSDP2 only uses the memory of a reduced tensor as gradients."""
        return (
            tensor.dtype in (torch.float32, torch.bfloat16)  # FSDP2 divides the sums of other dtypes once more
            and not self.sums_only
            and all(
                shard.grad is None
                and shard.dtype == tensor.dtype
                and shard.device == tensor.device
                and not getattr(shard, "_post_accumulate_grad_hooks", None)
                for shard in self.parameters
                if shard.requires_grad
            )
        )


def _parts_of(model: torch.nn.Module) -> Iterator[_Part]:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"reduce_across was given a {type(model).__name__}; give modules")
    # The import takes half a second, which only jobs that shard should pay.
    from torch.distributed.fsdp import FSDPModule

    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        try:
            groups = _groups_of(module)
            for group in groups:
                part = _Part(name, module, group, alone=len(groups) == 1)
                _ = part.has_hook, part.replicates_over, part.parameters, [*part.places], part.sums_only
                yield part
        except AttributeError as error:
            raise UnsupportedFeatureError(
                f"torch {torch.__version__} stores the state of fully_shard differently from torch 2.11 to 2.15 "
                f"({error}); use one of these versions, or extend_mesh"
            ) from error


def _groups_of(module: FSDPModule) -> Sequence[Any]:
    """Return torch's own objects for the parameters of a sharded module."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        found: Sequence[Any] = state._fsdp_param_groups
        return found
    only = state._fsdp_param_group  # before torch 2.13 there is at most one
    return [] if only is None else [only]


def _check(model: torch.nn.Module, parts: list[_Part]) -> None:
    """Check that the sharded parts can be reduced across replica groups, and cover every trainable parameter.

    Raises: ConfigError: a part can't be reduced, or a trainable parameter is in no part.
    """
    what = type(model).__name__
    if not parts:
        raise ConfigError(
            f"nothing in this {what} is sharded by fully_shard; shard it first, or use DistributedDataParallel of "
            "tft-algos"
        )
    for part in parts:
        where = f"the part {part.name!r} of this {what}" if part.name else f"this {what}"
        group = part.replicates_over
        if isinstance(group, ProcessGroup):
            raise ConfigError(
                f"{where} is sharded over an extended mesh, so that FSDP2 reduces it across replica groups already; "
                "leave reduce_across out, or shard over the mesh that was extended"
            )
        if group is not None:
            raise ConfigError(
                f"{where} is replicated inside the replica group; shard it over one dimension of the mesh, or make "
                "each of these replicas a replica group of its own"
            )
        if part.has_hook:
            raise ConfigError(
                f"{where} has an all-reduce hook already; call reduce_across once for each model, and set no hook of "
                "your own"
            )
    reduced = {(id(module), name) for part in parts for module, name in part.places}
    if left := [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad and (id(module), name) not in reduced
    ]:
        raise ConfigError(
            f"fully_shard has not sharded {', '.join(left[:3])}{f' and {len(left) - 3} more' if left[3:] else ''} of "
            f"this {what}, so they would differ between replicas; call fully_shard on the whole model too, freeze them "
            "with requires_grad_(False), or give reduce_across only the sharded modules and reduce the others with "
            "Manager.allreduce"
        )


def _hook(manager: Manager, part: _Part) -> Callable[[torch.Tensor], None]:
    row = reductions_of(manager)

    def reduce_across_replica_groups(reduced_inside: torch.Tensor) -> None:
        # A pipeline-parallel schedule makes its last reductions after its backward passes.
        outside = torch._C._current_graph_task_id() == -1
        row.start(manager, reduced_inside, wait=outside or not part.takes_memory_of(reduced_inside))

    return reduce_across_replica_groups
