"""The replica group's store: where its ranks find each other, and a restarted group finds its predecessor.

Under torchrun the agent owns the store, which outlives the processes. So the keys of one start of the group must not be
mixed up with those of the next start. A restart count does not separate all starts: torchrun does not raise it when its
members change, and other launchers have none. So each rank asks with a fresh word, and only a rank 0 of the same start
answers. The answer is the replica id of this start, which prefixes the other keys.

One key belongs to all starts: the id of the previous replica, which the new one replaces. Ranks with contradicting
settings are detected here, before one of them waits for another that never comes.

Law of this file: opening the store, and the keys in it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
import uuid
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, final

from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore  # type: ignore[attr-defined]

from tft_algos.errors import ConfigError
from tft_algos.manager.config import ResolvedConfig
from tft_coord.errors import RequestTimeoutError, UnreachableError
from tft_pg.errors import ProcessGroupError
from tft_pg.forks import Inheritance, let_go_in_child
from tft_pg.store import StoreClient
from tft_pg.threads import join_within

ASKS_KEY = "asks"  # the number of asks; each has its word in a key below
ANSWER_KEY = "answer"
REPLICA_ID_KEY = "replica_id"
WORLD_SIZE_KEY = "world_size"
HOLDER_KEY = "holder_of_rank"
GATHER_KEY = "gathered"

RETRY_S = 0.1
BACKLOG: Final = 1024  # a whole job may connect to one store at once
_PROC: Final = "/proc"
_ENDED: Final = (b"Z", b"X", b"x")  # states of a process that has ended and was not reaped by its parent
# Documentation addresses, which belong to no machine.
_OUTSIDE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


@dataclass(frozen=True, slots=True)
class GroupStore:
    """An open store of the replica group.

    Args:
        store: torch's store.
        address: `host:port` by which other replicas reach it.
        run_scope, group_scope: as in ResolvedConfig.
    """

    store: Store
    address: str
    run_scope: str
    group_scope: str
    _answered: set[int] = field(default_factory=set, repr=False)  # numbers of the answered asks
    _given: list[str] = field(default_factory=list, repr=False)  # the keys of the last exchanges, at most two

    def publish_id(self, replica_id: str) -> None:
        """Publish the replica id for later starts. Group rank 0 calls this."""
        self.store.set(f"{self.group_scope}/{REPLICA_ID_KEY}", replica_id)

    def forget_id(self) -> None:
        """Publish that later starts have no predecessor. Group rank 0 calls this when its training is over."""
        with suppress(DistStoreError, DistNetworkError):  # the store may have ended with the launcher
            self.store.set(f"{self.group_scope}/{REPLICA_ID_KEY}", "")

    def ask(self, rank: int, timeout: timedelta) -> tuple[str, str]:
        """Ask group rank 0 of this start for (replica id, address of the manager server).

        Raises: RequestTimeoutError: rank 0 has not answered in time.
        """
        word, asks = uuid.uuid4().hex, f"{self.run_scope}/{ASKS_KEY}"
        try:
            self.store.set(f"{asks}/{self.store.add(asks, 1)}", word)
            self.store.wait([f"{self.run_scope}/{ANSWER_KEY}/{word}"], timeout)
        except DistStoreError as error:
            raise RequestTimeoutError(
                f"rank {rank} timed out after {timeout.total_seconds():g} s waiting in the store {self.address} for "
                "the address of its manager server; check whether group rank 0 has started"
            ) from error
        replica_id, address = self.store.get(f"{self.run_scope}/{ANSWER_KEY}/{word}").decode().rsplit(" ", 1)
        return replica_id, address

    def answer(self, replica_id: str, manager_addr: str, world_size: int) -> bool:
        """Answer all asks since the last call, including those of processes that have died. Group rank 0 calls this.

        Returns: whether all ranks have claimed their ranks.
        """
        asks = f"{self.run_scope}/{ASKS_KEY}"
        for number in set(range(1, self.store.add(asks, 0) + 1)) - self._answered:
            if self.store.check([f"{asks}/{number}"]):  # otherwise the word is written in a moment
                word = self.store.get(f"{asks}/{number}").decode()
                self.store.compare_set(f"{self.run_scope}/{ANSWER_KEY}/{word}", "", f"{replica_id} {manager_addr}")
                self._answered.add(number)
        return self.store.check([self._holder_key(replica_id, rank) for rank in range(world_size)])

    def claim(self, replica_id: str, rank: int, world_size: int) -> None:
        """Claim a rank in the group, for this start of it.

        Raises: ConfigError: another rank has another world size, or another process has this rank.
        """
        key = f"{self.run_scope}/{replica_id}/{WORLD_SIZE_KEY}"
        first = self.store.compare_set(key, "", str(world_size)).decode()
        if first != str(world_size):
            raise ConfigError(
                f"rank {rank} has WORLD_SIZE {world_size}, and another process of its replica group has {first}; give "
                "every process of the group the same WORLD_SIZE"
            )
        mine = _this_process()
        holder = self.store.compare_set(self._holder_key(replica_id, rank), "", mine).decode()
        if holder != mine:
            raise _duplicate_rank(rank, holder)

    def check_alone(self, rank: int) -> None:
        """Check that no other process of this rank runs on this machine, before this process waits for any.

        Raises: ConfigError: such a process runs.
        """
        key, mine = f"{self.run_scope}/{HOLDER_KEY}/{rank}", _this_process()
        holder = self.store.compare_set(key, "", mine).decode()
        if holder == mine:
            return
        if _is_running_here(holder):
            raise _duplicate_rank(rank, holder)
        # The process has died, or a launcher has moved its rank here from another machine.
        self.store.set(key, mine)

    def _holder_key(self, replica_id: str, rank: int) -> str:
        return f"{self.run_scope}/{replica_id}/{HOLDER_KEY}/{rank}"

    def gather(self, name: str, value: str, rank: int, world_size: int, timeout: timedelta) -> tuple[str, ...]:
        """Exchange a value with all ranks. Return all values in rank order.

        A rank deletes its value two exchanges later. By then all ranks have read it, because a rank reads a whole
        exchange before it joins the next one.

        Raises: RequestTimeoutError: a rank gave no value in time, or the store does not answer.
        """
        keys = [f"{self.run_scope}/{GATHER_KEY}/{name}/{place}" for place in range(world_size)]
        try:
            if len(self._given) > 1:
                self.store.delete_key(self._given.pop(0))
            self.store.set(keys[rank], value)
            self._given.append(keys[rank])
            self.store.wait(keys, timeout)
            return tuple(found.decode() for found in self.store.multi_get(keys))
        except (DistStoreError, DistNetworkError) as error:
            raise RequestTimeoutError(
                f"rank {rank} timed out after {timeout.total_seconds():g} s waiting in the store {self.address} for "
                f"the values of the other ranks of its replica group for {name!r}; check whether one of them hangs"
            ) from error

    def predecessor(self) -> str:
        """Return the replica id of the previous start, or ""."""
        key = f"{self.group_scope}/{REPLICA_ID_KEY}"
        # A get of a missing key blocks, so check it first.
        return self.store.get(key).decode() if self.store.check([key]) else ""


@final
class _Hosted:
    """The stores that this process hosts, for its forked children."""

    def __init__(self) -> None:
        self._stores: weakref.WeakSet[TCPStore] = weakref.WeakSet()

    def add(self, store: TCPStore) -> None:
        self._stores.add(store)
        let_go_in_child(self)

    def forked(self) -> Inheritance:
        """Hand over the stores in a forked child.

        The port and its connections belong to the parent. The stores are kept, because the destructor of a store waits
        for its thread.
        """
        stores = list(self._stores)
        self._stores.clear()
        return Inheritance(ports=[store.port for store in stores], kept=stores)


_hosted: Final = _Hosted()


def open_group_store(config: ResolvedConfig) -> GroupStore:
    """Host the store, if the group is this process alone and no store is given. Otherwise connect to it.

    Raises:
        UnreachableError: nothing answers at MASTER_ADDR:MASTER_PORT, or the answer is not a store's.
        ConfigError: this rank's settings contradict those of earlier ranks.
    """
    if config.store_addr is None:
        # Other replicas get this name, so the store must answer under it. Every client that reaches the store may
        # change its keys. So the store listens on the name's address, and not on all interfaces as TCPStore would.
        listener = _listener(config.hostname)
        host, port = listener.getsockname()[:2]
        try:
            store = TCPStore(
                {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host),
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=config.connect_timeout,
                master_listen_fd=listener.detach(),  # torch owns the socket from now on
            )
        except DistNetworkError as error:
            raise UnreachableError(
                f"this process can't reach the replica group's store that it hosts at {host} "
                f"({str(error).partition(chr(10))[0]}); check what blocks connections from this host to its own "
                "addresses"
            ) from error
        _hosted.add(store)
        return GroupStore(store, join_address(config.hostname, store.port), config.run_scope, config.group_scope)
    where = f"{config.store_addr}:{config.store_port}"
    _reach(config, where)
    client = StoreClient(config.store_addr, config.store_port)
    connected = threading.Event()
    watch = threading.Thread(target=_sever_late, args=(client, connected, config), name="tft-store-watch", daemon=True)
    watch.start()
    try:
        client.connect(config.connect_timeout, keep_trying=lambda: None)
    except ProcessGroupError as error:
        raise UnreachableError(
            f"the server at {where} does not answer rank {config.rank} like its replica group's store; check that "
            "MASTER_ADDR and MASTER_PORT name that store (torchrun starts one)"
        ) from error
    finally:
        connected.set()
        join_within(watch)
    # A loopback name would send other machines to themselves.
    host = config.hostname if is_loopback(config.store_addr) else config.store_addr
    group = GroupStore(client.under(""), join_address(host, config.store_port), config.run_scope, config.group_scope)
    if config.world_size > 1:
        group.check_alone(config.rank)
    return group


def _listener(hostname: str) -> socket.socket:
    """Open a port at the address that other processes are given.

    The port listens on all interfaces only if that name has no address of this machine.

    Raises: UnreachableError: no port can be opened at any address.
    """
    try:
        found = socket.getaddrinfo(hostname.strip("[]"), 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        found = []
    # A client tries all addresses of a name.
    for family, _, _, _, address in sorted(found, key=lambda info: info[0] != socket.AF_INET):
        with suppress(OSError):  # the address may be forwarded to this machine, and not belong to it
            return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    try:
        with suppress(OSError):
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
        return socket.create_server(("0.0.0.0", 0), backlog=BACKLOG)
    except OSError as error:
        raise UnreachableError(
            f"this process can't host its replica group's store, because no port is free ({error})"
        ) from error


def _sever_late(client: StoreClient, connected: threading.Event, config: ResolvedConfig) -> None:
    """Cut a connection that takes longer than connect_timeout. Runs on a thread.

    Torch's client waits for ever for a store that was stopped, or for a server that never answers.
    """
    if not connected.wait(config.connect_timeout.total_seconds()):
        while not connected.wait(RETRY_S):
            client.sever()


def _reach(config: ResolvedConfig, where: str) -> None:
    """Wait until a server listens there. TCPStore would also wait, but print a stack trace for each attempt.

    Raises: UnreachableError: no server listens within connect_timeout.
    """
    assert config.store_addr is not None, "a store without an address is hosted, not reached"
    give_up_at = time.monotonic() + config.connect_timeout.total_seconds()
    while True:
        try:
            within_s = max(give_up_at - time.monotonic(), RETRY_S)
            socket.create_connection((config.store_addr, config.store_port), within_s).close()
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() + RETRY_S >= give_up_at:
                raise UnreachableError(
                    f"rank {config.rank} can't reach its replica group's store at {where} within "
                    f"{config.connect_timeout.total_seconds():g} s ({error}); check that MASTER_ADDR and MASTER_PORT "
                    "name a store that runs (torchrun starts one)"
                ) from error
        time.sleep(RETRY_S)


def _this_process() -> str:
    """Return `host/pid:start`. `start` separates this process from later ones with the same pid."""
    pid = os.getpid()
    return f"{socket.gethostname()}/{pid}:{_started(pid) or ''}"


def _is_running_here(holder: str) -> bool:
    """Return whether a process, as given by `_this_process`, still runs on this machine.

    A pid alone is not enough. The launcher may not have reaped an ended process, and the system reuses the pids of
    reaped processes.
    """
    host, _, process = holder.rpartition("/")
    pid, _, start = process.partition(":")
    if host != socket.gethostname() or not pid.isdecimal():
        return False
    if _started(os.getpid()) is not None:
        now = _started(int(pid))
        return now == start if start else now is not None
    try:  # a system without /proc
        with suppress(PermissionError):
            os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


def _started(pid: int) -> str | None:
    """Return the start time of a running process in clock ticks since boot; None if it has ended, or without /proc."""
    try:
        with open(f"{_PROC}/{pid}/stat", "rb") as stat:
            words = stat.read().rpartition(b")")[2].split()  # the name before it may contain spaces and brackets
    except OSError:
        return None
    state, start = words[0], words[19]
    return None if state in _ENDED else start.decode()


def _duplicate_rank(rank: int, holder: str) -> ConfigError:
    host, _, process = holder.rpartition("/")
    return ConfigError(
        f"process {process.partition(':')[0]} on {host} is rank {rank} of this replica group already; give every "
        "process of the group a RANK of its own, and start no second group on the same store while the first one runs"
    )


def own_host() -> str:
    """Return the name or address by which other machines most likely reach this one.

    This is the host name, if it does not resolve to loopback. Otherwise it is the source address of packets to the
    outside. A machine without a network gives "localhost".
    """
    name = socket.gethostname()
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        found = set()
    if found and not any(is_loopback(address) for address in found):
        return name
    for family, outside in _OUTSIDE:
        # Connecting a datagram socket sends nothing.
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 9))
            return str(probe.getsockname()[0])
    return "localhost"


def is_loopback(host: str) -> bool:
    """Return whether a name or address always means the machine that uses it."""
    if host in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
