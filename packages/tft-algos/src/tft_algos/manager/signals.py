"""Signals that a process is sent, handled for as long as somebody wants it.

Law of this file: handlers and those that were there before; what a signal means is the caller's.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any, final

from tft_algos.errors import SettingError
from tft_pg.forks import Inheritance, let_go_in_child


@final
class SignalHandlers:
    """Handlers of one owner, set and given back on the main thread, which alone may."""

    def __init__(self) -> None:
        self._handlers: dict[int, tuple[Any, Any]] = {}  # ours, and the one before
        let_go_in_child(self)

    def forked(self) -> Inheritance:
        """In a child: what a signal means to its parent it does not mean to it."""
        self.give_back()
        return Inheritance()

    def handle(self, signals: Sequence[int], act: Callable[[str], None]) -> None:
        """Have `act` called with the name of the signal; a second call for the same signal replaces the first.

        Args:
            signals: by number; none: SIGTERM.
            act: runs in the midst of whatever the main thread does, so it must not wait for a lock.
        Raises: SettingError: one of them is no signal that a process can handle; nothing has changed then.
        """
        for number in signals:
            if not isinstance(number, int) or number not in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                raise SettingError(f"{number!r} is no signal that can be handled; give some, such as signal.SIGTERM")

        def handle(number: int, _frame: object) -> None:
            act(signal_name(number))

        for number in signals or (signal.SIGTERM,):
            before = signal.signal(number, handle)
            ours, first = self._handlers.get(number, (None, None))
            self._handlers[number] = handle, first if before is ours else before

    def give_back(self) -> None:
        """Put back the handlers that were there before; on another thread than the main one this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._handlers:
            number, (ours, before) = self._handlers.popitem()
            if signal.getsignal(number) is ours:
                signal.signal(number, before if before is not None else signal.SIG_DFL)


def signal_name(number: int) -> str:
    """Of any signal; those between SIGRTMIN and SIGRTMAX have none of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
