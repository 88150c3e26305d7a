"""Findings as text and as JSON.

Law of this file: values to text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Final

from tft_suite.trace.analysis import GroupTraces
from tft_suite.trace.model import BrokenFile, Finding

__all__ = ["as_json", "as_text"]

_BROKEN_SHOWN_MAX: Final = 20


def as_text(groups: Sequence[GroupTraces], found: Sequence[Finding], broken: Sequence[BrokenFile]) -> str:
    """Return the text that `tft trace` prints."""
    return "\n".join(_lines(groups, found, broken))


def _lines(groups: Sequence[GroupTraces], found: Sequence[Finding], broken: Sequence[BrokenFile]) -> Iterator[str]:
    yield "groups"
    for group in groups:
        calls = sum(len(trace.calls) for trace in group.traces.values())
        reasons = ", ".join(sorted({trace.reason for trace in group.traces.values()}))
        yield (
            f"  job {group.job}, {group.place}: records of {len(group.traces)} of {group.world_size} ranks, {calls} "
            f"calls ({reasons})"
        )
    if not groups:
        yield "  none"
    yield f"problems: {len(found) or 'none'}"
    for number, finding in enumerate(found, start=1):
        yield f"  {number}. {finding.kind.replace('_', ' ')}: {finding.sentence}."
    if broken:
        yield f"unusable files: {len(broken)}"
        for file in broken[:_BROKEN_SHOWN_MAX]:
            yield f"  {file.path!r}: {file.reason}"
        if len(broken) > _BROKEN_SHOWN_MAX:
            yield f"  and {len(broken) - _BROKEN_SHOWN_MAX} more, which --json shows"


def as_json(groups: Sequence[GroupTraces], found: Sequence[Finding], broken: Sequence[BrokenFile]) -> str:
    """Return the JSON that `tft trace --json` prints."""
    content = {
        "version": 1,
        "groups": [
            {
                "job": group.job,
                "quorum": group.quorum,
                "group": group.group,
                "world_size": group.world_size,
                "ranks": [
                    {
                        "rank": rank,
                        "replica": trace.process.replica,
                        "group_rank": trace.process.group_rank,
                        "host": trace.process.host,
                        "pid": trace.process.pid,
                        "reason": trace.reason,
                        "calls": len(trace.calls),
                        "file": trace.path,
                    }
                    for rank, trace in group.traces.items()
                ],
            }
            for group in groups
        ],
        "problems": [asdict(finding) for finding in found],
        "unusable_files": [asdict(file) for file in broken],
    }
    return json.dumps(content, indent=2)
