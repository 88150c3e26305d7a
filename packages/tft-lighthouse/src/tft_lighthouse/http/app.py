"""The HTTP port of a lighthouse: routes, answers, and its start and end.

An answer that costs much is kept for a moment, so that many readers cost the lighthouse no more than a twentieth of its
time.

Law of this file: aiohttp; what there is to answer is made elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from tft_coord import CoordinationError, RefusedError
from tft_coord.lighthouse import ALL_JOBS, TLS, Inheritance, join_host_port, let_go_in_child, opens_job
from tft_lighthouse.http import fragment, queries, site, timeline
from tft_lighthouse.http.access import NO_SECRET, Access, Denial, Kind, Visitor
from tft_lighthouse.http.connections import Acceptor, Connections
from tft_lighthouse.http.incidents import OPENED, Incidents, UnknownJobError, number_of
from tft_lighthouse.http.metrics import CONTENT_TYPE, Metrics
from tft_lighthouse.journal import Journal
from tft_lighthouse.operations import Operations
from tft_lighthouse.view import as_json, unknown_job

logger = logging.getLogger("tft_lighthouse")

KEPT_S: Final = 0.2  # an answer is not made again so soon,
KEPT_TIMES: Final = 20  # nor before so many times the time that it took
MAX_BODY_BYTES: Final = 4_096
MAX_REASON_CHARACTERS: Final = 200
PROMPT_DENIALS_PER_S: Final = 16
DENIAL_DELAY_S: Final = 2.0
LOG_EVERY_S: Final = 60.0
HEALTH: Final = ("/healthz", "/readyz")
PATHS: Final = (
    "/",
    "/status",
    "/api/v1/status",
    "/api/v1/incidents",
    "/api/v1/events",
    "/api/v1/timeline",
    "/metrics",
    *HEALTH,
)
NOTHING: Final = Denial(
    404,
    f"there is nothing here; this port answers {', '.join(PATHS)}, and POST /replica/REPLICA/drain and "
    "/replica/REPLICA/kill",
)
ANSWERS_KEPT_MOST: Final = 32
FORWARDED: Final = ("forwarded", "via", "x-real-ip", "cf-connecting-ip", "x-forwarded-")  # how their names begin
HEADERS: Final = {
    "Server": "tft-lighthouse",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


@final
class HttpServer:
    """The HTTP port of one lighthouse. It runs on the lighthouse's loop only.

    Args:
        operations: what an operator may see and ask for.
        journal: what has happened so far.
        listeners: bound and listening; `stop` closes them.
        access: who may see and change what.
        tls: certificates for the connections, or None.
    """

    def __init__(
        self,
        operations: Operations,
        journal: Journal,
        listeners: Sequence[socket.socket],
        access: Access,
        tls: TLS | None = None,
    ) -> None:
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._operations = operations
        self._listeners = listeners
        self._access = access
        self._answers = _Answers(self._loop.time)
        self._metrics = Metrics(operations.view, journal.counters, journal.goodput)
        self._connections = Connections(self._loop.time)
        self._timeline = journal.timeline
        self._site = site.load()
        self._incidents = Incidents(journal.history, extend=self._connections.extend, jobs=lambda: self._timeline.jobs)
        journal.on_closed, journal.on_change = self._metrics.closed, self._incidents.changed
        self._denials = _DenialRate(self._loop.time)
        self._runner: web.AppRunner | None = None
        self._acceptor: Acceptor | None = None
        let_go_in_child(self)

    async def start(self) -> None:
        """Answer requests from now on."""
        app = web.Application(middlewares=[self._guard()], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/", self._file)
        app.router.add_get("/assets/{name}", self._file)
        app.router.add_get("/status", self._fragment)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics_text)
        app.router.add_get("/api/v1/status", self._status)
        app.router.add_get("/api/v1/incidents", self._incidents.listed)
        app.router.add_get("/api/v1/events", self._incidents.events, allow_head=False)
        app.router.add_get("/api/v1/timeline", self._timeline_of_job)
        app.router.add_post("/replica/{replica:.+}/kill", self._kill)
        app.router.add_post("/replica/{replica:.+}/drain", self._drain)
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            handler_cancellation=True,
            access_log=None,
            logger=_request_logger(),
            shutdown_timeout=0.05,
            lingering_time=0.0,
            max_line_size=4_096,
            max_field_size=8_190,
            max_headers=64,
        )
        await self._runner.setup()
        server = self._runner.server
        assert server is not None, "a runner that was set up has a server"
        self._acceptor = Acceptor(self._listeners, server, self._connections, self._tls)
        self._acceptor.start()

    async def stop(self) -> None:
        """Close the port and all connections."""
        if self._acceptor is not None:
            await self._acceptor.stop()
        if self._runner is not None:
            server = self._runner.server
            await self._runner.cleanup()
            for connection in server.connections if server is not None else ():
                connection.force_close()

    def forked(self) -> Inheritance:
        """Return what a forked child inherits; the port and its connections belong to the parent."""
        ports = {listener.getsockname()[1] for listener in self._listeners if listener.fileno() >= 0}
        return Inheritance(ports=ports, kept=[self._runner, self._acceptor])

    # --- who may ask --------------------------------------------------------------------------------------------------

    def _guard(self) -> Middleware:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            self._connections.extend(request.transport)
            kind = Kind.READ if request.method in ("GET", "HEAD") else Kind.CHANGE
            kind = Kind.HEALTH if kind is Kind.READ and request.path in HEALTH else kind
            visitor = _visitor(request)
            denial = self._access.denial(visitor, kind)
            if denial is not None or not self._access.shows_secret(visitor, Kind.READ):
                await self._denials.delay()
            if denial is not None and denial.status == NO_SECRET.status:
                self._denials.log(request.remote)
            if denial is not None:
                return _refused(request, denial)
            opened = ALL_JOBS if kind is Kind.HEALTH else self._access.opens(visitor, kind)
            if opened is None:  # the secret has changed since the line above
                return _refused(request, NO_SECRET)
            request[OPENED] = opened
            if fault := queries.fault(_route(request), list(request.query.items())):
                return _refused(request, Denial(400, fault))
            try:
                response = await handler(request)
            except UnknownJobError as error:
                return _refused(request, Denial(404, str(error)))
            except web.HTTPNotFound:
                return _refused(request, NOTHING)
            except web.HTTPException as error:
                return _refused(request, Denial(error.status, error.reason, _allowed(error)))
            if not response.prepared:
                response.headers.update({**HEADERS, **response.headers})
            return response

        return guard

    # --- what there is to see -----------------------------------------------------------------------------------------

    async def _healthz(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.StreamResponse:
        reason = self._operations.why_not_ready()
        return web.Response(text=f"{reason}\n", status=503) if reason else web.Response(text="ready\n")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        file = self._site.get(request.match_info.get("name", site.INDEX))
        if file is None:
            raise web.HTTPNotFound
        return web.Response(body=file.body, headers={"Content-Type": file.content_type, **file.headers})

    async def _fragment(self, request: web.Request) -> web.StreamResponse:
        opened = request[OPENED]
        body = self._answers.get(("fragment", opened), lambda: fragment.of_view(self._operations.view(opened)).encode())
        return web.Response(body=body, content_type="text/html", charset="utf-8")

    async def _status(self, request: web.Request) -> web.StreamResponse:
        opened = request[OPENED]
        body = self._answers.get(
            ("status", opened), lambda: json.dumps(as_json(self._operations.view(opened))).encode()
        )
        return web.Response(body=body, content_type="application/json")

    async def _timeline_of_job(self, request: web.Request) -> web.StreamResponse:
        """Answer with the last 30 minutes of the `job`, or with what is new `after` a time."""
        job, after_ms = request.query.get("job"), timeline.rounded(number_of(request, "after", 0))
        if job is None:
            return _refused(request, Denial(400, "name the job, as in /api/v1/timeline?job=NAME"))
        known = [each for each in self._timeline.jobs if opens_job(request[OPENED], each)]
        if job not in known:
            raise UnknownJobError(unknown_job(job, known))
        started_ms = self._operations.started_ms
        body = self._answers.get(
            (f"timeline {after_ms}", job), lambda: timeline.as_bytes(self._timeline, job, after_ms, started_ms)
        )
        return web.Response(body=body, content_type="application/json")

    async def _metrics_text(self, request: web.Request) -> web.StreamResponse:
        opened = request[OPENED]
        body = self._answers.get(("metrics", opened), lambda: self._metrics.text(opened))
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    # --- what there is to ask for -------------------------------------------------------------------------------------

    async def _kill(self, request: web.Request) -> web.StreamResponse:
        return await self._change(request, "end", self._operations.kill)

    async def _drain(self, request: web.Request) -> web.StreamResponse:
        async def drain(job: str | None, replica: str, *, reason: str, caller: str, opened: str | None) -> str:
            return self._operations.drain(job, replica, reason=reason, caller=caller, opened=opened)

        return await self._change(request, "leave", drain)

    async def _change(
        self, request: web.Request, what: str, change: Callable[..., Awaitable[str]]
    ) -> web.StreamResponse:
        """Answer a request for a change of one replica.

        The query may name its `job` and a `reason`. The status is 404 for an unknown replica, 409 for one that can't be
        asked, and 502 for one that can't be reached.
        """
        reason = "".join(each for each in request.query.get("reason", "") if each.isprintable())
        try:
            replica_id = await change(
                request.query.get("job"),
                request.match_info["replica"],
                reason=reason[:MAX_REASON_CHARACTERS],
                caller=_peer(request),
                opened=request[OPENED],
            )
        except RefusedError as error:
            return _refused(request, Denial(404 if error.code == "unknown" else 409, str(error)))
        except CoordinationError as error:
            return _refused(request, Denial(502, str(error)))
        return web.json_response({"replica_id": replica_id, "asked_to": what})


@final
class _Answers:
    """The last answer of each kind, about one job or all, with the time that it took to make."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._kept: dict[tuple[str, str | None], _Kept] = {}

    def get(self, kind: tuple[str, str | None], make: Callable[[], bytes]) -> bytes:
        kept, now_s = self._kept.get(kind), self._seconds()
        if kept is None or now_s >= kept.until_s:
            body = make()
            took_s = self._seconds() - now_s
            self._kept.pop(kind, None)  # the oldest comes first
            kept = self._kept[kind] = _Kept(body, now_s + max(KEPT_S, KEPT_TIMES * took_s))
            if len(self._kept) > ANSWERS_KEPT_MOST:
                del self._kept[next(iter(self._kept))]
        return kept.body


