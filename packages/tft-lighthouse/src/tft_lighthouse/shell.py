"""The lighthouse itself: its cores behind grpc, on the loop that starts it.

Each manager server holds a stream. torchft's clients beat and ask by unary calls. The core of each kind gets the
events, and this shell performs its decisions. A quorum is encoded once, and all its members get the same bytes.

Law of this file: one `match`, one line a decision; no rule of the protocol lives here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, TypeAlias, cast, final

from tft_coord import ConfigError, Member, ProtocolError, RefusedError
from tft_coord.lighthouse import (
    TLS,
    TORCHFT_JOB,
    Context,
    Gate,
    LighthouseConfig,
    Outbox,
    Quorum,
    Refusal,
    Server,
    codec,
    effects,
    events,
    fail,
    opens_job,
    peer_address,
    server_options,
    services,
)
from tft_lighthouse import log
from tft_lighthouse.cores import new_cores
from tft_lighthouse.encoders import Encoders
from tft_lighthouse.graces import Graces
from tft_lighthouse.journal import Journal
from tft_lighthouse.operations import Operations
from tft_lighthouse.unary import UnaryCalls, check_leads

if TYPE_CHECKING:
    from tft_lighthouse.etcd.candidate import Candidate
    from tft_lighthouse.etcd.settings import EtcdConfig

logger = logging.getLogger("tft_lighthouse")

LAST_ANSWERS_S: Final = 0.2
LOOK_AT_WAITS_S: Final = 1.0

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
        etcd: settings of the election of one lighthouse among several, or None: this one always serves.

    Attributes:
        operations: what an operator may see and ask for.
        candidate: of the election; it takes part once it is started. None: there is no election.
    """

    def __init__(
        self,
        config: LighthouseConfig,
        *,
        cluster_id: str | None,
        gate: Gate,
        max_message_bytes: int,
        tls: TLS | None = None,
        etcd: EtcdConfig | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._config = config
        self.candidate = _new_candidate(etcd, began=self._begin_again, ended=self._end_to_lead)
        self._journal: Journal | None = None
        self._serves_since_ms = self._wall_ms()
        self._core, self._torchft_core, self._router = new_cores(
            config,
            started_ms=self._serves_since_ms,
            cluster_id=cluster_id or _own_cluster_id(etcd),
            now_ms=self._now_ms(),
        )
        self.operations = Operations(
            self._core,
            self._torchft_core,
            config,
            gate=gate,
            tls=tls,
            send=lambda order: self._send(order.stream, codec.encode_from_lighthouse(order)),
            num_streams=lambda: len(self._streams) + len(self._unary),
            now_ms=self._now_ms,
            wall_ms=self._wall_ms,
            candidate=self.candidate,
        )
        self._numbers = itertools.count(1)
        self._streams: dict[int, Outbox] = {}
        # stream -> time of its last message; without streams that this side ends
        self._received_s: dict[int, float] = {}
        self._was_asked: set[int] = set()  # streams that were asked for the quorum that they hold
        self._encode = Encoders()
        self._unary = UnaryCalls(
            self.operations,
            handle=self._handle_unary,
            encode=self._encode,
            number=self._numbers.__next__,
            full=self._refuse_full_call,
            check_job=lambda context: self._server.services.check_job(context, TORCHFT_JOB),
        )
        self._unpacks: set[int] = set()  # streams whose other end can decode a packed quorum
        self._refusals = log.Refusals(self._loop.time)
        self._failures = log.Failures()
        self._timer: asyncio.TimerHandle | None = None
        self._graces = Graces(lambda: self._perform(self._core.tick(self._now_ms(), self._wall_ms())))
        self._next_look_at_waits_s = 0.0
        options = server_options(config.timeouts, hears_beats=True, max_request_bytes=max_message_bytes)
        self._server = Server(options, self._new_services(gate))

    def _new_services(self, gate: Gate) -> services.Services:
        return services.Services(
            unary={
                services.LIGHTHOUSE_DESCRIBE: self._answer_describe,
                services.LIGHTHOUSE_HEARTBEAT: self._unary.heartbeat,
                services.LIGHTHOUSE_QUORUM: self._unary.quorum,
                services.LIGHTHOUSE_DRAIN: self._answer_drain,
            },
            streams={services.LIGHTHOUSE_SESSION: self._serve_session},
            gate=gate,
            is_serving=lambda: self.operations.is_ready,
        )

    async def start(self, bind: str, tls: TLS | None = None) -> int:
        """Listen. Returns: the port. Raises: ConfigError: the address can't be bound."""
        try:
            port = self._server.bind(bind, tls)
        except RuntimeError as error:
            raise ConfigError(
                f"the lighthouse can't listen at {bind}: the port is in use or the address is not this machine's; "
                "end the other process, or bind another one"
            ) from error
        await self._server.start()
        self._tick()
        return port

    async def stop(self) -> None:
        """Stop: nothing is answered from now on, on any connection, and the port is free."""
        if self._timer is not None:
            self._timer.cancel()
        self._graces.end()
        # Waiting callers get an answer, and every stream ends, before the connections close: a clean end, not a break.
        for outbox in self._streams.values():
            outbox.close()
        self._unary.end_all()
        await self._server.stop(LAST_ANSWERS_S)
        if self.candidate is not None:
            await self.candidate.stop()

    def keep_journal(self) -> Journal:
        """Count and record from now on what has happened to the jobs, and return the journal, always the same."""
        if self._journal is None:
            self._journal = Journal(self._core, self._torchft_core, now_ms=self._now_ms, wall_ms=self._wall_ms)
        return self._journal

    def reconfigure(self, config: LighthouseConfig) -> None:
        """Use other settings from now on; see `LighthouseServer.reconfigure`."""
        self._config = config
        self._core.reconfigure(config)
        self._torchft_core.reconfigure(config.of_job(TORCHFT_JOB))
        self.operations.reconfigure(config)

    # --- the election -------------------------------------------------------------------------------------------------

    def _begin_again(self, started_ms: int, is_successor: bool) -> None:
        """Serve from now on with no memory, by quorum ids above `started_ms`."""
        self._core, self._torchft_core, self._router = new_cores(
            self._config,
            started_ms=started_ms,
            cluster_id=self._core.cluster_id,
            now_ms=self._now_ms(),
            is_successor=is_successor,
        )
        self._serves_since_ms = started_ms
        self.operations.renew(self._core, self._torchft_core)
        if self._journal is not None:
            self._journal.renew(self._core, self._torchft_core)

    def _end_to_lead(self) -> None:
        """Forget all jobs and end all streams, with what waits to be written: nothing is answered from now on."""
        while self._streams:
            self._streams.popitem()[1].abandon()
        self._received_s.clear()
        self._unary.end_all()
        self._begin_again(self._core.started_ms, True)

    def _leads(self) -> bool:
        return self.candidate is None or self.candidate.leads()

    # --- the cores' decisions ---------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._config.timeouts.quorum_tick_ms / 1_000, self._tick)
        if self._leads():
            self._perform(self._router.tick(self._now_ms(), self._wall_ms()))
        if self._journal is not None:  # of a standby too: what it recorded as a leader goes on no more
            self._journal.tick()
        if self._leads() and self._loop.time() >= self._next_look_at_waits_s:
            self._next_look_at_waits_s = self._loop.time() + LOOK_AT_WAITS_S
            self._perform(self._core.look_at_waits(self._now_ms()))

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
            _resumed(self._journal, job, quorum, self._core.replica_of(event.stream) or "of an older stream")

    def _handle_unary(self, event: events.UnaryEvent) -> None:
        self._perform(self._router.handle_unary(event, self._now_ms(), self._wall_ms()))

    def _perform(self, decisions: Iterable[_Decision], hello_job: str | None = None) -> None:
        """Perform decisions in order; `hello_job` is the job that a hello has named, if that is what they answer."""
        if not self._leads():
            return
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
                        self._log_refusal("a request", refusal, message, self._core.job_of(stream))
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
                    self._unary.answer(call, quorum)
                case effects.RefuseUnary(call, refusal, message):
                    self._log_refusal("a call", refusal, message, TORCHFT_JOB)
                    self._unary.answer(call, decision)
                case _:
                    self._send(decision.stream, codec.encode_from_lighthouse(decision))

    def _log_refusal(self, what: str, refusal: Refusal, message: str, job: str | None) -> None:
        # Whoever may come may come under a thousand names, so that of one kind and job one line a minute is enough.
        is_known = job == TORCHFT_JOB or job in self._core.jobs
        about = f"{job if is_known else ''} {refusal.value}"
        self._refusals.log(what, refusal, message, job=job, about=about)

    def _full(self) -> str | None:
        return _full_of_streams(len(self._streams) + len(self._unary), self._config.limits.max_streams)

    def _refuse_full_call(self) -> effects.RefuseUnary | None:
        full = self._full()
        if full is None:
            return None
        refused = effects.RefuseUnary(0, Refusal.FULL, full)  # no call has that number
        self._perform([refused])
        return refused

    def _send(self, stream: int, message: bytes) -> None:
        if stream in self._streams:
            self._streams[stream].put(message)

    def _close(self, stream: int) -> None:
        self._received_s.pop(stream, None)
        if stream in self._streams:
            self._streams[stream].close()

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    def _wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    # --- streams ------------------------------------------------------------------------------------------------------

    async def _serve_session(self, _messages: object, context: Context) -> None:
        if self.candidate is not None and not self.candidate.leads():
            return await context.write(codec.encode_from_lighthouse(self.candidate.refusal()))
        stream, serves = next(self._numbers), asyncio.current_task()
        assert serves is not None
        full = self._full()
        if full is not None:
            refused = effects.RefuseSession(stream, Refusal.FULL, full)
            self._perform([refused])
            await context.write(codec.encode_from_lighthouse(refused))
            return None

        def overflows() -> None:
            log.does_not_read(self._core.replica_of(stream), self._core.job_of(stream), peer_address(context.peer()))
            self._received_s.pop(stream, None)
            serves.cancel()

        async def write(message: bytes) -> None:
            if self._leads():  # else the stream has ended, and this message with it
                await context.write(message)

        outbox = self._streams[stream] = Outbox(overflows)
        self._received_s[stream] = self._loop.time()
        reader = self._loop.create_task(self._read(stream, outbox, context))
        try:
            await outbox.write_all(write)
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
            self._streams.pop(stream, None)
            self._was_asked.discard(stream)
            self._unpacks.discard(stream)
            self._handle(events.StreamClosed(stream, by_peer))
            self._graces.begin(self._config.timeouts.reconnect_grace_ms)

    async def _read(self, stream: int, outbox: Outbox, context: Context) -> str:
        """Read the stream until its manager server closes its side, the stream breaks, or a message is invalid.

        Returns: "", or the job that the stream's hello names and its secret does not open.
        """
        last: Member | None = None
        opened = self._server.services.opened(context)

        def receive(message: bytes) -> None:
            nonlocal last
            if stream not in self._streams:
                return  # it has ended, with all that this lighthouse knew of it
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
        await check_leads(self.operations, context)
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


def _own_cluster_id(etcd: EtcdConfig | None) -> str:
    """Return the name of the lighthouses that replace each other, if the operator gives none."""
    return f"etcd {etcd.prefix}" if etcd is not None else str(uuid.uuid4())


def _new_candidate(
    etcd: EtcdConfig | None, *, began: Callable[[int, bool], None], ended: Callable[[], None]
) -> Candidate | None:
    if etcd is None:
        return None
    from tft_lighthouse.etcd.candidate import Candidate  # only a lighthouse with an election pays for the import

    return Candidate(etcd, began=began, ended=ended)


def _resumed(journal: Journal | None, job: str, quorum: Quorum, replica_id: str) -> None:
    log.resumed(job, quorum, replica_id)
    if journal is not None:
        journal.resumed(job, quorum, replica_id)


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
