"""The membership of a job: the fingerprints of its replicas, and which replicas may join.

The first replica defines the job. A replica that differs from the present ones is refused, and told the difference. A
replica that holds a quorum has trained in this job, and wins over one that holds none: a restarted lighthouse may hear
the stranger first. A fingerprint is dropped with its replicas.

Nearly all replicas send the same fingerprint. Strangers that each send a long and different one find no room for it.

Law of this file: the fingerprints of one job; the caller says which replicas live, and how much each counts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tft_coord.core.fingerprint import Fingerprint, differences, list_differences

ROOM_BYTES: Final = 256 * 1024 * 1024
PART_BYTES: Final = 250  # memory for a part besides its texts
SMALL_BYTES: Final = 2048  # a fingerprint up to this size always fits, because there are never many of them


class Precedence(enum.IntEnum):
    """The weight of a replica: it is gone and has no weight, or it is new, or it has trained in this job."""

    GONE = 0
    NEW = 1
    HOLDS = 2  # some quorum
    MEMBER = 3  # of the newest quorum


@dataclass(frozen=True, slots=True)
class Differs:
    """A replica that does not belong to the others' job; one sentence says why, and what to do."""

    replica_id: str
    message: str


class MemoryBudget:
    """The memory for the fingerprints of all jobs.

    Args:
        most_bytes: the limit for all of them together.
    """

    def __init__(self, most_bytes: int = ROOM_BYTES) -> None:
        self.left_bytes = most_bytes

    def take(self, fingerprint: Fingerprint) -> bool:
        """Take room for a fingerprint; return whether there was room. A small one always fits."""
        size = _size(fingerprint)
        if SMALL_BYTES < size > self.left_bytes:
            return False
        self.left_bytes -= size
        return True

    def give_back(self, fingerprint: Fingerprint) -> None:
        """Return the room of a dropped fingerprint."""
        self.left_bytes += _size(fingerprint)


class Handshake:
    """The fingerprints of one job's replicas.

    Args:
        job: its name.
        precedence_of: returns the weight of a replica now.
        room: the memory limit, shared with other jobs.
    """

    def __init__(self, job: str, precedence_of: Callable[[str], Precedence], room: MemoryBudget | None = None) -> None:
        self._job = job
        self._budget = room if room is not None else MemoryBudget()
        self._precedence_of = precedence_of
        # Nearly all replicas send the same fingerprint, so each is kept once, and compared once.
        self._senders: dict[Fingerprint, dict[str, None]] = {}
        self._sent: dict[str, Fingerprint] = {}
        self._refused: dict[str, Fingerprint] = {}  # () for a replica whose fingerprint had no room

    def __len__(self) -> int:
        """Return how many replicas are remembered."""
        return len(self._sent) + len(self._refused)

    def asks(self, replica_id: str, fingerprint: Fingerprint) -> list[Differs]:
        """Handle a replica's request, which may carry a fingerprint; a new one replaces the earlier one.

        Returns: the replicas that do not belong to the job: none, the replica itself, or present ones with less weight.
        """
        refused = self._refused.get(replica_id)
        if not fingerprint and refused == ():
            return [Differs(replica_id, self._no_room(replica_id))]
        fingerprint = fingerprint or refused or ()
        if not fingerprint:
            return []
        self.forget(replica_id)
        out = self._compare(replica_id, fingerprint) if fingerprint not in self._senders else []
        for differs in out:
            self._refuse(differs.replica_id, fingerprint)
        if replica_id not in self._refused and fingerprint not in self._senders and not self._budget.take(fingerprint):
            self._refused[replica_id] = ()
            return [*out, Differs(replica_id, self._no_room(replica_id))]
        if replica_id not in self._refused:
            senders = self._senders.setdefault(fingerprint, {})
            # A thousand replicas share one object.
            self._sent[replica_id] = self._sent[next(iter(senders))] if senders else fingerprint
            senders[replica_id] = None
        return out

    def has_refused(self, replica_id: str) -> bool:
        """Return whether that replica was found to differ, and has not asked since."""
        return replica_id in self._refused

    def forget(self, replica_id: str) -> None:
        """Drop that replica's fingerprint."""
        refused = self._refused.pop(replica_id, None)
        if refused is not None:
            self._budget.give_back(refused)
        fingerprint = self._sent.pop(replica_id, None)
        if fingerprint is not None:
            senders = self._senders[fingerprint]
            del senders[replica_id]
            if not senders:
                del self._senders[fingerprint]
                self._budget.give_back(fingerprint)

    def forget_all(self) -> None:
        """Drop all fingerprints, because the job is gone."""
        for replica_id in [*self._sent, *self._refused]:
            self.forget(replica_id)

    def forget_gone(self) -> None:
        """Drop the fingerprints of replicas that are gone."""
        for replica_id in [*self._sent, *self._refused]:
            if self._precedence_of(replica_id) is Precedence.GONE:
                self.forget(replica_id)

    def _compare(self, replica_id: str, fingerprint: Fingerprint) -> list[Differs]:
        """Return the replicas to refuse: all that differ from the newcomer, if each has less weight; else the newcomer
        alone."""
        self.forget_gone()
        out: list[Differs] = []
        own = self._precedence_of(replica_id)
        for known, senders in self._senders.items():
            found = differences(dict(known), fingerprint)
            if not found:
                continue
            strongest = max(sorted(senders), key=self._precedence_of)
            if self._precedence_of(strongest) >= own:
                return [Differs(replica_id, self._message(replica_id, strongest, found))]
            found = differences(dict(fingerprint), known)
            out += [Differs(sender, self._message(sender, replica_id, found)) for sender in sorted(senders)]
        return out

    def _refuse(self, replica_id: str, of_newcomer: Fingerprint) -> None:
        fingerprint = self._sent.get(replica_id, of_newcomer)
        self.forget(replica_id)
        self._refused[replica_id] = fingerprint if self._budget.take(fingerprint) else ()

    def _no_room(self, replica_id: str) -> str:
        return (
            f"replica {replica_id} of job {self._job!r} sent a fingerprint that no other replica has, and the "
            "lighthouse has no memory left for it; give all replicas of the job the same settings, and restart this one"
        )

    def _message(self, replica_id: str, other: str, found: list[str]) -> str:
        return (
            f"replica {replica_id} differs from {other} of job {self._job!r}: {list_differences(found)}; give all "
            "replicas of the job the same settings, or start this one under another job (TFT_JOB_ID)"
        )


def _size(fingerprint: Fingerprint) -> int:
    return sum(len(name) + len(value) + PART_BYTES for name, value in fingerprint)
