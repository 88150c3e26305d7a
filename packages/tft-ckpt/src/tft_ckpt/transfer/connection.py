"""One blocking HTTP connection with bounded waits.

The standard library's HTTP client reads directly into a given buffer, as a state needs, but supports only one timeout
per read. Here the socket below it is a small object that waits for three things at once: bytes, a deadline, and a stop
request from any thread.

Law of this file: sockets, waiting, and http.client; nothing about states.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import math
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from tft_ckpt.errors import CheckpointError, TransferTimeoutError, TransportClosedError
from tft_ckpt.forks import Inheritance, forks_wait, let_go_in_child

__all__ = ["Connection", "SourceSilentError", "StopSignal", "opened"]

LOOK_UP_THREAD_NAME = "tft-ckpt-name"

# The interval of calls to the caller's `cancelled` while no data arrives.
_CANCEL_POLL_S = 0.05
# The longest poll, because a longer one exceeds the system's range of milliseconds.
_POLL_S_MAX = 86_400.0
_READER_BYTES = 64 << 10
# The exceptions of a non-blocking socket that must wait. A TLS socket may have to read in order to write.
_READ_FIRST = (BlockingIOError, ssl.SSLWantReadError)
_WRITE_FIRST = (BlockingIOError, ssl.SSLWantWriteError)


class SourceSilentError(OSError):
    """The other side was silent for longer than allowed."""


@final
class StopSignal:
    """The end of a call: its deadline, a stop request from another thread, or its caller's `cancelled`.

    Call `close` when the call is over, because the object holds a pair of file descriptors.

    Args:
        timeout_s: from now.
        cancelled: the caller's callback. Only the thread that made this object calls it.
    """

    def __init__(self, timeout_s: float, cancelled: Callable[[], bool] | None) -> None:
        self.timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._cancelled = cancelled
        self._next_cancel_poll = 0.0
        self._owner = threading.get_ident()
        self._reason = ""
        self._lock = threading.Lock()
        # Readable after the first stop request, so that every wait of every thread sees it.
        self._reader, self._writer = os.pipe()
        self._open = True

    def stop(self, reason: str) -> None:
        """Make every wait raise TransportClosedError with this sentence. Any thread may call this. Only the first
        reason counts."""
        with self._lock:
            if self._open and not self._reason:
                self._reason = reason
                os.write(self._writer, b"x")

    def close(self) -> None:
        """Close the descriptors. No thread may wait any more."""
        with self._lock:
            self._open = False
            os.close(self._reader)
            os.close(self._writer)

    def remaining_s(self) -> float:
        """Return the remaining time, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def check(self) -> None:
        """Raise the error that is due by now, if any.

        Raises: TransportClosedError, TransferTimeoutError.
        """
        if self._reason:
            raise TransportClosedError(self._reason)
        now = time.monotonic()
        if self._cancelled is not None and now >= self._next_cancel_poll and threading.get_ident() == self._owner:
            self._next_cancel_poll = now + _CANCEL_POLL_S
            if self._cancelled():
                raise TransportClosedError("the transfer was cancelled by its caller")
        if now >= self._deadline:
            raise TransferTimeoutError(f"the timeout of {self.timeout_s:g} s expired", timeout_s=self.timeout_s)

    def wait(self, seconds: float, *, readable: int | None = None, writable: int | None = None) -> bool:
        """Wait for a descriptor, for at most this many seconds.

        Returns: whether it is ready.
        Raises: TransportClosedError, TransferTimeoutError.
        """
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        if readable is not None:
            poll.register(readable, select.POLLIN)
        if writable is not None:
            poll.register(writable, select.POLLOUT)
        until = time.monotonic() + seconds
        while True:
            self.check()
            left_s = min(until - time.monotonic(), self.remaining_s())
            poll_s = left_s if self._cancelled is None else min(left_s, _CANCEL_POLL_S)
            poll_s = min(max(0.0, poll_s), _POLL_S_MAX)
            if any(descriptor != self._reader for descriptor, _ in poll.poll(poll_s * 1e3)):
                return True
            if time.monotonic() >= until:
                self.check()
                return False


