"""A replica that leaves the job on purpose: after a whole step, and not before those that heal from it are done.

Somebody wishes it, from any thread or a signal handler. The wish travels in the vote on the running step, and what the
group answers makes every rank leave after the same one. Who alone holds the state stays until others hold it too.

Law of this file: the wish, and what it means for a plan; no calls, no waiting. `wish` takes no lock and writes no log,
because a signal handler calls it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import final

from tft_coord.core.types import Plan


@dataclass(frozen=True, slots=True)
class Wish:
    """Somebody wishes that this replica leaves. `by_s` is when it waits for nobody any more, of the Manager's clock."""

    reason: str
    by_s: float


@final
class Leaving:
    """What is known of one rank's leaving.

    Attributes:
        left: it has left; no step begins any more.
        released: set when nobody heals from this group any more.
    """

    def __init__(self) -> None:
        self.left = False
        self.released = threading.Event()
        self._wish: Wish | None = None
        self._plan: Plan | None = None
        self._told = False  # another rank has left, and the group with it

    def wish(self, wish: Wish) -> None:
        """The first wish stands."""
        if self._wish is None:
            self._wish = wish

    def told(self) -> None:
        """The group has left without this rank's vote."""
        self._told = True

    def plan_arrived(self, plan: Plan) -> None:
        """The plan of the step that runs."""
        self._plan = plan

    @property
    def wished(self) -> bool:
        """Whether somebody wishes it."""
        return self._wish is not None

    @property
    def reason(self) -> str:
        """Why, one phrase."""
        if self._wish is not None:
            return self._wish.reason
        return "another rank of the group was told to"

    def wishes(self, now_s: float) -> bool:
        """Whether this rank votes to leave after the step that runs, or leaves where there is none to vote on.

        The last holder of the state stays until the next plan shows that others hold it too, or its time is over.
        """
        if self._told or self._wish is None:
            return self._told
        plan = self._plan
        alone = plan is not None and plan.replica_world_size > 1 and plan.up_to_date == (plan.replica_rank,)
        return not alone or now_s >= self._wish.by_s

    def is_overdue(self, now_s: float) -> bool:
        """Whether its time is over, so that it waits for no quorum any more."""
        return self._wish is not None and now_s >= self._wish.by_s

    def remaining_s(self, now_s: float) -> float:
        """For how long it serves its state to those that heal from it: nothing where nobody does."""
        if self._plan is None or not self._plan.serve or self._wish is None:
            return 0.0
        return max(0.0, self._wish.by_s - now_s)
