"""A parallel request to several sources for the manifest.

The first source with the manifest becomes the primary. Each further source is asked after a short delay. So a source
that answers at once saves the other connections, and a hanging source costs only that delay.

Law of this file: threads and their end. The caller decides what a source's fault means.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from tft_ckpt.transfer.connection import StopSignal
from tft_ckpt.transfer.reader import Reader, RequestContext

__all__ = ["Answer", "Race"]

THREAD_NAME: Final = "tft-ckpt-manifest"
STAGGER_S: Final = 0.25
"""The delay between the request to one source and the request to the next."""


@dataclass(slots=True)
class Answer:
    """The answer of one source.

    Fields:
        source: the source.
        reader: the connection, if the source has the manifest. It belongs to the receiver of this answer.
        data: the undecoded manifest; None: the source has none yet.
        is_partial: whether the source has only parts of the payload.
        error: why there is no answer.
    """

    source: str
    reader: Reader | None = None
    data: bytes | None = None
    is_partial: bool = False
    error: BaseException | None = None


@final
class Race:
    """One request to several sources, for one use in a `with` block. The block's end ends all running requests.

    Args:
        sources: the preferred one first.
        context: of the receive.
        silence_s: how long a source may send nothing.
        wait_s: how long a source may take to get the state.
        stop: ends every wait of `next`.
    """

    def __init__(
        self,
        sources: Sequence[str],
        context: RequestContext,
        *,
        silence_s: Callable[[str], float],
        wait_s: float,
        stop: StopSignal,
    ) -> None:
        self._waiting = list(sources)
        self._context = context
        self._silence_s = silence_s
        self._wait_s = wait_s
        self._stop = stop
        self._lock = threading.Lock()
        self._answers: list[Answer] = []
        self._running: dict[str, tuple[threading.Thread, StopSignal]] = {}
        self._next_s = 0.0
        self._wake_reader, self._wake_writer = os.pipe()

    def __enter__(self) -> Race:
        return self

    def __exit__(self, *_: object) -> None:
        for _thread, stop in self._running.values():
            stop.stop("another source answered first")
        for thread, stop in self._running.values():
            thread.join()
            stop.close()
        for answer in self._answers:
            if answer.reader is not None:
                answer.reader.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def next(self) -> Answer | None:
        """Wait for the next answer, or return None when all have answered. Raises: as `StopSignal.wait`."""
        while True:
            with self._lock:
                if self._answers:
                    answer = self._answers.pop(0)
                    break
            now_s = time.monotonic()
            if self._waiting and (now_s >= self._next_s or not self._running):
                self._start(self._waiting.pop(0))
                self._next_s = now_s + STAGGER_S
            if not self._running:
                return None
            # A failed source lets the next one start at once.
            wait_s = max(0.0, self._next_s - time.monotonic()) if self._waiting else self._stop.remaining_s()
            if self._stop.wait(wait_s, readable=self._wake_reader):
                os.read(self._wake_reader, 1)
        thread, stop = self._running.pop(answer.source)
        thread.join()
        if answer.reader is not None:
            answer.reader.hand_over(self._stop, deadline_s=math.inf)
        stop.close()
        return answer

    def _start(self, source: str) -> None:
        stop = StopSignal(self._stop.remaining_s() + 60.0, None)
        thread = threading.Thread(
            target=self._request, args=(source, stop, self._silence_s(source)), name=THREAD_NAME, daemon=True
        )
        self._running[source] = thread, stop
        thread.start()

    def _request(self, source: str, stop: StopSignal, silence_s: float) -> None:
        answer = Answer(source)
        try:
            reader = Reader(source, self._context, silence_s=silence_s, stop=stop)
            try:
                found = reader.manifest(self._wait_s)
                if found is not None:
                    answer.data, answer.is_partial = found
                    answer.reader = reader
            finally:
                if answer.reader is None:
                    reader.close()
        except BaseException as error:
            # The calling thread handles it.
            answer.error = error
        with self._lock:
            self._answers.append(answer)
        os.write(self._wake_writer, b"x")
