"""A long quorum, compressed: it goes to each of its members, and the names and addresses in it are alike.

Law of this file: bytes in, bytes out, bounded before memory is taken. The codec knows what they mean.
"""

from __future__ import annotations

import zlib
from typing import Final

from tft_coord.errors import ProtocolError
from tft_coord.wire import coordination_pb2 as pb
from tft_coord.wire.limits import MAX_UNPACKED_BYTES

PACKED_FROM_BYTES: Final = 16 << 10  # a shorter quorum costs more to pack than it saves


def is_packed(encoded: bytes) -> bool:
    """Return whether a quorum is sent packed: if it is long, and no longer than its receivers unpack."""
    return PACKED_FROM_BYTES <= len(encoded) <= MAX_UNPACKED_BYTES


def pack_quorum(encoded: bytes) -> bytes:
    """Compress an encoded quorum. A quorum of a thousand members shrinks to an eighth."""
    return pb.Packed(size=len(encoded), data=zlib.compress(encoded, level=1)).SerializeToString()


def unpacked(packed: pb.Packed) -> bytes:
    """Return the encoded quorum. Raises: ProtocolError: it is damaged, or longer than declared or allowed."""
    if not 0 < packed.size <= MAX_UNPACKED_BYTES:
        raise ProtocolError(f"a packed quorum of {packed.size} bytes is outside 1..{MAX_UNPACKED_BYTES}")
    decompressor = zlib.decompressobj()
    try:
        encoded = decompressor.decompress(packed.data, packed.size + 1)
    except zlib.error as error:
        raise ProtocolError(f"{len(packed.data)} bytes are not a packed quorum: {error}") from None
    if len(encoded) != packed.size or not decompressor.eof or decompressor.unused_data:
        raise ProtocolError(f"a packed quorum declares {packed.size} bytes, and its real size differs")
    return encoded
