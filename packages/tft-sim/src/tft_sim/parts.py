"""The parts of a simulated cluster that its processes and watches share.

Law of this file: what is common. Each module that sees more of the cluster extends this view.
"""

from __future__ import annotations

from typing import Protocol

from tft_coord.timeouts import Timeouts
from tft_sim.clock import VirtualClock
from tft_sim.config import ClusterConfig
from tft_sim.marks import Marks
from tft_sim.network import Network


class Parts(Protocol):
    """The common part of all views of a cluster."""

    @property
    def clock(self) -> VirtualClock: ...
    @property
    def config(self) -> ClusterConfig: ...
    @property
    def timeouts(self) -> Timeouts: ...
    @property
    def marks(self) -> Marks: ...
    @property
    def network(self) -> Network: ...
