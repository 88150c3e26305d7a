"""The setup of a Gloo group's connections for words, while Gloo connects the ranks for everything else.

Each rank's invitation is appended to the record that Gloo publishes in the store, so there are no extra store requests.
The ranks connect before Gloo connects, and accept after Gloo has connected. Then all connections exist. A rank without
an invitation runs another program's Gloo. In that case no rank of the group has connections for words.

Law of this file: one setup; no store, no Gloo.
"""

from __future__ import annotations

import struct
from typing import Final, final

from tft_pg.backends.attempt import Attempt
from tft_pg.backends.lifeline import Lifeline

__all__ = ["WordSetup", "attach", "detach"]

_MARK: Final = b"tft-pg"
_TAIL: Final = struct.Struct("=6sH")  # the mark, and the length of the data before it
# Gloo takes the data after an address for numbers of this many bytes, and reads only the numbers that it knows of.
_NUMBER_BYTES: Final = 8


def attach(record: bytes, invitation: bytes) -> bytes:
    """Return Gloo's record with an invitation appended."""
    padding = b" " * (-len(invitation) % _NUMBER_BYTES)
    return record + padding + invitation + _TAIL.pack(_MARK, len(padding) + len(invitation))


def detach(published: bytes) -> tuple[bytes, bytes | None]:
    """Return Gloo's record, and the appended invitation or None."""
    if len(published) < _TAIL.size:
        return published, None
    mark, length = _TAIL.unpack_from(published, len(published) - _TAIL.size)
    end = len(published) - _TAIL.size - length
    if mark != _MARK or end < 0:
        return published, None
    return published[:end], published[end : end + length].lstrip(b" ")


@final
class WordSetup:
    """The connections for words of one rank, while its group is built.

    Args:
        attempt: the current attempt.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._device: str | None = None  # Gloo's first device
        self._lifeline: Lifeline | None = None
        self._invitations: dict[int, bytes | None] = {}

    def publish(self, device: str, record: bytes, address: str) -> bytes:
        """Return the record to publish for a device of Gloo.

        Args:
            device: the device.
            record: Gloo's record.
            address: the listening address of the device.

        Raises: ConfigureError: nothing can listen there.
        """
        if self._device is not None:
            return record
        where = self._attempt.where
        self._device = device
        self._lifeline = Lifeline(where.rank or 0, where.world_size or 1, address, where.replica_id)
        return attach(record, self._lifeline.record())

    def add_record(self, device: str, rank: int, published: bytes) -> bytes:
        """Record another rank's invitation. Returns: Gloo's record."""
        record, invitation = detach(published)
        if device == self._device:
            self._invitations[rank] = invitation
        return record

    def connect_lower(self, device: str) -> None:
        """Connect to the lower ranks, after all ranks of a device are known. Raises: as `Lifeline.connect_lower`."""
        if self._lifeline is None or device != self._device:
            return
        where = self._attempt.where
        found = {**self._invitations, where.rank or 0: self._lifeline.record()}
        records = [record for rank in range(where.world_size or 1) if (record := found.get(rank)) is not None]
        if len(records) == where.world_size:
            self._lifeline.connect_lower(records, self._attempt)
        else:
            self.end()
            self._lifeline = None

    def finish(self) -> Lifeline | None:
        """Accept the connections of the higher ranks. Returns: the connections, or None if some ranks have none."""
        where = self._attempt.where
        if where.world_size == 1:
            return Lifeline(0, 1, "")
        if self._lifeline is not None:
            self._lifeline.accept_callers(self._attempt)
        return self._lifeline

    def end(self) -> None:
        """Release the connections, because no group was built."""
        if self._lifeline is not None:
            self._lifeline.end()
