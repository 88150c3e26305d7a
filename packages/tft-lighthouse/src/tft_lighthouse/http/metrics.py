"""The metrics of the lighthouse, as Prometheus reads them.

They are collected when somebody asks: gauges from the view, counters from what has happened since the start. Each
lighthouse has a registry of its own.

Law of this file: names, labels and values; docs/lighthouse-http.md lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Final, final

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from tft_coord.lighthouse import ALL_JOBS, JobState, JobStatus, Refusal, ReplicaState, Spent, shorten
from tft_lighthouse import counters
from tft_lighthouse.goodput import Goodput
from tft_lighthouse.history import Incident
from tft_lighthouse.view import REPLICAS_LISTED_MOST, LighthouseView

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
PHASE_BUCKETS_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0, 1_800.0)
COUNTERS: Final = {
    counters.QUORUMS: ("tft_quorums", "Quorums with a new id that have formed."),
    counters.JOINS: ("tft_replica_joins", "Replicas that have joined a quorum they were not in before."),
    counters.LOSSES: ("tft_replica_losses", "Replicas that were declared lost."),
    counters.LEAVES: ("tft_replica_leaves", "Replicas that have left, finished ones included."),
    counters.BROKEN: ("tft_broken_quorums", "Quorums that broke before the next one formed."),
    counters.FAILED: ("tft_failed_rounds", "Quorums with a new id after a round that failed to commit."),
    counters.ENDS: ("tft_job_ends", "Times that the job has ended."),
}


@final
class Metrics:
    """The metrics of one lighthouse.

    Args:
        view: returns what there is to see now.
        counts: what has happened so far.
        goodput: what the replicas' time went to.
    """

    def __init__(self, view: Callable[[], LighthouseView], counts: counters.Counters, goodput: Goodput) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(view, counts, goodput))
        ProcessCollector(registry=self._registry)
        self._phases = Histogram(
            "tft_incident_phase_seconds",
            "How long a phase of an incident took.",
            ["kind", "phase"],
            registry=self._registry,
            buckets=PHASE_BUCKETS_S,
        )

    def closed(self, incident: Incident) -> None:
        """Count the phases of an incident that has ended."""
        for phase, lasted_ms in incident.phases.items():
            self._phases.labels(incident.kind.value, phase.value).observe(lasted_ms / 1_000)

    def text(self, opened: str | None = ALL_JOBS) -> bytes:
        """Return the metrics in the text format of `CONTENT_TYPE`: all, or those of the one job that a secret opens."""
        if opened == ALL_JOBS:
            return generate_latest(self._registry)
        of_job = CollectorRegistry(auto_describe=False)
        of_job.register(_OneJob(self._registry, opened or ""))
        return generate_latest(of_job)


@final
class _OneJob(Collector):
    """The samples of a registry that are of one job."""

    def __init__(self, registry: CollectorRegistry, job: str) -> None:
        self._registry = registry
        self._job = job

    def collect(self) -> Iterable[Metric]:
        """Return the metric families, with the job's samples alone."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if sample.labels.get("job") == self._job]
            if family.samples:
                yield family


@final
class _Collector(Collector):
    def __init__(self, view: Callable[[], LighthouseView], counts: counters.Counters, goodput: Goodput) -> None:
        self._view = view
        self._counts = counts
        self._goodput = goodput

    def collect(self) -> Iterable[Metric]:
        """Return all metric families."""
        view = self._view()
        info = InfoMetricFamily("tft_lighthouse", "The lighthouse.")
        info.add_metric([], {"version": view.version, "cluster_id": view.cluster_id})
        yield info
        yield GaugeMetricFamily(
            "tft_lighthouse_start_time_seconds", "Start, in seconds since 1970.", view.started_ms / 1_000
        )
        yield GaugeMetricFamily(
            "tft_lighthouse_ready",
            "1: replicas should come here. 0: another lighthouse serves them.",
            view.is_ready,
        )
        yield GaugeMetricFamily("tft_lighthouse_streams", "Open streams and waiting calls.", view.num_streams)
        limits = GaugeMetricFamily("tft_lighthouse_limit", "What clients may use.", labels=["limit"])
        for each in fields(view.limits):
            limits.add_metric([each.name], getattr(view.limits, each.name))
        yield limits
        yield from _jobs(view.jobs)
        yield from _replicas(view.jobs)
        yield from _counted(self._counts.jobs)
        yield from _spent(self._goodput.jobs)
        refusals = CounterMetricFamily("tft_refusals", "Refused streams, requests and calls.", labels=["refusal"])
        for refusal in Refusal:
            refusals.add_metric([refusal.value], self._counts.refusals[refusal.value])
        yield refusals


