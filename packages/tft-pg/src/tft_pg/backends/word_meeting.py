"""How the ranks of a Gloo group get their connections for words while Gloo connects them for everything else.

Each rank's invitation travels behind what Gloo publishes in the store, so that nobody asks the store more often. The
calls are made before Gloo connects, and taken when it has: then all of them are there. A rank that publishes nothing
behind its record runs another program's Gloo, and then no rank of the group has such connections.

The law of this file: one meeting; no store, no Gloo.
"""

from __future__ import annotations

import struct
from typing import Final, final

from tft_pg.backends.attempt import Attempt
from tft_pg.backends.lifeline import Lifeline

__all__ = ["WordMeeting", "attach", "detach"]

_MARK: Final = b"tft-pg"
_TAIL: Final = struct.Struct("=6sH")  # the mark, and the length of what is before it
# Gloo takes what follows an address for numbers of so many bytes, and looks only at those that it knows of.
_NUMBER_BYTES: Final = 8


def attach(record: bytes, invitation: bytes) -> bytes:
    """Return Gloo's record with an invitation behind it."""
    padding = b" " * (-len(invitation) % _NUMBER_BYTES)
    return record + padding + invitation + _TAIL.pack(_MARK, len(padding) + len(invitation))


def detach(published: bytes) -> tuple[bytes, bytes | None]:
    """Return Gloo's record, and the invitation behind it; None where there is none."""
    if len(published) < _TAIL.size:
        return published, None
    mark, length = _TAIL.unpack_from(published, len(published) - _TAIL.size)
    end = len(published) - _TAIL.size - length
    if mark != _MARK or end < 0:
        return published, None
    return published[:end], published[end : end + length].lstrip(b" ")


@final
class WordMeeting:
    """The connections for words of one rank, while its group is built.

    Args:
        attempt: the building.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._device: str | None = None  # the first of Gloo's
        self._lifeline: Lifeline | None = None
        self._invitations: dict[int, bytes | None] = {}

    def publish(self, device: str, record: bytes, address: str) -> bytes:
        """Return what to publish as the record of a device of Gloo's.

        Args:
            device: which.
            record: Gloo's.
            address: where the device listens.
        Raises: ConfigureFailed: nothing can listen there.
        """
        if self._device is not None:
            return record
        where = self._attempt.where
        self._device = device
        self._lifeline = Lifeline(where.rank or 0, where.world_size or 1, address, where.replica_id)
        return attach(record, self._lifeline.record())

    def met(self, device: str, rank: int, published: bytes) -> bytes:
        """Take what another rank has published; returns Gloo's record."""
        record, invitation = detach(published)
        if device == self._device:
            self._invitations[rank] = invitation
        return record

    def call(self, device: str) -> None:
        """Call the ranks below, now that all other ranks of a device are met. Raises: as `Lifeline.call`."""
        if self._lifeline is None or device != self._device:
            return
        where = self._attempt.where
        found = {**self._invitations, where.rank or 0: self._lifeline.record()}
        records = [record for rank in range(where.world_size or 1) if (record := found.get(rank)) is not None]
        if len(records) == where.world_size:
            self._lifeline.call(records, self._attempt)
        else:
            self.end()
            self._lifeline = None

    def finish(self) -> Lifeline | None:
        """Take the calls of the ranks above; returns the connections, None where some ranks have none."""
        where = self._attempt.where
        if where.world_size == 1:
            return Lifeline(0, 1, "")
        if self._lifeline is not None:
            self._lifeline.take_calls(self._attempt)
        return self._lifeline

    def end(self) -> None:
        """Let go of the connections, because no group was built."""
        if self._lifeline is not None:
            self._lifeline.end()
