"""The planned leave of a replica: after a whole step, and after the replicas that heal from it are done.

The request travels in the vote on the current step, and the group's verdict makes every rank leave after the same step.
The only holder of the state stays until others hold it too, or until its deadline.

Law of this file: the request to leave, and its effect on a plan.
"""

from __future__ import annotations

from typing import final

from tft_coord.core.types import Plan


@final
class GracefulShutdown:
    """One rank's leave.

    Attributes:
        left: it has left, and no further step begins.
    """

    def __init__(self) -> None:
        self.left = False
        self._reason: str | None = None
        self._by_ms = 0
        self._plan: Plan | None = None
        self._group_left = False  # another rank has left, and with it the group
        self._gave_up = False

    def requested(self, reason: str, by_ms: int) -> None:
        """Keep the first request."""
        if self._reason is None:
            self._reason, self._by_ms = reason, by_ms

    def group_left(self) -> None:
        """Note that the group has left without this rank's vote."""
        self._group_left = True

    def planned(self, plan: Plan) -> None:
        """Note the plan of the current step."""
        self._plan = plan

    @property
    def is_requested(self) -> bool:
        """Return whether a request to leave has arrived."""
        return self._reason is not None

    @property
    def reason(self) -> str:
        """Return the reason, one phrase."""
        return self._reason if self._reason is not None else "another rank of the group leaves"

    def is_due(self, now_ms: int) -> bool:
        """Return whether this rank votes to leave after the current step, or leaves where there is no vote."""
        if self._group_left or self._reason is None:
            return self._group_left
        plan = self._plan
        alone = plan is not None and plan.replica_world_size > 1 and plan.up_to_date == (plan.replica_rank,)
        return not alone or now_ms >= self._by_ms

    def gives_up(self, now_ms: int, *, is_left_out: bool) -> bool:
        """Return whether this rank stops waiting for a quorum and leaves without one; True only once.

        A replica that is left out runs no step with others, and the others hold the state.
        """
        overdue = self._reason is not None and now_ms >= self._by_ms
        if self._gave_up or not (overdue or (self._reason is not None and is_left_out and self.is_due(now_ms))):
            return False
        self._gave_up = True
        return True

    def serves_until_ms(self) -> int | None:
        """Return until when this rank serves its state to healing replicas; None where there are none."""
        if self._plan is None or not self._plan.serve or self._reason is None:
            return None
        return self._by_ms

    def serve_ms(self, now_ms: int) -> int:
        """Return for how long from now this rank serves its state, milliseconds."""
        until_ms = self.serves_until_ms()
        return 0 if until_ms is None else max(0, until_ms - now_ms)
