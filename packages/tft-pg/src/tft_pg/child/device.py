"""A device's memory and streams, shared by a trainer and the child that runs its group.

The child maps the allocations of the trainer's tensors, and works on them in place. Flags in device memory order the
streams of the two processes. Each call has a number. The trainer's stream sets the call's flag when its tensors are
ready, and the child's stream waits for that. The child's stream then sets its own flag to the number of the call, and
the trainer's streams wait for that. So no host waits for the device.

An event of the child would not do. If the child is killed, a stream that waits for its event waits forever. A flag can
be set by the trainer instead.

Law of this file: the interface. `cuda_memory` fills it in, and a test replaces it.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Final, final

import torch

__all__ = ["CALLS_MAX", "DeviceMemory", "MappedMemory", "Place"]

CALLS_MAX: Final = 4096
"""The most calls that a child can have at the same time. Each has a flag of its own."""


@final
@dataclass(frozen=True)
class Place:
    """Where a tensor begins.

    Args:
        buffer: the number of its allocation, unique in the process's life.
        handle: by which the child maps the allocation.
        offset: in the allocation, in bytes.
    """

    buffer: int
    handle: str
    offset: int


class DeviceMemory(abc.ABC):
    """The trainer's side, made for one child."""

    @abc.abstractmethod
    def settings(self) -> dict[str, object]:
        """Return what the child's side needs, as JSON values."""

    @abc.abstractmethod
    def fault(self, tensor: torch.Tensor) -> str:
        """Return why a tensor can't be used by the child, as a part of a sentence, or an empty text."""

    @abc.abstractmethod
    def place(self, tensor: torch.Tensor) -> Place:
        """Return where a tensor begins that has elements and no fault. Raises: RuntimeError: the device failed."""

    @abc.abstractmethod
    def set_flag(self, number: int) -> None:
        """Let the current stream set a call's flag when it comes there. Returns at once."""

    @abc.abstractmethod
    def order_after(self, number: int) -> None:
        """Let the current stream wait until the child's stream has passed a call. Returns at once."""

    @abc.abstractmethod
    def release(self) -> None:
        """End the waits of all streams for the child, now and later. Any thread may call this again."""


class MappedMemory(abc.ABC):
    """The child's side."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Return the device of all tensors."""

    @abc.abstractmethod
    def map(self, buffer: int, handle: str) -> torch.Tensor:
        """Return an allocation as bytes; it stays mapped. Raises: RuntimeError: it can't be mapped."""

    @abc.abstractmethod
    def order_after(self, number: int) -> None:
        """Let this process's stream wait for the flag of a call. Returns at once."""

    @abc.abstractmethod
    def set_passed(self, number: int) -> None:
        """Let this process's stream report a call as passed when it comes there. Returns at once."""