@final
class _Wire:
    """A non-blocking socket with the three methods that http.client needs of a blocking one."""

    def __init__(self, sock: socket.socket, stop: StopSignal) -> None:
        self._sock = sock
        self._stop = stop
        self.silence_s = 0.0
        self.deadline_s = math.inf
        self.read_bytes = 0

    def read_into(self, buffer: Any) -> int:
        # Also if data is always available. Otherwise an endless stream would never be interrupted.
        self._stop.check()
        self._check_time()
        while True:
            try:
                count = self._sock.recv_into(buffer)
                self.read_bytes += count
                return count
            except _READ_FIRST:
                self._wait(readable=True)
            except ssl.SSLWantWriteError:
                self._wait(readable=False)

    def sendall(self, data: Any) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except _WRITE_FIRST:
                self._wait(readable=False)
            except ssl.SSLWantReadError:
                self._wait(readable=True)

    def hand_over(self, stop: StopSignal, deadline_s: float) -> None:
        self._stop, self.deadline_s = stop, deadline_s

    def secure(self, context: ssl.SSLContext, host: str) -> None:
        """Continue over TLS, and verify that the other side is that host."""
        # The given socket is detached from then on. On errors it is closed together with the new one.
        with forks_wait():
            secured = context.wrap_socket(self._sock, server_hostname=host, do_handshake_on_connect=False)
            opened.add(secured)
        self._sock = secured
        while True:
            try:
                secured.do_handshake()
                return
            except ssl.SSLWantReadError:
                self._wait(readable=True)
            except ssl.SSLWantWriteError:
                self._wait(readable=False)

    def _check_time(self) -> None:
        if time.monotonic() >= self.deadline_s:
            raise SourceSilentError("it took too long, and there are other sources") from None

    def _wait(self, *, readable: bool) -> None:
        descriptor = self._sock.fileno()
        wait_s = min(self.silence_s, self.deadline_s - time.monotonic())
        if readable:
            is_ready, what = self._stop.wait(wait_s, readable=descriptor), "arrived"
        else:
            is_ready, what = self._stop.wait(wait_s, writable=descriptor), "was accepted"
        if not is_ready:
            self._check_time()
            raise SourceSilentError(f"no data {what} for {self.silence_s:g} s") from None

    def addresses(self) -> tuple[str, str]:
        return str(self._sock.getsockname()[0]), str(self._sock.getpeername()[0])

    def makefile(self, mode: str) -> io.BufferedReader:
        # Reads longer than the reader's own buffer bypass it, directly into the caller's memory.
        return io.BufferedReader(_Incoming(self), _READER_BYTES)

    def close(self) -> None:
        # http.client calls this as soon as a source announces its last answer, which is still to be read.
        pass

    def close_socket(self) -> None:
        self._sock.close()


