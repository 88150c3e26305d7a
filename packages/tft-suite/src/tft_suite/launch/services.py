"""The lighthouse and the stores that a launcher starts, and keeps running.

Law of this file: their commands, addresses and readiness, and their restart at the same address.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar, final

from tft_coord.errors import ConfigError as CoordinationConfigError
from tft_coord.security import is_for_this_machine, read_token
from tft_coord.tls import TLS
from tft_coord.transport.diagnosis import diagnose
from tft_coord.transport.trust import UntrustedError
from tft_suite.errors import ConfigError
from tft_suite.launch.exit_codes import describe
from tft_suite.launch.processes import Processes, ended_early
from tft_suite.launch.settings import RestartPolicy
from tft_suite.operate.client import fetch

Setting = TypeVar("Setting")

READY_S: Final = 120.0
LOOK_EVERY_S: Final = 0.05
LIGHTHOUSE: Final = "lighthouse"
STORES: Final = "stores"


@final
@dataclass(slots=True)
class Service:
    """A process that runs as long as the launcher.

    Args:
        name: for notes, and of its log.
        command: the same at each start, so that it comes back at its address.
        reads_stdin: it ends with its standard input, and prints to a pipe.
    """

    name: str
    command: Sequence[str]
    log: Path
    reads_stdin: bool = False
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    failures: int = 0
    started_s: float = 0.0
    again_s: float = 0.0

    def start(self, processes: Processes, now_s: float) -> subprocess.Popen[bytes]:
        """Start it. Raises: OSError: it can't be started."""
        output = subprocess.PIPE if self.reads_stdin else None
        self.process = processes.start(self.command, {}, name=self.name, log=self.log, output=output)
        self.started_s = now_s
        return self.process

    def look(self, processes: Processes, policy: RestartPolicy, now_s: float) -> str | None:
        """Start it again if it has ended and its pause is over. Return what an operator should know, or None."""
        if self.process is not None:
            code = self.process.poll()
            if code is None:
                return None
            self.close()
            self.failures = 1 if now_s - self.started_s >= policy.good_after_s else self.failures + 1
            delay_s = policy.delay_s(self.failures)
            self.again_s = now_s + delay_s
            return f"the {self.name} ended with {describe(code)}, and is restarted in {delay_s:g} s (see {self.log})"
        if now_s < self.again_s:
            return None
        try:
            self.start(processes, now_s)
        except OSError as error:
            self.failures += 1
            self.again_s = now_s + policy.delay_s(self.failures)
            return f"the {self.name} can't be started: {error}"
        return f"restarted the {self.name}"

    def close(self) -> None:
        """Let go of the process. `Processes` ends it."""
        process, self.process = self.process, None
        if process is not None:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def start_lighthouse(
    processes: Processes, *, bind: str, min_replicas: int, logs: Path, environ: Mapping[str, str]
) -> tuple[Service, str, str]:
    """Start a lighthouse, and wait until it answers.

    Args:
        bind: where it listens; "": a free port of this machine.
    Returns: the service, its address for replicas, and the address of its HTTP port.
    Raises: ConfigError: it does not start, for example because its port is taken, or its certificate is not for this
        machine.
    """
    tls = _setting(TLS.from_environment, environ)
    host, _, port = (bind or "127.0.0.1:0").rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"--bind is {bind!r}; give host:port")
    port = port if int(port) else str(free_port(host))
    http_port = free_port(host)
    command = [sys.executable, "-m", "tft_lighthouse", "--bind", f"{host}:{port}", "--http_bind", f"{host}:{http_port}"]
    command += ["--min_replicas", str(min_replicas)]
    service = Service(LIGHTHOUSE, command, logs / "lighthouse.log")
    process = service.start(processes, time.monotonic())
    near = "localhost" if host.strip("[]") in ("", "::", "0.0.0.0", "127.0.0.1", "::1") else host
    http = f"{near}:{http_port}"
    try:
        _await_ready(service, process, http, tls, environ)
    except ConfigError:
        processes.kill(service.name)
        service.close()
        raise
    return service, f"{'http' if tls is None else 'https'}://{near}:{port}", http


def _await_ready(
    service: Service, process: subprocess.Popen[bytes], http: str, tls: TLS | None, environ: Mapping[str, str]
) -> None:
    deadline_s = time.monotonic() + READY_S
    while not is_ready(http, environ):
        if process.poll() is not None:
            raise ended_early("the lighthouse", process, service.log)
        if tls is not None and isinstance(why := diagnose(http, tls), UntrustedError):
            raise ConfigError(f"the new lighthouse at {http} can't be used: {why}")
        if time.monotonic() > deadline_s:
            raise ConfigError(f"the lighthouse at {http} is not ready after {READY_S:g} s; see {service.log}")
        time.sleep(LOOK_EVERY_S)


def _setting(read: Callable[[Mapping[str, str]], Setting], environ: Mapping[str, str]) -> Setting:
    """Return a setting of the environment. Raises: ConfigError: it is wrong."""
    try:
        return read(environ)
    except CoordinationConfigError as error:
        raise ConfigError(str(error)) from error


def is_ready(http: str, environ: Mapping[str, str]) -> bool:
    """Return whether a lighthouse answers there."""
    try:
        fetch([http], "/api/v1/status", environ, timeout_s=2.0)
    except ConfigError:
        return False
    return True


def free_port(host: str) -> int:
    """Return a port of this host that is free now. Raises: ConfigError: the host has no address here."""
    name = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
            return int(probe.getsockname()[1])
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--bind: this machine has no address {host!r} ({error}); give host:port") from error


def start_stores(
    processes: Processes, *, num_groups: int, logs: Path, environ: Mapping[str, str]
) -> tuple[Service, list[int]]:
    """Start the stores of all groups on this host, and wait until they answer.

    Without a secret they listen on loopback, like everything else of the job.

    Returns: the service, and the port of each group's store.
    Raises: ConfigError: they do not start.
    """
    token, tls = _setting(read_token, environ), _setting(TLS.from_environment, environ)
    is_local = is_for_this_machine(token, tls, insecure=False)
    host = "127.0.0.1" if is_local else "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    command = [sys.executable, "-m", "tft_suite.launch.stores", host]
    service = Service(STORES, [*command, *["0"] * num_groups], logs / "stores.log", reads_stdin=True)
    process = service.start(processes, time.monotonic())
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], READY_S)
    line = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
    if not line.endswith(b"\n"):
        if not ready:
            raise ConfigError(f"the stores of the replica groups are not ready after {READY_S:g} s; see {service.log}")
        raise ended_early("the stores' process", process, service.log)
    ports = [int(word) for word in line.split()]
    service.command = [*command, *map(str, ports)]
    return service, ports
