"""Messages on a socket between a trainer and the manager server that it started: each with its length before it.

A stream of grpc costs a trainer some twenty times what two system calls do, and a step asks for its quorum once. So
the rank that started the manager server keeps a pair of connected sockets with it, which nobody else can reach.

Law of this file: where a message begins and ends; nothing is sent here, and no message is understood.
"""

from __future__ import annotations

import struct
from typing import Final, final

from tft_coord.errors import ProtocolError

MAX_MESSAGE_BYTES: Final = 64 << 20
_LENGTH: Final = struct.Struct(">I")


def framed(message: bytes) -> bytes:
    """The message with its length before it."""
    return _LENGTH.pack(len(message)) + message


@final
class FrameReader:
    """Puts messages together again from what a socket gives."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take in what came.

        Returns: the messages that are whole now, in order.
        Raises: ProtocolError: a length is above MAX_MESSAGE_BYTES; nothing after it can be read.
        """
        self._bytes += data
        messages = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"a message of {length} bytes was announced; at most {MAX_MESSAGE_BYTES} are taken")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                break
            messages.append(bytes(self._bytes[_LENGTH.size : end]))
            del self._bytes[:end]
        return messages
