"""The messages that a rank gets without a request.

Law of this file: one name for all of them.
"""

from __future__ import annotations

from typing import TypeAlias

from tft_coord.core.stragglers import StragglerNotice
from tft_coord.core.types import DrainComplete, KillOrder, LeaveRequest, LossNotice, NewcomerAsks, QuorumNews, WaitsFor
from tft_coord.errors import ReplicaGroupLostError

Notification: TypeAlias = (
    LossNotice
    | NewcomerAsks
    | ReplicaGroupLostError
    | LeaveRequest
    | DrainComplete
    | KillOrder
    | WaitsFor
    | StragglerNotice
    | QuorumNews
)
