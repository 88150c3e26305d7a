"""A device's memory without a device, to test `ProcessGroupBabyNCCL` on a CPU.

The tensors are moved to shared memory where they are, so the child works on the caller's own tensors, as on a device.
The child opens the memory under `/proc`. There are no streams: `ordered` holds the numbers of the calls after which the
current stream would wait.

Law of this file: the memory only. The groups around it are the real ones.
"""

from __future__ import annotations

import itertools
import os
from typing import Final, final

import torch

from tft_pg.child.device import DeviceMemory, MappedMemory, Place
from tft_pg.child.segments import map_segment

__all__ = ["FakeMemory", "MappedFakeMemory"]

_CPU: Final = torch.device("cpu")


@final
class FakeMemory(DeviceMemory):
    """The trainer's side, to pass to a group as `make_memory`.

    `ordered` and `flagged` are the numbers of the calls in `order_after` and `set_flag`, in their order; `released`
    counts the calls of `release`.
    """

    def __init__(self) -> None:
        self.ordered: list[int] = []
        self.flagged: list[int] = []
        self.released = 0
        self._buffers = itertools.count()

    def settings(self) -> dict[str, object]:
        return {}

    def fault(self, tensor: torch.Tensor) -> str:
        return "" if tensor.is_cpu else f"a tensor is on {tensor.device}, but this group is for the CPU"

    def place(self, tensor: torch.Tensor) -> Place:
        descriptor, size = tensor.untyped_storage()._share_fd_cpu_()
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return Place(next(self._buffers), f"{os.getpid()}:{descriptor}:{size}", offset)

    def set_flag(self, number: int) -> None:
        self.flagged.append(number)

    def order_after(self, number: int) -> None:
        self.ordered.append(number)

    def release(self) -> None:
        self.released += 1


@final
class MappedFakeMemory(MappedMemory):
    """The child's side."""

    @property
    def device(self) -> torch.device:
        return _CPU

    def map(self, buffer: int, handle: str) -> torch.Tensor:
        owner, file, size = handle.split(":")
        descriptor = os.open(f"/proc/{owner}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return map_segment(descriptor, int(size))
        finally:
            os.close(descriptor)

    def order_after(self, number: int) -> None:
        return None

    def set_passed(self, number: int) -> None:
        return None
