"""The lighthouse itself: its cores behind grpc, on the loop that starts it.

Each manager server holds a stream. torchft's clients beat and ask by unary calls. The core of each kind gets the
events, and this shell performs its decisions. A quorum is encoded once, and all its members get the same bytes.

Law of this file: one `match`, one line a decision; no rule of the protocol lives here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
import uuid
from collections.abc import Iterable
from typing import Final, TypeAlias, cast, final

from tft_coord import ConfigError, Member, ProtocolError, RefusedError
from tft_coord.lighthouse import (
    TLS,
    TORCHFT_JOB,
    Context,
    Gate,
    LighthouseConfig,
    LighthouseCore,
    Outbox,
    ProtocolRouter,
    Quorum,
    Refusal,
    Server,
    TorchftCore,
    codec,
    effects,
    events,
    fail,
    grpc,
    opens_job,
    peer_address,
    server_options,
    services,
)
from tft_lighthouse import log
from tft_lighthouse.encoders import Encoders
from tft_lighthouse.journal import Journal
from tft_lighthouse.operations import Operations

logger = logging.getLogger("tft_lighthouse")

LAST_ANSWERS_S: Final = 0.2
LOOK_AT_WAITS_S: Final = 1.0
LOOKS_APART_S: Final = 0.01  # streams that break together are judged together

_Decision: TypeAlias = effects.LighthouseEffect | effects.UnaryEffect | effects.WaitNoticed


@final
class LighthouseShell:
    """One lighthouse. It runs on one loop only.

    Args:
        config: limits and timeouts.
        cluster_id: of the lighthouses that replace each other, or None for one alone.
        gate: knows the secrets, and what each of them opens.
        tls: certificates for all connections, or None.
        max_message_bytes: the largest message of a client.

    Attributes:
        operations: what an operator may see and ask for.
    """

    def __init__(
        self,
        config: LighthouseConfig,
        *,
        cluster_id: str | None,
        gate: Gate,
        max_message_bytes: int,
        tls: TLS | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._serves_since_ms = self._wall_ms()
        self._core = LighthouseCore(
            config,
            started_ms=self._serves_since_ms,
            cluster_id=cluster_id if cluster_id is not None else str(uuid.uuid4()),
            nonces=lambda: secrets.randbits(64),
            now_ms=self._now_ms(),
        )
        self._torchft_core = TorchftCore(config.of_job(TORCHFT_JOB), started_ms=self._serves_since_ms)
        beat_ms = config.timeouts.heartbeat_timeout_ms
        self._router = ProtocolRouter(self._core, self._torchft_core, undecided_ms=beat_ms, now_ms=self._now_ms())
        self.operations = Operations(
            self._core,
            self._torchft_core,
            config,
            gate=gate,
            tls=tls,
            send=lambda order: self._send(order.stream, codec.encode_from_lighthouse(order)),
            num_streams=lambda: len(self._streams) + len(self._calls),
            now_ms=self._now_ms,
            wall_ms=self._wall_ms,
        )
        self._numbers = itertools.count(1)
        self._streams: dict[int, Outbox] = {}
        # stream -> time of its last message; without streams that this side ends
        self._received_s: dict[int, float] = {}
        self._was_asked: set[int] = set()  # streams that were asked for the quorum that they hold
        self._calls: dict[int, asyncio.Future[Quorum | effects.RefuseUnary | None]] = {}
        self._encode = Encoders()
        self._unpacks: set[int] = set()  # streams whose other end can decode a packed quorum
        self._refusals = log.Refusals(self._loop.time)
        self._failures = log.Failures()
        self._journal: Journal | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._graces: set[asyncio.TimerHandle] = set()
        self._last_look_s = 0.0
        self._next_look_at_waits_s = 0.0
        answered = services.Services(
            unary={
                services.LIGHTHOUSE_DESCRIBE: self._answer_describe,
                services.LIGHTHOUSE_HEARTBEAT: self._answer_heartbeat,
                services.LIGHTHOUSE_QUORUM: self._answer_quorum,
                services.LIGHTHOUSE_DRAIN: self._answer_drain,
            },
            streams={services.LIGHTHOUSE_SESSION: self._serve_session},
            gate=gate,
            is_serving=lambda: self.operations.is_ready,
        )
        options = server_options(config.timeouts, hears_beats=True, max_request_bytes=max_message_bytes)
        self._server = Server(options, answered)

    async def start(self, bind: str, tls: TLS | None = None) -> int:
        """Listen. Returns: the port. Raises: ConfigError: the address can't be bound."""
        try:
            port = self._server.bind(bind, tls)
        except RuntimeError as error:
            raise ConfigError(
                f"the lighthouse can't listen at {bind}: the port is in use or the address is not this machine's; "
                "end the other process, or give another --bind"
            ) from error
        await self._server.start()
        self._tick()
        return port

    async def stop(self) -> None:
        """Stop: nothing is answered from now on, on any connection, and the port is free."""
        for timer in (self._timer, *self._graces):
            if timer is not None:
                timer.cancel()
        # Waiting callers get an answer, and every stream ends, before the connections close: a clean end, not a break.
        for outbox in self._streams.values():
            outbox.close()
        for call in list(self._calls):
            self._answer(call, None)
        await self._server.stop(LAST_ANSWERS_S)

    def keep_journal(self) -> Journal:
        """Count and record from now on what has happened to the jobs, and return the journal."""
        self._journal = Journal(self._core, self._torchft_core, now_ms=self._now_ms, wall_ms=self._wall_ms)
        return self._journal

    def reconfigure(self, config: LighthouseConfig) -> None:
        """Use other settings from now on; see `LighthouseServer.reconfigure`."""
        self._config = config
        self._core.reconfigure(config)
        self._torchft_core.reconfigure(config.of_job(TORCHFT_JOB))
        self.operations.reconfigure(config)

    # --- the cores' decisions ---------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._config.timeouts.quorum_tick_ms / 1_000, self._tick)
        self._perform(self._router.tick(self._now_ms(), self._wall_ms()))
        if self._journal is not None:
            self._journal.tick()
        if self._loop.time() >= self._next_look_at_waits_s:
            self._next_look_at_waits_s = self._loop.time() + LOOK_AT_WAITS_S
            self._perform(self._core.look_at_waits(self._now_ms()))

    def _look_after_grace(self) -> None:
        """Judge a broken stream when its grace ends, because the next tick may come much later."""
        if self._timer is None or self._timer.cancelled():
            return  # this lighthouse ends

        def look() -> None:
            self._graces.discard(timer)
            self._perform(self._core.tick(self._now_ms(), self._wall_ms()))

        grace_s = self._config.timeouts.reconnect_grace_ms / 1_000
        ends_s = self._loop.time() + grace_s + 0.001  # the core's milliseconds are whole numbers
        if self._last_look_s < ends_s:
            self._last_look_s = ends_s + LOOKS_APART_S
            timer = self._loop.call_at(self._last_look_s, look)
            self._graces.add(timer)

    def _handle(self, event: events.LighthouseEvent) -> None:
        job = event.hello.job if isinstance(event, events.HelloReceived) else None
        self._perform(self._router.handle(event, self._now_ms(), self._wall_ms()), job)
        if self._core.started_ms != self._serves_since_ms:
            self._serves_since_ms = self._core.started_ms
            log.took_over()

    def _handle_report(self, event: events.QuorumReported) -> None:
        job = self._core.job_of(event.stream)
        before = self._core.quorum(job) if job is not None else None
        self._handle(event)
        quorum = self._core.quorum(job) if job is not None else None
        if job is not None and quorum is not None and (before is None or before.key != quorum.key):
            log.resumed(job, quorum, self._core.replica_of(event.stream) or "of an older stream")

    def _handle_unary(self, event: events.UnaryEvent) -> None:
        self._perform(self._router.handle_unary(event, self._now_ms(), self._wall_ms()))

    def _perform(self, decisions: Iterable[_Decision], hello_job: str | None = None) -> None:
        """Perform decisions in order; `hello_job` is the job that a hello has named, if that is what they answer."""
        for decision in decisions:
            if self._journal is not None:
                self._journal.note(decision)
            match decision:
                case effects.AnswerQuorum(stream, request, quorum):
                    self._send(stream, self._encode.answer(request, quorum, packs=stream in self._unpacks))
                case effects.NotifyLoss(stream, notice):
                    self._send(stream, self._encode.notice(notice))
                case effects.TellNewest(stream, news):
                    self._send(stream, self._encode.news(news))
                case effects.RefuseSession(stream, refusal, message):
                    self._log_refusal("a stream", refusal, message, self._core.job_of(stream) or hello_job)
                    self._send(stream, codec.encode_from_lighthouse(decision))
                    self._close(stream)
                case effects.RefuseRequest(stream, _, refusal, message):
                    if refusal not in (Refusal.LOST, Refusal.LEFT):  # these have a log line already
                        self._refusals.log("a request", refusal, message, job=self._core.job_of(stream))
                    self._send(stream, codec.encode_from_lighthouse(decision))
                case effects.AskForQuorum(stream):
                    self._was_asked.add(stream)
                    self._send(stream, codec.encode_from_lighthouse(decision))
                case effects.CloseStream(stream):
                    self._close(stream)
                case effects.QuorumFormed():
                    log.quorum_formed(decision)
                case effects.ReplicaLost():
                    log.replica_lost(decision)
                case effects.ReplicaLeft():
                    log.replica_left(decision)
                case effects.Warned():
                    log.warned(decision)
                case effects.PaceChanged():
                    log.pace_changed(decision)
                case effects.WaitNoticed():
                    log.wait(decision)
                case effects.JobEnded():
                    log.job_ended(decision)
                case effects.JobFailed():
                    self._failures.log(decision)
                case effects.AnswerUnaryQuorum(call, quorum):
                    self._answer(call, quorum)
                case effects.RefuseUnary(call, refusal, message):
                    self._log_refusal("a call", refusal, message, TORCHFT_JOB)
                    self._answer(call, decision)
                case _:
                    self._send(decision.stream, codec.encode_from_lighthouse(decision))

    def _log_refusal(self, what: str, refusal: Refusal, message: str, job: str | None) -> None:
        # Whoever may come may come under a thousand names, and of one limit one line is enough.
        is_known = job == TORCHFT_JOB or job in self._core.jobs
        about = f"{job if is_known else ''} is full" if refusal is Refusal.FULL else None
        self._refusals.log(what, refusal, message, job=job, about=about)

    def _send(self, stream: int, message: bytes) -> None:
        if stream in self._streams:
            self._streams[stream].put(message)

    def _close(self, stream: int) -> None:
        self._received_s.pop(stream, None)
        if stream in self._streams:
            self._streams[stream].close()

    def _answer(self, call: int, answer: Quorum | effects.RefuseUnary | None) -> None:
        waiting = self._calls.get(call)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    def _wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    # --- streams ------------------------------------------------------------------------------------------------------

    async def _serve_session(self, _messages: object, context: Context) -> None:
        stream, serves = next(self._numbers), asyncio.current_task()
        assert serves is not None
        full = _full_of_streams(len(self._streams) + len(self._calls), self._config.limits.max_streams)
        if full is not None:
            refused = effects.RefuseSession(stream, Refusal.FULL, full)
            self._perform([refused])
            await context.write(codec.encode_from_lighthouse(refused))
            return

        def overflows() -> None:
            log.does_not_read(self._core.replica_of(stream), self._core.job_of(stream), peer_address(context.peer()))
            self._received_s.pop(stream, None)
            serves.cancel()

        outbox = self._streams[stream] = Outbox(overflows)
        self._received_s[stream] = self._loop.time()
        reader = self._loop.create_task(self._read(stream, outbox, context))
        try:
            await outbox.write_all(context.write)
            if reader.done() and reader.result():
                await self._server.services.check_job(context, reader.result())
        finally:
            reader.cancel()
            last_s = self._received_s.pop(stream, None)
            # A connection whose other host is silent ends after heartbeat_timeout, by pings or by missing
            # acknowledgements. A stream on which a message came a moment before its end was therefore closed by that
            # host.
            within_s = self._config.timeouts.heartbeat_timeout_ms / 2_000
            by_peer = last_s is not None and self._loop.time() - last_s < within_s
            del self._streams[stream]
            self._was_asked.discard(stream)
            self._unpacks.discard(stream)
            self._handle(events.StreamClosed(stream, by_peer))
            self._look_after_grace()

    async def _read(self, stream: int, outbox: Outbox, context: Context) -> str:
        """Read the stream until its manager server closes its side, the stream breaks, or a message is invalid.

        Returns: "", or the job that the stream's hello names and its secret does not open.
        """
        last: Member | None = None
        opened = self._server.services.opened(context)

        def receive(message: bytes) -> None:
            nonlocal last
            if not outbox.closed:
                self._received_s[stream] = self._loop.time()
            event = codec.decode_to_lighthouse(stream, message, last, was_asked=stream in self._was_asked)
            if isinstance(event, events.QuorumRequested):
                last = event.member
            elif isinstance(event, events.QuorumReported):
                self._was_asked.discard(stream)
                if event.quorum is not None:
                    self._handle_report(event)
                    return
            elif isinstance(event, events.HelloReceived):
                if not opens_job(opened, event.hello.job):
                    raise _WrongJobError(event.hello.job)
                if event.hello.unpacks:
                    self._unpacks.add(stream)
            self._handle(event)
            if self._journal is not None and isinstance(event, events.BeatReceived):
                self._journal.heard(event)

        try:
            while isinstance(message := cast("object", await context.read()), bytes):
                receive(message)
        except ProtocolError as error:
            sentence = f"from {peer_address(context.peer())}: {error}"
            self._perform([effects.RefuseSession(stream, Refusal.MALFORMED, sentence)])
        except _WrongJobError as error:
            return str(error)
        finally:
            outbox.close()
        return ""

    async def _answer_describe(self, _request: bytes, context: Context) -> bytes:
        return codec.encode_description(self.operations.description(self._server.services.opened(context)))

    async def _answer_drain(self, request: bytes, context: Context) -> bytes:
        try:
            drain = codec.decode_drain(0, request)
        except ProtocolError as error:
            await fail(context, Refusal.MALFORMED.value, str(error))
        await self._server.services.check_job(context, drain.job)
        try:
            self.operations.ask_to_leave(drain, peer_address(context.peer()))
        except RefusedError as error:
            await fail(context, error.code, str(error.args[0]))
        return b""

    # --- torchft's unary calls ----------------------------------------------------------------------------------------

    async def _answer_heartbeat(self, request: bytes, context: Context) -> bytes:
        try:
            replica_id = codec.decode_heartbeat(request)
        except ProtocolError as error:
            await fail(context, Refusal.MALFORMED.value, str(error))
        await self._server.services.check_job(context, TORCHFT_JOB)
        self._handle_unary(events.HeartbeatReceived(replica_id))
        return b""

    async def _answer_quorum(self, request: bytes, context: Context) -> bytes:
        try:
            member = codec.decode_lighthouse_request(request)
        except ProtocolError as error:
            await fail(context, Refusal.MALFORMED.value, str(error))
        await self._server.services.check_job(context, TORCHFT_JOB)
        full = _full_of_streams(len(self._streams) + len(self._calls), self._config.limits.max_streams)
        if full is not None:
            self._perform([effects.RefuseUnary(0, Refusal.FULL, full)])  # no call has that number
            await fail(context, Refusal.FULL.value, full)
        call = next(self._numbers)
        waiting = self._calls[call] = self._loop.create_future()
        try:
            self._handle_unary(events.UnaryQuorumRequested(call, member))
            answer = await waiting
        except asyncio.CancelledError:
            # The caller disconnected or its deadline passed: it is no member of later quorums.
            self._handle_unary(events.UnaryRequestWithdrawn(call))
            raise
        finally:
            del self._calls[call]
        if isinstance(answer, Quorum):
            return self._encode.response(answer)
        if answer is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the lighthouse was shut down")
        return await fail(context, answer.refusal.value, answer.message)


class _WrongJobError(Exception):
    """A hello names this job, and the secret of its stream does not open it."""


def _full_of_streams(number: int, most: int) -> str | None:
    """Return why no further stream or waiting call is served, or None."""
    if number < most:
        return None
    return (
        f"this lighthouse serves {number} streams and waiting calls, the most that it may serve (max_streams {most}"
        "). Raise max_streams of the lighthouse, or end replicas"
    )
