"""Reusable memory for the bytes of a state, because fresh memory is expensive.

The first touch of a fresh page costs many times the copy that fills it. A gibibyte copied into fresh pages of the usual
size takes 1.8 s instead of 0.06 s. So a large buffer requests huge pages, and is kept for reuse. If the system grants
huge pages, a first copy costs hardly more than a later one.

A small buffer does not request huge pages. The system usually has recently used pages of the usual size. But a virtual
machine returns free huge pages to its host, and their first touch is then the most expensive (50 MiB: 0.1 s instead of
0.02 s).

Law of this file: memory and its reuse; nothing here knows what the bytes mean. Not thread-safe: the owner locks.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import final

import torch

from tft_ckpt.errors import StateUnavailableError

__all__ = ["Buffer", "BufferPool"]

_HUGE_PAGE_BYTES = 2 << 20
_HUGE_PAGES_FROM_BYTES = 128 << 20
_PIECE_BYTES = 64 << 20


@final
class Buffer:
    """Anonymous private memory, page-aligned, and zero until written. It is freed after its last reference.

    Fields:
        capacity_bytes: its size.
        view: all of it, writable.
        tensor: uint8 (capacity_bytes,), the same memory.

    Raises: StateUnavailableError: the system lacks this amount of memory.
    """

    __slots__ = ("_pinned", "capacity_bytes", "tensor", "view")

    def __init__(self, capacity_bytes: int) -> None:
        self._pinned = False
        self.capacity_bytes = max(capacity_bytes, 1)
        try:
            memory = mmap.mmap(-1, self.capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise StateUnavailableError(
                f"can't allocate {capacity_bytes} bytes of memory for a state: {error}; free memory, or lower "
                "Limits.data_bytes"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE") and self.capacity_bytes >= _HUGE_PAGES_FROM_BYTES:
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(memory)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)

    def __del__(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())

    def pin(self) -> str:
        """Pin the pages until the buffer is freed, so that a CUDA device copies into them directly.

        Returns: the error text of the device's library, or "".
        """
        if not self._pinned:
            library = torch.cuda.cudart()
            code = library.cudaHostRegister(self.tensor.data_ptr(), self.capacity_bytes, 0)
            if int(code) != 0:
                return str(library.cudaGetErrorString(code))
            self._pinned = True
        return ""

    def fits(self, num_bytes: int) -> bool:
        """Return whether this many bytes fit without much waste."""
        return num_bytes <= self.capacity_bytes <= 2 * num_bytes + _HUGE_PAGE_BYTES

    def touch(self, give_up: Callable[[], bool]) -> None:
        """Write to the whole buffer piece by piece, so that later writers find no fresh pages. Stop early on
        give_up.
        """
        for piece in self.tensor.split(_PIECE_BYTES):
            if give_up():
                return
            piece.zero_()


@final
class BufferPool:
    """A pool of one free buffer, the last returned one."""

    def __init__(self) -> None:
        self._free: Buffer | None = None

    def take(self, num_bytes: int) -> Buffer:
        """Return a buffer of at least this many bytes: the kept one if it fits, or a new one. Its content is
        arbitrary.
        """
        kept, self._free = self._free, None
        if kept is not None and kept.fits(num_bytes):
            return kept
        # Freed before the new one is made, so that both do not exist at once.
        del kept
        return Buffer(num_bytes)

    def fresh_bytes(self, num_bytes: int) -> int:
        """Return how much more memory `take` would request from the system."""
        if self._free is None:
            return num_bytes
        return 0 if self._free.fits(num_bytes) else max(num_bytes - self._free.capacity_bytes, 0)

    def has(self, num_bytes: int) -> bool:
        """Return whether `take` would return the kept buffer."""
        return self._free is not None and self._free.fits(num_bytes)

    def give(self, buffer: Buffer) -> None:
        """Return a buffer to the pool. No other code may use it any more."""
        self._free = buffer

    def clear(self) -> None:
        """Release the kept buffer."""
        self._free = None
