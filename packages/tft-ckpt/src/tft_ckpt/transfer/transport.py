"""Live state transfer over HTTP.

Every training process has one transport. It serves the state that its trainer last offered, and fetches a state when
its trainer needs one. While it fetches a state, it serves the finished chunks to peers that fetch the same state.

Law of this file: puts the server and the client together, and checks the settings; no protocol.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import TypeVar, final

from tft_ckpt.arguments import key_of, positive_seconds
from tft_ckpt.errors import CheckpointError, ConfigError, TransferTimeoutError, TransportClosedError
from tft_ckpt.forks import Inheritance, let_go_in_child
from tft_ckpt.key import StateKey
from tft_ckpt.state.buffers import Buffer, BufferPool
from tft_ckpt.state.manifest import Layout, check_chunk_bytes, check_state
from tft_ckpt.state.snapshot import Snapshot
from tft_ckpt.state.target import Target
from tft_ckpt.state.tree import Limits
from tft_ckpt.transfer.address import advertised_url, is_of_loopback, listen
from tft_ckpt.transfer.client import Receive, ReceiveReport
from tft_ckpt.transfer.connection import StopSignal
from tft_ckpt.transfer.failed_sources import SourceRecord
from tft_ckpt.transfer.link import interface_of, link_bytes_per_s, slow_link_sentence
from tft_ckpt.transfer.rate_limiter import check_rate
from tft_ckpt.transfer.reader import RequestContext, SharedRateLimiter
from tft_ckpt.transfer.routes import Token
from tft_ckpt.transfer.server import StateServer
from tft_ckpt.transfer.tls import TLSSettings
from tft_ckpt.transport import CheckpointTransport, StagedCheckpoint

__all__ = ["HTTPTransport"]

T = TypeVar("T")

_log = logging.getLogger("tft_ckpt.transfer")

_CONNECTIONS_MAX = 64


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of a transport, checked at construction."""

    timeout_s: float
    num_chunks: int
    port: int
    token: Token = field(repr=False)
    chunk_bytes: int
    send_bytes_per_s: float | None
    receive_bytes_per_s: float | None

    def __post_init__(self) -> None:
        if not 0 <= self.num_chunks <= _CONNECTIONS_MAX:
            raise ConfigError(f"num_chunks is {self.num_chunks}; give 0 to {_CONNECTIONS_MAX} connections")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; give 0 to 65535")
        if isinstance(self.token, str) and not (self.token and self.token.isascii() and self.token.isprintable()):
            raise ConfigError("token is empty or not plain ASCII; give printable ASCII, or None for no token")
        check_chunk_bytes(self.chunk_bytes)
        check_rate("send_bytes_per_s", self.send_bytes_per_s)
        check_rate("receive_bytes_per_s", self.receive_bytes_per_s)


