"""The other form of rendezvous: `reconfigure` by ordered handles, as torch 2.14 and torchft 0.3 have it.

In the first form the caller knows a store, a rank and a size: `configure(store_addr, rank, world_size)`. In this form
each rank has a handle, a line of text. The caller collects the handles of all ranks, and gives the same list to each of
them. The place in the list is the rank.

A group of this package offers both forms. Its handle names a store that the group hosts from the first request for the
handle on. All ranks of a `reconfigure` meet in the store of the first handle, under the uuid. `reconfigure_with_store`
is the bridge for groups that know handles only.

Law of this file: handles and their exchange. Groups are built by `configure`, or by torch.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
import uuid as uuids
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, final

import torch.distributed as dist
from torch._C import _distributed_c10d as torchs
from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore  # type: ignore[attr-defined]

from tft_pg.backends.addresses import default_address
from tft_pg.errors import ConfigError, ConfigureError, ProcessGroupClosedError
from tft_pg.forks import Inheritance, forks_wait, let_go_in_child
from tft_pg.settings import check_int, check_place, check_rank_info, checked_timeout
from tft_pg.store import create_store_client, format_store_addr, parse_store_addr
from tft_pg.work import DummyWork

__all__ = [
    "OwnHandle",
    "ReconfigureOptions",
    "ReconfiguresByHandles",
    "exchange_handles",
    "reconfigure_options",
    "reconfigure_with_store",
    "supports_reconfigure",
]

HANDLE_BYTES_MAX: Final = 4096
_KEY: Final = "tft-pg/handle"
_UUID_BITS: Final = 62
_UUID_MAX: Final = 2**64 - 1
_STORE_TIMEOUT: Final = timedelta(seconds=60)
_HOST_WITHIN: Final = timedelta(seconds=10)
_BACKLOG: Final = 1024
_NOWHERE: Final = "127.0.0.1:1"

if TYPE_CHECKING or not hasattr(torchs, "ReconfigureOptions"):

    @dataclass
    class ReconfigureOptions:
        """The members of a `reconfigure`. From torch 2.14 on, this is torch's own class of that name.

        Args:
            uuid: identifies this one `reconfigure`, and is the same on all ranks. No two have the same.
            handles: of all ranks. In a list, the place is the rank.
            timeout: of the `reconfigure`. None: the group's own.
            hints: settings for one kind of group. The groups of this package have none.
        """

        uuid: int = 0
        handles: list[str] | set[str] = field(default_factory=list)
        timeout: timedelta | None = None
        hints: dict[str, str] = field(default_factory=dict)

else:
    ReconfigureOptions = torchs.ReconfigureOptions


def reconfigure_options(
    uuid: int, handles: Sequence[str], *, timeout: timedelta | None = None, hints: Mapping[str, str] | None = None
) -> ReconfigureOptions:
    """Return options for a `reconfigure`, also of torch's own class, whose constructor takes no arguments."""
    options = ReconfigureOptions()
    options.uuid, options.handles = uuid, list(handles)
    if timeout is not None:
        options.timeout = checked_timeout(timeout)
    if hints:
        options.hints = dict(hints)
    return options


def supports_reconfigure(group: object) -> bool:
    """Return whether this is a process group with `reconfigure`: one of this package, or of torch 2.14 and later."""
    try:
        return (
            isinstance(group, dist.ProcessGroup)
            and bool(getattr(group, "supports_reconfigure", False))
            and callable(getattr(group, "reconfigure", None))
        )
    except RuntimeError:  # torch raises for a group with several backends, or with none
        return False


def reconfigure_with_store(
    pg: dist.ProcessGroup,
    store_addr: str,
    rank: int,
    world_size: int,
    timeout: timedelta | None = None,
) -> None:
    """Reconfigure a group whose ranks find each other in a store. Blocks until the group is built.

    Args:
        pg: a group with `reconfigure`. A group of this package is configured.
        store_addr: `host:port/prefix` of a running store. All ranks give the same address, with a fresh prefix for each
            call.
        rank: of this process.
        world_size: number of ranks.
        timeout: of the whole call. None: the group's own; for torch's groups, which do not tell theirs, 60 seconds.

    Raises:
        ConfigError: the group has no `reconfigure`, or an argument is invalid.
        ConfigureError: ranks did not join, or the group was not built. StoreUnreachableError names the store.
    """
    if not supports_reconfigure(pg):
        raise ConfigError(
            f"{pg!r} has no reconfigure; make torch's group with enable_reconfigure=True (torch 2.14 and later), or "
            "use a group of tft_pg"
        )
    configure = getattr(pg, "configure", None)
    if callable(configure):
        configure(store_addr=store_addr, replica_id="", rank=rank, world_size=world_size, timeout=timeout)
        return
    limit = _STORE_TIMEOUT if timeout is None else checked_timeout(timeout)
    end_s = time.monotonic() + limit.total_seconds()
    check_place(rank, world_size)
    store = create_store_client(store_addr, limit)
    store.set_timeout(_left(end_s))
    foreign: Any = pg
    uuid, handles = exchange_handles(store, foreign.get_reconfigure_handle(), rank, world_size)
    try:
        foreign.reconfigure(reconfigure_options(uuid, handles, timeout=_left(end_s))).wait()
    except RuntimeError as error:
        raise ConfigureError(
            f"the reconfigure of rank {rank} of {world_size} failed: {(str(error).splitlines() or [''])[0]}; call it "
            "again under a fresh prefix"
        ) from error


