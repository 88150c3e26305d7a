"""docs/lighthouse-http.md names every route, field, state and metric, and none that there is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tft_coord.core.job_end import Ended
from tft_coord.core.progress import Phase
from tft_coord.core.types import Member, Quorum, QuorumKey
from tft_coord.lighthouse import JobState, JobStatus, ReplicaState, ReplicaStatus, TrainerReport, WaitStatus
from tft_lighthouse.counters import Counters
from tft_lighthouse.goodput import Goodput
from tft_lighthouse.history import Incident, IncidentKind
from tft_lighthouse.history import Phase as IncidentPhase
from tft_lighthouse.http import timeline as timeline_over_http
from tft_lighthouse.http.app import PATHS
from tft_lighthouse.http.metrics import Metrics
from tft_lighthouse.timeline import Lane, Timeline
from tft_lighthouse.view import LighthouseView, as_json, incident_as_json

PAGE = (Path(__file__).parents[3] / "docs/lighthouse-http.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([^`\n]+)`", PAGE))

REPLICA = ReplicaStatus(
    replica_id="a", state=ReplicaState.TRAINING, rank=0, step=4, phase=Phase.OWN, own_ms=30, heard_ms=10
)
JOB = JobStatus(
    name="job",
    state=JobState.TRAINING,
    step=4,
    quorum=Quorum(QuorumKey(7, 1), (Member("a"),), 0),
    wait=WaitStatus(sentence="it waits", lasted_ms=5),
    ended=Ended(4, ("a",), QuorumKey(7, 1), 0),
    replicas=(REPLICA,),
)
INCIDENT = Incident(
    number=1,
    change=1,
    job="job",
    kind=IncidentKind.LOSS,
    replica_ids=("a",),
    num_replicas=1,
    reason="gone",
    began_ms=0,
    phases={IncidentPhase.DETECT: 300},
)
VIEW = LighthouseView(
    version="1",
    started_ms=1_000,
    now_ms=2_000,
    address="http://lighthouse:29510",
    has_secret=False,
    cluster_id="c",
    is_ready=True,
    min_replicas=1,
    heartbeat_timeout_ms=5_000,
    join_timeout_ms=60_000,
    stragglers="warn",
    jobs=(JOB,),
)


def names_in(found: Any) -> set[str]:
    if isinstance(found, dict):
        return {name for name in found if name not in ("lighthouse", "jobs")}.union(*map(names_in, found.values()))
    return set().union(*map(names_in, found)) if isinstance(found, list) else set()


def test_every_field_of_the_status_is_documented() -> None:
    named = {name.rpartition(".")[2] for name in NAMED}
    assert names_in(as_json(VIEW)) - named == set()


def test_every_field_kind_and_phase_of_an_incident_is_documented() -> None:
    fields = set(incident_as_json(INCIDENT))
    values = {each.value for each in (*IncidentKind, *IncidentPhase)}
    assert (fields | values) - NAMED == set()


def test_every_field_and_state_of_a_timeline_is_documented() -> None:
    timeline = Timeline()
    timeline.look([JOB], 2_000)
    found = timeline_over_http.as_json(timeline, "job", 0, 1_000)
    assert found["lanes"]
    assert found["points"]
    named = {name.rpartition(".")[2] for name in NAMED} | {"lanes"}
    assert (names_in(found) | {each.value for each in Lane}) - named == set()


def test_every_state_and_phase_is_documented() -> None:
    states = {each.value for each in (*JobState, *ReplicaState)} | {each.name.lower() for each in Phase}
    assert states - NAMED == set()


def test_every_route_is_documented() -> None:
    asked = {name.partition(" ")[2] for name in NAMED if name.startswith("GET ")}
    assert asked == set(PATHS)


def test_every_metric_is_documented_with_its_labels_and_no_other() -> None:
    counts = Counters(lambda _: None)
    counts._of("job")
    goodput = Goodput()
    goodput.reported("job", "replica", TrainerReport(), 0)
    metrics = Metrics(lambda: VIEW, counts, goodput)
    metrics.closed(INCIDENT)
    found = {
        sample.name.removesuffix("_bucket"): set(sample.labels) - {"le"}
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if not sample.name.startswith("process_") and not sample.name.endswith("_created")
        if family.type != "histogram" or sample.name.endswith("_bucket")
    }
    rows = re.findall(r"^\| `(tft_\w+)` \| (.*?) \|", PAGE, re.M)
    assert {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows} == found
