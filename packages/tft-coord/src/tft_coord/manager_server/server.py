"""`ManagerServer`: the trainer's object for its replica group's agent.

Law of this file: starting, querying and ending the server, in a child process or on the process's loop.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Final, final

from tft_coord.errors import ConfigError, CoordinationClosedError, CoordinationError, RequestTimeoutError
from tft_coord.forks import Inheritance, let_go_in_child
from tft_coord.manager_server.config import ManagerServerConfig
from tft_coord.timeouts import Timeouts
from tft_coord.tls import TLS
from tft_coord.tokens import Token
from tft_coord.transport.address import host_of

GOODBYE_WITHIN_S: Final = 3.0
_REPORT_BYTES: Final = 64 * 1024

# Isolated (-I): neither the working directory nor PYTHON* variables come before the parent's import path.
_BOOT: Final = """\
import json, os, sys
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
boot = json.loads(sys.stdin.buffer.readline())
sys.path[:] = boot["path"]
from tft_coord.manager_server.child import main
main(boot["settings"], boot["report_fd"], boot["parent_pid"])
"""


@final
class ManagerServer:
    """A replica group's agent at the lighthouse; one for each group, made by its rank 0.

    It runs in its own child process, so that a trainer that holds the interpreter lock does not look dead. The child
    ends when this process does, in whatever way, and tells the lighthouse. It never imports torch.

    Args:
        replica_id: of the group; a new one for each life of the group (`name:uuid4`).
        lighthouse_addr: `host:port` or `http://host:port`. It need not be up yet.
        hostname: the ranks and the other groups reach this server under this name.
        bind: `host:port` to listen at, `[::]:0` for all interfaces and a free port.
        store_addr: of the group's rendezvous store, forwarded to all members.
        world_size: ranks in the group.
        heartbeat_interval: torchft's pace of heartbeats. It is only checked; streams beat by `timeouts` instead.
        connect_timeout: how long the server may take to start.
        quorum_retries: torchft's number of attempts. It is only checked; a stream redials for as long as the process
            lives, so that no failure of the lighthouse ends a trainer before its own deadline.
        job: of the group; jobs on one lighthouse never meet.
        timeouts: of the job.
        replaces: replica id of this group's predecessor, which is lost from now on, or "".
        token: shared secret of the job, a `TokenFile` with it, or None. Without one it listens at loopback only, and
            `hostname` must be of loopback too.
        in_process: serve on this process's loop thread instead of in a child. For tests.
        insecure: serve everybody without a secret.
        tls: certificates for all connections, to the ranks and to the lighthouse; None: they are not encrypted. With
            `check_client` the certificates take the place of a secret.
        wait: return when it serves. False: return while the child starts, which takes a fraction of a second that the
            caller can use; `address()` waits for it then, and raises the error that kept it from serving.
    Raises:
        ConfigError: an argument is invalid, or the address can't be bound.
        RequestTimeoutError: the child did not start within connect_timeout.
        CoordinationError: the child ended before it served.
    """

    def __init__(
        self,
        replica_id: str,
        lighthouse_addr: str,
        hostname: str,
        bind: str,
        store_addr: str,
        world_size: int,
        heartbeat_interval: timedelta = timedelta(milliseconds=100),
        connect_timeout: timedelta = timedelta(seconds=60),
        quorum_retries: int = 0,
        *,
        job: str = "default",
        timeouts: Timeouts = Timeouts(),  # noqa: B008  # frozen
        replaces: str = "",
        token: Token = None,
        in_process: bool = False,
        wait: bool = True,
        insecure: bool = False,
        tls: TLS | None = None,
    ) -> None:
        if heartbeat_interval <= timedelta(0) or connect_timeout <= timedelta(0):
            raise ConfigError("heartbeat_interval and connect_timeout must be above zero")
        if quorum_retries < 0:
            raise ConfigError(f"quorum_retries is {quorum_retries}; give 0 or more")
        config = ManagerServerConfig(
            replica_id=replica_id,
            lighthouse_addr=lighthouse_addr,
            hostname=hostname,
            bind=bind,
            store_addr=store_addr,
            world_size=world_size,
            job=job,
            replaces=replaces,
            token=token,
            timeouts=timeouts,
            insecure=insecure,
            tls=tls,
        )
        self._replica_id = replica_id
        self._scheme = "http" if tls is None else "https"
        self._server: _Child | _InProcess | None = (
            _InProcess(config) if in_process else _Child(config, connect_timeout.total_seconds(), wait=wait)
        )

    def address(self) -> str:
        """Return `http://host:port` of this server, when it serves; `https://` with TLS.

        Raises: CoordinationClosedError: it was shut down. With `wait=False` also the error that kept it from serving,
            as the constructor does.
        """
        server = self._server
        if server is None:
            raise CoordinationClosedError(
                f"the manager server of replica {self._replica_id} was shut down; make a new one"
            )
        return f"{self._scheme}://{server.address()}"

    def alive(self) -> bool:
        """Return whether it serves; False after shutdown and when its process has ended."""
        return self._server is not None and self._server.alive()

    def was_killed(self) -> bool:
        """Return whether a signal ended its process, so that a new one may work; False while the process runs."""
        return isinstance(self._server, _Child) and self._server.was_killed()

    def kill(self) -> None:
        """Kill its process in any state: stopped, hung, starting. `shutdown` must follow."""
        if isinstance(self._server, _Child):
            self._server.kill()

    def shutdown(self) -> None:
        """Say goodbye to the ranks and to the lighthouse, and end. Its process and threads end too. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()

    def __enter__(self) -> ManagerServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shutdown()


