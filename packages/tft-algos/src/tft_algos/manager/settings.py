"""The settings that `Manager(...)` takes by keyword, for editors and type checkers.

Law of this file: only names and types, the same as in `ManagerConfig`, which documents and checks the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, TypedDict

from tft_algos.manager.config import OnStraggler, WorldSizeMode
from tft_ckpt import CheckpointTransport
from tft_coord.timeouts import Timeouts


class ManagerSettings(TypedDict, total=False):
    """The fields of `ManagerConfig`. A field that is left out keeps the config's value."""

    use_async_quorum: bool
    timeout: timedelta | None
    quorum_timeout: timedelta | None
    connect_timeout: timedelta | None
    heal_timeout: timedelta | None
    heartbeat_timeout: timedelta | None
    slowest_step: timedelta | None
    lease: timedelta | None
    timeouts: Timeouts | None
    rank: int | None
    world_size: int | None
    world_size_mode: WorldSizeMode
    store_addr: str | None
    store_port: int | None
    lighthouse_addr: str | None
    replica_id: str | None
    port: int | None
    hostname: str | None
    heartbeat_interval: timedelta
    checkpoint_transport: CheckpointTransport[Any] | None
    init_sync: bool
    rank0_synchronization_only: bool | None
    max_retries: int | None
    check_state_every: int | None
    on_divergence: Literal["heal", "stop"]
    quorum_retries: int | None
    fingerprint: Mapping[str, str] | None
    on_straggler: OnStraggler | None
    log_steps: bool | None
    job: str | None
    token: str | None
    insecure: bool | None
