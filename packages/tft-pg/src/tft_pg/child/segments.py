"""Shared memory for the tensors of running calls.

A segment is an anonymous file (memfd) that two processes map. The files have no names, so the kernel frees them when
both processes are gone, however they end. A segment belongs to one call at a time. It is used again only when the call
has been answered or the child process is dead, because a running operation of the child may still write.

Law of this file: memory and descriptors; nothing here knows a message or a collective.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

import torch

from tft_pg.forks import Inheritance, let_go_in_child

__all__ = [
    "SEGMENT_BYTES_MAX",
    "Pool",
    "Segment",
    "copy_in",
    "copy_out",
    "map_segment",
    "places",
    "strided_view",
    "view",
]

SEGMENT_BYTES_MAX: Final = 1 << 40
"""The largest segment that a child accepts."""

_SMALLEST: Final = 1 << 14
_ALIGNMENT: Final = 64
_HUGE_PAGE: Final = 1 << 21
_FREE_BYTES_MAX: Final = 1 << 30


@final
@dataclass(eq=False)
class Segment:
    """One piece of shared memory.

    Args:
        number: unique in its pool.
        size: in bytes.
        descriptor: of the file, to be sent to a child.
        memory: all bytes, as a tensor.
    """

    number: int
    size: int
    descriptor: int
    memory: torch.Tensor


def map_segment(descriptor: int, size: int) -> torch.Tensor:
    """Map a shared file of this process or another. Raises: ValueError, OSError: it is not as large as `size`."""
    if not 0 < size <= SEGMENT_BYTES_MAX or os.fstat(descriptor).st_size < size:
        raise ValueError(f"a segment can't have {size} bytes")
    mapped = mmap.mmap(descriptor, size)
    # A forked child of this process must not keep the memory, and never uses it.
    mapped.madvise(mmap.MADV_DONTFORK)
    if size >= _HUGE_PAGE:
        with suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


@final
class Pool:
    """The segments of one group. A free segment is used again by a call that needs about its size."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Segment]] = {}
        self._all: dict[int, Segment] = {}
        self._next = 0
        self._closed = False
        let_go_in_child(self)

    def take(self, size: int) -> Segment:
        """Return a segment of at least this size. Raises: OSError: there is no memory."""
        size = max(_SMALLEST, 1 << (size - 1).bit_length())
        with self._lock:
            free = self._free.get(size)
            if free:
                return free.pop()
            number = self._next
            self._next += 1
        descriptor = os.memfd_create("tft-pg", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            segment = Segment(number, size, descriptor, map_segment(descriptor, size))
        except BaseException:
            os.close(descriptor)
            raise
        with self._lock:
            self._all[number] = segment
        return segment

    def give(self, segment: Segment) -> None:
        """Take a segment back whose call has ended in both processes."""
        with self._lock:
            if segment.number not in self._all:
                return
            held = sum(size * len(free) for size, free in self._free.items())
            if not self._closed and held + segment.size <= _FREE_BYTES_MAX:
                self._free.setdefault(segment.size, []).append(segment)
                return
            del self._all[segment.number]
        os.close(segment.descriptor)

    def close(self) -> None:
        """Free the memory. A segment of a running call is freed when it is given back."""
        with self._lock:
            self._closed = True
            free = [segment for each in self._free.values() for segment in each]
            self._free.clear()
            for segment in free:
                del self._all[segment.number]
        for segment in free:
            os.close(segment.descriptor)

    def forked(self) -> Inheritance:
        """Release the descriptors in a forked child."""
        self._lock = threading.Lock()
        held, self._all, self._free, self._closed = list(self._all.values()), {}, {}, True
        # The memory is not mapped in the child, so nothing may unmap its addresses there.
        return Inheritance(
            descriptors=[each.descriptor for each in held], kept=[each.memory.untyped_storage() for each in held]
        )


def places(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return the offset of each tensor in a segment, and the size of all."""
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    return offsets, size


def view(memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor in a segment. Raises: ValueError: it does not lie inside."""
    count = 1
    for length in shape:
        if length < 0:
            raise ValueError(f"a tensor can't have the shape {list(shape)}")
        count *= length
    end = offset + count * dtype.itemsize
    if offset < 0 or offset % _ALIGNMENT or end > memory.numel():
        raise ValueError(f"bytes {offset} to {end} are not in a segment of {memory.numel()} bytes")
    return memory[offset:end].view(dtype).view(tuple(shape))


def strided_view(
    memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """Return a tensor of any layout, with elements, in some memory. Raises: ValueError: it does not lie inside."""
    last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    end = offset + (last + 1) * dtype.itemsize
    if offset < 0 or min(shape, default=1) < 1 or min(strides, default=0) < 0 or end > memory.numel():
        raise ValueError(f"bytes {offset} to {end} are not in an allocation of {memory.numel()} bytes")
    return memory[offset:end].view(dtype).as_strided(tuple(shape), tuple(strides))


def copy_in(memory: torch.Tensor, offset: int, tensor: torch.Tensor) -> None:
    """Copy a tensor to its place in a segment."""
    if tensor.is_contiguous():
        ctypes.memmove(memory.data_ptr() + offset, tensor.data_ptr(), tensor.numel() * tensor.element_size())
    else:
        view(memory, offset, tensor.dtype, tensor.shape).copy_(tensor.data)


def copy_out(memory: torch.Tensor, offset: int, tensor: torch.Tensor) -> None:
    """Copy a tensor from its place in a segment. Autograd does not see the change, as with torch's own backends."""
    if tensor.is_contiguous():
        ctypes.memmove(tensor.data_ptr(), memory.data_ptr() + offset, tensor.numel() * tensor.element_size())
    else:
        tensor.data.copy_(view(memory, offset, tensor.dtype, tensor.shape))
