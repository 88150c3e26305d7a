"""Which peers keep a group from being built, found out while the building takes longer than it should.

All ranks have come to the rendezvous, and some connection between two of them is not made. The builder itself connects
to one after another and can't say who else would answer, so each peer that it is not connected to is called. Those that
refuse, or do not answer, are named; those that answer are not, whatever else they wait for.

A rank that has given up refuses too, and so does one that a late rank finds gone. So who gives up writes that down in
the store, under this configure's prefix, before its listener closes, and nobody names it.

The law of this file: what a failed attempt can say of its peers; how a group is built is the backend's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, final

from torch.distributed import Store  # type: ignore[attr-defined]

from tft_pg.backends.attempt import Attempt
from tft_pg.backends.patience import Phase
from tft_pg.calls import Place, call_all
from tft_pg.errors import ConfigureFailed

__all__ = ["Examination", "give_up", "names", "who_gave_up"]

_GAVE_UP: Final = "tft-pg/gave-up"
_LOOK_S: Final = 0.05


def give_up(store: Store, rank: int | None) -> None:
    """Write down that this rank builds no group under this prefix any more. A store that is gone is told nothing."""
    with contextlib.suppress(RuntimeError):
        store.set(f"{_GAVE_UP}/{rank}", "1")
        store.set(_GAVE_UP, "1")  # one question tells that nobody has


def who_gave_up(store: Store, ranks: Collection[int]) -> frozenset[int]:
    """Those of these ranks that have written that down; none where the store is gone."""
    with contextlib.suppress(RuntimeError):
        return _marked(store, ranks)
    return frozenset()


def _marked(store: Store, ranks: Collection[int]) -> frozenset[int]:
    if not store.check([_GAVE_UP]):
        return frozenset()
    return frozenset(rank for rank in ranks if store.check([f"{_GAVE_UP}/{rank}"]))


def names(ranks: Collection[int]) -> str:
    """Ranks, for a sentence: `rank 3`, or `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


@final
class Examination:
    """Looks for the reason why one attempt takes so long, or has failed.

    Args:
        store: under the attempt's prefix.
        attempt: which; it is stopped when the reason is known, or no time is left.
        unconnected: the addresses of the peers to which no connection is known, by rank.
    """

    def __init__(
        self, store: Store, attempt: Attempt, unconnected: Callable[[], Mapping[int, Sequence[Place]]]
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._unconnected = unconnected
        self._lock = threading.Lock()
        self._found: ConfigureFailed | None = None

    def run(self) -> None:
        """Look, and stop the attempt if there is a reason; else wait for its end, and say then what is known."""
        attempt = self._attempt
        found = self._reason()
        while found is None and attempt.goes_on and attempt.remaining().total_seconds() > _LOOK_S:
            time.sleep(_LOOK_S)
        if found is None and attempt.goes_on:
            left = self._unconnected()
            who = f"{names(left.keys())} answered a call, but did not connect" if left else "a peer did not answer"
            found = attempt.deadline_passed(f"{who}; another rank may be unreachable for it")
            self._found = found
        if found is not None:
            give_up(self._store, attempt.where.rank)
            attempt.stop(found)

    def late(self) -> ConfigureFailed:
        """What is known when the attempt's time is up."""
        return self._found or self._attempt.deadline_passed("a peer did not answer")

    def after(self, error: Exception) -> Exception:
        """The error that names whom to blame, after the builder has failed by itself; else the builder's own."""
        found = self._reason()
        if self._attempt.goes_on:  # else the store may have been severed
            give_up(self._store, self._attempt.where.rank)
        return found or error

    def check_nobody_gave_up(self, silent: Callable[[], ConfigureFailed]) -> None:
        """Ask the store once, after the builder has succeeded late.

        Args:
            silent: makes the error where the store does not answer any more.
        Raises: ConfigureFailed: a peer gave up, so that the group would have no member there.
        """
        self._attempt.enter(Phase.STORE, late=silent)
        where = self._attempt.where
        try:
            gone = _marked(self._store, set(range(where.world_size or 1)) - {where.rank})
        except RuntimeError:
            self._attempt.check()
            raise silent() from None
        self._attempt.check()
        if gone:
            give_up(self._store, where.rank)
            raise ConfigureFailed(
                f"no group was built ({where}): {names(gone)} gave up; ask for a new quorum and configure under its "
                "prefix",
                where=where,
            )

    def _reason(self) -> ConfigureFailed | None:
        """Call the peers that are not connected, once. Returns: the error that names whom to blame, or None."""
        with self._lock:
            if self._found is None and self._attempt.goes_on:
                self._found = self._look()
            return self._found

    def _look(self) -> ConfigureFailed | None:
        attempt, unconnected = self._attempt, self._unconnected()
        places = {(rank, at): place for rank, of_rank in unconnected.items() for at, place in enumerate(of_rank)}
        # At the end of its time an attempt has no time left to call; a refusal is known after a moment even then.
        until_s = time.monotonic() + max(attempt.remaining().total_seconds(), 2 * _LOOK_S)
        answers = call_all(places, until_s=until_s, goes_on=lambda: attempt.goes_on)
        if not attempt.goes_on:
            return None
        gone = who_gave_up(self._store, unconnected.keys())
        unreached = {key[0]: f"{places[key]}: {why}" for key, why in sorted(answers.items()) if key[0] not in gone}
        if not unreached and not gone:
            return None
        told = [f"rank {rank} can't be reached ({why})" for rank, why in sorted(unreached.items())]
        if gone:
            told.append(f"{names(gone)} gave up")
        return ConfigureFailed(
            f"no group was built ({attempt.where}): {', '.join(told)}; ask for a new quorum and configure under its "
            "prefix",
            where=attempt.where,
            unreached=unreached,
        )
