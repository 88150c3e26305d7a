"""The connections between the ranks of a group whose library reports too little, made before the library connects.

Law of this file: one rendezvous and the connections that follow from it; no library.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]

from tft_pg.backends.addresses import address_towards
from tft_pg.backends.attempt import Attempt
from tft_pg.backends.examination import Examination
from tft_pg.backends.lifeline import Lifeline
from tft_pg.backends.patience import Phase
from tft_pg.backends.rendezvous import meet
from tft_pg.errors import ConfigureError

__all__ = ["connect_peers", "own_address"]


def connect_peers(store: Store, attempt: Attempt, lifeline: Lifeline, *, silent: Callable[[], ConfigureError]) -> None:
    """Find the other ranks, and connect the lifeline.

    Args:
        store: under this configure's prefix.
        attempt: has the rank and the size, and bounds the waits.
        lifeline: of this rank, not connected yet.
        silent: returns the error if the store does not answer any more.

    Raises: ConfigureError: it names the missing or unreachable ranks. The attempt's own error, if it was stopped.
    """
    records = meet(store, attempt, lifeline.record(), silent=silent)
    examination = Examination(store, attempt, lifeline.unconnected)
    attempt.enter(Phase.CONNECTIONS, late=examination.late, examine=examination.run)
    try:
        lifeline.connect(records, attempt)
    except ConfigureError as failure:
        raise examination.after(failure) from failure


def own_address(hostname: str | None, store_host: str, store_port: int, world_size: int) -> str:
    """Return this machine's numeric address for the other ranks; empty in a group of one.

    Args:
        hostname: the user's choice; None: the address on the route to the store.
        store_host, store_port: of the rendezvous.
        world_size: of the group.

    Raises: ConfigureError: this machine has no reachable address, or its hostname has no address.
    """
    if world_size == 1:
        return ""
    try:
        if hostname:
            return str(socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)[0][4][0])
        return address_towards(store_host, store_port)
    except (OSError, UnicodeError) as error:  # a name that can't be encoded
        fault = f"the hostname {hostname!r} has no address" if hostname else "this machine has no reachable address"
        advice = "another hostname" if hostname else "a hostname"
        raise ConfigureError(f"{fault} ({error}); pass {advice} to the group", is_own=True) from error
