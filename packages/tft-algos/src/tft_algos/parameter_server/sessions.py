"""The open sessions of a parameter server, each with a thread and a process group of its own.

A session ends when `forward` returns or raises, when its client disconnects or does not join, and when the server
stops. Its group is then shut down, and its keys are removed from the store. No other session notices.

Law of this file: the life of sessions. How a client asks for one is in `app`.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Final, final

from tft_algos.errors import ConfigError, ServerBusyError
from tft_algos.parameter_server.joining import join, why_not_joined
from tft_algos.parameter_server.routes import OpenedSession
from tft_algos.parameter_server.session_store import SessionStore
from tft_pg import (
    CollectiveTimeoutError,
    CommunicatorFailedError,
    PeerDisconnectedError,
    ProcessGroup,
    ProcessGroupError,
)
from tft_pg.threads import join_within

__all__ = ["Session", "Sessions"]

THREAD_NAME: Final = "tft-ps-session"
_ABORT_AGAIN_S: Final = 0.05
_log = logging.getLogger("tft_algos.parameter_server")


@final
class Session:
    """One session, from its request to its end.

    Args:
        opened: what its client gets.
        client: the client's address, for messages.
    """

    def __init__(self, opened: OpenedSession, client: str) -> None:
        self.opened = opened
        self.client = client
        # Why the session can't begin, or "" as soon as its group exists.
        self.failure: Future[str] = Future()
        self.failure_status = 500
        # Done as soon as both sides have joined, or the session can't begin.
        self.joined: Future[None] = Future()
        self.is_over = False
        self._lock = threading.Lock()
        self._group: ProcessGroup | None = None
        self._is_stopped = False

    def __str__(self) -> str:
        return f"session {self.opened.session_id[:8]} of {self.client}"

    def was_stopped(self) -> bool:
        """Return whether `stop` was called."""
        return self._is_stopped

    def give(self, group: ProcessGroup) -> None:
        """Set the group of this session."""
        with self._lock:
            self._group = group

    def stop(self) -> None:
        """End the operations of this session, and return at once. Repeat the call until its thread has ended."""
        with self._lock:
            self._is_stopped, group = True, self._group
        if group is not None:
            group.abort()

    def release(self) -> None:
        """Shut down the group."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.shutdown()


