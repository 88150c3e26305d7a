"""The lighthouse's log for its operator: one line for each new quorum, for each reason, for each loss.

Law of this file: sentences from the core's effects, given to the logger; nothing is configured here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, final

from tft_coord import Member, PaceKind
from tft_coord.lighthouse import (
    TORCHFT_JOB,
    JobEnded,
    JobFailed,
    PaceChanged,
    Quorum,
    QuorumFormed,
    Refusal,
    ReplicaLeft,
    ReplicaLost,
    WaitNoticed,
    effects,
    logger_for_people,
)
from tft_coord.logs import field, quoted
from tft_lighthouse.history import Incident
from tft_lighthouse.history import Phase as IncidentPhase

logger = logger_for_people("tft_lighthouse")

MEMBERS_LOGGED_MOST: Final = 50  # of a quorum of thousands
AGAIN_S: Final = 60.0
REFUSALS_KEPT: Final = 1_000


def does_not_read(replica_id: str | None, job: str | None, address: str) -> None:
    """Log the end of a stream that takes no messages; None: it has said no hello."""
    words = "disconnected replica %s of job %s at %s: it does not read its messages"
    known = replica_id or "(no hello yet)", job or "(no hello yet)"
    logger.warning(words, *known, address, extra={"job": known[1]})


@final
class Refusals:
    """One line for each refusal: a refused client redials at once, and gets the same refusal.

    Args:
        seconds: returns the time.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        # what a line is about -> when it was logged, and how many of its kind have come since; the oldest first
        self._logged: dict[str, tuple[float, int]] = {}

    def log(
        self, what: str, refusal: Refusal, message: str, *, job: str | None = None, about: str | None = None
    ) -> None:
        """Log a refusal once, and again after a minute.

        Args:
            what: the refused stream, request or call.
            refusal: why.
            message: the same in words.
            job: of the caller; None: it has not named one.
            about: refusals about the same are one line, with the number of the others; None: the line itself.
        """
        line = f"{what} is refused ({refusal.value}): {message}"
        line = f"job {job}: {line}" if job is not None else line
        now_s, key = self._seconds(), about or line
        logged_s, more = self._logged.get(key, (-AGAIN_S, 0))
        if now_s - logged_s < AGAIN_S:
            self._logged[key] = (logged_s, more + 1)
            return
        self._logged.pop(key, None)
        self._logged[key] = (now_s, 0)
        if len(self._logged) > REFUSALS_KEPT:
            del self._logged[next(iter(self._logged))]
        line += f" ({more} others were refused for this since the last such line)" if about and more else ""
        logger.warning("%s", line, extra={"job": job, "refusal": refusal.value} if job is not None else None)


@final
class Failures:
    """One traceback for each error in the handling of a job: the next tick raises the same one."""

    def __init__(self) -> None:
        self._logged: dict[tuple[str, str], None] = {}  # the oldest first

    def log(self, failed: JobFailed) -> None:
        """Log a failure if it is a new one."""
        which = (failed.job, repr(failed.error))
        if which in self._logged:
            return
        self._logged[which] = None
        if len(self._logged) > REFUSALS_KEPT:
            del self._logged[next(iter(self._logged))]
        logger.error(
            "job %s: the lighthouse failed with %s, which is a bug in it; other jobs are not affected. Restart the "
            "lighthouse (the replicas wait for it) and report this traceback",
            failed.job,
            which[1],
            exc_info=failed.error,
            extra={"job": failed.job},
        )


def took_over() -> None:
    """Log that this lighthouse replaces the newer one, because replicas have come here for so long that it must be
    gone."""
    logger.warning(
        "the newer lighthouse of this cluster is gone: this one replaces it, with no memory of any job, as after a "
        "restart"
    )


def resumed(job: str, quorum: Quorum, replica_id: str) -> None:
    """Log the takeover of a quorum that formed before this lighthouse knew the job."""
    logger.info(
        "resumed quorum %d of job %s (%d members), as reported by replica %s; this lighthouse had no memory of it",
        quorum.key.quorum_id,
        job,
        len(quorum.members),
        replica_id,
        extra={"job": job, "quorum_id": quorum.key.quorum_id, "nonce": quorum.key.nonce},
    )


