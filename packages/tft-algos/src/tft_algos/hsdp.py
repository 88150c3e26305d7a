"""Models that are sharded inside a replica group and averaged across the groups: FSDP2 inside, fault tolerance across.

There are two ways, and both compute what torch's own hybrid sharding does. Either the mesh of the replica group gets
one more dimension, and FSDP2 itself reduces over it (`extend_mesh`); then the mesh is there for whatever else wants to
reduce over the groups. Or the model is sharded over the group's own mesh, and each of its parts averages what is left
of its gradients across the groups, through the hook that FSDP2 has for that (`reduce_across`); then parameters are
DTensors as without fault tolerance, and so are checkpoints.

FSDP2 goes on, when a hook returns, with what the hook has left in the tensor. In most cases that is to take the
tensor's memory as gradients, and nobody reads those before the backward pass is over; so a reduction may then go on
beside the rest of the backward pass, and is waited for at its end. Where FSDP2 computes with the tensor at once, in
another dtype, onto a gradient that is there already, in another memory or in a user's hook, the hook waits.

Law of this file: how FSDP2 comes to the Manager; the order of reductions, and the waiting, are `backward`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tft_algos.backward import reductions_of, tell_parameters
from tft_algos.errors import SettingError, Unsupported
from tft_algos.manager import Manager
from tft_algos.manager.island import refuse_strategy
from tft_pg import ManagedProcessGroup, ProcessGroup, extend_device_mesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def extend_mesh(manager: Manager, mesh: DeviceMesh, name: str = "dp", dim: int = 0) -> DeviceMesh:
    """Give the mesh of one replica group a dimension across the groups, over a Manager's participants.

    Then `fully_shard(model, mesh=mesh["dp", "shard"])` is hybrid sharding over whoever takes part in the step. All
    processes of a replica group extend their meshes in the same order, after torch's default group was initialized.

    Args:
        manager: reduces over its participants.
        mesh: of this replica group's processes; its dimensions have names.
        name: of the new dimension.
        dim: where it comes: 0, the first, is where FSDP2 has hybrid sharding's replicas.
    Returns: a mesh whose size in the new dimension is 1, and whose group there (`mesh.get_group(name)`) is a
        ManagedProcessGroup, registered as `name`.
    Raises: SettingError: manager is no Manager, or has rank0_synchronization_only. tft_pg.errors.InvalidSetting,
        tft_pg.errors.Unsupported: as `tft_pg.extend_device_mesh`, which says more of such a mesh.
    """
    return extend_device_mesh(mesh, ManagedProcessGroup(_InOrder(_checked(manager))), name, dim)


def reduce_across(manager: Manager, *models: torch.nn.Module) -> None:
    """Average the gradients of sharded models over a Manager's participants, within their backward passes.

    Sets FSDP2's all-reduce hook in every sharded part of the models, once; call it when `fully_shard` has been, and
    before the first backward pass. Each part then gives what its reduce-scatter leaves on this process to
    `manager.allreduce`, in reduce_dtype. The hook of a part with parameters on several meshes (experts, say) is set
    too, which torch's own method refuses: an average across replica groups is the same on each of them.

    After a backward pass the gradients are averages. A failed reduction never raises: the step is voted down. One
    inside the replica group does raise, because torch's own groups don't come back: end the process.

    Args:
        manager: averages over its participants; a replica group alone pays nothing.
        models: each fully_shard-ed over its own mesh, one of this replica group's processes.
    Raises: SettingError: no model; nothing in it is sharded; a trainable parameter is in no sharded part, so that it
        would stay as it is on each replica; a mesh replicates already, across the groups or inside; a hook is set
        already. Nothing has changed then. Unsupported: this release of torch keeps its sharded parts otherwise.
    """
    _checked(manager)
    if not models:
        raise SettingError("reduce_across was given no model; give those that fully_shard has sharded")
    parts: dict[int, _Part] = {}
    for model in models:
        found = list(_parts_of(model))
        _check(model, found)
        parts.update((id(part.group), part) for part in found)
    for part in parts.values():
        part.set_hook(_hook(manager, part))
    tell_parameters(manager, *models)


@final
class _InOrder:
    """A Manager whose reductions come after those that other models of it have on the way."""

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
    if not callable(getattr(manager, "allreduce", None)):  # whoever composes a strategy has a Manager of their own
        raise SettingError(f"the manager is a {type(manager).__name__}; give a Manager, and models or a mesh after it")
    refuse_strategy(manager, "hybrid sharding across replica groups")
    return manager


@final
@dataclass(frozen=True)
class _Part:
    """Parameters that FSDP2 communicates together.

    Args:
        name: of the sharded module, in its model.
        module: it.
        group: torch's own object for the parameters.
        alone: the module has no other.
    """

    name: str
    module: FSDPModule
    group: Any
    alone: bool

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """This process's shards."""
        return [each.sharded_param for each in self.group.fsdp_params]

    @property
    def places(self) -> Iterator[tuple[torch.nn.Module, str]]:
        """Modules, and what a parameter is called there; several for a shared one."""
        for each in self.group.fsdp_params:
            info = each._module_info
            yield info.module, info.param_name
            yield from zip(info.shared_modules, info.shared_param_names, strict=True)

    @property
    def replicates_over(self) -> dist.ProcessGroup | None:
        """The group over which FSDP2 itself reduces across replicas; None: it doesn't."""
        mesh_info = self.group.mesh_info
        return None if mesh_info.replicate_mesh_dim is None else mesh_info.replicate_process_group

    @property
    def sums_only(self) -> bool:
        """Whether FSDP2 divides the sums that it makes itself, after the hook."""
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
        """Whether FSDP2 does nothing with a reduced tensor but to take its memory as gradients."""
        return (
            tensor.dtype in (torch.float32, torch.bfloat16)  # it divides a sum of others once more
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
        raise SettingError(f"reduce_across was given a {type(model).__name__}; give modules")
    from torch.distributed.fsdp import FSDPModule  # takes half a second, which only those who shard shall wait for

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
            raise Unsupported(
                f"torch {torch.__version__} keeps what fully_shard made otherwise than 2.11 to 2.15 ({error}); use one "
                "of these, or extend_mesh"
            ) from error


def _groups_of(module: FSDPModule) -> Sequence[Any]:
    """Torch's own objects for the parameters of a sharded module."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        found: Sequence[Any] = state._fsdp_param_groups
        return found
    only = state._fsdp_param_group  # before torch 2.13 there is one, or none
    return [] if only is None else [only]


def _check(model: torch.nn.Module, parts: list[_Part]) -> None:
    """Check that the sharded parts can be reduced across replica groups, and cover every trainable parameter.

    Raises: SettingError: a part can't be reduced, or a trainable parameter is in no part.
    """
    what = type(model).__name__
    if not parts:
        raise SettingError(
            f"nothing in this {what} is sharded by fully_shard; shard it first, or use DistributedDataParallel of "
            "tft-algos"
        )
    for part in parts:
        where = f"the part {part.name!r} of this {what}" if part.name else f"this {what}"
        group = part.replicates_over
        if isinstance(group, ProcessGroup):
            raise SettingError(
                f"{where} is sharded over an extended mesh, so that FSDP2 reduces it across replica groups already; "
                "leave reduce_across out, or shard over the mesh that was extended"
            )
        if group is not None:
            raise SettingError(
                f"{where} is replicated inside the replica group; shard it over one dimension of the mesh, or make "
                "each of these replicas a replica group of its own"
            )
        if part.has_hook:
            raise SettingError(
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
        raise SettingError(
            f"fully_shard has not sharded {', '.join(left[:3])}{f' and {len(left) - 3} more' if left[3:] else ''} of "
            f"this {what}, so that each replica would train on with its own: call fully_shard on the whole model too, "
            "or freeze them with requires_grad_(False), or give reduce_across the sharded modules alone and reduce "
            "the others with Manager.allreduce"
        )


def _hook(manager: Manager, part: _Part) -> Callable[[torch.Tensor], None]:
    row = reductions_of(manager)

    def reduce_across_replica_groups(reduced_inside: torch.Tensor) -> None:
        # A schedule of pipeline parallelism has its last reductions when its backward passes are over.
        outside = torch._C._current_graph_task_id() == -1
        row.start(manager, reduced_inside, wait=outside or not part.takes_memory_of(reduced_inside))

    return reduce_across_replica_groups
