"""Reachability: which members can't reach one another, and which are left out of the next quorum because of it.

Each member reports with its next request which peers it could not reach, and for what. A process group needs a
connection between each two of its members, so one bad link stops a whole quorum. The rule leaves out the fewest members
whose removal leaves no bad link between the others: the smallest vertex cover of the reported pairs. A report counts
for a pause that doubles. After the pause the pair is tried again. Members that build a process group together prove
their links, and the reports about those links are dropped.

Law of this file: the reports of one job, and functions of them. The caller says which replicas live and what time it
is.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, final

from tft_coord.core.bad_links import Around, BadLink, BadLinks, Pair, Pause
from tft_coord.core.liveness import Replica
from tft_coord.core.names import listed, shorten
from tft_coord.core.trial import ANSWERED_WITHIN_MS, Trials
from tft_coord.core.types import Member, Quorum, QuorumKey, Unreached, Via

BOTH_ENDS_MS: Final = 1_000
HOLD_FIRST_MS: Final = 1_000
HOLD_MOST_MS: Final = 5_000
EXACT_MOST: Final = 20  # up to this number of members with bad links the smallest cover is exact
NAMED_MOST: Final = 5
WHY_MOST: Final = 300  # characters of a reason
FORGET_EVERY_MS: Final = 1_000

# --- the smallest cover ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a cover.

    Args:
        most: members that may be left out.
        needed: of each of these sets at least one member stays.
    """

    most: int
    needed: tuple[frozenset[str], ...] = ()

    def allow(self, chosen: Collection[str]) -> bool:
        """Return whether these may be left out. A larger set is never allowed where a smaller part of it is not."""
        return len(chosen) <= self.most and not any(each <= set(chosen) for each in self.needed)


def smallest_cover(
    around: Mapping[str, set[str]], order: Mapping[str, tuple[int, ...]], limits: Limits, free: Collection[str] = ()
) -> set[str] | None:
    """Find the fewest members that cover all pairs.

    Args:
        around: member with a bad link -> the members that it can't reach.
        order: where either of two members would do, the one with the lower value is chosen; of two equal ones the one
            with the higher replica id.
        limits: of the cover.
        free: members that are left out before any other one.
    Returns: the members, or None where no cover fits the limits.
    """
    if len(around) > EXACT_MOST:
        return _greedy(around, order, limits, free)
    by_name = sorted(around, reverse=True)
    places = {name: place for place, name in enumerate(sorted(by_name, key=lambda name: order[name]))}
    search = _Search(places, order, limits, free)
    search.go(around, frozenset())
    return set(search.best) if search.best is not None else None


@final
class _Search:
    """A branch-and-bound search: it chooses the member with the most bad links, or all at the other ends of them."""

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
    """Count pairs that share no member: each needs a member of its own."""
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
    """Choose the member with the most remaining bad links again and again; then drop members that are not needed."""
    chosen = {name for name in around if name in free}
    chosen = chosen if limits.allow(chosen) else set()
    spare = [len(each.difference(chosen)) - 1 for each in limits.needed]
    needed_in: dict[str, list[int]] = {}
    for place, each in enumerate(limits.needed):
        for name in each.intersection(around):
            needed_in.setdefault(name, []).append(place)
    num_left = {name: len(others - chosen) for name, others in around.items() if name not in chosen}
    # A member whose number has fallen since its insertion is inserted again when its turn comes.
    heap = [(-number, order[name], name) for name, number in num_left.items() if number]
    heapq.heapify(heap)
    stays: set[str] = set()
    while heap:
        number, rank, name = heapq.heappop(heap)
        if num_left[name] != -number:
            if num_left[name]:
                heapq.heappush(heap, (-num_left[name], rank, name))
            continue
        if len(chosen) >= limits.most:
            return None
        if not all(spare[place] for place in needed_in.get(name, ())):
            stays.add(name)  # all at the other ends of its links go, where they may
            if around[name] & stays:
                return None
            continue
        chosen.add(name)
        for place in needed_in.get(name, ()):
            spare[place] -= 1
        for other in around[name]:
            if other not in chosen:
                num_left[other] -= 1
    if any(number for name, number in num_left.items() if name not in chosen):
        return None
    for name in sorted(chosen):
        if name not in around[name] and around[name] <= chosen:
            chosen.remove(name)
    return chosen