@dataclass(frozen=True, slots=True)
class _Kept:
    body: bytes
    until_s: float


@final
class _DenialRate:
    """The delay of requests without the secret: a flood of them must not take the lighthouse's time.

    Each connection asks one thing at a time, and the connections of a host are few.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._second = 0
        self._denied = 0  # in this second
        self._unlogged = 0
        self._logged_s = -LOG_EVERY_S

    async def delay(self) -> None:
        second = self._second_of()
        if second != self._second:
            self._second, self._denied = second, 0
        self._denied += 1
        if self._denied > PROMPT_DENIALS_PER_S:
            await asyncio.sleep(DENIAL_DELAY_S)

    def log(self, address: str | None) -> None:
        """Log the requests without the right secret, at most once a minute: any host may send them."""
        self._unlogged += 1
        if self._seconds() - self._logged_s < LOG_EVERY_S:
            return
        logger.warning(
            "the HTTP port refused %d requests without the right secret, the last from %s; they need the secret of "
            "TFT_TOKEN or TFT_TOKEN_FILE",
            self._unlogged,
            address,
        )
        self._logged_s, self._unlogged = self._seconds(), 0

    def _second_of(self) -> int:
        return int(self._seconds())


def _route(request: web.Request) -> str:
    """Return the route of a request as the router writes it, "" for none."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else ""


