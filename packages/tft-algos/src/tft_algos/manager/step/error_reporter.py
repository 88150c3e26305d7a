"""Errors of a step, reported to the records for machines and to the log.

Law of this file: reporting, from any thread. The step core decides the effect of an error.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn, final

from tft_algos.errors import QuorumBrokenError
from tft_algos.manager.step.event_log import EventLog
from tft_coord.core.names import shorten
from tft_coord.core.step import StepName, StepStatus
from tft_coord.core.step.attempt import FATAL, MAX_ERRORS_KEPT
from tft_coord.core.stragglers import LEFT_OUT_REASON
from tft_coord.core.types import LossNotice, Plan, QuorumKey
from tft_coord.errors import RefusedError, ReplicaGroupLostError
from tft_pg.errors import AbortedError, CollectiveTimeoutError, ConfigureError, PeerDisconnectedError

# A process group raises these when a member has died, before the lost member is known.
_BY_A_PEER: Final = (PeerDisconnectedError, AbortedError, ConfigureError)
# A failing process group raises these from every running operation, so they count as one failure.
_OF_THE_GROUP: Final = (*_BY_A_PEER, CollectiveTimeoutError)
_LOOKS_TO_KNOW_WHO: Final = 2  # after about one beat, a loss is known if there is one
_STEPS_KEPT: Final = 16  # with logged failures
_QUORUMS_KEPT: Final = 16  # that a loss has broken

logger = logging.getLogger("tft_algos.manager")


def _explains(notice: LossNotice) -> bool:
    """Return whether a notice explains every failure of the reductions in its quorum.

    It does if a member is lost, or leaves as a straggler. Another living member may itself have failed because of such
    a loss.
    """
    return not notice.lives or notice.reason.startswith(LEFT_OUT_REASON)


def text_of(error: BaseException) -> str:
    """Return the text of an error, or the name of its type if it has none."""
    return str(error).strip() or type(error).__name__


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failure of a step.

    Args:
        name: the step.
        error: what happened.
        lead: the beginning of the log line.
    """

    name: StepName
    error: Exception
    lead: str = ""

    def line(self, status: StepStatus) -> str:
        """Return the log line. `status`: says whether the step is over."""
        running = {each.name.attempt for each in status.aside}
        if status.is_open:
            running.add(status.name.attempt)
        will = "will" if self.name.attempt in running else "did"
        return f"{self.lead}this step {will} not commit: {text_of(self.error)}"


def raise_reported(error: Exception) -> NoReturn:
    """Raise an error. An error that another process reported is raised without its traceback, which adds nothing."""
    if isinstance(error, (RefusedError, ReplicaGroupLostError)):
        raise error.with_traceback(None) from None
    raise error