@final
class _InProcess:
    def __init__(self, config: ManagerServerConfig) -> None:
        from tft_coord.manager_server.shell import ManagerServerShell
        from tft_coord.transport.loop import LoopShare

        async def start() -> tuple[ManagerServerShell, str]:
            shell = ManagerServerShell(config, trainer_pid=os.getpid())
            return shell, await shell.start()

        self._share = LoopShare(f"the manager server of replica {config.replica_id}", at_exit=self.shutdown)
        try:
            self._shell, self._address = self._share.run(start())
        except BaseException:
            self._share.give_back()
            raise

    def address(self) -> str:
        return self._address

    def alive(self) -> bool:
        return True

    def shutdown(self) -> None:
        if self._share.inherited:
            return
        self._share.run_last(self._shell.stop("it was shut down", left=True))
        self._share.give_back()


@final
class _Child:
    """The child process, and the pipe whose end shows it the end of this process."""

    def __init__(self, config: ManagerServerConfig, start_within_s: float, *, wait: bool) -> None:
        if not sys.executable:
            raise ConfigError("sys.executable is empty, so no manager server can start; use in_process=True")
        if not wait:
            _check_free(config)
        self._replica_id = config.replica_id
        self._start_within_s = start_within_s
        self._started_s = time.monotonic()
        self._reading = threading.Lock()
        self._report: bytes | None = None
        orders_fd, pipe_fd = os.pipe()
        report_fd, childs_fd = os.pipe()
        pipe = _Pipe(pipe_fd)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOT, "tft-manager-server", config.replica_id],
                stdin=orders_fd,
                stdout=subprocess.DEVNULL,
                pass_fds=[childs_fd],
                # The child has a session of its own: Ctrl-C in the terminal reaches the parent, and the child only
                # through it.
                start_new_session=True,
            )
        except BaseException:
            pipe.close()
            os.close(report_fd)
            raise
        finally:
            os.close(orders_fd)
            os.close(childs_fd)
        self._report_pipe = open(report_fd, "rb", buffering=0)  # noqa: SIM115  # closed by shutdown
        self._owner_pid = os.getpid()
        self._end = weakref.finalize(self, _end, self._process, pipe, self._owner_pid)
        self._close_report = weakref.finalize(self, self._report_pipe.close)
        let_go_in_child(self)
        try:
            boot = {
                "path": [str(entry) for entry in sys.path],
                "settings": config.to_json(),
                "report_fd": childs_fd,
                "parent_pid": self._owner_pid,
            }
            pipe.write(json.dumps(boot).encode() + b"\n")
            # The starter of a server becomes its client next. The client's imports take as long as the child's start.
            importlib.import_module("tft_coord.client.manager")
            # before the end of the object that owns both
            importlib.import_module("tft_coord.transport.loop").end_at_exit()
            if wait:
                self.address()
        except BaseException:
            self._process.kill()
            self.shutdown()
            raise

    def address(self) -> str:
        with self._reading:
            if self._report is None and not self._report_pipe.closed:
                left_s = self._started_s + self._start_within_s - time.monotonic()
                self._report = _read_line(self._report_pipe.fileno(), left_s)
            report, is_closed = self._report, self._report_pipe.closed
        if report is None and is_closed:
            raise CoordinationClosedError(
                f"the manager server of replica {self._replica_id} was shut down while it started"
            )
        if report is None:
            raise RequestTimeoutError(
                f"the manager server of replica {self._replica_id} did not start within {self._start_within_s:g} s; "
                "raise connect_timeout, or check the load of this machine"
            )
        if not report:
            raise CoordinationError(
                f"the manager server of replica {self._replica_id} ended (exit code {self._process.wait()}) before it "
                "was ready; see its output on standard error"
            )
        reported = json.loads(report)
        if "error" in reported:
            raise ConfigError(reported["error"])
        return str(reported["address"])

    def alive(self) -> bool:
        return self._process.poll() is None

    def was_killed(self) -> bool:
        return (self._process.poll() or 0) < 0

    def kill(self) -> None:
        if os.getpid() == self._owner_pid:
            self._process.kill()

    def forked(self) -> Inheritance:
        """Return what a forked child inherits: only the pipe with the server's report."""
        return Inheritance([-1 if self._report_pipe.closed else self._report_pipe.fileno()])

    def shutdown(self) -> None:
        self._end()
        if os.getpid() == self._owner_pid:  # a forked child's copy of the lock may never be released
            with self._reading:  # the child has ended, and with it the wait for its report
                self._close_report()


