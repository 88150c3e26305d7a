"""What a test of a training strategy needs: digests, stand-ins for what lies outside the process, faults on demand.

Law of this folder: public, and used by this project's own tests; nothing here runs in production.
"""

from __future__ import annotations

from tft_algos.testing.digest import digest
from tft_algos.testing.fakes import FakeGroup, ManualClock, MemoryTransport, ScriptedCoordinator, plan_of
from tft_algos.testing.injector import Action, EventInjector, Fault, InjectedError, NotStruck, Place

__all__ = [
    "Action",
    "EventInjector",
    "FakeGroup",
    "Fault",
    "InjectedError",
    "ManualClock",
    "MemoryTransport",
    "NotStruck",
    "Place",
    "ScriptedCoordinator",
    "digest",
    "plan_of",
]
