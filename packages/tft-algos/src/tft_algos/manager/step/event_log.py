"""A Manager's output for machines: one log record for each quorum, each verdict and each error.

A dashboard or an experiment tracker needs named facts, not sentences. They are attributes of ordinary log records. A
program that needs them attaches its own handler, and other programs have no cost. There are three loggers. All their
records have level DEBUG, so a program that logs at INFO does not print a line for each step:

    logging.getLogger("tft_commits").setLevel(logging.DEBUG)
    logging.getLogger("tft_commits").addHandler(MyHandler())

Every record has these attributes:
- `job_id`: the job's name. `replica_id`: full id of this replica group. `rank`: group rank.
- `quorum_id`: of the event's quorum. None: the event has no quorum.
- `step`: committed steps before the event's step.

Each logger adds its own:
- `tft_quorums`, when a step's plan has arrived and its group is built or could not be built: `replica_world_size`:
  members. `num_participants`: members whose gradients count. `heal`: this group heals. `recover_dst_replica_ranks`: the
  groups that heal from this one first. `reconfigured`: the process group was built again. `duration_s`: seconds since
  the request for the quorum.
- `tft_commits`, at a verdict: `commit_result`: whether the optimizer steps. `num_participants`.
- `tft_errors`, at an error: `error`: its text. `error_type`: the name of its class. `counts`: the step fails because of
  it. Otherwise the error came after its step.

Besides, the log keeps the last incidents in memory, for `Manager.status` and the debug server.

Law of this file: names and attributes of records. A library configures no logging: no handler, no level, no formatter.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from tft_coord.core.step import StepName
from tft_coord.core.types import Plan, QuorumKey

QUORUMS: Final = "tft_quorums"
COMMITS: Final = "tft_commits"
ERRORS: Final = "tft_errors"
_INCIDENTS_KEPT: Final = 32


@final
@dataclass(frozen=True, slots=True)
class Incident:
    """An error of a step, or the loss of a member.

    Args:
        time_s: when it was reported, in seconds since 1970.
        step: committed steps before its step.
        quorum_id: of its quorum. None: it has none.
        text: `type: text` of an error, or the notice of a loss.
    """

    time_s: float
    step: int
    quorum_id: int | None
    text: str


RecordListener: TypeAlias = Callable[[str, Mapping[str, object]], None]


@final
class EventLog:
    """The writer of the records of one Manager.

    Args:
        job_id, replica_id, rank: the origin of the records.
    Attributes:
        who: the origin, as attributes of a record.
        last_error: the newest error, `type: text`. "": no error. An exception is not stored, because it would keep the
            memory of its stack frames.
        incidents: the last ones, oldest first, at most 32.
        listener: receives every record too, see `tft_algos.manager.strategy.follow_records`. None: there is none.
    """

    def __init__(self, *, job_id: str, replica_id: str, rank: int) -> None:
        self.who = {"job_id": job_id, "replica_id": replica_id, "rank": rank}
        self.quorums = logging.getLogger(QUORUMS)
        self.commits = logging.getLogger(COMMITS)
        self.errors = logging.getLogger(ERRORS)
        self.last_error = ""
        self.incidents: deque[Incident] = deque(maxlen=_INCIDENTS_KEPT)
        self.listener: RecordListener | None = None

    @property
    def wants_quorums(self) -> bool:
        """Return whether a handler or the listener takes records of quorums."""
        return self._is_wanted(self.quorums)

    def quorum(self, name: StepName, plan: Plan, *, reconfigured: bool, duration_s: float) -> None:
        """Record that the plan of a step has arrived, and that its group is built or could not be built."""
        self._write(
            self.quorums,
            name,
            "quorum",
            replica_world_size=plan.replica_world_size,
            num_participants=plan.num_participants,
            heal=plan.heal,
            recover_dst_replica_ranks=plan.recover_dst_replica_ranks,
            reconfigured=reconfigured,
            duration_s=duration_s,
        )

    def commit(self, name: StepName, committed: bool, *, num_participants: int) -> None:
        """Record a verdict."""
        self._write(self.commits, name, "commit", commit_result=committed, num_participants=num_participants)

    def error(self, name: StepName, error: BaseException, *, counts: bool) -> None:
        """Record an error."""
        self.last_error = f"{type(error).__name__}: {error}"
        self.incident(name.step, name.key, self.last_error)
        if self._is_wanted(self.errors):
            # Records for machines contain whole ids. The text for people has short ones.
            text = error.args[0] if len(error.args) == 1 and isinstance(error.args[0], str) else str(error)
            facts = {"error": text, "error_type": type(error).__name__, "counts": counts}
            self._write(self.errors, name, "error", **facts)

    def incident(self, step: int, key: QuorumKey | None, text: str) -> None:
        """Keep an incident."""
        self.incidents.append(Incident(time.time(), step, None if key is None else key.quorum_id, text))

    def _write(self, logger: logging.Logger, name: StepName, event: str, **facts: object) -> None:
        if not self._is_wanted(logger):
            return
        quorum_id = None if name.key is None else name.key.quorum_id
        record = {**self.who, "quorum_id": quorum_id, "step": name.step, **facts}
        logger.debug("%s of step %d", event, name.step, extra=record)
        if self.listener is not None:
            self.listener(event, record)

    def _is_wanted(self, logger: logging.Logger) -> bool:
        return self.listener is not None or logger.isEnabledFor(logging.DEBUG)
