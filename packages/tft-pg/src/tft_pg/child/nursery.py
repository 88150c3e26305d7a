"""The nursery: a process with everything imported, which forks a child for a group within milliseconds.

A trainer can't fork itself: it has threads, and a device in use. An interpreter of its own takes seconds to import
torch. So each process that has such a group starts one nursery, a program of its own, and each `configure` gets a fresh
child from it. The nursery has no thread and opens no device. It lives as long as its trainer.

The nursery and the children end with the trainer, whatever ends it. Their sockets then report the end. A child that
does not read any more is killed by the kernel as soon as the nursery has ended.

Law of this file: processes are made here, and known by a pidfd, so that no signal reaches a stranger.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, final

from tft_pg.child.messages import MESSAGE_BYTES_MAX, decode, encode
from tft_pg.errors import ConfigureError
from tft_pg.forks import Inheritance, forks_wait, let_go_in_child

__all__ = ["NURSERY", "ChildProcess", "Nursery", "serve"]

logger = logging.getLogger(__name__)

_START_S: Final = 60.0
_STEP_S: Final = 0.05
_END_S: Final = 2.0
_PR_SET_PDEATHSIG: Final = 1
_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tft_pg.child.nursery import serve; serve(int(sys.argv[2]))"
)
_THREADS_ENV: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@final
@dataclass(eq=False)
class ChildProcess:
    """A child of the nursery.

    Args:
        pid: its process id.
        pidfd: a descriptor that names exactly this process.
        socket: to exchange messages with it.
        closed: whether this process has closed the descriptors.
    """

    pid: int
    pidfd: int
    socket: socket.socket
    closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def kill(self) -> None:
        """Kill the process, if it still runs."""
        with self._lock, suppress(ProcessLookupError):
            if not self.closed:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Wait until the process has ended, and return whether it has."""
        with self._lock:
            if self.closed:
                return True
            pidfd = os.dup(self.pidfd)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return bool(poll.poll(within_s * 1000))
        finally:
            os.close(pidfd)

    def close(self) -> None:
        """Close the descriptors, once. A child that still runs ends itself then."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self.socket.close()
            os.close(self.pidfd)


@final
class Nursery:
    """The nursery of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held during one request
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._requests = 0
        self._known = False

    def start(self) -> None:
        """Start the nursery, without waiting for it. Harmless if it runs."""
        with self._lock:
            self._start()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None and self._control is not None:
            return
        self._discard()
        if not self._known:
            self._known = True
            let_go_in_child(self)
            atexit.register(self.end)
        with forks_wait():
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, **dict.fromkeys(_THREADS_ENV, "1")}
        command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                # Signals to the trainer's job are for the trainer. The children end with the trainer.
                start_new_session=True,
            )

    def child(self, *, check: Callable[[], None]) -> ChildProcess:
        """Return a new child, and wait for the nursery's interpreter if it has just been started.

        Args:
            check: raises if the wait is to end.

        Raises: ConfigureError: no child could be made within 60 s. Any error of `check`.
        """
        deadline_s = time.monotonic() + _START_S
        while not self._lock.acquire(timeout=_STEP_S):
            check()
            _check_time(deadline_s, "another configure of this process waits for its child")
        try:
            for attempt in range(2):
                try:
                    self._start()
                    return self._ask(check, deadline_s)
                except OSError as error:
                    # The nursery may have died while nobody needed it.
                    self._discard()
                    if attempt:
                        raise ConfigureError(
                            f"no child process can be started for the group ({error}); see standard error for the "
                            "cause, and check the limits of memory, processes and descriptors",
                            is_own=True,
                        ) from error
            raise AssertionError("unreachable")
        finally:
            self._lock.release()

    def _ask(self, check: Callable[[], None], deadline_s: float) -> ChildProcess:
        assert self._control is not None
        self._requests += 1
        number = self._requests
        with forks_wait():
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                socket.send_fds(self._control, [encode({"request": number})], [theirs.fileno()])
            poll = select.poll()
            poll.register(self._control, select.POLLIN)
            while True:
                if not poll.poll(_STEP_S * 1000):
                    check()
                    _check_time(deadline_s, "the interpreter of the nursery did not start")
                    continue
                packet, descriptors = _receive(self._control)
                if not packet:
                    raise ConnectionResetError("the nursery ended")
                answer = decode(packet)
                # An interrupted request is answered later. Its child ends, because nobody holds its socket.
                if answer.get("request") != number:
                    for descriptor in descriptors:
                        os.close(descriptor)
                    continue
                if not descriptors:
                    raise OSError(str(answer.get("error", "no child")))
                return ChildProcess(int(answer["pid"]), descriptors[0], mine)
        except BaseException:
            mine.close()
            raise

    def _discard(self) -> None:
        process, self._process = self._process, None
        control, self._control = self._control, None
        if control is not None:
            control.close()
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
                return
            process.kill()
            process.wait()

    def end(self) -> None:
        """End the nursery and all its children. The next group starts another."""
        with self._lock:
            self._discard()

    @property
    def pid(self) -> int | None:
        """Return the process id of the running nursery."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def forked(self) -> Inheritance:
        """Forget the parent's nursery in a forked child."""
        self._lock = threading.Lock()
        process, self._process = self._process, None
        control, self._control = self._control, None
        self._known = False
        atexit.unregister(self.end)
        return Inheritance(
            descriptors=[] if control is None else [control.fileno()],
            kept=[each for each in (process, control) if each is not None],
        )


NURSERY: Final = Nursery()
"""The nursery of this process. Nothing is started before the first group is made."""


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    packet, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
    return packet, descriptors


def _check_time(deadline_s: float, what: str) -> None:
    if time.monotonic() >= deadline_s:
        raise ConfigureError(
            f"no child process for the group within {_START_S:g} s: {what}; see standard error for the cause, or use a "
            "less loaded machine",
            is_own=True,
        )


# --- in the nursery ---------------------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Fork a child for each request, until the trainer ends. The main function of the nursery."""
    import tft_pg.child.worker as worker  # imports torch, once for all children

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside the threads of a numeric library
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=descriptor)
    while True:
        packet, descriptors = _receive(control)
        if not packet:
            os._exit(0)
        number = decode(packet)["request"]
        theirs = socket.socket(fileno=descriptors[0])
        try:
            _fork(control, theirs, number, worker.serve)
        except OSError as error:
            control.send(encode({"request": number, "error": str(error)}))
        finally:
            theirs.close()


def _fork(control: socket.socket, theirs: socket.socket, number: int, run: Callable[[socket.socket], None]) -> None:
    nursery = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == nursery:
                control.close()
                run(theirs)
        finally:
            os._exit(1)
    pidfd = os.pidfd_open(pid)
    try:
        socket.send_fds(control, [encode({"request": number, "pid": pid})], [pidfd])
    finally:
        os.close(pidfd)
