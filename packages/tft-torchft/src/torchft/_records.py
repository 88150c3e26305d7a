"""torchft's log: the lines that people search for, and the records for machines.

torchft logs each quorum, each verdict and each abort as a record without text, whose facts are attributes. Its
log lines for people have texts that scripts search for. Both are written here from tft's records, beside tft's own log.

Law of this file: text and attributes of log records. No handler is installed, and no level is set.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Final, final

QUORUMS: Final = logging.getLogger("torchft_quorums")
COMMITS: Final = logging.getLogger("torchft_commits")
ERRORS: Final = logging.getLogger("torchft_errors")

_log = logging.getLogger("torchft.manager")


def _job_id() -> str:
    return os.environ.get("JOB_ID", "unknown")


def write_abort(replica_id: str, rank: int, quorum_id: int | None) -> None:
    """Write the record of an aborted process group."""
    extra = {
        "job_id": _job_id(),
        "replica_id": replica_id,
        "rank": rank,
        "quorum_id": quorum_id,
        "uuid": quorum_id,
        "error": "process_group_abort",
    }
    ERRORS.info("", extra=extra)


@final
class RecordWriter:
    """The writer of one Manager's records in torchft's form.

    Args:
        manager: of the records, a tft_algos.Manager.
        min_replica_size: of the Manager.
    """

    def __init__(self, manager: Any, min_replica_size: int) -> None:
        self._manager = manager
        self._min_replica_size = min_replica_size

    def write(self, event: str, facts: Mapping[str, Any]) -> None:
        """Write a record of tft. See `tft_algos.manager.strategy.follow_records`."""
        who = {name: facts[name] for name in ("replica_id", "rank", "quorum_id", "step")}
        extra = {"job_id": _job_id(), **who}
        if event == "quorum":
            self._quorum(facts, extra)
        elif event == "commit":
            self._commit(facts, extra)

    def _quorum(self, facts: Mapping[str, Any], extra: dict[str, Any]) -> None:
        prefix = self._prefix(facts)
        if facts["reconfigured"]:
            QUORUMS.info("", extra=extra)
            _log.info("%s reconfiguring for quorum_id=%s", prefix, facts["quorum_id"])
        if facts["recover_dst_replica_ranks"]:
            _log.info("%s peers need recovery from us %s", prefix, list(facts["recover_dst_replica_ranks"]))
        if facts["heal"]:
            _log.info("%s healing required", prefix)

    def _commit(self, facts: Mapping[str, Any], extra: dict[str, Any]) -> None:
        enough = facts["num_participants"] >= self._min_replica_size
        errored = self._manager.errored()
        COMMITS.info("", extra={**extra, "commit_result": facts["commit_result"]})
        _log.info(
            "%s should_commit=%s enough_replicas=%s, errored=%s",
            self._prefix(facts),
            facts["commit_result"],
            enough,
            None if errored is None else errored.original_exception,
        )

    @staticmethod
    def _prefix(facts: Mapping[str, Any]) -> str:
        return f"[{facts['replica_id']}/{facts['rank']} - step {facts['step']}]"
