"""The life of a process group that uses one torch group after another.

A backend builds single torch groups. This file holds everything else, which all backends share: one attempt at a time,
one live group at a time, and an abort that reaches both.

Law of this file: locks are held for assignments only, never while something waits.
"""

from __future__ import annotations

import abc
import copy
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from tft_pg.backends.attempt import Attempt
from tft_pg.backends.live import LiveGroup
from tft_pg.backends.patience import Patience, Phase
from tft_pg.errors import (
    AbortedError,
    ConfigureError,
    NotConfiguredError,
    ProcessGroupClosedError,
    ProcessGroupError,
    Where,
)
from tft_pg.forks import Inheritance, let_go_in_child
from tft_pg.ops import Collective
from tft_pg.placed import PlacedProcessGroup
from tft_pg.recorder import GroupRecorder
from tft_pg.settings import check_place, checked_timeout, checks_argument_order, refuses_errored_false
from tft_pg.store import StoreAddress, StoreClient, parse_store_addr
from tft_pg.word import LINGER, WordExchange, checked_values, exchange_word_by_allreduce

__all__ = ["NativeProcessGroup"]

logger = logging.getLogger(__name__)

_STOPPED_WITHIN_S = 10.0


class NativeProcessGroup(PlacedProcessGroup):
    """Abstract base. A subclass builds torch groups of one backend.

    Args:
        timeout: of each operation, and of `configure` unless it is given another.
        trace_dir: the directory for a flight record of each configuration at its end. None: the one that TFT_TRACE_DIR
            names. With neither, nothing is written.
    """

    def __init__(
        self, timeout: timedelta = timedelta(seconds=60), *, trace_dir: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__()
        self._recorder = GroupRecorder(trace_dir, backend=self.getBackendName())
        self._timeout = checked_timeout(timeout)
        self._patience = Patience()
        self._configuring = threading.Lock()
        self._lock = threading.Lock()
        self._attempt: Attempt | None = None
        self._live: LiveGroup | None = None
        self._error: ProcessGroupError | None = None
        self._closed = False
        self._where = Where()
        self._store_client: StoreClient | None = None
        self._given_up: list[StoreClient] = []  # these may still be connecting
        self._parent_pid = 0  # in a forked child: the process that owns the original of this group
        let_go_in_child(self)

    @property
    def patience(self) -> Patience:
        """Return the limits of the phases of `configure`."""
        return self._patience

    @abc.abstractmethod
    def _build(self, store: Store, attempt: Attempt, timeout: timedelta) -> LiveGroup:
        """Build one torch group, and block until it is built.

        Args:
            store: under this configure's prefix.
            attempt: the builder tells it how to break each wait, and which phase begins. `attempt.where` has rank and
                size.
            timeout: of the group's operations.

        Raises: any error; the builder leaves nothing behind then.
        """

    @abc.abstractmethod
    def _discard(self) -> None:
        """Release the resources kept from one torch group to the next, after a failure and at the end."""

    @checks_argument_order
    def configure(
        self,
        store_addr: str,
        rank: int,
        world_size: int,
        *,
        replica_id: str = "",
        quorum_id: int | None = None,
        group_rank: int = 0,
        group_world_size: int = 1,
        global_ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        address = parse_store_addr(store_addr)
        check_place(
            rank,
            world_size,
            replica_id=replica_id,
            quorum_id=quorum_id,
            group_rank=group_rank,
            group_world_size=group_world_size,
            global_ranks=global_ranks,
        )
        where = Where(rank, world_size, replica_id, quorum_id, group_rank)
        limit = self._timeout if timeout is None else checked_timeout(timeout)
        # Another quorum without the unreachable member follows soon. Without a quorum there is no second chance so
        # soon.
        patience = self._patience if quorum_id is not None and timeout is None else None
        with self._configuring, Attempt(where, limit, patience) as attempt:
            self._begin(attempt)
            try:
                store = self._connect(address, attempt)
                attempt.enter(None)
                live = self._build(store, attempt, self._timeout)
            except BaseException as error:
                failure = self._fail(attempt, error)
                if failure is error or not isinstance(error, Exception):
                    raise
                raise failure from error
            self._recorder.configured(live, address.prefix)
            self._finish(attempt, live)

    def _begin(self, attempt: Attempt) -> None:
        with self._lock:
            if self._closed:
                raise self._closed_error("configure")
            self._attempt, before, self._live = attempt, self._live, None
            self._error = NotConfiguredError(f"configure is still running ({attempt.where}); wait until it returns")
            self._where = attempt.where
        if before is not None:
            self._recorder.ended(before, "failure" if before.error else "end")
            before.end(AbortedError(f"a new configure replaced the group ({before.where})", where=before.where))
            before.release()

    def _connect(self, address: StoreAddress, attempt: Attempt) -> Store:
        """Return the store under this configure's prefix. The connection is kept while the store is the same."""
        client = self._store_client
        if client is not None and (client.host, client.port) == (address.host, address.port):
            attempt.enter(Phase.STORE, late=client.silent)
            attempt.break_with(client.sever, severs_store=True)
            if client.alive():
                return client.under(address.prefix)
            attempt.check()
        self._store_client = client = StoreClient(address.host, address.port)
        attempt.enter(Phase.STORE, late=client.silent)
        attempt.break_with(client.sever, severs_store=True)
        client.connect(attempt.remaining(), keep_trying=attempt.check, refusal_counts=attempt.is_bounded)
        return client.under(address.prefix)

    def _fail(self, attempt: Attempt, error: BaseException) -> ProcessGroupError:
        attempt.failed()
        if self._store_client is not None:
            self._given_up = [client for client in (*self._given_up, self._store_client) if client.connecting]
            self._store_client = None  # its connection may be shut down, or the store may be the cause
        self._discard()
        try:
            attempt.check()
        except ProcessGroupError as stopped:
            failure = stopped
        else:
            failure = (
                error
                if isinstance(error, ProcessGroupError)
                else ConfigureError(
                    f"configure failed ({attempt.where}): {_first_line(error)}; "
                    "ask for a new quorum and configure under its prefix",
                    where=attempt.where,
                )
            )
        with self._lock:
            self._attempt = None
            self._error = copy.copy(failure)  # without the frames of the raised error
        return failure

    def _finish(self, attempt: Attempt, live: LiveGroup) -> None:
        with self._lock:
            self._attempt = None
            try:
                attempt.check()
            except ProcessGroupError as stopped:
                why = stopped
                self._error = copy.copy(stopped)
            else:
                attempt.succeeded()
                self._live, self._error = live, None
                live.set_timeout(self._timeout)  # the timeout may have changed in the meantime
                return
        self._store_client = None
        live.end(why)
        live.release()
        self._discard()
        raise why

    def _run(self, collective: Collective, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dist.Work:
        live = self._live
        if live is None:
            raise self._unusable(collective.name)
        return live.run(collective, args, kwargs)

    def exchange_word(self, words: Sequence[int], *, round_number: int, timeout: timedelta) -> WordExchange:
        live = self._live
        if live is None:
            raise self._unusable("exchange_word")
        if live.words is None:
            return exchange_word_by_allreduce(self, words, round_number=round_number, timeout=timeout)
        return live.exchange_word(checked_values(words), round_number, checked_timeout(timeout))

    def linger(self, timeout: timedelta = LINGER) -> bool:
        live = self._live
        if live is None or live.error is not None:
            return True
        return super().linger(timeout) if live.words is None else live.words.linger(checked_timeout(timeout))

    @refuses_errored_false
    def abort(self) -> None:
        with self._lock:
            if self._closed:
                return
            why = AbortedError(f"abort was called ({self._where}); configure the group again", where=self._where)
            attempt, live = self._attempt, self._live
            if live is None:
                self._error = why
            if attempt is not None:
                attempt.stop(why)  # under the lock, so the attempt can't succeed first
        if live is not None:
            self._recorder.ended(live, "abort")
            live.end(why)

    def errored(self) -> Exception | None:
        live = self._live
        return self._error if live is None else live.error

    def shutdown(self) -> None:
        with self._lock:
            self._closed = True
            why = ProcessGroupClosedError(
                f"the group was shut down ({self._where}); make a new group", where=self._where
            )
            if self._parent_pid:
                why = self._closed_error("an operation")
            attempt, live, self._live = self._attempt, self._live, None
            self._error = why
            if attempt is not None:
                attempt.stop(why)
        self._handle.close()
        if live is not None:
            self._recorder.ended(live, "failure" if live.error else "end")
            live.end(why)
            live.release()
        self._recorder.settle()
        # A stopped attempt ends within milliseconds.
        if not self._configuring.acquire(timeout=_STOPPED_WITHIN_S):
            logger.warning(
                "configure did not stop within %g s after shutdown (%s); its connections stay open",
                _STOPPED_WITHIN_S,
                self._where,
            )
            return
        try:
            self._store_client = None
            self._discard()
        finally:
            self._configuring.release()
        for client in self._given_up:
            client.settle()

    def forked(self) -> Inheritance:
        """Close the group in a forked child, without ending or destroying the parent's resources."""
        self._parent_pid = os.getppid()
        self._recorder.forked()
        self._configuring, self._lock = threading.Lock(), threading.Lock()
        self._closed, self._attempt, self._live = True, None, None
        self._store_client, self._given_up = None, []
        self._error = self._closed_error("an operation")
        return Inheritance()

    def set_timeout(self, timeout: timedelta) -> None:
        with self._lock:
            self._timeout = checked_timeout(timeout)
            live = self._live
        if live is not None:
            live.set_timeout(timeout)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
