"""docs/monitoring: the alert rules and the dashboard name only metrics, labels and values that are served."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tft_coord.core.types import Member, Quorum, QuorumKey
from tft_coord.lighthouse import JobState, JobStatus, Limits, Refusal, ReplicaState, ReplicaStatus, Spent, TrainerReport
from tft_lighthouse.counters import Counters
from tft_lighthouse.goodput import Goodput
from tft_lighthouse.history import Incident, IncidentKind, Phase
from tft_lighthouse.http.metrics import Metrics
from tft_lighthouse.view import LighthouseView

FOLDER = Path(__file__).parents[3] / "docs/monitoring"
RULES = FOLDER / "alert-rules.yaml"
DASHBOARD = FOLDER / "grafana-dashboard.json"
PAGE = (FOLDER.parent / "run-a-lighthouse.md").read_text(encoding="utf-8")
OF_PROMETHEUS = {"up": {"job", "instance"}}  # it makes this one itself
OF_THE_SCRAPE = {"instance"}  # a label that Prometheus adds
VALUES = {
    "state": {each.value for each in (*JobState, *ReplicaState)},
    "refusal": {each.value for each in Refusal},
    "limit": {"max_jobs", "max_replicas", "max_streams"},
    "kind": {each.value for each in IncidentKind},
    "phase": {each.value for each in Phase},
    "cause": {each.value for each in Spent},
}
WORDS = {"by", "on", "ignoring", "group_left", "group_right", "and", "or", "unless", "bool", "offset", "without"}


def served() -> dict[str, set[str]]:
    """Return the labels of each metric in an answer of the lighthouse; histograms by the names of their series."""
    replica = ReplicaStatus(
        replica_id="a", state=ReplicaState.TRAINING, rank=0, step=4, own_ms=30, heard_ms=10, healed_bytes=1
    )
    quorum = Quorum(QuorumKey(7, 1), (Member("a"),), 0)
    job = JobStatus(name="job", state=JobState.TRAINING, step=4, quorum=quorum, replicas=(replica,))
    view = LighthouseView(
        version="1",
        started_ms=1_000,
        now_ms=2_000,
        cluster_id="c",
        is_ready=True,
        address="a:1",
        has_secret=True,
        min_replicas=1,
        heartbeat_timeout_ms=5_000,
        join_timeout_ms=60_000,
        stragglers="warn",
        jobs=(job,),
        limits=Limits(),
    )
    counts = Counters(lambda _: None)
    counts._of("job")
    goodput = Goodput()
    goodput.reported("job", "a", TrainerReport(dict.fromkeys(Spent, 1)), 1_000)
    metrics = Metrics(lambda: view, counts, goodput)
    metrics.closed(
        Incident(
            number=1,
            change=1,
            job="job",
            kind=IncidentKind.LOSS,
            replica_ids=("a",),
            num_replicas=1,
            reason="gone",
            began_ms=0,
            phases={Phase.DETECT: 300},
        )
    )
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


SERVED = served() | OF_PROMETHEUS


def expressions() -> Iterator[tuple[str, str]]:
    """Yield each alert's and each panel's name and expression."""
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$job", ".*")


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def faults(expression: str) -> list[str]:
    """Return what an expression names that the lighthouse does not serve."""
    out: list[str] = []
    labels: set[str] = {"le"}
    for metric, matchers in re.findall(r"\b([a-z][a-z0-9_]*)\{([^}]*)\}", expression):
        for label, pattern in re.findall(r"(\w+)\s*=~?\s*\"([^\"]*)\"", matchers):
            if label not in SERVED.get(metric, set()) | OF_THE_SCRAPE | ({"job"} if "process_" in metric else set()):
                out.append(f"{metric} has no label {label}")
            unknown = set() if pattern == ".*" else set(pattern.split("|")) - VALUES.get(label, {pattern})
            out += [f"no {label} is called {value}" for value in sorted(unknown)]
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", " ", expression)
    grouped = re.findall(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)", bare)
    bare = re.sub(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    for name in re.findall(r"\b[a-z_][a-z0-9_]*\b(?!\s*\()", bare):
        if name in WORDS:
            continue
        if name not in SERVED:
            out.append(f"no metric is called {name}")
        labels |= SERVED.get(name, set())
    for label in re.findall(r"\w+", " ".join(grouped)):
        if label not in labels | OF_THE_SCRAPE:
            out.append(f"no metric here has the label {label}")
    return out


@pytest.mark.parametrize(("name", "expression"), list(expressions()))
def test_an_expression_names_only_what_there_is(name: str, expression: str) -> None:
    assert faults(expression) == [], name
    assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("tft_replica == 0", ["no metric is called tft_replica"]),
        ("increase(tft_incident_phase_seconds[1h])", ["no metric is called tft_incident_phase_seconds"]),
        ('tft_replicas{status="lost"}', ["tft_replicas has no label status"]),
        ('tft_replicas{state="dead"}', ["no state is called dead"]),
        ('tft_refusals_total{refusal=~"full|odd"}', ["no refusal is called odd"]),
        ("sum by (replica) (tft_replicas)", ["no metric here has the label replica"]),
        ("rate(tft_committed_steps_total[5m]) > on (job) tft_job_min_replicas", []),
    ],
)
def test_a_wrong_name_is_found(expression: str, found: list[str]) -> None:
    assert faults(expression) == found


def test_alerts_have_what_a_person_needs_and_the_page_names_each() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]
    assert {rule["alert"] for rule in rules} == set(re.findall(r"^\| `(Tft\w+)` \|", PAGE, re.M))


def test_labels_in_texts_are_those_of_the_expression() -> None:
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            named = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
            of_metrics = [SERVED[name] for name in re.findall(r"[a-z_0-9]+", rule["expr"]) if name in SERVED]
            assert named <= set().union(*of_metrics) | OF_THE_SCRAPE, rule["alert"]


def test_the_dashboard_has_its_source_as_a_variable_and_panels_that_do_not_overlap() -> None:
    found = dashboard()
    assert {each["name"] for each in found["templating"]["list"]} == {"datasource", "job"}
    ids = [panel["id"] for panel in found["panels"]]
    assert len(ids) == len(set(ids))
    cells: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & own, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= own
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel.get("targets", ()))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's prometheus) is not installed")
def test_promtool_reads_the_rules_and_all_expressions(tmp_path: Path) -> None:
    records = [{"record": f"panel:{number}", "expr": each} for number, (_, each) in enumerate(expressions())]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": records}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", RULES, tmp_path / "all.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
