"""The server's event loop: the routes, the connections, and their end.

The import of aiohttp takes a tenth of a second. So the server's thread imports this file, and a trainer that already
has its port continues in the meantime.

Law of this file: aiohttp and one event loop; only the loop's thread calls this code. The snapshot store decides
the answers, and this file sends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NoReturn, final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from tft_ckpt.errors import ConfigError, StateUnavailableError
from tft_ckpt.key import StateKey
from tft_ckpt.state.snapshot import Snapshot
from tft_ckpt.transfer.address import parse_url
from tft_ckpt.transfer.peers import Tracker
from tft_ckpt.transfer.rate_limiter import RateLimiter
from tft_ckpt.transfer.relay import Relay
from tft_ckpt.transfer.routes import (
    CHUNKS_ROUTE,
    DATA_ROUTE,
    HAVE_COUNT_HEADER,
    KEY_HEADER,
    MANIFEST_ROUTE,
    PARTIAL_HEADER,
    RELAY_HEADER,
    URL_BYTES_MAX,
    WAIT_HEADER,
    WAIT_MS_MAX,
    Token,
    admits,
    chunks_body,
)
from tft_ckpt.transfer.snapshot_store import Found, Refused, SnapshotStore
from tft_ckpt.transfer.web_server import WebServer

if TYPE_CHECKING:
    from tft_ckpt.transfer.tls import ContextSource

__all__ = ["App"]

# One write to a socket: long enough that the loop's overhead is small, and short enough that readers take turns.
_PIECE_BYTES = 1 << 20
# The silence watch does not see encrypted data in flight, so pieces are shorter with TLS.
_PIECE_BYTES_TLS = 256 << 10
# The data that a stalled reader can leave in a transport's memory.
_WAITING_BYTES = 128 << 10
# The data that the kernel accepts before the reader's side has room for it. With a quarter of it, a fast reader loses a
# quarter of its rate, because the two sides then wait for each other.
_UNSENT_BYTES = 1 << 20
# aiohttp waits until the socket has taken everything only after writes longer than this. So a shorter last piece is
# sent from a copy, because the buffer may be reused as soon as the handler returns.
_UNDRAINED_BYTES = 64 << 10
# Chunks of a relay that arrive within this time are announced in one answer.
_GATHER_S = 0.005

# The interval of checks for disconnected readers that held a state.
_POLL_S = 0.01

_NO_LINGERING = struct.pack("ii", 1, 0)

_log = logging.getLogger("tft_ckpt.transfer")


@final
class App:
    """An application that serves one snapshot store from `serve` to `stop`.

    Args:
        loop: the app's event loop; all methods run there.
        listener: bound and listening; closed at the end.
        store, lock: of the states, shared with the trainer's side, which takes the lock too.
        token: the token that readers must present, or None.
        silence_s: the limit for readers that take no data and for connections without requests. They are disconnected
            after it.
        send_bytes_per_s: the rate limit for all readers together, or None.
        tls: returns the TLS context of the next connection, or None for plain HTTP.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        *,
        store: SnapshotStore,
        lock: threading.Lock,
        token: Token,
        silence_s: float,
        send_bytes_per_s: float | None,
        tls: ContextSource | None,
    ) -> None:
        self._loop = loop
        self._store = store
        self._lock = lock
        self._token = token
        self._silence_s = silence_s
        self._rate_limiter = None if send_bytes_per_s is None else RateLimiter(send_bytes_per_s)
        self._tls = tls
        self._server = WebServer(loop, listener, log=_log, tls=tls, authentication_timeout_s=silence_s)
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._checksum_tasks: dict[Snapshot, asyncio.Task[None]] = {}
        self._used_s = loop.time()  # the time of the last request for the published state, or of its last reader's end
        self._relays: dict[StateKey, Relay] = {}
        self._gathering = False
        self._tracker = Tracker()
        self._transports: dict[Snapshot | Relay, set[asyncio.Transport]] = {}
        self._holding: dict[asyncio.Transport, Snapshot] = {}  # until the connection ends, or holds another state
        self._is_release_scheduled = False
        self._answering: set[asyncio.BaseTransport | None] = set()
        self._answered: set[asyncio.BaseTransport | None] = set()  # since the last check for idle connections

    def stop(self) -> None:
        """Close the port and every connection, so that `serve` ends."""
        self._stop.set()

    async def serve(self) -> None:
        """Answer readers until `stop`. Raises: the error that prevents the start; the port is closed then."""
        app = web.Application(middlewares=[self._track_connections(), self._check_token()])
        app.router.add_get(MANIFEST_ROUTE, self._manifest, allow_head=False)
        app.router.add_get(DATA_ROUTE, self._data, allow_head=False)
        app.router.add_get(CHUNKS_ROUTE, self._chunks, allow_head=False)
        await self._server.start(app)
        self._loop.create_task(self._disconnect_idle(), name="tft-ckpt-idle")
        await self._stop.wait()
        try:
            with self._lock:
                held = self._store.clear()
            self.disconnect_readers([*held, *self._relays.values()])
            self.wake()
        finally:
            await self._server.close()

    async def _disconnect_idle(self) -> None:
        """Disconnect connections without requests for silence_s, because readers need their descriptors."""
        idle_since: dict[asyncio.Transport, float] = {}
        while True:
            await asyncio.sleep(self._silence_s / 2)
            now, answered = self._loop.time(), self._answered
            self._answered = set()
            idle_since = {
                transport: now if transport in answered else idle_since.get(transport, now)
                for transport in self._server.transports
                if transport not in self._answering
            }
            for transport, since in idle_since.items():
                if now - since >= self._silence_s:
                    _disconnect(transport)
            if now - self._used_s >= self._silence_s:
                with self._lock:
                    self._store.withdraw()

    def wake(self) -> None:
        """Wake the waiting requests, so that they check again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def disconnect_readers(self, sources: Iterable[Snapshot | Relay]) -> None:
        """Disconnect the readers of these sources."""
        for source in sources:
            holding = {transport for transport, snapshot in self._holding.items() if snapshot is source}
            for transport in holding | self._transports.get(source, set()):
                _disconnect(transport)

    def published(self, snapshot: Snapshot, expected: bool) -> None:
        """Announce a published snapshot. `expected`: whether a receiver will request it."""
        self._used_s = self._loop.time()
        if expected:
            self._start_checksums(snapshot)
        self.wake()

    def relay_began(self, relay: Relay) -> None:
        """Register a relay: this process receives a state, and readers may have its finished chunks."""
        self._relays[relay.key] = relay
        self.wake()

    def relay_has(self) -> None:
        """Announce a new chunk to waiting readers."""
        if not self._gathering:
            self._gathering = True
            self._loop.call_later(_GATHER_S, self._announce_chunks)

    def _announce_chunks(self) -> None:
        self._gathering = False
        self.wake()

    def relay_ended(self, relay: Relay) -> None:
        """Remove a relay and disconnect its readers."""
        if self._relays.get(relay.key) is relay:
            del self._relays[relay.key]
        self.disconnect_readers([relay])
        self.wake()

    def _start_checksums(self, snapshot: Snapshot) -> None:
        if snapshot.manifest_bytes is not None or snapshot in self._checksum_tasks or self._stop.is_set():
            return
        with self._lock:
            leased = self._store.lease(snapshot)
        if leased:
            self._checksum_tasks[snapshot] = self._loop.create_task(self._checksum(snapshot), name="tft-ckpt-sum")

    async def _checksum(self, snapshot: Snapshot) -> None:
        try:
            while not snapshot.checksum_next_chunk():
                await asyncio.sleep(0)
                with self._lock:
                    if not self._store.is_wanted(snapshot):
                        break
        finally:
            del self._checksum_tasks[snapshot]
            self._release(snapshot)
            self.wake()

    def _hold(self, transport: asyncio.BaseTransport | None, snapshot: Snapshot) -> None:
        """Let a reader finish a state over several requests. The caller holds the lock."""
        if not isinstance(transport, asyncio.Transport):  # the reader has disconnected
            return
        held = self._holding.get(transport)
        if held is not snapshot and self._store.lease(snapshot):
            self._holding[transport] = snapshot
            if held is not None:
                self._store.release(held)

    def _release_ended(self) -> None:
        """Release the states of ended connections soon, because the trainer may need the memory."""
        self._is_release_scheduled = False
        ended = [transport for transport in self._holding if transport.is_closing()]
        for transport in ended:
            self._release(self._holding.pop(transport))
        if any(transport not in self._answering for transport in self._holding):
            self._is_release_scheduled = True
            self._loop.call_later(_POLL_S, self._release_ended)

    def _release(self, snapshot: Snapshot) -> None:
        self._used_s = self._loop.time()
        with self._lock:
            self._store.release(snapshot)

    # ---- handlers ----

    def _track_connections(self) -> Middleware:
        @web.middleware
        async def track(request: web.Request, handler: Handler) -> web.StreamResponse:
            transport = request.transport
            self._answering.add(transport)
            try:
                return await handler(request)
            finally:
                self._answering.discard(transport)
                self._answered.add(transport)
                if transport in self._holding and not self._is_release_scheduled:
                    self._release_ended()

        return track

    def _check_token(self) -> Middleware:
        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            if not admits(self._token, request.headers.get("authorization", "")):
                self._server.refused(request.remote)
                refusal = web.HTTPUnauthorized(
                    text="this job's token is missing or wrong; give every process of the job the same one",
                    headers={"www-authenticate": "Bearer"},
                )
                refusal.force_close()
                raise refusal
            self._server.authenticated(request.transport)
            return await handler(request)

        return check

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        key, deadline = _key(request), self._loop.time() + _wait_s(request)
        self._record_requester(request, key)
        while True:
            changed = self._changed
            found = self._found(request, key)
            if found is not None and found.manifest_bytes is not None:
                self._record_relay(request, key)
                headers = {PARTIAL_HEADER: "1"} if isinstance(found, Relay) else None
                return web.Response(body=found.manifest_bytes, content_type="application/octet-stream", headers=headers)
            if isinstance(found, Snapshot):
                self._start_checksums(found)
            await self._wait_for_change(changed, key, deadline)

    async def _chunks(self, request: web.Request) -> web.StreamResponse:
        key, deadline = _key(request), self._loop.time() + _wait_s(request)
        known = _number(request, HAVE_COUNT_HEADER)
        relayed = False
        self._record_requester(request, key)
        while True:
            changed = self._changed
            found = self._found(request, key)
            if found is None and relayed:
                raise web.HTTPServiceUnavailable(text=f"this process no longer receives state {key}; ask another one")
            if found is not None:
                peers = self._tracker.peers(key, self._record_relay(request, key), self._loop.time())
                have, num_have = found.bitmap() if isinstance(found, Relay) else _full_bitmap(found.layout.num_chunks)
                if num_have != known or self._loop.time() >= deadline:
                    return web.Response(body=chunks_body(have, peers), content_type="application/json")
                relayed = isinstance(found, Relay)
            try:
                await self._wait_for_change(changed, key, deadline)
            except web.HTTPServiceUnavailable:
                if found is None:
                    raise

    def _record_requester(self, request: web.Request, key: StateKey) -> None:
        """Count a named reader, also if the state is not here yet, because the reader may be gone by then."""
        url = request.headers.get(RELAY_HEADER)
        if url is not None:
            with self._lock:
                self._store.record_request(key, url[:URL_BYTES_MAX])

    def _record_relay(self, request: web.Request, key: StateKey) -> str | None:
        """Record the requesting process as a relay, if it is one. Returns: its URL."""
        url = request.headers.get(RELAY_HEADER)
        if url is not None:
            try:
                if len(url) > URL_BYTES_MAX:
                    _bad_request(f"{RELAY_HEADER} has {len(url)} characters, above the limit of {URL_BYTES_MAX}")
                parse_url(url)
            except StateUnavailableError as error:
                _bad_request(f"{RELAY_HEADER}: {error}")
            with self._lock:
                here = self._store.keys
            self._tracker.keep_only({*self._relays, *here})
            self._tracker.record(key, url, self._loop.time())
        return url

    async def _data(self, request: web.Request) -> web.StreamResponse:
        key, deadline = _key(request), self._loop.time() + _wait_s(request)
        while True:
            changed = self._changed
            with self._lock:
                found = self._look_up(key)
                if isinstance(found, Snapshot):
                    # Under the same lock as the look-up. Otherwise the trainer could take the buffer in between.
                    self._store.lease(found)
                    self._hold(request.transport, found)
            if found is not None:
                break
            await self._wait_for_change(changed, key, deadline)
        if isinstance(found, Relay):
            return await self._send_relayed(request, found)
        try:
            return await self._send(request, found, _range(request, found.layout.data_bytes))
        finally:
            self._release(found)

    async def _send_relayed(self, request: web.Request, relay: Relay) -> web.StreamResponse:
        span = _range(request, relay.layout.data_bytes)
        if not relay.lease(*span):
            raise web.HTTPServiceUnavailable(
                text=f"bytes {span[0]} to {span[1]} of state {relay.key} are not all available here; request "
                "only available chunks"
            )
        try:
            return await self._send(request, relay, span)
        finally:
            relay.release()

    def _found(self, request: web.Request, key: StateKey) -> Snapshot | Relay | None:
        """Return this process's source of the state, or None if the state may still come. Otherwise raise the
        answer.
        """
        with self._lock:
            found = self._look_up(key)
            if isinstance(found, Snapshot):
                self._hold(request.transport, found)
            return found

    def _look_up(self, key: StateKey) -> Snapshot | Relay | None:
        """Do the same under the lock, without holding the state."""
        if self._stop.is_set():
            raise web.HTTPServiceUnavailable(text="this source is shutting down; ask another source")
        answer = self._store.look_up(key)
        if isinstance(answer, Found):
            self._used_s = self._loop.time()
            return answer.snapshot
        if key in self._relays:
            return self._relays[key]
        match answer:
            case Refused(offered, sentence) if offered == key:
                raise web.HTTPGone(text=sentence, headers={KEY_HEADER: str(offered)})
            case Refused(offered, sentence):
                raise web.HTTPConflict(text=sentence, headers={KEY_HEADER: str(offered)})
            case _:
                return None

    async def _wait_for_change(self, changed: asyncio.Event, key: StateKey, deadline: float) -> None:
        try:
            await asyncio.wait_for(changed.wait(), max(0.0, deadline - self._loop.time()))
        except asyncio.TimeoutError:
            raise web.HTTPServiceUnavailable(text=f"state {key} is not available yet; ask again") from None

    async def _send(self, request: web.Request, source: Snapshot | Relay, span: tuple[int, int]) -> web.StreamResponse:
        start, stop = span
        ranged = "range" in request.headers
        response = web.StreamResponse(status=206 if ranged else 200)
        response.content_type = "application/octet-stream"
        response.content_length = stop - start
        response.headers["accept-ranges"] = "bytes"
        if ranged:
            response.headers["content-range"] = f"bytes {start}-{stop - 1}/{source.layout.data_bytes}"
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the reader has disconnected")
        assert isinstance(transport, asyncio.Transport), transport
        # A write returns only when the socket has taken all of it, and then no other code uses the memory. With TLS it
        # returns when all of it is encrypted, and asyncio treats a limit of zero as always exceeded.
        if self._tls is None:
            transport.set_write_buffer_limits(0)
        else:
            transport.set_write_buffer_limits(high=1, low=0)
        _bound_unsent(transport)
        watch = _SilenceWatch(self._loop, transport, self._silence_s)
        self._transports.setdefault(source, set()).add(transport)
        try:
            await response.prepare(request)
            await self._write(response, transport, source, span, watch)
            await response.write_eof()
        except ConnectionResetError:
            # aiohttp also sees the closed connection, and goes on to the next one.
            _log.info("a reader of state %s disconnected before it had all of it", source.key)
        finally:
            watch.end()
            self._transports[source].discard(transport)
            if not self._transports[source]:
                del self._transports[source]
        return response

    async def _write(
        self,
        response: web.StreamResponse,
        transport: asyncio.Transport,
        source: Snapshot | Relay,
        span: tuple[int, int],
        watch: _SilenceWatch,
    ) -> None:
        length = _PIECE_BYTES if self._tls is None else _PIECE_BYTES_TLS
        if self._rate_limiter is not None:
            length = min(length, self._rate_limiter.piece_bytes)
        for at in range(span[0], span[1], length):
            end = min(at + length, span[1])
            if self._rate_limiter is not None:
                wait_s = self._rate_limiter.take(end - at, self._loop.time())
                if wait_s > 0:
                    with watch.paused():
                        await asyncio.sleep(wait_s)
            for piece in _joined_writes(source.views(at, end)):
                await self._write_piece(response, transport, piece, watch)

    async def _write_piece(
        self,
        response: web.StreamResponse,
        transport: asyncio.Transport,
        piece: memoryview | bytes,
        watch: _SilenceWatch,
    ) -> None:
        """Write a piece through the transport, which waits for the reader, and directly while the socket takes more.

        The transport copies data that the socket does not take, so it gets little at a time. Otherwise a stalled reader
        would cost as much memory as a piece has bytes, and the time to fill it.
        """
        while piece:
            await response.write(piece[:_WAITING_BYTES])
            watch.num_writes += 1
            piece = piece[_WAITING_BYTES:]
            if piece and self._tls is None and transport.get_write_buffer_size() == 0 and not transport.is_closing():
                piece = piece[_send_now(transport, piece) :]
                watch.num_writes += 1


@final
class _SilenceWatch:
    """A watch that disconnects a reader that takes no data for too long.

    Fields:
        num_writes: completed writes so far; the handler counts them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, silence_s: float) -> None:
        self.num_writes = 0
        self._paused = False
        self._loop = loop
        self._transport = transport
        self._silence_s = silence_s
        self._seen = (0, 0)
        self._timer = loop.call_later(silence_s, self._look)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the watch while this side delays the data."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self.num_writes += 1

    def _look(self) -> None:
        seen = (self.num_writes, self._transport.get_write_buffer_size())
        if seen == self._seen and not self._paused:
            _disconnect(self._transport)
            return
        self._seen = seen
        self._timer = self._loop.call_later(self._silence_s, self._look)

    def end(self) -> None:
        self._timer.cancel()