@final
class Sessions:
    """All sessions of one server.

    Args:
        new_group: makes the server's group of a session.
        forward: serves one session.
        store: of the sessions.
        sessions_max: the number of sessions at one time.
        join_timeout: how long a client may take to join.
    """

    def __init__(
        self,
        *,
        new_group: Callable[[], ProcessGroup],
        forward: Callable[[str, ProcessGroup], None],
        store: SessionStore,
        sessions_max: int,
        join_timeout: timedelta,
    ) -> None:
        self._new_group = new_group
        self._forward = forward
        self._store = store
        self._sessions_max = sessions_max
        self._join_timeout = join_timeout
        self._lock = threading.Lock()
        self._open: dict[str, Session] = {}
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._open)

    def open(self, client: str) -> Session:
        """Open a session, and return at once. `failure` says when the client may join.

        Raises: ServerBusyError: there are as many sessions as allowed, or the server stops.
        """
        session_id = secrets.token_hex(16)
        opened = OpenedSession(session_id, self._store.address_of(session_id), secrets.token_hex(32))
        session = Session(opened, client)
        thread = threading.Thread(
            target=self._run, args=(session,), name=f"{THREAD_NAME}-{session_id[:8]}", daemon=True
        )
        with self._lock:
            if self._is_closed:
                raise ServerBusyError("the server stops; ask another one", status=503)
            if len(self._open) >= self._sessions_max:
                raise ServerBusyError(
                    f"the server has {len(self._open)} sessions, as many as it allows; ask again later, or raise its "
                    "max_sessions",
                    status=503,
                )
            self._open[session_id] = session
            try:
                thread.start()
            except RuntimeError as error:
                del self._open[session_id]
                raise ServerBusyError(f"the server has no thread left ({error}); ask again later", status=503) from None
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        return session

    def close(self, within_s: float) -> None:
        """End all sessions, and wait for their threads. A `forward` that does not end is left alone after that time."""
        deadline_s = time.monotonic() + within_s
        with self._lock:
            self._is_closed = True
            threads = [each for each in self._threads if each is not threading.current_thread()]
        while any(each.is_alive() for each in threads) and time.monotonic() < deadline_s:
            # Again, because an abort before a configure does not end that configure.
            with self._lock:
                sessions = list(self._open.values())
            for session in sessions:
                session.stop()
            for each in threads:
                each.join(min(_ABORT_AGAIN_S, max(0.0, deadline_s - time.monotonic())))
        for each in threads:
            join_within(each, max(0.0, deadline_s - time.monotonic()))

    def _is_open(self, session_id: str) -> bool:
        with self._lock:
            session = self._open.get(session_id)
            return session is not None and not session.is_over

    def _run(self, session: Session) -> None:
        try:
            self._serve(session)
        finally:
            if not session.failure.done():
                session.failure.set_result("the server can't serve a session; see its log")
            if not session.joined.done():
                session.joined.set_result(None)
            try:
                session.release()
            finally:
                self._end(session)

    def _serve(self, session: Session) -> None:
        self._remove_keys()
        too_full = self._why_too_full()
        if too_full:
            _log.warning("%s can't begin: %s", session, too_full)
            session.failure_status = 503
            session.failure.set_result(too_full)
            return
        group = self._make_group(session)
        if group is None or not self._join(session, group):
            return
        session.joined.set_result(None)
        _log.info("%s began", session)
        try:
            self._forward(session.opened.session_id, group)
        except Exception as error:
            _log_end(session, error)
        else:
            _log.info("%s ended", session)

    def _why_too_full(self) -> str:
        try:
            return self._store.too_full()
        except RuntimeError as error:
            return f"the store of the sessions does not answer ({error}); ask again later"

    def _make_group(self, session: Session) -> ProcessGroup | None:
        """Set the session's `failure`. Returns: its group. None: the session can't begin."""
        try:
            group = self._new_group()
        except ConfigError as error:
            _log.error("%s can't begin: %s", session, error)
            session.failure.set_result(f"the server can't make a group: {error}")
            return None
        except Exception as error:
            _log.exception("%s can't begin, because new_process_group failed; fix it", session)
            session.failure.set_result(f"new_process_group failed on the server ({type(error).__name__}); see its log")
            return None
        session.give(group)
        if session.was_stopped():
            session.failure.set_result("the server stops; ask another one")
            return None
        session.failure.set_result("")
        return group

    def _join(self, session: Session, group: ProcessGroup) -> bool:
        """Return whether the client has joined, and `forward` may begin."""
        try:
            has_proved = join(group, session.opened, 0, self._join_timeout)
        except ProcessGroupError as error:
            if session.was_stopped():
                _log.info("%s ended before it began, because the client disconnected or the server stops", session)
            else:
                _log.warning("%s ended before it began: %s", session, why_not_joined(error, "the client"))
            return False
        except Exception:
            _log.exception("%s ended before it began by an error in configure", session)
            return False
        if not has_proved:
            _log.warning(
                "%s ended before it began, because the process that joined does not know the session's key; check who "
                "reaches port %d, the store's",
                session,
                self._store.port,
            )
        return has_proved and not session.was_stopped()

    def _end(self, session: Session) -> None:
        session.is_over = True
        self._remove_keys()
        with self._lock:
            del self._open[session.opened.session_id]

    def _remove_keys(self) -> None:
        try:
            self._store.remove_keys(self._is_open)
        except RuntimeError as error:
            _log.warning(
                "the keys of sessions that are over can't be removed now (%s); the next session removes them", error
            )


def _log_end(session: Session, error: Exception) -> None:
    """Log why `forward` has raised."""
    if session.was_stopped():
        _log.info("%s ended, because the server stops", session)
    elif isinstance(error, PeerDisconnectedError):
        _log.info("%s ended, because the client disconnected", session)
    elif isinstance(error, CollectiveTimeoutError):
        _log.warning(
            "%s ended, because the client was silent for longer than the group's timeout; give the group of "
            "new_process_group a timeout above the longest pause of a client",
            session,
        )
    elif isinstance(error, CommunicatorFailedError):
        _log.warning(
            "%s ended, because the library of its group failed. The client may have sent a message that is longer than "
            "the tensor that receives it: %s",
            session,
            error,
        )
    else:
        _log.error("%s ended by an error in forward", session, exc_info=error)
