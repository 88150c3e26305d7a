"""The servers and clients of coordination, under torchft's names. In torchft this module is written in Rust.

Law of this file: names, arguments, defaults and types of errors. The work is in tft_coord and tft_lighthouse.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, final

import tft_coord
from tft_coord.compat.views import Quorum, QuorumMember, Timestamp
from tft_lighthouse import LighthouseServer as OurLighthouseServer
from torchft._errors import ArgumentError, translated
from torchft._settings import SIXTY_SECONDS, advertised_by_server, certificates, secret

__all__ = [
    "LighthouseClient",
    "LighthouseServer",
    "ManagerClient",
    "ManagerServer",
    "Quorum",
    "QuorumMember",
    "QuorumResult",
    "Timestamp",
    "lighthouse_main",
]

_JOIN_TIMEOUT_MS = 100
_QUORUM_TICK_MS = 100
_HEARTBEAT_TIMEOUT_MS = 5000


@dataclass
class QuorumResult:
    """A group rank's part in a quorum. It can be changed, as torchft's can."""

    quorum_id: int = 0
    replica_rank: int = 0
    replica_world_size: int = 1
    recover_src_manager_address: str = ""
    recover_src_replica_rank: int | None = None
    recover_dst_replica_ranks: list[int] = field(default_factory=list)
    store_address: str = ""
    max_step: int = 0
    max_replica_rank: int | None = None
    max_world_size: int = 1
    heal: bool = False
    replica_ids: list[str] = field(default_factory=list)
    commit_failures: int = 0
    reconfigure_handles: list[str] = field(default_factory=list)


@final
class LighthouseServer:
    """A lighthouse in this process.

    Args:
        bind: `host:port`. Without a secret (TFT_TOKEN) all interfaces mean loopback.
        min_replicas: smallest quorum.
        join_timeout_ms: how long a quorum waits for healthy replicas that have not asked. None: 100.
        quorum_tick_ms: how often the lighthouse checks its timeouts. None: 100.
        heartbeat_timeout_ms: silence after which a replica is lost. None: 5000.
    Raises: RuntimeError: an argument is wrong, or the port is taken.
    """

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
    ) -> None:
        with translated():
            token, insecure = secret()
            self._server = OurLighthouseServer(
                bind=bind,
                min_replicas=min_replicas,
                join_timeout_ms=_JOIN_TIMEOUT_MS if join_timeout_ms is None else join_timeout_ms,
                quorum_tick_ms=_QUORUM_TICK_MS if quorum_tick_ms is None else quorum_tick_ms,
                heartbeat_timeout_ms=_HEARTBEAT_TIMEOUT_MS if heartbeat_timeout_ms is None else heartbeat_timeout_ms,
                token=token,
                insecure=insecure,
                tls=certificates(),
            )

    def address(self) -> str:
        """Return `http://host:port`."""
        return str(self._server.address)

    def shutdown(self) -> None:
        """Shut down: nothing is answered any more. A second call does nothing."""
        self._server.shutdown()


@final
class LighthouseClient:
    """A client of a lighthouse.

    Args:
        addr: of the lighthouse, `http://host:port`.
        connect_timeout: how long the constructor tries to reach it.
    Raises: RuntimeError: it can't be reached.
    """

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        with translated():
            self._client = tft_coord.LighthouseClient(addr, connect_timeout, token=secret()[0], tls=certificates())

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str = "",
        store_address: str = "",
        step: int = 0,
        world_size: int = 0,
        shrink_only: bool = False,
        data: dict[Any, Any] | None = None,
    ) -> Quorum:
        """Ask for a quorum that contains this replica, and wait for it. Counts as a heartbeat.

        Raises: TimeoutError. TypeError: data is no dict, timeout no timedelta. ValueError: timeout is not above zero.
            RuntimeError: data is not JSON, or the lighthouse refuses or can't be reached.
        """
        _checked(timeout)
        with translated():
            return self._client.quorum(replica_id, timeout, address, store_address, step, world_size, shrink_only, data)

    def heartbeat(self, replica_id: str, timeout: timedelta = timedelta(seconds=5)) -> None:  # frozen
        """Send a heartbeat. Raises: TimeoutError. RuntimeError: the lighthouse can't be reached."""
        _checked(timeout)
        with translated():
            self._client.heartbeat(replica_id, timeout)