def _left(end_s: float) -> timedelta:
    return timedelta(seconds=max(end_s - time.monotonic(), 0.001))


def exchange_handles(store: Store, handle: str, rank: int, world_size: int) -> tuple[int, list[str]]:
    """Publish this rank's handle, and wait for those of all ranks.

    Args:
        store: under a fresh prefix; its timeout bounds the wait.
        handle: of this rank, as it is now.
        rank, world_size: of this process.

    Returns: the uuid, which rank 0 has chosen at random, and the handles in the order of the ranks.
    Raises: ConfigureError: a handle is too long or not from this package, the prefix was used before, or ranks did not
        join (the error names them).
    """
    if len(handle.encode()) > HANDLE_BYTES_MAX:
        raise ConfigureError(
            f"the reconfigure handle of rank {rank} has {len(handle.encode())} bytes, and at most {HANDLE_BYTES_MAX} "
            "are exchanged; use another group",
            is_own=True,
        )
    record = json.dumps([secrets.randbits(_UUID_BITS), handle])
    if store.compare_set(f"{_KEY}/{rank}", "", record).decode() != record:
        raise ConfigureError(
            f"the store prefix is already used by rank {rank}; pass a fresh prefix to each call", is_own=True
        )
    keys = [f"{_KEY}/{each}" for each in range(world_size)]
    try:
        found = store.multi_get(keys)
    except DistStoreError as error:
        missing = tuple(each for each, key in enumerate(keys) if not store.check([key]))
        raise ConfigureError(
            f"rank {rank} of {world_size} timed out waiting for the handles of ranks {', '.join(map(str, missing))}; "
            "look at their logs, and call again under a fresh prefix",
            missing_ranks=missing,
        ) from error
    records = [_read_record(bytes(each), at) for at, each in enumerate(found)]
    return records[0][0], [text for _, text in records]


def _read_record(record: bytes, rank: int) -> tuple[int, str]:
    try:
        if len(record) > 2 * HANDLE_BYTES_MAX:
            raise ValueError("it is too long")
        uuid, handle = json.loads(record)
        if type(uuid) is not int or not 0 <= uuid < 1 << _UUID_BITS or not isinstance(handle, str):
            raise ValueError("it has no uuid and handle")
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigureError(
            f"the store record of rank {rank} is not a reconfigure handle ({error}); use a separate prefix for each "
            "kind of group"
        ) from error
    return uuid, handle


@final
class OwnHandle:
    """The handle of one group of this package, and the store that it names.

    Args:
        hosts: False: the group meets no other rank, so it needs no store.
    """

    def __init__(self, *, hosts: bool = True) -> None:
        self._hosts = hosts
        self._id = uuids.uuid4().hex
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._address = ""
        self._port = 0
        self._closed = False
        self.replica_id = ""
        self.group_rank = 0
        self.group_world_size = 1
        let_go_in_child(self)

    def text(self) -> str:
        """Return the handle, which stays the same. The first call hosts the store.

        Raises: ConfigureError: nothing can listen on this machine. ProcessGroupClosedError: after `close`.
        """
        with self._lock:
            if self._closed:
                raise ProcessGroupClosedError("the group was shut down and has no handle any more; make a new group")
            if not self._address:
                self._address = self._host() if self._hosts else _NOWHERE
            return json.dumps({"id": self._id, "store": self._address})

    def _host(self) -> str:
        address = default_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with forks_wait():  # a child that is forked in the meantime would keep the listener
                listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
                self._port = listener.getsockname()[1]
            # Any client that reaches the store can change its keys, so it listens on one address alone.
            self._store = TCPStore(
                address,
                self._port,
                is_master=True,
                wait_for_workers=False,
                timeout=_HOST_WITHIN,
                master_listen_fd=listener.detach(),
            )
        except (OSError, DistNetworkError) as error:
            raise ConfigureError(
                f"this machine can't host the store of a reconfigure handle on {address} ({error}); check what blocks "
                "connections from this machine to its own address",
                is_own=True,
            ) from error
        return format_store_addr(address, self._port)

    def close(self) -> None:
        """End the store. A second call does nothing."""
        with self._lock:
            self._closed, self._store = True, None

    def forked(self) -> Inheritance:
        """Release the store in a forked child."""
        self._lock = threading.Lock()
        store, self._store = self._store, None
        self._closed = self._closed or self._hosts
        return Inheritance(ports=[self._port] if self._port else (), kept=[] if store is None else [store])


