"""Signal handlers that are set for a limited time.

Law of this file: handlers, and the earlier ones. The caller decides the meaning of a signal.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any, final

from tft_algos.errors import ConfigError
from tft_pg.forks import Inheritance, let_go_in_child


@final
class SignalHandlers:
    """The signal handlers of one owner. They are set and restored on the main thread, which alone may do so."""

    def __init__(self) -> None:
        self._handlers: dict[int, tuple[Any, Any]] = {}  # the new handler and the earlier one
        let_go_in_child(self)

    def forked(self) -> Inheritance:
        """Restore the earlier handlers in a forked child, where the parent's handlers have no meaning."""
        self.give_back()
        return Inheritance()

    def handle(self, signals: Sequence[int], act: Callable[[str], None]) -> None:
        """Call `act` with the name of a received signal. A second call for the same signal replaces the first.

        Args:
            signals: signal numbers. Empty: SIGTERM.
            act: interrupts the main thread at any point, so it must not wait for a lock.
        Raises: ConfigError: a process can't handle one of the signals. Nothing has changed then.
        """
        for number in signals:
            if not isinstance(number, int) or number not in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                raise ConfigError(
                    f"{number!r} is not a signal that can be handled; give a signal such as signal.SIGTERM"
                )

        def handle(number: int, _frame: object) -> None:
            act(signal_name(number))

        for number in signals or (signal.SIGTERM,):
            before = signal.signal(number, handle)
            ours, first = self._handlers.get(number, (None, None))
            self._handlers[number] = handle, first if before is ours else before

    def give_back(self) -> None:
        """Restore the earlier handlers. On a thread other than the main thread, this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._handlers:
            number, (ours, before) = self._handlers.popitem()
            if signal.getsignal(number) is ours:
                signal.signal(number, before if before is not None else signal.SIG_DFL)


def signal_name(number: int) -> str:
    """Return the name of any signal. Signals between SIGRTMIN and SIGRTMAX have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
