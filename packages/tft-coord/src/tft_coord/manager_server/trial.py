"""A newcomer's trial: whether this host reaches the ports that its peers have published.

A port that refuses a connection answers, so its host is reached: the server behind it may be down, which is not the
newcomer's trouble. A port that does not answer, or a name that is unknown, is not reached. What is no `host:port` can't
be tried, and says nothing.

Law of this file: connecting, nothing said; every wait has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from tft_coord.core.types import PeerAddresses, Unreached, Via
from tft_coord.errors import SettingError
from tft_coord.transport.address import host_of, target

DIAL_WITHIN_S: Final = 1.0
ALL_WITHIN_S: Final = 2.0


async def try_peers(peers: Sequence[PeerAddresses]) -> tuple[Unreached, ...]:
    """Dial each address of these members, all at once.

    Returns: the members of which an address did not answer, with the reason; after ALL_WITHIN_S at most.
    """
    dials = {
        asyncio.create_task(_why_unreached(address)): (peer.replica_id, address)
        for peer in peers
        for address in peer.addresses
    }
    if not dials:
        return ()
    try:
        await asyncio.wait(dials, timeout=ALL_WITHIN_S)
        found: dict[str, Unreached] = {}
        for dial, (replica_id, address) in dials.items():
            why = dial.result() if dial.done() else "no answer"
            if why:
                found.setdefault(replica_id, Unreached(replica_id, Via.GROUP, f"{address}: {why}"))
        return tuple(found.values())
    finally:
        for dial in dials:
            dial.cancel()


async def _why_unreached(address: str) -> str:
    """Say why nothing answers at an address; "" where something does."""
    try:
        bare = target(address)
    except SettingError:
        return ""
    port = int(bare.rpartition(":")[2])
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host_of(bare), port), DIAL_WITHIN_S)
    except ConnectionRefusedError:
        return ""
    except asyncio.TimeoutError:
        return f"no answer within {DIAL_WITHIN_S:.0f} s"
    except OSError as error:
        return str(error).replace("\n", " ")[:200]
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return ""
