"""The rendezvous of the ranks of one group under one store prefix, before their library connects.

Each rank writes a record under its rank, unless a record exists, and then waits for the records of all ranks. So a used
prefix is noticed at once, and the missing ranks are known at the deadline. A library reports neither.

Law of this file: one rendezvous; the owner of the records knows their meaning.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from tft_pg.backends.attempt import Attempt
from tft_pg.backends.examination import give_up, rank_names
from tft_pg.backends.patience import Phase
from tft_pg.errors import ConfigureError

__all__ = ["meet"]

_RANK_KEY = "tft-pg/rank"


def meet(
    store: Store, attempt: Attempt, record: bytes, *, silent: Callable[[], ConfigureError] | None = None
) -> list[bytes]:
    """Publish this rank's record, and wait for the records of all ranks.

    Args:
        store: under this configure's prefix. A caller that stops the attempt must break the store's connection.
        attempt: has the rank and the size, and bounds the wait.
        record: of this rank. No two calls may give the same record, because the record shows whether a prefix is used.
        silent: returns the error if the store does not answer any more.

    Returns: the record of each rank, in order.
    Raises: ConfigureError: the prefix was used before, or ranks are missing (the error names them). The attempt's own
        error, if it was stopped.
    """
    where = attempt.where
    attempt.enter(Phase.RANKS, late=silent)
    store.set_timeout(attempt.remaining())
    found = store.compare_set(f"{_RANK_KEY}/{where.rank}", "", record)  # type: ignore[arg-type]  # takes bytes in fact
    if found != record:
        raise ConfigureError(
            f"the store prefix is already used by rank {where.rank}; pass a fresh prefix to each configure",
            where=where,
        )
    keys = [f"{_RANK_KEY}/{rank}" for rank in range(where.world_size or 1)]
    try:
        records = store.multi_get(keys)
    except DistStoreError as error:
        attempt.check()
        missing = tuple(rank for rank, key in enumerate(keys) if not store.check([key]))
        give_up(store, where.rank)
        reason = f"timed out waiting for {rank_names(missing)} to join"
        raise attempt.deadline_passed(reason, missing_ranks=missing) from error
    attempt.check()
    return [bytes(each) for each in records]
