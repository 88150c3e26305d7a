"""The choice of the sources to ask.

A receive knows several sources and trusts none. One of them is the primary source: its manifest is valid, and all data
is checked against it. The other sources help in the meantime. So do peers, which are receivers of the same state that a
source has named.

A lost connection or a damaged chunk counts as a failure of its source. A source with too many failures in a row is not
asked again, and neither is a source that refuses the state. A source that sends nothing for a second is replaced, asked
last, and given more time each time. A network pause that affects all sources must not end the receive. A source that
failed in an earlier receive is asked last from the start.

If a helper's chunks do not match the primary's checksums, the primary may be wrong. So the helper is only set aside,
and may become the primary when this one fails. Under a new primary, only the received chunks that its checksums confirm
stay. So the final state comes from the manifest of a single source, and is never a mixture.

Law of this file: pure; no I/O, no clock, no thread. The owner locks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final, final

from tft_ckpt.errors import (
    CheckpointError,
    StateCorruptError,
    StateLayoutError,
    StateMismatchError,
    StateUnavailableError,
    StateUnsupportedError,
)
from tft_ckpt.key import StateKey

__all__ = ["FetchPlan"]

HUNG_S: Final = 1.0
"""How long a source may send nothing while there are others to ask. The time doubles after each failure."""
BREAKS_MAX: Final = 3
"""Maximum number of lost connections in a row without one good chunk between them."""
DAMAGES_MAX: Final = 3
"""Maximum number of damaged manifests and chunks from a primary."""
HELPER_FAILURES_MAX: Final = 2
"""Maximum number of wrong or late answers from a helper under one primary, before it is set aside."""
PEERS_MAX: Final = 64
"""Maximum number of known addresses of peers."""
ABSENCES_MAX: Final = 10
"""Maximum number of answers of a peer that has nothing of the state, before it is forgotten."""
PAUSE_S: Final = 0.05
"""The pause after the first lost connection to a source. The pause doubles after each further one."""


@final
class FetchPlan:
    """The sources and peers of one receive.

    Args:
        key: the requested state.
        sources: addresses, the preferred one first; duplicates count once.
        poor: those of them that hung, sent wrong data or were slow before. They are asked last.
        own: this receiver's address, which is no peer.
    """

    def __init__(self, key: StateKey, sources: Sequence[str], *, own: str = "", poor: Collection[str] = ()) -> None:
        self._key = key
        self._own = own
        self._queue = sorted(dict.fromkeys(sources), key=lambda source: source in poor)
        self._breaks = dict.fromkeys(self._queue, 0)
        self._damages = dict.fromkeys(self._queue, 0)
        self._errors: dict[str, CheckpointError] = {}
        self._ready_s: dict[str, float] = {}
        self._helper_failures: Counter[str] = Counter()
        self._hangs: Counter[str] = Counter()
        self._poor: dict[str, str] = {}
        self.has_answered = False  # a source has answered that it has no state yet
        self._peers: dict[str, int] = {}  # and the number of requests to each without a result
        self._removed_peers: set[str] = set()

    # ---- the primary source ----

    @property
    def num_sources(self) -> int:
        """Return how many sources may still be asked."""
        return len(self._queue)

    def next_source(self) -> str | None:
        """Return the next primary source, or None if no source is left."""
        return self._queue[0] if self._queue else None

    def candidates(self, now_s: float) -> list[str]:
        """Return the sources that may become the primary now, without those in a pause, the next one first."""
        return [source for source in self._queue if self._ready_s.get(source, now_s) <= now_s]

    def primary_changed(self) -> None:
        """Clear the helpers' failures, which concerned the previous manifest."""
        self._helper_failures.clear()

    # ---- helpers and peers ----

    def due(self, now_s: float) -> list[str]:
        """Return the sources to ask at this time, including the primary, without those set aside or in a pause."""
        return [
            source
            for source in self._queue
            if self._helper_failures[source] < HELPER_FAILURES_MAX and self._ready_s.get(source, now_s) <= now_s
        ]

    def add_peers(self, peers: Iterable[str]) -> None:
        """Record the peers that a source has named."""
        for peer in peers:
            known = peer in self._peers or peer in self._removed_peers or peer in self._breaks
            if not known and peer != self._own and len(self._peers) + len(self._removed_peers) < PEERS_MAX:
                self._peers[peer] = 0

    def due_peers(self, now_s: float) -> list[str]:
        """Return the peers to ask at this time, as a ring that begins after the own address."""
        ring = sorted(self._peers, key=lambda peer: (peer < self._own, peer))
        return [peer for peer in ring if self._ready_s.get(peer, now_s) <= now_s]

    def is_source(self, source: str) -> bool:
        """Return whether the address is a given source of this receive, and not a peer."""
        return source in self._breaks

    def pause_s(self, source: str, now_s: float) -> float:
        """Return how long to wait before this source is asked."""
        return max(0.0, self._ready_s.get(source, now_s) - now_s)

    def silence_s(self, source: str, most_s: float) -> float:
        """Return how long the source may send nothing: at most `most_s`, and exactly that without other sources."""
        return min(most_s, HUNG_S * 2 ** min(self._hangs[source], 20)) if len(self._queue) > 1 else most_s

    @property
    def has_hung(self) -> bool:
        """Return whether any source was silent for too long."""
        return bool(self._hangs)

    @property
    def poor(self) -> dict[str, str]:
        """Return the sources that hung, sent wrong data or were slow in this receive, and a sentence for each."""
        return dict(self._poor)

    # ---- outcomes ----

    def delivered(self, source: str) -> None:
        """Record a good chunk from the source."""
        if source in self._breaks:
            self._breaks[source] = 0

    def not_yet(self, source: str, now_s: float) -> None:
        """Record that the source may get the state later, and ask the next one in the meantime."""
        self._ready_s[source] = now_s + PAUSE_S
        if source in self._breaks:
            self.has_answered = True
            self._breaks[source] = 0
            self._move_to_end(source)
        elif source in self._peers:
            self._peers[source] += 1
            if self._peers[source] >= ABSENCES_MAX:
                self.remove_peer(source)

    def refused(self, source: str, error: CheckpointError) -> None:
        """Record that the source will not give the state, and stop asking it."""
        if source not in self._breaks:
            self.remove_peer(source)
        elif source in self._queue:
            self._errors[source] = error
            self._queue.remove(source)

    def connection_lost(self, source: str, error: CheckpointError, now_s: float) -> None:
        """Record that the source's connection was lost or could not be made."""
        if source not in self._breaks:
            self.remove_peer(source)
            return
        self._errors[source] = error
        if self.pause_s(source, now_s) > 0:
            # Several connections to the source ended at once, which counts as one failure.
            return
        self._breaks[source] += 1
        self._ready_s[source] = now_s + PAUSE_S * 2 ** (self._breaks[source] - 1)
        is_over = self._breaks[source] >= BREAKS_MAX
        if is_over:
            self._errors[source] = StateUnavailableError(
                f"{error}; this was failure {BREAKS_MAX} of {BREAKS_MAX} in a row; check the log of the source, and "
                "firewalls and proxies on the way",
                source=source,
                key=self._key,
            )
        self._move_to_end(source, remove=is_over)

    def hung(self, source: str, error: CheckpointError, now_s: float, most_s: float) -> None:
        """Record that the source sent nothing for longer than `silence_s(source, most_s)`, and ask the others first."""
        if source not in self._breaks:
            self.remove_peer(source)
            return
        self._poor[source] = str(error)
        if self.silence_s(source, most_s) >= most_s:
            # The source had the longest time that a source may have.
            self.connection_lost(source, error, now_s)
            return
        self._errors[source] = error
        if self.pause_s(source, now_s) > 0:
            return  # as for lost connections
        self._ready_s[source] = now_s + PAUSE_S * 2 ** self._hangs[source]
        self._hangs[source] += 1
        self._move_to_end(source)

    def was_slow(self, source: str, sentence: str) -> None:
        """Record that the source's connection was ended because others were much faster."""
        if source in self._breaks:
            self._poor[source] = sentence

    def damaged(self, source: str, error: StateCorruptError) -> None:
        """Record that the primary source sent data that does not match its manifest."""
        self._errors[source] = error
        self._poor[source] = str(error)
        self._damages[source] += 1
        self._move_to_end(source, remove=self._damages[source] >= DAMAGES_MAX)

    def helper_failed(self, source: str) -> None:
        """Record that a helper's data did not match the primary's checksums, or that the helper was too slow."""
        if source in self._breaks:
            self._helper_failures[source] += 1
            self._move_to_end(source)
        else:
            self.remove_peer(source)

    def remove_peer(self, peer: str) -> None:
        """Remove a peer that has disconnected or is unusable."""
        self._peers.pop(peer, None)
        self._removed_peers.add(peer)

    def _move_to_end(self, source: str, *, remove: bool = False) -> None:
        # Another connection to the same source may have removed it already.
        if source in self._queue:
            self._queue.remove(source)
            if not remove:
                self._queue.append(source)

    # ---- the end ----

    def verdict(self) -> CheckpointError:
        """Return the final error when no source is left."""
        errors = self._errors
        if len(errors) == 1:
            return next(iter(errors.values()))
        names = ", ".join(errors)
        sentence = f"none of {len(errors)} sources could give state {self._key}: " + "; ".join(
            f"{source}: {error}" for source, error in errors.items()
        )
        corrupt = [error for error in errors.values() if isinstance(error, StateCorruptError)]
        if corrupt:
            return StateCorruptError(sentence, part=corrupt[0].part, source=corrupt[0].source)
        for error in errors.values():
            # The caller can act on these errors, while others may only recur.
            if isinstance(error, StateLayoutError | StateUnsupportedError):
                return type(error)(sentence, path=error.path)
        if errors and all(isinstance(error, StateMismatchError) for error in errors.values()):
            return StateMismatchError(sentence, wanted=self._key, source=names)
        return StateUnavailableError(
            sentence or f"no source was given for state {self._key}", source=names, key=self._key
        )
