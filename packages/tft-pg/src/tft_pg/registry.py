"""Torch's tables of process groups, and how a group of ours gets into them and out again.

A DeviceMesh and the functional collectives know a group by its name, and look it up in tables that only torch writes.
So torch is asked to make a group of one, this process alone, and the "backend" that it then asks for is the group that
was there all along. One backend a kind of group is announced to torch, however often groups come and go, because torch
forgets a group but never a backend; and it holds no group.

The law of this file: nothing but the way into torch's tables and out of them; torch's own functions write there.
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
_entering: list[dist.ProcessGroup] = []  # at most one, under the lock


def _hand_over(*_: object) -> dist.ProcessGroup:
    """What torch takes for the constructor of a backend."""
    return _entering[0]


def enter(group: dist.ProcessGroup, *, kind: str, description: str) -> None:
    """Have torch know `group` as a group of this process alone.

    Torch calls its `_set_group_name` with the name that it gives it, the same one on every replica group whose
    processes do the same.

    Args:
        group: a Python subclass of torch's, not in the tables yet.
        kind: of group, torch's name of the backend.
        description: for torch's logs.
    """
    with _lock:
        if kind not in dist.Backend.backend_list:
            dist.Backend.register_backend(kind, _hand_over, devices=[*_DEVICES])
        _entering.append(group)
        # Where the default group is bound to a device, torch asks every new one whether its communicator can be split.
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
        # Torch makes such a name of the ranks and the number of groups, which has been the same before if another
        # group has left meanwhile. Names that it counts are never the same; nobody is waited for with these either.
        dist.new_group(ranks, backend=kind, group_desc=description)


def is_entered(group: dist.ProcessGroup) -> bool:
    """Whether torch knows the group; it forgets all of them when its default group is destroyed."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True


def is_known_as(group: dist.ProcessGroup, name: GroupName) -> bool:
    """Whether the group is what torch finds by a name; also in the middle of leaving."""
    try:
        return _resolve_process_group(name) is group
    except RuntimeError:
        return False


def leave(group: dist.ProcessGroup) -> None:
    """Have torch forget a group that it knows. Torch calls its `shutdown` first."""
    dist.destroy_process_group(group)
