"""The timeline of a job over HTTP.

Readers that follow a job ask for what is new. Their times are rounded, so that all readers of a moment share an answer.

Law of this file: runs and points to an answer; docs/lighthouse-http.md documents each field.
"""

from __future__ import annotations

import json
from typing import Any, Final

from tft_lighthouse.timeline import SPAN_MS, Timeline
from tft_lighthouse.view import SCHEMA_VERSION

ROUNDED_TO_MS: Final = 5_000


def rounded(after_ms: int) -> int:
    """Return the time from which a reader that knows all up to `after_ms` gets runs and points."""
    return after_ms - after_ms % ROUNDED_TO_MS


def as_bytes(timeline: Timeline, job: str, after_ms: int, started_ms: int) -> bytes:
    """Return what happened to a job after that time, as JSON of schema version `SCHEMA_VERSION`.

    Args:
        timeline: of all jobs.
        job: its name.
        after_ms: 0 for all that is kept.
        started_ms: when the lighthouse started.
    """
    return json.dumps(as_json(timeline, job, after_ms, started_ms)).encode()


def as_json(timeline: Timeline, job: str, after_ms: int, started_ms: int) -> dict[str, Any]:
    """Return the same before it is encoded."""
    lanes = timeline.lanes(job, after_ms)
    return {
        "schema_version": SCHEMA_VERSION,
        "now_ms": timeline.now_ms,
        "started_ms": started_ms,
        "span_ms": SPAN_MS,
        "job": job,
        "points": timeline.points(job, after_ms),
        "lanes": [
            {"replica_id": replica_id, "runs": [[since_ms, lane.value] for since_ms, lane in runs]}
            for replica_id, runs in lanes.items()
        ],
    }
