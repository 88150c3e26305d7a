"""The manager server's own process: a trainer that holds the interpreter lock for seconds must not look dead.

The process ends when its parent does. It learns of that end from the pipe on which it got its settings. On Linux it
also learns it from the kernel, because another process that the parent has forked may hold the pipe open. A signal at a
parent's death does not work, because it fires when the thread that started the child ends. Before its end the process
tells the lighthouse.

Law of this file: the life of this process, from settings to end; the server itself is in the shell.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from typing import Final

from tft_coord.descriptors import raise_limit
from tft_coord.errors import CoordinationError
from tft_coord.logs import configure_process
from tft_coord.manager_server.config import ManagerServerConfig
from tft_coord.manager_server.shell import ManagerServerShell

GOODBYE: Final = b"goodbye\n"
END_BY_FORCE_S: Final = 2.0


def main(settings: str, report_fd: int, parent_pid: int) -> None:
    """Serve until the parent says goodbye or ends.

    Args:
        settings: JSON of a ManagerServerConfig.
        report_fd: a pipe for one line of JSON: the address, or the error that kept the server from starting.
        parent_pid: of the process that started this one.
    """
    # A tool that ends the trainers of a machine often signals all processes; only the parent's end counts.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_process(logging.WARNING, job=json.loads(settings)["job"])
    raise_limit()
    asyncio.run(_serve(settings, report_fd, parent_pid))


async def _serve(settings: str, report_fd: int, parent_pid: int) -> None:
    loop = asyncio.get_running_loop()
    parent_ended: asyncio.Future[bool] = loop.create_future()

    def parent_ends(left: bool) -> None:
        if not parent_ended.done():
            parent_ended.set_result(left)

    def watch_parent() -> None:
        line = _last_line_of(parent_pid)
        with suppress(RuntimeError):  # the loop is closed: the server is ending already
            loop.call_soon_threadsafe(parent_ends, line == GOODBYE)
        # A process without its parent must not stay, even if its loop is busy.
        threading.Event().wait(END_BY_FORCE_S)
        os._exit(1)

    threading.Thread(target=watch_parent, name="tft-parent-watch", daemon=True).start()
    shell = None
    try:
        shell = ManagerServerShell(ManagerServerConfig.from_json(settings), trainer_pid=os.getppid())
        report = {"address": await shell.start()}
    except CoordinationError as error:
        report = {"error": str(error)}
    with suppress(BrokenPipeError), os.fdopen(report_fd, "w") as pipe:
        pipe.write(json.dumps(report) + "\n")
    if shell is not None and "address" in report:
        left = await parent_ended
        await shell.stop("it was shut down" if left else "its process ended", left=left)
    # Nothing is left to clean up, and a normal exit would wait for the thread that waits on the pipe.
    sys.stderr.flush()
    os._exit(0)


def _last_line_of(parent_pid: int) -> bytes:
    """Wait until the parent has written its last line, and return it; b"" if the parent has ended without one."""
    with suppress(AttributeError, OSError):  # some kernels and systems do not report a process's end
        parent = os.pidfd_open(parent_pid)
        if os.getppid() != parent_pid:  # the parent had ended before, and another process has its number
            return b""
        poll = select.poll()
        poll.register(sys.stdin, select.POLLIN)
        poll.register(parent, select.POLLIN)
        if sys.stdin.fileno() not in dict(poll.poll()):
            return b""
    return sys.stdin.buffer.readline()
