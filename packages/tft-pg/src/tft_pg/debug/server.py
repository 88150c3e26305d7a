"""Torch's debug server of this process: its worker server, on one address, with one handler more.

The worker server answers on C++ threads. So it shows the flight record even if a thread holds the interpreter's lock.
It has no authentication. Torch's own `start_debug_server` listens on all interfaces, so this file starts the worker
server itself.

Torch's `shutdown` holds the interpreter's lock, and waits in two cases for ever: for a running request that needs the
lock, and for a server that has not begun to accept. So the start waits for the first answer. `close` first lets no new
request in, ends the connections, and waits until no request is left.

Law of this file: the life of a worker server: its start, its end, and forks.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import logging
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module
from types import TracebackType
from typing import Any, Final, final

import torch
from torch._C import _distributed_c10d

from tft_pg import sockets
from tft_pg.debug.page import HANDLER, DebugPage, PagePlace
from tft_pg.errors import ConfigError, UnsupportedOperationError
from tft_pg.forks import Inheritance, fork_safe_lock, forks_wait, let_go_in_child, never_destroy
from tft_pg.sockets import Endpoint
from tft_pg.store import create_store_client

__all__ = ["DebugServer"]

LOOPBACK: Final = "127.0.0.1"
ALONE: Final = PagePlace()
_PORT_MAX: Final = 65535
_START_S: Final = 60.0
_END_S: Final = 10.0
_LOOKS_EVERY_S: Final = 0.01
_CONNECT_S: Final = 1.0
_STORE_TIMEOUT: Final = timedelta(seconds=60)

_log = logging.getLogger("tft_pg")
_lock = fork_safe_lock()
_current: DebugServer | None = None  # torch registers a handler for the whole process, and for ever
_is_registered = False


@final
class DebugServer:
    """A debug server of this process, from its construction to `close`. A process has at most one.

    Every program that reaches the address can read the stacks, profile the process, and read what `facts` returns. The
    server has no authentication. It ends with the process, and a forked child does not have it.

    Args:
        facts: returns the answer of the handler `tft`, as values of JSON. A thread of the server calls it at any time,
            so it must not wait.
        host: the name or address to listen on: of one interface, loopback unless given.
        port: of the worker server. 0: a free port.
        page_port: the port of torch's page, which shows all ranks of a replica group. It is on the host of rank 0. 0: a
            free port. None: there is no page. All ranks give a number, or all give None. It needs the packages `jinja2`
            and `tabulate`.
        place: this process's place in its replica group, for the page.

    Raises:
        ConfigError: the host is not one address of this machine, a port is taken or is no port, the process has a
            server already, or a package is missing.
        StoreUnreachableError: the store of the replica group did not answer.
        UnsupportedOperationError: this torch has no debug server, or its page can't be bound to one address.
    """

    def __init__(
        self,
        facts: Callable[[], Mapping[str, Any]],
        *,
        host: str = LOOPBACK,
        port: int = 0,
        page_port: int | None = None,
        place: PagePlace = ALONE,
    ) -> None:
        address = _resolved(host)
        _check_port("port", port)
        if page_port is not None:
            _check_port("page_port", page_port)
            DebugPage.check_packages()
        self._facts = facts
        self._address = address
        self._url = ""
        self._page: DebugPage | None = None
        self._worker: list[Any] = []
        self._port = port
        let_go_in_child(self)
        with _lock:
            self._start(address, port)
        atexit.register(self.close)
        try:
            self._url = f"http://{_quoted(address)}:{self._port}"
            if page_port is not None:
                self._publish(place)
                if place.rank == 0:
                    self._page = DebugPage(address, page_port, place=place, worker_url=self._url)
        except BaseException:
            self.close()
            raise
        _log.warning("a debug server without authentication listens at %s", self._url)

    def _start(self, address: str, port: int) -> None:
        """Start the worker server, under the lock."""
        global _current
        if _current is not None:
            raise ConfigError(f"this process has a debug server already, at {_current.url}; close it first")
        _register()
        with forks_wait():
            _check_free(address, port)
            try:
                worker = _distributed_c10d._WorkerServer(address, port)
            except RuntimeError as error:
                raise _cannot_listen(address, port, error) from error
        self._port = int(worker.port)
        self._worker.append(worker)
        if not _answers(address, self._port, within_s=_START_S):
            never_destroy(self._worker.pop())
            raise ConfigError(
                f"the debug server at {address} port {self._port} did not answer within {_START_S:g} s of its start; "
                "check the load of this machine, and start it again"
            )
        _current = self

    def _publish(self, place: PagePlace) -> None:
        """Publish this process's address to the page, in the store of the replica group."""
        if place.store_addr is not None:
            store = create_store_client(place.store_addr, _STORE_TIMEOUT)
            store.set(f"rank{place.rank}", self._url)

    @property
    def url(self) -> str:
        """Return the URL of the worker server. `POST url/handler/name` calls a handler."""
        return self._url

    @property
    def page_url(self) -> str | None:
        """Return the URL of torch's page. None: there is none, or another rank has it."""
        return None if self._page is None else self._page.url

    def close(self) -> None:
        """Close the ports, and end the server's threads. A second call does nothing.

        If a request still runs after 10 s, such as a long profile, the server's threads stay, with a warning. They take
        no further request.
        """
        global _current
        with _lock:
            worker, self._worker = self._worker, []
            if _current is self:
                _current = None
        atexit.unregister(self.close)
        if self._page is not None:
            self._page.close()
        if worker and _drained(Endpoint.of((self._address, self._port)), within_s=_END_S):
            worker[0].shutdown()
        elif worker:
            never_destroy(worker[0])
            _log.warning(
                "the debug server at %s still answers a request after %g s; it takes no other one, and ends with this "
                "process",
                self._url,
                _END_S,
            )

    def __enter__(self) -> DebugServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def forked(self) -> Inheritance:
        """Forget the parent's server in a forked child. Its destructor would wait for threads of the parent."""
        global _current
        _current = None
        worker, self._worker = self._worker, []
        atexit.unregister(self.close)
        return Inheritance(ports=[self._port] if worker else [], kept=worker)

    def answer(self) -> tuple[int, bytes]:
        """Return the status and the body of the handler's answer."""
        try:
            return 200, json.dumps(self._facts()).encode()
        except Exception as error:
            _log.exception("the debug server can't report the state of the training")
            return 500, f"{type(error).__name__}: {error}".encode()


