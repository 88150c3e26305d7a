"""The election of one lighthouse among several, by a lease in a store that several machines share.

The leader holds a key that is bound to a lease, and renews the lease. If it stops, the store deletes the key after the
lease's time to live, and a standby takes its place. The leader must know of the end before the store does. It counts
the lease from the moment at which it sent the last renewal that counts, on its own clock, and stops a margin earlier.

A second key has no lease. It holds the number above which the leader's quorum ids rise, and each leader writes a
higher one in the same transaction as the first key. Both keys therefore have the same revision, the fencing token. A
clock that was set back, or a store that was restored from a backup, can't bring an id back.

Law of this file: one lighthouse's side of the election. The caller makes one call at a time, and gives the answers and
the time (`now_ms` of a clock that never stands still, `wall_ms` since 1970).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias, final

RENEWALS_IN_A_LEASE: Final = 4
LOOKS_IN_A_LEASE: Final = 8
MARGINS_IN_A_LEASE: Final = 10
# The ids of a leader that has served for a moment only. One that serves longer has a further id for each millisecond.
IDS_OF_A_TERM: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Leader:
    """The leader as the store names it.

    Args:
        address: of its gRPC port.
        lease: to which its key is bound.
        token: revision of its key; a later leader has a higher one.
        started_ms: its quorum ids are above it.
    """

    address: str
    lease: int
    token: int
    started_ms: int


@dataclass(frozen=True, slots=True)
class Floor:
    """The key without a lease: the newest leader's `started_ms`, and the revision of that key. 0, 0: nobody has led."""

    started_ms: int = 0
    revision: int = 0


# --- calls: one is in flight at a time --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Look:
    """The order to read both keys, as a majority of the store has them now."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The order to make a lease of that time to live."""

    ttl_ms: int


@dataclass(frozen=True, slots=True)
class Campaign:
    """The order to write both keys if there is no leader and the floor has that revision still."""

    lease: int
    floor_revision: int
    started_ms: int


@dataclass(frozen=True, slots=True)
class Renew:
    """The order to renew the lease."""

    lease: int


@dataclass(frozen=True, slots=True)
class Revoke:
    """The order to end the lease, and with it the leader's key."""

    lease: int


Call: TypeAlias = Look | Grant | Campaign | Renew | Revoke


# --- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Looked:
    """Both keys. `store_term`: number of the store's own leader; it rises with each of its elections."""

    leader: Leader | None
    floor: Floor
    store_term: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The lease and its time to live, which may be longer than was asked for."""

    lease: int
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """The lease's time to live from now on; 0: there is no such lease. `store_term` as in `Looked`."""

    ttl_ms: int
    store_term: int


@dataclass(frozen=True, slots=True)
class Done:
    """The store has handled a `Campaign` or a `Revoke`. The next `Look` shows what came of it."""


@dataclass(frozen=True, slots=True)
class Failed:
    """No answer came in time, or an error. The store may have handled the call."""


Answer: TypeAlias = Looked | Granted | Renewed | Done | Failed


# --- decisions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Began:
    """This lighthouse leads from now on. `is_successor`: it follows a leader, which may have quorums that still run."""

    leader: Leader
    is_successor: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """This lighthouse leads no more, and must answer nothing from now on."""

    leader: Leader
    reason: str


@dataclass(frozen=True, slots=True)
class LeaderChanged:
    """A standby sees another leader than before; None: there is none now."""

    leader: Leader | None


Decision: TypeAlias = Began | Ended | LeaderChanged


@dataclass(slots=True)
class _Lease:
    number: int
    ttl_ms: int
    counted_ms: int  # the sending of the last call that is known to have set its end


