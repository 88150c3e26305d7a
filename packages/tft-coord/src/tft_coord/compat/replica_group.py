"""A replica group on torchft's lighthouse, which offers two unary calls.

That lighthouse has no sessions, no losses and no short answers. A member lives while it beats, and hears of a quorum
when it asks. The members themselves must supply what this project's protocol needs: each carries its fields in its
`data` (`foreign_data.py`), with a random word. All members make the same quorum with the same key of one and the same
answer. The group core therefore gets the events that it always gets.

The key of an answer stands under three conditions. Every member holds it, for the same list under the same id of the
lighthouse. Every member got the same answer last. No member reports failed commits or a process group that it can't
use.
Otherwise the key is new. Its nonce is a digest of the lighthouse's id and of all members' words. Its id is the
lighthouse's, or one above the highest that a member holds, because a restarted lighthouse counts from 1.

The second condition matters because that lighthouse keeps a disconnected member in the next quorum. Some members would
go on by a plan that others have never seen, and meet those in a later one.

Law of this file: no I/O; the shell calls, and tells the time. Source: docs/protocol/appendix.md, "torchft".
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, final

from tft_coord.compat.member_data import Aside, parted, with_ours
from tft_coord.core import events
from tft_coord.core.types import Member, Quorum, QuorumKey, Refusal
from tft_coord.errors import ProtocolError
from tft_coord.timeouts import Timeouts

BEAT_INTERVAL_MS: Final = 100  # torchft's


@dataclass(frozen=True, slots=True)
class CallQuorum:
    """The order to ask for a quorum by a unary call; `answered` gets the answer with this number."""

    call: int
    member: Member


@dataclass(frozen=True, slots=True)
class CancelCall:
    """The order to cancel that call."""

    call: int


@dataclass(frozen=True, slots=True)
class TellGroup:
    """The order to answer the group's request."""

    event: events.QuorumArrived | events.RequestRefused


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The order to log the members of the answer that are not of this job, when they change."""

    message: str


ForeignEffect: TypeAlias = CallQuorum | CancelCall | TellGroup | LeftOut


@dataclass(frozen=True, slots=True)
class _Asked:
    request: int
    member: Member
    aside: Aside
    call: int


@final
class ForeignCore:
    """One replica group on torchft's lighthouse.

    Args:
        job, replica_id: of the group.
        timeouts: bound the beats.
        words: returns a random 64-bit number for each request.
    """

    def __init__(self, *, job: str, replica_id: str, timeouts: Timeouts, words: Callable[[], int]) -> None:
        self._job = job
        self._replica_id = replica_id
        self._beat_interval_ms = min(BEAT_INTERVAL_MS, timeouts.beat_interval_ms)
        self._words = words
        self._open: _Asked | None = None
        self._connected = False
        self._ready = False
        self._ended = False
        self._last_call = 0
        self._next_beat_ms = 0
        self._held: tuple[QuorumKey, int] | None = None  # the newest answer's key, and the digest of its list
        self._seen = 0  # digest of the newest answer
        self._left_out: tuple[str, ...] = ()

    def opened(self) -> list[ForeignEffect]:
        """Handle an open connection: send the open request again."""
        self._connected = True
        return self._call()

    def closed(self) -> None:
        """Handle the end of the connection, and of every call on it."""
        self._connected = False

    def ended(self) -> None:
        """Stop beats and requests, because a trainer of the group has ended."""
        self._ended = True
        self._open = None

    def ask(
        self, request: int, member: Member, held: QuorumKey | None, session: int, now_ms: int
    ) -> list[ForeignEffect]:
        """Ask for the next quorum; every new connection resends the request until it is answered or withdrawn.

        Args:
            request: the group's own number.
            member: the group.
            held: key of the newest quorum that its ranks hold, or None.
            session: of this manager server.
        """
        if self._ended:
            return []
        # A new manager server reports what its ranks hold, so that ids stay above it. It can't know that quorum's list,
        # so that key does not stand.
        digest = self._held[1] if self._held is not None and self._held[0] == held else 0
        aside = Aside(self._job, self._words(), held, digest, self._seen)
        out = self.withdraw(self._open.request) if self._open is not None else []
        if not self._ready:
            # A group that has never asked does not beat: the lighthouse would make all others wait for it while it
            # loads.
            self._ready = True
            self._next_beat_ms = now_ms
        self._open = _Asked(request, replace(member, session=session), aside, 0)
        return [*out, *self._call()]

    def withdraw(self, request: int) -> list[ForeignEffect]:
        """Withdraw the request."""
        asked = self._open
        if asked is None or asked.request != request:
            return []
        self._open = None
        return [CancelCall(asked.call)] if self._connected and asked.call else []

    def answered(self, call: int, answer: Quorum) -> list[ForeignEffect]:
        """Handle the lighthouse's answer to a call, as it is on the wire."""
        asked = self._open
        if asked is None or asked.call != call:
            return []
        try:
            told = [(member, parted(member)) for member in answer.members]
            own = next((both for member, both in told if member.replica_id == self._replica_id), None)
            if own is None or own[1].word != asked.aside.word:
                return self._call()  # the answer to an older request, with an older state of this group
            return self._understood(asked, answer, told)
        except ProtocolError as error:
            return self._refuse(Refusal.MALFORMED, str(error))

    def tick(self, now_ms: int) -> bool:
        """Return whether it is time to beat, by a unary call."""
        if not self._connected or not self._ready or self._ended or now_ms < self._next_beat_ms:
            return False
        self._next_beat_ms = now_ms + self._beat_interval_ms
        return True

    @property
    def next_beat_ms(self) -> int:
        """Return when `tick` has something to do next."""
        return self._next_beat_ms

    def _call(self) -> list[ForeignEffect]:
        if self._open is None or not self._connected:
            return []
        try:
            member = with_ours(self._open.member, self._open.aside)
        except ProtocolError as error:
            return self._refuse(Refusal.MALFORMED, str(error))
        self._last_call += 1
        self._open = replace(self._open, call=self._last_call)
        return [CallQuorum(self._last_call, member)]

    def _refuse(self, refusal: Refusal, message: str) -> list[ForeignEffect]:
        assert self._open is not None
        request, self._open = self._open.request, None
        return [TellGroup(events.RequestRefused(request, refusal.value, message))]

    def _understood(
        self, asked: _Asked, answer: Quorum, told: Sequence[tuple[Member, tuple[Member, Aside] | None]]
    ) -> list[ForeignEffect]:
        ours = [both for _, both in told if both is not None and both[1].job == self._job]
        strangers = tuple(
            member.replica_id + (f" (job {both[1].job})" if both is not None else " (torchft's own)")
            for member, both in told
            if both is None or both[1].job != self._job
        )
        out: list[ForeignEffect] = []
        if strangers:
            words = f"{', '.join(strangers)}: the lighthouse serves other members than those of job {self._job}"
            if all(aside.held is None for _, aside in ours):
                # The other members were here first: a job is of one kind, and the second one to come gives way.
                return self._refuse(Refusal.OTHER_KIND, f"{words}, who never share one; start a lighthouse for each")
            if strangers != self._left_out:
                out.append(LeftOut(f"{words}; they are left out, and may hold it up; give them one of their own"))
        self._left_out = strangers
        members, ahead = _without_those_ahead([member for member, _ in ours])
        if self._replica_id in ahead:
            return [*out, *self._refuse(Refusal.AHEAD, ahead[self._replica_id])]
        asides = [aside for member, aside in ours if member.replica_id not in ahead]
        digest = _list_digest(answer.key.quorum_id, members)
        key = _key(answer.key.quorum_id, digest, members, asides)
        self._held = (key, digest)
        self._seen = _answer_digest(answer.key.quorum_id, members, asides)
        self._open = None
        return [*out, TellGroup(events.QuorumArrived(asked.request, Quorum(key, members, answer.created_ms)))]


