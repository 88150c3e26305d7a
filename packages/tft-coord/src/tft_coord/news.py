"""The messages that a rank gets without a request.

Law of this file: one name for all of them.
"""

from __future__ import annotations

from typing import TypeAlias

from tft_coord.core.stragglers import StragglerNews
from tft_coord.core.types import KillOrder, LeaveRequest, LossNotice, NewcomerAsks, QuorumNews, Released, WaitsFor
from tft_coord.errors import ReplicaGroupLostError

News: TypeAlias = (
    LossNotice
    | NewcomerAsks
    | ReplicaGroupLostError
    | LeaveRequest
    | Released
    | KillOrder
    | WaitsFor
    | StragglerNews
    | QuorumNews
)
