"""The one forwarder: every collective of a group becomes one call of its `_run`.

A subclass of `torch.distributed.ProcessGroup` is called by its Python methods, from Python and from C++ (DDP's
reducer, functional collectives) alike. Instead of spelling the methods out in every group and every wrapper, they
are made here from the table in `ops`, and all lead to `_run(collective, args, kwargs)`, which a group writes once.

torch.compile must leave them alone: a group is opaque to it, so that it fails where it follows one into its methods.
The functional collectives, which it has in its graphs, come here from C++; the others break the graph.

The law of this file: no behaviour, only the way there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch.distributed as dist

from tft_pg.ops import COLLECTIVES, Collective

__all__ = ["RunsCollectives", "forward", "forward_collectives"]


class RunsCollectives(Protocol):
    """What the forwarder needs of a group."""

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work: ...


def _method(collective: Collective, name: str) -> Callable[..., dist.Work]:
    def method(self: RunsCollectives, *args: object, **kwargs: object) -> dist.Work:
        return self._run(collective, args, kwargs)

    method.__name__ = name
    method.__qualname__ = f"ProcessGroup.{name}"
    method.__doc__ = f"`torch.distributed.ProcessGroup.{name}`, in each of its call forms."
    _leave_uncompiled(method)
    return method


def _leave_uncompiled(function: Callable[..., object]) -> None:
    """What `torch.compiler.disable` does, but it costs a call nothing, and does not load the compiler."""
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # these names are torch's own: where they are gone, compiled code says that it can't follow
        return
    skip = _FrameAction.SKIP  # neither its frame nor those of what it calls
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(skip, skip))


_Class = TypeVar("_Class", bound=type)


def forward_collectives(cls: _Class) -> _Class:
    """Class decorator: give a class one method for each name of each collective."""
    for row in COLLECTIVES:
        for name in (row.name, *row.aliases):
            setattr(cls, name, _method(row, name))
    return cls


def forward(
    group: dist.ProcessGroup, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dist.Work:
    """Call a collective of another group with the same arguments."""
    work: dist.Work = getattr(group, collective.name)(*args, **kwargs)
    return work
