"""Thousands of clients of a lighthouse in one process: gRPC by hand over plain sockets.

A client library would cost more than the measured server, on the same two cores. So requests are encoded before the
measured time starts. Of the answers only the bytes that distinguish messages are parsed. Every byte in both directions
is counted.

Law of this file: HTTP/2 as a gRPC server needs it, connections and their bytes. The rows own the content of messages.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, final

SPARE_DESCRIPTORS: Final = 200
PATIENCE_S: Final = 60.0

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_NO_ERROR: Final = bytes(4)
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_MOST: Final = 2**31 - 1
_FRAME_BYTES: Final = 16_384
_AT_ONCE: Final = 1 << 20
_INITIAL_WINDOW: Final = 4  # id of the setting


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _text(value: str) -> bytes:
    """Encode an HPACK string literally. It has at most 126 bytes."""
    assert len(value) < 127
    return bytes((len(value),)) + value.encode()


def _headers(method: str, timeout: str = "") -> bytes:
    """Encode the headers of a gRPC call. The server remembers none of them between calls."""
    plain = {"te": "trailers", "content-type": "application/grpc"}
    if timeout:
        plain["grpc-timeout"] = timeout
    return (
        b"\x83\x86"  # POST, http
        + b"\x04"
        + _text(method)
        + b"\x01"
        + _text("lighthouse")
        + b"".join(b"\x00" + _text(name) + _text(value) for name, value in plain.items())
    )


class Writes(Protocol):
    """The one method of a socket that a connection needs."""

    def sendall(self, words: bytes, /) -> object: ...


@final
class Connection:
    """One client's connection: a lasting stream, or unary calls one after the other.

    Args:
        sock: a socket connected to the server, or another receiver of its bytes.
    """

    def __init__(self, sock: Writes) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self.messages: list[bytes] = []  # messages of the stream that were not taken yet
        self.answers = 0  # messages on the stream, or ended unary calls
        self.on_message: Callable[[bytes], object] = self.messages.append  # receives each message of the stream
        # Only this many first bytes of a longer message are read and given to `on_message`. None: all.
        self.keep_bytes: int | None = None
        self._last_stream = -1
        self._unary = False
        self._unread = bytearray()
        self._skip = 0  # remaining bytes of a unary answer, which are not parsed
        self._message = bytearray()  # an incomplete message of the stream
        self._head = b""  # the head of an incomplete long message
        self._left = 0  # remaining bytes of the long message
        self._sock = sock
        settings = struct.pack(">HI", _INITIAL_WINDOW, _MOST)
        window = struct.pack(">I", _MOST - 65_535)
        self._write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW, 0, 0, window))

    def open_stream(self, method: str, message: bytes) -> None:
        """Begin the stream, with its first message."""
        self._unary, self._last_stream = False, 1
        self._write(_frame(_HEADERS, _END_HEADERS, 1, _headers(method)) + self.framed(message))

    def framed(self, message: bytes) -> bytes:
        """Return a message on the stream as bytes on the wire."""
        body = b"\0" + struct.pack(">I", len(message)) + message
        parts = (body[at : at + _FRAME_BYTES] for at in range(0, len(body), _FRAME_BYTES))
        return b"".join(_frame(_DATA, 0, self._last_stream, part) for part in parts)

    def ping(self) -> bytes:
        """Return the ping that grpc sends to check that the server is there."""
        return _frame(_PING, 0, 0, b"\0" * 8)

    def unary(self, method: str, message: bytes, timeout: str = "") -> bytes:
        """Return the next call as bytes on the wire. The timeout has gRPC's format, such as 50m for milliseconds."""
        self._unary = True
        self._last_stream += 2
        body = b"\0" + struct.pack(">I", len(message)) + message
        head = _frame(_HEADERS, _END_HEADERS, self._last_stream, _headers(method, timeout))
        return head + _frame(_DATA, _END_STREAM, self._last_stream, body)

    def send(self, words: bytes) -> None:
        """Send the bytes that `framed` or `unary` returned."""
        self._write(words)

    def _write(self, words: bytes) -> None:
        self._sock.sendall(words)
        self.sent_bytes += len(words)

    def hear(self, data: bytes | memoryview) -> None:
        """Process received bytes. Raises: RuntimeError: the server ended the call or the connection."""
        self.received_bytes += len(data)
        if self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            self._long_message_came(skipped)
            data = data[skipped:]
        unread = self._unread
        unread += data
        at = 0
        while len(unread) - at >= 9:
            length = int.from_bytes(unread[at : at + 3], "big")
            kind, flags = unread[at + 3], unread[at + 4]
            if kind == _DATA and (self._unary or 0 < length <= self._left):
                here = min(length, len(unread) - at - 9)
                self._skip = length - here
                self._long_message_came(here)
                at += 9 + here
                continue
            if len(unread) - at - 9 < length:
                break
            self._frame_came(kind, flags, bytes(unread[at + 9 : at + 9 + length]))
            at += 9 + length
        del unread[:at]

    def _frame_came(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == _DATA:
            self._data_came(payload)
        elif kind == _HEADERS and flags & _END_STREAM:
            if not self._unary:
                raise RuntimeError("the server ended a stream")
            self.answers += 1
        elif kind == _SETTINGS and not flags & _ACK:
            self._write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._write(_frame(_PING, _ACK, 0, payload))
        elif kind == _RESET or (kind == _GOAWAY and payload[4:8] != _NO_ERROR):
            # A server says GOAWAY without an error to a connection of its greatest age, whose open streams continue.
            raise RuntimeError(f"the server ended a connection: {payload!r}")

    def _data_came(self, payload: bytes) -> None:
        if self._left:
            rest = min(self._left, len(payload))
            self._long_message_came(rest)
            payload = payload[rest:]
        self._message += payload
        while len(self._message) >= 5:
            end = 5 + int.from_bytes(self._message[1:5], "big")
            if len(self._message) < end:
                keep = self.keep_bytes
                if keep is not None and keep < end - 5 and keep <= len(self._message) - 5:
                    self._head, self._left = bytes(self._message[5 : 5 + keep]), end - len(self._message)
                    self._message.clear()
                return
            message = bytes(self._message[5:end])
            del self._message[:end]
            self._message_came(message[: self.keep_bytes])

    def _long_message_came(self, num_bytes: int) -> None:
        """Count the received bytes of a message that is not kept whole. Bytes of a unary answer do not count."""
        if self._left and num_bytes:
            self._left -= num_bytes
            if not self._left:
                self._message_came(self._head)

    def _message_came(self, message: bytes) -> None:
        self.answers += 1
        self.on_message(message)


@final
class Swarm:
    """Clients that live until the block ends.

    Args:
        port: of the server on this machine.
        number: of connections.
    """

    def __init__(self, port: int, number: int) -> None:
        self.connections: list[Connection] = []
        self._port = port
        self._sockets: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._buffer = bytearray(_AT_ONCE)
        try:
            for _ in range(number):
                self.connect()
        except BaseException:
            self.close()
            raise

    def connect(self) -> Connection:
        """Open one more connection, the last of `connections`."""
        sock = socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE_S)
        self._sockets.append(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock)
        self.connections.append(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        return connection

    def close(self) -> None:
        """End all connections."""
        for sock in self._sockets:
            sock.close()
        self._selector.close()

    @property
    def bytes_so_far(self) -> int:
        """Return the number of bytes sent and received, frames included."""
        return sum(connection.sent_bytes + connection.received_bytes for connection in self.connections)

    def hear_for(self, seconds: float) -> None:
        """Process received bytes for that time."""
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            self._hear(left)

    def hear_until(self, done: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
        """Process received bytes until `done` holds. Raises: RuntimeError: it took too long, or the server hung up."""
        end = time.perf_counter() + within_s
        while not done():
            if time.perf_counter() > end:
                raise RuntimeError(
                    "timed out waiting for answers of the lighthouse; run tft-lighthouse by hand to see why"
                )
            self._hear(1.0)

    def exchange(self, words: Sequence[bytes], within_s: float = PATIENCE_S) -> float:
        """Send each client's request, and wait until all are answered once.

        Returns: seconds from the first request to the last answer.
        """
        before = sum(connection.answers for connection in self.connections)
        began = time.perf_counter()
        for connection, request in zip(self.connections, words, strict=True):
            connection.send(request)
        wanted = before + len(words)
        self.hear_until(lambda: sum(connection.answers for connection in self.connections) >= wanted, within_s)
        return time.perf_counter() - began

    def _hear(self, patience_s: float) -> None:
        for key, _ in self._selector.select(patience_s):
            connection: Connection = key.data
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            try:
                count = sock.recv_into(self._buffer)
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    continue
                raise RuntimeError(f"a connection broke: {error}") from error
            if not count:
                raise RuntimeError("the server closed a connection")
            connection.hear(memoryview(self._buffer)[:count])


@contextlib.contextmanager
def swarm(port: int, number: int) -> Iterator[Swarm]:
    """Yield that many clients while the block lasts. Raises: RuntimeError: this machine allows fewer sockets."""
    allow_descriptors(number + SPARE_DESCRIPTORS)
    clients = Swarm(port, number)
    try:
        yield clients
    finally:
        clients.close()


def allow_descriptors(number: int) -> None:
    """Let this process and its children open that many files. Raises: RuntimeError: the machine does not allow it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < number:
        if hard != resource.RLIM_INFINITY and hard < number:
            raise RuntimeError(f"{number} open files are needed and {hard} allowed; raise it with `ulimit -Hn`")
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
