"""The side that needs the state.

It asks a source for the manifest, takes memory for the run, and reads the run straight into it, chunk by chunk, and
checks each. Whatever goes wrong with a source is told to the plan, which says whom to ask next and what is still
missing; so a broken connection costs what was on its way, and a dead source what it had not sent yet.

Law of this file: performs what the plan decides. Nothing that arrives is used before its checksum was compared.
"""

from __future__ import annotations

import http.client
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from tft_ckpt.buffers import Buffer
from tft_ckpt.errors import (
    CheckpointError,
    Closed,
    DeadlinePassed,
    StateCorrupt,
    StateMismatch,
    StateUnavailable,
    WrongSetting,
)
from tft_ckpt.http.address import parse_url
from tft_ckpt.http.connection import Connection, StopSignal
from tft_ckpt.http.plan import FetchPlan
from tft_ckpt.http.routes import KEY_HEADER, WAIT_HEADER, authorization, data_path, manifest_path
from tft_ckpt.key import StateKey
from tft_ckpt.manifest import Layout, Manifest, checksum, decode
from tft_ckpt.tree import Limits

__all__ = ["Receive", "ReceiveReport"]

# How long a source is asked to keep a request open. The preferred one is the likeliest to come to have the state; the
# others are only looked in on.
_WAIT_PREFERRED_S = 2.0
_WAIT_OTHERS_S = 0.05
_PAUSE_S = 0.05
_SENTENCE_BYTES = 4096
# What a source may be allowed to be silent for, however little time is left.
_SILENCE_MIN_S = 0.05


@dataclass(frozen=True, slots=True)
class ReceiveReport:
    """What a receive came to.

    Fields:
        key: the state.
        state_bytes: length of its run.
        fetched_bytes: of the run, over the network, repeated and damaged ones included.
        wall_s: from the call to the state, waiting included.
        sources: those that gave at least one good chunk or the last manifest, in order.
        faults: sentences about the sources that failed on the way.
    """

    key: StateKey
    state_bytes: int
    fetched_bytes: int
    wall_s: float
    sources: tuple[str, ...]
    faults: tuple[str, ...]


class _Failed(Exception):
    """The source at hand broke: transport-level trouble, with a sentence."""


