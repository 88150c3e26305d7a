"""Tools for tests of a training strategy: digests, fakes for everything outside the process, and injected faults.

Law of this folder: public, and used by this project's own tests. Nothing here runs in production.
"""

from __future__ import annotations

from tft_algos.testing.digest import digest
from tft_algos.testing.fakes import FakeGroup, ManualClock, MemoryTransport, ScriptedCoordinator, plan_of
from tft_algos.testing.injector import Action, EventInjector, Fault, FaultNotInjectedError, InjectedError, Place

__all__ = [
    "Action",
    "EventInjector",
    "FakeGroup",
    "Fault",
    "FaultNotInjectedError",
    "InjectedError",
    "ManualClock",
    "MemoryTransport",
    "Place",
    "ScriptedCoordinator",
    "digest",
    "plan_of",
]
