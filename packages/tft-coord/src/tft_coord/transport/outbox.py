"""One writer for each stream.

grpc takes one message of a stream at a time. Callers therefore put messages here, at once and without waiting, and one
task writes them in order. A peer that does not read must not use up memory: a stream ends when more data waits for it
than any quorum needs.

Law of this file: a queue and its end; it knows nothing of the messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, final

MOST_WAITING_BYTES: Final = 16 << 20


@final
class Outbox:
    """The messages that wait to be written. It runs on one loop only.

    Args:
        overflows: called once, when too much waits; it ends the stream. No message is accepted after it.
        most_bytes: the limit for waiting messages; one message may always wait.
    """

    def __init__(self, overflows: Callable[[], object], *, most_bytes: int = MOST_WAITING_BYTES) -> None:
        self._messages: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._overflows = overflows
        self._most_bytes = most_bytes
        self.closed = False  # no more messages are accepted
        self._idle: asyncio.Future[None] | None = None

    def put(self, message: bytes) -> None:
        """Append a message; it is dropped when the outbox is closed."""
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
        """Accept no more messages; the waiting ones are still written."""
        self.closed = True
        self._wake()

    def abandon(self) -> None:
        """Close, and drop the waiting messages."""
        self._messages.clear()
        self.close()

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