@final
class HTTPTransport(CheckpointTransport[T]):
    """A transport that serves and fetches states over HTTP, from construction to `shutdown`.

    Without a token, any host that can connect could read the weights. So the transport then listens on loopback only.

    Args:
        timeout: how long the other side of a connection may be silent, or take no data, before it counts as dead.
        num_chunks: connections to each source at the same time when receiving. With 0 or 1, a single source is read on
            the calling thread.
        bind: host name or address of the interface to listen on. None means all interfaces, including IPv6, or loopback
            if readers need not prove their membership.
        interface: name of the network interface to listen on and to advertise, in place of bind.
        port: the port to listen on; 0 takes a free one.
        advertise_addr: this process's address for others: host, host:port or [ipv6]:port; None determines it.
        token: the job's secret, sent and required with every request; or a function that returns the present secrets,
            of which the first is sent and all are accepted.
        chunk_bytes: length of a checked chunk when this process sends, 4 KiB to 1 GiB. Sources of one state with
            different lengths take turns and do not help each other.
        reuse_buffers: whether to receive into the same memory every time. This saves the cost of fresh memory, but the
            next receive overwrites the tensors of the previous one. Load and release them first.
        limits: the largest state that is sent or received.
        send_bytes_per_s: the rate limit for all readers together; None for no limit.
        receive_bytes_per_s: the rate limit for all receives together; None for no limit.
        keep_buffers: whether to keep the memory of an unused state for the next one, which then costs the trainer
            least. Otherwise the memory is returned to the system.
        tls: secures every connection, a `TLS`. All transports of a job must use it, or none.
        import_later: whether to import the web server only when a reader connects, a state is offered or
            `prepare_to_send` is called. The import takes a tenth of a second of a core, which a starting trainer needs.
            Without an early call the first reader waits that long.
        insecure: whether to serve all hosts without a token, or a certificate that `tls` checks.

    Raises: ConfigError.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        num_chunks: int = 0,
        *,
        bind: str | None = None,
        port: int = 0,
        advertise_addr: str | None = None,
        token: Token = None,
        chunk_bytes: int = 4 << 20,
        reuse_buffers: bool = False,
        limits: Limits | None = None,
        interface: str | None = None,
        send_bytes_per_s: float | None = None,
        receive_bytes_per_s: float | None = None,
        keep_buffers: bool = True,
        tls: TLSSettings | None = None,
        import_later: bool = False,
        insecure: bool = False,
    ) -> None:
        self._settings = _Settings(
            timeout_s=positive_seconds(timeout),
            num_chunks=num_chunks,
            port=port,
            token=token,
            chunk_bytes=chunk_bytes,
            send_bytes_per_s=send_bytes_per_s,
            receive_bytes_per_s=receive_bytes_per_s,
        )
        self._client_tls = None if tls is None else tls.client_context
        server_tls = None if tls is None else tls.server_context
        self._rate_limiter = None if receive_bytes_per_s is None else SharedRateLimiter(receive_bytes_per_s)
        self._limits = Limits() if limits is None else limits
        self._kept = BufferPool() if reuse_buffers else None
        self._lock = threading.Lock()
        self._running: set[StopSignal] = set()
        self._closed = False
        self._last_receive: ReceiveReport | None = None
        self._record = SourceRecord()
        self._parent_pid = 0  # in a forked child: the process that owns the original of this transport
        let_go_in_child(self)
        is_open = token is None and not (tls is not None and tls.check_client)
        listener = listen(
            "localhost" if is_open and not insecure and bind is interface is None else bind, port, interface
        )
        if is_open and not insecure and not is_of_loopback(listener):
            host = listener.getsockname()[0]
            listener.close()
            raise ConfigError(
                f"this process would serve its state at {host} to everybody: give the job's token (TFT_TOKEN; make one "
                "with `openssl rand -hex 32`), or insecure=True (TFT_INSECURE=1)"
            )
        try:
            self._url = advertised_url(listener, advertise_addr, "http" if tls is None else "https")
        except BaseException:
            listener.close()
            raise
        self._server = StateServer(
            listener,
            token=token,
            chunk_bytes=chunk_bytes,
            limits=self._limits,
            silence_s=self._settings.timeout_s,
            send_bytes_per_s=send_bytes_per_s,
            keep_buffers=keep_buffers,
            tls=server_tls,
            import_later=import_later,
        )
        if is_open:
            served = "" if insecure else "only this machine is served: "
            _log.warning("no token is set; %severy process that reaches %s can read its state", served, self._url)

    stages = True

    def __enter__(self) -> HTTPTransport[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def metadata(self) -> str:
        """Return this process's URL, for example ``http://host:41234`` or ``https://[fd00::2]:41234``."""
        return self._url

    def address(self) -> str:
        """Return the same as `metadata`."""
        return self._url

    @property
    def last_receive(self) -> ReceiveReport | None:
        """Return the report of the last successful receive, or None before the first."""
        return self._last_receive

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta, *, key: StateKey | None = None
    ) -> None:
        """Copy the state, publish the copy in place of the previous one, and return.

        If memory is too short for a copy, the transport logs a warning and serves the live tensors. The call then
        returns when the ranks of dst_ranks have the state. The check uses the least of the machine's and the cgroups'
        free memory.

        The previous state stays available, to new readers too, until the last connection that reads it has ended. After
        that it is refused. With dst_ranks empty, the checksums are computed at the first request, otherwise at once. In
        both cases the server's thread computes them.

        Raises: see `CheckpointTransport.send_checkpoint`. StateUnavailableError: there is no memory for the copy and
            dst_ranks is empty.
        """
        key = key_of(key, step)
        # A copy can't be interrupted, so the deadline is checked afterwards. A late copy is not published.
        stop = StopSignal(positive_seconds(timeout), None)
        try:
            self._server.offer(state_dict, key=key, expected=len(dst_ranks), check=stop.check)
        except TransferTimeoutError as error:
            raise TransferTimeoutError(
                f"offering state {key} took longer than {stop.timeout_s:g} s; raise the timeout",
                timeout_s=stop.timeout_s,
            ) from error
        finally:
            stop.close()

    def check_state(self, state_dict: T) -> None:
        """Check that a state can be transferred; see `CheckpointTransport.check_state`."""
        check_state(state_dict, chunk_bytes=self._settings.chunk_bytes, limits=self._limits)

    def stage_checkpoint(self, state_dict: T, timeout: timedelta) -> StagedCheckpoint:
        """Copy the state; see `CheckpointTransport.stage_checkpoint`.

        The copy reuses the memory of the published state if that has no reader.
        """
        stop = StopSignal(positive_seconds(timeout), None)
        try:
            return _Staged(self._server, self._server.stage(state_dict, check=stop.check))
        finally:
            stop.close()

    def refuse_checkpoint(
        self, step: int, sentence: str, *, key: StateKey | None = None, dst_ranks: Sequence[int] = ()
    ) -> None:
        """Answer all requests for the state with that sentence; see `CheckpointTransport.refuse_checkpoint`."""
        self._server.refuse(key_of(key, step), sentence)

    def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str,
        step: int,
        timeout: timedelta,
        *,
        key: StateKey | None = None,
        into: T | None = None,
        sources: Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> T:
        """Fetch a state, from all sources at once; see `CheckpointTransport.recv_checkpoint`.

        Peers that receive the same state exchange their chunks. A transfer that used only a small part of its link
        causes a warning in the log.

        Returns: the state. Without `into`, its tensors are on the CPU and writable. Shared memory stays shared, and
            strides stay the same. With reuse_buffers the tensors are valid until the next call.
        """
        key = key_of(key, step)
        _check_sources(metadata, sources)
        with self._receiving(positive_seconds(timeout), cancelled) as stop:
            memory = _ReceiveMemory(into, self._allocate, self._give)
            receive = Receive(
                [metadata, *sources],
                RequestContext(
                    key=key,
                    token=self._settings.token,
                    own=self._url,
                    limits=self._limits,
                    tls=self._client_tls,
                    rate_limiter=self._rate_limiter,
                ),
                num_connections=max(1, self._settings.num_chunks),
                silence_s=self._settings.timeout_s,
                make_target=memory.target,
                relay=self._server.relay,
                stop=stop,
                progress=progress,
                poor=self.poor_sources(),
            )
            try:
                target, report = receive.run()
            except CheckpointError as error:
                if into is not None and receive.has_written:
                    error.args = (f"{error}; the receiving tensors now hold a mixture of two states",)
                raise
            finally:
                with self._lock:
                    self._record.note(receive.poor, receive.delivered, time.monotonic())
        state: T = target.finish()
        memory.done()
        self._last_receive = report
        self._log_receive(report, src_rank)
        return state

    def _log_receive(self, report: ReceiveReport, src_rank: int) -> None:
        _log.info(
            "received state %s from %s (replica rank %d): %d bytes in %.3f s",
            report.key,
            ", ".join(report.sources),
            src_rank,
            report.state_bytes,
            report.wall_s,
        )
        if self._rate_limiter is None and report.addresses is not None:
            sentence = slow_link_sentence(
                report.fetched_bytes,
                report.fetching_s,
                report.addresses,
                find_interface=interface_of,
                find_bytes_per_s=link_bytes_per_s,
            )
            if sentence is not None:
                _log.warning("%s", sentence)

    def poor_sources(self) -> dict[str, str]:
        """Return the sources that failed; see `CheckpointTransport.poor_sources`.

        A failure is kept for ten minutes, or until the source gives a state again.
        """
        with self._lock:
            return self._record.failures(time.monotonic())

    def prepare_to_send(self, num_bytes: int = 0) -> None:
        """Prepare memory for a state of that size, and the web server; see `CheckpointTransport.prepare_to_send`.

        The preparation runs in the background.
        """
        self._server.get_ready()
        if num_bytes == 0 and self._last_receive is not None:
            num_bytes = self._last_receive.state_bytes
        if num_bytes > 0:
            self._server.prepare(num_bytes)

    def disallow_checkpoint(self) -> None:
        """Return at once, because the served state is a copy."""

    def abort(self) -> None:
        """End running receives at once with TransportClosedError, from any thread."""
        self._stop_receives("the transfer was aborted on this side")

    def shutdown(self, wait: bool = True) -> None:
        """Close the port and all connections, and end the thread and running receives. A second call does nothing."""
        with self._lock:
            self._closed = True
        self._stop_receives("the transport was shut down")
        self._server.close(wait=wait)
        if self._kept is not None:
            with self._lock:
                self._kept.clear()

    def forked(self) -> Inheritance:
        """Close the transport in a forked child, without ending a receive of the parent."""
        self._parent_pid = os.getppid()
        self._lock = threading.Lock()
        self._closed = True
        self._running = set()
        return Inheritance()

    def _stop_receives(self, reason: str) -> None:
        with self._lock:
            for stop in self._running:
                stop.stop(reason)

    def _allocate(self, num_bytes: int) -> Buffer:
        if self._kept is None:
            return Buffer(num_bytes)
        with self._lock:
            return self._kept.take(num_bytes)

    def _give(self, buffer: Buffer) -> None:
        if self._kept is not None:
            with self._lock:
                self._kept.give(buffer)

    @contextmanager
    def _receiving(self, timeout_s: float, cancelled: Callable[[], bool] | None) -> Iterator[StopSignal]:
        stop = StopSignal(timeout_s, cancelled)
        try:
            with self._lock:
                if self._parent_pid:
                    raise TransportClosedError(
                        f"this transport belongs to process {self._parent_pid}, from which process {os.getpid()} was "
                        "forked; use it there, or make a new one here"
                    )
                if self._closed:
                    raise TransportClosedError("the transport was shut down; make a new one")
                self._running.add(stop)
            yield stop
        finally:
            with self._lock:
                self._running.discard(stop)
            stop.close()


