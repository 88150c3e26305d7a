"""The sources that replicas could not heal well from, and the warnings about them.

Law of this file: one job's reports and the sentences about them; nothing is decided by them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import final

from tft_coord.core.effects import Warned
from tft_coord.core.types import Member


@final
class PoorSources:
    """The reports of one job's replicas.

    Args:
        job: its name.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._reported: dict[str, tuple[str, ...]] = {}  # replica id -> the sources it reported as poor

    def report(self, member: Member, known: Collection[str], members: Mapping[str, Member]) -> list[Warned]:
        """Record which sources a replica reports. They stay in the quorum, whose plan names them last.

        Args:
            member: the request of the replica.
            known: the ids of all known replicas.
            members: of the newest quorum, by id.
        Returns: a warning for each source that this replica reports for the first time.
        """
        before = self._reported.get(member.replica_id, ())
        if member.poor_sources == before:
            return []
        self._reported = {name: sources for name, sources in self._reported.items() if name in known}
        self._reported[member.replica_id] = member.poor_sources
        return [
            Warned(
                self._job,
                f"replica {member.replica_id} could not heal well from source {name}, which was silent, slow or sent "
                "wrong data; every replica now asks it last. Check its state server on "
                f"{_host_of(members.get(name))}, and the network to it",
            )
            for name in member.poor_sources
            if name not in before and name in known
        ]


def _host_of(member: Member | None) -> str:
    return f"the host of {member.address}" if member is not None else "its host"