@final
class ErrorReporter:
    """The destination of a Manager's errors and log lines.

    Args:
        status: returns the status of the step.
        job_id, replica_id, rank: the origin of the reports.
    Attributes:
        records: the records for machines.
    """

    def __init__(self, status: Callable[[], StepStatus], *, job_id: str, replica_id: str, rank: int) -> None:
        self.records = EventLog(job_id=job_id, replica_id=replica_id, rank=rank)
        self._status = status
        self._loss = ""  # the last logged loss
        # The last quorums that a notice has broken. True: a member was lost, or left out.
        self._broken: dict[QuorumKey, bool] = {}
        self._told: deque[QuorumKey] = deque(maxlen=_QUORUMS_KEPT)  # the last quorums whose end was logged
        self._group_is_lost = False
        self._plan: Plan | None = None  # the newest plan
        # The replicas of the previous plan that are not in the newest one.
        self._missing: tuple[QuorumKey, tuple[str, ...]] | None = None
        self._pending: _Failure | None = None  # a failure that the loss of a member may explain
        self._looks = 0  # checks since that failure
        self._logged: dict[int, set[str]] = {}  # by attempt: the failures that were logged or held back
        self._holding = threading.Lock()
        self._who = f"{shorten(replica_id)}/{rank}"

    def log(self, level: int, message: str, *args: object) -> None:
        """Log a line with the replica, the rank and the step."""
        if logger.isEnabledFor(level):
            self._log_of(self._status().step, level, message % args if args else message)

    def _log_of(self, step: int, level: int, sentence: str) -> None:
        if logger.isEnabledFor(level):
            logger.log(level, "[%s - step %d] %s", self._who, step, shorten(sentence), extra=self.records.who)

    def error(self, name: StepName, error: Exception, *, counts: bool, is_between: bool = False) -> None:
        """Report an error of a step: from a reduction, a future, or the user.

        Args:
            name: the step.
            error: the error.
            counts: the step fails because of it.
            is_between: the error came between two steps, and belongs to none.
        """
        self.records.error(name, error, counts=counts)
        if counts:
            self._step_failed(_Failure(name, error))
        else:
            with self._holding:
                level = logging.DEBUG if self._is_explained(name, error) else logging.WARNING
            self.log(
                level, "an error of %s arrived after its end: %s", "a step" if is_between else name, text_of(error)
            )

    def quorum_broke(self, notice: LossNotice, *, is_closing: bool) -> None:
        """Log, once, that the quorum of this replica is broken. Its later failures are not logged again.

        `is_closing`: this replica shuts down and breaks the quorum itself, whatever the others report about each other.
        """
        self._loss = shorten(str(notice))
        if not is_closing:
            self.records.incident(self._status().step, notice.key, str(notice))
        pending = self._explained_by(notice)
        if not is_closing:
            self._told.append(notice.key)
        failed = f"step {pending.step} will not commit, and " if pending is not None else ""
        level = logging.WARNING if _explains(notice) else logging.INFO
        self.log(logging.DEBUG if is_closing else level, "%s; %sits running operations are aborted", notice, failed)

    def loss_came_late(self, notice: LossNotice) -> None:
        """Log the loss of a member of an old quorum, if it explains the failure that is held back.

        A closed connection may fail the step, and the next quorum may form, before the notice arrives.
        """
        pending = self._explained_by(notice)
        if pending is not None:
            self._log_of(pending.step, logging.WARNING, f"{notice}; step {pending.step} did not commit")

    def _explained_by(self, notice: LossNotice) -> StepName | None:
        """Record the notice of a quorum. Return the step whose failure it explains, if one was held back."""
        with self._holding:
            self._broken[notice.key] = self._broken.get(notice.key, False) or _explains(notice)
            while len(self._broken) > _QUORUMS_KEPT:
                del self._broken[min(self._broken)]
            if not _explains(notice) or self._pending is None or self._pending.name.key != notice.key:
                return None
            pending, self._pending = self._pending, None
            return pending.name

    def plan_arrived(self, plan: Plan) -> None:
        """Record which replicas are missing in this plan's quorum. This explains a failure without a loss notice."""
        with self._holding:
            before, self._plan = self._plan, plan
            if before is not None and before.key != plan.key:
                self._missing = before.key, tuple(name for name in before.replica_ids if name not in plan.replica_ids)

    def look(self) -> None:
        """Log the failure that is held back, if no loss has explained it. Call this once a beat."""
        with self._holding:
            self._looks += 1
            is_due = self._looks > _LOOKS_TO_KNOW_WHO
        if is_due:
            self.write_pending()

    def write_pending(self) -> None:
        """Log the failure that is held back, if there is one."""
        with self._holding:
            pending, self._pending = self._pending, None
        if pending is not None:
            self._write(pending)

    def _write(self, failure: _Failure) -> None:
        """Log a failure that no loss has explained. The next quorum may show which replica is gone.

        A notice of a living member in the log explains the failure too, unless a replica is gone.
        """
        name, sentence = failure.name, failure.line(self._status())
        level = logging.DEBUG if name.key in self._told else logging.WARNING
        key, missing = self._missing or (None, ())
        if missing and key == name.key:
            who = f"replica {missing[0]} was" if len(missing) == 1 else f"replicas {', '.join(missing)} were"
            left = "has left" if len(missing) == 1 else "have left"
            sentence = f"{who} lost or {left} in step {name.step}, which did not commit"
            level = logging.WARNING
        self._log_of(name.step, level, sentence)

    def _step_failed(self, failure: _Failure) -> None:
        """Log a failure of a step once, and only if no loss explains it. The records contain all failures."""
        name, error = failure.name, failure.error
        before, level = None, logging.DEBUG
        with self._holding:
            if not self._is_explained(name, error) and self._is_new(name, error):
                if isinstance(error, _BY_A_PEER) and name.key is not None:
                    before, self._pending, self._looks = self._pending, failure, 0
                elif not isinstance(error, FATAL):  # the training thread raises a fatal error, which is logged there
                    level = logging.WARNING
        if before is not None:
            self._write(before)
        self._log_of(name.step, level, failure.line(self._status()))

    def _is_new(self, name: StepName, error: Exception) -> bool:
        """Return whether no logged failure of this step is the same. The failure is recorded."""
        logged = self._logged.setdefault(name.attempt, set())
        while len(self._logged) > _STEPS_KEPT:
            del self._logged[min(self._logged)]
        kind = "the process group" if isinstance(error, _OF_THE_GROUP) else f"{type(error).__name__}: {error}"
        # An earlier failure is the cause of an abort.
        is_new = (
            kind not in logged and len(logged) < MAX_ERRORS_KEPT and not (logged and isinstance(error, AbortedError))
        )
        if is_new:
            logged.add(kind)
        return is_new

    def _is_explained(self, name: StepName, error: Exception) -> bool:
        """Return whether a logged loss explains an error."""
        if self.follows_from_a_loss(error):
            return True
        if not isinstance(error, _OF_THE_GROUP):
            return False
        lost = self._broken.get(name.key) if name.key is not None else None
        return self._group_is_lost or lost is True or (lost is False and isinstance(error, AbortedError))

    def follows_from_a_loss(self, error: Exception | None) -> bool:
        """Return whether an error only repeats the last loss."""
        return isinstance(error, QuorumBrokenError) or (bool(self._loss) and self._loss in shorten(str(error)))

    def no_quorum(self, name: StepName, error: Exception) -> None:
        """Report that the step has no quorum."""
        # The training thread raises fatal errors, and their message appears there.
        self._report(
            name, logging.DEBUG if isinstance(error, FATAL) else logging.WARNING, error, "no quorum: %s", text_of(error)
        )

    def configure_failed(self, name: StepName, error: Exception, *, warning: str = "") -> None:
        """Report that the process group could not be built for the quorum of a step.

        Args:
            name: the step.
            error: the error.
            warning: a sentence that names the unreachable replicas. It is logged at once, because no loss explains it.
        """
        self.records.error(name, error, counts=True)
        if warning:
            with self._holding:
                self._is_new(name, error)  # its consequences are not logged again
            self._log_of(name.step, logging.WARNING, f"this step will not commit: {warning}")
            return
        self._step_failed(_Failure(name, error, f"could not configure quorum {name.key}, so "))

    def heal_failed(self, name: StepName, error: Exception, *, traceback_of: BaseException | None = None) -> None:
        """Report that this replica did not heal.

        Args:
            name: the step.
            error: the error.
            traceback_of: an error of a user's function, logged with its traceback.
        """
        if traceback_of is None:
            self._report(name, logging.WARNING, error, "%s", text_of(error))
        else:
            self.records.error(name, error, counts=True)
            self.log_traceback(traceback_of, "%s", text_of(error))

    def log_traceback(self, error: BaseException, message: str, *args: object) -> None:
        """Log an error of a user's function with its traceback."""
        step, who = self._status().step, self.records.who
        logger.error(f"[%s - step %d] {message}", self._who, step, *args, exc_info=error, extra=who)

    def group_lost(self, name: StepName, error: Exception) -> None:
        """Report that this replica group is lost."""
        with self._holding:
            self._group_is_lost = True
            self._pending = None  # the loss of the group is its reason
        self._report(name, logging.ERROR, error, "%s", text_of(error))

    def torn(self, error: BaseException) -> None:
        """Report that a commit could not be applied, so the state here is half written."""
        self.records.error(self._status().name, error, counts=False)
        self.log(logging.WARNING, "the commit could not be applied here, so this replica heals: %r", error)

    def raise_fatal(self) -> None:
        """Raise the fatal error of this process, if there is one."""
        fatal = self._status().fatal
        if fatal is not None:
            raise_reported(fatal)

    def _report(self, name: StepName, level: int, error: Exception, message: str, *args: object) -> None:
        self.records.error(name, error, counts=True)
        self.log(logging.DEBUG if self.follows_from_a_loss(error) else level, message, *args)
