"""Registration of this package's groups in torch's tables of process groups.

A DeviceMesh and the functional collectives find a group by its name, in tables that only torch writes. This module asks
torch to create a group of this process alone. Torch then asks for a backend, and receives the existing group. Each kind
of group registers one backend with torch, because torch forgets groups but never backends. The backend holds no group.

Law of this file: only registration and removal; torch's own functions write the tables.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName

from tft_pg.forks import fork_safe_lock

__all__ = ["enter", "is_entered", "is_known_as", "leave"]

_DEVICES = ("cpu", "cuda", "xpu")

_lock = fork_safe_lock()
_entering: list[dist.ProcessGroup] = []  # at most one entry, under the lock


def _current_group(*_: object) -> dist.ProcessGroup:
    """Return the group being registered. Torch calls this function as the constructor of a backend."""
    return _entering[0]


def enter(group: dist.ProcessGroup, *, kind: str, description: str) -> None:
    """Register `group` with torch as a group of this process alone.

    Torch passes the new name to `_set_group_name`. The name is the same on every replica group whose processes register
    in the same order.

    Args:
        group: a Python subclass of torch's group, not in the tables yet.
        kind: torch's backend name for this kind of group.
        description: for torch's logs.
    """
    with _lock:
        if kind not in dist.Backend.backend_list:
            dist.Backend.register_backend(kind, _current_group, devices=[*_DEVICES])
        _entering.append(group)
        # If the default group is bound to a device, torch asks every new group whether its communicator can be split.
        vars(group)["_get_backend"] = lambda device: SimpleNamespace(supports_splitting=False)
        try:
            _new_group_of_one(kind, description)
        finally:
            del vars(group)["_get_backend"]
            _entering.clear()


def _new_group_of_one(kind: str, description: str) -> None:
    ranks = [dist.get_rank()]
    try:
        dist.new_group(ranks, backend=kind, use_local_synchronization=True, group_desc=description)
    except ValueError:
        # Torch derives such a name from the ranks and the number of groups. The name may already exist if another group
        # has left in the meantime. Names from torch's counter are unique, and these calls wait for no other rank
        # either.
        dist.new_group(ranks, backend=kind, group_desc=description)


def is_entered(group: dist.ProcessGroup) -> bool:
    """Return whether torch knows the group. Torch forgets all groups when its default group is destroyed."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True


def is_known_as(group: dist.ProcessGroup, name: GroupName) -> bool:
    """Return whether torch finds this group by the name, also during removal."""
    try:
        return _resolve_process_group(name) is group
    except RuntimeError:
        return False


def leave(group: dist.ProcessGroup) -> None:
    """Remove a known group from torch's tables. Torch calls the group's `shutdown` first."""
    dist.destroy_process_group(group)
