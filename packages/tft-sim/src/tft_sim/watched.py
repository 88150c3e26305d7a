"""The cluster, as the watches see it.

Law of this file: what a watch may read; a watch changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from tft_sim.lighthouse_process import LighthouseProcess
from tft_sim.manager_process import Replica
from tft_sim.parts import Parts


class World(Parts, Protocol):
    """The cluster, as a watch sees it."""

    @property
    def wall_ms(self) -> int: ...
    @property
    def replicas(self) -> Mapping[str, Replica]: ...
    @property
    def lives(self) -> Sequence[Replica]: ...
    @property
    def lighthouse(self) -> object: ...
    @property
    def our_lighthouse(self) -> LighthouseProcess: ...
    @property
    def standby(self) -> object: ...
    @property
    def torchft(self) -> Collection[str]: ...
    @property
    def is_foreign(self) -> bool: ...
    @property
    def deciding(self) -> str: ...
