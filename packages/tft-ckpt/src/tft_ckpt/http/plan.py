"""Whom to ask, and whom no more.

A receive knows several sources and trusts none. One of them is the lead: its manifest is in force, and whatever else
comes is checked against it. The other sources help while it leads, and so do fellows, newcomers that fetch the same
state and that a source has named. When a connection breaks or a chunk is damaged, the source gets a strike; with too
many in a row it is not asked again, and neither is one that says that it will not have the state. A source that sends
nothing for a second is left for another one, asked last, and given more time each time; a pause of the network that
stops all of them must not end the receive. A source that failed in an earlier receive is asked last from the start. A
helper whose chunks do not match the lead's checksums may be right and the lead wrong: it is set aside, and has its turn
to lead when this lead can't go on. Whoever leads next, of the chunks that are here only those stay whose checksums it
confirms: so the state is in the end the one that a single source has, never a mixture.

Law of this file: pure; no I/O, no clock, no thread. The owner locks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final, final

from tft_ckpt.errors import (
    CheckpointError,
    StateCorrupt,
    StateDiffers,
    StateMismatch,
    StateUnavailable,
    StateUnsupported,
)
from tft_ckpt.key import StateKey

__all__ = ["FetchPlan"]

HUNG_S: Final = 1.0
"""How long a source may send nothing while there are others to ask; twice as long after each time."""
BREAKS_MAX: Final = 3
"""Connections in a row that may break without one good chunk between."""
DAMAGES_MAX: Final = 3
"""Damaged manifests and chunks in all, of a lead."""
SLIPS_MAX: Final = 2
"""Under one lead, how often a helper may serve what does not match, or be too slow, before it is set aside."""
FELLOWS_MAX: Final = 64
"""Addresses of fellows that are kept."""
ABSENCES_MAX: Final = 10
"""How often a fellow may have nothing of the state before it is forgotten."""
PAUSE_S: Final = 0.05
"""Before a source is asked again after the first break; twice as long after each further one."""


@final
class FetchPlan:
    """One receive's sources and fellows.

    Args:
        key: the state that is wanted.
        sources: addresses, the preferred one first; repeated ones count once.
        poor: those of them that hung, lied or were slow before, and are asked last.
        own: this receiver's address, which is no fellow.
    """

    def __init__(self, key: StateKey, sources: Sequence[str], *, own: str = "", poor: Collection[str] = ()) -> None:
        self._key = key
        self._own = own
        self._queue = sorted(dict.fromkeys(sources), key=lambda source: source in poor)
        self._breaks = dict.fromkeys(self._queue, 0)
        self._damages = dict.fromkeys(self._queue, 0)
        self._errors: dict[str, CheckpointError] = {}
        self._ready_s: dict[str, float] = {}
        self._slips: Counter[str] = Counter()
        self._hangs: Counter[str] = Counter()
        self._poor: dict[str, str] = {}
        self._fellows: dict[str, int] = {}  # and how often each was asked in vain
        self._lost_fellows: set[str] = set()

    # ---- the lead ----

    @property
    def num_sources(self) -> int:
        """How many may still be asked."""
        return len(self._queue)

    def next_source(self) -> str | None:
        """Who is to lead now; None if nobody is left."""
        return self._queue[0] if self._queue else None

    @property
    def preferred(self) -> str | None:
        """The first one named of those that may still be asked."""
        return next((source for source in self._breaks if source in self._queue), None)

    def candidates(self, now_s: float) -> list[str]:
        """The sources that may lead now: those that are not in a pause, the next one first."""
        return [source for source in self._queue if self._ready_s.get(source, now_s) <= now_s]

    def led(self) -> None:
        """Another manifest is in force: what was held against helpers concerned the one before."""
        self._slips.clear()

    # ---- helpers and fellows ----

    def due(self, now_s: float) -> list[str]:
        """The sources that may be asked at this time, the lead included: not set aside, and not in a pause."""
        return [
            source
            for source in self._queue
            if self._slips[source] < SLIPS_MAX and self._ready_s.get(source, now_s) <= now_s
        ]

    def met(self, fellows: Iterable[str]) -> None:
        """A source named these newcomers."""
        for fellow in fellows:
            known = fellow in self._fellows or fellow in self._lost_fellows or fellow in self._breaks
            if not known and fellow != self._own and len(self._fellows) + len(self._lost_fellows) < FELLOWS_MAX:
                self._fellows[fellow] = 0

    def due_fellows(self, now_s: float) -> list[str]:
        """The fellows that may be asked at this time, first those that sort behind the own address, in a ring."""
        ring = sorted(self._fellows, key=lambda fellow: (fellow < self._own, fellow))
        return [fellow for fellow in ring if self._ready_s.get(fellow, now_s) <= now_s]

    def is_source(self, source: str) -> bool:
        """Whether this is one that was named to this receive, and not a fellow."""
        return source in self._breaks

    def pause_s(self, source: str, now_s: float) -> float:
        """How long to wait before this source is asked."""
        return max(0.0, self._ready_s.get(source, now_s) - now_s)

    def silence_s(self, source: str, most_s: float) -> float:
        """How long it may send nothing; `most_s`: also where there is no other source."""
        return min(most_s, HUNG_S * 2 ** min(self._hangs[source], 20)) if len(self._queue) > 1 else most_s

    @property
    def has_hung(self) -> bool:
        """Whether any source was silent for too long."""
        return bool(self._hangs)

    @property
    def poor(self) -> dict[str, str]:
        """The sources that hung, lied or were slow in this receive, and a sentence for each."""
        return dict(self._poor)

    # ---- what became of it ----

    def delivered(self, source: str) -> None:
        """A good chunk came from it."""
        if source in self._breaks:
            self._breaks[source] = 0

    def not_yet(self, source: str, now_s: float) -> None:
        """It may come to have the state: ask the next one meanwhile."""
        self._ready_s[source] = now_s + PAUSE_S
        if source in self._breaks:
            self._breaks[source] = 0
            self._turn(source)
        elif source in self._fellows:
            self._fellows[source] += 1
            if self._fellows[source] >= ABSENCES_MAX:
                self.lost(source)

    def refused(self, source: str, error: CheckpointError) -> None:
        """It will not give the state: don't ask it again."""
        if source not in self._breaks:
            self.lost(source)
        elif source in self._queue:
            self._errors[source] = error
            self._queue.remove(source)

    def broke(self, source: str, error: CheckpointError, now_s: float) -> None:
        """Its connection broke, or could not be made."""
        if source not in self._breaks:
            self.lost(source)
            return
        self._errors[source] = error
        if self.pause_s(source, now_s) > 0:
            # Several connections to it broke at once: that is one break.
            return
        self._breaks[source] += 1
        self._ready_s[source] = now_s + PAUSE_S * 2 ** (self._breaks[source] - 1)
        self._turn(source, out=self._breaks[source] >= BREAKS_MAX)

    def hung(self, source: str, error: CheckpointError, now_s: float, most_s: float) -> None:
        """It sent nothing for longer than `silence_s(source, most_s)`: ask the others first."""
        if source not in self._breaks:
            self.lost(source)
            return
        self._poor[source] = str(error)
        if self.silence_s(source, most_s) >= most_s:
            # It had all the time that a source may have.
            self.broke(source, error, now_s)
            return
        self._errors[source] = error
        if self.pause_s(source, now_s) > 0:
            return  # as for breaks
        self._ready_s[source] = now_s + PAUSE_S * 2 ** self._hangs[source]
        self._hangs[source] += 1
        self._turn(source)

    def was_slow(self, source: str, sentence: str) -> None:
        """Others were so much quicker that its connection was broken off."""
        if source in self._breaks:
            self._poor[source] = sentence

    def damaged(self, source: str, error: StateCorrupt) -> None:
        """It leads, and served something that is not what it promised."""
        self._errors[source] = error
        self._poor[source] = str(error)
        self._damages[source] += 1
        self._turn(source, out=self._damages[source] >= DAMAGES_MAX)

    def slipped(self, source: str) -> None:
        """It helps, and what it served does not match the lead's checksums; or it was too slow for others."""
        if source in self._breaks:
            self._slips[source] += 1
            self._turn(source)
        else:
            self.lost(source)

    def lost(self, fellow: str) -> None:
        """A fellow has left, or is of no use."""
        self._fellows.pop(fellow, None)
        self._lost_fellows.add(fellow)

    def _turn(self, source: str, *, out: bool = False) -> None:
        # Of several connections to one source, another may have ended it already.
        if source in self._queue:
            self._queue.remove(source)
            if not out:
                self._queue.append(source)

    # ---- the end ----

    @property
    def errors(self) -> dict[str, CheckpointError]:
        """The last thing that went wrong with each source."""
        return dict(self._errors)

    def verdict(self) -> CheckpointError:
        """The error to end with when nobody is left to ask."""
        errors = self._errors
        if len(errors) == 1:
            return next(iter(errors.values()))
        names = ", ".join(errors)
        sentence = f"none of {len(errors)} sources could give state {self._key}: " + "; ".join(
            f"{source}: {error}" for source, error in errors.items()
        )
        corrupt = [error for error in errors.values() if isinstance(error, StateCorrupt)]
        if corrupt:
            return StateCorrupt(sentence, part=corrupt[0].part, source=corrupt[0].source)
        for error in errors.values():
            # Of these the caller can do something about, while others only may come back.
            if isinstance(error, StateDiffers | StateUnsupported):
                return type(error)(sentence, path=error.path)
        if errors and all(isinstance(error, StateMismatch) for error in errors.values()):
            return StateMismatch(sentence, wanted=self._key, source=names)
        return StateUnavailable(sentence or f"no source was named for state {self._key}", source=names, key=self._key)
