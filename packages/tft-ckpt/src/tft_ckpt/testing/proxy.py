"""A TCP proxy in front of one HTTP source that injects faults into its answers.

Law of this file: it knows only the path of the last request of HTTP; positions count the answers' bytes, heads
included. Threads and sockets end with `close`.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, final
from urllib.parse import urlsplit

__all__ = ["Fault", "FaultyProxy"]

THREAD_NAME = "tft-ckpt-proxy"
_READ_BYTES = 64 << 10


@dataclass(slots=True)
class Fault:
    """One fault in an answer.

    Fields:
        on: the path's last word, "manifest" or "data".
        kind: flip a bit; cut this connection; kill the proxy, which then refuses every connection; stall until
            `release` is called.
        at: position in bytes. For flip and stall it counts in each answer, and any head ends before 1000. For cut and
            kill it counts over all answers on that path, on any connection.
        after: for flip: the position counts from the end of the first occurrence of this text in an answer. The text
            must arrive in one piece, as a head does.
        mask: for flip: the bits to invert.
        times: number of answers to damage; later ones pass unchanged.
        happened: set after the first fault.
    """

    on: Literal["manifest", "data"]
    kind: Literal["flip", "cut", "kill", "stall"]
    at: int = 1000
    times: int = 1_000_000
    after: bytes = b""
    mask: int = 0x10
    happened: threading.Event = field(default_factory=threading.Event)


@final
class FaultyProxy:
    """A replacement of a source, until closed.

    Fields:
        url: the URL for receivers, in place of the source's.
        passed_bytes: of all answers.
    """

    def __init__(self, target_url: str, *faults: Fault) -> None:
        parts = urlsplit(target_url)
        self._target = (parts.hostname or "", parts.port or 0)
        self._faults = faults
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._dead = False
        self._answered = {"manifest": 0, "data": 0}
        self.passed_bytes = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, name=THREAD_NAME, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def release(self) -> None:
        """End the stall of a fault."""
        self._released.set()

    def kill(self) -> None:
        """End every connection and refuse new ones."""
        with self._lock:
            self._dead = True
            for sock in (self._listener, *self._sockets):
                # shutdown and not close, because it wakes the thread that waits for the socket, which then closes it.
                _shut(sock)

    def close(self) -> None:
        """End all threads and sockets."""
        self.kill()
        self.release()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    client, _ = self._listener.accept()
                except OSError:
                    return
                thread = threading.Thread(target=self._forward, args=(client,), name=THREAD_NAME, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward(self, client: socket.socket) -> None:
        with client:
            try:
                server = socket.create_connection(self._target)
            except OSError:
                return
            with server:
                with self._lock:
                    if self._dead:
                        return
                    self._sockets |= {client, server}
                try:
                    self._relay(client, server)
                except OSError:
                    pass
                finally:
                    with self._lock:
                        self._sockets -= {client, server}

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        asked, position = "", 0
        starts: dict[int, int] = {}
        while True:
            for ready in select.select([client, server], [], [])[0]:
                data = ready.recv(_READ_BYTES)
                if not data:
                    return
                if ready is client:
                    asked, position = data.split(b" ", 2)[1].decode().rsplit("/", 1)[-1], 0
                    starts.clear()
                    server.sendall(data)
                    continue
                for index, fault in enumerate(self._faults):
                    if index not in starts and fault.after in data:
                        starts[index] = position + data.index(fault.after) + len(fault.after)
                damaged = self._damage(asked, position, bytearray(data), starts)
                client.sendall(damaged)
                position += len(data)
                with self._lock:
                    self.passed_bytes += len(damaged)
                if len(damaged) < len(data):
                    return

    def _damage(self, asked: str, position: int, data: bytearray, starts: Mapping[int, int]) -> bytearray:
        """Return the data to pass on of a piece of an answer. A shortened piece ends the connection.

        Args:
            asked: the path's last word.
            position: of the piece in the answer.
            data: the piece, which is changed in place.
            starts: the start of each fault's position in the answer, by its index; missing if not yet known.
        """
        with self._lock:
            together = self._answered.get(asked, 0)
            self._answered[asked] = together + len(data)
        for index, fault in enumerate(self._faults):
            if fault.on != asked or index not in starts:
                continue
            at = starts[index] + fault.at - position if fault.kind in ("flip", "stall") else fault.at - together
            if not 0 <= at < len(data) or fault.times == 0:
                continue
            fault.times -= 1
            if fault.kind == "flip":
                data[at] ^= fault.mask
            elif fault.kind == "stall":
                fault.happened.set()
                self._released.wait()
            else:
                if fault.kind == "kill":
                    self.kill()
                del data[at:]
            fault.happened.set()
        return data


def _shut(sock: socket.socket) -> None:
    # A socket that is no longer connected is the desired result.
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
