"""How the tensors of a call reach the child: the interface that each kind of child-process group fills in.

Law of this file: the interface only.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from tft_pg.child.arguments import Arguments
from tft_pg.child.call import CallMemory
from tft_pg.child.link import Link
from tft_pg.errors import Where
from tft_pg.ops import Collective

__all__ = ["TensorSharing"]


class TensorSharing(abc.ABC):
    """The memory that one group shares with its children. Any thread may call it.

    Attributes:
        prefix: added to the store prefix of each `configure`, so that only ranks of such a group meet. Empty: ranks
            whose library runs in the trainer itself may be in the group.
    """

    prefix: str = "child"

    @abc.abstractmethod
    def open(self) -> CallMemory:
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
    def close(self) -> None:
        """Release the memory that no call uses."""
