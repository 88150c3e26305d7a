"""Store addresses, and store clients that another thread can disconnect.

A group's members find each other through a key-value store, torch's TCPStore, under a prefix of their own. The address
of both is written `host:port/prefix`. A plain TCPStore client blocks forever if the store's process is stopped, despite
its timeout (torch 2.13). So the client here knows its own connection, and another thread can shut that connection down.

Law of this file: stores only; no process group.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar, final

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tft_pg import sockets
from tft_pg.calls import AGAIN_AFTER_S
from tft_pg.errors import ProcessGroupError, StoreAddressError, StoreUnreachableError
from tft_pg.forks import Inheritance, let_go_in_child
from tft_pg.sockets import Endpoint

__all__ = ["StoreAddress", "StoreClient", "create_store_client", "format_store_addr", "parse_store_addr"]

_RETRY_S = 0.05
# The time limit of the first connection attempt, and the longest limit. Each limit is twice the previous one. With a
# slow resolver a connection takes seconds, because the store looks up the name of each client that it accepts.
_TRY_S = 1.0
_TRY_S_MAX = 8.0
# A key with a random length in this range is distinguishable from the requests of other clients. Torch's store refuses
# keys of more than 8192 bytes.
_MARK_BYTES = (2048, 8000)
_MARK_SLACK_BYTES = 64
# A running store answers a new client within this time.
_SILENT_S = 0.1
_GIVE_UP_S = 0.5
_MOMENT_S = 0.01
# A running store on the same continent accepts a connection within this time.
_SOON_S = 0.2

_T = TypeVar("_T")
_Place = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]


@dataclass(frozen=True)
class StoreAddress:
    """The host, port and prefix of a store.

    Args:
        host: name or numeric address, IPv6 without brackets.
        port: 1 to 65535.
        prefix: added before every key; may contain slashes; empty for none.
    """

    host: str
    port: int
    prefix: str = ""

    def __post_init__(self) -> None:
        if not self.host or any(char.isspace() or char in "/[]" for char in self.host):
            raise StoreAddressError(f"{self.host!r} is not a valid store host", address=self.host)
        if not 1 <= self.port <= 65535:
            raise StoreAddressError(f"the store port {self.port} is not between 1 and 65535", address=str(self.port))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}/{self.prefix}" if self.prefix else f"{host}:{self.port}"


def format_store_addr(host: str, port: int, prefix: str = "") -> str:
    """Return `host:port/prefix`, with brackets around an IPv6 address.

    Raises: StoreAddressError: the host or the port is invalid.
    """
    return str(StoreAddress(host, port, prefix))


def parse_store_addr(store_addr: str) -> StoreAddress:
    """Parse `host:port/prefix`, `[v6]:port/prefix` or `v6:port/prefix`. The prefix is optional.

    In the last form the last colon always separates the port. An IPv6 address without a port is then an error, or is
    read as a shorter address with a port. Write brackets.

    Raises: StoreAddressError: the text has none of these forms. The message names the wrong part.
    """

    def wrong(why: str) -> StoreAddressError:
        return StoreAddressError(
            f"{store_addr!r} is not a store address: {why}; write host:port/prefix or [v6]:port/prefix",
            address=store_addr,
        )

    if not isinstance(store_addr, str):
        raise wrong("it is not a string")
    if "://" in store_addr:
        raise wrong("it has a scheme")
    place, _, prefix = store_addr.partition("/")
    if place.startswith("["):
        host, bracket, rest = place[1:].partition("]")
        if not bracket or not rest.startswith(":"):
            raise wrong("the brackets must be followed by :port")
        port = rest[1:]
    else:
        host, colon, port = place.rpartition(":")
        if not colon:
            raise wrong("it has no port")
    if not host:
        raise wrong("it has no host")
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise wrong(f"{host!r} is not an IPv6 address") from None
    if not (port.isascii() and port.isdigit()):
        raise wrong(f"{port!r} is not a port")
    try:
        return StoreAddress(host, int(port), prefix)
    except StoreAddressError as error:
        raise wrong(str(error)) from None


def create_store_client(store_addr: str, timeout: timedelta = timedelta(seconds=60)) -> Store:
    """Connect to a running store.

    Args:
        store_addr: `host:port/prefix`.
        timeout: for the connection, and for each later operation on the store.

    Returns: the store under the prefix, or the bare store if there is no prefix.
    Raises: StoreAddressError: the address is invalid. StoreUnreachableError: the store did not answer in time.
    """
    address = parse_store_addr(store_addr)
    client = StoreClient(address.host, address.port)
    deadline_s = time.monotonic() + timeout.total_seconds()

    def keep_trying() -> None:
        # A store that accepts a connection and never answers keeps torch's client for ever.
        if time.monotonic() > deadline_s:
            raise client.silent()

    client.connect(timeout, keep_trying=keep_trying)
    return client.under(address.prefix)


@final
class StoreClient:
    """One connection to one store, which any thread may disconnect.

    Args:
        host: of the store.
        port: of the store.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._store: Store | None = None
        self._opening: _BackgroundCall[Store] | None = None
        self._remote: frozenset[Endpoint] = frozenset()
        self._lock = threading.Lock()
        self._before: frozenset[int] = frozenset()
        self._own: frozenset[int] = frozenset()
        self._silent_since_s: dict[int, float] = {}
        let_go_in_child(self)

    def forked(self) -> Inheritance:
        """Release the parent's connection in a forked child."""
        self._lock = threading.Lock()
        own = self._own
        if not own and self._remote:
            # While torch connects, the connection's identity is unknown. Take every connection that is new since then.
            sockets.wait_until_connected()
            own = (sockets.connecting(remote=self._remote) | sockets.connected(remote=self._remote)) - self._before
        return Inheritance(inodes=own, kept=() if self._store is None else [self._store])

    def connect(self, timeout: timedelta, *, keep_trying: Callable[[], None], refusal_counts: bool = False) -> None:
        """Connect, and block until the store has answered.

        Args:
            timeout: the time limit, which also becomes the store's own timeout.
            keep_trying: called about every 50 ms while the client waits. An exception from it ends the attempt.
            refusal_counts: True if the store is known to have run, so two refused connections mean that it is gone.
                False if the store may still start, so the client waits for it.

        Raises: StoreUnreachableError: the time is up, the host has no address, or the connection is refused and
            refusals count.
        """
        deadline_s = time.monotonic() + timeout.total_seconds()
        addresses = self._look_up(deadline_s, keep_trying)
        if refusal_counts:
            keep_trying = _RefusalCheck(self, addresses, keep_trying)
        while True:
            with self._lock:
                self._before = sockets.connected(remote=self._remote)
                self._silent_since_s = {}
            self._store = store = self._open(addresses, deadline_s, keep_trying)
            own = self._identify(store)
            with self._lock:
                self._own = own
            if own:
                break
            keep_trying()
            if time.monotonic() > deadline_s:
                raise self.unreachable("its connection can't be distinguished from others to the same store")
        store.set_timeout(timeout)

    def _identify(self, store: Store) -> frozenset[int]:
        """Return the inode of this store's connection, or an empty set if it can't be determined.

        A single new connection is the store's. If other clients connect to the same store at the same time, a request
        with a unique length shows which connection carried it.
        """
        fresh = sockets.connected(remote=self._remote) - self._before
        if len(fresh) == 1:
            return fresh
        mark_bytes = random.randint(*_MARK_BYTES)
        before = sockets.traffic(fresh)
        try:
            store.check(["x" * mark_bytes])
        except RuntimeError:
            return frozenset()
        after = sockets.traffic(before)
        grown = {inode: after[inode].acknowledged - before[inode].acknowledged for inode in after}
        own = frozenset(inode for inode, grew in grown.items() if 0 <= grew - mark_bytes <= _MARK_SLACK_BYTES)
        return own if len(own) == 1 else frozenset()

    def _open(self, addresses: Sequence[_Place], deadline_s: float, keep_trying: Callable[[], None]) -> Store:
        """Open a client of torch, and wait for a listener between attempts, because torch's client is noisy and can't
        be interrupted.

        Torch's client goes first even so. The store's server pauses for a name look-up at each connection that it
        accepts, so an extra connection is expensive.
        """
        try_s = _TRY_S
        # The name is resolved once, because torch would resolve it again in each attempt. For a name with several
        # addresses, torch gets one address once the answering address is known.
        host = self.host if len(addresses) > 1 else str(addresses[0][4][0])
        while True:
            limit_s = min(deadline_s - time.monotonic(), try_s)
            try_s = min(2 * try_s, _TRY_S_MAX)
            timeout = timedelta(seconds=max(limit_s, 0.001))
            # If the store dies while torch's client connects, the client retries for seconds.
            connect = partial(TCPStore, host, self.port, is_master=False, wait_for_workers=False, timeout=timeout)
            self._opening = _BackgroundCall(connect, "tft-pg-connect")
            try:
                return self._opening.result(keep_trying)
            except ProcessGroupError:
                self._give_up()
                raise
            except RuntimeError as error:
                keep_trying()
                if time.monotonic() >= deadline_s:
                    raise self.silent() from error
            host = self._wait_for_listener(addresses, deadline_s, keep_trying)

    @property
    def connecting(self) -> bool:
        """Return whether torch still tries to connect, even after the caller has given up."""
        return self._opening is not None and self._opening.runs

    def settle(self) -> None:
        """End an abandoned connection attempt and wait for its thread."""
        while self.connecting:
            self._sever_and_wait(_RETRY_S)

    def _give_up(self) -> None:
        """Abandon torch's connection attempt, and shut its connection down. Between two tries torch's attempt
        ends by itself.
        """
        give_up_s = time.monotonic() + _GIVE_UP_S
        while self.connecting and time.monotonic() < give_up_s:
            if not sockets.connected(remote=self._remote) - self._before:
                return
            self._sever_and_wait(_MOMENT_S)

    def _sever_and_wait(self, wait_s: float) -> None:
        self.sever()
        if self._opening is not None:
            self._opening.join(wait_s)

    def alive(self) -> bool:
        """Return whether the store still answers. A connection does not outlive its server."""
        assert self._store is not None
        try:
            self._store.check(["tft-pg/alive"])
        except RuntimeError:
            return False
        return True

    def under(self, prefix: str) -> Store:
        """Return the store as seen under a prefix."""
        assert self._store is not None
        return PrefixStore(prefix, self._store) if prefix else self._store

    def sever(self) -> None:
        """Shut down this connection, so that every wait on it ends. The client is unusable afterwards.

        Repeat the call while a wait continues. While torch is still connecting, the connection's identity is unknown.
        Then the call shuts down the new connections to this store that have been silent for longer than a running
        store's.
        """
        with self._lock:
            sockets.shut_down(self._own or self._silent())

    def _silent(self) -> frozenset[int]:
        now_s = time.monotonic()
        fresh = sockets.connected(remote=self._remote) - self._before
        silent = {inode for inode, passed in sockets.traffic(fresh).items() if not passed.received}
        self._silent_since_s = {inode: self._silent_since_s.get(inode, now_s) for inode in silent}
        return frozenset(inode for inode, since_s in self._silent_since_s.items() if now_s - since_s > _SILENT_S)

    def silent(self) -> StoreUnreachableError:
        """Return the error for a store that does not answer a request or a connection."""
        if self._own:
            return self.unreachable("it does not answer any more; check whether its process is stopped")
        if self.has_connection:
            return self.unreachable("it accepts connections but does not answer; check whether its process is stopped")
        return self.unreachable("no answer to a connection")

    def unreachable(self, why: str) -> StoreUnreachableError:
        """Return the error for an unusable store."""
        return StoreUnreachableError(
            f"the store at {StoreAddress(self.host, self.port)} did not answer ({why}); ask for a new quorum",
            host=self.host,
            port=self.port,
            why=why,
        )

    @property
    def has_connection(self) -> bool:
        """Return whether this client has an established connection to the store's address, with or without traffic."""
        return bool(sockets.connected(remote=self._remote) - self._before)

    @property
    def has_pending_connection(self) -> bool:
        """Return whether a connection to the store's address is neither established nor refused yet."""
        return bool(sockets.connecting(remote=self._remote))

    def _look_up(self, deadline_s: float, keep_trying: Callable[[], None]) -> Sequence[_Place]:
        addresses: Sequence[_Place]
        try:
            addresses = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except OSError:
            addresses = self._resolve(deadline_s, keep_trying)
        self._remote = frozenset(Endpoint.of(sockaddr) for *_, sockaddr in addresses)
        return addresses

    def _resolve(self, deadline_s: float, keep_trying: Callable[[], None]) -> Sequence[_Place]:
        """Resolve the name on a separate thread, because a resolver call can't be interrupted for many seconds."""
        lookup = _BackgroundCall(
            lambda: socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM), "tft-pg-resolve"
        )
        try:
            while not lookup.wait(_RETRY_S):
                keep_trying()
                if time.monotonic() > deadline_s:
                    raise self.unreachable(f"its name {self.host} was not resolved in time")
            return lookup.answer()
        except (OSError, UnicodeError) as error:
            why = f"its name {self.host} can't be resolved: {getattr(error, 'strerror', None) or error}"
            raise self.unreachable(why) from error

    def _wait_for_listener(
        self, addresses: Sequence[_Place], deadline_s: float, keep_trying: Callable[[], None]
    ) -> str:
        """Wait in short, interruptible steps until the store listens. Returns: the numeric address that answers."""
        while True:
            why = "refused"
            share_s = (deadline_s - time.monotonic()) / len(addresses)
            for family, kind, protocol, _, sockaddr in addresses:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setblocking(False)
                    why = _connect_in_steps(probe, sockaddr, time.monotonic() + share_s, keep_trying)
                if not why:
                    return str(sockaddr[0])
            keep_trying()
            if time.monotonic() + _RETRY_S > deadline_s:
                raise self.unreachable(why)
            time.sleep(_RETRY_S)


