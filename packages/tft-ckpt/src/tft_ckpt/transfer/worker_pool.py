"""The reading of one payload over several connections at once.

Each connection has a thread, which repeatedly claims chunks from the plan and fetches them. The calling thread
supervises. It starts connections to the due sources, ends those that delay others, and reports the progress. It returns
when the payload is complete or no connection can continue.

Law of this file: threads and their end. `plan` and `chunks` choose the sources and the chunks, and judge faults; every
thread takes the lock for that.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, final

from tft_ckpt.errors import (
    StateCorruptError,
    StateMismatchError,
    StateUnavailableError,
    TransferTimeoutError,
    TransportClosedError,
)
from tft_ckpt.state.manifest import Manifest
from tft_ckpt.state.target import Target
from tft_ckpt.transfer.chunks import ChunkPlan
from tft_ckpt.transfer.connection import StopSignal
from tft_ckpt.transfer.plan import FetchPlan
from tft_ckpt.transfer.reader import Reader, RequestContext, SourceBrokenError, SourceHungError

__all__ = ["Relay", "TransferStats", "WorkerPool"]

THREAD_NAME: Final = "tft-ckpt-recv"
SOURCES_MAX: Final = 8
"""Maximum number of sources asked at the same time."""
PEERS_MAX: Final = 8
"""Maximum number of peers asked at the same time."""
_POLL_S: Final = 0.1
# The interval at which a complete source is asked for peers.
_ASK_PEERS_S: Final = 0.25
# How long a request for chunks is kept open. A pause follows its answer. Otherwise every chunk of every peer would
# cause a request.
_WAIT_CHUNKS_S: Final = 1.0
_BETWEEN_CHUNKS_S: Final = 0.15
# A peer that is silent for this long is unusable, even if a source may be silent for longer.
_PEER_SILENCE_S: Final = 5.0


class Relay(Protocol):
    """A server of a target that is still being filled."""

    def have(self, chunk: int) -> None:
        """Mark a chunk as received, checked and unchanging until `end`."""

    def end(self) -> None:
        """Wait until no reader uses the target any more. A second call does nothing."""


@dataclass(slots=True)
class TransferStats:
    """The results of a receive so far. The owner locks.

    Fields:
        fetched_bytes: payload bytes, including repeated and damaged ones.
        has_written: whether a target may have been written to.
        good_bytes: by source.
        faults: sentences about sources that failed.
        num_lost: number of lost connections to sources. A silent source does not count.
        addresses: of a connection with data, (this side's, the other side's).
    """

    fetched_bytes: int = 0
    has_written: bool = False
    good_bytes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_lost: int = 0
    addresses: tuple[str, str] | None = None

    def fault(self, error: Exception) -> None:
        """Record a fault of a source."""
        self.faults.append(str(error))
        self.num_lost += isinstance(error, SourceBrokenError) and not isinstance(error, SourceHungError)

    def add(self, reader: Reader, *, is_source: bool) -> None:
        """Add an ended connection. Only connections to sources count for the addresses."""
        self.fetched_bytes += reader.read_bytes
        self.has_written |= reader.has_written
        if reader.read_bytes and is_source:
            self.addresses = reader.addresses


@dataclass(slots=True)
class _Worker:
    """A thread and its stop signal."""

    source: str
    thread: threading.Thread
    stop: StopSignal


@final
class WorkerPool:
    """The connections of one receive under one manifest, for one use.

    Args:
        manifest: the present manifest.
        primary: the manifest's source.
        primary_is_partial: whether that source is a peer with only parts of the payload.
        target: the memory that receives the payload.
        plan, chunks, stats: of the receive. No other code changes them until `run` returns.
        context: of the receive.
        relay: receives every good chunk, or None.
        stop: ends the whole receive.
        num_connections: to each source, at least 1. Each peer gets one.
        silence_s: returns how long a source may be silent; called under the lock.
        progress: called on the calling thread after new data.
    """

    def __init__(
        self,
        manifest: Manifest,
        primary: str,
        *,
        primary_is_partial: bool,
        target: Target,
        plan: FetchPlan,
        chunks: ChunkPlan,
        stats: TransferStats,
        context: RequestContext,
        relay: Relay | None,
        stop: StopSignal,
        num_connections: int,
        silence_s: Callable[[], float],
        progress: Callable[[], None],
    ) -> None:
        self._manifest = manifest
        self._primary = primary
        self._primary_is_partial = primary_is_partial
        self._target = target
        self._plan = plan
        self._chunks = chunks
        self._stats = stats
        self._context = context
        self._relay = relay
        self._stop = stop
        self._num_connections = num_connections
        self._silence_s = silence_s
        self._progress = progress
        self._changed = threading.Condition()
        self._ended = False
        self._failure: BaseException | None = None
        self._workers: dict[int, _Worker] = {}
        self._finished: list[int] = []
        self._next_ask_s = 0.0
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)

    def run(self) -> None:
        """Fetch until the payload is complete, or no connection is left. Raises: errors of `stop`, `progress`, or
        internal ones.
        """
        reported_bytes = -1
        try:
            while True:
                with self._changed:
                    if self._failure is not None:
                        raise self._failure
                    complete, good_bytes = self._chunks.complete, self._chunks.good_bytes
                if good_bytes != reported_bytes:
                    reported_bytes = good_bytes
                    self._progress()
                if complete:
                    return
                self._reap()
                self._start_due()
                if not self._workers or self._is_stuck():
                    return
                self._stop_slow()
                self._stop.wait(_POLL_S, readable=self._wake_reader)
                self._clear_wakes()
        finally:
            self._end()

    # ---- the calling thread ----

    def _clear_wakes(self) -> None:
        try:
            while os.read(self._wake_reader, 4096):
                pass
        except BlockingIOError:
            return

    def _is_stuck(self) -> bool:
        with self._changed:
            return self._chunks.is_stuck(time.monotonic())

    def _start_due(self) -> None:
        num_connected = Counter(entry.source for entry in self._workers.values())
        now_s = time.monotonic()
        with self._changed:
            sources = self._plan.due(now_s)
            peers = self._plan.due_peers(now_s)
        # The primary first, because its data fits its manifest.
        sources.sort(key=lambda source: source != self._primary)
        num_free = SOURCES_MAX - sum(self._plan.is_source(source) for source in num_connected)
        for source in sources:
            if num_connected[source] == 0:
                if num_free == 0:
                    continue
                num_free -= 1
            for _ in range(self._num_connections - num_connected[source]):
                self._start(source, now_s)
        num_free = PEERS_MAX - sum(not self._plan.is_source(source) for source in num_connected)
        for peer in [peer for peer in peers if num_connected[peer] == 0][:num_free]:
            self._start(peer, now_s)

    def _start(self, source: str, now_s: float) -> None:
        is_primary = source == self._primary and not self._primary_is_partial
        with self._changed:
            is_peer = not self._plan.is_source(source) or (source == self._primary and self._primary_is_partial)
            worker = self._chunks.join(source, now_s, has_all=is_primary, is_peer=is_peer)
            most_s = self._silence_s()
            silence_s = min(most_s, _PEER_SILENCE_S) if is_peer else self._plan.silence_s(source, most_s)
        # Each connection has its own stop signal, so that it can be ended alone. The overall deadline is watched here.
        stop = StopSignal(self._stop.remaining_s() + 60.0, None)
        thread = threading.Thread(
            target=self._work,
            args=(worker, source, stop, silence_s),
            name=f"{THREAD_NAME}-{worker}",
            daemon=True,
        )
        self._workers[worker] = _Worker(source, thread, stop)
        thread.start()

    def _reap(self) -> None:
        with self._changed:
            finished, self._finished = self._finished, []
        for worker in finished:
            entry = self._workers.pop(worker)
            entry.thread.join()
            entry.stop.close()

    def _stop_slow(self) -> None:
        with self._changed:
            slow = self._chunks.too_slow(time.monotonic())
        for worker in slow:
            self._workers[worker].stop.stop("other sources are faster")

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for entry in self._workers.values():
            entry.stop.stop("the transfer has ended")
        for entry in self._workers.values():
            entry.thread.join()
            entry.stop.close()
        self._workers.clear()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    # ---- a connection's thread ----

    def _wake(self) -> None:
        try:
            os.write(self._wake_writer, b"x")
        except BlockingIOError:
            # The pipe is full, so the calling thread will wake.
            return

    def _work(self, worker: int, source: str, stop: StopSignal, silence_s: float) -> None:
        has_data = False

        def arrived(chunk: int) -> None:
            nonlocal has_data
            has_data = True
            self._arrived(worker, source, chunk)

        try:
            reader = Reader(source, self._context, silence_s=silence_s, stop=stop)
            try:
                self._fetch(worker, source, reader, stop, arrived)
            finally:
                with self._changed:
                    self._stats.add(reader, is_source=self._plan.is_source(source))
                reader.close()
        except BaseException as error:
            # The error is handled under the lock. If no source caused it, the calling thread raises it again.
            self._fault(source, error, has_data=has_data)
        finally:
            with self._changed:
                self._chunks.leave(worker, time.monotonic())
                self._finished.append(worker)
                self._changed.notify_all()
            self._wake()

    def _fetch(
        self, worker: int, source: str, reader: Reader, stop: StopSignal, arrived: Callable[[int], None]
    ) -> None:
        is_primary = source == self._primary and not self._primary_is_partial
        if not is_primary and not self._ask_chunks(worker, source, reader, wait_s=_WAIT_CHUNKS_S):
            return
        while True:
            stop.check()
            now_s = time.monotonic()
            with self._changed:
                if self._ended or self._chunks.complete:
                    return
                ask = self._plan.is_source(source) and bool(self._context.own) and now_s >= self._next_ask_s
                if ask:
                    self._next_ask_s = now_s + _ASK_PEERS_S
                part = None if ask else self._chunks.claim(worker, now_s)
                partial = not self._chunks.has_all(worker)
            if ask:
                if not self._ask_chunks(worker, source, reader):
                    return
            elif part is not None:
                reader.part(part, self._manifest, self._target, arrived)
            elif partial:
                if not self._ask_chunks(worker, source, reader, wait_s=_WAIT_CHUNKS_S):
                    return
                self._idle(_BETWEEN_CHUNKS_S)
            else:
                self._idle(_POLL_S)

    def _idle(self, seconds: float) -> None:
        with self._changed:
            if not self._ended:
                self._changed.wait(seconds)

    def _ask_chunks(self, worker: int, source: str, reader: Reader, *, wait_s: float = 0.0) -> bool:
        """Ask the source for its chunks and peers. Returns: False if the source has nothing of the state yet."""
        with self._changed:
            num_known = self._chunks.num_known(worker)
        answer = reader.chunks(self._manifest, wait_s=wait_s, num_known=num_known)
        now_s = time.monotonic()
        with self._changed:
            if answer is None:
                if num_known and not self._plan.is_source(source):
                    self._plan.remove_peer(source)
                else:
                    self._plan.not_yet(source, now_s)
                return False
            self._chunks.set_chunks(worker, answer.have, now_s)
            if self._context.own:
                self._plan.add_peers(answer.peers)
        return True

    def _arrived(self, worker: int, source: str, chunk: int) -> None:
        if self._relay is not None:
            self._relay.have(chunk)
        with self._changed:
            self._stats.good_bytes[source] += self._chunks.arrived(worker, chunk, time.monotonic())
            self._plan.delivered(source)
            if self._chunks.complete:
                self._changed.notify_all()
        self._wake()

    def _fault(self, source: str, error: BaseException, *, has_data: bool) -> None:
        now_s = time.monotonic()
        with self._changed:
            if self._ended:
                return
            is_source = self._plan.is_source(source)
            match error:
                case TransportClosedError() | TransferTimeoutError():
                    # Ended on purpose. A peer is not asked again. A source is asked again if it gave a chunk.
                    self._plan.was_slow(source, f"{source} was disconnected because {error}")
                    if not has_data:
                        self._plan.helper_failed(source)
                case SourceBrokenError():
                    if is_source:
                        self._stats.fault(error)
                    failure = StateUnavailableError(str(error), source=source, key=self._context.key)
                    if isinstance(error, SourceHungError):
                        self._plan.hung(source, failure, now_s, self._silence_s())
                    else:
                        self._plan.connection_lost(source, failure, now_s)
                case StateCorruptError():
                    self._stats.fault(error)
                    if source == self._primary:
                        self._plan.damaged(source, error)
                    else:
                        self._plan.helper_failed(source)
                case StateMismatchError() | StateUnavailableError():
                    if is_source:
                        self._stats.fault(error)
                    self._plan.refused(source, error)
                case _:
                    self._failure = self._failure or error