def _check_free(config: ManagerServerConfig) -> None:
    """Check at once that the port is free; the child checks it again later.

    Raises: ConfigError: the port is in use.
    """
    host, port = host_of(config.listens_at), config.listens_at.rpartition(":")[2]
    if not port.isdecimal() or int(port) == 0:
        return
    with suppress(OSError):  # the child reports other faults of the address
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    trial.bind(address)
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        raise config.cannot_listen() from error
                    raise


def _read_line(fd: int, within_s: float) -> bytes | None:
    """Return a line from the pipe; b"" when it ends before, None when it takes too long."""
    line = b""
    give_up_at = time.monotonic() + within_s
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, give_up_at - time.monotonic())):
                return None
            part = os.read(fd, _REPORT_BYTES)
            if not part:
                return b""
            line += part
    return line


@final
class _Pipe:
    """The parent's end of the pipe to a child. The child ends when the pipe closes, by a call or by this
    process's end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        let_go_in_child(self)

    def forked(self) -> Inheritance:
        """Return the descriptor for a forked child to release: a data loader's worker must not keep the server
        alive."""
        return Inheritance([self._fd])

    def write(self, data: bytes) -> None:
        with suppress(BrokenPipeError):  # the child has ended; its report, or its exit code, shows why
            while data:
                data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _end(process: subprocess.Popen[bytes], pipe: _Pipe, owner_pid: int) -> None:
    """Say goodbye, close the pipe, and wait for the child's end; kill the child if it does not end."""
    if os.getpid() != owner_pid:
        return  # a forked child of the trainer has a copy of the object; the server belongs to the trainer
    pipe.write(b"goodbye\n")
    pipe.close()
    try:
        process.wait(GOODBYE_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # the kernel does not end the process; nothing more can be done
            process.wait(GOODBYE_WITHIN_S)
