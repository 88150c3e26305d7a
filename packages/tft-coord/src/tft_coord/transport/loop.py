"""The one asyncio loop of a process, on its own thread.

All grpc.aio objects of a process share one completion queue inside grpc. Two loops that listen to it wake each other
needlessly and log errors about it. All users of a loop therefore take a share of the same one. The first share starts
the thread, and the last one to be given back ends it.

Law of this file: the thread and its shares; it knows nothing of what runs on it.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, final

from tft_coord.errors import CoordinationClosedError
from tft_coord.forks import Inheritance, let_go_in_child
from tft_coord.rpc import warn_of_handlers
from tft_coord.threads import join_within

logger = logging.getLogger(__name__)

THREAD_NAME = "tft-coord-loop"
TASKS_END_WITHIN_S = 1.0
ENDS_WITHIN_S = 10.0

_T = TypeVar("_T")


@final
class LoopShare:
    """A share of the process's loop, taken at construction.

    Args:
        owner: of this share, for messages.
        at_exit: ends the owner; called when the interpreter exits and the share was not given back.
    """

    def __init__(self, owner: str, at_exit: Callable[[], None]) -> None:
        self._owner = owner
        self.at_exit = at_exit
        self._thread: _LoopThread | None = _take(self)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop. Raises: CoordinationClosedError: this share was given back."""
        if self._thread is None or self.inherited:
            raise CoordinationClosedError(f"{self._owner} was shut down; make a new one")
        return self._thread.loop

    @property
    def inherited(self) -> bool:
        """Return whether this is a forked child's copy of its parent's share, without a thread behind it."""
        return self._thread is not None and self._thread.pid != os.getpid()

    @property
    def given_back(self) -> bool:
        """Return whether this share was given back."""
        return self._thread is None

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run the coroutine on the loop and wait for its result. Raises: CoordinationClosedError: this share was given
        back."""
        try:
            loop = self.loop
        except CoordinationClosedError:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    def run_last(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine that ends the owner, as `run` does; after some seconds stop waiting, and log a warning."""
        loop = self.loop
        try:
            asyncio.run_coroutine_threadsafe(coroutine, loop).result(ENDS_WITHIN_S)
        except concurrent.futures.TimeoutError:  # Python 3.10's is another class than TimeoutError
            logger.warning("%s did not shut down within %g s; no longer waiting for it", self._owner, ENDS_WITHIN_S)

    def give_back(self) -> None:
        """Give the share back; the last one ends the thread and waits for its end. A second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            _give_back(thread, self)


@final
class _LoopThread:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.shares: list[LoopShare] = []
        self.pid = os.getpid()
        let_go_in_child(self)
        self.thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            # Tasks that their owner did not wait for end here, so that no task outlives its loop.
            left = asyncio.all_tasks(self.loop)
            if left:
                # grpc's own tasks end by themselves after their connections; a cancelled one prints a traceback.
                _, left = self.loop.run_until_complete(asyncio.wait(left, timeout=TASKS_END_WITHIN_S))
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        join_within(self.thread)

    def forked(self) -> Inheritance:
        """Keep the loop and its tasks alive in a forked child: the end of either would wait for the parent's
        sockets."""
        return Inheritance(kept=[self, *asyncio.all_tasks(self.loop)])


_lock = threading.Lock()
_current: _LoopThread | None = None
_inherited: _LoopThread | None = None  # in a forked child, the parent's thread object
_hooked = False
_warned = False


def end_at_exit() -> None:
    """Register the end of unreturned shares for the interpreter's exit. Idempotent.

    The interpreter runs the functions that were registered last first. An owner whose own end needs its shares calls
    this before it registers that end.
    """
    global _hooked
    with _lock:
        if not _hooked:
            _hooked = True
            os.register_at_fork(before=_warn_once, after_in_child=_forget)
            atexit.register(_end_at_exit)


def _take(share: LoopShare) -> _LoopThread:
    global _current
    end_at_exit()
    with _lock:
        if _current is None:
            _current = _LoopThread()
        _current.shares.append(share)
        return _current


def _give_back(thread: _LoopThread, share: LoopShare) -> None:
    global _current
    with _lock:
        if thread.pid != os.getpid():
            return  # a forked child has a copy of the object, but not the thread
        thread.shares.remove(share)
        if thread.shares:
            return
        _current = None
        # The lock is held: the next share must not start a second loop beside one that is ending.
        thread.end()


def _forget() -> None:
    # In a forked child the thread does not exist, and another thread may have held the lock.
    global _current, _inherited, _lock
    _current, _inherited = None, _current  # it must not be destroyed before it was asked what the child inherits
    _lock = threading.Lock()


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warn_of_handlers()


def _end_at_exit() -> None:
    # These shares were not given back: a thread that runs into a dying interpreter crashes it. The youngest ends first,
    # because it may need an older one. The last of them ends the thread.
    thread = _current
    if thread is not None and thread.pid == os.getpid():
        for share in reversed(thread.shares.copy()):
            share.at_exit()