def _visitor(request: web.Request) -> Visitor:
    return Visitor(
        address=request.remote or "",
        host=request.headers.get("Host", ""),
        origin=request.headers.get("Origin"),
        authorization=request.headers.get("Authorization", ""),
        is_forwarded=any(name.lower().startswith(FORWARDED) for name in request.headers),
    )


def _peer(request: web.Request) -> str:
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    return f"{join_host_port(str(peer[0]), int(peer[1]))} over HTTP" if peer else "an unknown address over HTTP"


def _refused(request: web.Request, denial: Denial) -> web.StreamResponse:
    """Return a refusal, as JSON where the caller is a program. Its connection ends."""
    if request.path.startswith("/api/") or request.method not in ("GET", "HEAD"):
        response = web.json_response({"error": denial.sentence}, status=denial.status)
    else:
        response = web.Response(text=f"{denial.sentence}\n", status=denial.status)
    response.headers.update({**HEADERS, **denial.headers})
    response.force_close()
    return response


def _allowed(error: web.HTTPException) -> dict[str, str]:
    allow = error.headers.get("Allow")
    return {"Allow": allow} if allow is not None else {}


def _is_own_fault(record: logging.LogRecord) -> bool:
    """Return whether aiohttp logs an error of this program. The client of a bad request reads what is wrong in its
    answer, and any host could fill the log with them."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | ConnectionError | UnicodeError)


def _request_logger() -> logging.Logger:
    log = logging.Logger("tft_lighthouse.http")
    log.parent = logger
    log.addFilter(_is_own_fault)
    return log
