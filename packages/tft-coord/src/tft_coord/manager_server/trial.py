"""A newcomer's trial: whether this host reaches the published ports of its peers.

A port that refuses a connection answers, so its host is reached: the server behind it may be down, which is not the
newcomer's fault. A port that does not answer, or an unknown name, is unreachable. An address that is no `host:port`, or
whose look-up takes too long, can't be tried, and proves nothing.

Law of this file: connecting, without a message; every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from tft_coord.core.types import PeerAddresses, Unreached, Via
from tft_coord.errors import ConfigError
from tft_coord.transport.address import host_of, target

LOOK_UP_WITHIN_S: Final = 1.4
DIAL_WITHIN_S: Final = 2.5  # includes a second for a lost packet, which is sent again after that
ALL_WITHIN_S: Final = 4.0

_SocketAddress: TypeAlias = tuple[socket.AddressFamily, tuple[Any, ...]]


async def try_peers(peers: Sequence[PeerAddresses]) -> tuple[Unreached, ...]:
    """Dial each address of these members, all at once.

    Returns: the members of which an address did not answer, with the reason; after ALL_WITHIN_S at most.
    """
    split = [(peer.replica_id, address, _split(address)) for peer in peers for address in peer.addresses]
    known = [(replica_id, address, *parts) for replica_id, address, parts in split if parts is not None]
    if not known:
        return ()
    # Each name is looked up once: a resolver has few threads, and the members of one host share its name.
    look_ups = {host: asyncio.create_task(_look_up(host)) for host in {host for _, _, host, _ in known}}
    dials = {
        asyncio.create_task(_why_unreached(look_ups[host], port)): (replica_id, address)
        for replica_id, address, host, port in known
    }
    try:
        await asyncio.wait(dials, timeout=ALL_WITHIN_S)
        unreached: dict[str, Unreached] = {}
        for dial, (replica_id, address) in dials.items():
            why = dial.result() if dial.done() else "no answer"
            if why:
                unreached.setdefault(replica_id, Unreached(replica_id, Via.GROUP, f"{address}: {why}"))
        return tuple(unreached.values())
    finally:
        for task in (*dials, *look_ups.values()):
            task.cancel()


def _split(address: str) -> tuple[str, int] | None:
    try:
        bare = target(address)
    except ConfigError:
        return None
    return host_of(bare), int(bare.rpartition(":")[2])


async def _look_up(host: str) -> list[_SocketAddress] | str:
    """Return the addresses of a name, or why it has none; [] if the look-up takes too long."""
    try:
        infos = await asyncio.wait_for(
            asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM), LOOK_UP_WITHIN_S
        )
    except asyncio.TimeoutError:
        return []
    except (OSError, UnicodeError) as error:
        return _reason(error)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in infos))


async def _why_unreached(look_up: asyncio.Task[list[_SocketAddress] | str], port: int) -> str:
    """Return why no server answers at a port; "" if one does, or if the port can't be tried."""
    found = await look_up
    if isinstance(found, str):
        return found
    calls = [asyncio.create_task(_dial(family, (address[0], port, *address[2:]))) for family, address in found]
    try:
        left: set[asyncio.Task[str | None]] = set(calls)
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            if any(call.result() is None for call in done):
                return ""
        # If one of several addresses refuses and another is silent, the server is at the silent one.
        return next((why for call in calls if (why := call.result())), "")
    finally:
        for call in calls:
            call.cancel()


async def _dial(family: socket.AddressFamily, address: tuple[Any, ...]) -> str | None:
    """Return why no server answers at one address; "" if it refuses the connection, None if a server listens there."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as caller:
            caller.setblocking(False)
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(caller, address), DIAL_WITHIN_S)
    except ConnectionRefusedError:
        return ""
    except asyncio.TimeoutError:
        return f"no answer within {DIAL_WITHIN_S:g} s"
    except OSError as error:
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).replace("\n", " ")[:200]