def _register() -> None:
    """Register torch's handlers in Python and ours, once in a process."""
    global _is_registered
    if not hasattr(_distributed_c10d, "_WorkerServer"):
        raise UnsupportedOperationError(f"this torch ({torch.__version__}) has no debug server; install 2.13 or later")
    if not _is_registered:
        torchs = import_module("torch.distributed.debug._handlers")  # registers torch's handlers in Python
        _distributed_c10d._register_handler(HANDLER, _handle)
        # Torch releases them at the exit of the process, without an interpreter. That ends the process by SIGABRT.
        for handler in (_handle, getattr(torchs, "_torch_profile", None)):
            never_destroy(handler)
        _is_registered = True


def _handle(request: Any, response: Any) -> None:
    server = _current
    status, body = (503, b"the debug server stops") if server is None else server.answer()
    response.set_content(body, "application/json" if status == 200 else "text/plain")
    response.set_status(status)


def _answers(address: str, port: int, *, within_s: float) -> bool:
    """Return whether the server has answered a request."""
    connection = http.client.HTTPConnection(address, port, timeout=within_s)
    try:
        connection.request("POST", "/handler/ping")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _drained(server: Endpoint, *, within_s: float) -> bool:
    """Let no new request in, end the server's connections, and wait for its requests. Returns: whether none is left."""
    held_sockets = sockets.hold(sockets.bound([server]))
    try:
        own = [held for held in held_sockets if held.is_listening()]
        if not all(held.refuse_connections() for held in own):
            return False
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            is_waiting = any(held.num_waiting() for held in own)
            open_connections = sockets.bound([server]) - {held.inode for held in own}
            if not is_waiting and not open_connections:
                return True
            sockets.shut_down(open_connections)
            time.sleep(_LOOKS_EVERY_S)
        return False
    finally:
        sockets.let_go(held_sockets)


def _resolved(host: str) -> str:
    """Return the numeric address of a name. Raises: ConfigError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TypeError) as error:
        raise ConfigError(f"host is {host!r}, which has no address ({error}); give one of this machine's") from None
    address = str(found[0][4][0])
    if address in ("0.0.0.0", "::"):
        raise ConfigError(
            f"host is {host!r}, which means all interfaces, but a debug server has no authentication; give the address "
            "of one interface"
        )
    return address


def _check_port(name: str, port: int) -> None:
    if type(port) is not int or not 0 <= port <= _PORT_MAX:
        raise ConfigError(f"{name} is {port!r}; give a number from 0 (any free port) to {_PORT_MAX}")


def _check_free(address: str, port: int) -> None:
    """Check that no server listens there, because torch's server would share its port. Raises: ConfigError."""
    if port:
        with contextlib.suppress(OSError):  # nothing listens there
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
            raise _cannot_listen(address, port, "another server listens there")


def _cannot_listen(address: str, port: int, error: object) -> ConfigError:
    return ConfigError(
        f"the debug server can't listen on {address} port {port} ({error}); give an address of this machine, and a "
        "free port or 0"
    )


def _quoted(address: str) -> str:
    return f"[{address}]" if ":" in address else address
