"""Membership, quorum and commit for fault-tolerant training: the protocol core, its wire and its clients.

Names are imported when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tft_coord.client.lighthouse import LighthouseClient
    from tft_coord.client.manager import ManagerClient, Unchanged
    from tft_coord.compat.views import Quorum, QuorumMember, QuorumResult, Timestamp
    from tft_coord.core.progress import Progress
    from tft_coord.core.stragglers import PaceKind, StragglerAction, StragglerNotice, StragglerPolicy
    from tft_coord.core.types import LossNotice, Member, NewcomerAsks, Plan, Purpose, QuorumKey, RankRequest, Verdict
    from tft_coord.errors import (
        ConfigError,
        CoordinationClosedError,
        CoordinationError,
        JobOverError,
        ProtocolError,
        RefusedError,
        ReplicaGroupLostError,
        RequestTimeoutError,
        StaleQuorumError,
        UnknownCallError,
        UnreachableError,
    )
    from tft_coord.manager_server import ManagerServer
    from tft_coord.notifications import Notification
    from tft_coord.timeouts import Timeouts
    from tft_coord.tls import TLS
    from tft_coord.tokens import JobTokens, TokenFile

__version__ = "0.1.0"

__all__ = [
    "TLS",
    "ConfigError",
    "CoordinationClosedError",
    "CoordinationError",
    "JobOverError",
    "JobTokens",
    "LighthouseClient",
    "LossNotice",
    "ManagerClient",
    "ManagerServer",
    "Member",
    "NewcomerAsks",
    "Notification",
    "PaceKind",
    "Plan",
    "Progress",
    "ProtocolError",
    "Purpose",
    "Quorum",
    "QuorumKey",
    "QuorumMember",
    "QuorumResult",
    "RankRequest",
    "RefusedError",
    "ReplicaGroupLostError",
    "RequestTimeoutError",
    "StaleQuorumError",
    "StragglerAction",
    "StragglerNotice",
    "StragglerPolicy",
    "Timeouts",
    "Timestamp",
    "TokenFile",
    "Unchanged",
    "UnknownCallError",
    "UnreachableError",
    "Verdict",
]

_HOMES = {
    "tft_coord.client.lighthouse": ("LighthouseClient",),
    "tft_coord.client.manager": ("ManagerClient", "Unchanged"),
    "tft_coord.core.progress": ("Progress",),
    "tft_coord.core.stragglers": ("PaceKind", "StragglerAction", "StragglerNotice", "StragglerPolicy"),
    "tft_coord.core.types": (
        "LossNotice",
        "Member",
        "NewcomerAsks",
        "Plan",
        "Purpose",
        "QuorumKey",
        "RankRequest",
        "Verdict",
    ),
    "tft_coord.errors": (
        "CoordinationClosedError",
        "CoordinationError",
        "RequestTimeoutError",
        "ReplicaGroupLostError",
        "JobOverError",
        "ProtocolError",
        "RefusedError",
        "ConfigError",
        "StaleQuorumError",
        "UnknownCallError",
        "UnreachableError",
    ),
    "tft_coord.manager_server": ("ManagerServer",),
    "tft_coord.notifications": ("Notification",),
    "tft_coord.timeouts": ("Timeouts",),
    "tft_coord.tls": ("TLS",),
    "tft_coord.tokens": ("JobTokens", "TokenFile"),
    "tft_coord.compat.views": ("Quorum", "QuorumMember", "QuorumResult", "Timestamp"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
