"""The payload of a state, read in place from its tensors.

Law of this file: it copies only requested data, and only data on a device or in several places. The reader ensures that
no thread changes the tensors in the meantime.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Sequence
from typing import final

import torch

from tft_ckpt.state.manifest import Layout, StorageSpan

__all__ = ["LivePayload", "bytes_of"]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the CPU memory of a contiguous uint8 tensor. The memory lives as long as the view."""
    memory = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


@final
class LivePayload:
    """The payload of one state, in place.

    Args:
        layout: the place of each segment in the payload.
        spans: the place of each segment in memory; `describe` returns both.
    """

    def __init__(self, layout: Layout, spans: Sequence[StorageSpan]) -> None:
        self._segments = layout.segments
        self._starts = [segment.offset for segment in layout.segments]
        with torch.no_grad():
            self._bytes = [span.bytes() for span in spans]

    def wait_for_devices(self) -> None:
        """Wait for the calling thread's present work on CUDA devices, because another thread is going to read."""
        for device in {each.device for each in self._bytes if each.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()

    def tensor(self, start: int, end: int) -> torch.Tensor:
        """Return these bytes as uint8 (end - start,): in place if they are in one segment, else a copy on the CPU."""
        alone = self._alone(start, end)
        if alone is not None:
            return alone
        packed = torch.zeros(end - start, dtype=torch.uint8)
        self._pack(start, end, packed)
        return packed

    def piece(self, start: int, end: int) -> memoryview:
        """Return these bytes in this machine's memory, as a view of the state's own tensor or of a copy."""
        alone = self._alone(start, end)
        if alone is not None and alone.device.type == "cpu" and end > start:
            return bytes_of(alone)
        memory = bytearray(end - start)
        if memory:
            self._pack(start, end, torch.frombuffer(memory, dtype=torch.uint8))
        return memoryview(memory)

    def _alone(self, start: int, end: int) -> torch.Tensor | None:
        index = bisect.bisect_right(self._starts, start) - 1
        if index < 0 or end > self._segments[index].offset + self._segments[index].length:
            return None
        first = self._segments[index].offset
        return self._bytes[index][start - first : end - first]

    def _pack(self, start: int, end: int, into: torch.Tensor) -> None:
        index = max(bisect.bisect_right(self._starts, start) - 1, 0)
        while index < len(self._starts) and self._starts[index] < end:
            segment = self._segments[index]
            first, last = max(start, segment.offset), min(end, segment.offset + segment.length)
            if first < last:
                part = self._bytes[index][first - segment.offset : last - segment.offset]
                into[first - start : last - start].copy_(part)
            index += 1