@final
class ManagerServer:
    """A replica group's agent at the lighthouse, in a process of its own.

    Args: as torchft's. `heartbeat_interval` and `quorum_retries` are only checked: beats and redials follow from the
        time-outs of the job. `connect_timeout` also bounds the start of that process, which gets 60 s at least.
    Raises: RuntimeError: an argument is wrong, or the server did not start.
    """

    def __init__(
        self,
        replica_id: str,
        lighthouse_addr: str,
        hostname: str,
        bind: str,
        store_addr: str,
        world_size: int,
        heartbeat_interval: timedelta,
        connect_timeout: timedelta,
        quorum_retries: int,
    ) -> None:
        with translated():
            token, insecure = secret()
            self._server = tft_coord.ManagerServer(
                replica_id,
                lighthouse_addr,
                advertised_by_server(hostname, token, insecure=insecure),
                bind,
                store_addr,
                world_size,
                heartbeat_interval,
                max(connect_timeout, SIXTY_SECONDS),
                quorum_retries,
                job=os.environ.get("TFT_JOB_ID") or "default",
                token=token,
                insecure=insecure,
                tls=certificates(),
            )

    def address(self) -> str:
        """Return `http://host:port`. Raises: RuntimeError: it was shut down."""
        with translated():
            return self._server.address()

    def shutdown(self) -> None:
        """Say goodbye to the lighthouse, and end. A second call does nothing."""
        self._server.shutdown()


@final
class ManagerClient:
    """A group rank's client of its manager server.

    Args:
        addr: of the manager server, `http://host:port`.
        connect_timeout: how long the constructor tries to reach it.
    Raises: RuntimeError: it can't be reached.
    """

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        with translated():
            self._client = tft_coord.ManagerClient(addr, connect_timeout, token=secret()[0], tls=certificates())

    def _quorum(
        self,
        group_rank: int,
        step: int,
        checkpoint_metadata: str,
        shrink_only: bool,
        init_sync: bool,
        commit_failures: int,
        timeout: timedelta,
        reconfigure_handle: str = "",
    ) -> QuorumResult:
        """Ask for the next quorum, and wait for it.

        Raises: TimeoutError. RuntimeError: the lighthouse refuses, or the group is lost.
        """
        _checked(timeout)
        with translated():
            view = self._client._quorum(
                group_rank,
                step,
                checkpoint_metadata,
                shrink_only,
                init_sync,
                commit_failures,
                timeout,
                reconfigure_handle,
            )
        return QuorumResult(**asdict(view))

    def _checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        """Return what this rank of that manager's group gave with its last request for a quorum.

        Raises: TimeoutError. RuntimeError: "rank not found".
        """
        _checked(timeout)
        with translated():
            return self._client.checkpoint_metadata(rank, timeout)

    def should_commit(self, group_rank: int, step: int, should_commit: bool, timeout: timedelta) -> bool:
        """Vote, and return whether all ranks of the group voted yes. Raises: TimeoutError, RuntimeError."""
        _checked(timeout)
        with translated():
            return self._client.should_commit(group_rank, step, should_commit, timeout)


def _checked(timeout: object) -> None:
    """Check a time-out. Raises: TypeError: it is no timedelta. ValueError: it is not above zero."""
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, not {type(timeout).__name__}")
    if timeout <= timedelta(0):
        raise ArgumentError(f"timeout is {timeout}; give a time above zero")


def lighthouse_main() -> None:
    """Run the command `torchft_lighthouse` with the arguments of this process. Raises: SystemExit: at its end."""
    from torchft.lighthouse import main

    raise SystemExit(main())
