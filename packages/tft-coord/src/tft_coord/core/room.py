"""The room of a lighthouse: whether a replica that it does not know yet may join, by the limits.

Law of this file: a hello and the numbers to a sentence; what an operator or a user does next is in it.
"""

from __future__ import annotations

from tft_coord.core.config import LOST_KEPT_MOST, LighthouseConfig
from tft_coord.core.liveness import Liveness
from tft_coord.core.types import Hello


def full_of_jobs(hello: Hello, num_jobs: int, config: LighthouseConfig) -> str | None:
    """Return why a replica of a new job is refused, or None."""
    most = config.limits.max_jobs
    if num_jobs < most:
        return None
    forget_s = config.timeouts.forget_after_ms / 1_000
    return (
        f"replica {hello.replica_id} is the first of job {hello.job!r}, and this lighthouse knows {num_jobs} jobs, the "
        f"most that it may serve (max_jobs {most}). Raise max_jobs of the lighthouse, use another one, or wait: it "
        f"forgets a job {forget_s:g} s after its last replica"
    )


def full_of_replicas(hello: Hello, liveness: Liveness, most: int) -> str | None:
    """Return why a new replica of a job is refused, or None.

    Args:
        hello: of a replica that the job does not know.
        liveness: the replicas of the job.
        most: the limit for connected ones.
    """
    connected = liveness.num_connected
    if hello.replaces and (before := liveness.replicas.get(hello.replaces)) is not None and before.stream is not None:
        connected -= 1
    if connected >= most:
        return (
            f"job {hello.job!r} has {connected} connected replicas, the most that it may have (max_replicas {most}), "
            f"so replica {hello.replica_id} can't join. Raise max_replicas of the lighthouse, for all jobs or for this "
            "one, or end a replica"
        )
    gone = len(liveness.replicas) - connected
    if gone >= LOST_KEPT_MOST:
        return (
            f"job {hello.job!r} has {gone} lost replicas that are still remembered, the most that are kept, so replica "
            f"{hello.replica_id} can't join. Find out why so many fail, and start it again in a minute"
        )
    return None
