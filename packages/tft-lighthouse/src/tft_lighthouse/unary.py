"""The unary calls of torchft's clients: beats, and requests that wait for a quorum.

Law of this file: calls to events, and decisions to answers. Which call gets which answer is the core's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import final

from tft_coord import ProtocolError, RefusedError
from tft_coord.lighthouse import Context, Quorum, Refusal, codec, effects, events, fail, grpc
from tft_lighthouse.encoders import Encoders
from tft_lighthouse.operations import Operations


@final
class UnaryCalls:
    """The calls of one lighthouse. It runs on one loop only.

    Args:
        operations: says whether this lighthouse may answer.
        handle: gives an event to the cores.
        encode: the encoders of the lighthouse.
        number: returns the number of a new call.
        full: returns why no further call may wait, and counts that as a refusal; None: there is room.
        check_job: ends a call whose secret does not open the job of torchft's clients.
    """

    def __init__(
        self,
        operations: Operations,
        *,
        handle: Callable[[events.UnaryEvent], None],
        encode: Encoders,
        number: Callable[[], int],
        full: Callable[[], effects.RefuseUnary | None],
        check_job: Callable[[Context], Awaitable[None]],
    ) -> None:
        self._operations = operations
        self._handle = handle
        self._encode = encode
        self._number = number
        self._full = full
        self._check_job = check_job
        self._calls: dict[int, asyncio.Future[Quorum | effects.RefuseUnary | None]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def answer(self, call: int, answer: Quorum | effects.RefuseUnary | None) -> None:
        """Answer a call that waits; None: this lighthouse ends, or leads no more."""
        waiting = self._calls.get(call)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def end_all(self) -> None:
        """Answer all calls that wait: this lighthouse ends, or leads no more."""
        for call in list(self._calls):
            self.answer(call, None)

    async def heartbeat(self, request: bytes, context: Context) -> bytes:
        """Take the beat of a replica."""
        await self._check_job(context)
        await check_leads(self._operations, context)
        try:
            replica_id = codec.decode_heartbeat(request)
        except ProtocolError as error:
            await fail(context, Refusal.MALFORMED.value, str(error))
        self._handle(events.HeartbeatReceived(replica_id))
        return b""

    async def quorum(self, request: bytes, context: Context) -> bytes:
        """Answer with the next quorum."""
        await self._check_job(context)
        await check_leads(self._operations, context)
        try:
            member = codec.decode_lighthouse_request(request)
        except ProtocolError as error:
            await fail(context, Refusal.MALFORMED.value, str(error))
        full = self._full()
        if full is not None:
            await fail(context, full.refusal.value, full.message)
        call = self._number()
        waiting = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._handle(events.UnaryQuorumRequested(call, member))
            answer = await waiting
        except asyncio.CancelledError:
            # The caller disconnected or its deadline passed: it is no member of later quorums.
            self._handle(events.UnaryRequestWithdrawn(call))
            raise
        finally:
            del self._calls[call]
        await check_leads(self._operations, context)
        if isinstance(answer, Quorum):
            return self._encode.response(answer)
        if answer is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the lighthouse was shut down")
        return await fail(context, answer.refusal.value, answer.message)


async def check_leads(operations: Operations, context: Context) -> None:
    """End a call that only a leader answers, if this lighthouse does not lead."""
    try:
        operations.check_leads()
    except RefusedError as error:
        await fail(context, error.code, str(error.args[0]))
