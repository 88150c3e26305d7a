"""A state that is still being received, for others to read as far as it is here.

The receiver's threads say which chunks are there; the server's thread reads those and no others. Before the receiver
gives the state to its caller, who may change it, it ends the relay, which returns when nobody reads any more.

Law of this file: one lock, counts and a bitmap; no sockets. What is told to the server's loop goes through callbacks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from tft_ckpt.key import StateKey
from tft_ckpt.manifest import Layout, Manifest

if TYPE_CHECKING:
    from tft_ckpt.target import Target

__all__ = ["Relay"]


@final
class Relay:
    """What is here of one state, from the first chunk to `end`.

    Args:
        manifest, manifest_bytes: of the state, as its source sent it.
        target: where the state is received into.
        on_have: called, from the thread that has it, when a chunk has come since somebody last looked.
        on_end: called once, from the thread that ends the relay; it makes readers leave.
    """

    def __init__(
        self,
        manifest: Manifest,
        manifest_bytes: bytes,
        target: Target,
        *,
        on_have: Callable[[], None],
        on_end: Callable[[Relay], None],
    ) -> None:
        self.layout: Layout = manifest.layout
        self.manifest_bytes = manifest_bytes
        self._target = target
        self._on_have = on_have
        self._on_end = on_end
        self._have = bytearray(-(-manifest.layout.num_chunks // 8))
        self._num_have = 0
        self._told = False
        self._readers = 0
        self._ended = False
        self._abandoned = False
        self._changed = threading.Condition()

    @property
    def key(self) -> StateKey:
        """Which state it is."""
        return self.layout.key

    # ---- the receiver's side ----

    def have(self, chunk: int) -> None:
        """That chunk is here and checked, and will not change until `end`; from any thread; again does nothing."""
        with self._changed:
            bit = 1 << chunk % 8
            if self._ended or self._have[chunk // 8] & bit:
                return
            self._have[chunk // 8] |= bit
            self._num_have += 1
            tell, self._told = not self._told, True
        if tell:
            self._on_have()

    def end(self) -> None:
        """Return when nobody reads from the target any more; those that do are broken off; again does nothing."""
        with self._changed:
            first, self._ended = not self._ended, True
        if first:
            self._on_end(self)
        with self._changed:
            self._changed.wait_for(lambda: self._readers == 0 or self._abandoned)

    # ---- the server's side ----

    def bitmap(self) -> tuple[bytes, int]:
        """The chunks that are here, little-endian, and their number; asks to be told of the next one."""
        with self._changed:
            self._told = False
            return bytes(self._have), self._num_have

    def lease(self, start: int, end: int) -> bool:
        """Somebody begins to read these bytes; the target stays as it is until the release.

        Returns: False if some of them are not here, or the relay has ended; there is nothing to release then.
        """
        with self._changed:
            if self._ended:
                return False
            chunks = range(start // self.layout.chunk_bytes, -(-end // self.layout.chunk_bytes)) if end > start else ()
            if not all(self._have[chunk // 8] >> chunk % 8 & 1 for chunk in chunks):
                return False
            self._readers += 1
            return True

    def release(self) -> None:
        """A reader has left."""
        with self._changed:
            self._readers -= 1
            self._changed.notify_all()

    def pieces(self, start: int, end: int) -> list[memoryview]:
        """Where these bytes lie, in order; good under a lease of them."""
        return self._target.pieces(start, end)

    def abandon(self) -> None:
        """The server is gone, and all readers with it."""
        with self._changed:
            self._ended = self._abandoned = True
            self._changed.notify_all()