@final
class Receive:
    """One receive, used once.

    Args:
        key: the state that is wanted.
        sources: addresses, the preferred one first.
        token: the job's, or None.
        num_connections: at the same time, at least 1.
        limits: what is larger is refused.
        silence_s: how long a source may say nothing before it is taken for dead.
        allocate: called with a number of bytes for a buffer to receive into.
        stop: ends the receive.
        progress: called with (bytes here and checked, bytes in all), on the calling thread.
    """

    def __init__(
        self,
        key: StateKey,
        sources: Sequence[str],
        *,
        token: str | None,
        num_connections: int,
        limits: Limits,
        silence_s: float,
        allocate: Callable[[int], Buffer],
        stop: StopSignal,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._key = key
        self._plan = FetchPlan(key, sources)
        self._headers = {} if token is None else {"authorization": authorization(token)}
        self._num_connections = num_connections
        self._limits = limits
        self._silence_s = silence_s
        self._allocate = allocate
        self._stop = stop
        self._progress = progress
        self._buffer: Buffer | None = None
        self._total_bytes = 0
        self._fetched_bytes = 0
        self._helpers: list[str] = []
        self._faults: list[str] = []
        self._lock = threading.Lock()
        self._start_s = time.monotonic()

    def run(self) -> tuple[Layout, Buffer, ReceiveReport]:
        """Fetch the state. Raises: as `CheckpointTransport.recv_checkpoint`."""
        try:
            while True:
                source = self._plan.next_source()
                if source is None:
                    raise self._plan.verdict()
                self._pause(source)
                layout = self._try(source)
                if layout is not None:
                    assert self._buffer is not None
                    return layout, self._buffer, self._report()
        except DeadlinePassed as error:
            raise self._deadline_passed() from error

    def _report(self) -> ReceiveReport:
        return ReceiveReport(
            key=self._key,
            state_bytes=self._total_bytes,
            fetched_bytes=self._fetched_bytes,
            wall_s=time.monotonic() - self._start_s,
            sources=tuple(self._helpers),
            faults=tuple(self._faults),
        )

    def _deadline_passed(self) -> DeadlinePassed:
        asked = self._plan.next_source()
        faults = f"; before that: {'; '.join(self._faults[-3:])}" if self._faults else ""
        here = (
            f"{self._plan.good_bytes} of {self._total_bytes} bytes were here"
            if self._buffer is not None
            else "no source had it yet"
        )
        return DeadlinePassed(
            f"state {self._key} did not arrive within {self._stop.timeout_s:g} s: {here}, asking {asked}{faults}",
            timeout_s=self._stop.timeout_s,
        )

    def _pause(self, source: str) -> None:
        breaks = self._plan.breaks_of(source)
        if breaks:
            self._stop.wait(_PAUSE_S * 2 ** (breaks - 1))

    def _try(self, source: str) -> Layout | None:
        """Get on with one source. Returns: the layout if everything is here, None if another turn is needed."""
        try:
            manifest = self._fetch_manifest(source)
            if manifest is None:
                self._plan.not_yet(source)
                return None
            self._adopt(manifest)
            self._helped(source)
            self._fetch_missing(source, manifest)
            return manifest.layout
        except _Failed as error:
            self._fault(error)
            self._plan.broke(source, StateUnavailable(str(error), source=source, key=self._key))
        except StateCorrupt as error:
            self._fault(error)
            self._plan.damaged(source, error)
        except (StateMismatch, StateUnavailable) as error:
            self._fault(error)
            self._plan.refused(source, error)
        return None

    def _fault(self, error: Exception) -> None:
        self._faults.append(str(error))

    def _helped(self, source: str) -> None:
        if source not in self._helpers:
            self._helpers.append(source)

    def _adopt(self, manifest: Manifest) -> None:
        kept = self._plan.adopt(manifest)
        self._total_bytes = manifest.layout.data_bytes
        if not kept or self._buffer is None:
            self._buffer = None
            self._buffer = self._allocate(self._total_bytes)
        self._tell_progress()

    def _tell_progress(self) -> None:
        if self._progress is not None:
            self._progress(self._plan.good_bytes, self._total_bytes)

    # ---- one request ----

    def _share_s(self) -> float:
        # With others to turn to, one dead source must not use up the time that they would need. Half of its part: it
        # may be silent both while it waits for the state and while it should be sending.
        others = self._plan.num_sources > 1
        share = self._stop.remaining_s() / (2 * self._plan.num_sources if others else 1)
        return max(_SILENCE_MIN_S, share)

    def _connect(self, source: str) -> Connection:
        host, port = parse_url(source)
        with _breaking(f"no connection to {source}"):
            return Connection(host, port, silence_s=min(self._silence_s, self._share_s()), stop=self._stop)

    def _get(
        self, connection: Connection, source: str, path: str, headers: Mapping[str, str], *, patience_s: float = 0.0
    ) -> http.client.HTTPResponse:
        with _breaking(f"the connection to {source} broke"):
            return connection.get(path, {**self._headers, **headers}, patience_s=patience_s)

    def _fetch_manifest(self, source: str) -> Manifest | None:
        connection = self._connect(source)
        try:
            wait_s = _WAIT_PREFERRED_S if source == self._plan.preferred else _WAIT_OTHERS_S
            wait_s = min(wait_s, self._share_s())
            asked_s = time.monotonic()
            headers = {WAIT_HEADER: str(int(wait_s * 1e3))}
            response = self._get(connection, source, manifest_path(self._key), headers, patience_s=wait_s)
            if response.status == 503:
                # A source that answers so at once is about to end: don't ask it without a pause.
                self._stop.wait(max(0.0, asked_s + min(wait_s, _PAUSE_S) - time.monotonic()))
                return None
            if response.status != 200:
                raise self._refusal(response, source)
            data = self._read_manifest(response, source)
        finally:
            connection.close()
        manifest = decode(data, limits=self._limits, source=source)
        if manifest.layout.key != self._key:
            raise StateMismatch(
                f"{source} sent the manifest of state {manifest.layout.key} when asked for {self._key}; "
                "find out what runs there",
                wanted=self._key,
                offered=manifest.layout.key,
                source=source,
            )
        return manifest

    def _read_manifest(self, response: http.client.HTTPResponse, source: str) -> bytes:
        length = response.length
        if length is None or length > self._limits.manifest_bytes:
            raise StateCorrupt(
                f"{source} announces a manifest of {length} bytes, above the limit of {self._limits.manifest_bytes}",
                part="manifest",
                source=source,
            )
        with _breaking(f"the connection to {source} broke"):
            data = response.read(length)
        if len(data) != length:
            raise _Failed(f"{source} broke off within the manifest")
        return data

    def _refusal(self, response: http.client.HTTPResponse, source: str) -> CheckpointError | _Failed:
        with _breaking(f"the connection to {source} broke"):
            sentence = response.read(_SENTENCE_BYTES).decode("utf-8", "replace").strip()
        message = f"{source} answers {response.status}: {sentence or response.reason}"
        if response.status == 409:
            return StateMismatch(message, wanted=self._key, offered=_offered(response), source=source)
        if response.status == 503:
            return _Failed(message)
        return StateUnavailable(message, source=source, key=self._key)

    # ---- the run ----

    def _fetch_missing(self, source: str, manifest: Manifest) -> None:
        parts = self._plan.missing(self._num_connections)
        if not parts:
            return
        if self._num_connections == 1 or len(parts) == 1:
            self._fetch_parts(source, manifest, iter(parts).__next__, self._arrived)
        else:
            self._fetch_in_parallel(source, manifest, parts)

    def _arrived(self, source: str, chunk: int, num_bytes: int) -> None:
        self._count(num_bytes)
        self._plan.arrived(source, chunk)
        self._tell_progress()

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._fetched_bytes += num_bytes

    def _fetch_parts(
        self,
        source: str,
        manifest: Manifest,
        next_part: Callable[[], range],
        arrived: Callable[[str, int, int], None],
    ) -> None:
        """Fetch part after part over one connection, until next_part raises StopIteration."""
        connection = self._connect(source)
        try:
            while True:
                try:
                    part = next_part()
                except StopIteration:
                    return
                self._fetch_part(connection, source, manifest, part, arrived)
        finally:
            connection.close()

    def _fetch_part(
        self,
        connection: Connection,
        source: str,
        manifest: Manifest,
        part: range,
        arrived: Callable[[str, int, int], None],
    ) -> None:
        layout = manifest.layout
        start, end = layout.chunk_span(part[0])[0], layout.chunk_span(part[-1])[1]
        headers = {"range": f"bytes={start}-{end - 1}"}
        response = self._get(connection, source, data_path(self._key), headers)
        if response.status not in (200, 206):
            raise self._refusal(response, source)
        expected = f"bytes {start}-{end - 1}/{layout.data_bytes}"
        if response.status != 206 or response.length != end - start or response.headers["content-range"] != expected:
            raise StateCorrupt(
                f"{source} answers {expected!r} with {response.headers['content-range']!r}, {response.length} bytes",
                part="data",
                source=source,
            )
        assert self._buffer is not None
        for chunk in part:
            self._stop.check()
            low, high = layout.chunk_span(chunk)
            view = self._buffer.view[low:high]
            self._read_exactly(response, source, view)
            if checksum(view) != manifest.sums[chunk]:
                self._count(high - low)
                raise StateCorrupt(
                    f"{source} served chunk {chunk} of state {self._key} damaged (bytes {low} to {high}); "
                    "its checksum does not match, so suspect that host or the network to it",
                    part=f"chunk {chunk}",
                    source=source,
                )
            arrived(source, chunk, high - low)

    def _read_exactly(self, response: http.client.HTTPResponse, source: str, view: memoryview) -> None:
        at = 0
        while at < len(view):
            with _breaking(f"the connection to {source} broke"):
                count = response.readinto(view[at:])
            if count == 0:
                raise _Failed(f"{source} broke off within the data")
            at += count

    def _fetch_in_parallel(self, source: str, manifest: Manifest, parts: list[range]) -> None:
        """The same over several connections, each on a thread of its own; the callbacks stay on this one."""
        work: queue.SimpleQueue[range] = queue.SimpleQueue()
        for part in parts:
            work.put(part)
        news: queue.SimpleQueue[tuple[int, int] | BaseException | None] = queue.SimpleQueue()
        ended = threading.Event()

        def next_part() -> range:
            if ended.is_set():
                raise StopIteration
            try:
                return work.get_nowait()
            except queue.Empty:
                raise StopIteration from None

        def carry() -> None:
            try:
                self._fetch_parts(source, manifest, next_part, lambda _, chunk, count: news.put((chunk, count)))
                news.put(None)
            except BaseException as error:
                # Raised again on the calling thread, below.
                news.put(error)

        threads = [
            threading.Thread(target=carry, name=f"tft-ckpt-recv-{index}", daemon=True)
            for index in range(min(self._num_connections, len(parts)))
        ]
        for thread in threads:
            thread.start()
        try:
            failure = self._gather(source, news, ended, len(threads))
        except BaseException:
            # The progress callback raised: the transfer is over.
            self._stop.stop("the transfer has ended")
            raise
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        if failure is not None:
            raise failure

    def _gather(
        self,
        source: str,
        news: queue.SimpleQueue[tuple[int, int] | BaseException | None],
        ended: threading.Event,
        num_running: int,
    ) -> BaseException | None:
        failure: BaseException | None = None
        while num_running:
            try:
                item = news.get(timeout=0.05)
            except queue.Empty:
                try:
                    self._stop.check()
                except (Closed, DeadlinePassed) as error:
                    self._stop.stop(str(error))
                    failure = failure or error
                continue
            if isinstance(item, tuple):
                self._arrived(source, *item)
            else:
                num_running -= 1
                if item is not None:
                    failure = failure or item
                    ended.set()
        return failure


@contextmanager
def _breaking(what: str) -> Iterator[None]:
    """Turn what sockets and http.client raise into _Failed."""
    try:
        yield
    except CheckpointError:
        # Before the next clause: a passed deadline is an OSError as well.
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _Failed(f"{what}: {str(error) or type(error).__name__}") from error


def _offered(response: http.client.HTTPResponse) -> StateKey | None:
    try:
        return StateKey.parse(response.headers.get(KEY_HEADER, ""))
    except WrongSetting:
        return None
