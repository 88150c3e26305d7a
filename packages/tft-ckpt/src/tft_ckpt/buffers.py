"""Memory for runs of bytes, kept because fresh memory is dear.

The first touch of a fresh page costs many times the copy that fills it: a gibibyte copied into fresh pages of the usual
size takes 1.8 s where 0.06 s would do. So a large buffer is asked for in huge pages (where the system grants them on
request, a first copy then costs hardly more than a later one), and is kept to be used again. A smaller one is not: of
pages of the usual size there are always some that were in use a moment ago, while a virtual machine gives free huge
ones back to its host, and their first touch is then dearer than any other (50 MiB: 0.1 s in place of 0.02).

Law of this file: memory and its reuse; nothing here knows what the bytes mean. Not thread-safe: the owner locks.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import final

import torch

from tft_ckpt.errors import StateUnavailable

__all__ = ["Buffer", "BufferPool"]

_HUGE_PAGE_BYTES = 2 << 20
_HUGE_PAGES_FROM_BYTES = 128 << 20
_PIECE_BYTES = 64 << 20


@final
class Buffer:
    """Anonymous private memory, page-aligned, zero until written; freed when nothing looks into it any more.

    Fields:
        capacity_bytes: what it can hold.
        view: all of it, writable.
        tensor: uint8 (capacity_bytes,), the same memory.
    Raises: StateUnavailable: the system has no such amount of memory.
    """

    __slots__ = ("_pinned", "capacity_bytes", "tensor", "view")

    def __init__(self, capacity_bytes: int) -> None:
        self._pinned = False
        self.capacity_bytes = max(capacity_bytes, 1)
        try:
            memory = mmap.mmap(-1, self.capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise StateUnavailable(
                f"this process got no {capacity_bytes} bytes of memory for a state: {error}; free some, or lower the "
                "limit on data_bytes"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE") and self.capacity_bytes >= _HUGE_PAGES_FROM_BYTES:
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(memory)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)

    def __del__(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())

    def pin(self) -> str:
        """Have its pages stay where they are until it is freed, so that a CUDA device copies into them by itself.

        Returns: why that can't be, as the device's library says it, or "".
        """
        if not self._pinned:
            library = torch.cuda.cudart()
            code = library.cudaHostRegister(self.tensor.data_ptr(), self.capacity_bytes, 0)
            if int(code) != 0:
                return str(library.cudaGetErrorString(code))
            self._pinned = True
        return ""

    def fits(self, num_bytes: int) -> bool:
        """Whether it holds so many bytes without waste."""
        return num_bytes <= self.capacity_bytes <= 2 * num_bytes + _HUGE_PAGE_BYTES

    def touch(self, give_up: Callable[[], bool]) -> None:
        """Write to all of it, a piece at a time, so that the next writer finds no fresh page; ends early on give_up."""
        for piece in self.tensor.split(_PIECE_BYTES):
            if give_up():
                return
            piece.zero_()


@final
class BufferPool:
    """Keeps one free buffer, the one that came back last."""

    def __init__(self) -> None:
        self._free: Buffer | None = None

    def take(self, num_bytes: int) -> Buffer:
        """A buffer of at least so many bytes, the kept one if it fits without waste. Its content is arbitrary."""
        kept, self._free = self._free, None
        if kept is not None and kept.fits(num_bytes):
            return kept
        # Dropped before the new one is made, so that both are not held at once.
        del kept
        return Buffer(num_bytes)

    def fresh_bytes(self, num_bytes: int) -> int:
        """How much more memory `take` would take from the system."""
        if self._free is None:
            return num_bytes
        return 0 if self._free.fits(num_bytes) else max(num_bytes - self._free.capacity_bytes, 0)

    def has(self, num_bytes: int) -> bool:
        """Whether `take` would give the kept one."""
        return self._free is not None and self._free.fits(num_bytes)

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back. Nothing may look into it any more."""
        self._free = buffer

    def clear(self) -> None:
        """Let go of the kept buffer."""
        self._free = None
