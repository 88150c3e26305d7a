"""The two pipes between the supervisor and a replica: events one way, orders the other.

The pipes carry JSON in frames. A replica whose supervisor is gone ends at once, so no process is orphaned.

Law of this file: the pipes and the thread that reads one of them. The content of the messages is in events.
"""

from __future__ import annotations

import os
import threading
from enum import Enum
from multiprocessing.connection import Connection
from typing import final

from tft_suite.demo.events import MESSAGE_BYTES_MAX, ReplicaEvent, encode
from tft_suite.errors import MessageError


@final
class ReplicaOrder(Enum):
    """An order of the supervisor to a replica."""

    HOLD = b"hold"
    STOP = b"stop"


@final
class Link:
    """The replica's end of the pipes. There is one for each process, and its thread ends with the process.

    Args:
        events: only this process writes it.
        orders: only this object reads it. Its end ends this process.
    """

    def __init__(self, *, events: Connection, orders: Connection) -> None:
        self._events = events
        self._orders = orders
        self._changed = threading.Condition()
        self._is_held = False
        self._is_stopped = False
        threading.Thread(target=self._listen, name="tft-demo-orders", daemon=True).start()

    def send(self, event: ReplicaEvent) -> None:
        """Send one event. The supervisor sets its `at_s` and `replica`."""
        self._events.send_bytes(encode(event))

    @property
    def is_held(self) -> bool:
        """Return whether this replica must not commit any more. It continues its steps, so that others can heal."""
        with self._changed:
            return self._is_held

    @property
    def is_stopped(self) -> bool:
        """Return whether this replica may end."""
        with self._changed:
            return self._is_stopped

    def wait_for_order(self) -> None:
        """Block until this replica is held or stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_held or self._is_stopped)

    def _listen(self) -> None:
        while True:
            try:
                order = ReplicaOrder(self._orders.recv_bytes(MESSAGE_BYTES_MAX))
            except (EOFError, OSError, ValueError):
                # The supervisor is gone, or sent an invalid order, so no other process needs this one.
                os._exit(1)
            with self._changed:
                self._is_held = self._is_held or order is ReplicaOrder.HOLD
                self._is_stopped = self._is_stopped or order is ReplicaOrder.STOP
                self._changed.notify_all()


def send_order(orders: Connection, order: ReplicaOrder) -> None:
    """Send an order to a replica. A replica that has just died is ignored, because its end is reported elsewhere."""
    try:
        orders.send_bytes(order.value)
    except (BrokenPipeError, ConnectionResetError):
        return


def receive_event(events: Connection) -> bytes | None:
    """Return the next message of a replica, which must be available. None: the replica closed its end.

    Raises: MessageError: the message is too long.
    """
    try:
        return events.recv_bytes(MESSAGE_BYTES_MAX)
    except EOFError:
        return None
    except OSError as error:
        raise MessageError(f"a replica sent a message of more than {MESSAGE_BYTES_MAX} bytes.") from error
