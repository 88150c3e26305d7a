"""Lighthouses as users start them: a command in a separate process, ready when its port answers."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil


@dataclass(frozen=True)
class Started:
    """A running lighthouse.

    Args:
        port: the listening port.
        pid: of the process.
        start_s: time from the process start to the first accepted connection, in seconds.
        resident_bytes: memory of the process and its children at that moment.
    """

    port: int
    pid: int
    start_s: float
    resident_bytes: int


def free_port() -> int:
    """Return a port that no process listens on now, and neither on the next one: a lighthouse serves HTTP there."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as server, contextlib.suppress(OSError, OverflowError):
            port = int(server.getsockname()[1])
            with socket.create_server(("127.0.0.1", port + 1)):
                return port


@contextlib.contextmanager
def lighthouse(
    command: Path | Sequence[str],
    *,
    min_replicas: int,
    flags: Sequence[str] = (),
    port: int | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Started]:
    """Run a lighthouse's command while the block lasts, and kill it afterwards.

    Args:
        command: path, or words of a command.
        min_replicas, flags: of its command line.
        port: the listening port. None takes a free one.
        environment: additional variables.
    """
    port = free_port() if port is None else port
    words = [str(command)] if isinstance(command, Path) else command
    arguments = [*words, "--bind", f"[::]:{port}", "--min_replicas", str(min_replicas), *flags]
    began = time.perf_counter()
    log = tempfile.TemporaryFile()  # noqa: SIM115  # closed below
    process = subprocess.Popen(
        arguments, env={**os.environ, "RUST_LOG": "error", **environment}, stdout=subprocess.DEVNULL, stderr=log
    )
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.perf_counter() - began > 30:
                log.seek(0)
                raise RuntimeError(f"{command} did not answer on port {port}: {log.read()[-2_000:].decode()}")
            time.sleep(0.005)
        start_s = time.perf_counter() - began
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        yield Started(port, process.pid, start_s, sum(member.memory_info().rss for member in family))
    finally:
        process.kill()
        process.wait()
        log.close()
