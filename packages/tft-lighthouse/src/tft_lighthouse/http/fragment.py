"""The lighthouse's status as a part of a page, as torchft's lighthouse has it: `/status`.

Law of this file: text from a view; every value from outside is escaped.
"""

from __future__ import annotations

from html import escape
from typing import Final

from tft_coord.lighthouse import JobStatus, ReplicaStatus, shorten
from tft_lighthouse.view import REPLICAS_LISTED_MOST, LighthouseView

COLUMNS: Final = ("rank", "replica", "state", "step", "phase", "own part of a step", "last heard", "address")


def of_view(view: LighthouseView) -> str:
    """Return the state of all jobs as HTML without scripts."""
    up_s = (view.now_ms - view.started_ms) // 1_000
    ready = "" if view.is_ready else " A newer lighthouse of this cluster serves the replicas."
    head = f"<p>Version {escape(view.version)}, up for {up_s} s, {len(view.jobs)} jobs.{ready}</p>\n"
    return head + ("".join(_job(job) for job in view.jobs) or "<p>No replica has connected yet.</p>\n")


def _job(job: JobStatus) -> str:
    lines = [f"<section>\n<h2>Job {escape(job.name)}: {escape(job.state.value)}, step {job.step}</h2>\n"]
    if job.quorum is not None:
        broken = f", broken: {escape(shorten(job.broken))}" if job.broken else ""
        members, age_s = len(job.quorum.members), job.quorum_age_ms / 1_000
        lines.append(f"<p>Quorum {job.quorum.key.quorum_id}, {members} members, {age_s:.1f} s old{broken}.</p>\n")
    if job.wait is not None:
        lines.append(f"<p>Waiting for {job.wait.lasted_ms / 1_000:.1f} s: {escape(job.wait.sentence)}.</p>\n")
    if job.ended is not None:
        names = escape(shorten(", ".join(job.ended.replica_ids)))
        lines.append(f"<p>Ended at step {job.ended.step}, finished by {names}.</p>\n")
    lines += [f"<p>Warning: {escape(shorten(warning))}.</p>\n" for warning in job.warnings]
    head = "".join(f'<th scope="col">{name}</th>' for name in COLUMNS)
    rows = "".join(_row(replica) for replica in job.replicas[:REPLICAS_LISTED_MOST])
    table = f"<table>\n<caption>{len(job.replicas)} replicas</caption>\n<tr>{head}</tr>\n{rows}</table>\n"
    return "".join([*lines, table, "</section>\n"])


def _row(replica: ReplicaStatus) -> str:
    state = replica.state.value.replace("_", " ")
    state += f" {replica.gone_ms // 1_000} s ago: {shorten(replica.reason)}" if replica.reason else ""
    phase = f"{replica.phase.name.lower()} for {replica.phase_ms / 1_000:.1f} s" if replica.phase is not None else ""
    cells = (
        "" if replica.rank is None else str(replica.rank),
        shorten(replica.replica_id),
        state,
        str(replica.step),
        phase,
        f"{replica.own_ms} ms" if replica.own_ms else "",
        "" if replica.heard_ms is None else f"{replica.heard_ms / 1_000:.1f} s ago",
        replica.address,
    )
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>\n"