def _key(lighthouse_id: int, digest: int, members: Sequence[Member], asides: Sequence[Aside]) -> QuorumKey:
    """Return the key of the quorum that an answer stands for; all members compute the same, because the answer is the
    same."""
    first = asides[0].held
    seen = asides[0].seen
    stands = all((aside.held, aside.list_digest, aside.seen) == (first, digest, seen) for aside in asides)
    if first is not None and stands and not any(member.needs_configure or member.commit_failures for member in members):
        return first
    highest = max((aside.held.quorum_id for aside in asides if aside.held is not None), default=0)
    return QuorumKey(max(lighthouse_id, highest + 1), _answer_digest(lighthouse_id, members, asides))


def _answer_digest(lighthouse_id: int, members: Sequence[Member], asides: Sequence[Aside]) -> int:
    """Return the digest of an answer: of its id and of all members' words, each of which is unique."""
    said = hashlib.blake2b(str(lighthouse_id).encode(), digest_size=8)
    for member, aside in zip(members, asides, strict=True):
        said.update(f"\0{member.replica_id}\0{member.session}\0{aside.word}".encode())
    return int.from_bytes(said.digest(), "big")


def _list_digest(lighthouse_id: int, members: Sequence[Member]) -> int:
    """Return the digest of the list, without steps and lineages, and of the lighthouse's id; never 0."""
    said = hashlib.blake2b(repr((lighthouse_id, [member.identity for member in members])).encode(), digest_size=8)
    return int.from_bytes(said.digest(), "big") | 1


def _without_those_ahead(members: Sequence[Member]) -> tuple[tuple[Member, ...], dict[str, str]]:
    """Return the members, and the rejected ones by replica id with a reason.

    A replica that has loaded a state from outside ahead of every live one is rejected.
    """
    live = [member.step for member in members if member.live]
    ahead = {
        member.replica_id: (
            f"replica {member.replica_id} has loaded step {member.step} from outside, ahead of the job's own step "
            f"{max(live)}; start it without that checkpoint, or restart the whole job from it"
        )
        for member in members
        if live and not member.live and member.step > max(live)
    }
    return tuple(member for member in members if member.replica_id not in ahead), ahead
