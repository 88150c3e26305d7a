"""Messages on a socket: each with its length before it.

A stream of grpc costs a trainer some twenty times what two system calls do, and a step asks for its quorum once. So
the rank that started the manager server keeps a pair of connected sockets with it, which nobody else can reach; and the
manager server has one beside its stream to the lighthouse.

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
    """Puts messages together again from what a socket gives.

    Fields:
        most_bytes: of a message that is taken.
    """

    def __init__(self, most_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.most_bytes = most_bytes
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take in what came.

        Returns: the messages that are whole now, in order.
        Raises: ProtocolError: a length is above most_bytes; nothing after it can be read.
        """
        self.add(data)
        messages = []
        while (message := self.next()) is not None:
            messages.append(message)
        return messages

    def add(self, data: bytes) -> None:
        """Take in what came, to be had by `next`."""
        self._bytes += data

    def next(self) -> bytes | None:
        """The first message that is whole and was not given yet, or None. Raises: as feed."""
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > self.most_bytes:
            raise ProtocolError(f"a message of {length} bytes was announced; at most {self.most_bytes} are taken")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        message = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return message
