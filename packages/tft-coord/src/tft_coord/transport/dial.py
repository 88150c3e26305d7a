"""One attempt to reach a server; whoever wants more attempts makes them.

Law of this file: connecting, nothing said.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import Final, final

from tft_coord.errors import Unreachable
from tft_coord.forks import Inheritance, let_go_in_child
from tft_coord.rpc import grpc
from tft_coord.timeouts import Timeouts
from tft_coord.transport.listener import why_unreachable
from tft_coord.transport.settings import channel_options

CANCEL_AGAIN_S: Final = 0.1


async def dial(address: str, timeouts: Timeouts, *, to_lighthouse: bool = False) -> grpc.aio.Channel:
    """A new channel that is connected.

    Args:
        address: as `target` gives it.
        timeouts: an attempt takes at most heartbeat_timeout_ms.
        to_lighthouse: which has thousands of channels, so that this one is pinged more seldom.
    Raises: Unreachable: the attempt failed. ProtocolError: another kind of server answers there. Nothing is left open.
    """
    channel = grpc.aio.insecure_channel(address, options=channel_options(timeouts, to_lighthouse=to_lighthouse))
    _dialed.add(channel, address)
    try:
        is_connected = await asyncio.wait_for(_connected(channel), timeouts.heartbeat_timeout_ms / 1000)
        if not is_connected:
            raise await why_unreachable(address)
    except BaseException as error:
        with contextlib.suppress(asyncio.CancelledError):
            await channel.close()
        if isinstance(error, asyncio.TimeoutError):
            raise Unreachable(f"{address} did not answer within {timeouts.heartbeat_timeout_ms} ms") from error
        raise
    return channel


async def _connected(channel: grpc.aio.Channel) -> bool:
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            return False
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)
    return True


async def cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task that dials, and wait until it has ended.

    A cancellation that comes while a channel of a failed dial is being closed gets lost, in `dial` above as in what it
    calls, and the task would dial on for ever: it is cancelled again until it has ended.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_AGAIN_S)


@final
class _Dialed:
    """The channels of this process, for its forked children."""

    def __init__(self) -> None:
        self._addresses: weakref.WeakKeyDictionary[grpc.aio.Channel, str] = weakref.WeakKeyDictionary()

    def add(self, channel: grpc.aio.Channel, address: str) -> None:
        self._addresses[channel] = address
        let_go_in_child(self)

    def forked(self) -> Inheritance:
        """In a child: the connections are the parent's."""
        addresses = dict(self._addresses)
        self._addresses.clear()
        return Inheritance(targets=addresses.values(), kept=addresses)


_dialed: Final = _Dialed()
