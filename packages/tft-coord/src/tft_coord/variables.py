"""The environment variables of all programs of this project, to find a misspelt one.

Law of this file: names, and the nearest of them. The modules that use a variable read it.
"""

from __future__ import annotations

import difflib
from typing import Final

__all__ = ["KNOWN_VARIABLES", "nearest_variable"]

PREFIX: Final = "TFT_"
KNOWN_VARIABLES: Final = frozenset(
    {
        "TFT_CHECK_STATE_EVERY",
        "TFT_HEARTBEAT_TIMEOUT_SEC",
        "TFT_INSECURE",
        "TFT_JOB_ID",
        "TFT_LAUNCH_ID",
        "TFT_LEASE_SEC",
        "TFT_LIGHTHOUSE",
        "TFT_LIGHTHOUSE_BIND",
        "TFT_LIGHTHOUSE_CLUSTER_ID",
        "TFT_LIGHTHOUSE_CONFIG",
        "TFT_LIGHTHOUSE_ETCD",
        "TFT_LIGHTHOUSE_ETCD_CA",
        "TFT_LIGHTHOUSE_ETCD_CERT",
        "TFT_LIGHTHOUSE_ETCD_KEY",
        "TFT_LIGHTHOUSE_ETCD_PREFIX",
        "TFT_LIGHTHOUSE_ETCD_TTL_S",
        "TFT_LIGHTHOUSE_HEARTBEAT_TIMEOUT_MS",
        "TFT_LIGHTHOUSE_HTTP_BIND",
        "TFT_LIGHTHOUSE_JOB_TOKENS",
        "TFT_LIGHTHOUSE_JOIN_TIMEOUT_MS",
        "TFT_LIGHTHOUSE_LOG_FORMAT",
        "TFT_LIGHTHOUSE_LOG_LEVEL",
        "TFT_LIGHTHOUSE_LOST_STATE_TIMEOUT_MS",
        "TFT_LIGHTHOUSE_MAX_JOBS",
        "TFT_LIGHTHOUSE_MAX_MESSAGE_BYTES",
        "TFT_LIGHTHOUSE_MAX_REPLICAS",
        "TFT_LIGHTHOUSE_MAX_STREAMS",
        "TFT_LIGHTHOUSE_MIN_REPLICAS",
        "TFT_LIGHTHOUSE_ON_LOST_STATE",
        "TFT_LIGHTHOUSE_QUORUM_TICK_MS",
        "TFT_LIGHTHOUSE_STRAGGLERS",
        "TFT_LIGHTHOUSE_STRAGGLER_RATIO",
        "TFT_LOG_STEPS",
        "TFT_RANK0_SYNCHRONIZATION_ONLY",
        "TFT_SLOWEST_STEP_SEC",
        "TFT_TLS_CA",
        "TFT_TLS_CERT",
        "TFT_TLS_CLIENT_AUTH",
        "TFT_TLS_KEY",
        "TFT_TOKEN",
        "TFT_TOKEN_FILE",
        "TFT_TRACE_DIR",
        "TFT_USE_BUCKETIZATION",
        "TFT_WATCHDOG_TIMEOUT_SEC",
    }
)
_AS_NEAR: Final = 0.8  # of difflib's ratio; a name that is further away is the user's own


def nearest_variable(name: str) -> str | None:
    """Return the variable that a misspelt one is meant to be; None: it is known, or the user's own."""
    if not name.startswith(PREFIX) or name in KNOWN_VARIABLES:
        return None
    return next(iter(difflib.get_close_matches(name, sorted(KNOWN_VARIABLES), n=1, cutoff=_AS_NEAR)), None)
