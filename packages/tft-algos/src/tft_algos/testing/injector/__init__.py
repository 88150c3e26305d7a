"""Fault injection: fail, raise, hang, stop or kill one rank of one replica group, at one place of one step.

Law of this folder: the code under test does not know it.
"""

from __future__ import annotations

from tft_algos.testing.injector.fault import Action, Fault, FaultNotInjectedError, InjectedError, Place
from tft_algos.testing.injector.injector import EventInjector

__all__ = ["Action", "EventInjector", "Fault", "FaultNotInjectedError", "InjectedError", "Place"]
