"""What a lighthouse knows of this launcher's groups.

Law of this file: the lighthouse's HTTP port, asked on a thread. A lighthouse that does not answer never delays the
launcher.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final
from urllib.parse import quote

from tft_suite.errors import ConfigError
from tft_suite.launch import guard
from tft_suite.operate.client import fetch, post

LOOK_EVERY_S: Final = 1.0
TIMEOUT_S: Final = 5.0
JOIN_S: Final = 2 * TIMEOUT_S
ALIVE: Final = frozenset({"training", "healing", "waiting", "joining", "left_out", "kept_out"})


@final
@dataclass(frozen=True, slots=True)
class Replica:
    """A living replica as a lighthouse shows it. `pid`: of its rank 0, on its own host."""

    job: str
    replica_id: str
    state: str
    step: int
    pid: int


def living(status: Mapping[str, Any]) -> list[Replica]:
    """Return the living replicas of all jobs in a lighthouse's status."""
    return [
        Replica(str(job["name"]), str(each["replica_id"]), str(each["state"]), int(each["step"]), int(each["pid"] or 0))
        for job in status["jobs"]
        for each in job["replicas"]
        if each["state"] in ALIVE
    ]


def of_launch(replicas: Sequence[Replica], mark: str) -> dict[int, Replica]:
    """Return the replicas whose process has a launcher's mark, by the number of their group."""
    found = {}
    for each in replicas:
        launch, _, name = guard.mark_of(each.pid).partition("/") if each.pid > 0 else ("", "", "")
        if launch == mark and name.isdigit():
            found[int(name)] = each
    return found


def ask_to_drain(http_address: str, replica: Replica, reason: str, environ: Mapping[str, str]) -> bool:
    """Ask a lighthouse to drain a replica. Return whether it has accepted."""
    path = f"/replica/{quote(replica.replica_id, safe='')}/drain?job={quote(replica.job)}&reason={quote(reason)}"
    try:
        post([http_address], path, environ, timeout_s=TIMEOUT_S)
    except ConfigError:
        return False
    return True


@final
class Watcher:
    """Asks the lighthouses for the state of the groups, once a second, on a thread.

    Args:
        addresses: of HTTP ports.
        environ: has the job's secret.
        mark: of the launcher.
    """

    def __init__(self, addresses: Sequence[str], environ: Mapping[str, str], mark: str) -> None:
        self._addresses = addresses
        self._environ = environ
        self._mark = mark
        self._replicas: dict[int, Replica] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tft-launch-watcher", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(JOIN_S)

    @property
    def replicas(self) -> Mapping[int, Replica]:
        """Return the groups' replicas at the last look."""
        return self._replicas

    def drain(self, groups: Sequence[int], reason: str) -> list[int]:
        """Ask the lighthouse to drain these groups. Return those that it has not accepted. Blocks for some seconds."""
        refused = []
        for group in groups:
            replica = self._replicas.get(group)
            if replica is None or not any(
                ask_to_drain(address, replica, reason, self._environ) for address in self._addresses
            ):
                refused.append(group)
        return refused

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            try:
                status = fetch(self._addresses, "/api/v1/status", self._environ, timeout_s=TIMEOUT_S)
                self._replicas = of_launch(living(status), self._mark)
            except ConfigError:
                continue  # the lighthouse restarts; the replicas themselves report what is wrong
            except (KeyError, TypeError, ValueError):
                continue  # another server answers there
