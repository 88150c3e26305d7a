"""The single forwarder: every collective of a group becomes one call of its `_run`.

Python and C++ (DDP's reducer, functional collectives) call a subclass of `torch.distributed.ProcessGroup` by its Python
methods. This module makes the methods from the table in `ops`, so no group or wrapper spells them out. All methods call
`_run(collective, args, kwargs)`, which each group implements once.

torch.compile must not trace these methods: a group is opaque to the compiler, so tracing fails. Functional collectives
are part of the compiler's graphs and reach these methods from C++. All other collectives break the graph.

Law of this file: no behaviour, only forwarding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch.distributed as dist

from tft_pg.ops import COLLECTIVES, Collective

__all__ = ["RunsCollectives", "forward", "forward_collectives"]


class RunsCollectives(Protocol):
    """The method that the forwarder needs of a group."""

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
    """Exclude a function from torch.compile, without the cost and the import of `torch.compiler.disable`."""
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    # The names are private to torch. If torch removes them, compiled code reports that it can't trace this function.
    except ImportError:
        return
    skip = _FrameAction.SKIP  # neither this frame nor the frames that it calls
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(skip, skip))


_Class = TypeVar("_Class", bound=type)


def forward_collectives(cls: _Class) -> _Class:
    """Decorate a class: add one method for each name of each collective."""
    for row in COLLECTIVES:
        for name in (row.name, *row.aliases):
            setattr(cls, name, _method(row, name))
    return cls


def forward(
    group: dist.ProcessGroup, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dist.Work:
    """Call a collective of another group with the same arguments. Returns: its Work."""
    work: dist.Work = getattr(group, collective.name)(*args, **kwargs)
    return work
