"""The manager server itself: the group's core behind grpc, on the loop that starts it.

Ranks come in by unary calls and by a stream that shows that they live; one stream goes out to the lighthouse.
`ReplicaGroupCore` gets the events, and this shell performs its decisions.

Law of this file: one `match`, one line a decision; no rule of the protocol lives here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias, cast, final

from tft_coord.core import effects, events
from tft_coord.core.replica_group import ReplicaGroupCore
from tft_coord.core.stops import LOOK_EVERY_MS, LocalProcess
from tft_coord.core.types import NewcomerAsks, Plan, Quorum, QuorumKey, Refusal, Verdict
from tft_coord.errors import ProtocolError
from tft_coord.logs import logger_for_people
from tft_coord.manager_server.config import ManagerServerConfig
from tft_coord.manager_server.link import LighthouseLink
from tft_coord.manager_server.report_gate import ReportGate
from tft_coord.processes import is_stopped, this_process
from tft_coord.security import Gate, Trust
from tft_coord.transport.address import join_host_port, peer_address
from tft_coord.transport.outbox import Outbox
from tft_coord.transport.server import Server
from tft_coord.transport.settings import fail, server_options
from tft_coord.wire import rank_codec, services
from tft_coord.wire.services import Context

logger = logger_for_people(__name__)

# The answer at a deadline must reach the caller before the caller's own clock ends the call. A caller on a stream waits
# slightly longer than its deadline. grpc ends a separate call to the millisecond, and a busy machine needs more time
# than that.
ANSWER_EARLIER_MS = 50
UNARY_EARLIER_MS = 250
LAST_ANSWERS_S = 0.1


Asked: TypeAlias = rank_codec.Ask | rank_codec.Vote | rank_codec.Leave
Answer: TypeAlias = Plan | QuorumKey | Verdict | rank_codec.Failure


@final
class ManagerServerShell:
    """One replica group's manager server. It runs on one loop only.

    Args:
        config: the group and the lighthouse.
        trainer_pid: of the process that started this server, for warnings.
    """

    def __init__(self, config: ManagerServerConfig, *, trainer_pid: int) -> None:
        self._config = config
        self._trainer_pid = trainer_pid
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)  # of calls and streams
        self._waiting: dict[int, Callable[[Answer], None]] = {}
        self._ranks: set[_RankStream] = set()
        self._healed_bytes: dict[int, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._processes: dict[int, LocalProcess] = {}  # of the ranks on this host
        self._this_process = this_process()
        self._next_look: asyncio.Handle | None = None
        self._ended = False
        self._server = Server(
            server_options(config.timeouts),
            services.Services(
                unary={
                    services.MANAGER_QUORUM: self._answer_quorum,
                    services.MANAGER_SHOULD_COMMIT: self._answer_vote,
                    services.MANAGER_CHECKPOINT_METADATA: self._answer_metadata,
                    services.MANAGER_KILL: self._answer_kill,
                },
                streams={services.MANAGER_SESSION: self._serve_rank},
                gate=Gate(config.token),
            ),
        )
        self._core: ReplicaGroupCore
        self._link: LighthouseLink

    async def start(self) -> str:
        """Listen, and start to dial the lighthouse.

        Returns: `host:port` under which the ranks reach this server.
        Raises: ConfigError: the address can't be bound.
        """
        config = self._config
        try:
            port = self._server.bind(config.listens_at, config.tls)
        except RuntimeError as error:
            raise config.cannot_listen() from error
        address = join_host_port(config.hostname, port)
        self._core = ReplicaGroupCore(
            replica_id=config.replica_id,
            address=address,
            store_address=config.store_addr,
            world_size=config.world_size,
            timeouts=config.timeouts,
        )
        self._link = LighthouseLink(
            config.lighthouse_addr,
            trust=Trust(config.token, config.tls),
            timeouts=config.timeouts,
            job=config.job,
            replica_id=config.replica_id,
            address=address,
            replaces=config.replaces,
            arrived=self._handle,
            quorum=self._quorum,
            progress=ReportGate(self._core.progress).progress,
            waits=self._core.waits,
            stopped=self._core.stopped,
            is_hung=self._is_hung,
            pid=self._trainer_pid,
        )
        await self._server.start()
        self._link.start()
        return address

    async def stop(self, reason: str, *, left: bool) -> None:
        """Tell the ranks and the lighthouse that the group ends, and why; then end. It takes a fraction of a second at
        most.

        Args:
            reason: one phrase.
            left: rank 0 said goodbye; its process did not die.
        """
        self._handle(events.RankDied(0, reason, left))
        for timer in (self._timer, self._next_look):
            if timer is not None:
                timer.cancel()
        self._ended = True
        await self._link.close()
        for rank in self._ranks:
            rank.outbox.close()
        await self._server.stop(LAST_ANSWERS_S)

    def _quorum(self) -> Quorum | None:
        return self._core.report()

    # --- the core's decisions ----------------------------------------------------------------------------------------

    def _handle(self, event: events.GroupEvent) -> None:
        now_ms = self._now_ms()
        self._perform(self._core.handle(event, now_ms))
        if self._link.hangs and not self._core.is_hung(now_ms):
            self._link.resumed()
        self._schedule_tick()
        if self._next_look is None and self._processes and not self._ended and self._core.looks(now_ms):
            self._next_look = self._loop.call_soon(self._look_at_ranks)

    def _perform(self, decisions: Sequence[effects.GroupEffect]) -> None:
        for decision in decisions:
            match decision:
                case effects.AnswerRankUnchanged(call, _, key):
                    self._answer(call, key)
                case effects.AnswerVote(call, _, verdict):
                    self._answer(call, verdict)
                case effects.AskLighthouse(request, member, held, fingerprint):
                    self._link.ask(request, member, held, fingerprint)
                case effects.AnswerPlan(call, _, plan):
                    self._answer(call, plan)
                case effects.WithdrawFromLighthouse(request):
                    self._link.withdraw(request)
                case effects.FailRank(call, _, code, message):
                    why = f" ({self._link.failure})" if code == "deadline" and self._link.failure else ""
                    self._answer(call, rank_codec.Failure(code, message + why))
                case effects.SayWaits():
                    self._link.say_waits()
                case effects.ReportLate(key, step):
                    self._link.report_late(key, step)
                case effects.ReportStop() as report:
                    self._link.report_stop(report)
                case effects.NotifyRank(rank, notice):
                    self._notify(rank, notice)
                case effects.TellNewcomer(rank, replica_id):
                    self._notify(rank, NewcomerAsks(replica_id))
                case effects.TellGroupLost(rank, message, left):
                    self._notify(rank, rank_codec.RanksLost(message, left))
                case effects.TellRank(rank, news):
                    self._notify(rank, news)
                case effects.LeaveJob(reason, serve_ms, finished_step):
                    logger.info("replica %s leaves: %s", self._config.replica_id, reason)
                    self._link.leave(reason, serve_ms, finished_step)
                case effects.RefuseSession():
                    self._refuse(decision)
                case effects.ReportDeath(reason):
                    logger.info("replica %s ends: %s", self._config.replica_id, reason)
                    self._link.report_death(reason)

    def _notify(self, rank: int, message: rank_codec.ToRank) -> None:
        for stream in self._ranks:
            if stream.rank == rank:
                stream.send(message)

    def _refuse(self, refusal: effects.RefuseSession) -> None:
        for stream in self._ranks:
            if stream.stream == refusal.stream:
                logger.warning("closed the stream of rank %d: %s", stream.rank, refusal.message)
                stream.rank = -1
                stream.send(rank_codec.RankRefused(refusal.refusal, refusal.message))
                stream.outbox.close()

    def _answer(self, call: int, answer: Answer) -> None:
        reply = self._waiting.pop(call, None)
        if reply is not None:
            reply(answer)

    def _schedule_tick(self) -> None:
        """Schedule `tick` for the core's next deadline. A timer that fires too early does no harm."""
        deadline_ms = self._core.next_deadline_ms()
        if deadline_ms is None:
            return
        when = deadline_ms / 1000
        if self._timer is not None and not self._timer.cancelled() and self._loop.time() < self._timer.when() <= when:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._tick)

    def _look_at_ranks(self) -> None:
        """Check which ranks on this host are stopped; repeat it for as long as the core needs it."""
        self._next_look = None
        if self._ended:
            return
        self._next_look = self._loop.call_later(LOOK_EVERY_MS / 1000, self._look_at_ranks)
        self._handle(events.RanksLookedAt(self._stopped_ranks()))
        if not self._core.looks(self._now_ms()):
            self._next_look.cancel()
            self._next_look = None

    def _stopped_ranks(self) -> dict[int, bool]:
        return {rank: is_stopped(process) for rank, process in self._processes.items()}

    def _is_hung(self) -> bool:
        """Check now whether a rank hangs or is stopped."""
        if self._processes:
            self._handle(events.RanksLookedAt(self._stopped_ranks()))
        return self._core.is_hung(self._now_ms())

    def _tick(self) -> None:
        self._timer = None
        self._perform(self._core.tick(self._now_ms()))
        self._schedule_tick()

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    # --- unary calls -------------------------------------------------------------------------------------------------

    async def _answer_quorum(self, request: bytes, context: Context) -> bytes:
        try:
            ask = rank_codec.decode_rank_request(request)
        except ProtocolError as error:
            await fail(context, Refusal.MALFORMED.value, str(error))
        match await self._ask_and_wait(context, ask):
            case Plan() as plan:
                return rank_codec.encode_plan(plan)
            case QuorumKey() as key:
                return rank_codec.encode_unchanged(key)
            case answer:
                return await self._fail(context, answer)

    async def _answer_vote(self, request: bytes, context: Context) -> bytes:
        try:
            vote = rank_codec.decode_vote(request)
        except ProtocolError as error:
            await fail(context, Refusal.MALFORMED.value, str(error))
        match await self._ask_and_wait(context, vote):
            case Verdict() as verdict:
                return rank_codec.encode_verdict(verdict)
            case answer:
                return await self._fail(context, answer)

    async def _answer_metadata(self, request: bytes, context: Context) -> bytes:
        try:
            rank = rank_codec.decode_metadata_request(request)
        except ProtocolError as error:
            await fail(context, Refusal.MALFORMED.value, str(error))
        metadata = self._core.checkpoint_metadata(rank)
        if metadata is None:
            message = f"rank not found: rank {rank} of replica {self._config.replica_id} has asked for no quorum yet"
            await fail(context, Refusal.MALFORMED.value, message)
        return rank_codec.encode_metadata(metadata)

    async def _answer_kill(self, request: bytes, context: Context) -> bytes:
        """Handle a kill request: each rank ends itself when it gets the order; the answer does not wait for that."""
        try:
            message = rank_codec.decode_kill(request)
        except ProtocolError as error:
            await fail(context, Refusal.MALFORMED.value, str(error))
        order = f"{message or 'no reason was given'} (requested by {peer_address(context.peer())})"
        logger.error("replica %s received a kill request: %s", self._config.replica_id, order)
        self._handle(events.KillAsked(order))
        return b""

    async def _ask_and_wait(self, context: Context, asked: Asked) -> Answer:
        remaining_s = cast("float | None", context.time_remaining())
        if remaining_s is None:
            await fail(
                context, Refusal.MALFORMED.value, "missing timeout: set the deadline of the call (grpc-timeout header)"
            )
        if any(stream.rank == asked.group_rank for stream in self._ranks):
            # Without a secret any caller could ask in its name, and redirect others to a false state.
            sentence = (
                f"rank {asked.group_rank} of replica {self._config.replica_id} has a session, and only that session "
                "may ask and vote; give each process of the group its own RANK"
            )
            await fail(context, Refusal.DUPLICATE.value, sentence)
        waiting: asyncio.Future[Answer] = self._loop.create_future()

        def reply(answer: Answer) -> None:
            if not waiting.done():
                waiting.set_result(answer)

        remaining_ms = int(remaining_s * 1000)
        call = self._ask(asked, remaining_ms - min(UNARY_EARLIER_MS, remaining_ms // 3), reply)
        try:
            return await waiting
        except asyncio.CancelledError:
            self._withdraw(asked.group_rank, call)
            raise

    async def _fail(self, context: Context, answer: Answer) -> NoReturn:
        assert isinstance(answer, rank_codec.Failure), f"{answer} answers another question"
        await fail(context, answer.code, answer.message)

    # --- calls of either kind ----------------------------------------------------------------------------------------

    def _ask(self, asked: Asked, remaining_ms: int, reply: Callable[[Answer], None]) -> int:
        """Pass the call to the core; `reply` is called once, now or later, unless the call is withdrawn."""
        call, rank = next(self._numbers), asked.group_rank
        self._waiting[call] = reply
        deadline_ms = self._now_ms() + remaining_ms - min(ANSWER_EARLIER_MS, remaining_ms // 10)
        match asked:
            case rank_codec.Ask():
                self._handle(events.RankAsked(rank, call, asked.request, deadline_ms))
            case rank_codec.Vote():
                self._handle(
                    events.RankVoted(
                        rank,
                        call,
                        asked.key,
                        asked.step,
                        asked.purpose,
                        asked.yes,
                        deadline_ms,
                        asked.leaving,
                        asked.stands,
                    )
                )
            case rank_codec.Leave():
                self._handle(events.RankLeft(rank, call, asked.reason, asked.serve_ms, asked.finished_step))
        return call

    def _withdraw(self, rank: int, call: int) -> None:
        if self._waiting.pop(call, None) is not None:
            self._handle(events.RankWithdrew(rank, call))

    # --- a rank's stream ---------------------------------------------------------------------------------------

    async def _serve_rank(self, _messages: object, context: Context) -> None:
        serving = asyncio.current_task()
        assert serving is not None

        def overflows(rank: _RankStream) -> None:
            message = "closed the stream of rank %d of replica %s: the rank does not read its messages"
            logger.warning(message, rank.rank, self._config.replica_id)
            serving.cancel()

        rank = _RankStream(next(self._numbers), overflows)
        self._ranks.add(rank)
        reader = self._loop.create_task(self._read(rank, context))
        try:
            await rank.outbox.write_all(context.write)
        finally:
            reader.cancel()
            self._ranks.discard(rank)
            for call in rank.calls.values():
                self._withdraw(rank.rank, call)
            if rank.rank >= 0:
                self._handle(events.RankDisconnected(rank.rank, rank.stream, rank.left))

    async def _read(self, rank: _RankStream, context: Context) -> None:
        """Read the stream until the rank closes its side, the stream breaks, or a message is invalid."""
        try:
            while isinstance(message := cast("object", await context.read()), bytes):
                self._received(rank, rank_codec.decode_from_rank(message))
                if rank.outbox.closed:
                    break  # it was refused
        except ProtocolError as error:
            whose = f"rank {rank.rank}" if rank.rank >= 0 else "an unidentified rank"
            logger.warning("closed the stream of %s from %s: %s", whose, peer_address(context.peer()), error)
            rank.send(rank_codec.RankRefused(Refusal.MALFORMED, str(error)))
        finally:
            rank.outbox.close()

    def _received(self, rank: _RankStream, message: rank_codec.FromRank) -> None:
        """Handle a message of the rank. Raises: ProtocolError: it is invalid here; the stream ends."""
        match message:
            case rank_codec.RankHello() if rank.rank >= 0:
                raise ProtocolError("a second hello arrived on a rank's stream; open another stream")
            case rank_codec.RankHello(group_rank, session):
                if group_rank >= self._config.world_size:
                    raise ProtocolError(
                        f"replica {self._config.replica_id} has world size {self._config.world_size} and no rank "
                        f"{group_rank}; give every process of the group the same WORLD_SIZE and its own RANK below it"
                    )
                rank.rank = group_rank
                self._handle(events.RankConnected(group_rank, rank.stream, session))
                rank.send(rank_codec.RankWelcome(session))  # a refusal closes the outbox, so this is dropped after one
            case _ if rank.rank < 0:
                raise ProtocolError("a rank's stream must begin with a hello")
            case rank_codec.RankCall(number, timeout_ms, asked):
                self._called(rank, number, timeout_ms, asked)
            case rank_codec.RankWithdraw(number):
                self._withdraw(rank.rank, rank.calls.pop(number, 0))
            case rank_codec.RankBeat(healed_bytes, progress, number):
                if number:
                    self._handle(events.RankBeat(rank.rank, number))
                if progress is not None:
                    self._handle(events.RankProgressed(rank.rank, progress))
                self._healed_bytes[rank.rank] = max(healed_bytes, self._healed_bytes.get(rank.rank, 0))
                self._link.healed(sum(self._healed_bytes.values()))
            case rank_codec.RankLate(key, step):
                self._handle(events.RankLate(rank.rank, key, step))
            case rank_codec.RankProcess(process):
                if self._this_process is not None and process.shares_host_with(self._this_process):
                    self._processes[rank.rank] = process
                else:
                    self._processes.pop(rank.rank, None)
            case rank_codec.RankGoodbye():
                rank.left = True

    def _called(self, rank: _RankStream, number: int, timeout_ms: int, asked: Asked) -> None:
        """Handle a call on a rank's stream. Raises: ProtocolError: it names another rank."""
        if asked.group_rank != rank.rank:
            raise ProtocolError(f"the stream of rank {rank.rank} has a call of rank {asked.group_rank}")

        def reply(answer: Answer) -> None:
            rank.calls.pop(number, None)
            rank.send(rank_codec.RankAnswer(number, answer))

        call = self._ask(asked, timeout_ms, reply)
        if call in self._waiting:
            rank.calls[number] = call


@final
class _RankStream:
    """One stream of one rank: its number here, and the waiting calls on it, by the rank's numbers."""

    def __init__(self, stream: int, overflows: Callable[[_RankStream], None]) -> None:
        self.stream = stream
        self.outbox = Outbox(lambda: overflows(self))
        self.calls: dict[int, int] = {}
        self.rank = -1
        self.left = False

    def send(self, message: rank_codec.ToRank) -> None:
        self.outbox.put(rank_codec.encode_to_rank(message))
