"""A context like those of `multiprocessing`, whose processes are threads. For tests.

Law of this file: names. The classes are those of `multiprocessing.dummy`.
"""

from __future__ import annotations

import multiprocessing.dummy as dummy
from typing import Any

__all__ = ["DummyContext", "get_context"]


class DummyContext:
    """A context whose processes are threads of this process.

    Args:
        method: ignored. It keeps the place of a start method.
    """

    Process = staticmethod(dummy.Process)
    Pipe = staticmethod(dummy.Pipe)
    Queue: Any = staticmethod(dummy.Queue)
    Event = staticmethod(dummy.Event)
    Lock = staticmethod(dummy.Lock)
    RLock = staticmethod(dummy.RLock)
    Semaphore = staticmethod(dummy.Semaphore)
    BoundedSemaphore = staticmethod(dummy.BoundedSemaphore)
    Condition = staticmethod(dummy.Condition)
    Manager = staticmethod(dummy.Manager)

    def __init__(self, method: object = None) -> None:
        self._method = method

    def get_context(self, method: object = None) -> DummyContext:
        """Return a context of threads."""
        return DummyContext(method)


def get_context(method: Any = None) -> DummyContext:
    """Return a context of threads."""
    return DummyContext(method)
