"""Connection checks of sources of live state, for a fetch that receives no byte for a while.

A source that is slow, or has not taken its state yet, still answers. A source behind a firewall, or with a host name
that means another machine, does not answer. A replica that heals only from such a source would wait for the whole
heal_timeout.

Law of this file: addresses in, silent sources out. `healing` decides the effect on a healing.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from tft_pg.calls import ProbeAddress, call_all


def silent_sources(addresses: Mapping[str, str], *, within_s: float, goes_on: Callable[[], bool]) -> dict[str, str]:
    """Call each source, and return those that do not answer.

    Args:
        addresses: by replica id: a URL, or `host:port`. An invalid address counts as a source that answers.
        within_s: a source that has not answered in this time does not answer.
        goes_on: called every few milliseconds. After it returns False, the result is empty.
    Returns: address and reason, in a few words, for each source that refuses, does not answer or has an unknown name.
    """
    found: dict[str, str] = {}
    places: dict[tuple[str, int], ProbeAddress] = {}
    for name, address in addresses.items():
        host, port = _host_and_port(address)
        if not host or not port:
            continue
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            found[name] = (
                f"{host} port {port}: the name can't be resolved ({getattr(error, 'strerror', None) or error})"
            )
            continue
        places |= {(name, at): ProbeAddress(family, sockaddr) for at, (family, _, _, _, sockaddr) in enumerate(infos)}
    silent = call_all(places, until_s=time.monotonic() + within_s, goes_on=goes_on)
    for name in {name for name, _ in places}:
        of_name = [silent.get(key) for key in places if key[0] == name]
        if all(of_name):  # one address that answers is enough
            found[name] = f"{places[name, 0]}: {of_name[0]}"
    return found if goes_on() else {}


def _host_and_port(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        return parts.hostname or "", parts.port or 0
    except ValueError:
        return "", 0
