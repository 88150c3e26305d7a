"""Which members can't reach one another, and who is left out of the next quorum because of it.

Each member says with its next request whom it could not reach, and for what. A process group needs a connection between
each two of its members, so one bad link stops a whole quorum. The fewest members are left out whose removal leaves no
bad link between the others: the smallest vertex cover of the reported pairs. A report counts for a pause that doubles.
After the pause the pair is tried again. Members that build a process group together prove their links, and what was
said of those is forgotten.

Law of this file: the reports of one job, and functions of them. The caller says who lives and what time it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias, final

from tft_coord.core.liveness import Replica
from tft_coord.core.names import shorten
from tft_coord.core.trial import Trials
from tft_coord.core.types import Member, Quorum, QuorumKey, Unreached, Via

PAUSE_FIRST_MS: Final = 5_000
PAUSE_MOST_MS: Final = 300_000
BOTH_ENDS_MS: Final = 1_000
HOLD_FIRST_MS: Final = 1_000
HOLD_MOST_MS: Final = 5_000
EXACT_MOST: Final = 20  # members with bad links, up to which the smallest cover is found for sure
NAMED_MOST: Final = 5

Pair: TypeAlias = tuple[str, str]  # sorted


def pair_of(one: str, other: str) -> Pair:
    """Return the two in order."""
    return (one, other) if one < other else (other, one)


# --- the smallest cover ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """What a cover must leave.

    Args:
        most: members that may be left out.
        needed: of each of these sets at least one member stays.
    """

    most: int
    needed: tuple[frozenset[str], ...] = ()

    def allow(self, chosen: Collection[str]) -> bool:
        """Whether these may be left out. More of them are never allowed where fewer are not."""
        return len(chosen) <= self.most and not any(each <= set(chosen) for each in self.needed)


def smallest_cover(
    pairs: Collection[Pair], order: Mapping[str, tuple[int, ...]], limits: Limits, free: Collection[str] = ()
) -> set[str] | None:
    """Find the fewest members of which each pair has one.

    Args:
        pairs: of members that can't reach each other.
        order: of two members the one with the lower value is chosen first, where both would do; of two equal ones that
            with the higher replica id.
        limits: what must stay.
        free: members that may be left out before any other one is.
    Returns: the members, or None where no cover fits the limits.
    """
    around: dict[str, set[str]] = {}
    for one, other in pairs:
        around.setdefault(one, set()).add(other)
        around.setdefault(other, set()).add(one)
    if len(around) > EXACT_MOST:
        return _greedy(around, order, limits, free)
    by_name = sorted(around, reverse=True)
    places = {name: place for place, name in enumerate(sorted(by_name, key=lambda name: order[name]))}
    search = _Search(places, order, limits, free)
    search.go(around, frozenset())
    return set(search.best) if search.best is not None else None


@final
class _Search:
    """Branch and bound: the member with the most bad links is chosen, or all at the other ends of them are."""

    def __init__(
        self,
        places: Mapping[str, int],
        order: Mapping[str, tuple[int, ...]],
        limits: Limits,
        free: Collection[str],
    ) -> None:
        self._places = places
        self._free = free
        self._order = order
        self._limits = limits
        self.best: frozenset[str] | None = None

    def go(self, around: Mapping[str, set[str]], chosen: frozenset[str]) -> None:
        if not self._limits.allow(chosen):
            return
        left = {name: others for name, others in around.items() if others}
        if not left:
            if self.best is None or self._cost(chosen) < self._cost(self.best):
                self.best = chosen
            return
        if self.best is not None:
            price, best = self._price(chosen), self._price(self.best)
            if price > best or (price == best and len(chosen) + _disjoint(left) > len(self.best)):
                return
        busiest = max(left, key=lambda name: (len(left[name]), -self._places[name]))
        self.go(_without(left, {busiest}), chosen | {busiest})
        self.go(_without(left, left[busiest]), chosen | left[busiest])

    def _price(self, chosen: frozenset[str]) -> int:
        return len(chosen.difference(self._free))

    def _cost(self, chosen: frozenset[str]) -> tuple[int, int, list[tuple[int, ...]], list[int]]:
        first = sorted(self._order[name][:-1] for name in chosen)
        return self._price(chosen), len(chosen), first, sorted(self._places[name] for name in chosen)


def _without(around: Mapping[str, set[str]], gone: Collection[str]) -> dict[str, set[str]]:
    return {name: others.difference(gone) for name, others in around.items() if name not in gone}


def _disjoint(around: Mapping[str, set[str]]) -> int:
    """Count pairs that share nobody: each needs a member of its own."""
    taken: set[str] = set()
    for name, others in around.items():
        if name in taken:
            continue
        free = next((other for other in others if other not in taken), None)
        if free is not None:
            taken |= {name, free}
    return len(taken) // 2


def _greedy(
    around: Mapping[str, set[str]], order: Mapping[str, tuple[int, ...]], limits: Limits, free: Collection[str]
) -> set[str] | None:
    """Choose who has the most bad links left, again and again; then take back who was not needed."""
    chosen = [name for name in around if name in free]
    chosen = chosen if limits.allow(chosen) else []
    left = _without(around, chosen)
    stays: set[str] = set()
    while True:
        left = {name: others for name, others in left.items() if others}
        if not left:
            break
        free = [name for name in left if name not in stays]
        if not free:
            return None
        busiest = min(free, key=lambda name: (-len(left[name]), order[name], name))
        if not limits.allow([*chosen, busiest]):
            if len(chosen) >= limits.most:
                return None
            stays.add(busiest)  # and all at the other ends of its links go, where they may
            if left[busiest] & stays:
                return None
            continue
        chosen.append(busiest)
        left = _without(left, {busiest})
    for name in list(chosen):
        if not around[name].intersection(set(around) - set(chosen)):
            chosen.remove(name)
    return set(chosen)


# --- what is known ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peer:
    """A replica that may be in the next quorum.

    Args:
        replica_id: of it.
        built: it was in a process group that all its members had built.
        since_ms: since when it is known.
        step: of its state as it said last; -1 where it has no whole state, or its step isn't known.
        asked: it waits for the next quorum.
        before: it is a member of the newest quorum.
    """

    replica_id: str
    built: bool = False
    since_ms: int = 0
    step: int = -1
    asked: bool = True
    before: bool = False


def peers_of(replicas: Iterable[Replica], members: Mapping[str, Member], now_ms: int) -> dict[str, Peer]:
    """List all that may be in the next quorum, those that have not asked yet included.

    Args:
        replicas: all that are known.
        members: of the newest quorum.
        now_ms: the time.
    """
    found: dict[str, Peer] = {}
    for replica in replicas:
        if not (replica.healthy and replica.ready) or replica.ineligible_until_ms > now_ms:
            continue
        name = replica.replica_id
        member = replica.request.member if replica.request is not None else members.get(name)
        step = -1 if member is None or member.torn else member.step
        asked = replica.request is not None
        if not asked and step >= 0 and replica.where is not None:
            step = max(step, replica.where[0].step)  # it has committed since, by its beats
        found[name] = Peer(name, replica.built, replica.since_ms, step, asked, name in members)
    return found


@dataclass(slots=True)
class _Pause:
    """For how long a report counts. The next one after that counts for twice as long."""

    key: QuorumKey | None  # of the quorum that it was about
    since_ms: int
    length_ms: int = PAUSE_FIRST_MS
    is_over: bool = False

    def again(self, key: QuorumKey | None, now_ms: int) -> bool:
        """Hear the same of another quorum. Returns: whether it was another."""
        if key == self.key:
            return False
        if now_ms - self.since_ms >= self.length_ms:
            self.length_ms = min(2 * self.length_ms, PAUSE_MOST_MS)
        self.key, self.since_ms, self.is_over = key, now_ms, False
        return True

    def lasts(self, now_ms: int) -> bool:
        return not self.is_over and now_ms - self.since_ms < self.length_ms

    def remaining_ms(self, now_ms: int) -> int:
        return max(0, self.since_ms + self.length_ms - now_ms) if not self.is_over else 0


@dataclass(slots=True)
class _BadLink:
    pause: _Pause
    said: dict[str, str] = field(default_factory=dict)  # by which end, and how it put it
    fresh_ms: int | None = None  # since when both ends are waited for


@dataclass(frozen=True, slots=True)
class Kept:
    """What the reports mean for the next quorum.

    Args:
        out: who can't be in it.
        waits: why none is to be formed yet; "": nothing stands against it.
    """

    out: frozenset[str] = frozenset()
    waits: str = ""


NOBODY: Final = Kept()


@final
class Reach:
    """What the members of one job have said of whom they can't reach.

    Args:
        min_replicas: smallest quorum.
    """

    def __init__(self, min_replicas: int) -> None:
        self._min_replicas = min_replicas
        self._links: dict[Pair, _BadLink] = {}
        self._stores: dict[str, _Pause] = {}  # that were not reached
        self._missed: dict[str, dict[str, QuorumKey | None]] = {}  # who missed whose stores, in which quorums
        self._out: frozenset[str] = frozenset()  # of the newest quorum
        self._hold_ms = HOLD_FIRST_MS
        self._hold_until_ms: int | None = None
        self.trials = Trials()

    def heard(
        self,
        replica: Replica,
        member: Member,
        held: QuorumKey | None,
        previous: Quorum | None,
        known: Collection[str],
        now_ms: int,
        *,
        after_loss: bool = False,
    ) -> Member:
        """Take what a request says.

        Args:
            replica: that asks.
            member: as it asks to be.
            held: the quorum that it was in, and that its reports are about.
            previous: the newest quorum.
            known: of whom the lighthouse has heard.
            now_ms: the time.
            after_loss: a member of that quorum was lost. When its end tears the process group, the survivors may see
                one another's connections end, so what they say of one another's ports in it counts for nothing.
        Returns: the member as it may stand in a quorum, without its reports.
        """
        works = held is not None and not member.needs_configure
        replica.built = replica.built or works or member.live
        if not member.unreached:
            knows = self._links or self._stores or self._missed
            if knows and works and previous is not None and held == previous.key and member.commit_failures == 0:
                self._met(previous)
            return replace(member, store_failed=False) if member.store_failed else member
        self._forget_the_gone(known, now_ms)
        name = member.replica_id
        for report in member.unreached:
            if report.replica_id not in known:
                continue
            if report.via is Via.STORE:
                self._store_missed(name, report, held, now_ms)
            elif report.via is Via.GROUP and report.replica_id != name and not after_loss:
                self._say(name, report.replica_id, _why(report), held, now_ms)
        return replace(member, unreached=(), store_failed=False)

    def counts(self, now_ms: int) -> bool:
        """Whether anything that was said, or tried, keeps somebody out now."""
        if self.trials.keep_out:
            return True
        return bool(self._links) and any(self._counts(pair, link, now_ms) for pair, link in self._links.items())

    def may_try(self, waiting: Iterable[Replica], now_ms: int) -> list[Replica]:
        """List those that no report keeps out now: they may show whether they reach their peers."""
        pairs = [pair for pair, link in self._links.items() if self._counts(pair, link, now_ms)]
        named = {name for pair in pairs for name in pair}
        return [replica for replica in waiting if replica.replica_id not in named]

    def look(self, peers: Mapping[str, Peer], now_ms: int) -> Kept:
        """Decide who is left out of the next quorum.

        Args:
            peers: who may be in it.
            now_ms: the time.
        """
        tried = set(self.trials.running()).intersection(peers)
        holders = _holders(peers)
        if holders and holders <= tried:
            return Kept(waits=f"the trial of {_names(holders)}, which alone has the newest state")
        peers = {name: peer for name, peer in peers.items() if name not in tried}
        every = self._pairs(peers, now_ms)
        there = self._there(peers)
        pairs = [pair for pair in every if there.issuperset(pair)]
        late = self._late_ends(pairs, peers, now_ms)
        if late:
            return Kept(waits=f"the report of {_names(late)}, {BOTH_ENDS_MS} ms at most: {self.said(late, now_ms)}")
        out = self._cover(pairs, peers)
        if out is not None:
            self._hold_until_ms = None
            stay = there - out
            return Kept(out.union(tried, *(set(pair) - there for pair in every if stay.intersection(pair))))
        if self._hold_until_ms is None:
            self._hold_until_ms = now_ms + self._hold_ms
            self._hold_ms = min(2 * self._hold_ms, HOLD_MOST_MS)
        if now_ms < self._hold_until_ms:
            ends = {name for pair in pairs for name in pair}
            reason = (
                f"a set of at least {self._min_replicas} replicas that reach one another and hold the newest state: "
                f"{self.said(ends, now_ms, when=False)}; all are tried again in {self._hold_until_ms - now_ms} ms"
            )
            return Kept(waits=reason)
        self._hold_until_ms = None
        for pair in pairs:
            if pair in self._links:
                self._links[pair].pause.is_over = True
        self.trials.overrule()
        return NOBODY

    def fit(self, peers: Mapping[str, Peer], now_ms: int) -> frozenset[str] | None:
        """Decide who of these, all of whom wait, is left out of the quorum that is formed now: a bad link to somebody
        who is not in it either is no reason. None: no quorum of them fits."""
        tried = frozenset(self.trials.running()).intersection(peers)
        holders = _holders(peers)
        if holders and holders <= tried:
            return None
        peers = {name: peer for name, peer in peers.items() if name not in tried}
        out = self._cover(self._pairs(peers, now_ms), peers)
        return None if out is None else out | tried

    def formed(self, out: frozenset[str]) -> frozenset[str]:
        """A quorum is formed without these, though they wait. Returns: who of them was not left out of the last."""
        for link in self._links.values():
            link.fresh_ms = None
        self._hold_until_ms = None
        out = out.difference(self.trials.running())
        new, self._out = out - self._out, out
        return new

    def stores_failed(self, now_ms: int) -> Collection[str]:
        """List those whose store is avoided for now."""
        return [name for name, pause in self._stores.items() if pause.lasts(now_ms)]

    def said(self, names: Collection[str], now_ms: int, *, when: bool = True) -> str:
        """Say of each of these who can't reach it, why, and when it is tried again."""
        parts = []
        for name in sorted(names)[:NAMED_MOST]:
            links = [(pair, link) for pair, link in self._links.items() if name in pair]
            links = [(pair, link) for pair, link in links if self._counts(pair, link, now_ms)]
            if not links:
                parts += self._said_of_trial(name, now_ms)
                continue
            others = sorted(pair[0] if pair[1] == name else pair[1] for pair, _ in links)
            whys = sorted({why for _, link in links for why in link.said.values()})
            seconds = max(link.pause.remaining_ms(now_ms) for _, link in links) // 1_000
            again = f"; tried again in {seconds} s" if when else ""
            parts.append(f"{name} can't be reached by {_names(others)} ({whys[0]}{again})")
        more = len(names) - NAMED_MOST
        return shorten("; ".join(parts)) + (f" and {more} more" if more > 0 else "")

    def _said_of_trial(self, name: str, now_ms: int) -> list[str]:
        unreached = self.trials.failed().get(name)
        if unreached is None:
            return [f"{name} tries to reach its peers"] if name in self.trials.running() else []
        seconds = -(-self.trials.again_in_ms(name, now_ms) // 1_000)
        why = next(iter(sorted(unreached.values())), "")
        return [f"{name} can't reach {_names(unreached)} ({why}; it tries again in {seconds} s)"]

    def ends_of(self, name: str) -> list[str]:
        """List those that have no link to it."""
        tried = self.trials.failed().get(name, {})
        return [*tried, *self._reported_ends(name)]

    def _reported_ends(self, name: str) -> list[str]:
        return [pair[0] if pair[1] == name else pair[1] for pair in self._links if name in pair]

    # --- reports ------------------------------------------------------------------------------------------------------

    def _say(self, one: str, other: str, why: str, key: QuorumKey | None, now_ms: int) -> None:
        pair = pair_of(one, other)
        link = self._links.get(pair)
        if link is None:
            self._links[pair] = _BadLink(_Pause(key, now_ms), {one: why}, now_ms)
            return
        if link.pause.again(key, now_ms):
            link.said.clear()
            link.fresh_ms = now_ms
        link.said[one] = why

    def _store_missed(self, one: str, report: Unreached, key: QuorumKey | None, now_ms: int) -> None:
        """A store that was missed is avoided. Who misses another one as well, or that one again, can't be helped by
        that."""
        owner = report.replica_id
        pause = self._stores.get(owner)
        if pause is None:
            self._stores[owner] = _Pause(key, now_ms)
        else:
            pause.again(key, now_ms)
        missed = self._missed.setdefault(one, {})
        before = set(missed.values()) - {key}
        missed[owner] = key
        if before:
            for each in missed:
                self._say(one, each, _why(report), key, now_ms)

    def _met(self, quorum: Quorum) -> None:
        """The members of a quorum have built its process group. So the links between them work, unless one of them has
        failed in that very group since, and each of them has reached a store."""
        ids, key = set(quorum.replica_ids), quorum.key
        self._links = {
            pair: link for pair, link in self._links.items() if link.pause.key == key or not ids.issuperset(pair)
        }
        self._missed = {
            name: missed for name, missed in self._missed.items() if key in missed.values() or name not in ids
        }
        self._hold_ms = HOLD_FIRST_MS

    def _forget_the_gone(self, known: Collection[str], now_ms: int) -> None:
        """Forget what is about those that are gone, and what was not said again for long after its pause."""

        def is_old(pause: _Pause) -> bool:
            return now_ms - pause.since_ms > 2 * pause.length_ms + PAUSE_MOST_MS

        self._links = {
            pair: link
            for pair, link in self._links.items()
            if pair[0] in known and pair[1] in known and not is_old(link.pause)
        }
        self._stores = {name: pause for name, pause in self._stores.items() if name in known and not is_old(pause)}
        self._missed = {name: missed for name, missed in self._missed.items() if name in known}

    # --- what counts --------------------------------------------------------------------------------------------------

    def _counts(self, pair: Pair, link: _BadLink, now_ms: int) -> bool:
        return link.pause.lasts(now_ms) and not self._is_explained(pair, link)

    def _is_explained(self, pair: Pair, link: _BadLink) -> bool:
        """Whether one end could not come, because it did not reach the store: another store is tried first."""
        for said_by, end in (pair, pair[::-1]):
            missed = set(self._missed.get(end, {}).values())
            if set(link.said) == {said_by} and missed == {link.pause.key}:
                return True
        return False

    def _pairs(self, peers: Mapping[str, Peer], now_ms: int) -> list[Pair]:
        found = [pair for pair, link in self._links.items() if self._counts(pair, link, now_ms)]
        found += [pair_of(name, other) for name, unreached in self.trials.failed().items() for other in unreached]
        return [pair for pair in dict.fromkeys(found) if pair[0] in peers and pair[1] in peers]

    def _there(self, peers: Mapping[str, Peer]) -> set[str]:
        """Who neither trains nor has asked puts nobody out: it may be away for long."""
        return {name for name, peer in peers.items() if peer.asked or peer.before}

    def _late_ends(self, pairs: Collection[Pair], peers: Mapping[str, Peer], now_ms: int) -> set[str]:
        late: set[str] = set()
        for pair in pairs:
            fresh_ms = self._links[pair].fresh_ms if pair in self._links else None
            if fresh_ms is not None and now_ms - fresh_ms < BOTH_ENDS_MS:
                late |= {name for name in pair if not peers[name].asked}
        return late

    def _cover(self, pairs: Collection[Pair], peers: Mapping[str, Peer]) -> frozenset[str] | None:
        if not pairs:
            return frozenset()
        holders = _holders(peers)
        before = frozenset(peer.replica_id for peer in peers.values() if peer.before)
        limits = Limits(len(peers) - self._min_replicas, tuple(each for each in (holders, before) if each))
        order = {name: self._order(peers[name]) for pair in pairs for name in pair}
        cover = smallest_cover(pairs, order, limits, self.trials.failed())
        return None if cover is None else frozenset(cover)

    def _order(self, peer: Peer) -> tuple[int, ...]:
        """Who is not in the newest quorum stays out, where another could go as well: nobody who trains is stopped for
        it. Then who was in no group yet; then the newest."""
        return (int(peer.before), int(peer.built), -peer.since_ms)


def _holders(peers: Mapping[str, Peer]) -> frozenset[str]:
    """Who holds the newest state. Nobody, where none has a whole one."""
    newest = max((peer.step for peer in peers.values()), default=-1)
    return frozenset(peer.replica_id for peer in peers.values() if peer.step == newest >= 0)


def _why(report: Unreached) -> str:
    return f"{report.via.value}: {report.why}" if report.why else report.via.value


def _names(names: Collection[str]) -> str:
    shown = sorted(names)[:NAMED_MOST]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
