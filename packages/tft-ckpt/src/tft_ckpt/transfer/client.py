"""The receiving side of a transfer.

A receive requests the manifest from a source, allocates memory for the payload (or uses existing tensors), and reads
the payload directly into it. It checks each chunk. From one source it reads on the calling thread over one connection,
and asks regularly for peers that fetch the same state. Several sources are asked for the manifest in parallel. With
several sources, or with peers, worker threads read.

The plan learns of every fault of a source, and decides the next primary source and the missing chunks. So a lost
connection costs only its data in flight, and a dead source only its unsent data.

Law of this file: one receive from its first request to its end. No received data is used before its checksum was
compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

from tft_ckpt.errors import (
    StateCorruptError,
    StateLayoutError,
    StateMismatchError,
    StateUnavailableError,
    StateUnsupportedError,
    TransferTimeoutError,
)
from tft_ckpt.key import StateKey
from tft_ckpt.state.manifest import Layout, Manifest, decode
from tft_ckpt.state.target import Target
from tft_ckpt.transfer.chunks import ChunkPlan
from tft_ckpt.transfer.connection import StopSignal
from tft_ckpt.transfer.manifest_request import Answer, Race
from tft_ckpt.transfer.plan import FetchPlan
from tft_ckpt.transfer.reader import Reader, RequestContext, SourceBrokenError, SourceHungError
from tft_ckpt.transfer.worker_pool import Relay, TransferStats, WorkerPool

__all__ = ["Receive", "ReceiveReport"]

# How long a source is asked to keep a request open until it has the state.
_WAIT_S: Final = 2.0
# How long one of several sources may take alone for a small payload. After that the others are used too.
_ALONE_S: Final = 1.0
# The shortest silence limit of a source, however little time is left.
_SILENCE_MIN_S: Final = 0.05
# Below this size, other sources and peers are not worth their connections.
_HELP_BYTES_MIN: Final = 8 << 20
# The delay between the first request for peers and the second. The delay doubles each time.
_ASK_PEERS_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class ReceiveReport:
    """The result of a receive.

    Fields:
        key: the state.
        state_bytes: length of its payload.
        fetched_bytes: payload bytes received over the network, including repeated and damaged ones.
        wall_s: from the call to the state, waiting included.
        fetching_s: the part of it with data in flight.
        sources: the sources of at least one good chunk or of the last manifest, in order.
        by_source: bytes of good chunks by source, including peers.
        faults: sentences about the sources that failed.
        addresses: of a connection with data, (this side's, the other side's); None if there was none.
    """

    key: StateKey
    state_bytes: int
    fetched_bytes: int
    wall_s: float
    fetching_s: float
    sources: tuple[str, ...]
    by_source: Mapping[str, int]
    faults: tuple[str, ...]
    addresses: tuple[str, str] | None


@final
class Receive:
    """One receive, for one use.

    Args:
        sources: addresses, the preferred one first.
        context: the common settings of all its requests.
        num_connections: connections to each source at the same time, at least 1. With 1, a single source is read on the
            calling thread.
        silence_s: how long a source may be silent before it counts as dead.
        make_target: returns the target for a layout.
        relay: called with a manifest, its encoded form and its target, so that peers can read the received chunks; or
            None.
        stop: ends the receive.
        progress: called with (received and checked bytes, all bytes), on the calling thread.
        poor: the sources that failed in earlier receives. They are asked last.
    """

    def __init__(
        self,
        sources: Sequence[str],
        context: RequestContext,
        *,
        num_connections: int,
        silence_s: float,
        make_target: Callable[[Layout], Target],
        relay: Callable[[Manifest, bytes, Target], Relay] | None,
        stop: StopSignal,
        progress: Callable[[int, int], None] | None,
        poor: Collection[str] = (),
    ) -> None:
        self._key = context.key
        self._context = context
        self._plan = FetchPlan(context.key, sources, own=context.own, poor=poor)
        self._chunks = ChunkPlan(context.own)
        self._num_connections = num_connections
        self._silence_s = silence_s
        self._make_target = make_target
        self._make_relay = relay
        self._stop = stop
        self._progress = progress
        self._target: Target | None = None
        self._relay: Relay | None = None
        self._total_bytes = 0
        self._stats = TransferStats()
        self._primaries: list[str] = []
        self._held_reader: Reader | None = None  # a source keeps a state for connections that have requested it
        self._start_s = time.monotonic()
        self._fetching_s = 0.0

    @property
    def has_written(self) -> bool:
        """Return whether the target may have been written to."""
        return self._stats.has_written

    @property
    def poor(self) -> Mapping[str, str]:
        """Return the sources that hung, sent wrong data or were slow, and a sentence for each."""
        return self._plan.poor

    @property
    def delivered(self) -> Collection[str]:
        """Return the sources of good chunks."""
        return self._stats.good_bytes.keys()

    def run(self) -> tuple[Target, ReceiveReport]:
        """Fetch the state. Raises: as `CheckpointTransport.recv_checkpoint`."""
        try:
            while True:
                source = self._plan.next_source()
                if source is None:
                    raise self._plan.verdict()
                self._stop.wait(self._plan.pause_s(source, time.monotonic()))
                self._try_source(source)
                if self._chunks.complete:
                    assert self._target is not None
                    return self._target, self._report()
        except TransferTimeoutError as error:
            raise self._timeout_error() from error
        finally:
            self._close_held_reader()
            self._end_relay()

    def _end_relay(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.end()

    def _report(self) -> ReceiveReport:
        good_bytes = self._stats.good_bytes
        return ReceiveReport(
            key=self._key,
            state_bytes=self._total_bytes,
            fetched_bytes=self._stats.fetched_bytes,
            wall_s=time.monotonic() - self._start_s,
            fetching_s=self._fetching_s,
            sources=tuple(dict.fromkeys([*self._primaries, *good_bytes])),
            by_source=dict(good_bytes),
            faults=tuple(self._stats.faults),
            addresses=self._stats.addresses,
        )

    def _timeout_error(self) -> TransferTimeoutError:
        asked, stats = self._plan.next_source(), self._stats
        faults = f"; earlier errors: {'; '.join(stats.faults[-3:])}" if stats.faults else ""
        if self._target is not None:
            received = f"received {self._chunks.good_bytes} of {self._total_bytes} bytes"
        elif self._plan.has_answered:
            received = "no source had it yet"
        else:
            received = "no source answered; check whether it runs, and the network to it"
        lost = (
            f"; the connection was lost {stats.num_lost} times; check the log of the source, and firewalls and proxies "
            "on the way"
            if stats.num_lost
            else ""
        )
        return TransferTimeoutError(
            f"timed out fetching state {self._key} after {self._stop.timeout_s:g} s: {received}{lost}; current source: "
            f"{asked}{faults}",
            timeout_s=self._stop.timeout_s,
        )

    def _try_source(self, source: str) -> None:
        """Continue with this source as the primary, or with a faster one."""
        self._close_held_reader()
        if self._plan.num_sources == 1:
            with self._recording_faults(source):
                self._fetch_from(source, self._request_manifest(source))
            return
        sources = self._plan.candidates(time.monotonic())
        with Race(sources, self._context, silence_s=self._silence_of, wait_s=_WAIT_S, stop=self._stop) as race:
            answer = self._first_answer(race)
        if answer is not None:
            with self._recording_faults(answer.source):
                self._fetch_from(answer.source, answer)

    def _first_answer(self, race: Race) -> Answer | None:
        """Return the first answer with a manifest from several sources, or None if no source has it."""
        while (answer := race.next()) is not None:
            with self._recording_faults(answer.source):
                if answer.error is not None:
                    raise answer.error
                if answer.reader is not None:
                    return answer
                self._plan.not_yet(answer.source, time.monotonic())
        return None

    def _fetch_from(self, source: str, answer: Answer) -> None:
        """Fetch the missing chunks under this source's manifest."""
        if answer.reader is None or answer.data is None:
            self._plan.not_yet(source, time.monotonic())
            return
        self._held_reader = answer.reader
        manifest = self._read_manifest(source, answer.data)
        self._adopt(source, manifest, answer.data)
        began_s = time.monotonic()
        if self._plan.num_sources > 1:
            answer.reader.hand_over(self._stop, deadline_s=began_s + min(_ALONE_S, self._share_s()))
        try:
            self._fetch(source, manifest, answer.is_partial)
        finally:
            self._fetching_s += time.monotonic() - began_s

    @contextmanager
    def _recording_faults(self, source: str) -> Iterator[None]:
        """Report faults of this source to the plan."""
        try:
            yield
        except SourceBrokenError as error:
            self._stats.fault(error)
            failure = StateUnavailableError(str(error), source=source, key=self._key)
            if isinstance(error, SourceHungError):
                self._plan.hung(source, failure, time.monotonic(), self._allowed_silence_s())
            else:
                self._plan.connection_lost(source, failure, time.monotonic())
        except StateCorruptError as error:
            self._stats.fault(error)
            self._plan.damaged(source, error)
        except (StateMismatchError, StateUnavailableError, StateUnsupportedError, StateLayoutError) as error:
            self._stats.fault(error)
            self._plan.refused(source, error)

    def _close_held_reader(self) -> None:
        if self._held_reader is not None:
            self._held_reader.close()
            self._held_reader = None

    # ---- the manifest ----

    def _allowed_silence_s(self) -> float:
        return min(self._silence_s, self._share_s())

    def _share_s(self) -> float:
        # With other sources left, one dead source must not use up the time that they need. It gets half of its share,
        # because it may be silent twice: while it waits for the state, and while it should send.
        others = self._plan.num_sources > 1
        share = self._stop.remaining_s() / (2 * self._plan.num_sources if others else 1)
        return max(_SILENCE_MIN_S, share)

    def _silence_of(self, source: str) -> float:
        return self._plan.silence_s(source, self._allowed_silence_s())

    def _request_manifest(self, source: str) -> Answer:
        """Ask the only source for the manifest, on this thread."""
        self._held_reader = reader = Reader(source, self._context, silence_s=self._allowed_silence_s(), stop=self._stop)
        found = reader.manifest(min(_WAIT_S, self._share_s()))
        return Answer(source) if found is None else Answer(source, reader, *found)

    def _read_manifest(self, source: str, data: bytes) -> Manifest:
        manifest = decode(data, limits=self._context.limits, source=source)
        if manifest.layout.key != self._key:
            raise StateMismatchError(
                f"{source} sent the manifest of state {manifest.layout.key} when asked for {self._key}; "
                "check which process runs there",
                wanted=self._key,
                offered=manifest.layout.key,
                source=source,
            )
        return manifest

    def _adopt(self, source: str, manifest: Manifest, manifest_bytes: bytes) -> None:
        # Before the first byte of the new payload is written, because peers may be reading the previous one.
        self._end_relay()
        self._plan.primary_changed()
        self._primaries = [source]
        kept = self._chunks.adopt(manifest)
        self._total_bytes = manifest.layout.data_bytes
        before = self._target
        if before is None or before.layout.root != manifest.layout.root or not kept:
            # Release the old target first, so that both do not exist at once if nothing is carried over.
            before = self._target = before if kept else None
            target = self._target = self._make_target(manifest.layout)
            self._carry_over(before, target, manifest)
        if self._make_relay is not None and manifest.layout.num_chunks:
            self._relay = self._make_relay(manifest, manifest_bytes, self._whole_target())
            for chunk in self._chunks.good():
                self._relay.have(chunk)
        self._report_progress()

    def _carry_over(self, before: Target | None, target: Target, manifest: Manifest) -> None:
        """Keep the received chunks for a payload with the same bytes and other plain data."""
        if before is None:
            return
        for chunk in list(self._chunks.good()):
            start, end = manifest.layout.chunk_span(chunk)
            data, at = b"".join(before.views(start, end)), 0
            for piece in target.views(start, end):
                piece[:] = data[at : at + len(piece)]
                at += len(piece)
            # In existing tensors, this chunk's place may have belonged to another chunk before.
            if target.checksum(start, end) != manifest.checksums[chunk]:
                self._chunks.mark_missing(chunk)

    def _report_progress(self) -> None:
        if self._progress is not None:
            self._progress(self._chunks.good_bytes, self._total_bytes)

    # ---- the payload ----

    def _fetch(self, primary: str, manifest: Manifest, is_partial: bool) -> None:
        is_small = self._chunks.missing_bytes < _HELP_BYTES_MIN
        alone = self._num_connections == 1 and not is_partial
        alone &= self._plan.num_sources == 1 or (is_small and not self._plan.has_hung)
        if alone and self._fetch_alone(primary, manifest):
            return
        WorkerPool(
            manifest,
            primary,
            primary_is_partial=is_partial,
            target=self._whole_target(),
            plan=self._plan,
            chunks=self._chunks,
            stats=self._stats,
            context=self._context,
            relay=self._relay,
            stop=self._stop,
            num_connections=self._num_connections,
            silence_s=self._allowed_silence_s,
            progress=self._report_progress,
        ).run()

    def _whole_target(self) -> Target:
        assert self._target is not None
        return self._target

    def _fetch_alone(self, primary: str, manifest: Manifest) -> bool:
        """Fetch the missing chunks over one connection, on this thread, in as few requests as possible.

        Returns: whether the payload is complete. If not, there are peers that could help.
        """
        if self._chunks.complete:
            return True
        peer_poll = _PeerPoll(primary, manifest, self._plan, self._context, self._allowed_silence_s(), self._stop)
        try:
            if self._chunks.missing_bytes >= _HELP_BYTES_MIN and peer_poll.has_peers():
                return False
            return self._read_alone(primary, manifest, peer_poll)
        finally:
            peer_poll.close()

    def _read_alone(self, primary: str, manifest: Manifest, peer_poll: _PeerPoll) -> bool:
        target = self._whole_target()
        reader = self._held_reader
        assert reader is not None, "the manifest came over it"
        worker = self._chunks.join(primary, time.monotonic(), has_all=True, is_peer=False)

        def arrived(chunk: int) -> None:
            self._stats.good_bytes[primary] += self._chunks.arrived(worker, chunk, time.monotonic())
            self._plan.delivered(primary)
            if self._relay is not None:
                self._relay.have(chunk)
            self._report_progress()
            if self._chunks.missing_bytes >= _HELP_BYTES_MIN and peer_poll.has_peers():
                raise _PeersFoundError

        try:
            while (part := self._chunks.claim(worker, time.monotonic(), is_alone=True)) is not None:
                reader.part(part, manifest, target, arrived)
            return True
        except _PeersFoundError:
            self._close_held_reader()  # otherwise the rest of the answer would arrive
            self._held_reader = peer_poll.take_over()
            return False
        finally:
            self._chunks.leave(worker, time.monotonic())
            self._stats.add(reader, is_source=True)


