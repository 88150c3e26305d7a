"""One blocking HTTP connection that ends when it should.

The standard library's HTTP client reads straight into a buffer that it is given, which is what a state needs, but it
knows only one time-out per read. Here the socket below it is a small object that waits for three things at once: bytes,
a deadline, and an order to stop that may come from any thread.

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

from tft_ckpt.errors import CheckpointError, Closed, DeadlinePassed
from tft_ckpt.forks import Inheritance, forks_wait, let_go_in_child

__all__ = ["Connection", "Silence", "StopSignal", "opened"]

LOOK_UP_THREAD_NAME = "tft-ckpt-name"

# How often a caller's own question whether to stop is asked while nothing arrives.
_ASK_S = 0.05
# A longer one is more milliseconds than the system can count.
_POLL_S_MAX = 86_400.0
_READER_BYTES = 64 << 10
# What a non-blocking socket says when it must be waited for; a secured one may have to read in order to write.
_READ_FIRST = (BlockingIOError, ssl.SSLWantReadError)
_WRITE_FIRST = (BlockingIOError, ssl.SSLWantWriteError)


class Silence(OSError):
    """The other side said nothing for longer than it may."""


@final
class StopSignal:
    """Why and when a call must end: its deadline, an order from another thread, or its caller's own word.

    Args:
        timeout_s: from now.
        cancelled: the caller's own question; asked by the thread that made this object only.
    Use `close` when the call is over: it holds a pair of file descriptors.
    """

    def __init__(self, timeout_s: float, cancelled: Callable[[], bool] | None) -> None:
        self.timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._cancelled = cancelled
        self._next_ask = 0.0
        self._owner = threading.get_ident()
        self._reason = ""
        self._lock = threading.Lock()
        # Readable from the first order on, so that every wait of every thread sees it.
        self._reader, self._writer = os.pipe()
        self._open = True

    def stop(self, reason: str) -> None:
        """Make every wait raise Closed with this sentence; from any thread; only the first reason counts."""
        with self._lock:
            if self._open and not self._reason:
                self._reason = reason
                os.write(self._writer, b"x")

    def close(self) -> None:
        """Give the descriptors back; nothing may wait any more."""
        with self._lock:
            self._open = False
            os.close(self._reader)
            os.close(self._writer)

    def remaining_s(self) -> float:
        """Time left, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def check(self) -> None:
        """Raise what must be raised by now.

        Raises: Closed, DeadlinePassed.
        """
        if self._reason:
            raise Closed(self._reason)
        now = time.monotonic()
        if self._cancelled is not None and now >= self._next_ask and threading.get_ident() == self._owner:
            self._next_ask = now + _ASK_S
            if self._cancelled():
                raise Closed("the transfer was cancelled by its caller")
        if now >= self._deadline:
            raise DeadlinePassed(f"{self.timeout_s:g} s were over", timeout_s=self.timeout_s)

    def wait(self, seconds: float, *, readable: int | None = None, writable: int | None = None) -> bool:
        """Wait for a descriptor, at most so many seconds.

        Returns: whether it is ready.
        Raises: Closed, DeadlinePassed.
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
            left = min(until - time.monotonic(), self.remaining_s())
            ask = left if self._cancelled is None else min(left, _ASK_S)
            ask = min(max(0.0, ask), _POLL_S_MAX)
            if any(descriptor != self._reader for descriptor, _ in poll.poll(ask * 1e3)):
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
        self.until_s = math.inf
        self.read_bytes = 0

    def read_into(self, buffer: Any) -> int:
        # Also where there is always something to read: else who talks without end would never be interrupted.
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

    def hand_over(self, stop: StopSignal, until_s: float) -> None:
        self._stop, self.until_s = stop, until_s

    def secure(self, context: ssl.SSLContext, host: str) -> None:
        """Go on over TLS, with whoever proves to be that host."""
        # The socket that was given is empty from then on; on errors it is closed with the new one.
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
        if time.monotonic() >= self.until_s:
            raise Silence("it takes longer than it may with others to turn to") from None

    def _wait(self, *, readable: bool) -> None:
        descriptor = self._sock.fileno()
        wait_s = min(self.silence_s, self.until_s - time.monotonic())
        if readable:
            is_ready, what = self._stop.wait(wait_s, readable=descriptor), "came"
        else:
            is_ready, what = self._stop.wait(wait_s, writable=descriptor), "was taken"
        if not is_ready:
            self._check_time()
            raise Silence(f"nothing {what} for {self.silence_s:g} s") from None

    def addresses(self) -> tuple[str, str]:
        return str(self._sock.getsockname()[0]), str(self._sock.getpeername()[0])

    def makefile(self, mode: str) -> io.BufferedReader:
        # Reads longer than the reader's own buffer go past it, straight into the caller's memory.
        return io.BufferedReader(_Incoming(self), _READER_BYTES)

    def close(self) -> None:
        # Called by http.client as soon as a source says that this answer is its last, which is still to be read.
        pass

    def shut(self) -> None:
        self._sock.close()


@final
class _Incoming(io.RawIOBase):
    """What comes over a wire, as a file; closing it leaves the wire open for the next answer."""

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
        until_s: when all must be over that is done with it, on the monotonic clock.
        stop: ends every wait.
        tls: secures the connection, and proves that the source is that host; None for plain HTTP.
    Raises: OSError: no connection came about, or the source did not prove to be that host. Closed, DeadlinePassed.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        silence_s: float,
        stop: StopSignal,
        tls: ssl.SSLContext | None = None,
        until_s: float = math.inf,
    ) -> None:
        self._silence_s = silence_s
        self._stop = stop
        self._wire = _Wire(_connect(host, port, silence_s, stop), stop)
        self._wire.silence_s, self._wire.until_s = silence_s, until_s
        try:
            self._addresses = self._wire.addresses()
            if tls is not None:
                self._wire.secure(tls, host)
        except BaseException:
            self._wire.shut()
            raise
        self._http = http.client.HTTPConnection(host, port)
        self._http.sock = self._wire

    def get(self, path: str, headers: Mapping[str, str], *, patience_s: float = 0.0) -> http.client.HTTPResponse:
        """Ask, and wait for the answer's head. The answer before must have been read to its end.

        Args:
            patience_s: how long the source may stay silent on purpose, on top of silence_s.
        Raises: OSError, http.client.HTTPException: the connection broke. Closed, DeadlinePassed.
        """
        self._wire.silence_s = self._silence_s + patience_s
        self._http.request("GET", path, headers=dict(headers))
        response = self._http.getresponse()
        self._wire.silence_s = self._silence_s
        return response

    def hand_over(self, stop: StopSignal, until_s: float) -> None:
        """Go on with another signal and another end."""
        self._stop = stop
        self._wire.hand_over(stop, until_s)

    @property
    def read_bytes(self) -> int:
        """All that was read so far, heads included."""
        return self._wire.read_bytes

    @property
    def addresses(self) -> tuple[str, str]:
        """This side's address and the other's, without ports."""
        return self._addresses

    def close(self) -> None:
        """Close it; again does nothing."""
        self._http.close()
        self._wire.shut()


@final
class _Opened:
    """The sockets that this process has opened, for its forked children."""

    def __init__(self) -> None:
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def add(self, sock: socket.socket) -> None:
        """Remember a socket; call it inside `forks_wait`, with what makes the socket."""
        self._sockets.add(sock)
        let_go_in_child(self)

    def forked(self) -> Inheritance:
        """In a child: they are the parent's."""
        sockets = list(self._sockets)
        self._sockets.clear()
        return Inheritance([sock.fileno() for sock in sockets])


opened: Final = _Opened()


def _look_up(host: str, port: int, silence_s: float, stop: StopSignal) -> list[Any]:
    """As socket.getaddrinfo, but for a name that nobody answers for it ends when it should.

    The system's own look-up can't be broken off, so it has a thread, which ends when the system gives up.
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
            with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
                # Written, not only closed: a child that is forked meanwhile holds this end of the pipe too.
                os.write(done, b"x")
            os.close(done)

    try:
        threading.Thread(target=look_up, name=LOOK_UP_THREAD_NAME, daemon=True).start()
        if not stop.wait(silence_s, readable=ready):
            raise Silence(f"the name {host} was not resolved in {silence_s:g} s")
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
                    raise Silence(f"no connection came about in {silence_s:g} s") from None
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code)) from None
            return sock
        except CheckpointError:
            # Before the next clause: a passed deadline is an OSError as well.
            sock.close()
            raise
        except OSError as error:
            sock.close()
            failure = error
    raise failure