def quorum_formed(formed: QuorumFormed) -> None:
    """Log the new quorum with its members, and why its id rose: two lines."""
    quorum_id = formed.quorum.key.quorum_id
    job = formed.job or TORCHFT_JOB
    last = "the first" if formed.previous is None else f"{formed.age_ms / 1000:.1f} s after the last"
    members = "; ".join(_member(member) for member in formed.quorum.members[:MEMBERS_LOGGED_MOST])
    if len(formed.quorum.members) > MEMBERS_LOGGED_MOST:
        members += f"; and {len(formed.quorum.members) - MEMBERS_LOGGED_MOST} more"
    logger.info(
        "new quorum %d, job %s, %s, %d members: %s",
        quorum_id,
        job,
        last,
        len(formed.quorum.members),
        members,
        extra={"job": job, "quorum_id": quorum_id, "nonce": formed.quorum.key.nonce, "age_ms": formed.age_ms},
    )
    before = "none" if formed.previous is None else str(formed.previous.key.quorum_id)
    logger.info(
        "quorum changed, id %s -> %d, because %s (job %s)",
        before,
        quorum_id,
        formed.reason,
        job,
        extra={"job": job, "quorum_id": quorum_id, "reason": formed.reason},
    )


def replica_lost(lost: ReplicaLost) -> None:
    """Log a lost replica with the reason."""
    logger.info(
        "lost replica %s of job %s: %s",
        lost.replica_id,
        lost.job,
        lost.reason,
        extra={"job": lost.job, "replica_id": lost.replica_id, "session": lost.session, "reason": lost.reason},
    )


def replica_left(left: ReplicaLeft) -> None:
    """Log a replica that has left, or whose training is over, with the reason."""
    logger.info(
        "replica %s of job %s has %s: %s",
        left.replica_id,
        left.job,
        "finished" if left.finished else "left",
        left.reason,
        extra={"job": left.job, "replica_id": left.replica_id, "session": left.session, "reason": left.reason},
    )


def wait(noticed: WaitNoticed) -> None:
    """Log which replicas wait for which, or that the wait is over."""
    over, waits = "job %s: the wait is over after %d s (%s)", "job %s: waiting for %d s: %s"
    level, words = (logging.INFO, over) if noticed.is_over else (logging.WARNING, waits)
    logger.log(level, words, noticed.job, noticed.seconds, noticed.sentence, extra={"job": noticed.job})


def warned(warning: effects.Warned) -> None:
    """Log a warning for the users of a job's replicas."""
    logger.warning("job %s: %s", warning.job, warning.sentence, extra={"job": warning.job})


def pace_changed(changed: PaceChanged) -> None:
    """Log that a replica slows the others down, or no longer does."""
    news = changed.news
    is_well = news.kind in (PaceKind.KEEPS_UP, PaceKind.LET_BACK)
    logger.log(
        logging.INFO if is_well else logging.WARNING,
        "job %s: %s",
        changed.job,
        news.sentence,
        extra={
            "job": changed.job,
            "replica_id": news.replica_id,
            "pace": news.kind.name,
            "own_ms": news.own_ms,
            "median_ms": news.median_ms,
            "share": news.share,
        },
    )


def job_ended(ended: JobEnded) -> None:
    """Log the step at which a job has ended, and the replicas that finished there."""
    logger.info(
        "job %s ended at step %d: finished by %s",
        ended.job,
        ended.step,
        ", ".join(ended.replica_ids),
        extra={"job": ended.job, "step": ended.step},
    )


def incident(closed: Incident) -> None:
    """Log an incident that has ended: one line of `name=value`, whose names and their order do not change."""
    names = field(",".join(closed.replica_ids) + ("" if closed.num_replicas == len(closed.replica_ids) else ",…"))
    phases = "".join(
        f" {phase.value}_s={closed.phases[phase] / 1_000:.3f}" for phase in IncidentPhase if phase in closed.phases
    )
    if closed.slowest:
        phases += f" failed_rounds={closed.failed_rounds} slowest={field(closed.slowest)}"
    before, after = (str(each) if each is not None else "none" for each in (closed.quorum_before, closed.quorum_after))
    logger.info(
        "incident=%d job=%s kind=%s step=%d quorum=%s->%s members=%d->%d lasted_s=%.3f%s replicas=%s reason=%s",
        closed.number,
        field(closed.job),
        closed.kind.value,
        closed.step,
        before,
        after,
        closed.members_before,
        closed.members_after,
        closed.lasted_ms / 1_000,
        phases,
        names,
        quoted(closed.reason),
        extra={"job": closed.job, "incident": closed.number},
    )


def _member(member: Member) -> str:
    return (
        f"replica_id={field(member.replica_id)} address={field(member.address)} "
        f"store_address={field(member.store_address)} "
        f"step={member.step} world_size={member.world_size} shrink_only={member.shrink_only} "
        f"commit_failures={member.commit_failures}"
    )
