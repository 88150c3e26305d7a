"""The values of the step: its phases, its names, its settings.

Law of this file: frozen values without behaviour beyond comparing and printing themselves.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tft_coord.core.types import QuorumKey
from tft_coord.timeouts import Timeouts


class Phase(enum.Enum):
    """The phase of the open attempt."""

    IDLE = "idle"  # no attempt is open: before the first start, and after a verdict
    ASKED = "asked"  # a quorum was asked for
    PLANNED = "planned"  # the plan is known
    FAILED = "failed"  # this attempt has no quorum


class Healing(enum.Enum):
    """The stage of this attempt's recovery."""

    NONE = "none"
    FETCHING = "fetching"
    LOADED = "loaded"
    FAILED = "failed"


class Stage(enum.Enum):
    """The stages of a recovery, in their order."""

    FETCH = "fetch"  # the state is fetched from a source
    SPREAD = "spread"  # rank 0 of a rank0-only group has given it to the other ranks
    MATCH = "match"  # this rank's own state says where the fetched parts belong
    LOAD = "load"  # the user's functions have applied it


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """The settings that the decisions depend on; the same on every rank but `rank` and `is_passive_rank`.

    Args:
        replica_id, rank, world_size: of this process; for sentences, and for whether a group has to agree.
        job, min_replica_size, use_async_quorum, fixed_with_spares, init_sync, max_retries: as in ManagerConfig.
        check_every: committed steps between two comparisons of the user's state; 0: none.
        heals_divergence: a replica whose state differs heals once before it stops.
        is_rank0_only: rank 0 fetches, serves and reduces for all ranks of this group.
        is_passive_rank: another rank does so for this one.
        heals_over_group: live state travels over the process group. A recovery begins after the group was configured,
            and ends with it.
        lease_ms: how long this rank continues in a standing quorum without an answer of the lighthouse. 0: it
            exchanges control words and asks in every step. None: it exchanges no control words.
        timeouts: of the job.
    """

    replica_id: str = ""
    rank: int = 0
    world_size: int = 1
    job: str = "default"
    min_replica_size: int = 1
    use_async_quorum: bool = True
    fixed_with_spares: bool = False
    init_sync: bool = True
    max_retries: int | None = None
    check_every: int = 0
    heals_divergence: bool = True
    is_rank0_only: bool = False
    is_passive_rank: bool = False
    heals_over_group: bool = False
    lease_ms: int | None = None
    timeouts: Timeouts = Timeouts()  # noqa: RUF009  # frozen


@dataclass(frozen=True, slots=True)
class StepName:
    """The name to which a reduction, an error and a vote belong.

    Args:
        attempt: counts the starts; makes the name unique even where there was no quorum. 0: no attempt's.
        step: committed steps before it; attempts in flight before it count as committed.
        key: of the quorum; None until there is one.
    """

    attempt: int
    step: int
    key: QuorumKey | None = None

    def __str__(self) -> str:
        return f"step {self.step}, quorum {self.key}" if self.key is not None else f"step {self.step}, without a quorum"


@dataclass(frozen=True, slots=True)
class Check:
    """The effect of the last comparison of the user's state on the lineage, here or at the source of a recovery.

    Args:
        step: of the comparison.
        before, after: the lineage.
    """

    step: int
    before: int
    after: int
