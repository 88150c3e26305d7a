"""Trials: a newcomer shows that it reaches its peers before it joins.

A newcomer that can't reach the members of the newest quorum would cost them a round. The lighthouse therefore asks its
manager server to dial them first. A newcomer whose trial is open is not in the next quorum, and no replica waits for
it. A newcomer that failed tries again at growing intervals.

Law of this file: the trials of one job; other files decide which replicas are left out because of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, final

from tft_coord.core import effects
from tft_coord.core.liveness import Replica
from tft_coord.core.types import TRIED_MOST, Member, PeerAddresses, Unreached

ANSWERED_WITHIN_MS: Final = 5_000  # look-ups and dials take 4 s at most
AGAIN_AFTER_MS: Final = (1_000, 2_000, 4_000, 5_000)
NO_LINKS: Final[Mapping[str, Collection[str]]] = MappingProxyType({})


@dataclass(slots=True)
class _Trial:
    number: int
    connection: tuple[int, int]  # the stream and session of the newcomer; a trial ends with them
    peers: tuple[str, ...]
    since_ms: int
    is_over: bool = False
    is_answered: bool = False
    num_failed: int = 0  # trials in a row
    again_ms: int = 0
    unreached: dict[str, str] = field(default_factory=dict)  # replica id -> reason
    is_overruled: bool = False

    @property
    def keeps_out(self) -> bool:
        """Return whether its newcomer failed and is left out for that."""
        return bool(self.unreached) and not self.is_overruled

    @property
    def is_first(self) -> bool:
        """Return whether nothing is known of this newcomer yet."""
        return not self.is_over and not self.unreached


@final
class Trials:
    """The trials of one job's newcomers."""

    def __init__(self) -> None:
        self._trials: dict[str, _Trial] = {}
        self._last = 0

    def look(
        self,
        waiting: Iterable[Replica],
        members: Mapping[str, Member],
        living: Mapping[str, Replica],
        now_ms: int,
        bad_links: Mapping[str, Collection[str]] = NO_LINKS,
    ) -> list[effects.TryPeers]:
        """Begin the trials that are due.

        Args:
            waiting: the replicas that wait for the next quorum.
            members: of the newest quorum; empty: there is none, and no replica needs a trial.
            living: all known replicas.
            now_ms: the time.
            bad_links: replica -> the peers that it can't reach, by the reports that count. A replica with such a link
                to a member begins no trial, which would show the same. The result of its last trial still counts.
        Returns: the trials to ask for.
        """
        newcomers = {each.replica_id: each for each in waiting if each.tries_peers and each.replica_id not in members}
        if self._trials:
            self._trials = {
                name: trial
                for name, trial in self._trials.items()
                if name in newcomers or (name not in members and trial.unreached and _lives(living.get(name), trial))
            }
        if not newcomers or not members:
            return []
        out: list[effects.TryPeers] = []
        for name, replica in newcomers.items():
            assert replica.stream is not None  # a waiting replica has a stream
            trial = self._trials.get(name)
            if trial is not None and not trial.is_over and now_ms - trial.since_ms >= ANSWERED_WITHIN_MS:
                self._end(trial, dict.fromkeys(trial.peers, "its manager server has not answered"), now_ms)
            connection = replica.stream, replica.session
            is_new = trial is None or trial.connection != connection
            is_due = trial is not None and trial.is_over and trial.keeps_out and now_ms >= trial.again_ms
            is_known = not members.keys().isdisjoint(bad_links.get(name, ()))
            if is_known and is_new and trial is not None and trial.is_first:
                del self._trials[name]  # an earlier session was asked, which answers no more
            if is_known or not (is_new or is_due):
                continue
            peers = self._peers(members, living)
            if not peers:
                if trial is not None and not trial.unreached:
                    del self._trials[name]  # no peer is left that it might not reach
                continue
            self._last += 1
            failed, before = (trial.num_failed, trial.unreached) if trial is not None else (0, {})
            ids = tuple(peer.replica_id for peer in peers)
            self._trials[name] = _Trial(self._last, connection, ids, now_ms, num_failed=failed, unreached=before)
            out.append(effects.TryPeers(replica.stream, self._last, peers))
        return out

    def answered(self, replica_id: str, number: int, unreached: Iterable[Unreached], now_ms: int) -> bool:
        """Take the result of a newcomer's trial, even if it is late. Returns: whether the lighthouse had asked
        for it."""
        trial = self._trials.get(replica_id)
        if trial is None or trial.number != number or trial.is_answered:
            return False
        trial.is_answered = True
        self._end(trial, {each.replica_id: each.why for each in unreached if each.replica_id in trial.peers}, now_ms)
        if not trial.unreached:
            for each in self._trials.values():
                each.is_overruled = False
        return True

    def running(self) -> Collection[str]:
        """Return the newcomers of which nothing is known yet, because their first trial is open."""
        return [name for name, trial in self._trials.items() if trial.is_first]

    def failed(self) -> dict[str, dict[str, str]]:
        """Return for each newcomer that failed its last trial the peers that it did not reach, and why."""
        return {name: trial.unreached for name, trial in self._trials.items() if trial.keeps_out}

    @property
    def is_any_open(self) -> bool:
        """Return whether a trial is open."""
        return any(not trial.is_over for trial in self._trials.values())

    @property
    def keep_out(self) -> bool:
        """Return whether a newcomer has failed its trial, or is in its first one."""
        return any(trial.keeps_out or trial.is_first for trial in self._trials.values())

    @property
    def is_any_overruled(self) -> bool:
        """Return whether a newcomer was let in despite a failed trial."""
        return any(trial.is_overruled for trial in self._trials.values())

    def again_in_ms(self, replica_id: str, now_ms: int) -> int:
        """Return the time until the next trial of a newcomer that failed; 0: it runs."""
        trial = self._trials.get(replica_id)
        return max(0, trial.again_ms - now_ms) if trial is not None and trial.is_over else 0

    def overrule(self) -> None:
        """Let the newcomers that failed in, because no quorum fits without them. A trial that passes ends that, because
        one may fit then."""
        for trial in self._trials.values():
            trial.is_over = trial.is_overruled = True

    def heed(self, names: Collection[str]) -> list[str]:
        """End the overrule of these newcomers. Returns: those of them that were let in by it."""
        overruled = [name for name, trial in self._trials.items() if trial.is_overruled and name in names]
        self._set_overruled(overruled, False)
        return overruled

    def overrule_again(self, names: Iterable[str]) -> None:
        """Undo `heed`, because still no quorum fits without these newcomers."""
        self._set_overruled(names, True)

    def _set_overruled(self, names: Iterable[str], value: bool) -> None:
        for name in names:
            self._trials[name].is_overruled = value

    def _end(self, trial: _Trial, unreached: dict[str, str], now_ms: int) -> None:
        trial.is_over, trial.unreached = True, unreached
        if unreached:
            trial.again_ms = now_ms + AGAIN_AFTER_MS[min(trial.num_failed, len(AGAIN_AFTER_MS) - 1)]
            trial.num_failed += 1

    def _peers(self, members: Mapping[str, Member], living: Mapping[str, Replica]) -> tuple[PeerAddresses, ...]:
        """Return some of the living members; if there are many, other ones for each newcomer."""
        there = [name for name in members if (known := living.get(name)) is not None and known.healthy]
        if len(there) > TRIED_MOST:
            first = self._last % len(there)
            there = (there[first:] + there[:first])[:TRIED_MOST]
        addresses = ((members[name].address, members[name].store_address) for name in there)
        found = (tuple(address for address in each if address) for each in addresses)
        return tuple(PeerAddresses(name, each) for name, each in zip(there, found, strict=True) if each)


def _lives(replica: Replica | None, trial: _Trial) -> bool:
    """Return whether the session of that trial stands. The replica may only be between two requests."""
    return replica is not None and replica.healthy and replica.session == trial.connection[1]
