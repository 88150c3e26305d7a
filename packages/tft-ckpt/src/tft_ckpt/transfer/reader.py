"""One connection to one source of one state.

A source has a few valid answers. Everything else is a named fault: a lost connection, damage, a refusal. The bytes of
the payload go directly to their places, and each chunk is checked there.

Law of this file: requests and reads. Other files decide what a fault means for the receive.
"""

from __future__ import annotations

import http.client
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, final

from tft_ckpt.errors import CheckpointError, ConfigError, StateCorruptError, StateMismatchError, StateUnavailableError
from tft_ckpt.key import StateKey
from tft_ckpt.state.manifest import Manifest
from tft_ckpt.state.target import Target
from tft_ckpt.state.tree import Limits
from tft_ckpt.texts import printable
from tft_ckpt.transfer.address import is_tls, parse_url
from tft_ckpt.transfer.connection import Connection, SourceSilentError, StopSignal
from tft_ckpt.transfer.rate_limiter import RateLimiter
from tft_ckpt.transfer.routes import (
    HAVE_COUNT_HEADER,
    KEY_HEADER,
    PARTIAL_HEADER,
    RELAY_HEADER,
    WAIT_HEADER,
    Token,
    authorization,
    chunks_bytes_max,
    chunks_path,
    data_path,
    manifest_path,
    parse_chunks,
    shown_token,
)
from tft_ckpt.transfer.tls import ContextSource

__all__ = ["Chunks", "Reader", "RequestContext", "SharedRateLimiter", "SourceBrokenError", "SourceHungError"]

# A source that answers "not yet" at once is about to end, so the next request waits for a moment.
_PAUSE_S: Final = 0.05
_SENTENCE_BYTES: Final = 4096


class SourceBrokenError(Exception):
    """The connection to the source was lost. The sentence describes the transport error."""


class SourceHungError(SourceBrokenError):
    """The source was silent, or took longer, than allowed."""


@final
class SharedRateLimiter:
    """A rate limit for all connections of a transport together.

    Args:
        bytes_per_s: at least 1.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._rate_limiter = RateLimiter(bytes_per_s)
        self._lock = threading.Lock()
        self.piece_bytes = self._rate_limiter.piece_bytes

    def wait(self, num_bytes: int, stop: StopSignal) -> None:
        """Wait as long as these received bytes should have taken. Raises: as `StopSignal.wait`."""
        with self._lock:
            wait_s = self._rate_limiter.take(num_bytes, time.monotonic())
        if wait_s > 0:
            stop.wait(wait_s)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The common settings of all requests of one receive.

    Fields:
        key: the requested state.
        token: the job's token, or None.
        own: this receiver's URL, where it relays its chunks; "" if it does not.
        limits: larger states are refused.
        tls: returns the TLS context of the next connection, for sources whose URL says https; None: plain HTTP.
        rate_limiter: the rate limit, or None.
    """

    key: StateKey
    token: Token = field(repr=False)
    own: str
    limits: Limits
    tls: ContextSource | None = None
    rate_limiter: SharedRateLimiter | None = None

    def headers(self) -> dict[str, str]:
        """Return the headers of data requests."""
        shown = shown_token(self.token)
        return {} if shown is None else {"authorization": authorization(shown)}

    def named_headers(self) -> dict[str, str]:
        """Return the headers of manifest and chunk requests, which name the receiver."""
        return {**self.headers(), **({RELAY_HEADER: self.own} if self.own else {})}


@dataclass(frozen=True, slots=True)
class Chunks:
    """A source's report on its chunks.

    Fields:
        have: bitmap, chunk 0 in the lowest bit.
        peers: URLs of peers that fetch the same state.
    """

    have: int
    peers: tuple[str, ...]


