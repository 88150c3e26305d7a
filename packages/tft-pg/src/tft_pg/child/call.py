"""One call of a child, and the memory that calls use.

Law of this file: records, without behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from tft_pg.child.segments import Segment

__all__ = ["Call", "CallMemory"]


@final
@dataclass(eq=False)
class Call:
    """One call of the child.

    Args:
        operation: its name, for messages.
        finish: called with the answer, by a thread of the link.
        fail: called with the error, by a thread of the link or the one that ends the group.
        limit_s: the child's own limit for the operation; the child is killed some seconds after it.
        write: writes the results into the caller's tensors, before `finish`. Never called after the call has failed.
        learn: called with every answer, also with one that holds an error, before `finish` and `fail`.
        started: called when the child has started the operation, if it reports that.
        segment: the memory of the call.
        lent: the caller's own tensors that the child works on. They are kept until it has finished.
        number: of the call, from 0; set by the link.
        has_started: whether the child has reported the start; set by the link.
        due_s: when the child is killed; set by the link.
    """

    operation: str
    finish: Callable[[dict[str, Any]], None]
    fail: Callable[[Exception], None]
    limit_s: float
    write: Callable[[], None] | None = None
    learn: Callable[[dict[str, Any]], None] | None = None
    started: Callable[[], None] | None = None
    segment: Segment | None = None
    lent: Sequence[torch.Tensor] = ()
    number: int = -1
    has_started: bool = False
    due_s: float = 0.0


def _nothing() -> None:
    return None


def _none_dropped() -> list[int]:
    return []


@final
@dataclass(frozen=True)
class CallMemory:
    """What the calls of one child use.

    Args:
        take_back: takes the memory of a call that has ended in both processes.
        release: lets all go on that waits for the child on a device. Called when the child has failed or was told to
            end, and again when its process has ended.
        settings: of the child's group.
        dropped: returns the numbers of the segments that the child is to unmap, each once.
    """

    take_back: Callable[[Call], None]
    release: Callable[[], None] = _nothing
    settings: Mapping[str, object] = field(default_factory=dict)
    dropped: Callable[[], list[int]] = _none_dropped