@final
class ElectionCore:
    """One lighthouse's side of the election.

    Args:
        ttl_ms: the time to live to ask for.

    Attributes:
        leader: the leader that the store named last.
    """

    def __init__(self, *, ttl_ms: int) -> None:
        self._ttl_ms = ttl_ms
        self._lease: _Lease | None = None
        self._term: Leader | None = None  # set while this lighthouse leads
        self._floor: Floor | None = None  # None: it was not read yet
        self._store_term = 0  # of the last look
        self._renewal: tuple[int, Renewed] | None = None  # sending and answer of one that the next look confirms
        self._orphan: int | None = None  # an own lease that is of no more use, and may still keep the key
        self._has_seen_leader = False
        self._looks_next = True
        self._next_ms = 0
        self.leader: Leader | None = None

    @property
    def next_ms(self) -> int:
        """Return when `call` or `tick` has something to do next."""
        return self._next_ms if self._lease is None else min(self._next_ms, self.leads_until_ms or self._next_ms)

    @property
    def leads_until_ms(self) -> int:
        """Return when this lighthouse stops leading unless a renewal counts before; 0: it does not lead."""
        return self._end_ms(self._lease) if self._term is not None and self._lease is not None else 0

    def leads(self, now_ms: int) -> bool:
        """Return whether this lighthouse may answer. Check it before each answer that decides something."""
        return now_ms < self.leads_until_ms

    def call(self, now_ms: int, wall_ms: int) -> Call | None:
        """Return the call to make now, or None before `next_ms`. `answered` must follow each call."""
        if now_ms < self._next_ms:
            return None
        lease = self._lease
        if self._looks_next or self._floor is None:
            return Look()
        if self._orphan is not None:
            return Revoke(self._orphan)
        if lease is None:
            return Grant(self._ttl_ms)
        if self._term is not None:
            return Renew(lease.number)
        started_ms = max(wall_ms, self._floor.started_ms + IDS_OF_A_TERM)
        return Campaign(lease.number, self._floor.revision, started_ms)

    def answered(self, call: Call, answer: Answer, sent_ms: int, now_ms: int) -> list[Decision]:
        """Handle the answer to a call that was sent at `sent_ms`; return the decisions, in order."""
        out = self.tick(now_ms)
        match call, answer:
            case Look(), Looked():
                return out + self._looked(answer, now_ms)
            case Grant(), Granted():
                self._lease = _Lease(answer.lease, answer.ttl_ms, sent_ms)
            case Renew(lease), Renewed() if self._term is not None and self._is_own(lease):
                if answer.ttl_ms <= 0:
                    return out + self._end("the store has ended its lease", now_ms)
                self._renewal, self._looks_next = (sent_ms, answer), True
            case ((Campaign() | Revoke()), Done()):
                self._looks_next = True
            case _:
                # A campaign without an answer may have succeeded, and the look shows it.
                self._renewal = None
                self._looks_next = self._term is None
                self._next_ms = now_ms + self._ttl_ms // LOOKS_IN_A_LEASE
        return out

    def tick(self, now_ms: int) -> list[Decision]:
        """Handle the passage of time: a leader whose lease may be over leads no more."""
        if self._term is None or self.leads(now_ms):
            return []
        return self._end("it could not renew its lease in time", now_ms)

    def _looked(self, found: Looked, now_ms: int) -> list[Decision]:
        before, self.leader, self._floor = self.leader, found.leader, found.floor
        renewal, self._renewal = self._renewal, None
        # A member of the store that was cut off may take itself for the store's leader, and renew leases that are over.
        # A renewal therefore counts only if the store's leader was the same one before, in between and afterwards.
        terms = {self._store_term, found.store_term} | ({renewal[1].store_term} if renewal is not None else set())
        self._store_term, self._looks_next = found.store_term, False
        lease, leader = self._lease, found.leader
        if self._term is not None and lease is not None:
            if leader != self._term:
                return self._end("its key in the store is gone", now_ms)
            if renewal is not None and len(terms) == 1:
                lease.counted_ms, lease.ttl_ms = renewal[0], renewal[1].ttl_ms
            elif renewal is not None:
                return []  # renew at once
            self._next_ms = max(now_ms, lease.counted_ms + lease.ttl_ms // RENEWALS_IN_A_LEASE)
            return []
        if leader is not None and lease is not None:
            if self._is_own(leader.lease) and now_ms < self._end_ms(lease):
                self._term = leader
                self._next_ms = max(now_ms, lease.counted_ms + lease.ttl_ms // RENEWALS_IN_A_LEASE)
                return [Began(leader, self._has_seen_leader)]
            self._drop_lease()  # another one was faster, or the call that won took too long
        elif lease is not None and now_ms >= self._end_ms(lease):
            self._drop_lease()
        self._has_seen_leader |= leader is not None
        if leader is None or leader.lease != self._orphan:
            self._orphan = None  # it keeps no key, and ends by itself
        if leader is None or self._orphan is not None:
            self._next_ms = now_ms  # campaign, or end the lease that keeps the key
        else:
            self._next_ms, self._looks_next = now_ms + self._ttl_ms // LOOKS_IN_A_LEASE, True
        return [LeaderChanged(leader)] if leader != before else []

    def _end(self, reason: str, now_ms: int) -> list[Decision]:
        term, self._term = self._term, None
        assert term is not None, "it leads"
        self._has_seen_leader = True
        self._drop_lease()
        self._renewal, self._looks_next, self._next_ms = None, False, now_ms
        return [Ended(term, reason)]

    def _drop_lease(self) -> None:
        if self._lease is not None:
            self._orphan, self._lease = self._lease.number, None

    def _is_own(self, lease: int) -> bool:
        return self._lease is not None and self._lease.number == lease

    def _end_ms(self, lease: _Lease) -> int:
        return lease.counted_ms + lease.ttl_ms - lease.ttl_ms // MARGINS_IN_A_LEASE

    def resign(self) -> int | None:
        """End for good: return the lease to revoke, so that a standby leads at once; None: there is none."""
        lease = self._lease.number if self._lease is not None else self._orphan
        self._term = self._lease = None
        return lease
