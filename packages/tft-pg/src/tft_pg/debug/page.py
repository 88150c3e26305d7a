"""Torch's page of the debug servers of a replica group, as a program of its own.

Torch's page asks each rank's worker server, whose address it finds in the group's store. Torch lets it listen on all
interfaces, and has no argument for another address. So this program gives torch's page a server class that listens on
one address, and adds a view of the training. It ends with the process that started it.

Law of this file: the page's process, on both sides.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Final, final

from tft_pg.errors import ConfigError, UnsupportedOperationError
from tft_pg.forks import Inheritance, forks_wait, let_go_in_child

__all__ = ["HANDLER", "DebugPage", "PagePlace", "serve"]

HANDLER: Final = "tft"
STORE_PREFIX: Final = "debug_server"  # where torch's page looks
_PACKAGES: Final = ("jinja2", "tabulate")
_START_S: Final = 60.0
_END_S: Final = 5.0
_FETCH_S: Final = 10.0
_ANSWER_BYTES_MAX: Final = 4096
_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tft_pg.debug.page import serve; serve(int(sys.argv[2]), json.loads(sys.argv[3]))"
)


@dataclass(frozen=True)
class PagePlace:
    """A process's place in its replica group.

    Args:
        rank, world_size: in the replica group.
        store_host, store_port: of the group's store, which all its ranks reach. None: the group has one process.

    Raises: ConfigError: a group of several processes has no store.
    """

    rank: int = 0
    world_size: int = 1
    store_host: str | None = None
    store_port: int = 0

    def __post_init__(self) -> None:
        if self.world_size > 1 and self.store_host is None:
            raise ConfigError("the page of a group with several processes needs their store; give its host and port")

    @property
    def store_addr(self) -> str | None:
        """Return `host:port/prefix` of the addresses. None: the page has a store of its own."""
        if self.world_size == 1:
            return None
        host = f"[{self.store_host}]" if ":" in str(self.store_host) else self.store_host
        return f"{host}:{self.store_port}/{STORE_PREFIX}"


@final
class DebugPage:
    """The page's process, until `close`.

    Args:
        address: numeric, to listen on.
        port: to listen on. 0: a free port.
        place: of this process.
        worker_url: of this process's worker server.

    Raises: ConfigError: the page can't listen there. UnsupportedOperationError: this torch has no such page.
    """

    def __init__(self, address: str, port: int, *, place: PagePlace, worker_url: str) -> None:
        settings = {
            "address": address,
            "port": port,
            "world_size": place.world_size,
            "store": None if place.world_size == 1 else [place.store_host, place.store_port],
            "worker_url": worker_url,
        }
        with forks_wait():
            self._control, theirs = socket.socketpair()
            let_go_in_child(self)
        command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno()), json.dumps(settings)]
        with theirs:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # signals to the trainer's job are for the trainer
            )
        try:
            answer = self._answer()
        except BaseException:
            self.close()
            raise
        if "error" in answer:
            self.close()
            kind = UnsupportedOperationError if answer.get("unsupported") else ConfigError
            raise kind(f"torch's debug page can't start on {address} port {port} ({answer['error']})")
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{int(answer['port'])}"

    @staticmethod
    def check_packages() -> None:
        """Check that what torch's page needs is installed. Raises: ConfigError."""
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(f"torch's debug page needs {' and '.join(missing)}; install it, or leave page_port out")

    def _answer(self) -> dict[str, Any]:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        line = self._control.recv(_ANSWER_BYTES_MAX) if poll.poll(_START_S * 1000) else b""
        if not line:
            return {"error": f"its process ended, or did not start within {_START_S:g} s; see standard error"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process. A second call does nothing."""
        process, self._process = self._process, None
        self._control.close()
        if process is not None:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def forked(self) -> Inheritance:
        """Forget the parent's process in a forked child."""
        process, self._process = self._process, None
        descriptor = self._control.fileno()
        return Inheritance(descriptors=[descriptor], kept=[process, self._control])


# --- in the page's process --------------------------------------------------------------------------------------------


def serve(descriptor: int, settings: dict[str, Any]) -> None:
    """Serve the page until the other end of the descriptor is closed. The main function of the page's process."""
    control = socket.socket(fileno=descriptor)
    try:
        answer: dict[str, Any] = {"port": _start(settings)}
    except Exception as error:
        unsupported = isinstance(error, UnsupportedOperationError | ImportError | AttributeError)
        answer = {"error": f"{error}"[:500] or type(error).__name__, "unsupported": unsupported}
    control.sendall(json.dumps(answer).encode())
    while control.recv(1):
        pass
    os._exit(0)


def _start(settings: dict[str, Any]) -> int:
    """Start torch's page. Returns: its port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.debug import _debug_handlers, _frontend

    from tft_pg.debug.training_view import TrainingView

    address, port, store = settings["address"], settings["port"], settings["store"]
    own_store = None
    if store is None:
        # With a listener of its own. Otherwise the store listens on all interfaces.
        listener = socket.create_server(("127.0.0.1", 0))
        store = list(listener.getsockname())
        own_store = TCPStore(*store, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        own_store.set(f"{STORE_PREFIX}/rank0", settings["worker_url"])
    os.environ.update(RANK="0", WORLD_SIZE=str(settings["world_size"]), MASTER_ADDR=store[0], MASTER_PORT=str(store[1]))

    class OnOneAddress(_frontend._IPv6HTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

        def __init__(self, _: object, handler: Any) -> None:
            super().__init__((address, port), handler)

    _frontend._IPv6HTTPServer = OnOneAddress  # type: ignore[misc]
    handlers = [*_debug_handlers.default_handlers(), TrainingView()]
    for handler in handlers:
        handler.fetch_timeout = _FETCH_S
    page = _frontend.FrontendServer(port, handlers)
    if not isinstance(page._server, OnOneAddress):
        raise UnsupportedOperationError("this torch's page does not use the given server; install torch 2.13")
    page.keeps = own_store
    return int(page._server.server_address[1])
