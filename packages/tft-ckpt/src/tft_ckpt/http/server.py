"""The side that has the state.

One thread of its own serves every reader from the snapshot's buffer, a piece at a time, so a slow reader costs a socket
and nothing else; the trainer's thread only puts snapshots up. A reader that comes before the state does is kept waiting
here, because in the asynchronous mode it asks before the source has taken its snapshot.

Law of this file: aiohttp and one event loop. What to answer is the shelf's decision; here it is only said.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hmac
import logging
import socket
import struct
import threading
from collections.abc import Callable
from typing import NoReturn, final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from tft_ckpt.buffers import Buffer
from tft_ckpt.errors import Closed, WrongSetting
from tft_ckpt.http.routes import DATA_ROUTE, KEY_HEADER, MANIFEST_ROUTE, WAIT_HEADER, WAIT_MS_MAX, authorization
from tft_ckpt.key import StateKey
from tft_ckpt.shelf import Found, Refused, Shelf
from tft_ckpt.snapshot import Snapshot
from tft_ckpt.tree import Limits

__all__ = ["StateServer"]

THREAD_NAME = "tft-ckpt-http"

# One write to a socket: long enough that the loop's own work does not count, short enough that readers take turns.
_PIECE_BYTES = 1 << 20
# aiohttp waits for the socket to take everything only after writes longer than this; a shorter last piece is therefore
# sent from a copy, because the buffer may be used again as soon as the handler returns.
_UNDRAINED_BYTES = 64 << 10

_NO_LINGERING = struct.pack("ii", 1, 0)

_log = logging.getLogger("tft_ckpt.http")


@final
class StateServer:
    """Serves one shelf over HTTP, from construction to `close`.

    Args:
        listener: bound and listening; belongs to the server from now on.
        token: what readers must present, or None.
        chunk_bytes: length of the chunks of the states to come.
        limits: largest state that is taken.
        silence_s: a reader that takes nothing for so long is sent off, and so is a connection that asks for nothing.
    """

    def __init__(
        self, listener: socket.socket, *, token: str | None, chunk_bytes: int, limits: Limits, silence_s: float
    ) -> None:
        self._listener = listener
        self._token = token
        self._chunk_bytes = chunk_bytes
        self._limits = limits
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._shelf = Shelf()
        self._closed = False
        # The loop's thread alone touches what follows.
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._summing: dict[Snapshot, asyncio.Task[None]] = {}
        self._transports: dict[Snapshot, set[asyncio.Transport]] = {}
        self._answering: set[asyncio.BaseTransport | None] = set()
        self._answered: set[asyncio.BaseTransport | None] = set()  # since the last look at the idle
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name=THREAD_NAME, daemon=True)
        self._thread.start()
        ready.result()

    # ---- the trainer's side: any thread but the loop's ----

    def offer(self, state: object, *, key: StateKey, expected: bool, check: Callable[[], None]) -> None:
        """Take a snapshot on the calling thread and put it up in place of the one before.

        Args:
            expected: somebody will ask for it, so that the checksums are worth computing at once.
            check: called when the snapshot is taken; raises if it is too late.
        Raises: what check raises, and as `Snapshot.take`, after those that wait for this key have been told; Closed.
        """
        with self._lock:
            self._check_open()
            overdue = self._shelf.begin(key)
        if overdue:
            self._tell(self._send_off, overdue)
        try:
            snapshot = Snapshot.take(
                state, key=key, chunk_bytes=self._chunk_bytes, limits=self._limits, allocate=self._allocate
            )
            check()
        except BaseException as error:
            with self._lock:
                self._shelf.fail(str(error) or type(error).__name__)
            self._tell(self._wake)
            raise
        with self._lock:
            self._check_open()
            self._shelf.publish(snapshot)
        self._tell(self._published, snapshot, expected)

    def refuse(self, key: StateKey, sentence: str) -> None:
        """Put up that sentence in place of a state of that key. Raises: Closed."""
        with self._lock:
            self._check_open()
            overdue = self._shelf.begin(key)
            self._shelf.fail(sentence)
        self._tell(self._send_off, overdue)
        self._tell(self._wake)

    def close(self, *, wait: bool) -> None:
        """Close the port and every connection, and end the thread."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._tell(self._stop.set)
        if wait:
            self._thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the transport was shut down, so it offers no state; make a new one")

    def _allocate(self, num_bytes: int) -> Buffer:
        with self._lock:
            return self._shelf.allocate(num_bytes)

    def _tell(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The loop is closed: nobody is left who could be told.
            if not self._closed:
                raise

    # ---- the loop's thread ----

    def _run(self, ready: concurrent.futures.Future[None]) -> None:
        try:
            self._loop.run_until_complete(self._serve(ready))
        finally:
            self._loop.close()

    async def _serve(self, ready: concurrent.futures.Future[None]) -> None:
        app = web.Application(middlewares=[self._mark(), self._guard()])
        app.router.add_get(MANIFEST_ROUTE, self._manifest, allow_head=False)
        app.router.add_get(DATA_ROUTE, self._data, allow_head=False)
        runner = web.AppRunner(
            app,
            handle_signals=False,
            handler_cancellation=True,
            access_log=None,
            logger=_log_of_requests(),
            shutdown_timeout=0.05,
        )
        try:
            await runner.setup()
            await web.SockSite(runner, self._listener).start()
        except BaseException as error:
            self._listener.close()
            ready.set_exception(error)
            return
        ready.set_result(None)
        assert runner.server is not None, "a runner that was set up has a server"
        self._loop.create_task(self._send_off_the_idle(runner.server), name="tft-ckpt-idle")
        await self._stop.wait()
        with self._lock:
            held = self._shelf.clear()
        self._send_off(held)
        self._wake()
        # First no more are accepted, and those just accepted become known to the runner, which will close them: asyncio
        # (of 3.11 at least) forgets to close a connection whose listener was closed in the turn that accepted it.
        self._loop.remove_reader(self._listener.fileno())
        await _turns()
        await runner.cleanup()
        await self._end_tasks()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task(self._loop)}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A closed transport closes its socket in the loop's next turn.
        await _turns()

    async def _send_off_the_idle(self, server: web.Server) -> None:
        """Break each connection that has asked for nothing for silence_s: its descriptor is one that readers need."""
        idle_since: dict[asyncio.Transport, float] = {}
        while True:
            await asyncio.sleep(self._silence_s / 2)
            now, answered = self._loop.time(), self._answered
            self._answered = set()
            idle = [each.transport for each in server.connections if each.transport not in self._answering]
            idle_since = {
                transport: now if transport in answered else idle_since.get(transport, now)
                for transport in idle
                if isinstance(transport, asyncio.Transport)
            }
            for transport, since in idle_since.items():
                if now - since >= self._silence_s:
                    _break(transport)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _send_off(self, snapshots: list[Snapshot]) -> None:
        for snapshot in snapshots:
            for transport in self._transports.get(snapshot, ()):
                _break(transport)

    def _published(self, snapshot: Snapshot, expected: bool) -> None:
        if expected:
            self._start_summing(snapshot)
        self._wake()

    def _start_summing(self, snapshot: Snapshot) -> None:
        if snapshot.manifest_bytes is not None or snapshot in self._summing or self._stop.is_set():
            return
        with self._lock:
            leased = self._shelf.lease(snapshot)
        if leased:
            self._summing[snapshot] = self._loop.create_task(self._sum(snapshot), name="tft-ckpt-sum")

    async def _sum(self, snapshot: Snapshot) -> None:
        try:
            while not snapshot.sum_next_chunk():
                await asyncio.sleep(0)
                with self._lock:
                    if not self._shelf.is_offered(snapshot):
                        break
        finally:
            del self._summing[snapshot]
            self._release(snapshot)
            self._wake()

    def _release(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._shelf.release(snapshot)

    # ---- handlers ----

    def _mark(self) -> Middleware:
        @web.middleware
        async def mark(request: web.Request, handler: Handler) -> web.StreamResponse:
            transport = request.transport
            self._answering.add(transport)
            try:
                return await handler(request)
            finally:
                self._answering.discard(transport)
                self._answered.add(transport)

        return mark

    def _guard(self) -> Middleware:
        expected = None if self._token is None else authorization(self._token).encode("utf-8")

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
            if expected is not None and not hmac.compare_digest(given, expected):
                raise web.HTTPUnauthorized(
                    text="this job's token is missing or wrong; give every process of the job the same one",
                    headers={"www-authenticate": "Bearer"},
                )
            return await handler(request)

        return guard

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        key, until = _key(request), self._loop.time() + _wait_s(request)
        while True:
            changed = self._changed
            with self._lock:
                found = self._found(key)
            if found is not None and found.manifest_bytes is not None:
                return web.Response(body=found.manifest_bytes, content_type="application/octet-stream")
            if found is not None:
                self._start_summing(found)
            await self._change(changed, key, until)

    async def _data(self, request: web.Request) -> web.StreamResponse:
        key, until = _key(request), self._loop.time() + _wait_s(request)
        while True:
            changed = self._changed
            with self._lock:
                found = self._found(key)
                if found is not None:
                    # Under the same lock as the look-up: else the trainer could take the buffer in between.
                    self._shelf.lease(found)
            if found is not None:
                break
            await self._change(changed, key, until)
        try:
            return await self._send(request, found)
        finally:
            self._release(found)

    def _found(self, key: StateKey) -> Snapshot | None:
        """The snapshot, or None if it may still come, or an answer that it won't."""
        if self._stop.is_set():
            raise web.HTTPServiceUnavailable(text="this source is shutting down; ask another one")
        match self._shelf.look_up(key):
            case Found(snapshot):
                return snapshot
            case Refused(offered, sentence) if offered == key:
                raise web.HTTPGone(text=sentence, headers={KEY_HEADER: str(offered)})
            case Refused(offered, sentence):
                raise web.HTTPConflict(text=sentence, headers={KEY_HEADER: str(offered)})
            case _:
                return None

    async def _change(self, changed: asyncio.Event, key: StateKey, until: float) -> None:
        try:
            await asyncio.wait_for(changed.wait(), max(0.0, until - self._loop.time()))
        except asyncio.TimeoutError:
            raise web.HTTPServiceUnavailable(text=f"state {key} is not here yet; ask again") from None

    async def _send(self, request: web.Request, snapshot: Snapshot) -> web.StreamResponse:
        data = snapshot.data
        start, stop = _range(request, len(data))
        ranged = "range" in request.headers
        response = web.StreamResponse(status=206 if ranged else 200)
        response.content_type = "application/octet-stream"
        response.content_length = stop - start
        response.headers["accept-ranges"] = "bytes"
        if ranged:
            response.headers["content-range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the reader has left")
        assert isinstance(transport, asyncio.Transport), transport
        # Zero: a write returns only when the socket has taken all of it, and then nothing else looks into the buffer.
        transport.set_write_buffer_limits(0)
        watch = _SilenceWatch(self._loop, transport, self._silence_s)
        self._transports.setdefault(snapshot, set()).add(transport)
        try:
            await response.prepare(request)
            for at in range(start, stop, _PIECE_BYTES):
                piece: memoryview | bytes = data[at : min(at + _PIECE_BYTES, stop)]
                await response.write(piece if len(piece) > _UNDRAINED_BYTES else bytes(piece))
                watch.pieces += 1
            await response.write_eof()
        except ConnectionResetError:
            # aiohttp finds the connection closed as well, and goes on to the next one.
            _log.info("a reader of state %s left before its end", snapshot.key)
        finally:
            watch.end()
            self._transports[snapshot].discard(transport)
            if not self._transports[snapshot]:
                del self._transports[snapshot]
        return response


@final
class _SilenceWatch:
    """Breaks a connection whose other side takes nothing for too long.

    Fields:
        pieces: writes completed so far; the handler counts.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, silence_s: float) -> None:
        self.pieces = 0
        self._loop = loop
        self._transport = transport
        self._silence_s = silence_s
        self._seen = (0, 0)
        self._timer = loop.call_later(silence_s, self._look)

    def _look(self) -> None:
        seen = (self.pieces, self._transport.get_write_buffer_size())
        if seen == self._seen:
            _break(self._transport)
            return
        self._seen = seen
        self._timer = self._loop.call_later(self._silence_s, self._look)

    def end(self) -> None:
        self._timer.cancel()


@final
class _WithoutTraces(logging.Filter):
    """One sentence for what a stranger sent or a reader left; the traceback stays where a bug of ours is logged."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        # Of UnicodeError: aiohttp quotes an Expect header in its answer, whatever bytes that is made of.
        if isinstance(error, (HttpProcessingError, ConnectionError, UnicodeError)):
            # Without what follows the first colon: that is what was sent, which may be long, or a token.
            why = error.message if isinstance(error, HttpProcessingError) else str(error)
            what = record.getMessage()
            record.msg = "%s: the request can't be read or answered, so its connection ends (%s)"
            record.args = (what, why.partition(":")[0].strip())
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.exc_info = record.exc_text = None
        return True


def _log_of_requests() -> logging.Logger:
    """What aiohttp complains to about requests. Its own place, so that nothing of the program's logging is changed."""
    log = logging.Logger(f"{_log.name}.requests")
    log.parent = _log
    log.addFilter(_WithoutTraces())
    return log


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def _break(transport: asyncio.Transport) -> None:
    # Without lingering: what the reader did not take would else stay in the kernel, and the reader would never hear.
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):  # the reader was faster: its socket is closed, and its request not yet over
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
    transport.abort()


def _key(request: web.Request) -> StateKey:
    try:
        return StateKey.parse(request.match_info["key"])
    except WrongSetting as error:
        raise web.HTTPBadRequest(text=str(error)) from None


def _wait_s(request: web.Request) -> float:
    text = request.headers.get(WAIT_HEADER, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        _refuse(f"{WAIT_HEADER} is no number of milliseconds")
    return min(int(text), WAIT_MS_MAX) / 1e3


def _refuse(sentence: str) -> NoReturn:
    raise web.HTTPBadRequest(text=sentence)


def _range(request: web.Request, length: int) -> tuple[int, int]:
    try:
        span = range(length)[request.http_range]
    except ValueError:
        span = range(0)
    if not span and (length or "range" in request.headers):
        raise web.HTTPRequestRangeNotSatisfiable(
            text=f"the data has {length} bytes; ask for one range of them",
            headers={"content-range": f"bytes */{length}"},
        )
    return span.start, span.stop
