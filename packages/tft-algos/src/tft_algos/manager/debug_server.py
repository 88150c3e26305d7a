"""Torch's debug server of a training process, with the state of its Manager.

Law of this file: which facts the server reports. The server itself is `tft_pg.DebugServer`.
"""

from __future__ import annotations

import socket
from functools import partial
from typing import Any, Final

from tft_algos.errors import ConfigError
from tft_algos.manager.manager import Manager
from tft_algos.manager.status import ManagerStatus
from tft_coord.errors import UnreachableError
from tft_pg import ConfigError as GroupConfigError
from tft_pg import DebugServer, PagePlace, StoreUnreachableError

__all__ = ["start_debug_server"]

_TEXT_CHARS_MAX: Final = 2000


def start_debug_server(
    manager: Manager, *, host: str = "127.0.0.1", port: int = 0, page_port: int | None = None
) -> DebugServer:
    """Start torch's debug server in this process. It shows stacks, flight records and the state of the Manager.

    `POST server.url/handler/tft` returns the state as JSON, and `handler/dump_traceback` the stacks. The server has no
    authentication: every program that reaches it can read this, and profile the process. It ends with the Manager's
    `shutdown`, or by its own `close`. A process has at most one.

    Args:
        manager: of this process.
        host: the name or address to listen on: of one interface, loopback unless given.
        port: of this process's server. 0: a free port.
        page_port: the port of torch's page for all ranks of this replica group, on the host of group rank 0. 0: a free
            port. None: there is no page. All ranks of the group give a number, or all give None. It needs the packages
            `jinja2` and `tabulate`.

    Returns: the server, with its `url` and `page_url`.
    Raises:
        ConfigError: the host is not one address of this machine, a port is taken or is no port, the process has a
            debug server already, or a package is missing.
        ManagerClosedError: the Manager was shut down.
        UnsupportedOperationError: this torch has no debug server, or its page can't be bound to one address.
        UnreachableError: the store of the replica group did not answer.
    """
    manager._life.check_open()
    config = manager.strategy.config
    store = {} if config.world_size == 1 else {"store_host": config.store_addr, "store_port": config.store_port}
    place = PagePlace(config.rank, config.world_size, **store)  # type: ignore[arg-type]
    try:
        server = DebugServer(partial(_facts, manager), host=host, port=port, page_port=page_port, place=place)
    except GroupConfigError as error:
        raise ConfigError(str(error)) from error
    except StoreUnreachableError as error:
        raise UnreachableError(str(error)) from error
    manager._life.at_end(server.close)
    return server


def _facts(manager: Manager) -> dict[str, Any]:
    """Return the state of a Manager, as values of JSON."""
    status = manager.status()
    return {"job": manager.strategy.config.job, "host": socket.gethostname(), **_facts_of(status)}


def _facts_of(status: ManagerStatus) -> dict[str, Any]:
    quorum = status.quorum
    return {
        "replica_id": status.replica_id,
        "group_rank": status.group_rank,
        "group_world_size": status.group_world_size,
        "step": status.step,
        "attempt": status.attempt,
        "phase": status.phase.value,
        "committed": status.committed,
        "quorum": None if quorum is None else {"id": quorum.quorum_id, "nonce": quorum.nonce},
        "participants": list(status.participants),
        "participating_rank": status.participating_rank,
        "is_healing": status.is_healing,
        "is_torn": status.is_torn,
        "is_left_out": status.is_left_out,
        "is_leaving": status.is_leaving,
        "waits_for": status.waits_for[:_TEXT_CHARS_MAX],
        "waits_s": status.waits_s,
        "errors": [f"{type(error).__name__}: {error}"[:_TEXT_CHARS_MAX] for error in status.errors],
        "incidents": [
            {
                "time_s": each.time_s,
                "step": each.step,
                "quorum_id": each.quorum_id,
                "text": each.text[:_TEXT_CHARS_MAX],
            }
            for each in status.incidents
        ],
    }
