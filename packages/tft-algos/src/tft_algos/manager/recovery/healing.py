"""Fetching the live state of a participant, in the background of a step that continues to train.

A replica that heals gives zeros to the reductions at once, so no member waits for it. Meanwhile, a thread asks the
source's manager server for the location of its state, and the transport fetches it. The training thread takes it at the
end of its step.

Law of this file: one fetch, its thread and its end. The Manager loads the state, and decides the effect of a failure.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, final

from tft_algos.errors import HealingError
from tft_algos.manager.interfaces import Coordinator
from tft_algos.manager.recovery.source_calls import silent_sources
from tft_ckpt import CheckpointTransport, StateKey
from tft_coord.core.types import Plan, Source
from tft_coord.errors import RequestTimeoutError, UnreachableError
from tft_pg.threads import join_within

MAX_SOURCES: Final = 4
REPORT_INTERVAL_S: Final = 0.1
SOURCE_PATIENCE: Final = timedelta(seconds=1)  # if there are other sources
ATTEMPT: Final = timedelta(seconds=2)
FURTHER_PATIENCE: Final = timedelta(seconds=0.5)
# After this long without a byte, the sources are called to check that they answer at all. The second value limits the
# calls.
UNHEARD_S: Final = 2.0
CALLS_S: Final = 2.0


@final
class Fetch:
    """One fetch of a plan's state.

    Args:
        plan: a plan that says to heal.
        coordinator: reaches the sources' manager servers, and receives the progress.
        transport: moves the state.
        timeout: for the whole fetch, including the wait for the source.
        received_before: bytes that this process received in earlier healings.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        coordinator: Coordinator,
        transport: CheckpointTransport[Any],
        timeout: timedelta,
        received_before: int,
    ) -> None:
        self.plan = plan
        self.received_bytes = 0
        self.metadata: dict[str, str] = {}  # metadata of the sources that have answered, by replica id
        self.unreached: dict[str, str] = {}  # sources that answer no connection, and the reason in a few words
        self.silent: dict[str, str] = {}  # sources whose manager server did not answer, and a sentence for each
        self._coordinator = coordinator
        self._transport = transport
        self._timeout = timeout
        self._received_before = received_before
        self._started = time.monotonic()
        self._reported = -REPORT_INTERVAL_S  # on the monotonic clock; the first byte is reported at once
        self._cancelled = threading.Event()
        self._lost: set[str] = set()
        self._over = threading.Event()  # the state has arrived, or will not arrive
        self._state: Any = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="tft-heal", daemon=True)
        self._watch = threading.Thread(target=self._watch_connections, name="tft-heal-calls", daemon=True)

    def start(self) -> None:
        """Begin the fetch on its own thread."""
        self._thread.start()
        self._watch.start()

    def run(self) -> None:
        """Run the whole fetch on the calling thread."""
        self._run()

    def result(self) -> Any:
        """Wait for the end of the fetch.

        Returns: the state.
        Raises: HealingError: no source gave the state. The cause is attached.
        """
        self._over.wait()
        if self._error is not None:
            names = ", ".join(source.replica_id for source in self.plan.sources)
            raise HealingError(
                f"replica {self.plan.replica_id} could not fetch step {self.plan.step} from {names} ({self._error}); "
                "the next quorum tries again",
                sources=tuple(source.replica_id for source in self.plan.sources),
            ) from self._error
        return self._state

    def source_lost(self, replica_id: str) -> None:
        """Record that a replica was lost. The fetch ends at once if no source is left. Any thread may call this."""
        self._lost.add(replica_id)
        if self._over.is_set() or not self._lost.issuperset(source.replica_id for source in self.plan.sources):
            return
        self._error = HealingError("every source was lost")
        self._cancelled.set()
        self._over.set()

    def cancel(self) -> None:
        """End the fetch, and wait until its threads have ended. Any thread may call this."""
        self._cancelled.set()
        for thread in (self._thread, self._watch):
            if thread.ident is not None and thread is not threading.current_thread():
                join_within(thread)

    def _watch_connections(self) -> None:
        """End the fetch if no source answers a connection, long before heal_timeout. Runs on its own thread."""
        if self._over.wait(UNHEARD_S) or self.received_bytes:
            return
        found = self._call_sources(lambda: not (self._over.is_set() or self.received_bytes))
        if not found or not found.keys() >= {source.replica_id for source in self.plan.sources} - self._lost:
            return
        self.unreached = found
        where = "; ".join(f"replica {name} at {why}" for name, why in sorted(found.items()))
        self._error = HealingError(
            f"no source accepts a connection: {where}; check for a firewall, and check the host name and interface by "
            "which those replicas serve"
        )
        self._cancelled.set()
        self._over.set()

    def _call_sources(self, goes_on: Callable[[], bool]) -> dict[str, str]:
        """Return the sources that answer no connection at the address in use, with the reason."""
        addresses = {source.replica_id: source.address for source in self.plan.sources} | self.metadata
        asked = {name: address for name, address in addresses.items() if name not in self._lost}
        return silent_sources(asked, within_s=CALLS_S, goes_on=goes_on)

    @property
    def seconds(self) -> float:
        """Return the seconds since the fetch was made."""
        return time.monotonic() - self._started

    def _run(self) -> None:
        try:
            self._state = self._fetch()
        except Exception as error:
            if not self._over.is_set() and not self.received_bytes:
                self.unreached = self._call_sources(lambda: not (self._over.is_set() or self._cancelled.is_set()))
            self._error = self._error or error
        finally:
            self._over.set()

    def _fetch(self) -> Any:
        plan = self.plan
        # Most of the cost of a question is its new connection. So the further sources are asked in parallel.
        others = _FurtherSources(self._further_sources)
        if len(plan.sources) > 1:
            others.start()
        try:
            place, metadata = self._first_source()
        finally:
            further = others.result()
        return self._transport.recv_checkpoint(
            plan.sources[place].replica_rank,
            metadata,
            plan.step,
            self._remaining(),
            key=state_key(plan),
            sources=[found for at, found in further if at > place],
            progress=self._progressed,
            cancelled=self._cancelled.is_set,
        )

    def _first_source(self) -> tuple[int, str]:
        """Find the first source that says where its state is. Return its index in the plan, and its metadata."""
        last_error: Exception | None = None
        for place, source in enumerate(self.plan.sources):
            # While there is another source, a silent source only gets a short wait.
            is_last = place == len(self.plan.sources) - 1
            patience = self._remaining() if is_last else min(SOURCE_PATIENCE, self._remaining())
            try:
                return place, self._metadata_of(source, patience)
            except Exception as error:
                last_error = error
                if not is_last and isinstance(error, RequestTimeoutError):
                    self.silent[source.replica_id] = str(error)
        raise HealingError("no source's manager server returned the address of its state") from last_error

    def _further_sources(self) -> list[tuple[int, str]]:
        """Find further sources with the state. Return the index in the plan and the metadata of each.

        One source is enough, so the search for others is short.
        """
        found: list[tuple[int, str]] = []
        give_up_at = time.monotonic() + min(FURTHER_PATIENCE, self._remaining()).total_seconds()
        for place, source in enumerate(self.plan.sources[1:], start=1):
            left_s = give_up_at - time.monotonic()
            if len(found) == MAX_SOURCES - 1 or left_s <= 0 or self._cancelled.is_set():
                break
            if source.replica_id in self._lost:
                continue
            # A further source is optional, so its errors are ignored.
            with contextlib.suppress(Exception):
                metadata = self._coordinator.source_metadata(source.address, timedelta(seconds=left_s))
                self.metadata[source.replica_id] = metadata
                found.append((place, metadata))
        return found

    def _metadata_of(self, source: Source, patience: timedelta) -> str:
        """Ask a source for the location of its state, in short attempts, so that a loss of the source is noticed."""
        give_up_at = time.monotonic() + patience.total_seconds()
        while True:
            if source.replica_id in self._lost or self._cancelled.is_set():
                raise HealingError(f"replica {source.replica_id} was lost, or its state is not needed any more")
            left = timedelta(seconds=max(give_up_at - time.monotonic(), 0.001))
            try:
                metadata = self._coordinator.source_metadata(source.address, min(left, ATTEMPT))
                self.metadata[source.replica_id] = metadata
                return metadata
            except (UnreachableError, RequestTimeoutError):
                if time.monotonic() >= give_up_at:
                    raise

    def _progressed(self, received_bytes: int, total_bytes: int) -> None:
        self.received_bytes = received_bytes
        now = time.monotonic()
        # The last byte is always reported, because the lighthouse must see that bytes arrived, however fast.
        if received_bytes and (now - self._reported >= REPORT_INTERVAL_S or received_bytes == total_bytes):
            self._reported = now
            self._coordinator.healed(self._received_before + received_bytes)

    def _remaining(self) -> timedelta:
        return max(self._timeout - timedelta(seconds=self.seconds), timedelta(milliseconds=1))


@final
class _FurtherSources:
    """A question that is asked on its own thread.

    Args:
        ask: returns the answers. It must not raise.
    """

    def __init__(self, ask: Callable[[], list[tuple[int, str]]]) -> None:
        self._ask = ask
        self._found: list[tuple[int, str]] = []
        self._thread = threading.Thread(target=self._run, name="tft-heal-sources", daemon=True)

    def start(self) -> None:
        """Ask the question."""
        self._thread.start()

    def _run(self) -> None:
        self._found = self._ask()

    def result(self) -> list[tuple[int, str]]:
        """Wait for the answers. Empty if nothing was asked."""
        if self._thread.ident is not None:
            self._thread.join()
        return self._found


def takers(plan: Plan) -> str:
    """Return for the log which replicas have this replica as their first source."""
    names = [plan.replica_ids[rank] for rank in plan.recover_dst_replica_ranks]
    return f"to {names}" if names else "in case another source fails"


def state_key(plan: Plan) -> StateKey:
    """Return the key under which the holders of the plan's state offer it, and the other replicas request it."""
    return StateKey(quorum_id=plan.key.quorum_id, nonce=plan.key.nonce, step=plan.step, lineage=plan.lineage)
