"""The addresses behind the names of servers, by which a forked child recognizes this process's connections.

grpc resolves a name itself and does not show the result. This process therefore resolves each name too, on a thread
beside grpc, because a resolver may be slow. All results are kept: a connection may be older than the last look-up.

Law of this file: names are resolved and remembered; nothing is connected.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from ipaddress import ip_address
from typing import Final, final

from tft_coord.transport.address import host_of

AGAIN_AFTER_S: Final = 1.0
LOOPBACK: Final = frozenset({"127.0.0.1", "::1"})


@final
class Names:
    """The addresses that the names of servers have resolved to in this process."""

    def __init__(self) -> None:
        self._addresses: dict[str, frozenset[str]] = {}
        # In a forked child the thread of a look-up is missing, so the child's look-ups have other keys.
        self._running: dict[tuple[int, str], threading.Event] = {}
        self._ended_s: dict[str, float] = {}

    def look_up(self, target: str) -> threading.Event:
        """Resolve the host of `host:port` in the background, at most once a second.

        Returns: an event that is set when the look-up is done; at once if the host is an address.
        """
        host = host_of(target)
        done = threading.Event()
        running = self._running.setdefault((os.getpid(), host), done)
        if running is not done:
            return running
        is_new = time.monotonic() - self._ended_s.get(host, -AGAIN_AFTER_S) >= AGAIN_AFTER_S
        if _numeric(host) is None and is_new:
            with suppress(RuntimeError):  # no more threads: a child can't release an unresolved connection
                threading.Thread(target=self._resolve, args=(host, done), name="tft-names", daemon=True).start()
                return done
        del self._running[os.getpid(), host]
        done.set()
        return done

    def places(self, target: str) -> set[tuple[str, int]]:
        """Return the address and port of each place that `host:port` has meant so far."""
        host, port = host_of(target), int(target.rpartition(":")[2])
        address = _numeric(host)
        return {(each, port) for each in ([address] if address is not None else self._addresses.get(host, ()))}

    def _resolve(self, host: str, done: threading.Event) -> None:
        try:
            with suppress(OSError, UnicodeError):
                infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
                found = {canonical(str(info[4][0])) for info in infos}
                if any(ip_address(address).is_loopback for address in found):
                    found |= LOOPBACK  # grpc's own resolver may prefer the one that this one leaves out
                self._addresses[host] = self._addresses.get(host, frozenset()) | found
        finally:
            self._ended_s[host] = time.monotonic()
            del self._running[os.getpid(), host]
            done.set()


def canonical(address: str) -> str:
    """Return an address in the form for comparisons with a socket's end: without a scope, IPv4 as IPv4."""
    return address.partition("%")[0].removeprefix("::ffff:")


def _numeric(host: str) -> str | None:
    try:
        return canonical(str(ip_address(canonical(host))))
    except ValueError:
        return None


names: Final = Names()
