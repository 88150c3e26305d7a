"""One attempt to reach a server; callers make further attempts.

Law of this file: connecting, without a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from typing import Final, final

from tft_coord.errors import UnreachableError
from tft_coord.forks import Inheritance, let_go_in_child
from tft_coord.rpc import grpc
from tft_coord.timeouts import Timeouts
from tft_coord.tls import TLS
from tft_coord.transport.credentials import open_aio_channel
from tft_coord.transport.diagnosis import why_unreachable
from tft_coord.transport.names import AGAIN_AFTER_S, names
from tft_coord.transport.settings import channel_options

CANCEL_AGAIN_S: Final = 0.1
POLL_S: Final = 0.01


class DialTimeoutError(UnreachableError):
    """The time limit of one attempt passed without a connection; a longer attempt may succeed."""


async def dial(
    address: str,
    timeouts: Timeouts,
    tls: TLS | None = None,
    *,
    to_lighthouse: bool = False,
    within_ms: int | None = None,
) -> grpc.aio.Channel:
    """Return a new channel that is connected.

    Args:
        address: as `target` gives it.
        timeouts: of the job.
        tls: of the job, or None.
        to_lighthouse: a lighthouse has thousands of channels, so the pings on this one are rarer.
        within_ms: time limit of the attempt; None: heartbeat_timeout_ms.
    Raises: UnreachableError: the attempt failed; DialTimeoutError, if it timed out. ProtocolError: another kind of
        server answered, or one with other certificates. Nothing is left open.
    """
    within_ms = timeouts.heartbeat_timeout_ms if within_ms is None else within_ms
    options = channel_options(timeouts, to_lighthouse=to_lighthouse, within_ms=within_ms)
    channel = open_aio_channel(address, options, tls)
    _open_channels.add(channel, address)
    resolved = names.look_up(address)
    try:
        is_connected = await asyncio.wait_for(_connected(channel), within_ms / 1000)
        if not is_connected:
            raise await why_unreachable(address, tls)
        give_up_at = time.monotonic() + AGAIN_AFTER_S
        # grpc has resolved it already, so this wait is short
        while not resolved.is_set() and time.monotonic() < give_up_at:
            await asyncio.sleep(POLL_S)
    except BaseException as error:
        with contextlib.suppress(asyncio.CancelledError):
            await channel.close()
        if isinstance(error, asyncio.TimeoutError):
            raise DialTimeoutError(f"{address} did not answer within {within_ms} ms") from error
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


async def cancel_and_wait(task: asyncio.Task[None]) -> None:
    """Cancel a task that dials, and wait until it has ended.

    A cancellation can get lost while the channel of a failed dial closes, in `dial` above as in the code that it calls.
    The task would then dial for ever. This function therefore cancels it again until it has ended.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_AGAIN_S)


@final
class _OpenChannels:
    """The channels of this process, for its forked children."""

    def __init__(self) -> None:
        self._addresses: weakref.WeakKeyDictionary[grpc.aio.Channel, str] = weakref.WeakKeyDictionary()

    def add(self, channel: grpc.aio.Channel, address: str) -> None:
        self._addresses[channel] = address
        let_go_in_child(self)

    def forked(self) -> Inheritance:
        """Return what a forked child inherits; the connections belong to the parent."""
        addresses = dict(self._addresses)
        self._addresses.clear()
        places = {place for address in addresses.values() for place in names.places(address)}
        return Inheritance(places=places, kept=addresses)


_open_channels: Final = _OpenChannels()
