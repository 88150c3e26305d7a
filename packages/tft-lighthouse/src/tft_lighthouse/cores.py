"""The cores of a lighthouse, as they are when it begins to serve.

Law of this file: making them.
"""

from __future__ import annotations

import secrets

from tft_coord.lighthouse import TORCHFT_JOB, LighthouseConfig, LighthouseCore, ProtocolRouter, TorchftCore


def new_cores(
    config: LighthouseConfig, *, started_ms: int, cluster_id: str, now_ms: int, is_successor: bool = False
) -> tuple[LighthouseCore, TorchftCore, ProtocolRouter]:
    """Return cores without memory.

    Args:
        config: limits and timeouts.
        started_ms: quorum ids are above it.
        cluster_id: of the lighthouses that replace each other.
        now_ms: the time of a monotonic clock.
        is_successor: another lighthouse has served these jobs, and its quorums may still run.
    """
    core = LighthouseCore(
        config,
        started_ms=started_ms,
        cluster_id=cluster_id,
        nonces=lambda: secrets.randbits(64),
        now_ms=now_ms,
        had_earlier_life=is_successor,
    )
    torchft = TorchftCore(config.of_job(TORCHFT_JOB), started_ms=started_ms)
    return (
        core,
        torchft,
        ProtocolRouter(core, torchft, undecided_ms=config.timeouts.heartbeat_timeout_ms, now_ms=now_ms),
    )
