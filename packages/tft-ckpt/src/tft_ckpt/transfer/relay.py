"""A state that is still being received, and whose finished chunks peers may read.

The receiver's threads report finished chunks, and the server's thread reads only those. The caller may change the state
after the receive. So the receiver first ends the relay, which returns when no reader is left.

Law of this file: one lock, counts and a bitmap; no sockets. Callbacks inform the server's loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from tft_ckpt.key import StateKey
from tft_ckpt.state.manifest import Layout, Manifest

if TYPE_CHECKING:
    from tft_ckpt.state.target import Target

__all__ = ["Relay"]


@final
class Relay:
    """The finished chunks of one state, from the first chunk to `end`.

    Args:
        manifest, manifest_bytes: of the state, as its source sent it.
        target: the memory that receives the state.
        on_have: called, from the receiving thread, when a chunk has arrived since the last look at the bitmap.
        on_end: called once, from the thread that ends the relay, to disconnect its readers.
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
        self._notified = False
        self._readers = 0
        self._ended = False
        self._abandoned = False
        self._changed = threading.Condition()

    @property
    def key(self) -> StateKey:
        """Return the name of the state."""
        return self.layout.key

    # ---- the receiver's side ----

    def have(self, chunk: int) -> None:
        """Mark a checked chunk as available and unchanging until `end`. Any thread may call this. A second call
        does nothing.
        """
        with self._changed:
            bit = 1 << chunk % 8
            if self._ended or self._have[chunk // 8] & bit:
                return
            self._have[chunk // 8] |= bit
            self._num_have += 1
            notify, self._notified = not self._notified, True
        if notify:
            self._on_have()

    def end(self) -> None:
        """End the relay, disconnect its readers and wait until none is left. A second call only waits."""
        with self._changed:
            first, self._ended = not self._ended, True
        if first:
            self._on_end(self)
        with self._changed:
            self._changed.wait_for(lambda: self._readers == 0 or self._abandoned)

    # ---- the server's side ----

    def bitmap(self) -> tuple[bytes, int]:
        """Return the bitmap of the available chunks, little-endian, and their number. The next chunk calls
        `on_have` again.
        """
        with self._changed:
            self._notified = False
            return bytes(self._have), self._num_have

    def lease(self, start: int, end: int) -> bool:
        """Add a reader of these bytes. The target stays unchanged until the release.

        Returns: False if some of the bytes are not available, or the relay has ended. Then there is nothing to release.
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
        """Remove a reader."""
        with self._changed:
            self._readers -= 1
            self._changed.notify_all()

    def views(self, start: int, end: int) -> list[memoryview]:
        """Return views of these bytes, in order. They are valid under a lease."""
        return self._target.views(start, end)

    def abandon(self) -> None:
        """End the relay because the server, with all readers, has ended."""
        with self._changed:
            self._ended = self._abandoned = True
            self._changed.notify_all()
