"""The room of a lighthouse: whether a replica that it does not know yet may join, by the limits.

Law of this file: a hello and the numbers to a sentence; what an operator or a user does next is in it.
"""

from __future__ import annotations

from tft_coord.core.config import LOST_KEPT_MOST, LighthouseConfig
from tft_coord.core.liveness import Liveness
from tft_coord.core.types import Hello


def full_for(hello: Hello, liveness: Liveness | None, num_jobs: int, config: LighthouseConfig) -> str | None:
    """Return why there is no room for a replica, or None.

    A known replica that connects again always has room. One that replaces a connected replica takes its room.

    Args:
        hello: of the replica.
        liveness: the replicas of its job; None: the job is new.
        num_jobs: known jobs.
        config: the settings of all jobs.
    """
    if liveness is None:
        return _full_of_jobs(hello, num_jobs, config)
    if hello.replica_id in liveness.replicas:
        return None
    return _full_of_replicas(hello, liveness, config.of_job(hello.job).limits.max_replicas)


def _full_of_jobs(hello: Hello, num_jobs: int, config: LighthouseConfig) -> str | None:
    most = config.limits.max_jobs
    if num_jobs < most:
        return None
    forget_s = config.timeouts.forget_after_ms / 1_000
    return (
        f"replica {hello.replica_id} is the first of job {hello.job!r}, and this lighthouse knows {num_jobs} jobs, the "
        f"most that it may serve (max_jobs {most}). Raise max_jobs of the lighthouse, use another one, or wait: it "
        f"forgets a job {forget_s:g} s after its last replica"
    )


def _full_of_replicas(hello: Hello, liveness: Liveness, most: int) -> str | None:
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