@final
class Reader:
    """A connection, from construction to `close`, on one thread.

    Args:
        source: its URL.
        context: of the receive.
        silence_s: how long it may be silent.
        stop: ends every wait.

    Fields:
        read_bytes: payload bytes read so far, whatever happened to them.
        has_written: whether a target may have been written to.
        addresses: of the connection, (this side's, the other side's).

    Raises: SourceBrokenError: the connection failed. StateUnavailableError: the URL is malformed.
        TransportClosedError, TransferTimeoutError. All methods raise these, too, when the connection is lost.
    """

    def __init__(self, source: str, context: RequestContext, *, silence_s: float, stop: StopSignal) -> None:
        self.read_bytes = 0
        self.has_written = False
        self._source = source
        self._context = context
        self._silence_s = silence_s
        self._stop = stop
        self._deadline_s = math.inf
        self._connection = self._connect()
        self._was_used = self._is_last = False

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def hand_over(self, stop: StopSignal, *, deadline_s: float) -> None:
        """Continue with another stop signal and another deadline on the monotonic clock, for another thread."""
        self._stop, self._deadline_s = stop, deadline_s
        self._connection.hand_over(stop, deadline_s)

    @property
    def addresses(self) -> tuple[str, str]:
        return self._connection.addresses

    def _connect(self) -> Connection:
        host, port = parse_url(self._source)
        tls = self._context.tls
        if (tls is not None) != is_tls(self._source):
            # A plain connection is refused if TLS is required. Otherwise an unverified source would get the token and
            # be trusted.
            asks, has = ("TLS", "no certificates") if tls is None else ("plain HTTP", "certificates")
            raise StateUnavailableError(
                f"{self._source} uses {asks}, but this process has {has}; set tls on every transport or none",
                source=self._source,
                key=self._context.key,
            )
        with _converting_errors(f"can't connect to {self._source}"):
            silence_s, deadline_s = self._silence_s, self._deadline_s
            return Connection(
                host, port, silence_s=silence_s, stop=self._stop, tls=tls and tls(), deadline_s=deadline_s
            )

    def _get(self, path: str, headers: Mapping[str, str], *, patience_s: float = 0.0) -> http.client.HTTPResponse:
        if self._is_last:
            self._connect_again()
        with _converting_errors(f"lost the connection to {self._source}"):
            try:
                response = self._connection.get(path, headers, patience_s=patience_s)
            except ConnectionError:
                if not self._was_used:
                    raise
                # A source may close an idle connection at any time.
                self._connect_again()
                response = self._connection.get(path, headers, patience_s=patience_s)
        self._was_used, self._is_last = True, response.will_close
        return response

    def _connect_again(self) -> None:
        self._connection.close()
        self._connection = self._connect()
        self._was_used = self._is_last = False

    def manifest(self, wait_s: float) -> tuple[bytes, bool] | None:
        """Request the manifest.

        Args:
            wait_s: how long the source may take to get it.

        Returns: the undecoded manifest, and whether the source has only parts of the payload; None if it has nothing
            yet.
        Raises: StateCorruptError, StateMismatchError, StateUnavailableError.
        """
        asked_s = time.monotonic()
        headers = {**self._context.named_headers(), WAIT_HEADER: str(int(wait_s * 1e3))}
        response = self._get(manifest_path(self._context.key), headers, patience_s=wait_s)
        if response.status == 503:
            self._stop.wait(max(0.0, asked_s + min(wait_s, _PAUSE_S) - time.monotonic()))
            return None
        if response.status != 200:
            raise self._refusal(response)
        data = self._read_body(response, self._context.limits.manifest_bytes, "manifest")
        return data, response.headers.get(PARTIAL_HEADER) == "1"

    def chunks(self, manifest: Manifest, *, wait_s: float, num_known: int) -> Chunks | None:
        """Request the list of the source's chunks and of its peers.

        Args:
            manifest: the present manifest.
            wait_s: how long the source may keep the request open until its number of chunks differs from num_known.
            num_known: the known number of its chunks.

        Returns: None if the source has nothing of the state yet.
        Raises: StateCorruptError, StateMismatchError, StateUnavailableError.
        """
        num_chunks = manifest.layout.num_chunks
        headers = {
            **self._context.named_headers(),
            WAIT_HEADER: str(int(wait_s * 1e3)),
            HAVE_COUNT_HEADER: str(num_known),
        }
        response = self._get(chunks_path(self._context.key), headers, patience_s=wait_s)
        if response.status == 503:
            with _converting_errors(f"lost the connection to {self._source}"):
                response.read(_SENTENCE_BYTES)
            return None
        if response.status != 200:
            raise self._refusal(response)
        data = self._read_body(response, chunks_bytes_max(num_chunks), "list of chunks")
        try:
            have, peers = parse_chunks(data, num_chunks)
        except ValueError as error:
            raise StateCorruptError(
                f"{self._source} sent an unreadable list of chunks: {printable(str(error))}; check which process runs "
                "there",
                part="list of chunks",
                source=self._source,
            ) from error
        return Chunks(int.from_bytes(have, "little"), peers)

    def part(self, chunks: range, manifest: Manifest, target: Target, arrived: Callable[[int], None]) -> None:
        """Read consecutive chunks to their places.

        Args:
            chunks: the chunks.
            manifest: the present manifest.
            target: the places.
            arrived: called with each chunk that has arrived and matches its checksum.

        Raises: StateCorruptError: a chunk does not match, or the answer is a different one. StateMismatchError,
        StateUnavailableError.
        """
        layout = manifest.layout
        start, end = layout.chunk_span(chunks[0])[0], layout.chunk_span(chunks[-1])[1]
        headers = {**self._context.headers(), "range": f"bytes={start}-{end - 1}"}
        response = self._get(data_path(self._context.key), headers)
        if response.status not in (200, 206):
            raise self._refusal(response)
        expected = f"bytes {start}-{end - 1}/{layout.data_bytes}"
        if response.status != 206 or response.length != end - start or response.headers["content-range"] != expected:
            raise StateCorruptError(
                f"{self._source} answered the request for {expected!r} with the range "
                f"{printable(response.headers['content-range'] or 'none')} of {response.length} bytes",
                part="data",
                source=self._source,
            )
        for chunk in chunks:
            self._stop.check()
            low, high = layout.chunk_span(chunk)
            for piece in target.views(low, high):
                self._read_exactly(response, piece)
            if target.checksum(low, high) != manifest.checksums[chunk]:
                raise StateCorruptError(
                    f"{self._source} sent chunk {chunk} of state {self._context.key} (bytes {low} to {high}) with a "
                    "wrong checksum; check that host and the network to it",
                    part=f"chunk {chunk}",
                    source=self._source,
                )
            arrived(chunk)
        # Otherwise the next request would find the answer unread.
        with _converting_errors(f"lost the connection to {self._source}"):
            response.read()

    def _read_exactly(self, response: http.client.HTTPResponse, view: memoryview) -> None:
        rate_limiter, at = self._context.rate_limiter, 0
        while at < len(view):
            piece = view[at:] if rate_limiter is None else view[at : at + rate_limiter.piece_bytes]
            self.has_written = True
            before_bytes = self._connection.read_bytes
            try:
                with _converting_errors(f"lost the connection to {self._source}"):
                    count = response.readinto(piece)
            except BaseException:
                # The error does not say how much of the piece was filled.
                self.read_bytes += self._connection.read_bytes - before_bytes
                raise
            if count == 0:
                raise SourceBrokenError(f"{self._source} disconnected within the data")
            at += count
            self.read_bytes += count
            if rate_limiter is not None:
                rate_limiter.wait(count, self._stop)

    def _read_body(self, response: http.client.HTTPResponse, most_bytes: int, what: str) -> bytes:
        length = response.length
        if length is None or length > most_bytes:
            raise StateCorruptError(
                f"{self._source} announces a {what} of {length} bytes, above the limit of {most_bytes}",
                part=what,
                source=self._source,
            )
        with _converting_errors(f"lost the connection to {self._source}"):
            data = response.read(length)
        if len(data) != length:
            raise SourceBrokenError(f"{self._source} disconnected within the {what}")
        return data

    def _refusal(self, response: http.client.HTTPResponse) -> CheckpointError | SourceBrokenError:
        source, key = self._source, self._context.key
        with _converting_errors(f"lost the connection to {source}"):
            sentence = printable(response.read(_SENTENCE_BYTES).strip())
        message = f"{source} answered {response.status}: {sentence or printable(response.reason)}"
        if response.status == 409:
            return StateMismatchError(message, wanted=key, offered=_offered_key(response), source=source)
        if 400 <= response.status < 500:
            return StateUnavailableError(message, source=source, key=key)
        # A new request may help. The source is about to end, or an intact source never gives this answer.
        return SourceBrokenError(message)


@contextmanager
def _converting_errors(what: str) -> Iterator[None]:
    """Convert the errors of sockets and http.client to SourceBrokenError."""
    try:
        yield
    except CheckpointError:
        # Before the next clause, because TransferTimeoutError is an OSError too.
        raise
    except SourceSilentError as error:
        raise SourceHungError(f"{what}: {error}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SourceBrokenError(f"{what}: {printable(str(error).strip()) or type(error).__name__}") from error


def _offered_key(response: http.client.HTTPResponse) -> StateKey | None:
    try:
        return StateKey.parse(response.headers.get(KEY_HEADER, ""))
    except ConfigError:
        return None
