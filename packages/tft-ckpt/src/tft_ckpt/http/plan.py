"""Which source to ask next, and what is still missing.

A receive knows several sources and trusts none. It goes on with one as long as that one delivers; when a connection
breaks or a chunk is damaged, the source gets a strike and the next one has its turn, with what is already here and
checked. A source with too many strikes in a row, or one that says that it will not have the state, is not asked again.
Whatever source comes next, its manifest counts from then on, and of the chunks that are here only those stay whose
checksums it confirms: so the state is in the end the one that a single source has, never a mixture.

Law of this file: pure; no I/O, no clock, no thread. The owner locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from tft_ckpt.errors import CheckpointError, StateCorrupt, StateMismatch, StateUnavailable
from tft_ckpt.key import StateKey
from tft_ckpt.manifest import Manifest

__all__ = ["FetchPlan"]

BREAKS_MAX = 3
"""Connections in a row that may break without one good chunk between."""
DAMAGES_MAX = 3
"""Damaged manifests and chunks in all."""


@final
class FetchPlan:
    """One receive's sources and chunks.

    Args:
        key: the state that is wanted.
        sources: addresses, the preferred one first; repeated ones count once.
    """

    def __init__(self, key: StateKey, sources: Sequence[str]) -> None:
        self._key = key
        self._queue = list(dict.fromkeys(sources))
        self._breaks = dict.fromkeys(self._queue, 0)
        self._damages = dict.fromkeys(self._queue, 0)
        self._errors: dict[str, CheckpointError] = {}
        self._manifest: Manifest | None = None
        self._good: list[bool] = []
        self._good_bytes = 0

    # ---- sources ----

    @property
    def num_sources(self) -> int:
        """How many may still be asked."""
        return len(self._queue)

    def next_source(self) -> str | None:
        """Whom to ask now; None if nobody is left."""
        return self._queue[0] if self._queue else None

    @property
    def preferred(self) -> str | None:
        """The first one named of those that may still be asked."""
        return next((source for source in self._breaks if source in self._queue), None)

    def breaks_of(self, source: str) -> int:
        """Connections to it in a row that brought nothing."""
        return self._breaks[source]

    def not_yet(self, source: str) -> None:
        """It may come to have the state: ask the next one meanwhile."""
        self._breaks[source] = 0
        self._turn(source)

    def refused(self, source: str, error: CheckpointError) -> None:
        """It will not give the state: don't ask it again."""
        self._errors[source] = error
        self._queue.remove(source)

    def broke(self, source: str, error: CheckpointError) -> None:
        """Its connection broke, or could not be made."""
        self._errors[source] = error
        self._breaks[source] += 1
        self._turn(source, out=self._breaks[source] >= BREAKS_MAX)

    def damaged(self, source: str, error: StateCorrupt) -> None:
        """It served something that is not what it promised."""
        self._errors[source] = error
        self._damages[source] += 1
        self._turn(source, out=self._damages[source] >= DAMAGES_MAX)

    def _turn(self, source: str, *, out: bool = False) -> None:
        self._queue.remove(source)
        if not out:
            self._queue.append(source)

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
        if errors and all(isinstance(error, StateMismatch) for error in errors.values()):
            return StateMismatch(sentence, wanted=self._key, source=names)
        return StateUnavailable(sentence or f"no source was named for state {self._key}", source=names, key=self._key)

    # ---- chunks ----

    def adopt(self, manifest: Manifest) -> bool:
        """Go by this manifest from now on.

        Returns: whether the run's bytes keep their places; if not, all of them are missing again.
        """
        before, self._manifest = self._manifest, manifest
        layout = manifest.layout
        if before is None or not layout.fits(before.layout):
            self._good = [False] * layout.num_chunks
            self._good_bytes = 0
            return False
        for chunk, good in enumerate(self._good):
            if good and before.sums[chunk] != manifest.sums[chunk]:
                self._good[chunk] = False
                self._good_bytes -= self._length(chunk)
        return True

    def missing(self, num_parts: int) -> list[range]:
        """Runs of missing chunks, cut so that several connections have about equal work.

        Args:
            num_parts: connections; with one, a run is not cut.
        """
        runs: list[range] = []
        start: int | None = None
        for chunk, good in enumerate([*self._good, True]):
            if good and start is not None:
                runs.append(range(start, chunk))
                start = None
            elif not good and start is None:
                start = chunk
        if num_parts == 1:
            return runs
        # Several turns for each connection, so that a slow one does not keep the rest waiting at the end.
        most = max(1, -(-sum(map(len, runs)) // (4 * num_parts)))
        return [run[at : at + most] for run in runs for at in range(0, len(run), most)]

    def arrived(self, source: str, chunk: int) -> None:
        """A chunk is here and checked against the manifest in force."""
        assert not self._good[chunk], chunk
        self._good[chunk] = True
        self._good_bytes += self._length(chunk)
        self._breaks[source] = 0

    @property
    def good_bytes(self) -> int:
        """Bytes that are here and checked."""
        return self._good_bytes

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return self._manifest is not None and all(self._good)

    def _length(self, chunk: int) -> int:
        assert self._manifest is not None
        start, end = self._manifest.layout.chunk_span(chunk)
        return end - start
