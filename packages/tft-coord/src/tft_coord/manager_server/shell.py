"""The manager server itself: the group's core behind grpc, on whatever loop it is started.

Ranks come in by unary calls and by a stream that shows that they live; one stream goes out to the lighthouse. What
happens is told to `GroupCore`, what it decides is performed.

Law of this file: one `match`, one line a decision; no rule of the protocol lives here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import cast, final

import grpc
import grpc.aio

from tft_coord.core import effects, events
from tft_coord.core.group import GroupCore
from tft_coord.core.types import Quorum, Refusal
from tft_coord.errors import ProtocolError, SettingError
from tft_coord.manager_server.config import ManagerServerConfig
from tft_coord.manager_server.link import LighthouseLink
from tft_coord.transport.settings import fail, join_host_port, server_options
from tft_coord.wire import codec, services
from tft_coord.wire.services import Context

logger = logging.getLogger(__name__)

# The answer to a deadline must reach the caller before its own clock ends the call.
ANSWER_EARLIER_MS = 50
LAST_ANSWERS_S = 0.1


@final
class ManagerServerShell:
    """One replica group's manager server. To be used on one loop only.

    Args:
        config: who the group is, and where the lighthouse.
    """

    def __init__(self, config: ManagerServerConfig) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._calls = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes | effects.FailRank]] = {}
        self._healed_bytes: dict[int, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._server = grpc.aio.server(options=server_options(config.timeouts))
        self._server.add_generic_rpc_handlers(
            [
                services.Services(
                    unary={
                        services.MANAGER_QUORUM: self._answer_quorum,
                        services.MANAGER_SHOULD_COMMIT: self._answer_vote,
                        services.MANAGER_CHECKPOINT_METADATA: self._answer_metadata,
                        services.MANAGER_KILL: self._answer_kill,
                    },
                    streams={services.MANAGER_SESSION: self._serve_rank},
                    token=config.token,
                )
            ]
        )
        self._core: GroupCore
        self._link: LighthouseLink

    async def start(self) -> str:
        """Listen, and begin to dial the lighthouse.

        Returns: `host:port` under which the ranks reach this server.
        Raises: SettingError: the address can't be bound.
        """
        config = self._config
        try:
            port = self._server.add_insecure_port(config.bind)
        except RuntimeError as error:
            raise SettingError(
                f"replica {config.replica_id} can't listen at {config.bind}: the address is taken or not of this "
                f"machine; give another bind, or port 0 ({error})"
            ) from error
        address = join_host_port(config.hostname, port)
        self._core = GroupCore(
            replica_id=config.replica_id,
            address=address,
            store_address=config.store_addr,
            world_size=config.world_size,
            timeouts=config.timeouts,
        )
        self._link = LighthouseLink(
            config.lighthouse_addr,
            token=config.token,
            timeouts=config.timeouts,
            job=config.job,
            replica_id=config.replica_id,
            address=address,
            replaces=config.replaces,
            arrived=self._handle,
            quorum=self._quorum,
        )
        await self._server.start()
        self._link.start()
        return address

    async def stop(self, last_words: str) -> None:
        """Tell ranks and lighthouse that the group ends, and why; then end. Takes a fraction of a second at most."""
        self._handle(events.RankDied(0, last_words))
        if self._timer is not None:
            self._timer.cancel()
        await self._link.close()
        await self._server.stop(LAST_ANSWERS_S)

    def _quorum(self) -> Quorum | None:
        return self._core.quorum

    # --- the core's decisions ----------------------------------------------------------------------------------------

    def _handle(self, event: events.GroupEvent) -> None:
        self._perform(self._core.handle(event, self._now_ms()))
        self._watch_the_clock()

    def _perform(self, decisions: Sequence[effects.GroupEffect]) -> None:
        for decision in decisions:
            match decision:
                case effects.AnswerRankUnchanged(call, _, key):
                    self._answer(call, codec.encode_unchanged(key))
                case effects.AnswerVote(call, _, verdict):
                    self._answer(call, codec.encode_verdict(verdict))
                case effects.AskLighthouse(request, member, held):
                    self._link.ask(request, member, held)
                case effects.AnswerPlan(call, _, plan):
                    self._answer(call, codec.encode_plan(plan))
                case effects.WithdrawFromLighthouse(request):
                    self._link.withdraw(request)
                case effects.FailRank(call):
                    self._answer(call, decision)
                case effects.ReportDeath(reason):
                    logger.info("replica %s ends: %s", self._config.replica_id, reason)
                    self._link.report_death(reason)

    def _answer(self, call: int, answer: bytes | effects.FailRank) -> None:
        waiting = self._waiting.get(call)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _watch_the_clock(self) -> None:
        """Have `tick` called when the core has something to do next. A timer that comes too early does no harm."""
        deadline_ms = self._core.next_deadline_ms()
        if deadline_ms is None:
            return
        when = deadline_ms / 1000
        if self._timer is not None and not self._timer.cancelled() and self._loop.time() < self._timer.when() <= when:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._perform(self._core.tick(self._now_ms()))
        self._watch_the_clock()

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)

    # --- unary calls of the ranks -------------------------------------------------------------------------------------

    async def _answer_quorum(self, request: bytes, context: Context) -> bytes:
        try:
            rank, asked = codec.decode_rank_request(request)
        except ProtocolError as error:
            await fail(context, Refusal.MALFORMED.value, str(error))
        deadline_ms = await self._deadline_ms(context)
        call = next(self._calls)
        return await self._wait(context, rank, events.RankAsked(rank, call, asked, deadline_ms))

    async def _answer_vote(self, request: bytes, context: Context) -> bytes:
        try:
            vote = codec.decode_vote(request)
        except ProtocolError as error:
            await fail(context, Refusal.MALFORMED.value, str(error))
        deadline_ms = await self._deadline_ms(context)
        call, rank = next(self._calls), vote.group_rank
        voted = events.RankVoted(rank, call, vote.key, vote.step, vote.purpose, vote.yes, deadline_ms)
        return await self._wait(context, rank, voted)

    async def _answer_metadata(self, request: bytes, context: Context) -> bytes:
        try:
            rank = codec.decode_metadata_request(request)
        except ProtocolError as error:
            await fail(context, Refusal.MALFORMED.value, str(error))
        metadata = self._core.checkpoint_metadata(rank)
        if metadata is None:
            sentence = (
                f"rank not found: rank {rank} of replica {self._config.replica_id} has not asked for a quorum yet"
            )
            await fail(context, Refusal.MALFORMED.value, sentence)
        return codec.encode_metadata(metadata)

    async def _answer_kill(self, _request: bytes, context: Context) -> bytes:
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "this manager server ends no process; kill the replica's processes instead"
        )

    async def _wait(self, context: Context, rank: int, event: events.RankAsked | events.RankVoted) -> bytes:
        waiting = self._waiting[event.call] = self._loop.create_future()
        try:
            self._handle(event)
            answer = await waiting
        except asyncio.CancelledError:
            self._handle(events.RankWithdrew(rank, event.call))
            raise
        finally:
            del self._waiting[event.call]
        if isinstance(answer, bytes):
            return answer
        sentence = answer.message
        if answer.code == "deadline" and self._link.trouble:
            sentence = f"{sentence} ({self._link.trouble})"
        return await fail(context, answer.code, sentence)

    async def _deadline_ms(self, context: Context) -> int:
        """When the answer must be given. Ends a call without a deadline."""
        remaining = cast("float | None", context.time_remaining())
        if remaining is None:
            await fail(
                context, Refusal.MALFORMED.value, "missing timeout: give the call a deadline, the grpc-timeout header"
            )
        remaining_ms = int(remaining * 1000)
        return self._now_ms() + remaining_ms - min(ANSWER_EARLIER_MS, remaining_ms // 10)

    # --- a rank's stream ----------------------------------------------------------------------------------------------

    async def _serve_rank(self, _messages: object, context: Context) -> None:
        rank, stream, left = -1, next(self._calls), False
        try:
            while True:
                message = cast("object", await context.read())
                if not isinstance(message, bytes):
                    break  # the rank closed its side
                match codec.decode_from_rank(message):
                    case codec.RankHello(group_rank, session):
                        if group_rank >= self._config.world_size:
                            await context.write(codec.encode_to_rank(self._no_such_rank(group_rank)))
                            return
                        rank = group_rank
                        self._handle(events.RankConnected(rank, stream))
                        await context.write(codec.encode_to_rank(effects.Welcome(stream, session, 0, "")))
                    case codec.RankBeat(healed_bytes) if rank >= 0:
                        self._healed_bytes[rank] = max(healed_bytes, self._healed_bytes.get(rank, 0))
                        self._link.healed(sum(self._healed_bytes.values()))
                    case codec.RankGoodbye():
                        left = True
                    case codec.RankBeat():
                        raise ProtocolError("a rank's stream beats before its hello")
        except ProtocolError as error:
            await fail(context, Refusal.MALFORMED.value, str(error))
        finally:
            if rank >= 0:
                self._handle(events.RankDisconnected(rank, stream, left))

    def _no_such_rank(self, rank: int) -> effects.RefuseSession:
        sentence = (
            f"replica {self._config.replica_id} has world size {self._config.world_size} and no rank {rank}; "
            "give every process of the group the same WORLD_SIZE and its own RANK below it"
        )
        return effects.RefuseSession(0, Refusal.MALFORMED, sentence)
