"""The running parameter server: its two ports, its event loop's thread, and its sessions.

Law of this file: what a server owns, its start, and its end. The loop's work is in `app`, a session's in `sessions`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Final, final

from tft_algos.errors import ConfigError
from tft_algos.parameter_server.app import App
from tft_algos.parameter_server.routes import NEW_SESSION_ROUTE
from tft_algos.parameter_server.session_store import SessionStore
from tft_algos.parameter_server.sessions import Sessions
from tft_algos.parameter_server.settings import ServerSettings
from tft_ckpt import ConfigError as TransferConfigError
from tft_ckpt.descriptors import raise_limit
from tft_ckpt.transfer.address import advertised_url, is_of_loopback, listen, parse_url
from tft_coord.security import HOW_TO_SERVE_OTHERS, is_for_this_machine
from tft_coord.tls import TLS
from tft_coord.tokens import Token
from tft_pg import ProcessGroup
from tft_pg.forks import Inheritance, let_go_in_child
from tft_pg.threads import join_within

__all__ = ["SessionServer"]

THREAD_NAME: Final = "tft-ps-http"
_START_S: Final = 30.0
_SESSIONS_END_S: Final = 10.0

_log = logging.getLogger("tft_algos.parameter_server")


@final
class SessionServer:
    """A server of sessions, from its construction to `shutdown`.

    Args:
        settings: of the server.
        token: the job's secret, or None.
        tls: certificates for the requests of sessions, or None.
        insecure: whether a server without a secret may serve other machines.
        new_group: makes the server's group of a session.
        forward: serves one session.

    Raises: ConfigError: a port is taken, an address is not this machine's, or the server would serve other machines
        without a secret.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        token: Token,
        tls: TLS | None,
        insecure: bool,
        new_group: Callable[[], ProcessGroup],
        forward: Callable[[str, ProcessGroup], None],
    ) -> None:
        raise_limit()
        is_local = is_for_this_machine(token, tls, insecure=insecure)
        listener = _listen(settings, is_local=is_local)
        try:
            url = _url(listener, settings.advertise_addr, "http" if tls is None else "https")
            # The store listens where the port does, and so serves no machine that the port does not serve.
            self._store = SessionStore(
                _listen_at(listener, settings.store_port), parse_url(url)[0], sessions_max=settings.max_sessions
            )
        except BaseException:
            listener.close()
            raise
        self._address = f"{url}{NEW_SESSION_ROUTE}"
        self._sessions = Sessions(
            new_group=new_group,
            forward=forward,
            store=self._store,
            sessions_max=settings.max_sessions,
            join_timeout=settings.join_timeout,
        )
        self._listener = listener
        self._port = int(listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._app = App(self._loop, listener, token=token, tls=tls, sessions=self._sessions)
        self._lock = threading.Lock()
        self._is_closed = False
        self._parent_pid = 0  # in a forked child: the process that owns the original of this server
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        let_go_in_child(self)
        self._thread.start()
        try:
            self._app.started.result(_START_S)
        except BaseException:
            self.shutdown()
            raise
        if is_local or (token is None and insecure):
            served = "" if insecure else "only this machine is served: "
            _log.warning("no secret is set; %severy process that reaches %s can open a session", served, self._address)

    @property
    def address(self) -> str:
        """Return the URL at which clients ask for a session."""
        return self._address

    @property
    def num_sessions(self) -> int:
        """Return the number of open sessions."""
        return len(self._sessions)

    def shutdown(self) -> None:
        """Close the ports, end all sessions, and wait for all threads, for a bounded time. A second call does
        nothing."""
        with self._lock:
            first, self._is_closed = not self._is_closed, True
        if not first or self._parent_pid:
            return
        self._app.stop()
        join_within(self._thread)
        self._sessions.close(_SESSIONS_END_S)
        self._store.close()

    def forked(self) -> Inheritance:
        """Close the server in a forked child. The ports, the connections and the loop belong to the parent."""
        self._parent_pid = os.getppid()
        self._lock = threading.Lock()
        self._is_closed = True
        ports = [self._port] if self._listener.fileno() >= 0 else []
        return Inheritance(ports=ports, kept=[self, self._loop, *asyncio.all_tasks(self._loop)])

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._app.serve())
        except BaseException as error:
            self._listener.close()
            if not self._app.started.done():
                self._app.started.set_exception(error)
            else:
                _log.exception("the parameter server opens no session any more; start it again")
        finally:
            self._loop.close()


def _listen(settings: ServerSettings, *, is_local: bool) -> socket.socket:
    """Return the port for requests. Raises: ConfigError."""
    bind = "localhost" if is_local and settings.bind is None else settings.bind
    try:
        listener = listen(bind, settings.port)
    except TransferConfigError as error:
        raise ConfigError(str(error)) from error
    if is_local and not is_of_loopback(listener):
        host = listener.getsockname()[0]
        listener.close()
        raise ConfigError(f"bind is {host!r} and no shared secret is set; {HOW_TO_SERVE_OTHERS}")
    return listener


def _listen_at(other: socket.socket, port: int) -> socket.socket:
    """Return a port at the address of another one. Raises: ConfigError."""
    host = str(other.getsockname()[0])
    try:
        return listen(None if host == "::" else host, port)
    except TransferConfigError as error:
        raise ConfigError(f"store_port: {error}") from error


def _url(listener: socket.socket, advertise_addr: str | None, scheme: str) -> str:
    try:
        return advertised_url(listener, advertise_addr, scheme)
    except TransferConfigError as error:
        raise ConfigError(str(error)) from error
