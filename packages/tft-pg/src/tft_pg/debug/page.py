"""Torch's page of the debug servers of a replica group, in a process of its own.

Torch's page asks each rank's worker server, whose address it finds in the group's store. The process ends with the one
that started it, because it holds one end of a pair of sockets.

Law of this file: the start and the end of the page's process, which runs `page_process`.
"""

from __future__ import annotations

import importlib.util
import json
import select
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Final, final

from tft_pg.errors import ConfigError, UnsupportedOperationError
from tft_pg.forks import Inheritance, forks_wait, let_go_in_child

__all__ = ["HANDLER", "STORE_PREFIX", "DebugPage", "PagePlace"]

HANDLER: Final = "tft"
STORE_PREFIX: Final = "debug_server"  # where torch's page looks
_PACKAGES: Final = ("jinja2", "tabulate")
_START_S: Final = 60.0
_END_S: Final = 5.0
_ANSWER_BYTES_MAX: Final = 4096
_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tft_pg.debug.page_process import serve; serve(int(sys.argv[2]), json.loads(sys.argv[3]))"
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
