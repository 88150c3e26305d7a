"""The status and the incidents of a lighthouse as text for a terminal.

Law of this file: JSON of schema version 1 to text. What comes from outside loses its control characters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from tft_coord.core.names import shorten
from tft_suite.errors import ConfigError

COLUMNS: Final = ("rank", "replica", "state", "step", "phase", "own step", "heard", "address")
INCIDENT_COLUMNS: Final = (
    "began (UTC)",
    "job",
    "kind",
    "cost",
    "lasted",
    "phases",
    "step",
    "quorum",
    "members",
    "replicas",
    "reason",
)
BESIDE: Final = "heal"  # the phase that goes on while the others train
QUORUM_DIGITS: Final = 4  # of an id, which begins with the time of the lighthouse's start
REPLICAS_SHOWN_MOST: Final = 3
JOBS_SHOWN_MOST: Final = 20


def of_job(status: dict[str, Any], job: str) -> dict[str, Any]:
    """Return a status with one job alone. Raises: ConfigError: the lighthouse does not know it."""
    found = [each for each in status["jobs"] if each["name"] == job]
    if not found:
        known = ", ".join(sorted(_clean(each["name"]) for each in status["jobs"])[:JOBS_SHOWN_MOST]) or "none so far"
        raise ConfigError(f"the lighthouse knows no job {job!r}; known jobs: {known}")
    return {**status, "jobs": found}


def status_text(status: dict[str, Any]) -> str:
    """Return the status of all jobs in it."""
    lighthouse = status["lighthouse"]
    up = _seconds(status["now_ms"] - lighthouse["started_ms"])
    leader = lighthouse.get("leader")  # an older lighthouse names none
    other = f"stands by for the leader at {_clean(leader)}" if leader else "another lighthouse of its cluster serves"
    ready = "ready" if lighthouse["is_ready"] else other
    lines = [f"lighthouse {_clean(lighthouse['version'])}, up {up}, {ready}"]
    for each in status["jobs"]:
        lines += ["", *_job(each)]
    if not status["jobs"]:
        lines.append("no replica has connected yet")
    return "\n".join(lines)


def _job(job: dict[str, Any]) -> list[str]:
    head = f"job {_clean(job['name'])}: {job['state']}, step {job['step']}"
    if job["quorum"] is not None:
        head += f", quorum {job['quorum']['id']} of {job['quorum']['num_members']}"
        head += f", {_seconds(job['quorum']['age_ms'])} old"
    lines = [head]
    if job["quorum"] is not None and job["quorum"]["broken"]:
        lines.append(f"  broken: {_clean(job['quorum']['broken'])}")
    if job["waits"] is not None and job["state"] == "waiting":
        lines.append(f"  waiting for {_seconds(job['waits']['lasted_ms'])}: {_clean(job['waits']['sentence'])}")
    if job["ended"] is not None:
        lines.append(f"  ended at step {job['ended']['step']}, finished by {_names(job['ended']['replica_ids'])}")
    lines += [f"  warning: {_clean(warning)}" for warning in job["warnings"]]
    rows = [_replica(each) for each in job["replicas"]]
    lines += [f"  {line}" for line in _table(COLUMNS, rows)]
    more = job["num_replicas"] - len(rows)
    return lines + ([f"  and {more} more replicas"] if more > 0 else [])


def _replica(replica: dict[str, Any]) -> tuple[str, ...]:
    state = replica["state"].replace("_", " ")
    if replica["reason"]:
        state += f" {_seconds(replica['gone_ms'])} ago: {_clean(replica['reason'])}"
    return (
        "-" if replica["rank"] is None else str(replica["rank"]),
        _clean(replica["replica_id"]),
        state,
        str(replica["step"]),
        "-" if replica["phase"] is None else f"{replica['phase']} {_seconds(replica['phase_ms'])}",
        "-" if replica["own_step_ms"] is None else f"{replica['own_step_ms']} ms",
        "-" if replica["heard_ms"] is None else f"{_seconds(replica['heard_ms'])} ago",
        _clean(replica["address"]) or "-",
    )


def incidents_text(incidents: Sequence[dict[str, Any]]) -> str:
    """Return one line for each incident, the oldest first."""
    if not incidents:
        return "no incident is known; a lighthouse forgets them when it restarts"
    return "\n".join(_table(INCIDENT_COLUMNS, [_incident(each) for each in incidents]))


def _incident(incident: dict[str, Any]) -> tuple[str, ...]:
    spent = incident["phases_ms"]
    phases = ", ".join(f"{_clean(name)} {_fine(ms)}" for name, ms in spent.items() if name != BESIDE)
    if slowest := incident.get("slowest"):  # a lighthouse of an earlier release says nothing of it
        phases = f"slowest {_clean(slowest)}: {phases}"
    if BESIDE in spent:
        phases += f"{'; ' if phases else ''}beside: {BESIDE} {_fine(spent[BESIDE])}"
    cost_ms = incident.get("cost_ms", incident["lasted_ms"] - spent.get("commit", 0))
    waited = f"; waited for: {_clean(incident['waited_for'])}" if incident["waited_for"] else ""
    more = incident["num_replicas"] - min(len(incident["replica_ids"]), REPLICAS_SHOWN_MOST)
    return (
        time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(incident["began_ms"] / 1_000)),
        _clean(incident["job"]),
        incident["kind"].replace("_", " "),
        "goes on" if incident["is_open"] else _fine(cost_ms),
        "goes on" if incident["is_open"] else _seconds(incident["lasted_ms"]),
        phases or "-",
        str(incident["step"]),
        _quorums(incident["quorum_before"], incident["quorum_after"]),
        f"{incident['members_before']} -> {incident['members_after']}" if incident["quorum_after"] else "-",
        (_names(incident["replica_ids"][:REPLICAS_SHOWN_MOST]) + (f" and {more} more" if more > 0 else "")) or "-",
        _clean(incident["reason"]) + waited,
    )


def _quorums(before: int | None, after: int | None) -> str:
    if after is None:
        return "-"
    short = ["none" if each is None else str(each)[-QUORUM_DIGITS:] for each in (before, after)]
    return short[1] if before == after else " -> ".join(short)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines whose columns stand under one another; the last column may be long."""
    every = [head, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in every]


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(_clean, names))


def _clean(text: str) -> str:
    """Return a text with short replica ids and without characters that would change the terminal."""
    return "".join(each if each.isprintable() else "?" for each in shorten(text))


def _fine(milliseconds: int) -> str:
    return f"{milliseconds} ms" if 0 <= milliseconds < 1_000 else _seconds(milliseconds)


def _seconds(milliseconds: int) -> str:
    """Return a duration as a person reads it."""
    seconds = max(0, milliseconds) / 1_000
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds // 60), int(seconds // 3_600)
    return f"{minutes} min" if hours < 1 else f"{hours} h {minutes % 60} min"
