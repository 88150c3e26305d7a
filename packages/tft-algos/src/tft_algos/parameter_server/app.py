"""The parameter server's event loop: one route, the secret, and the end of the connections.

Law of this file: aiohttp and one event loop; only the loop's thread calls this code, except `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from concurrent.futures import Future
from typing import Final, TypeVar, final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from tft_algos.errors import ServerBusyError
from tft_algos.parameter_server.routes import HOLDS_HEADER, NEW_SESSION_ROUTE
from tft_algos.parameter_server.sessions import Session, Sessions
from tft_ckpt.transfer.web_server import WebServer
from tft_coord.security import admits
from tft_coord.tls import TLS
from tft_coord.tokens import Token

__all__ = ["App"]

AUTHENTICATION_TIMEOUT_S: Final = 10.0
GROUP_TIMEOUT_S: Final = 30.0  # for new_process_group
_ABORT_AGAIN_S: Final = 0.05

_log = logging.getLogger("tft_algos.parameter_server")
_Refusal = TypeVar("_Refusal", bound=web.HTTPException)


@final
class App:
    """An application that opens sessions, from `serve` to `stop`.

    Args:
        loop: the app's event loop.
        listener: bound and listening; closed at the end.
        token: the secret that clients must present, or None.
        tls: certificates for the connections, or None.
        sessions: opens each session.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        *,
        token: Token,
        tls: TLS | None,
        sessions: Sessions,
    ) -> None:
        self.started: Future[None] = Future()
        self._loop = loop
        self._token = token
        self._sessions = sessions
        self._stop = asyncio.Event()
        self._server = WebServer(
            loop, listener, log=_log, tls=tls and tls.server_context, authentication_timeout_s=AUTHENTICATION_TIMEOUT_S
        )

    def stop(self) -> None:
        """Close the port and every connection, so that `serve` ends. Any thread may call this."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, with every connection
            self._loop.call_soon_threadsafe(self._stop.set)

    async def serve(self) -> None:
        """Answer clients until `stop`. Raises: the error that prevents the start; the port is closed then."""
        app = web.Application(middlewares=[self._check_token()])
        app.router.add_get(NEW_SESSION_ROUTE, self._new_session, allow_head=False)
        await self._server.start(app)
        self.started.set_result(None)
        try:
            await self._stop.wait()
        finally:
            await self._server.close()

    def _check_token(self) -> Middleware:
        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
            if not admits(self._token, (("authorization", given),)):
                self._server.refused(request.remote)
                raise _last(
                    web.HTTPUnauthorized(
                        text="this job's secret is missing or wrong; give every process of the job the same one "
                        "(TFT_TOKEN or TFT_TOKEN_FILE)",
                        headers={"www-authenticate": "Bearer"},
                    )
                )
            self._server.authenticated(request.transport)
            try:
                return await handler(request)
            except web.HTTPNotFound:
                raise _last(web.HTTPNotFound(text=f"a parameter server answers only {NEW_SESSION_ROUTE}")) from None
            except web.HTTPException as refusal:
                raise _last(refusal) from None

        return check

    async def _new_session(self, request: web.Request) -> web.StreamResponse:
        try:
            session = self._sessions.open(request.remote or "an unknown client")
        except ServerBusyError as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from None
        failure = await self._failure(session)
        if failure:
            is_busy = session.failure_status == 503
            raise (web.HTTPServiceUnavailable if is_busy else web.HTTPInternalServerError)(text=failure)
        if HOLDS_HEADER in request.headers:
            return await self._answer_until_joined(request, session)
        response = web.Response(body=session.opened.body(), content_type="application/json")
        response.force_close()
        return response

    async def _answer_until_joined(self, request: web.Request, session: Session) -> web.StreamResponse:
        """Send the answer, and end it when both sides have joined. If the client disconnects first, end the session."""
        response = web.StreamResponse()
        response.content_type = "application/json"
        response.force_close()
        try:
            await response.prepare(request)
            await response.write(session.opened.body() + b"\n")
            await asyncio.shield(asyncio.wrap_future(session.joined))
        except (asyncio.CancelledError, ConnectionError):
            self._stop_before_it_begins(session)
            raise
        await response.write_eof()
        return response

    def _stop_before_it_begins(self, session: Session) -> None:
        """Stop a session whose client has disconnected, repeatedly. An abort before a configure does not end it."""
        if not session.joined.done():
            session.stop()
            self._loop.call_later(_ABORT_AGAIN_S, self._stop_before_it_begins, session)

    async def _failure(self, session: Session) -> str:
        """Wait for the session's group. Returns: why there is none, or ""."""
        try:
            # Shielded, because only the session's thread ends this future.
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(session.failure)), GROUP_TIMEOUT_S)
        except asyncio.TimeoutError:
            session.stop()
            return f"new_process_group did not return within {GROUP_TIMEOUT_S:g} s on the server"
        except asyncio.CancelledError:  # the client has disconnected, or the server stops
            session.stop()
            raise


def _last(refusal: _Refusal) -> _Refusal:
    """Let the connection end after this answer."""
    refusal.force_close()
    return refusal
