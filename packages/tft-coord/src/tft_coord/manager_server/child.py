"""The manager server's own process: a trainer that holds the interpreter lock for seconds must not look dead.

It ends when its parent does, and learns of that from the pipe on which it was given its settings: a signal at a
parent's death fires already when the thread that started the child ends. Before it goes it tells the lighthouse.

Law of this file: the life of this process, from settings to end; the server itself is the shell's.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Final

from tft_coord.errors import CoordinationError
from tft_coord.manager_server.config import ManagerServerConfig
from tft_coord.manager_server.shell import ManagerServerShell

GOODBYE: Final = b"goodbye\n"
END_BY_FORCE_S: Final = 2.0


def main(settings: str, report_fd: int, link_fd: int) -> None:
    """Serve until the parent says goodbye or ends.

    Args:
        settings: JSON of a ManagerServerConfig.
        report_fd: a pipe for one line of JSON: the address, or the error that kept the server from starting.
        link_fd: a socket whose other end is our parent's, for its calls.
    """
    # Whoever ends the trainers of a machine often signals all processes: the parent's end is the only one that counts.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_serve(settings, report_fd, link_fd))


async def _serve(settings: str, report_fd: int, link_fd: int) -> None:
    loop = asyncio.get_running_loop()
    parent_ended: asyncio.Future[bool] = loop.create_future()

    def parent_ends(left: bool) -> None:
        if not parent_ended.done():
            parent_ended.set_result(left)

    def watch_parent() -> None:
        words = sys.stdin.buffer.readline()
        with suppress(RuntimeError):  # the loop is closed: the server is ending already
            loop.call_soon_threadsafe(parent_ends, words == GOODBYE)
        # A process without its parent must not stay, whatever its loop is busy with.
        threading.Event().wait(END_BY_FORCE_S)
        os._exit(1)

    threading.Thread(target=watch_parent, name="tft-parent-watch", daemon=True).start()
    shell = None
    try:
        shell = ManagerServerShell(ManagerServerConfig.from_json(settings))
        report = {"address": await shell.start()}
        await shell.attach(socket.socket(fileno=link_fd))
    except CoordinationError as error:
        report = {"error": str(error)}
    with suppress(BrokenPipeError), os.fdopen(report_fd, "w") as pipe:
        pipe.write(json.dumps(report) + "\n")
    if shell is not None and "address" in report:
        left = await parent_ended
        await shell.stop("it was shut down" if left else "its process ended", left=left)
    # Nothing is left to be tidied up, and a thread that waits on the pipe would be waited for.
    sys.stderr.flush()
    os._exit(0)