@final
class _Incoming(io.RawIOBase):
    """The incoming data of a wire, as a file. Closing it leaves the wire open for the next answer."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._wire.read_into(buffer)


@final
class Connection:
    """One connection to a source, for one request after another.

    Args:
        host, port: of the source.
        silence_s: how long connecting and each wait for bytes may take.
        deadline_s: the deadline of all use of the connection, on the monotonic clock.
        stop: ends every wait.
        tls: secures the connection, and verifies the source's host name; None for plain HTTP.

    Raises: OSError: the connection failed, or the source did not prove to be that host. TransportClosedError,
    TransferTimeoutError.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        silence_s: float,
        stop: StopSignal,
        tls: ssl.SSLContext | None = None,
        deadline_s: float = math.inf,
    ) -> None:
        self._silence_s = silence_s
        self._stop = stop
        self._wire = _Wire(_connect(host, port, silence_s, stop), stop)
        self._wire.silence_s, self._wire.deadline_s = silence_s, deadline_s
        try:
            self._addresses = self._wire.addresses()
            if tls is not None:
                self._wire.secure(tls, host)
        except BaseException:
            self._wire.close_socket()
            raise
        self._http = http.client.HTTPConnection(host, port)
        self._http.sock = self._wire

    def get(self, path: str, headers: Mapping[str, str], *, patience_s: float = 0.0) -> http.client.HTTPResponse:
        """Send a request, and wait for the head of its answer. The previous answer must have been read to its end.

        Args:
            path: the path of the request.
            headers: the headers of the request.
            patience_s: how long the source may stay silent on purpose, in addition to silence_s.

        Raises: OSError, http.client.HTTPException: the connection was lost. TransportClosedError, TransferTimeoutError.
        """
        self._wire.silence_s = self._silence_s + patience_s
        self._http.request("GET", path, headers=dict(headers))
        response = self._http.getresponse()
        self._wire.silence_s = self._silence_s
        return response

    def hand_over(self, stop: StopSignal, deadline_s: float) -> None:
        """Continue with another stop signal and another deadline."""
        self._stop = stop
        self._wire.hand_over(stop, deadline_s)

    @property
    def read_bytes(self) -> int:
        """Return the number of bytes read so far, heads included."""
        return self._wire.read_bytes

    @property
    def addresses(self) -> tuple[str, str]:
        """Return this side's address and the other side's, without ports."""
        return self._addresses

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        self._http.close()
        self._wire.close_socket()


@final
class _Opened:
    """The sockets that this process has opened, for its forked children."""

    def __init__(self) -> None:
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def add(self, sock: socket.socket) -> None:
        """Record a socket. Call this inside `forks_wait`, together with the creation of the socket."""
        self._sockets.add(sock)
        let_go_in_child(self)

    def forked(self) -> Inheritance:
        """Release the parent's sockets in a forked child."""
        sockets = list(self._sockets)
        self._sockets.clear()
        return Inheritance([sock.fileno() for sock in sockets])


opened: Final = _Opened()


def _look_up(host: str, port: int, silence_s: float, stop: StopSignal) -> list[Any]:
    """Resolve a name as socket.getaddrinfo does, but with a bounded wait.

    The system's own look-up can't be interrupted, so it has a thread, which ends when the system gives up.
    """
    with contextlib.suppress(socket.gaierror):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    found: list[Any] = []
    ready, done = os.pipe()

    def look_up() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, ValueError) as error:
            found.append(error)
        finally:
            with contextlib.suppress(BrokenPipeError):  # no thread waits for the result any more
                # Written, not only closed, because a child that is forked in the meantime holds this end of the pipe
                # too.
                os.write(done, b"x")
            os.close(done)

    try:
        threading.Thread(target=look_up, name=LOOK_UP_THREAD_NAME, daemon=True).start()
        if not stop.wait(silence_s, readable=ready):
            raise SourceSilentError(f"resolving the name {host} timed out after {silence_s:g} s")
    finally:
        os.close(ready)
    if isinstance(found[0], Exception):
        raise found[0]
    addresses: list[Any] = found[0]
    return addresses


def _connect(host: str, port: int, silence_s: float, stop: StopSignal) -> socket.socket:
    failure: OSError = ConnectionRefusedError(f"{host} has no address")
    for family, kind, protocol, _, address in _look_up(host, port, silence_s, stop):
        with forks_wait():
            sock = socket.socket(family, kind, protocol)
            opened.add(sock)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                sock.connect(address)
            except BlockingIOError:
                if not stop.wait(silence_s, writable=sock.fileno()):
                    raise SourceSilentError(f"connecting timed out after {silence_s:g} s") from None
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code)) from None
            return sock
        except CheckpointError:
            # Before the next clause, because TransferTimeoutError is an OSError too.
            sock.close()
            raise
        except OSError as error:
            sock.close()
            failure = error
    raise failure