class _PeersFoundError(Exception):
    """An exception that ends a request for all missing chunks."""


@final
class _PeerPoll:
    """A poll of the primary source for peers, over a separate connection.

    Args:
        primary: the primary source.
        manifest: the present manifest.
        plan: receives the peers.
        context, silence_s, stop: of the receive.
    """

    def __init__(
        self,
        primary: str,
        manifest: Manifest,
        plan: FetchPlan,
        context: RequestContext,
        silence_s: float,
        stop: StopSignal,
    ) -> None:
        self._primary = primary
        self._manifest = manifest
        self._plan = plan
        self._context = context
        self._silence_s = silence_s
        self._stop = stop
        self._reader: Reader | None = None
        self._pause_s = _ASK_PEERS_S
        self._next_s = 0.0

    def has_peers(self) -> bool:
        """Return whether there are peers to ask. Asks the primary source if a request is due."""
        now_s = time.monotonic()
        if self._context.own and now_s >= self._next_s:
            self._next_s = now_s + self._pause_s
            self._pause_s *= 2
            self._poll()
        return bool(self._plan.due_peers(now_s))

    def _poll(self) -> None:
        try:
            if self._reader is None:
                self._reader = Reader(self._primary, self._context, silence_s=self._silence_s, stop=self._stop)
            answer = self._reader.chunks(self._manifest, wait_s=0.0, num_known=0)
        except (SourceBrokenError, StateCorruptError, StateMismatchError, StateUnavailableError):
            # The connection with the data decides about the source.
            self._next_s = math.inf
        else:
            self._plan.add_peers(() if answer is None else answer.peers)

    def take_over(self) -> Reader | None:
        """Hand over the connection, if there is one. The caller closes it."""
        reader, self._reader = self._reader, None
        return reader

    def close(self) -> None:
        """Close the connection."""
        if self._reader is not None:
            self._reader.close()
