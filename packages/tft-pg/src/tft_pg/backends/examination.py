"""A search for the peers that block a group's build, while the build takes too long.

All ranks have reached the rendezvous, and some connection between two of them is missing. The builder connects to one
peer after another, so it can't report the state of the others. This file probes each peer without a connection. Peers
that refuse or do not answer are named. Peers that answer are not named, even if they wait for another rank.

A rank that has given up refuses too. A rank that arrives late finds such a rank gone. So a rank that gives up records
that in the store, under this configure's prefix, before its listener closes. No rank blames it then.

Law of this file: what a failed attempt can say of its peers; the backend builds the group.
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
from tft_pg.calls import ProbeAddress, call_all
from tft_pg.errors import ConfigureError

__all__ = ["Examination", "give_up", "rank_names", "ranks_that_gave_up"]

_GAVE_UP: Final = "tft-pg/gave-up"
_LOOK_S: Final = 0.05


def give_up(store: Store, rank: int | None) -> None:
    """Record that this rank builds no group under this prefix any more. Does nothing if the store is gone."""
    with contextlib.suppress(RuntimeError):
        store.set(f"{_GAVE_UP}/{rank}", "1")
        store.set(_GAVE_UP, "1")  # so one request shows that no rank has given up


def ranks_that_gave_up(store: Store, ranks: Collection[int]) -> frozenset[int]:
    """Return those of these ranks that have given up. The result is empty if the store is gone."""
    with contextlib.suppress(RuntimeError):
        return _marked(store, ranks)
    return frozenset()


def _marked(store: Store, ranks: Collection[int]) -> frozenset[int]:
    if not store.check([_GAVE_UP]):
        return frozenset()
    return frozenset(rank for rank in ranks if store.check([f"{_GAVE_UP}/{rank}"]))


def rank_names(ranks: Collection[int]) -> str:
    """Return ranks for a sentence: `rank 3`, or `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


@final
class Examination:
    """A search for the reason why one attempt is slow or has failed.

    Args:
        store: under the attempt's prefix.
        attempt: the attempt. The search stops it when the reason is known, or no time is left.
        unconnected: returns the addresses of the peers without a known connection, by rank.
    """

    def __init__(
        self, store: Store, attempt: Attempt, unconnected: Callable[[], Mapping[int, Sequence[ProbeAddress]]]
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._unconnected = unconnected
        self._lock = threading.Lock()
        self._found: ConfigureError | None = None

    def run(self) -> None:
        """Search, and stop the attempt if there is a reason. Otherwise wait until its time is nearly up and
        report what is known.
        """
        attempt = self._attempt
        found = self._reason()
        while found is None and attempt.goes_on and attempt.remaining().total_seconds() > _LOOK_S:
            time.sleep(_LOOK_S)
        if found is None and attempt.goes_on:
            left = self._unconnected()
            reason = (
                f"{rank_names(left.keys())} answered a probe but did not connect" if left else "a peer did not answer"
            )
            found = attempt.deadline_passed(f"{reason}; another rank may be unreachable from there")
            self._found = found
        if found is not None:
            give_up(self._store, attempt.where.rank)
            attempt.stop(found)

    def late(self) -> ConfigureError:
        """Return the error when the attempt's time is up."""
        return self._found or self._attempt.deadline_passed("a peer did not answer")

    def after(self, error: Exception) -> Exception:
        """Return the error that names the blocking ranks, after the builder has failed. Without such ranks,
        return its own error.
        """
        found = self._reason()
        if self._attempt.goes_on:  # otherwise the store connection may be shut down
            give_up(self._store, self._attempt.where.rank)
        return found or error

    def check_nobody_gave_up(self, silent: Callable[[], ConfigureError]) -> None:
        """Check the store once for ranks that gave up, after the builder has succeeded late.

        Args:
            silent: returns the error if the store does not answer any more.

        Raises: ConfigureError: a peer gave up, so the group would lack that member.
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
            raise ConfigureError(
                f"configure failed ({where}): {rank_names(gone)} gave up; ask for a new quorum and configure under its "
                "prefix",
                where=where,
            )

    def _reason(self) -> ConfigureError | None:
        """Probe the unconnected peers, once. Returns: the error that names the blocking ranks, or None."""
        with self._lock:
            if self._found is None and self._attempt.goes_on:
                self._found = self._look()
            return self._found

    def _look(self) -> ConfigureError | None:
        attempt, unconnected = self._attempt, self._unconnected()
        addresses = {(rank, at): place for rank, of_rank in unconnected.items() for at, place in enumerate(of_rank)}
        # An expired attempt has no time left to probe, but a refusal is known after a moment even then.
        until_s = time.monotonic() + max(attempt.remaining().total_seconds(), 2 * _LOOK_S)
        answers = call_all(addresses, until_s=until_s, goes_on=lambda: attempt.goes_on)
        if not attempt.goes_on:
            return None
        gone = ranks_that_gave_up(self._store, unconnected.keys())
        unreached = {key[0]: f"{addresses[key]}: {why}" for key, why in sorted(answers.items()) if key[0] not in gone}
        if not unreached and not gone:
            return None
        reasons = [f"rank {rank} can't be reached ({why})" for rank, why in sorted(unreached.items())]
        if gone:
            reasons.append(f"{rank_names(gone)} gave up")
        return ConfigureError(
            f"configure failed ({attempt.where}): {', '.join(reasons)}; ask for a new quorum and configure under its "
            "prefix",
            where=attempt.where,
            unreached=unreached,
        )
