"""A channel to torchft's lighthouse: one unary call that waits for a quorum, and one that beats.

`TorchftGroupCore` decides which calls to make and what an answer means. A call that fails ends the channel, as a break
ends a stream. The next channel sends the open request again.

Law of this file: two calls and their time; no decision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, final

from tft_coord.compat.replica_group import CallQuorum, CancelCall, LeftOut, TellGroup, TorchftEffect, TorchftGroupCore
from tft_coord.core import events
from tft_coord.core.session import SendRequest
from tft_coord.core.types import Member, QuorumKey
from tft_coord.logs import logger_for_people
from tft_coord.rpc import grpc
from tft_coord.timeouts import Timeouts
from tft_coord.wire import codec, services

logger = logger_for_people(__name__)

LOOK_AGAIN_MS: Final = 50  # interval of checks whether a group has asked and must beat


@final
class TorchftConversation:
    """The life of one channel. It runs on one loop only.

    Args:
        core: of the group; outlives the channel.
        channel: a connected one.
        timeouts: a beat without an answer within heartbeat_timeout_ms ends the channel.
        replica_id: for the log.
        arrived: receives the answer to the group's request.
    """

    def __init__(
        self,
        core: TorchftGroupCore,
        channel: grpc.aio.Channel,
        timeouts: Timeouts,
        *,
        replica_id: str,
        arrived: Callable[[events.QuorumArrived | events.RequestRefused], None],
    ) -> None:
        self._core = core
        self._timeouts = timeouts
        self._replica_id = replica_id
        self._arrived = arrived
        self._quorum = services.call_stub(channel, services.LIGHTHOUSE_QUORUM)
        self._heartbeat = services.call_stub(channel, services.LIGHTHOUSE_HEARTBEAT)
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._broken: asyncio.Future[None] = self._loop.create_future()

    async def hold(self, open_request: SendRequest | None, session: int) -> None:
        """Converse until the channel breaks.

        Args:
            open_request: the group's earlier request, or None.
            session: of its manager server.
        Raises: AioRpcError, ProtocolError: the channel has broken, or the answer is invalid.
        """
        beats = self._loop.create_task(self._beat())
        try:
            if open_request is not None:
                self.ask(open_request.request, open_request.member, open_request.held, session)
            self._perform(self._core.opened())
            await asyncio.wait([self._broken, beats], return_when=asyncio.FIRST_COMPLETED)
            (beats if beats.done() else self._broken).result()
        finally:
            self._core.closed()
            tasks = [beats, *self._calls.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._broken.done():
                self._broken.exception()  # marks the exception as retrieved
            else:
                self._broken.cancel()

    def ask(self, request: int, member: Member, held: QuorumKey | None, session: int) -> None:
        """Ask for the next quorum."""
        self._perform(self._core.ask(request, member, held, session, self._now_ms()))

    def withdraw(self, request: int) -> None:
        """Withdraw the request."""
        self._perform(self._core.withdraw(request))

    def _perform(self, effects: Sequence[TorchftEffect]) -> None:
        for effect in effects:
            match effect:
                case CallQuorum(call, member):
                    self._calls[call] = self._loop.create_task(self._ask(call, member))
                case CancelCall(call) if call in self._calls:
                    self._calls[call].cancel()
                case TellGroup(event):
                    self._arrived(event)
                case LeftOut(message):
                    logger.warning("replica %s: %s", self._replica_id, message)

    async def _ask(self, call: int, member: Member) -> None:
        try:
            answer = await self._quorum(codec.encode_lighthouse_request(member))
            self._perform(self._core.answered(call, codec.decode_lighthouse_response(answer)))
        except Exception as error:  # every error ends the channel, and is reported there
            if not self._broken.done():
                self._broken.set_exception(error)
        finally:
            self._calls.pop(call, None)

    async def _beat(self) -> None:
        request = codec.encode_heartbeat(self._replica_id)
        while True:
            now_ms = self._now_ms()
            if self._core.tick(now_ms):
                await self._heartbeat(request, timeout=self._timeouts.heartbeat_timeout_ms / 1000)
            else:
                await asyncio.sleep(max(self._core.next_beat_ms - now_ms, LOOK_AGAIN_MS) / 1000)

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)
