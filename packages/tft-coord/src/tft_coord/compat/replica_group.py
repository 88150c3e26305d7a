"""A replica group on torchft's lighthouse, which offers two unary calls.

That lighthouse has no sessions, no losses and no short answers. A member is alive while it beats, and learns of a
quorum when it asks. The members themselves must supply what this project's protocol needs: each sends its fields in its
`data` (`member_data.py`), with a random word. All members make the same quorum with the same key of one and the same
answer. The group core therefore gets the events that it always gets.

The key of an answer is kept under three conditions. Every member holds it, for the same list under the same id of the
lighthouse. Every member got the same answer last. No member reports failed commits or a process group that it can't
use. Otherwise the key is new. Its nonce is a digest of the lighthouse's id and of all members' words. Its id is the
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

from tft_coord.compat.member_data import RequestExtras, pack_member, unpack_member
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


TorchftEffect: TypeAlias = CallQuorum | CancelCall | TellGroup | LeftOut


@dataclass(frozen=True, slots=True)
class _Asked:
    request: int
    member: Member
    extras: RequestExtras
    call: int


@final
class TorchftGroupCore:
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

    def opened(self) -> list[TorchftEffect]:
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
    ) -> list[TorchftEffect]:
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
        extras = RequestExtras(self._job, self._words(), held, digest, self._seen)
        out = self.withdraw(self._open.request) if self._open is not None else []
        if not self._ready:
            # A group that has never asked does not beat: the lighthouse would make all others wait for it while it
            # loads.
            self._ready = True
            self._next_beat_ms = now_ms
        self._open = _Asked(request, replace(member, session=session), extras, 0)
        return [*out, *self._call()]

    def withdraw(self, request: int) -> list[TorchftEffect]:
        """Withdraw the request."""
        asked = self._open
        if asked is None or asked.request != request:
            return []
        self._open = None
        return [CancelCall(asked.call)] if self._connected and asked.call else []

    def answered(self, call: int, answer: Quorum) -> list[TorchftEffect]:
        """Handle the lighthouse's answer to a call, as it is on the wire."""
        asked = self._open
        if asked is None or asked.call != call:
            return []
        try:
            unpacked = [(member, unpack_member(member)) for member in answer.members]
            own = next((both for member, both in unpacked if member.replica_id == self._replica_id), None)
            if own is None or own[1].word != asked.extras.word:
                return self._call()  # the answer to an older request, with an older state of this group
            return self._accept(asked, answer, unpacked)
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

    def _call(self) -> list[TorchftEffect]:
        if self._open is None or not self._connected:
            return []
        try:
            member = pack_member(self._open.member, self._open.extras)
        except ProtocolError as error:
            return self._refuse(Refusal.MALFORMED, str(error))
        self._last_call += 1
        self._open = replace(self._open, call=self._last_call)
        return [CallQuorum(self._last_call, member)]

    def _refuse(self, refusal: Refusal, message: str) -> list[TorchftEffect]:
        assert self._open is not None
        request, self._open = self._open.request, None
        return [TellGroup(events.RequestRefused(request, refusal.value, message))]

    def _accept(
        self, asked: _Asked, answer: Quorum, unpacked: Sequence[tuple[Member, tuple[Member, RequestExtras] | None]]
    ) -> list[TorchftEffect]:
        own_job = [both for _, both in unpacked if both is not None and both[1].job == self._job]
        outsiders = tuple(
            member.replica_id + (f" (job {both[1].job})" if both is not None else " (torchft)")
            for member, both in unpacked
            if both is None or both[1].job != self._job
        )
        out: list[TorchftEffect] = []
        if outsiders:
            message = f"the lighthouse has members outside job {self._job}: {', '.join(outsiders)}"
            if all(extras.held is None for _, extras in own_job):
                # The other members were here first: a job is of one kind, and the second one to come gives way.
                return self._refuse(Refusal.OTHER_KIND, f"{message}; start a separate lighthouse for each job")
            if outsiders != self._left_out:
                out.append(
                    LeftOut(f"{message}; they are left out, but may delay it; start another lighthouse for them")
                )
        self._left_out = outsiders
        members, ahead = _without_those_ahead([member for member, _ in own_job])
        if self._replica_id in ahead:
            return [*out, *self._refuse(Refusal.AHEAD, ahead[self._replica_id])]
        all_extras = [extras for member, extras in own_job if member.replica_id not in ahead]
        digest = _list_digest(answer.key.quorum_id, members)
        key = _key(answer.key.quorum_id, digest, members, all_extras)
        self._held = (key, digest)
        self._seen = _answer_digest(answer.key.quorum_id, members, all_extras)
        self._open = None
        return [*out, TellGroup(events.QuorumArrived(asked.request, Quorum(key, members, answer.created_ms)))]


def _key(lighthouse_id: int, digest: int, members: Sequence[Member], all_extras: Sequence[RequestExtras]) -> QuorumKey:
    """Return the key of the quorum that an answer stands for; all members compute the same, because the answer is the
    same."""
    first = all_extras[0].held
    seen = all_extras[0].seen
    stands = all((extras.held, extras.list_digest, extras.seen) == (first, digest, seen) for extras in all_extras)
    if first is not None and stands and not any(member.needs_configure or member.commit_failures for member in members):
        return first
    highest = max((extras.held.quorum_id for extras in all_extras if extras.held is not None), default=0)
    return QuorumKey(max(lighthouse_id, highest + 1), _answer_digest(lighthouse_id, members, all_extras))


def _answer_digest(lighthouse_id: int, members: Sequence[Member], all_extras: Sequence[RequestExtras]) -> int:
    """Return the digest of an answer: of its id and of the random word of each member."""
    digest = hashlib.blake2b(str(lighthouse_id).encode(), digest_size=8)
    for member, extras in zip(members, all_extras, strict=True):
        digest.update(f"\0{member.replica_id}\0{member.session}\0{extras.word}".encode())
    return int.from_bytes(digest.digest(), "big")


def _list_digest(lighthouse_id: int, members: Sequence[Member]) -> int:
    """Return the digest of the list, without steps and lineages, and of the lighthouse's id; never 0."""
    digest = hashlib.blake2b(repr((lighthouse_id, [member.identity for member in members])).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") | 1


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