def _disconnect(transport: asyncio.Transport) -> None:
    # Without lingering: otherwise unsent data would stay in the kernel, and the reader would not notice the end. The
    # reader may have disconnected first. Then its socket is closed, and a closed TLS transport has no socket.
    with contextlib.suppress(OSError, AttributeError):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
    transport.abort()


def _bound_unsent(transport: asyncio.Transport) -> None:
    """Limit the kernel's unsent data per reader, so that many stalled readers take little memory."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with contextlib.suppress(OSError):  # closed in the meantime, which the next write notices too
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def _send_now(transport: asyncio.Transport, piece: memoryview | bytes) -> int:
    """Write to the socket what it accepts at once. Returns: the number of bytes."""
    try:
        return os.write(transport.get_extra_info("socket").fileno(), piece)
    except BlockingIOError:
        return 0
    except OSError as error:
        raise ConnectionResetError(f"the reader has disconnected: {error}") from error


def _key(request: web.Request) -> StateKey:
    try:
        return StateKey.parse(request.match_info["key"])
    except ConfigError as error:
        raise web.HTTPBadRequest(text=str(error)) from None


def _wait_s(request: web.Request) -> float:
    return min(_number(request, WAIT_HEADER) or 0, WAIT_MS_MAX) / 1e3


def _number(request: web.Request, header: str) -> int | None:
    text = request.headers.get(header)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        _bad_request(f"{header} is not a number of at most nine digits")
    return int(text)


def _full_bitmap(num_chunks: int) -> tuple[bytes, int]:
    """Return the bitmap of a complete state, and the number of its chunks."""
    return ((1 << num_chunks) - 1).to_bytes(-(-num_chunks // 8), "little"), num_chunks


def _joined_writes(views: list[memoryview]) -> Iterator[memoryview | bytes]:
    """Yield the same bytes as writes: long pieces unchanged, and short adjacent ones as one copy."""
    short = bytearray()
    for piece in views:
        if len(piece) > _UNDRAINED_BYTES:
            if short:
                yield bytes(short)
                short.clear()
            yield piece
        else:
            short += piece
    if short:
        yield bytes(short)


def _bad_request(sentence: str) -> NoReturn:
    raise web.HTTPBadRequest(text=sentence)


def _range(request: web.Request, length: int) -> tuple[int, int]:
    try:
        span = range(length)[request.http_range]
    except ValueError:
        span = range(0)
    if not span and (length or "range" in request.headers):
        raise web.HTTPRequestRangeNotSatisfiable(
            text=f"the data has {length} bytes; request one range of them",
            headers={"content-range": f"bytes */{length}"},
        )
    return span.start, span.stop
