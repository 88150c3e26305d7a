"""Wait reports: sentences that say which replicas wait for which, and when a log gets them.

A wait of more than 5 s is logged once, again after 30 s and then each minute, and once more when it is over. The same
class decides that in the lighthouse and in the trainer, so that both logs agree.

Law of this file: decisions and sentences only; the caller gives the time and calls about once a second.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, final

from tft_coord.core.liveness import Replica
from tft_coord.core.names import base_name, shorten
from tft_coord.core.progress import WORDS, Phase

FIRST_MS: Final = 5_000
SECOND_MS: Final = 30_000
THEN_EVERY_MS: Final = 60_000
TELL_AFTER_MS: Final = 2_000  # before the first line, so that the waiting replica's own line has the sentence
TELL_EVERY_MS: Final = 1_000  # as often as a beat, so that "for 12 s" is true when it is read
BOTH_LIVE_MS: Final = 3_000
SAME_WITHIN_MS: Final = 1_500
NAMES_MOST: Final = 5
LOST_STATE: Final = "the state of step "  # the start of the phrase for a state whose holders are lost
LEFT_OUT: Final = "left out: "  # the start of the sentence for replicas that wait in vain while others train


@dataclass(frozen=True, slots=True)
class Notice:
    """A log line that is due. `seconds`: for how long the wait has lasted; `is_over`: it has ended."""

    seconds: int
    is_over: bool = False


@final
class WaitNotice:
    """The decision when one replica's waits are logged."""

    def __init__(self) -> None:
        self._since_ms: int | None = None
        self._next_ms = 0
        self._was_logged = False

    def look(self, since_ms: int | None, now_ms: int) -> Notice | None:
        """Decide which line is due.

        Args:
            since_ms: when the current wait began; None: there is no wait. A later time is another wait.
            now_ms: the time.
        Returns: the line to write, if any. The end of an earlier wait comes first; look again for the next one.
        """
        before = self._since_ms
        # A beat gives the start of a wait to within some milliseconds; a start that is only slightly later is the same
        # wait.
        if before is not None and (since_ms is None or since_ms > before + SAME_WITHIN_MS):
            was_logged, self._since_ms, self._was_logged = self._was_logged, None, False
            if was_logged:
                return Notice((now_ms - before) // 1_000, is_over=True)
        if since_ms is None:
            return None
        if self._since_ms is None:
            self._since_ms, self._next_ms = since_ms, FIRST_MS
        lasted_ms = now_ms - self._since_ms
        if lasted_ms < self._next_ms:
            return None
        self._next_ms = max(self._next_ms, SECOND_MS)
        if self._next_ms <= lasted_ms:  # computed rather than counted up to: a beat may report ages
            self._next_ms += ((lasted_ms - self._next_ms) // THEN_EVERY_MS + 1) * THEN_EVERY_MS
        self._was_logged = True
        return Notice(lasted_ms // 1_000)


# --- the lighthouse's view ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobWait:
    """The wait of members of one job.

    Args:
        since_ms: when the longest wait began.
        sentence: the missing replicas, where each was last seen, and what ends the wait.
        streams: of the waiting members.
        missing: ids of the replicas that they wait for, sorted; None: they are left out, and the others train.
    """

    since_ms: int
    sentence: str
    streams: tuple[int, ...]
    missing: tuple[str, ...] | None = None


def last_seen(replica: Replica, now_ms: int) -> str:
    """Return a phrase that names a replica, its address, and its last known progress."""
    name = shorten(replica.replica_id) + (f" at {replica.address}" if replica.address else "")
    if replica.lost is not None:
        return f"{name} (lost {_seconds(now_ms - replica.lost_ms)} ago: {replica.lost})"
    if replica.presumed:
        return f"{name} (not heard yet by this lighthouse)"
    if replica.where is None:
        return f"{name} (heard {_seconds(now_ms - replica.heard_ms)} ago)"
    progress, heard_ms = replica.where
    lasts = _seconds(progress.since_ms + now_ms - heard_ms)
    return f"{name} (step {progress.step}, {WORDS[progress.phase]} for {lasts})"


def quorum_wait(reason: str, missing: Collection[Replica], *, how_to_lower: str, now_ms: int) -> str:
    """Return the sentence for replicas that wait for a quorum.

    Args:
        reason: the rule's own words.
        missing: the replicas that have not asked.
        how_to_lower: how an operator lowers min_replicas, if fewer have asked; "": enough have.
        now_ms: the time.
    """
    who = f"; not asked: {_listed(missing, now_ms)}" if missing else "; no other replica is known"
    if reason.startswith(LOST_STATE):
        return f"{shorten(reason)}{who}"  # the reason itself says what ends the wait
    ends = f"another replica asks, or {how_to_lower}" if how_to_lower else "it asks or is lost"
    return f"{shorten(reason)}{who}; ends when {ends}"


def left_out_wait(reason: str) -> str:
    """Return the sentence for replicas that are left out of the quorum in which the others train."""
    return f"{LEFT_OUT}{shorten(reason)}; the others train on; ends when the link works again"


def step_wait(step: int, missing: Collection[Replica], now_ms: int) -> str:
    """Return the sentence for replicas that wait for one another inside a step."""
    if not missing:
        return f"step {step}: all members wait for one another, and no member is busy"
    return f"step {step}: waits for {_listed(missing, now_ms)}; ends when it goes on or is lost"


def _listed(replicas: Collection[Replica], now_ms: int) -> str:
    shown = sorted(replicas, key=lambda replica: replica.replica_id)[:NAMES_MOST]
    more = len(replicas) - len(shown)
    return ", ".join(last_seen(replica, now_ms) for replica in shown) + (f" and {more} more" if more else "")


def _seconds(milliseconds: int) -> str:
    return f"{max(0, milliseconds) // 1_000} s"


def waits_since(replica: Replica, formed_ms: int) -> int | None:
    """Return since when that replica waits inside its step, by its newest beat; None: it does not wait.

    Args:
        replica: a member of the newest quorum.
        formed_ms: when that quorum was answered; a beat from before is about a wait that has ended.
    """
    if replica.where is None or not replica.healthy:
        return None
    progress, heard_ms = replica.where
    waits = progress.phase in (Phase.REDUCING, Phase.WAITING) and heard_ms > formed_ms
    return heard_ms - progress.since_ms if waits else None


@final
class NameWatch:
    """The watch for two living replicas of one name, such as a worker that outlived its launcher and its restart.

    A restart and its predecessor overlap for a moment. A pair is therefore named only when both were heard for a while
    after the younger one came.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, int]] = {}  # replica id -> its name, and when it was first seen
        self._warned: set[frozenset[str]] = set()
        self.warnings: tuple[str, ...] = ()  # the pairs of the last look

    def look(self, replicas: Collection[Replica], now_ms: int) -> list[str]:
        """Look for pairs. Returns: the new warnings, one sentence for each pair, each pair once."""
        living = {each.replica_id: each for each in replicas if each.healthy and not each.presumed}
        self._seen = {name: self._seen.get(name) or (base_name(name), now_ms) for name in living}
        if self._warned:
            self._warned = {pair for pair in self._warned if pair <= living.keys()}
        by_name: dict[str, list[str]] = {}
        for replica_id, (name, _) in self._seen.items():
            if name:
                by_name.setdefault(name, []).append(replica_id)
        found: list[str] = []
        warnings: list[str] = []
        for same in by_name.values():
            same.sort(key=lambda replica_id: self._seen[replica_id][1])
            for older, younger in pairwise(same):
                lives_ms = min(living[older].heard_ms, living[younger].heard_ms) - self._seen[younger][1]
                pair = frozenset((older, younger))
                if lives_ms < BOTH_LIVE_MS:
                    continue
                warnings.append(duplicate_name_warning(living[older], living[younger]))
                if pair not in self._warned:
                    self._warned.add(pair)
                    found.append(warnings[-1])
        self.warnings = tuple(warnings)
        return found


def duplicate_name_warning(older: Replica, younger: Replica) -> str:
    """Return the warning about two living replicas of one name."""
    places = " and ".join(
        f"{shorten(each.replica_id)} at {each.address}" + (f" (pid {each.pid})" if each.pid else "")
        for each in (older, younger)
    )
    # pid 1 is a container's; its neighbour has the same
    if _host(older) == _host(younger) and older.pid == younger.pid > 1:
        next_step = "Both are in one process: call shutdown() on its earlier Manager first"
    else:
        next_step = "End the older one if it has outlived its launcher, or give each group its own REPLICA_GROUP_ID"
    return f"two running replicas have the name {base_name(older.replica_id)!r}: {places}. {next_step}"


def _host(replica: Replica) -> str:
    return replica.address.rpartition(":")[0]


@final
class WaitBoard:
    """The messages and log lines about one job's waits."""

    def __init__(self) -> None:
        self._notice = WaitNotice()
        self._sent_ms: int | None = None
        self._sentence = ""

    def look(self, wait: JobWait | None, now_ms: int) -> tuple[JobWait | None, Notice | None, str]:
        """Look at the job's current wait.

        Returns: the wait to tell its streams now, or None; the log line that is due, or None, and its sentence.
        """
        notice = self._notice.look(wait.since_ms if wait is not None else None, now_ms)
        sentence = self._sentence if notice is not None and notice.is_over else (wait.sentence if wait else "")
        if wait is None:
            self._sent_ms = None
            return None, notice, sentence
        self._sentence = wait.sentence
        if now_ms - wait.since_ms < TELL_AFTER_MS:
            return None, notice, sentence
        if self._sent_ms is not None and now_ms - self._sent_ms < TELL_EVERY_MS:
            return None, notice, sentence
        self._sent_ms = now_ms
        return wait, notice, sentence
