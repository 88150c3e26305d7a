"""One writer for each stream.

grpc takes one message of a stream at a time, so whoever has something to say puts it here, at once and without
waiting, and one task writes it, in order. A peer that does not read must not cost memory for ever: when more waits for
it than any quorum needs, its stream ends.

Law of this file: a queue and its end; it knows nothing of what is written.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, final

MOST_WAITING_BYTES: Final = 16 << 20


@final
class Outbox:
    """Messages that wait to be written. To be used on one loop only.

    Args:
        overflows: called once, when too much waits; it ends the stream. Nothing is taken after it.
        most_bytes: that may wait; one message may always.
    """

    def __init__(self, overflows: Callable[[], object], *, most_bytes: int = MOST_WAITING_BYTES) -> None:
        self._messages: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._overflows = overflows
        self._most_bytes = most_bytes
        self.closed = False  # nothing more is taken
        self._idle: asyncio.Future[None] | None = None

    def put(self, message: bytes) -> None:
        """Say it after all that was said before; dropped when the outbox is closed."""
        if self.closed:
            return
        if self._messages and self._waiting_bytes + len(message) > self._most_bytes:
            self._messages.clear()
            self.close()
            self._overflows()
            return
        self._messages.append(message)
        self._waiting_bytes += len(message)
        self._wake()

    def close(self) -> None:
        """Say what is here still, then end."""
        self.closed = True
        self._wake()

    async def write_all(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write with `write` until the outbox is closed and empty. For one task. Raises what `write` raises."""
        while True:
            while self._messages:
                message = self._messages.popleft()
                self._waiting_bytes -= len(message)
                await write(message)
            if self.closed:
                return
            self._idle = asyncio.get_running_loop().create_future()
            try:
                await self._idle
            finally:
                self._idle = None

    def _wake(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
