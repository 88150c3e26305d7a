"""The program of torch's debug page.

Torch's page listens on all interfaces, and has no argument for another address. So this program gives it a server class
that listens on one address. It adds a view of the training.

Law of this file: it runs in the page's process only.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tft_pg.debug.page import STORE_PREFIX
from tft_pg.errors import UnsupportedOperationError

__all__ = ["serve"]

_FETCH_S: Final = 10.0


def serve(descriptor: int, settings: dict[str, Any]) -> None:
    """Serve the page until the other end of the descriptor is closed. The main function of the page's process."""
    control = socket.socket(fileno=descriptor)
    kept: list[object] = []
    try:
        answer: dict[str, Any] = {"port": _start(settings, kept)}
    except Exception as error:
        unsupported = isinstance(error, UnsupportedOperationError | ImportError | AttributeError)
        answer = {"error": f"{error}"[:500] or type(error).__name__, "unsupported": unsupported}
    control.sendall(json.dumps(answer).encode())
    while control.recv(1):
        pass
    os._exit(0)


def _start(settings: dict[str, Any], kept: list[object]) -> int:
    """Start torch's page. Its store, if it has one of its own, goes into `kept`. Returns: the port."""
    from torch.distributed.debug import _debug_handlers, _frontend

    from tft_pg.debug.training_view import TrainingView

    address, port, store = settings["address"], settings["port"], settings["store"]
    if store is None:
        # With a listener of its own. Otherwise the store listens on all interfaces.
        listener = socket.create_server(("127.0.0.1", 0))
        store = host, store_port = listener.getsockname()
        own_store = TCPStore(
            host, store_port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        kept.append(own_store)
        own_store.set(f"{STORE_PREFIX}/rank0", settings["worker_url"])
    os.environ.update(RANK="0", WORLD_SIZE=str(settings["world_size"]), MASTER_ADDR=store[0], MASTER_PORT=str(store[1]))

    class OnOneAddress(_frontend._IPv6HTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

        def __init__(self, _: object, handler: Any) -> None:
            super().__init__((address, port), handler)

    _frontend._IPv6HTTPServer = OnOneAddress  # type: ignore[assignment,misc]
    handlers = [*_debug_handlers.default_handlers(), TrainingView()]
    for handler in handlers:
        handler.fetch_timeout = _FETCH_S
    page = _frontend.FrontendServer(port, handlers)
    if not isinstance(page._server, OnOneAddress):
        raise UnsupportedOperationError("this torch's page does not use the given server; install torch 2.13")
    return int(page._server.server_address[1])
