"""The side that has the state.

One separate thread serves every reader from the snapshot's buffer, one piece at a time. So a slow reader costs only a
socket, and the trainer's thread only publishes snapshots. If memory is short, the server lends the state instead.
Readers then get the trainer's own tensors, and the trainer waits. A reader that comes before the state waits here,
because in the asynchronous mode it asks before the source has taken its snapshot.

The port is open from the start, but the import of the web server takes a tenth of a second of a core. A trainer that
starts or recovers may not have that time. Then the thread imports the web server at first use, or on request. If the
import fails, for example without a free descriptor, it is retried every second, and readers wait.

Law of this file: the trainer's side, and the thread. The app contains what the loop does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

from tft_ckpt.descriptors import raise_limit
from tft_ckpt.errors import StateUnavailableError, TransportClosedError
from tft_ckpt.forks import Inheritance, let_go_in_child
from tft_ckpt.key import StateKey
from tft_ckpt.state.buffers import Buffer
from tft_ckpt.state.lending import Lending
from tft_ckpt.state.manifest import Manifest
from tft_ckpt.state.memory import describe_shortage, free_memory
from tft_ckpt.state.snapshot import Snapshot
from tft_ckpt.state.tree import Limits
from tft_ckpt.threads import join_within
from tft_ckpt.transfer.relay import Relay
from tft_ckpt.transfer.routes import Token
from tft_ckpt.transfer.snapshot_store import SnapshotStore

if TYPE_CHECKING:
    from tft_ckpt.state.target import Target
    from tft_ckpt.transfer.app import App
    from tft_ckpt.transfer.tls import ContextSource

__all__ = ["Relay", "StateServer"]

THREAD_NAME = "tft-ckpt-http"
PREPARE_THREAD_NAME = "tft-ckpt-memory"

_NO_KEY = StateKey(0, 0, 0, 0)  # the key of a staged snapshot

_IMPORT_AGAIN_S: Final = 1.0
_LOG_EVERY_S: Final = 60.0
_END_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.01  # the interval of checks for the last reader of a live state

_log = logging.getLogger("tft_ckpt.transfer")


class NotEnoughMemoryError(StateUnavailableError):
    """A second copy of a state does not fit into memory."""


@final
class StateServer:
    """A server of one snapshot store, and of the states that this process receives, over HTTP, until `close`.

    The server raises this process's limit of open files to the hard one, because each reader needs one.

    Args:
        listener: bound and listening; belongs to the server from now on.
        token: the token that readers must present, or None.
        chunk_bytes: length of the chunks of future states.
        limits: the largest state that is accepted.
        silence_s: the limit for readers that take no data and for connections without requests. They are disconnected
            after it.
        send_bytes_per_s: the rate limit for all readers together, or None.
        keep_buffers: whether to keep the memory of an unused state for the next one. Otherwise the memory is returned
            to the system. That happens when the next state is offered and no reader is left, or after silence_s without
            requests.
        tls: returns the TLS context of the next connection, or None for plain HTTP.
        import_later: whether to import the web server at first use or at `get_ready`, and not at once.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        token: Token,
        chunk_bytes: int,
        limits: Limits,
        silence_s: float,
        send_bytes_per_s: float | None = None,
        keep_buffers: bool = True,
        tls: ContextSource | None = None,
        import_later: bool = False,
    ) -> None:
        raise_limit()
        self._listener = listener
        self._token = token
        self._send_bytes_per_s = send_bytes_per_s
        self._tls = tls
        self._chunk_bytes = chunk_bytes
        self._limits = limits
        self._silence_s = silence_s
        self._lock = threading.Lock()  # guards the store and the relays
        self._store = SnapshotStore(keep_buffers=keep_buffers)
        self._relays: dict[Relay, None] = {}  # in order, because readers of one key get the last
        self._closed = False
        self._failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._needed = asyncio.Event()
        if not import_later:
            self._needed.set()
        # Only the loop's thread uses these two.
        self._app: App | None = None
        self._pending: list[Callable[[App], object]] = []
        self._is_importing = False
        self._preparing: threading.Thread | None = None
        self._parent_pid = 0  # in a forked child: the process that owns the original of this server
        let_go_in_child(self)
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    # ---- the trainer's side: any thread except the loop's ----

    def offer(self, state: object, *, key: StateKey, expected: int, check: Callable[[], None]) -> None:
        """Take a snapshot on the calling thread and publish it in place of the previous one.

        Without memory for a second copy, the server serves the live tensors. The call then returns when the readers
        have the state, so that no code changes it in the meantime.

        Args:
            state: the state.
            key: the name of the state.
            expected: the number of expected readers. With any, the checksums are computed at once.
            check: called when the snapshot is taken, and repeatedly during a wait. It raises when it is too late.

        Raises: the errors of `check` and of `Snapshot.take`, after the waiting readers of this key have been informed.
            TransportClosedError. StateUnavailableError: there is no memory for a second copy, and no reader is
            expected.
        """
        with self._lock:
            self._check_open()
            overdue = self._store.begin(key)
        if overdue:
            self._post(lambda app: app.disconnect_readers(overdue))
        try:
            snapshot = Snapshot.take(
                state, key=key, chunk_bytes=self._chunk_bytes, limits=self._limits, allocate=self._allocate
            )
            check()
        except NotEnoughMemoryError as error:
            if expected:
                self._lend(state, key=key, expected=expected, check=check, why=str(error))
                return
            self._publish_failure(error)
            raise
        except BaseException as error:
            self._publish_failure(error)
            raise
        with self._lock:
            self._check_open()
            self._store.publish(snapshot)
        self._post(lambda app: app.published(snapshot, expected > 0))

    def _publish_failure(self, error: BaseException) -> None:
        """Tell the readers that wait for the last announced state about its failure."""
        with self._lock:
            self._store.fail(str(error) or type(error).__name__)
        self._post(lambda app: app.wake())

    def _lend(self, state: object, *, key: StateKey, expected: int, check: Callable[[], None], why: str) -> None:
        """Serve a state from its live tensors, and wait on the calling thread until its readers have it.

        At the end, in any case, the remaining readers are disconnected before this returns. They must not get a byte
        that the trainer has changed.
        """
        try:
            snapshot = Snapshot.live(state, key=key, chunk_bytes=self._chunk_bytes, limits=self._limits)
        except BaseException as error:
            self._publish_failure(error)
            raise
        began_s = time.monotonic()
        _log.warning(
            "state %s is served without a second copy, so training waits until %d replicas have it: %s. To avoid the "
            "wait, free memory or raise the container's limit",
            key,
            expected,
            why,
        )
        try:
            with self._lock:
                self._check_open()
                self._store.publish(snapshot)
            self._post(lambda app: app.published(snapshot, True))
            lending = Lending(expected, began_s)
            while not self._is_read(lending, snapshot):
                check()
                time.sleep(_POLL_S)
        finally:
            self._end_lending(snapshot)
        _log.info("training continues after %.1f s, in which state %s was served", time.monotonic() - began_s, key)

    def _is_read(self, lending: Lending, snapshot: Snapshot) -> bool:
        with self._lock:
            self._check_open()
            num_seen, num_holding = self._store.num_requested(snapshot.key), self._store.num_holding(snapshot)
        return lending.is_over(num_seen=num_seen, num_holding=num_holding, now_s=time.monotonic())

    def _end_lending(self, snapshot: Snapshot) -> None:
        """Stop serving a live state, and wait until no reader gets a byte of it any more."""
        with self._lock:
            self._store.retract(snapshot, "it was served only while training waited; recover from the next state")
        over = threading.Event()

        def end() -> None:
            snapshot.end()
            if self._app is not None:
                self._app.disconnect_readers([snapshot])
                self._app.wake()
            over.set()

        try:
            self._loop.call_soon_threadsafe(end)
        except RuntimeError:  # the loop is closed, with every connection
            snapshot.end()
            return
        if not over.wait(_END_TIMEOUT_S):
            # Readers detect later changes by the checksums, and discard them.
            snapshot.end()
            _log.error(
                "the server's thread did not respond for %g s; readers of state %s may have to request it again",
                _END_TIMEOUT_S,
                snapshot.key,
            )

    def stage(self, state: object, *, check: Callable[[], None]) -> Snapshot:
        """Take a snapshot without a key on the calling thread. `publish` or `recycle` must follow.

        Args:
            state: the state.
            check: called when the snapshot is taken. It raises when it is too late.

        Raises: the errors of `check` and of `Snapshot.take`; TransportClosedError.
        """
        with self._lock:
            self._check_open()
            self._store.retire_unread()
        buffers: list[Buffer] = []

        def allocate(num_bytes: int) -> Buffer:
            buffers.append(self._allocate(num_bytes))
            return buffers[0]

        try:
            snapshot = Snapshot.take(
                state, key=_NO_KEY, chunk_bytes=self._chunk_bytes, limits=self._limits, allocate=allocate
            )
            check()
        except BaseException:
            for buffer in buffers:
                self.recycle(buffer)
            raise
        return snapshot

    def publish(self, snapshot: Snapshot, *, key: StateKey, expected: bool) -> None:
        """Publish a staged snapshot under its key, in place of the previous state. Raises: TransportClosedError."""
        named = snapshot.named(key, limits=self._limits)
        with self._lock:
            self._check_open()
            overdue = self._store.begin(key)
            self._store.publish(named)
        if overdue:
            self._post(lambda app: app.disconnect_readers(overdue))
        self._post(lambda app: app.published(named, expected))

    def recycle(self, buffer: Buffer | None) -> None:
        """Take back the buffer of an unused staged snapshot."""
        with self._lock:
            self._store.recycle(buffer)

    def refuse(self, key: StateKey, sentence: str) -> None:
        """Publish a refusal in place of a state with that key. Raises: TransportClosedError."""
        with self._lock:
            self._check_open()
            overdue = self._store.begin(key)
            self._store.fail(sentence)
        self._post(lambda app: app.disconnect_readers(overdue))
        self._post(lambda app: app.wake())

    def relay(self, manifest: Manifest, manifest_bytes: bytes, target: Target) -> Relay:
        """Let peers read the finished chunks of a state that this process receives.

        If a state of the same key is published, readers get that one. An older relay of the same key gets no new
        readers any more.

        Args:
            manifest, manifest_bytes: of the state, as its source sent it.
            target: the memory that receives the state. No code writes to a finished chunk until the relay has ended.

        Raises: TransportClosedError.
        """
        relay = Relay(
            manifest,
            manifest_bytes,
            target,
            on_have=lambda: self._post(lambda app: app.relay_has(), is_use=False),
            on_end=self._relay_ended,
        )
        with self._lock:
            self._check_open()
            self._relays[relay] = None
        # A reader's connection triggers the import, so a receiver need not import a web server.
        self._post(lambda app: app.relay_began(relay), is_use=False)
        return relay

    def _relay_ended(self, relay: Relay) -> None:
        with self._lock:
            self._relays.pop(relay, None)
        self._post(lambda app: app.relay_ended(relay), is_use=False)

    def get_ready(self) -> None:
        """Import the web server in the background, before a reader waits for it."""
        self._post(lambda app: None)

    def prepare(self, num_bytes: int) -> None:
        """Prepare memory for a state of this size in the background, because the first touch of fresh pages is
        expensive.

        Otherwise the trainer's thread would pay that cost when it first serves, while all others wait for it. Without
        keep_buffers the call does nothing.
        """
        with self._lock:
            if self._closed or self._preparing is not None or not self._store.wants_memory(num_bytes):
                return
            self._preparing = threading.Thread(
                target=self._prepare, args=(num_bytes,), name=PREPARE_THREAD_NAME, daemon=True
            )
            self._preparing.start()

    def _prepare(self, num_bytes: int) -> None:
        try:
            self._check_memory(num_bytes)
            buffer = Buffer(num_bytes)
        except StateUnavailableError as error:
            _log.warning("no memory is reserved for serving a state: %s", error)
        else:
            buffer.touch(lambda: self._closed)
            with self._lock:
                self._store.keep(buffer)
        with self._lock:
            self._preparing = None

    def close(self, *, wait: bool) -> None:
        """Close the port and every connection, and end the threads."""
        with self._lock:
            first, self._closed = not self._closed, True
            preparing = self._preparing
        if first:
            self._post(lambda app: app.stop())
        if wait:
            if self._is_importing:
                # An import can't be interrupted, and takes long on a busy machine. No work follows it.
                self._thread.join(_END_TIMEOUT_S)
            else:
                join_within(self._thread)
            if preparing is not None:
                join_within(preparing)

    def forked(self) -> Inheritance:
        """Close the server in a forked child. The port, the connections and the loop belong to the parent."""
        self._parent_pid = os.getppid()
        self._lock = threading.Lock()
        self._closed = True
        listens = self._listener.fileno() >= 0
        ports = {int(self._listener.getsockname()[1])} if listens else ()
        return Inheritance(ports=ports, kept=[self, self._loop, *asyncio.all_tasks(self._loop)])

    def _check_open(self) -> None:
        if self._parent_pid:
            raise TransportClosedError(
                f"this transport belongs to process {self._parent_pid}, from which process {os.getpid()} was forked; "
                "use it there, or make a new one here"
            )
        if self._closed:
            raise TransportClosedError("the transport was shut down; make a new one")
        if self._failure is not None:
            sentence = f"the transport's server has failed ({self._failure}); make a new transport"
            raise TransportClosedError(sentence) from self._failure

    def _allocate(self, num_bytes: int) -> Buffer:
        """Allocate memory for a copy. Raises: NoRoomError: there is no memory for a second copy."""
        with self._lock:
            fresh_bytes = self._store.fresh_bytes(num_bytes)
        self._check_memory(fresh_bytes)
        try:
            with self._lock:
                return self._store.allocate(num_bytes)
        except StateUnavailableError as error:
            raise NotEnoughMemoryError(str(error)) from error

    def _check_memory(self, num_bytes: int) -> None:
        """Check that this many bytes are free. Raises: NoRoomError."""
        why = describe_shortage(num_bytes, free_memory()) if num_bytes else ""
        if why:
            raise NotEnoughMemoryError(f"there is no memory for a second copy of the state: {why}")

    def _post(self, callback: Callable[[App], object], *, is_use: bool = True) -> None:
        """Run a callback with the app on the loop. Without is_use it runs only if there is an app by then."""
        if self._parent_pid:
            return  # the loop belongs to the parent
        try:
            self._loop.call_soon_threadsafe(self._run_callback, callback, is_use)
        except RuntimeError:
            # The loop is closed, so no receiver of the callback is left.
            if not self._closed and self._failure is None:
                raise

    # ---- on the loop's thread ----

    def _run_callback(self, callback: Callable[[App], object], is_use: bool) -> None:
        if self._app is not None:
            callback(self._app)
        elif is_use:
            self._pending.append(callback)
            self._needed.set()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._until_needed())
            app_class = self._import()
            if app_class is None:
                self._listener.close()
            else:
                self._serve(app_class)
        except BaseException as error:
            self._listener.close()
            self._failure = error
            _log.error("this process can't serve its state, so no replica can recover from it: %s", error)
        finally:
            self._loop.close()
            with self._lock:
                self._store.clear()
                relays, self._relays = self._relays, {}
            for relay in relays:
                relay.abandon()

    async def _until_needed(self) -> None:
        """Wait for a reader, a callback, or `close`."""
        self._loop.add_reader(self._listener.fileno(), self._needed.set)
        await self._needed.wait()
        self._loop.remove_reader(self._listener.fileno())

    def _import(self) -> type[App] | None:
        """Import the web server, with retries. Returns: the app's class, or None if the server was closed."""
        logged_s = -_LOG_EVERY_S
        while not self._closed:
            self._is_importing = True
            try:
                from tft_ckpt.transfer.app import App
            except (OSError, ImportError) as error:
                if self._loop.time() - logged_s >= _LOG_EVERY_S:
                    logged_s = self._loop.time()
                    _log.error(
                        "this process can't serve its state yet, because importing the web server failed (%s). "
                        "Replicas that recover from it wait, and the import is retried every %g s. Check the limit of "
                        "open files (ulimit -n) and the installation of aiohttp",
                        error,
                        _IMPORT_AGAIN_S,
                    )
            else:
                return None if self._closed else App
            finally:
                self._is_importing = False
            # The offered states are in the store, where readers will find them. These callbacks would only keep their
            # memory.
            self._pending.clear()
            self._loop.run_until_complete(asyncio.sleep(_IMPORT_AGAIN_S))
        return None

    def _serve(self, app_class: type[App]) -> None:
        app = app_class(
            self._loop,
            self._listener,
            store=self._store,
            lock=self._lock,
            token=self._token,
            silence_s=self._silence_s,
            send_bytes_per_s=self._send_bytes_per_s,
            tls=self._tls,
        )
        self._loop.call_soon(self._begin, app)  # after all pending callbacks
        self._loop.run_until_complete(app.serve())

    def _begin(self, app: App) -> None:
        with self._lock:
            relays = list(self._relays)
        for relay in relays:
            app.relay_began(relay)
        for callback in self._pending:
            callback(app)
        self._pending.clear()
        self._app = app