# --- what is known ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peer:
    """A replica that may be in the next quorum.

    Args:
        replica_id: of it.
        built: it was in a process group that all its members had built.
        since_ms: since when it is known.
        step: of its state by its last report; -1 where it has no whole state, or its step isn't known.
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
    """Return all replicas that may be in the next quorum, including those that have not asked yet.

    Args:
        replicas: all known ones.
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
            step = max(step, replica.where[0].step)  # by its beats it has committed since
        found[name] = Peer(name, replica.built, replica.since_ms, step, asked, name in members)
    return found


@dataclass(frozen=True, slots=True)
class Exclusions:
    """The consequences of the reports for the next quorum.

    Args:
        out: the replicas that can't be in it.
        waits: why none may form yet; "": one may form.
    """

    out: frozenset[str] = frozenset()
    waits: str = ""


NO_EXCLUSIONS: Final = Exclusions()


@dataclass(frozen=True, slots=True)
class _Plan:
    """The replicas that may be in a quorum, with the result for them; valid until one of the first three fields
    changes.

    Args:
        peers: the replicas that may be in it.
        version: of the bad links.
        failed: the trials that have failed.
        every: the bad links between them, by each end.
        there: the replicas that train or have asked.
        around: the bad links between those.
        out: the replicas to leave out; None: no cover fits.
    """

    peers: Mapping[str, Peer]
    version: int
    failed: Mapping[str, Mapping[str, str]]
    every: Around
    there: frozenset[str]
    around: Mapping[str, set[str]]
    out: frozenset[str] | None