def _jobs(jobs: Iterable[JobStatus]) -> Iterable[Metric]:
    state = GaugeMetricFamily("tft_job_state", "1 for the state of the job, else 0.", labels=["job", "state"])
    replicas = GaugeMetricFamily("tft_replicas", "Known replicas by state.", labels=["job", "state"])
    quorum_id = GaugeMetricFamily("tft_quorum_id", "Id of the newest quorum.", labels=["job"])
    least = GaugeMetricFamily("tft_job_min_replicas", "Smallest quorum of the job.", labels=["job"])
    members = GaugeMetricFamily("tft_quorum_members", "Members of the newest quorum.", labels=["job"])
    age = GaugeMetricFamily("tft_quorum_age_seconds", "Time since the quorum's id rose.", labels=["job"])
    waited = GaugeMetricFamily("tft_waiting_seconds", "How long members have waited for others.", labels=["job"])
    steps = CounterMetricFamily("tft_committed_steps", "Committed steps, as members report them.", labels=["job"])
    for job in jobs:
        for each in JobState:
            state.add_metric([job.name, each.value], each is job.state)
        by_state = Counter(replica.state for replica in job.replicas)
        for kind in ReplicaState:
            replicas.add_metric([job.name, kind.value], by_state[kind])
        if job.quorum is not None:
            quorum_id.add_metric([job.name], job.quorum.key.quorum_id)
            members.add_metric([job.name], len(job.quorum.members))
            age.add_metric([job.name], job.quorum_age_ms / 1_000)
        least.add_metric([job.name], job.min_replicas)
        waited.add_metric([job.name], job.wait.lasted_ms / 1_000 if job.wait is not None else 0)
        steps.add_metric([job.name], job.step)
    return state, replicas, least, quorum_id, members, age, waited, steps


def _replicas(jobs: Iterable[JobStatus]) -> Iterable[Metric]:
    labels = ["job", "replica"]
    step = GaugeMetricFamily("tft_replica_step", "Committed steps of the replica.", labels=labels)
    own = GaugeMetricFamily(
        "tft_replica_own_step_seconds", "Its own part of a step, without its waits for others.", labels=labels
    )
    heard = GaugeMetricFamily("tft_replica_last_heard_seconds", "Time since its last message.", labels=labels)
    healed = GaugeMetricFamily("tft_replica_healed_bytes", "Live state received in this session.", labels=labels)
    for job in jobs:
        for replica in job.replicas[:REPLICAS_LISTED_MOST]:
            names = [job.name, shorten(replica.replica_id)]
            step.add_metric(names, replica.step)
            healed.add_metric(names, replica.healed_bytes)
            if replica.own_ms:
                own.add_metric(names, replica.own_ms / 1_000)
            if replica.heard_ms is not None:
                heard.add_metric(names, replica.heard_ms / 1_000)
    return step, own, heard, healed


def _spent(by_job: Mapping[str, Mapping[Spent, int]]) -> Iterable[Metric]:
    good = CounterMetricFamily(
        "tft_goodput_seconds", "Time of replicas in steps that committed, as they report it.", labels=["job"]
    )
    bad = CounterMetricFamily(
        "tft_badput_seconds", "All other time of replicas, as they report it.", labels=["job", "cause"]
    )
    for job, spent_ms in by_job.items():
        good.add_metric([job], spent_ms.get(Spent.COMMIT, 0) / 1_000)
        for cause in Spent:
            if cause is not Spent.COMMIT:
                bad.add_metric([job, cause.value], spent_ms.get(cause, 0) / 1_000)
    return good, bad


def _counted(by_job: dict[str, Counter[str]]) -> Iterable[Metric]:
    for kind, (name, text) in COUNTERS.items():
        family = CounterMetricFamily(name, text, labels=["job"])
        for job, counts in by_job.items():
            family.add_metric([job], counts[kind])
        yield family