class ReconfiguresByHandles:
    """The methods of a group that reconfigures by ordered handles, over its `configure`."""

    _handle: OwnHandle

    @property
    def supports_reconfigure(self) -> bool:
        """Return True: this group has `reconfigure`."""
        return True

    def set_rank_info(
        self, replica_id: str, group_rank: int, group_world_size: int, global_rank: int | None = None
    ) -> None:
        """Set who this process is, for messages and records of the next `reconfigure`.

        Args:
            replica_id: of this replica.
            group_rank, group_world_size: of this process in its replica group.
            global_rank: of this process in the whole job. It is checked and not used; code for other groups passes it.

        The handle stays the same.

        Raises: ConfigError: an argument is invalid; nothing has changed.
        """
        check_rank_info(replica_id, group_rank, group_world_size)
        if global_rank is not None:
            check_int("global_rank", global_rank, least=0)
        handle = self._own_handle()
        handle.replica_id, handle.group_rank, handle.group_world_size = replica_id, group_rank, group_world_size

    def get_reconfigure_handle(self) -> str:
        """Return this rank's handle for the next `reconfigure`. The first call hosts a store.

        Raises: ProcessGroupClosedError: after `shutdown`. ConfigureError: nothing can listen on this machine.
        """
        return self._own_handle().text()

    def reconfigure(self, opts: ReconfigureOptions) -> dist.Work:
        """Build the group again, from the handles of all its ranks. Blocks until the group is built.

        Args:
            opts: the same uuid and the same list of handles on every rank. The rank is the place of the own handle.

        Returns: a finished Work.
        Raises: ConfigError: these are no options, the handles are not a list, one is not a handle or occurs twice, or
            this rank's is not among them. The errors of `configure`.
        """
        if not isinstance(opts, ReconfigureOptions):
            raise ConfigError(f"reconfigure takes ReconfigureOptions, but got a {type(opts).__name__}")
        handles = opts.handles
        if not isinstance(handles, (list, tuple)):
            raise ConfigError(
                f"reconfigure takes the handles as a list, in the order of the ranks, but got a "
                f"{type(handles).__name__}"
            )
        check_int("uuid", opts.uuid, least=0, most=_UUID_MAX)
        stores = [_store_of(handle, rank) for rank, handle in enumerate(handles)]
        own = self.get_reconfigure_handle()
        if own not in handles:
            raise ConfigError(
                f"this rank's own handle is not among the {len(handles)} handles; collect get_reconfigure_handle() of "
                "every rank anew for each reconfigure"
            )
        if len(set(handles)) < len(handles):
            raise ConfigError("a reconfigure handle occurs twice; pass each rank's own handle once")
        self.configure(  # type: ignore[attr-defined]  # of the group
            store_addr=f"{stores[0]}/tft-pg/{opts.uuid}",
            rank=list(handles).index(own),
            world_size=len(handles),
            replica_id=self._own_handle().replica_id,
            group_rank=self._own_handle().group_rank,
            group_world_size=self._own_handle().group_world_size,
            timeout=opts.timeout,
        )
        return DummyWork([])

    def _own_handle(self) -> OwnHandle:
        return self._handle


def _store_of(handle: object, rank: int) -> str:
    """Return the store address in the handle of a rank. Raises: ConfigError: it is not a handle of this package."""
    try:
        if not isinstance(handle, str):
            raise TypeError(f"its type is {type(handle).__name__}")
        if len(handle) > HANDLE_BYTES_MAX:
            raise ValueError("it is too long")
        found = json.loads(handle)
        store = found.get("store") if isinstance(found, dict) else None
        if not isinstance(store, str) or not store.isascii():
            raise ValueError("it names no store")
        return str(parse_store_addr(store))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"the handle of rank {rank} is not one of a tft_pg group ({error}); pass what get_reconfigure_handle() of "
            "that rank returned"
        ) from error
