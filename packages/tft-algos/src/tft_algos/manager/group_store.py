"""The replica group's store: where its ranks find each other, and a restarted group finds its predecessor.

Under torchrun the store belongs to the agent and outlives the processes, so what one start of the group writes must
not be taken for what the next one writes: keys carry the start's scope. One key belongs to all starts: the id of the
replica that was here before, whose place the new one takes.

Law of this file: opening the store, and the keys in it.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistError, DistStoreError, Store, TCPStore  # type: ignore[attr-defined]

from tft_algos.manager.config import ResolvedConfig
from tft_coord.errors import DeadlinePassed, Unreachable

MANAGER_ADDR_KEY = "manager_addr"
REPLICA_ID_KEY = "replica_id"


@dataclass(frozen=True, slots=True)
class GroupStore:
    """An open store of the replica group.

    Args:
        store: of torch.
        address: `host:port` under which other replicas reach it.
        run_scope, group_scope: as in ResolvedConfig.
    """

    store: Store
    address: str
    run_scope: str
    group_scope: str

    def publish(self, *, replica_id: str, manager_addr: str) -> None:
        """Group rank 0 tells the other ranks who they are and where their manager server is."""
        self.store.set(f"{self.group_scope}/{REPLICA_ID_KEY}", replica_id)
        self.store.set(f"{self.run_scope}/{REPLICA_ID_KEY}", replica_id)
        self.store.set(f"{self.run_scope}/{MANAGER_ADDR_KEY}", manager_addr)

    def published(self, rank: int, timeout: timedelta) -> tuple[str, str]:
        """What group rank 0 told: (replica id, address of the manager server).

        Raises: DeadlinePassed: it has told nothing in time.
        """
        try:
            self.store.wait([f"{self.run_scope}/{MANAGER_ADDR_KEY}"], timeout)
        except DistStoreError as error:
            raise DeadlinePassed(
                f"rank {rank} waited {timeout.total_seconds():g} s in the store {self.address} for the address of its "
                "manager server; look whether group rank 0 has started"
            ) from error
        address = self.store.get(f"{self.run_scope}/{MANAGER_ADDR_KEY}").decode()
        return self.store.get(f"{self.run_scope}/{REPLICA_ID_KEY}").decode(), address

    def predecessor(self) -> str:
        """The replica id of the start before this one, or ""."""
        key = f"{self.group_scope}/{REPLICA_ID_KEY}"
        # A get of a key that nobody has set waits; so it is asked for first.
        return self.store.get(key).decode() if self.store.check([key]) else ""


def open_group_store(config: ResolvedConfig) -> GroupStore:
    """Host the store, where the group is this process alone and none is named; else connect to it.

    Raises: Unreachable: nobody answers at MASTER_ADDR:MASTER_PORT.
    """
    if config.store_addr is None:
        # The store must answer under the name that other replicas are told, and TCPStore listens on all interfaces.
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=config.connect_timeout)
        return GroupStore(store, join_address(config.hostname, store.port), config.run_scope, config.group_scope)
    try:
        store = TCPStore(
            config.store_addr,
            config.store_port,
            is_master=False,
            wait_for_workers=False,
            timeout=config.connect_timeout,
        )
    except (DistError, RuntimeError) as error:
        raise Unreachable(
            f"rank {config.rank} can't reach its group's store at {config.store_addr}:{config.store_port}; check that "
            "MASTER_ADDR and MASTER_PORT name a store that runs (torchrun starts one)"
        ) from error
    # A loopback name would send other machines to themselves.
    host = config.hostname if is_loopback(config.store_addr) else config.store_addr
    return GroupStore(store, join_address(host, config.store_port), config.run_scope, config.group_scope)


def own_host() -> str:
    """The name or address under which other machines most likely reach this one.

    Its host name, if that is not just another word for loopback; else the address that packets to the outside carry;
    else "localhost", on a machine without a network.
    """
    name = socket.gethostname()
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        found = set()
    if found and not any(is_loopback(address) for address in found):
        return name
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Reserved for documentation, so never somebody's; connecting a datagram socket sends nothing.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return "localhost"


def is_loopback(host: str) -> bool:
    """Whether that name or address means this machine to whoever reads it."""
    if host in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