@final
class Reach:
    """The reports of one job's members about the peers that they can't reach.

    Args:
        min_replicas: smallest quorum.
    """

    def __init__(self, min_replicas: int) -> None:
        self.min_replicas = min_replicas
        self._links = BadLinks()
        self._stores: dict[str, Pause] = {}  # stores that some replica could not reach
        # replica -> the stores that it missed, and in which quorums
        self._missed: dict[str, dict[str, QuorumKey | None]] = {}
        self._out: frozenset[str] = frozenset()  # of the newest quorum
        self._hold_ms = HOLD_FIRST_MS
        self._hold_until_ms: int | None = None
        self._forgot_ms: int | None = None
        self._built: tuple[QuorumKey, set[str]] | None = None  # the members that have built the newest quorum's group
        self._plans: list[_Plan] = []  # the last two
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
        """Take the reports of a request.

        Args:
            replica: that asks.
            member: as it asks to be.
            held: the quorum that it was in, and that its reports are about.
            previous: the newest quorum.
            known: ids of all replicas that the lighthouse knows.
            now_ms: the time.
            after_loss: a member of that quorum was lost. When its end tears the process group, the survivors may see
                their connections to one another end. Their reports about one another's ports in that quorum do not
                count.
        Returns: the member as it may stand in a quorum, without its reports.
        """
        works = held is not None and not member.needs_configure
        replica.built = replica.built or works or member.live
        if not member.unreached:
            knows = len(self._links) or self._stores or self._missed
            if knows and works and previous is not None and held == previous.key and member.commit_failures == 0:
                self._note_built(replica.replica_id, previous)
            return replace(member, store_failed=False) if member.store_failed else member
        self._forget_gone(known, now_ms)
        name = member.replica_id
        for report in member.unreached:
            if report.replica_id not in known:
                continue
            if report.via is Via.STORE:
                self._store_missed(name, report, held, now_ms)
            elif report.via is Via.GROUP and held is not None and not after_loss:
                self._report(name, report.replica_id, _why(report), held, now_ms)
        return replace(member, unreached=(), store_failed=False)

    def counts(self, now_ms: int) -> bool:
        """Return whether any report or trial keeps a replica out now."""
        return self.trials.keep_out or self.trials.is_any_overruled or bool(self.bad_links(now_ms))

    def bad_links(self, now_ms: int) -> Mapping[str, set[str]]:
        """Return the bad links that count now, by each end."""
        return self._links.counted(now_ms, self._is_explained if self._missed else None)

    def look(self, peers: Mapping[str, Peer], now_ms: int) -> Exclusions:
        """Decide which replicas are left out of the next quorum.

        Args:
            peers: the replicas that may be in it.
            now_ms: the time.
        """
        tried = set(self.trials.running()).intersection(peers)
        holders = _holders(peers)
        if holders and holders <= tried:
            return Exclusions(waits=f"the trial of {listed(holders)}, which alone has the newest state")
        peers = {name: peer for name, peer in peers.items() if name not in tried}
        plan = self._plan_anew(peers, now_ms)
        late = self._late_ends(plan.around, peers, now_ms)
        if late:
            return Exclusions(
                waits=f"the report of {listed(late)}, {BOTH_ENDS_MS} ms at most: {self.describe(late, now_ms)}"
            )
        if plan.out is not None:
            self._hold_until_ms = None
            stay = plan.there - plan.out
            away = (name for name in plan.every if name not in plan.there)
            return Exclusions(plan.out.union(tried, (name for name in away if not stay.isdisjoint(plan.every[name]))))
        if self._hold_until_ms is None:
            self._hold_until_ms = now_ms + self._hold_ms
            self._hold_ms = min(2 * self._hold_ms, HOLD_MOST_MS)
        if now_ms < self._hold_until_ms:
            why = self.describe(plan.around, now_ms, when=False)
            reason = (
                f"a set of at least {self.min_replicas} replicas that reach one another and hold the newest state: "
                f"{why}; all are tried again in {self._hold_until_ms - now_ms} ms"
            )
            return Exclusions(waits=reason)
        if tried and now_ms < self._hold_until_ms + ANSWERED_WITHIN_MS:
            return Exclusions(waits=f"the trial of {listed(tried)}, which may complete a set")
        self._hold_until_ms = None
        for name, others in plan.around.items():
            for other in others:
                if name < other:
                    self._links.end_pause(name, other)
        self.trials.overrule()
        return NO_EXCLUSIONS

    def fit(self, peers: Mapping[str, Peer], now_ms: int) -> frozenset[str] | None:
        """Return which of these waiting replicas the quorum that forms now leaves out; None: no quorum of them fits.

        A bad link to a replica that is not in the quorum either is no reason.
        """
        tried = frozenset(self.trials.running()).intersection(peers)
        holders = _holders(peers)
        if holders and holders <= tried:
            return None
        peers = {name: peer for name, peer in peers.items() if name not in tried}
        out = self._plan_anew(peers, now_ms).out
        return None if out is None else out | tried

    def formed(self, out: frozenset[str]) -> frozenset[str]:
        """Note that a quorum forms without these waiting ones. Returns: those that were not left out of the
        last one."""
        self._links.next_round()
        self._hold_until_ms = None
        out = out.difference(self.trials.running())
        new, self._out = out - self._out, out
        return new

    def stores_failed(self, now_ms: int) -> Collection[str]:
        """Return the replicas whose store is avoided for now."""
        return [name for name, pause in self._stores.items() if pause.lasts(now_ms)]

    def describe(self, names: Collection[str], now_ms: int, *, when: bool = True) -> str:
        """Return a phrase that says for each of these which peers can't reach it, why, and when it is tried again."""
        parts = []
        for name in sorted(names)[:NAMED_MOST]:
            clause = self._describe_one(name, now_ms, when=when)
            if clause:
                parts.append(f"{name} {clause}")
        more = len(names) - NAMED_MOST
        return shorten("; ".join(parts)) + (f" and {more} more" if more > 0 else "")

    def left_out(self, name: str, now_ms: int) -> str:
        """Return the sentence that says that this replica is left out, and why."""
        clause = self._describe_one(name, now_ms) or "can't be reached by others"
        return shorten(f"{name} is left out of the next quorum: it {clause}")

    def _describe_one(self, name: str, now_ms: int, *, when: bool = True) -> str:
        others = sorted(self.bad_links(now_ms).get(name, ()))
        if not others:
            return self._describe_trial(name, now_ms)
        links = [link for other in others if (link := self._links.link(name, other)) is not None]
        why = min(why for link in links for why in link.reports.values())
        seconds = max(link.pause.remaining_ms(now_ms) for link in links) // 1_000
        again = f"; tried again in {seconds} s" if when else ""
        if others == [name]:
            return f"can't build a process group itself ({why}{again})"
        return f"can't be reached by {listed(others)} ({why}{again})"

    def _describe_trial(self, name: str, now_ms: int) -> str:
        unreached = self.trials.failed().get(name)
        if unreached is None:
            if name in self.trials.running():
                return "tries to reach its peers"
            missed_by = self._missed_by(name)
            why = next(iter(sorted(missed_by.values())), "")
            return f"can't be reached by {listed(missed_by)} ({why})" if missed_by else ""
        seconds = -(-self.trials.again_in_ms(name, now_ms) // 1_000)
        why = next(iter(sorted(unreached.values())), "")
        return f"can't reach {listed(unreached)} ({why}; it tries again in {seconds} s)"

    def ends_of(self, name: str) -> list[str]:
        """Return the replicas that have no link to it."""
        tried = self.trials.failed().get(name, {})
        return [*tried, *self._missed_by(name), *sorted(self._links.ends_of(name))]

    def _missed_by(self, name: str) -> dict[str, str]:
        """Return the replicas that did not reach this one in their trial, and why."""
        return {other: missed[name] for other, missed in self.trials.failed().items() if name in missed}

    # --- reports ------------------------------------------------------------------------------------------------------

    def _report(self, one: str, other: str, why: str, key: QuorumKey | None, now_ms: int) -> None:
        self._links.report(one, other, why, key, now_ms)
        if self._missed:
            self._links.changed()  # the pair may be explained or unexplained now

    def _store_missed(self, one: str, report: Unreached, key: QuorumKey | None, now_ms: int) -> None:
        """Record a missed store, which is then avoided.

        If a replica misses another store as well, or the same one again, a choice of store does not help. Its misses
        become bad links.
        """
        owner = report.replica_id
        pause = self._stores.get(owner)
        if pause is None:
            self._stores[owner] = Pause(key, now_ms)
        else:
            pause.again(key, now_ms)
        missed = self._missed.setdefault(one, {})
        before = set(missed.values()) - {key}
        missed[owner] = key
        self._links.changed()
        if before:
            for each in missed:
                self._report(one, each, _why(report), key, now_ms)

    def _note_built(self, name: str, quorum: Quorum) -> None:
        """Note that a member of a quorum has built its process group and has reached a store.

        The link between two members that have both built it works, unless one of them has failed in that very group
        since.
        """
        key = quorum.key
        if self._built is None or self._built[0] != key:
            self._built = (key, set())
        built = self._built[1]
        if name in built:
            return
        if name in self._missed and key not in self._missed[name].values():
            del self._missed[name]
            self._links.changed()
        built.add(name)
        self._links.prove(name, built, key)
        self._hold_ms = HOLD_FIRST_MS

    def _forget_gone(self, known: Collection[str], now_ms: int) -> None:
        """Forget reports about replicas that are gone, and reports that were not repeated for long after their pause.

        Thousands report together, and each cleanup looks at all links, so cleanups are rare.
        """
        if self._forgot_ms is not None and now_ms - self._forgot_ms < FORGET_EVERY_MS:
            return
        self._forgot_ms = now_ms
        self._links.forget_gone(known, now_ms)
        self._stores = {
            name: pause for name, pause in self._stores.items() if name in known and not pause.is_old(now_ms)
        }
        if any(name not in known for name in self._missed):
            self._missed = {name: missed for name, missed in self._missed.items() if name in known}
            self._links.changed()

    # --- what counts --------------------------------------------------------------------------------------------------

    def _is_explained(self, pair: Pair, link: BadLink) -> bool:
        """Return whether one end did not come because it missed the store; another store is tried first in that
        case."""
        for reporter, end in (pair, pair[::-1]):
            missed = set(self._missed.get(end, {}).values())
            if set(link.reports) == {reporter} and missed == {link.pause.key}:
                return True
        return False

    def _around(self, peers: Mapping[str, Peer], now_ms: int) -> dict[str, set[str]]:
        """Return the bad links between these, including those that trials have found."""
        names = peers.keys()
        counted = self.bad_links(now_ms).items()
        found = {name: there for name, others in counted if name in names and (there := others & names)}
        for name, unreached in self.trials.failed().items():
            for other in unreached:
                if name in names and other in names:
                    found.setdefault(name, set()).add(other)
                    found.setdefault(other, set()).add(name)
        return found

    def _plan_anew(self, peers: Mapping[str, Peer], now_ms: int) -> _Plan:
        """Plan without the newcomers that were let in despite a failed trial, if a quorum fits without them by now."""
        overruled = self.trials.heed([name for name, peer in peers.items() if peer.asked])
        plan = self._plan(peers, now_ms)
        if plan.out is None and overruled:
            self.trials.overrule_again(overruled)
            plan = self._plan(peers, now_ms)
        return plan

    def _plan(self, peers: Mapping[str, Peer], now_ms: int) -> _Plan:
        """Decide which of these are left out, or reuse an earlier result if nothing has changed since."""
        self.bad_links(now_ms)
        failed = self.trials.failed()
        for plan in self._plans:
            if plan.version == self._links.version and plan.failed == failed and plan.peers == peers:
                return plan
        every = self._around(peers, now_ms)
        there = self._there(peers)
        around = every
        if not every.keys() <= there:
            within = {name: others & there for name, others in every.items() if name in there}
            around = {name: others for name, others in within.items() if others}
        plan = _Plan(peers, self._links.version, failed, every, there, around, self._cover(around, peers))
        self._plans = [plan, *self._plans[:1]]
        return plan

    def _there(self, peers: Mapping[str, Peer]) -> frozenset[str]:
        """Return the replicas that train or have asked. The others may be away for long, and force no replica out."""
        return frozenset(name for name, peer in peers.items() if peer.asked or peer.before)

    def _late_ends(self, around: Around, peers: Mapping[str, Peer], now_ms: int) -> set[str]:
        return {
            name
            for name, others in around.items()
            if not peers[name].asked and self._links.is_fresh(name, others, now_ms, BOTH_ENDS_MS)
        }

    def _cover(self, around: Mapping[str, set[str]], peers: Mapping[str, Peer]) -> frozenset[str] | None:
        if not around:
            return frozenset()
        holders = _holders(peers)
        before = frozenset(peer.replica_id for peer in peers.values() if peer.before)
        limits = Limits(len(peers) - self.min_replicas, tuple(each for each in (holders, before) if each))
        order = {name: self._order(peers[name]) for name in around}
        cover = smallest_cover(around, order, limits, self.trials.failed())
        return None if cover is None else frozenset(cover)

    def _order(self, peer: Peer) -> tuple[int, ...]:
        """Return the sort key of a replica; where either of two could be left out, the lower key is.

        A replica outside the newest quorum comes first, so that no training replica stops for it. Then a replica that
        was in no process group yet, then the newest.
        """
        return (int(peer.before), int(peer.built), -peer.since_ms)


def _holders(peers: Mapping[str, Peer]) -> frozenset[str]:
    """Return the replicas that hold the newest state; none if no replica has a whole one."""
    newest = max((peer.step for peer in peers.values()), default=-1)
    return frozenset(peer.replica_id for peer in peers.values() if peer.step == newest >= 0)


def _why(report: Unreached) -> str:
    return f"{report.via.value}: {report.why[:WHY_MOST]}" if report.why else report.via.value
