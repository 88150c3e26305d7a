"""The troubles of a job now, in words with a remedy: the warnings that `tft doctor` shows.

A job can train without a member that is stopped, and no replica may wait for a holder that fell silent. No wait
sentence names these problems, so the warnings do.

Law of this file: sentences only; nothing is decided by them. The caller calls about once a second.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, final

from tft_coord.core.liveness import Replica
from tft_coord.core.names import base_name, shorten
from tft_coord.core.waits import LOST_STATE

LOST_REPORTED_MS: Final = 60_000  # for a replica that has no stream and is in no quorum
SILENT_LEAST_MS: Final = 5_000
OUT_LEAST_MS: Final = 2_000
OUT_AGAIN_MS: Final = 30_000  # a failed trial does not restart the time
NAMED_MOST: Final = 8


@final
class Troubles:
    """The troubles of one job.

    Args:
        heartbeat_timeout_ms: of the lighthouse.
    """

    def __init__(self, heartbeat_timeout_ms: int) -> None:
        self._silent_ms = max(SILENT_LEAST_MS, heartbeat_timeout_ms // 2)
        self._out: dict[str, tuple[int, int]] = {}  # kept out replica -> since when, and when that was last seen
        self.warnings: tuple[str, ...] = ()  # the warnings of the last look

    def look(
        self,
        replicas: Collection[Replica],
        members: Collection[str],
        waiting_for: str,
        kept_out: Collection[str],
        said_of: Callable[[str], str],
        now_ms: int,
    ) -> None:
        """Look at the job.

        Args:
            replicas: all known ones.
            members: of the newest quorum.
            waiting_for: what the next quorum waits for.
            kept_out: the replicas kept out of it, because others can't reach them.
            said_of: returns which peers can't reach one of these, and why.
            now_ms: the time.
        """
        found: list[str] = []
        if waiting_for.startswith(LOST_STATE):
            found.append(
                f"the job has stopped and waits for {shorten(waiting_for)}. With --on-lost-state restart the "
                "lighthouse waits for heartbeat_timeout only"
            )
        living = {base_name(each.replica_id) or each.replica_id for each in replicas if each.healthy}
        absent = (self._absence(each, members, living, now_ms) for each in replicas)
        found += [sentence for sentence in absent if sentence][:NAMED_MOST]
        if kept_out or self._out:
            found += self._kept_out(kept_out, said_of, now_ms)
        self.warnings = tuple(found)

    def _absence(self, replica: Replica, members: Collection[str], living: Collection[str], now_ms: int) -> str:
        """Return the warning about a replica that fell silent, or ""."""
        if replica.left is not None or replica.dead or replica.presumed:
            return ""
        name = shorten(replica.replica_id)
        remedy = "Continue it (SIGCONT) if it is stopped, check its log and its network, or restart it"
        if replica.lost is None:
            silent_ms = now_ms - replica.heard_ms
            if silent_ms < self._silent_ms or replica.replica_id not in members:
                return ""
            return f"member {name} has been silent for {silent_ms // 1_000} s. {remedy}"
        lost_ms = now_ms - replica.lost_ms
        is_replaced = (base_name(replica.replica_id) or replica.replica_id) in living
        # While its manager server has a stream, a stopped trainer is still there, and can be continued.
        is_gone = replica.stream is None and replica.replica_id not in members
        is_old = is_gone and lost_ms >= LOST_REPORTED_MS
        if not replica.fell_silent or is_replaced or is_old:
            return ""
        return f"{name} was lost {lost_ms // 1_000} s ago ({replica.lost}) and has not come back. {remedy}"

    def _kept_out(self, kept_out: Collection[str], said_of: Callable[[str], str], now_ms: int) -> list[str]:
        self._out = {name: times for name, times in self._out.items() if now_ms - times[1] < OUT_AGAIN_MS}
        found: list[str] = []
        for name in sorted(kept_out):
            since_ms = self._out.get(name, (now_ms, now_ms))[0]
            self._out[name] = since_ms, now_ms
            if now_ms - since_ms >= OUT_LEAST_MS and len(found) < NAMED_MOST:
                why = said_of(name) or f"{shorten(name)} can't be reached"
                found.append(
                    f"left out of the quorum for {(now_ms - since_ms) // 1_000} s: {why}. Check the names, the "
                    "addresses, the interfaces and the firewalls on both sides"
                )
        return found
