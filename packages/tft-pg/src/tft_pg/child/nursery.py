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
from datetime import timedelta
from typing import Final, final

from tft_pg.child.messages import MESSAGE_BYTES_MAX, decode, encode
from tft_pg.errors import ConfigureError
from tft_pg.forks import Inheritance, forks_wait, let_go_in_child

__all__ = ["NURSERY", "ChildProcess", "Nursery", "serve"]

logger = logging.getLogger(__name__)

_START_S: Final = 180.0
_LIMIT: Final = timedelta(seconds=60)
# After which a nursery that has answered before, and does not any more, is killed. Its children are killed with it, so
# a short timeout of one group is no reason.
_HUNG_S: Final = 10.0
_REPORTS_S: Final = (5.0, 30.0, 90.0)
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
        self._has_answered = False
        self._silent_s: float | None = None  # when the first request was sent that has no answer yet
        self._known = False

    def start(self) -> None:
        """Start the nursery, without waiting for it or for a running request. Harmless if it runs."""
        if self._lock.acquire(blocking=False):
            try:
                with suppress(OSError):  # a request tries again, and reports the error
                    self._start()
            finally:
                self._lock.release()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None and self._control is not None:
            return
        self._discard()
        self._has_answered, self._silent_s = False, None
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

    def child(self, *, check: Callable[[], None], limit: timedelta = _LIMIT) -> ChildProcess:
        """Return a new child, and wait for the nursery's interpreter if it has just been started.

        A nursery that has answered before gets `limit` for its answer. If it has not answered any request for 10 s by
        then, it is killed with all its children, and another is started for the next call.

        Args:
            check: raises if the wait is to end.
            limit: of the wait. For the imports of a new nursery it is 180 s at least.

        Raises: ConfigureError: no child could be made in time, or at all. Any error of `check`.
        """
        wait = _Wait(self, check, limit.total_seconds())
        while not self._lock.acquire(timeout=_STEP_S):
            if wait.is_over(self._has_answered):
                raise wait.error("another configure of this process waits for its child")
        try:
            for attempt in range(2):
                try:
                    self._start()
                    return self._ask(wait)
                except OSError as error:
                    has_ended = isinstance(error, ConnectionError)
                    if has_ended:
                        self._discard()
                    if not has_ended or attempt:  # it may have died while nobody needed it
                        raise ConfigureError(
                            f"no child process can be started for the group ({error}); see standard error for the "
                            "cause, and check the limits of memory, processes and descriptors",
                            is_own=True,
                        ) from error
            raise AssertionError("unreachable")
        finally:
            self._lock.release()

    def _ask(self, wait: _Wait) -> ChildProcess:
        """Request a child. Raises: ConnectionError: the nursery has ended. OSError, ConfigureError: no child."""
        control, process = self._control, self._process
        assert control is not None
        assert process is not None
        self._requests += 1
        number = self._requests
        with forks_wait():
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                socket.send_fds(control, [encode({"request": number})], [theirs.fileno()], socket.MSG_DONTWAIT)
            self._silent_s = self._silent_s or time.monotonic()
            poll = select.poll()
            poll.register(control, select.POLLIN)
            while True:
                if not poll.poll(_STEP_S * 1000):
                    if process.poll() is not None:  # a fork of this process may hold its socket open
                        raise ConnectionResetError("the nursery ended")
                    if wait.is_over(self._has_answered):
                        self._replace_hung()
                        raise wait.error(f"the helper process {process.pid} does not answer")
                    continue
                packet, descriptors = _receive(control)
                if not packet:
                    raise ConnectionResetError("the nursery ended")
                self._has_answered, self._silent_s = True, None
                answer = decode(packet)
                # An interrupted request is answered later. Its child ends, because nobody holds its socket.
                if answer.get("request") != number:
                    for descriptor in descriptors:
                        os.close(descriptor)
                    continue
                if not descriptors:
                    raise OSError(str(answer.get("error", "this process has no descriptor left")))
                return ChildProcess(int(answer["pid"]), descriptors[0], mine)
        except BaseException:
            mine.close()
            raise

    def _replace_hung(self) -> None:
        """Kill a nursery that does not answer any more, and start another."""
        process = self._process
        if process is None or self._silent_s is None or time.monotonic() < self._silent_s + _HUNG_S:
            return
        logger.warning(
            "killed the helper process %d and its children, because it did not answer for %.0f s; the groups in child "
            "processes need a new configure",
            process.pid,
            time.monotonic() - self._silent_s,
        )
        process.kill()
        self._discard()
        with suppress(OSError):  # the next request tries again
            self._start()

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
        process = self._process
        if not self._lock.acquire(timeout=_END_S):  # a request waits for it
            if process is not None:
                process.kill()
            return
        try:
            self._discard()
        finally:
            self._lock.release()

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


@final
class _Wait:
    """One wait for a child. It logs what it waits for when it lasts.

    Args:
        nursery: to wait for.
        check: raises if the wait is to end.
        limit_s: of the wait, if the nursery has answered before.
    """

    def __init__(self, nursery: Nursery, check: Callable[[], None], limit_s: float) -> None:
        self._nursery = nursery
        self._check = check
        self._limit_s = limit_s
        self._begun_s = time.monotonic()
        self._reports_s = list(_REPORTS_S)

    def is_over(self, has_answered: bool) -> bool:
        """Return whether the limit has passed. Raises: any error of `check`."""
        self._check()
        waited_s = time.monotonic() - self._begun_s
        if not has_answered and self._reports_s and waited_s >= self._reports_s[0]:
            del self._reports_s[0]
            logger.warning(
                "waiting for the helper process %s that imports torch, for %.0f s so far, at most %.0f s",
                self._nursery.pid,
                waited_s,
                self._start_s,
            )
        return waited_s >= (self._limit_s if has_answered else self._start_s)

    @property
    def _start_s(self) -> float:
        return max(self._limit_s, _START_S)

    def error(self, what: str) -> ConfigureError:
        """Return the error of a wait that is over."""
        return ConfigureError(
            f"no child process for the group within {time.monotonic() - self._begun_s:.1f} s: {what}; see standard "
            "error for the cause, or use a less loaded machine",
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
        if not descriptors:
            control.send(encode({"request": number, "error": "the helper process has no descriptor left"}))
            continue
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
