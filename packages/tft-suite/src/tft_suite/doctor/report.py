"""Facts and findings as text, one line each, or as JSON.

Law of this file: values to text.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

from tft_coord.timeouts import Timeouts
from tft_suite.doctor.facts import Facts, LighthouseFacts
from tft_suite.doctor.findings import Finding


def report(facts: Facts, found: Sequence[Finding]) -> str:
    """Return the text that `tft doctor` prints."""
    return "\n".join(_lines(facts, found))


def as_json(facts: Facts, found: Sequence[Finding]) -> str:
    """Return what `tft doctor --json` prints: the facts, and the findings in two lists."""
    return json.dumps(
        {
            "python": platform.python_version(),
            **asdict(facts),
            "problems": [finding.sentence for finding in found if finding.is_problem],
            "notes": [finding.sentence for finding in found if not finding.is_problem],
        }
    )


def _lines(facts: Facts, found: Sequence[Finding]) -> Iterator[str]:
    yield "versions"
    yield f"  python {platform.python_version()}, " + ", ".join(
        f"{name} {version or 'missing'}" for name, version in facts.versions.items()
    )
    yield f"  accelerator: {facts.accelerator}"
    yield "this machine"
    yield f"  others reach it as {facts.hostname}"
    for name, addresses in sorted(facts.interfaces.items()):
        if addresses:
            yield f"  {name}: {', '.join(addresses)}"
    yield "environment"
    for name, value in facts.environ.items():
        yield f"  {name}={value}"
    if not facts.environ:
        yield "  none of the variables that a Manager reads is set"
    yield "lighthouse"
    for each in facts.lighthouses:
        yield f"  {each.address}: {_described(each)}"
    if not facts.lighthouses:
        yield "  none is set"
    if facts.timeouts is not None:
        yield "timeouts, ms (a lighthouse uses its own join, heartbeat and tick)"
        for item in fields(Timeouts):
            yield f"  {item.name.removesuffix('_ms'):<20} {getattr(facts.timeouts, item.name):>9}"
    yield from _section(found, is_problem=True, heading="problems")
    yield from _section(found, is_problem=False, heading="notes")


def _section(found: Sequence[Finding], *, is_problem: bool, heading: str) -> Iterator[str]:
    sentences = [finding.sentence for finding in found if finding.is_problem is is_problem]
    yield f"{heading}: {len(sentences) or 'none'}"
    for number, sentence in enumerate(sentences, start=1):
        yield f"  {number}. {sentence}"


def _described(lighthouse: LighthouseFacts) -> str:
    found = lighthouse.description
    if found is None:
        if lighthouse.is_standby:
            return "stands by"
        return "torchft's" if lighthouse.is_foreign else "unusable, see the problems"
    up_s = (found.now_ms - found.started_ms) // 1000
    named = [(f"job {job.name}", job) for job in found.jobs]
    if found.torchft is not None:
        named.append(("torchft's members", found.torchft))
    jobs = "; ".join(
        f"{name}: quorum {job.quorum_id} of {job.num_members}, waits for: {job.waiting_for}" for name, job in named
    )
    policies = f", lost state {found.lost_state_timeout_ms} ms" if found.lost_state_timeout_ms else ""
    policies += f", stragglers {found.stragglers}" if found.stragglers else ""
    return (
        f"tft-lighthouse {found.version}, up {up_s} s, min_replicas {found.min_replicas}, join {found.join_timeout_ms} "
        f"ms, heartbeat {found.heartbeat_timeout_ms} ms, tick {found.quorum_tick_ms} ms{policies}; "
        f"{jobs or 'no job yet'}"
    )
