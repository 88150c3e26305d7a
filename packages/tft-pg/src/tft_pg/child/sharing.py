"""How the tensors of a call reach the child: the interface that each kind of child-process group fills in.

Law of this file: the interface only.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist

from tft_pg.child.arguments import Arguments
from tft_pg.child.link import Call, Link
from tft_pg.errors import Where
from tft_pg.ops import Collective

__all__ = ["Opened", "TensorSharing"]


@final
@dataclass(frozen=True)
class Opened:
    """What is shared with one child.

    Args:
        release: lets everything go on that waits for the child on a device. Called when the child has failed, and again
            when its process has ended.
        settings: of the child's group.
    """

    release: Callable[[], None] = lambda: None
    settings: Mapping[str, object] = field(default_factory=dict)


class TensorSharing(abc.ABC):
    """The memory that one group shares with its children. Any thread may call it."""

    @abc.abstractmethod
    def open(self) -> Opened:
        """Prepare for a new child. Raises: RuntimeError: the memory can't be shared."""

    @abc.abstractmethod
    def fault(
        self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object], where: Where
    ) -> str:
        """Return why the library can't run a call, regardless of the other ranks. Empty if no fault shows."""

    @abc.abstractmethod
    def start(
        self,
        link: Link,
        collective: Collective,
        packed: Arguments,
        results: Sequence[torch.Tensor],
        limit: timedelta,
    ) -> dist.Work:
        """Start a call in the child.

        Args:
            link: to the child.
            collective: the collective.
            packed: its arguments.
            results: the tensors that it writes.
            limit: of the operation in the child.

        Raises: ProcessGroupError: nothing was started.
        """

    @abc.abstractmethod
    def take_back(self, call: Call) -> None:
        """Take back the memory of a call that has ended in both processes."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the memory that no call uses."""
