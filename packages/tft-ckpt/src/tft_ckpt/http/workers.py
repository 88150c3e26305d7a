"""Several connections at once.

Each has a thread, which takes chunks from the plan, fetches them, and takes more. The calling thread watches: it starts
connections to those that may be asked, ends those that hold up others, tells the progress, and leaves when all is here
or when nobody is left who could go on.

Law of this file: threads and their end. Who is asked for what, and what a fault means, is decided in `plan` and
`chunks`; every thread takes the lock for that.
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
    Closed,
    DeadlinePassed,
    StateCorrupt,
    StateMismatch,
    StateUnavailable,
)
from tft_ckpt.http.chunks import ChunkPlan
from tft_ckpt.http.connection import StopSignal
from tft_ckpt.http.plan import FetchPlan
from tft_ckpt.http.reader import Broke, Hung, Reader, Terms
from tft_ckpt.manifest import Manifest
from tft_ckpt.target import Target

__all__ = ["Crew", "Relay", "Tally"]

THREAD_NAME: Final = "tft-ckpt-recv"
SOURCES_MAX: Final = 8
"""Sources asked at the same time."""
FELLOWS_MAX: Final = 8
"""Fellows asked at the same time."""
_LOOK_S: Final = 0.1
# How often a source of the whole is asked who else fetches the state.
_ASK_FELLOWS_S: Final = 0.25
# A question for chunks is kept open for so long; and after its answer there is a pause, or every chunk of every fellow
# would be a question of its own.
_WAIT_CHUNKS_S: Final = 1.0
_BETWEEN_CHUNKS_S: Final = 0.15
# A fellow that says nothing for so long is of no use, whatever a source may be allowed.
_FELLOW_SILENCE_S: Final = 5.0


class Relay(Protocol):
    """What serves others from a target that is still being filled."""

    def have(self, chunk: int) -> None:
        """The chunk is here and checked, and does not change until `end`."""

    def end(self) -> None:
        """Return when nobody looks into the target any more; again does nothing."""


@dataclass(slots=True)
class Tally:
    """What came of a receive so far; the owner locks.

    Fields:
        fetched_bytes: of the run, repeated and damaged ones included.
        has_written: something may have been written to a target.
        good_bytes: by source.
        faults: sentences about sources that failed.
        addresses: of a connection over which data came, (this side's, the other side's).
    """

    fetched_bytes: int = 0
    has_written: bool = False
    good_bytes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    addresses: tuple[str, str] | None = None

    def add(self, reader: Reader, *, is_source: bool) -> None:
        """A connection has ended; only those to sources are named by their addresses."""
        self.fetched_bytes += reader.read_bytes
        self.has_written |= reader.has_written
        if reader.read_bytes and is_source:
            self.addresses = reader.addresses


@dataclass(slots=True)
class _Hand:
    """A thread and how to end it."""

    source: str
    thread: threading.Thread
    stop: StopSignal


@final
class Crew:
    """The connections of one receive under one manifest, used once.

    Args:
        manifest: in force.
        lead: whose it is.
        lead_is_partial: it is a fellow itself, and has only parts.
        target: where the run is received into.
        plan, chunks, tally: of the receive; not touched by others until `run` returns.
        terms: of the receive.
        relay: is told of every good chunk, or None.
        stop: ends it all.
        num_connections: to each source, at least 1; each fellow gets one.
        silence_s: how long a source may be silent; called under the lock.
        progress: called on the calling thread when more is here.
    """

    def __init__(
        self,
        manifest: Manifest,
        lead: str,
        *,
        lead_is_partial: bool,
        target: Target,
        plan: FetchPlan,
        chunks: ChunkPlan,
        tally: Tally,
        terms: Terms,
        relay: Relay | None,
        stop: StopSignal,
        num_connections: int,
        silence_s: Callable[[], float],
        progress: Callable[[], None],
    ) -> None:
        self._manifest = manifest
        self._lead = lead
        self._lead_is_partial = lead_is_partial
        self._target = target
        self._plan = plan
        self._chunks = chunks
        self._tally = tally
        self._terms = terms
        self._relay = relay
        self._stop = stop
        self._num_connections = num_connections
        self._silence_s = silence_s
        self._progress = progress
        self._changed = threading.Condition()
        self._ended = False
        self._failure: BaseException | None = None
        self._hands: dict[int, _Hand] = {}
        self._gone: list[int] = []
        self._next_ask_s = 0.0
        self._bell, self._rope = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._rope, False)

    def run(self) -> None:
        """Fetch until all is here, or nobody at work is left. Raises: what stop, progress, or a bug of ours raised."""
        told_bytes = -1
        try:
            while True:
                with self._changed:
                    if self._failure is not None:
                        raise self._failure
                    complete, here_bytes = self._chunks.complete, self._chunks.good_bytes
                if here_bytes != told_bytes:
                    told_bytes = here_bytes
                    self._progress()
                if complete:
                    return
                self._reap()
                self._start_due()
                if not self._hands or self._is_stuck():
                    return
                self._break_off_the_slow()
                self._stop.wait(_LOOK_S, readable=self._bell)
                self._hush()
        finally:
            self._end()

    # ---- the calling thread ----

    def _hush(self) -> None:
        try:
            while os.read(self._bell, 4096):
                pass
        except BlockingIOError:
            return

    def _is_stuck(self) -> bool:
        with self._changed:
            return self._chunks.is_stuck(time.monotonic())

    def _start_due(self) -> None:
        at_work = Counter(hand.source for hand in self._hands.values())
        now_s = time.monotonic()
        with self._changed:
            sources = self._plan.due(now_s)
            fellows = self._plan.due_fellows(now_s)
        # The lead first: its data fit its manifest.
        sources.sort(key=lambda source: source != self._lead)
        room = SOURCES_MAX - sum(self._plan.is_source(source) for source in at_work)
        for source in sources:
            if at_work[source] == 0:
                if room == 0:
                    continue
                room -= 1
            for _ in range(self._num_connections - at_work[source]):
                self._start(source, now_s)
        room = FELLOWS_MAX - sum(not self._plan.is_source(source) for source in at_work)
        for fellow in [fellow for fellow in fellows if at_work[fellow] == 0][:room]:
            self._start(fellow, now_s)

    def _start(self, source: str, now_s: float) -> None:
        leads = source == self._lead and not self._lead_is_partial
        with self._changed:
            is_fellow = not self._plan.is_source(source) or (source == self._lead and self._lead_is_partial)
            worker = self._chunks.join(source, now_s, has_all=leads, is_fellow=is_fellow)
            most_s = self._silence_s()
            silence_s = min(most_s, _FELLOW_SILENCE_S) if is_fellow else self._plan.silence_s(source, most_s)
        # A signal of its own, so that one connection can be ended alone; the deadline of all is watched from here.
        stop = StopSignal(self._stop.remaining_s() + 60.0, None)
        thread = threading.Thread(
            target=self._work,
            args=(worker, source, stop, silence_s),
            name=f"{THREAD_NAME}-{worker}",
            daemon=True,
        )
        self._hands[worker] = _Hand(source, thread, stop)
        thread.start()

    def _reap(self) -> None:
        with self._changed:
            gone, self._gone = self._gone, []
        for worker in gone:
            hand = self._hands.pop(worker)
            hand.thread.join()
            hand.stop.close()

    def _break_off_the_slow(self) -> None:
        with self._changed:
            slow = self._chunks.too_slow(time.monotonic())
        for worker in slow:
            self._hands[worker].stop.stop("others are quicker")

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for hand in self._hands.values():
            hand.stop.stop("the transfer has ended")
        for hand in self._hands.values():
            hand.thread.join()
            hand.stop.close()
        self._hands.clear()
        os.close(self._bell)
        os.close(self._rope)

    # ---- a connection's thread ----

    def _ring(self) -> None:
        try:
            os.write(self._rope, b"x")
        except BlockingIOError:
            # It has been rung often enough.
            return

    def _work(self, worker: int, source: str, stop: StopSignal, silence_s: float) -> None:
        came = False

        def arrived(chunk: int) -> None:
            nonlocal came
            came = True
            self._arrived(worker, source, chunk)

        try:
            reader = Reader(source, self._terms, silence_s=silence_s, stop=stop)
            try:
                self._fetch(worker, source, reader, stop, arrived)
            finally:
                with self._changed:
                    self._tally.add(reader, is_source=self._plan.is_source(source))
                reader.close()
        except BaseException as error:
            # Sorted out under the lock, and raised again on the calling thread if it is nothing that a source did.
            self._fault(source, error, came=came)
        finally:
            with self._changed:
                self._chunks.leave(worker, time.monotonic())
                self._gone.append(worker)
                self._changed.notify_all()
            self._ring()

    def _fetch(
        self, worker: int, source: str, reader: Reader, stop: StopSignal, arrived: Callable[[int], None]
    ) -> None:
        leads = source == self._lead and not self._lead_is_partial
        if not leads and not self._ask_chunks(worker, source, reader, wait_s=_WAIT_CHUNKS_S):
            return
        while True:
            stop.check()
            now_s = time.monotonic()
            with self._changed:
                if self._ended or self._chunks.complete:
                    return
                ask = self._plan.is_source(source) and bool(self._terms.own) and now_s >= self._next_ask_s
                if ask:
                    self._next_ask_s = now_s + _ASK_FELLOWS_S
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
                self._idle(_LOOK_S)

    def _idle(self, seconds: float) -> None:
        with self._changed:
            if not self._ended:
                self._changed.wait(seconds)

    def _ask_chunks(self, worker: int, source: str, reader: Reader, *, wait_s: float = 0.0) -> bool:
        """Returns: False if the source has nothing of the state yet."""
        with self._changed:
            num_known = self._chunks.num_known(worker)
        answer = reader.chunks(self._manifest, wait_s=wait_s, num_known=num_known)
        now_s = time.monotonic()
        with self._changed:
            if answer is None:
                if num_known and not self._plan.is_source(source):
                    self._plan.lost(source)
                else:
                    self._plan.not_yet(source, now_s)
                return False
            self._chunks.told(worker, answer.have, now_s)
            if self._terms.own:
                self._plan.met(answer.fellows)
        return True

    def _arrived(self, worker: int, source: str, chunk: int) -> None:
        if self._relay is not None:
            self._relay.have(chunk)
        with self._changed:
            before_bytes = self._chunks.good_bytes
            self._chunks.arrived(worker, chunk, time.monotonic())
            self._tally.good_bytes[source] += self._chunks.good_bytes - before_bytes
            self._plan.delivered(source)
            if self._chunks.complete:
                self._changed.notify_all()
        self._ring()

    def _fault(self, source: str, error: BaseException, *, came: bool) -> None:
        now_s = time.monotonic()
        with self._changed:
            if self._ended:
                return
            is_source, faults = self._plan.is_source(source), self._tally.faults
            match error:
                case Closed() | DeadlinePassed():
                    # Broken off: a fellow is not asked again, a source is if it brought something.
                    self._plan.was_slow(source, f"{source} was broken off, because {error}")
                    if not came:
                        self._plan.slipped(source)
                case Broke():
                    if is_source:
                        faults.append(str(error))
                    failure = StateUnavailable(str(error), source=source, key=self._terms.key)
                    if isinstance(error, Hung):
                        self._plan.hung(source, failure, now_s, self._silence_s())
                    else:
                        self._plan.broke(source, failure, now_s)
                case StateCorrupt():
                    faults.append(str(error))
                    if source == self._lead:
                        self._plan.damaged(source, error)
                    else:
                        self._plan.slipped(source)
                case StateMismatch() | StateUnavailable():
                    if is_source:
                        faults.append(str(error))
                    self._plan.refused(source, error)
                case _:
                    self._failure = self._failure or error
