"""One writer for each stream.

grpc takes one message of a stream at a time, so whoever has something to say puts it here, at once and without
waiting, and one task writes it, in order.

Law of this file: a queue and its end; it knows nothing of what is written.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import final


@final
class Outbox:
    """Messages that wait to be written. To be used on one loop only."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self.closed = False  # nothing more is taken
        self._idle: asyncio.Future[None] | None = None

    def put(self, message: bytes) -> None:
        """Say it after all that was said before; dropped when the outbox is closed."""
        if not self.closed:
            self._messages.append(message)
            self._wake()

    def close(self) -> None:
        """Say what is here still, then end."""
        self.closed = True
        self._wake()

    async def write_all(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write with `write` until the outbox is closed and empty. For one task. Raises what `write` raises."""
        while True:
            while self._messages:
                await write(self._messages.popleft())
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
