"""How the ranks of one group find each other under one prefix of a store, before a library of theirs does.

Each rank puts a record under its rank, unless somebody has, and then waits for the records of all. So a prefix that was
used before is noticed at once, and at the deadline it is known who is missing; neither can be said of what happens
inside a library. The law of this file: one meeting; the records' meaning is their owner's.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from tft_pg.backends.attempt import Attempt
from tft_pg.backends.examination import give_up, names
from tft_pg.backends.patience import Phase
from tft_pg.errors import ConfigureFailed

__all__ = ["meet"]

_PLACE = "tft-pg/rank"


def meet(
    store: Store, attempt: Attempt, record: bytes, *, silent: Callable[[], ConfigureFailed] | None = None
) -> list[bytes]:
    """Publish this rank's record, and wait for everybody's.

    Args:
        store: under this configure's prefix. Whoever stops the attempt must break its connection.
        attempt: says who takes part, and bounds the wait.
        record: of this rank; no two calls may give the same, so that a used prefix is told from an unused one.
        silent: makes the error where the store does not answer any more.
    Returns: the record of each rank, in order.
    Raises: ConfigureFailed: the prefix was used before, or ranks did not come (they are named); the attempt's own error
        if it was stopped.
    """
    where = attempt.where
    attempt.enter(Phase.RANKS, late=silent)
    store.set_timeout(attempt.remaining())
    found = store.compare_set(f"{_PLACE}/{where.rank}", "", record)  # type: ignore[arg-type]  # bytes, in fact
    if found != record:
        raise ConfigureFailed(
            f"rank {where.rank} found its place under the store prefix taken; every configure needs a fresh prefix",
            where=where,
        )
    keys = [f"{_PLACE}/{rank}" for rank in range(where.world_size or 1)]
    try:
        records = store.multi_get(keys)
    except DistStoreError as error:
        attempt.check()
        missing = tuple(rank for rank, key in enumerate(keys) if not store.check([key]))
        give_up(store, where.rank)
        raise attempt.deadline_passed(f"{names(missing)} did not come", missing_ranks=missing) from error
    attempt.check()
    return [bytes(each) for each in records]
