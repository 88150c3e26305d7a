"""A group rank's stream to its manager server: as long as it stands, the rank lives.

The stream says little: who we are, how many bytes of live state have come in, and goodbye. That it stands is what
counts, and grpc's own threads see to that, however long this process holds the interpreter lock.

Law of this file: one stream, kept up on the process's loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import suppress
from typing import final

import grpc.aio

from tft_coord.core.effects import RefuseSession, Welcome
from tft_coord.errors import CoordinationError, ProtocolError, Refused, Unreachable
from tft_coord.security import call_metadata
from tft_coord.timeouts import Timeouts
from tft_coord.transport.dial import dial
from tft_coord.transport.loop import LoopShare
from tft_coord.transport.outbox import Outbox
from tft_coord.transport.settings import error_of
from tft_coord.wire import codec, services

logger = logging.getLogger(__name__)

GOODBYE_WITHIN_S = 0.2


@final
class RankSession:
    """The stream of one group rank.

    Args:
        address: of the manager server, `host:port`.
        group_rank: who we are.
        token: shared secret of the job, or None.
        timeouts: of the job.
        connect_within_s: how long the constructor waits until the manager server knows this rank.
    Raises: Refused: the group has no such rank. Unreachable: the manager server did not answer.
    """

    def __init__(
        self, address: str, *, group_rank: int, token: str | None, timeouts: Timeouts, connect_within_s: float
    ) -> None:
        self._address = address
        self._group_rank = group_rank
        self._metadata = call_metadata(token)
        self._timeouts = timeouts
        self._session = time.time_ns()
        self._what = f"the stream of rank {group_rank} to its manager server at {address}"
        self.healed_bytes = 0
        self._outbox: Outbox | None = None
        self._share = LoopShare(self._what)
        try:
            self._task = self._share.run(self._start(connect_within_s))
        except BaseException:
            self._share.give_back()
            raise

    def close(self) -> None:
        """Say goodbye and end."""
        if self._share.inherited:
            return
        self._share.run(self._end())
        self._share.give_back()

    async def _start(self, within_s: float) -> asyncio.Task[None]:
        known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._keep(known))
        await asyncio.wait([known, task], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if known.done():
            return task
        if task.done():
            task.result()
        task.cancel()
        await asyncio.wait([task])
        raise Unreachable(f"{self._what} was not taken within {within_s:g} s; check the address, or raise the time-out")

    async def _end(self) -> None:
        if self._outbox is not None:
            self._outbox.put(codec.encode_from_rank(codec.RankGoodbye()))
            self._outbox.close()
            # The manager server ends its side when ours is closed: then it has heard the goodbye.
            await asyncio.wait([self._task], timeout=GOODBYE_WITHIN_S)
        self._task.cancel()
        with suppress(asyncio.CancelledError, CoordinationError):
            await self._task

    async def _keep(self, known: asyncio.Future[None]) -> None:
        """Dial again whenever the stream breaks, soon at first, then more slowly. Ends by goodbye or refusal."""
        broken_at = time.monotonic()
        while True:
            try:
                channel = await dial(self._address, self._timeouts)
                try:
                    await self._converse(channel, known)
                finally:
                    await channel.close()
                return
            except (grpc.aio.AioRpcError, Unreachable) as failure:
                error = error_of(failure, self._what) if isinstance(failure, grpc.aio.AioRpcError) else failure
                if not isinstance(error, Unreachable):
                    raise error from failure
                if self._outbox is not None:
                    logger.info("%s broke: %s", self._what, error)
                    broken_at = time.monotonic()
            finally:
                self._outbox = None
            fast = time.monotonic() - broken_at < self._timeouts.redial_fast_for_ms / 1000
            await asyncio.sleep(random.uniform(0.05, 0.1) if fast else random.uniform(0.1, 0.25))

    async def _converse(self, channel: grpc.aio.Channel, known: asyncio.Future[None]) -> None:
        """The life of one stream. Returns when it was ended by goodbye; a break raises."""
        call = services.stream_stub(channel, services.MANAGER_SESSION)(metadata=self._metadata)
        outbox = self._outbox = Outbox()
        outbox.put(codec.encode_from_rank(codec.RankHello(self._group_rank, self._session)))
        helpers = [asyncio.create_task(self._write(call, outbox)), asyncio.create_task(self._beat(outbox))]
        try:
            while isinstance(message := await call.read(), bytes):
                match codec.decode_to_rank(message):
                    case Welcome():
                        if not known.done():
                            known.set_result(None)
                    case RefuseSession(_, refusal, sentence):
                        raise Refused(sentence, code=refusal.value)
            if not outbox.closed:
                raise Unreachable("the manager server ended the stream")
        except ProtocolError as error:
            raise Unreachable(str(error)) from error
        finally:
            for helper in helpers:
                helper.cancel()
            call.cancel()
            await asyncio.wait(helpers)

    async def _write(self, call: grpc.aio.StreamStreamCall[bytes, bytes], outbox: Outbox) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader learns of the same end
            await outbox.write_all(call.write)
            await call.done_writing()

    async def _beat(self, outbox: Outbox) -> None:
        """Tell how much live state has come in, when there is something to tell."""
        told = 0
        while True:
            await asyncio.sleep(self._timeouts.beat_interval_ms / 1000)
            if self.healed_bytes > told:
                told = self.healed_bytes
                outbox.put(codec.encode_from_rank(codec.RankBeat(told)))