@final
class _BackgroundCall(Generic[_T]):
    """A call that can't be interrupted, on a separate thread.

    Args:
        ask: the call.
        name: of the thread.
    """

    def __init__(self, ask: Callable[[], _T], name: str) -> None:
        self._ask = ask
        self._answers: list[_T] = []
        self._error: Exception | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answers.append(self._ask())
        except Exception as error:
            self._error = error
        self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the call. Returns: whether the call has returned or raised."""
        return self._done.wait(timeout_s)

    def answer(self) -> _T:
        """Return the result of the call, once, after its end. Raises: the error of the call."""
        error, self._error = self._error, None
        if error is None:
            return self._answers.pop()
        try:
            raise error
        finally:
            # The error holds the frames of its callers, and so the client with its connection. Without this line, this
            # frame and the error would hold each other, and the connection would stay open until a garbage collection.
            del error

    def result(self, keep_trying: Callable[[], None]) -> _T:
        """Wait for the call, and return its result. Raises: its error, or that of `keep_trying`, called every 50 ms."""
        while not self.wait(_RETRY_S):
            keep_trying()
        return self.answer()

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)


@final
class _RefusalCheck:
    """A `keep_trying` callback that also ends the attempt if the store refuses connections.

    Torch's client does not report refused connections. If it has no connection and no pending one, this class probes
    the address. Two refusals end the attempt. It never probes beside an existing connection, because the store's server
    pauses for a name look-up at each connection that it accepts.
    """

    def __init__(self, client: StoreClient, addresses: Sequence[_Place], keep_trying: Callable[[], None]) -> None:
        self._client = client
        self._places = addresses
        self._keep_trying = keep_trying
        self._due_s = time.monotonic() + _SOON_S
        self._refused = False

    def __call__(self) -> None:
        self._keep_trying()
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + AGAIN_AFTER_S
        if self._client.has_connection or self._client.has_pending_connection:
            self._refused = False
            return
        why = [_refusal(place) for place in self._places]
        if not all(why):
            self._refused = False
        elif self._refused:
            raise self._client.unreachable(why[0])
        else:
            self._refused = True


def _refusal(place: _Place) -> str:
    """Probe an address once. Returns: why it refuses, or an empty string if it accepts or does not answer."""
    family, kind, protocol, _, sockaddr = place
    with socket.socket(family, kind, protocol) as caller:
        caller.settimeout(_RETRY_S)
        error = caller.connect_ex(sockaddr)
    return "" if error in (0, errno.EAGAIN, errno.EINPROGRESS) else os.strerror(error).lower()


def _connect_in_steps(probe: socket.socket, sockaddr: Any, deadline_s: float, keep_trying: Callable[[], None]) -> str:
    """Connect a non-blocking socket. Returns: why that failed, or an empty string."""
    probe.connect_ex(sockaddr)
    poll = select.poll()
    poll.register(probe, select.POLLOUT)
    while not poll.poll(_RETRY_S * 1000):
        keep_trying()
        if time.monotonic() > deadline_s:
            return "no answer to a connection"
    error = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return os.strerror(error) if error else ""
