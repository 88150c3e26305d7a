"""A group rank's stream to its manager server: the rank counts as alive as long as the stream is open.

grpc's own threads keep the stream open, however long this process holds the interpreter lock. Calls travel on the
stream too, because that takes a third of the time of a separate call. A broken stream redials at once, and resends all
calls that still wait for an answer.

Law of this file: one stream, kept up on the process's loop, and the calls on it; no meaning of any call.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import final

from tft_coord.core.progress import Progress
from tft_coord.core.stragglers import StragglerNotice
from tft_coord.core.suspicion import LongWait
from tft_coord.core.types import (
    DrainComplete,
    KillOrder,
    LeaveRequest,
    LossNotice,
    NewcomerAsks,
    Plan,
    QuorumKey,
    QuorumNews,
    Verdict,
    WaitsFor,
)
from tft_coord.errors import (
    CoordinationClosedError,
    CoordinationError,
    ProtocolError,
    RefusedError,
    ReplicaGroupLostError,
    RequestTimeoutError,
    UnreachableError,
)
from tft_coord.notifications import Notification
from tft_coord.processes import this_process
from tft_coord.rpc import grpc
from tft_coord.security import Trust
from tft_coord.timeouts import Timeouts
from tft_coord.transport.dial import cancel_and_wait, dial
from tft_coord.transport.loop import LoopShare
from tft_coord.transport.outbox import Outbox
from tft_coord.transport.settings import error_of, error_of_code
from tft_coord.wire import rank_codec, services

logger = logging.getLogger(__name__)

ALIVE_LOOK_S = 0.2
LOOK_EVERY_S = 0.1  # at the training thread, which reports nothing itself
GOODBYE_WITHIN_S = 0.2
# At the deadline the manager server answers with a verdict, or with a sentence that names the missing peers. A busy
# machine delivers the answer a moment late, and a rank without a verdict can't continue.
LATE_ANSWER_S = 0.25


@final
class RankSession:
    """The stream of one group rank.

    Args:
        address: of the manager server, `host:port`.
        group_rank: of this process.
        trust: the secret and the certificates of the job.
        timeouts: of the job.
        connect_within_s: how long the constructor waits until the manager server knows this rank.
        is_alive: called several times a second while the constructor waits, and while the stream is broken. False means
            that the manager server has ended: the wait ends and all calls fail.
        listener: receives losses, newcomers and requests, on the process's loop; it must return at once.
        progress: returns where in its step this rank is; called ten times a second, on the process's loop. None: no
            report.
        beat_number: returns the number of the beat that is sent now, on the process's loop; the answer is a
            `QuorumNews` for the listener. 0: no answer is wanted.
    Raises: ProtocolError: the group has no such rank. RefusedError: another process has it. UnreachableError: the
        manager server did not answer.
    """

    def __init__(
        self,
        address: str,
        *,
        group_rank: int,
        trust: Trust,
        timeouts: Timeouts,
        connect_within_s: float,
        listener: Callable[[Notification], None],
        progress: Callable[[], Progress | None] = lambda: None,
        beat_number: Callable[[], int] = lambda: 0,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._address = address
        self._listener = listener
        self._progress = progress
        self._beat_number = beat_number
        self._is_alive = is_alive
        self._trust = trust
        self._timeouts = timeouts
        self._session = time.time_ns()
        self._name = f"the stream of rank {group_rank} to its manager server at {address}"
        self.group_rank = group_rank
        self.healed_bytes = 0
        self.is_welcome = False  # the manager server answers on the open stream
        self._outbox: Outbox | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}  # only the loop reads and writes it
        self._last_error = ""
        self._closed_by: CoordinationError | None = None  # the reason why no call gets an answer any more
        self._group_lost: ReplicaGroupLostError | None = None
        self._share = LoopShare(self._name, at_exit=self.close)
        try:
            self._task = self._share.run(self._start(connect_within_s))
        except BaseException:
            self._share.give_back()
            raise

    def call(
        self, asked: rank_codec.Ask | rank_codec.Vote | rank_codec.Leave, timeout_s: float, what: str
    ) -> Plan | QuorumKey | Verdict:
        """Ask and wait for the answer. Several threads may call this at the same time.

        Args:
            asked: the question, of this rank.
            timeout_s: time limit for the answer.
            what: names the call in messages.
        Raises: an error of tft_coord.errors.
        """
        waiting = _Waiting(asked, time.monotonic() + timeout_s)
        number = next(self._numbers)
        self._share.loop.call_soon_threadsafe(self._ask, number, waiting)
        try:
            if not waiting.answered.acquire(timeout=timeout_s + LATE_ANSWER_S):
                raise RequestTimeoutError(
                    f"{what}: no answer from the manager server at {self._address} within {timeout_s:g} s"
                )
        except BaseException:
            self._soon(lambda: self._withdraw(number))
            raise
        match waiting.answer:
            case rank_codec.Failure(code, message):
                raise error_of_code(code, message, what)
            case CoordinationError() as error:
                # The traceback of the loop adds nothing, and its text would appear twice.
                named = type(error)(f"{what}: {error.args[0] if error.args else error}")
                if isinstance(error, RefusedError) and isinstance(named, RefusedError):
                    named.code = error.code
                raise named from None
            case answer:
                return answer

    def beat(self) -> None:
        """Report this rank's progress now, ahead of the next beat."""

        def now() -> None:
            if self._outbox is not None:
                self._send_beat(self._outbox, self.healed_bytes)

        self._soon(now)

    def late(self, key: QuorumKey, step: int) -> None:
        """Report that this rank has waited for `join_timeout` in that round of a standing quorum.

        A broken stream drops the report: the other members send it too.
        """

        def now() -> None:
            if self._outbox is not None:
                self._outbox.put(rank_codec.encode_from_rank(rank_codec.RankLate(key, step)))

        self._soon(now)

    def _soon(self, report: Callable[[], None]) -> None:
        """Run a report on the loop; a session that another thread has closed reports nothing."""
        with suppress(RuntimeError, CoordinationClosedError):
            self._share.loop.call_soon_threadsafe(report)

    def close(self) -> None:
        """Say goodbye and close; calls in progress end with CoordinationClosedError. Idempotent, because the exit of
        the process closes too."""
        if self._share.inherited or self._share.given_back:
            return
        self._share.run_last(self._end())
        self._share.give_back()

    # --- on the loop ---------------------------------------------------------------------------------------------

    def _ask(self, number: int, waiting: _Waiting) -> None:
        if self._closed_by is not None:
            waiting.release(self._closed_by)
            return
        self._waiting[number] = waiting
        if self._outbox is not None:
            self._send_call(number, waiting)

    def _send_call(self, number: int, waiting: _Waiting) -> None:
        remaining_ms = max(0, int((waiting.deadline - time.monotonic()) * 1000))
        assert self._outbox is not None
        self._outbox.put(rank_codec.encode_from_rank(rank_codec.RankCall(number, remaining_ms, waiting.asked)))

    def _withdraw(self, number: int) -> None:
        if self._waiting.pop(number, None) is not None and self._outbox is not None:
            self._outbox.put(rank_codec.encode_from_rank(rank_codec.RankWithdraw(number)))

    def _release_all(self, error: CoordinationError) -> None:
        waiting, self._waiting = self._waiting, {}
        for call in waiting.values():
            call.release(error)

    async def _start(self, within_s: float) -> asyncio.Task[None]:
        welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(welcomed))
        end_s = time.monotonic() + within_s
        while not (welcomed.done() or task.done()) and (left_s := end_s - time.monotonic()) > 0 and self._is_alive():
            await asyncio.wait([welcomed, task], timeout=min(left_s, ALIVE_LOOK_S), return_when=asyncio.FIRST_COMPLETED)
        if welcomed.done():
            return task
        if task.done():
            task.result()
        await cancel_and_wait(task)
        why = f" ({self._last_error})" if self._last_error else ""
        if not self._is_alive():
            raise UnreachableError(f"{self._name} was not accepted: the manager server has ended{why}")
        raise UnreachableError(
            f"{self._name} was not accepted within {within_s:g} s{why}; check the address (hostname and port of the "
            "manager server), or raise the timeout"
        )

    async def _end(self) -> None:
        self._closed_by = CoordinationClosedError("this manager client was closed; make a new one")
        self._release_all(self._closed_by)
        if self._outbox is not None:
            self._outbox.put(rank_codec.encode_from_rank(rank_codec.RankGoodbye()))
            self._outbox.close()
            # The manager server closes its side when this side is closed: then it has received the goodbye.
            await asyncio.wait([self._task], timeout=GOODBYE_WITHIN_S)
        await cancel_and_wait(self._task)
        with suppress(asyncio.CancelledError, CoordinationError):
            await self._task

    async def _run(self, welcomed: asyncio.Future[None]) -> None:
        try:
            await self._redial(welcomed)
        except CoordinationError as error:
            self._closed_by = error
            self._release_all(error)
            raise

    async def _redial(self, welcomed: asyncio.Future[None]) -> None:
        """Redial whenever the stream breaks, fast at first, then more slowly. A goodbye or a refusal ends the loop."""
        broken_at = time.monotonic()
        while True:
            try:
                await self._run_stream(welcomed)
                return
            except (grpc.aio.AioRpcError, UnreachableError) as failure:
                if self._group_lost is not None:
                    # The manager server has ended, as it announced. Later calls fail at once.
                    self._closed_by = self._group_lost
                    self._release_all(self._closed_by)
                    return
                error = error_of(failure, self._name) if isinstance(failure, grpc.aio.AioRpcError) else failure
                if _is_unauthenticated(failure) and (welcomed.done() or self._trust.looks_again()):
                    error = UnreachableError(str(error))  # the secret changes at this moment
                if not isinstance(error, UnreachableError):
                    raise error from None
                if self._outbox is not None:
                    logger.info("%s disconnected: %s", self._name, error)
                    broken_at = time.monotonic()
                broken_s = time.monotonic() - broken_at
                if broken_s >= self._timeouts.heartbeat_timeout_ms / 1000 or not self._is_alive():
                    self._release_all(
                        UnreachableError(f"{self._name} disconnected: {error}; the manager server has ended")
                    )
                self._last_error = str(error)
                # The traceback of the error holds this frame. A reference to the error from here would be a cycle that
                # keeps the channel and grpc's thread alive.
                del error
            finally:
                self._outbox = None
                self.is_welcome = False
            fast = time.monotonic() - broken_at < self._timeouts.redial_fast_for_ms / 1000
            await asyncio.sleep(random.uniform(0.05, 0.1) if fast else random.uniform(0.1, 0.25))

    async def _run_stream(self, welcomed: asyncio.Future[None]) -> None:
        """Dial once and, if that succeeds, run one stream until it ends."""
        try:
            channel = await dial(self._address, self._timeouts, self._trust.tls)
        except ProtocolError as error:
            if not welcomed.done():
                raise ProtocolError(f"{self._name}: {error}") from None
            # The server was the right one before. Its certificates may change at this moment.
            raise UnreachableError(str(error)) from error
        try:
            await self._converse(channel, welcomed)
        finally:
            await channel.close()

    async def _converse(self, channel: grpc.aio.Channel, welcomed: asyncio.Future[None]) -> None:
        """Run one stream. Return when a goodbye ended it; raise when it breaks."""
        call = services.stream_stub(channel, services.MANAGER_SESSION)(metadata=self._trust.metadata())
        outbox = self._outbox = Outbox(call.cancel)
        outbox.put(rank_codec.encode_from_rank(rank_codec.RankHello(self.group_rank, self._session)))
        process = this_process()
        if process is not None:
            outbox.put(rank_codec.encode_from_rank(rank_codec.RankProcess(process)))
        for number, waiting in self._waiting.items():
            self._send_call(number, waiting)
        helpers = [asyncio.create_task(self._write(call, outbox)), asyncio.create_task(self._beat(outbox))]
        try:
            while isinstance(message := await call.read(), bytes):
                match rank_codec.decode_to_rank(message):
                    case rank_codec.RankAnswer(number, answer):
                        caller = self._waiting.pop(number, None)
                        if caller is not None:
                            caller.release(answer)
                    case (
                        LossNotice()
                        | NewcomerAsks()
                        | LeaveRequest()
                        | DrainComplete()
                        | KillOrder()
                        | WaitsFor()
                        | StragglerNotice()
                        | QuorumNews()
                    ) as news:
                        self._notify(news)
                    case rank_codec.RanksLost(sentence, left):
                        self._group_lost = ReplicaGroupLostError(sentence)
                        if not left:  # after a goodbye this rank may end too; it learns of the loss if it asks
                            self._notify(self._group_lost)
                    case rank_codec.RankWelcome():
                        self.is_welcome = True
                        if not welcomed.done():
                            welcomed.set_result(None)
                    case rank_codec.RankRefused(refusal, sentence):
                        raise error_of_code(refusal.value, sentence, self._name)
            if not outbox.closed:
                raise UnreachableError("the manager server closed the stream")
        finally:
            for helper in helpers:
                helper.cancel()
            call.cancel()
            await asyncio.wait(helpers)

    def _notify(self, news: Notification) -> None:
        try:
            self._listener(news)
        except Exception:
            # The stream shows that this rank is alive; a fault of the listener must not end it.
            logger.exception("%s: the listener raised an error for: %s", self._name, news)

    async def _write(self, call: grpc.aio.StreamStreamCall[bytes, bytes], outbox: Outbox) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader sees the same end
            await outbox.write_all(call.write)
            await call.done_writing()

    async def _beat(self, outbox: Outbox) -> None:
        """Report this rank's progress and the received bytes of live state once a beat, if there is anything to report.

        A wait for other replicas that has lasted for a moment is reported once more, because one of them may be gone.
        """
        sent_bytes, wait, loop = 0, LongWait(), asyncio.get_running_loop()
        while True:
            sent_bytes = self._send_beat(outbox, sent_bytes, self._next_number())
            next_beat_s = loop.time() + self._timeouts.beat_interval_ms / 1000
            while (left_s := next_beat_s - loop.time()) > 0:
                await asyncio.sleep(min(left_s, LOOK_EVERY_S))
                progress = self._current_progress()
                if wait.look(progress.waits_ms if progress is not None else None):
                    outbox.put(rank_codec.encode_from_rank(rank_codec.RankBeat(self.healed_bytes, progress)))

    def _send_beat(self, outbox: Outbox, sent_bytes: int, number: int = 0) -> int:
        progress = self._current_progress()
        if progress is not None or number or self.healed_bytes > sent_bytes:
            sent_bytes = self.healed_bytes
            outbox.put(rank_codec.encode_from_rank(rank_codec.RankBeat(sent_bytes, progress, number)))
        return sent_bytes

    def _next_number(self) -> int:
        try:
            return self._beat_number()
        except Exception:
            # As for a listener. Without answers the rank's lease expires, and the rank asks for a quorum.
            logger.exception("%s: the next beat has no number, because beat_number raised an error", self._name)
            return 0

    def _current_progress(self) -> Progress | None:
        try:
            return self._progress()
        except Exception:
            # As for a listener: a rank that can't report its progress is alive all the same.
            logger.exception("%s: the next beat has no progress, because progress raised an error", self._name)
            return None


def _is_unauthenticated(failure: Exception) -> bool:
    return isinstance(failure, grpc.aio.AioRpcError) and failure.code() is grpc.StatusCode.UNAUTHENTICATED


@final
class _Waiting:
    """A call whose caller sleeps on a lock until the loop releases it."""

    def __init__(self, asked: rank_codec.Ask | rank_codec.Vote | rank_codec.Leave, deadline: float) -> None:
        self.asked = asked
        self.deadline = deadline
        self.answer: Plan | QuorumKey | Verdict | rank_codec.Failure | CoordinationError
        self.answered = threading.Lock()
        self.answered.acquire()

    def release(self, answer: Plan | QuorumKey | Verdict | rank_codec.Failure | CoordinationError) -> None:
        self.answer = answer
        self.answered.release()