@final
class _Staged(StagedCheckpoint):
    """A snapshot of a server that is not published yet."""

    def __init__(self, server: StateServer, snapshot: Snapshot) -> None:
        self._server = server
        self._snapshot = snapshot

    def offer(self, dst_ranks: list[int], *, key: StateKey) -> None:
        self._server.publish(self._snapshot, key=key, expected=bool(dst_ranks))

    def drop(self) -> None:
        self._server.recycle(self._snapshot.buffer)


@final
class _ReceiveMemory:
    """The memory that receives a state: the given tensors, or a buffer.

    Args:
        into: a state with tensors, or None.
        take, give: take a buffer of a length, and return a buffer for reuse by another receive.
    """

    def __init__(self, into: object | None, take: Callable[[int], Buffer], give: Callable[[Buffer], None]) -> None:
        self._into = into
        self._take = take
        self._give = give
        self._buffer: Buffer | None = None

    def target(self, layout: Layout) -> Target:
        """Return a target for the next payload. It reuses the previous buffer, with its content, if that fits."""
        if self._into is not None:
            return Target.into(layout, self._into, Buffer)
        if self._buffer is None or not self._buffer.fits(layout.data_bytes):
            self._buffer = None
            self._buffer = self._take(layout.data_bytes)
        return Target.fresh(layout, self._buffer)

    def done(self) -> None:
        """Finish the receive, and return the buffer for reuse."""
        if self._buffer is not None:
            self._give(self._buffer)


def _check_sources(metadata: str, sources: Sequence[str]) -> None:
    if not isinstance(metadata, str):
        raise ConfigError(f"metadata is {metadata!r}; give what metadata() of the source returned")
    # A single string would look like a list of its letters.
    is_list = isinstance(sources, Sequence) and not isinstance(sources, str)
    if not is_list or not all(isinstance(each, str) for each in sources):
        raise ConfigError(f"sources is {sources!r}; give a list of what metadata() of each source returned")
