"""The last 30 minutes of each job: runs and points from looks, bounded in number."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tft_coord.core.progress import Phase
from tft_coord.lighthouse import JobState, JobStatus, ReplicaState, ReplicaStatus
from tft_lighthouse import timeline as module
from tft_lighthouse.http import timeline as over_http
from tft_lighthouse.timeline import POINT_MS, SPAN_MS, Lane, Timeline, lane_of

TRAINING = ReplicaStatus(replica_id="a", state=ReplicaState.TRAINING, rank=0)
LOST = replace(TRAINING, state=ReplicaState.LOST, rank=None)


def job(*replicas: ReplicaStatus, step: int = 0, name: str = "job", state: JobState = JobState.TRAINING) -> JobStatus:
    return JobStatus(name=name, state=state, step=step, replicas=replicas)


def many(number: int, state: ReplicaState = ReplicaState.TRAINING) -> Sequence[ReplicaStatus]:
    return [ReplicaStatus(replica_id=f"replica_{index}", state=state, rank=index) for index in range(number)]


@pytest.mark.parametrize(
    ("state", "rank", "lane"),
    [
        (ReplicaState.TRAINING, 0, Lane.TRAINING),
        (ReplicaState.HEALING, 0, Lane.HEALING),
        (ReplicaState.WAITING, 0, Lane.TRAINING),  # for a moment in each step
        (ReplicaState.WAITING, None, Lane.WAITING),
        (ReplicaState.JOINING, None, Lane.WAITING),
        (ReplicaState.LEFT_OUT, None, Lane.WAITING),
        (ReplicaState.KEPT_OUT, None, Lane.WAITING),
        (ReplicaState.UNHEARD, None, Lane.WAITING),
        (ReplicaState.LOST, 0, Lane.GONE),
        (ReplicaState.LEFT, None, Lane.GONE),
        (ReplicaState.FINISHED, None, Lane.GONE),
    ],
)
def test_each_state_has_a_lane(state: ReplicaState, rank: int | None, lane: Lane) -> None:
    assert lane_of(replace(TRAINING, state=state, rank=rank), job()) is lane


def test_every_state_was_asked_for() -> None:
    cases = test_each_state_has_a_lane.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {case[0] for case in cases} == set(ReplicaState)


def test_a_member_waits_once_its_job_does() -> None:
    waiting = job(state=JobState.WAITING)
    reduces = replace(TRAINING, phase=Phase.REDUCING, phase_ms=2_000)
    assert lane_of(replace(TRAINING, state=ReplicaState.WAITING), waiting) is Lane.WAITING
    assert lane_of(reduces, waiting) is Lane.WAITING
    assert lane_of(reduces, job()) is Lane.TRAINING
    assert lane_of(replace(reduces, phase_ms=1_999), waiting) is Lane.TRAINING
    assert lane_of(replace(reduces, phase=Phase.OWN), waiting) is Lane.TRAINING, "the others wait for it"


def test_a_run_begins_when_the_state_changes_and_a_reader_gets_what_is_new() -> None:
    timeline = Timeline()
    for at_ms, replica in [(1_000, TRAINING), (1_250, TRAINING), (1_500, LOST), (1_750, LOST)]:
        timeline.look([job(replica)], at_ms)
    assert timeline.lanes("job") == {"a": [(1_000, Lane.TRAINING), (1_500, Lane.GONE)]}
    assert timeline.lanes("job", after_ms=1_250) == {"a": [(1_500, Lane.GONE)]}
    assert timeline.lanes("job", after_ms=1_500) == {}
    assert timeline.lanes("none") == {}
    assert timeline.points("none") == []
    assert set(timeline.jobs) == {"job"}


def test_a_healing_between_two_looks_is_a_run() -> None:
    timeline = Timeline()
    joins = replace(TRAINING, state=ReplicaState.JOINING, rank=None)
    timeline.look([job(joins)], 1_000)
    timeline.heals("job", ["a", "b"], 1_010)
    timeline.look([job(*(replace(TRAINING, replica_id=each) for each in "ab"))], 1_250)
    assert timeline.lanes("job", after_ms=1_000) == {
        each: [(1_010, Lane.HEALING), (1_250, Lane.TRAINING)] for each in "ab"
    }
    check_counts(timeline)


def test_a_replica_that_was_gone_before_the_first_look_has_no_lane() -> None:
    timeline = Timeline()
    timeline.look([job(LOST)], 1_000)
    assert timeline.lanes("job") == {}


def test_replicas_and_jobs_that_the_lighthouse_forgets_are_gone() -> None:
    timeline = Timeline()
    timeline.look([job(*many(2)), job(TRAINING, name="other")], 1_000)
    timeline.look([job(*many(1))], 2_000)
    assert timeline.lanes("job") == {
        "replica_0": [(1_000, Lane.TRAINING)],
        "replica_1": [(1_000, Lane.TRAINING), (2_000, Lane.GONE)],
    }
    assert timeline.lanes("other") == {"a": [(1_000, Lane.TRAINING), (2_000, Lane.GONE)]}
    timeline.look([job(*many(2))], 3_000)
    assert timeline.lanes("job", after_ms=2_000) == {"replica_1": [(3_000, Lane.TRAINING)]}


def test_points_are_five_seconds_apart_or_as_the_participants_change() -> None:
    timeline = Timeline()
    heals = replace(TRAINING, replica_id="b", state=ReplicaState.HEALING, rank=1)
    looks = {0: (TRAINING, heals), 250: (TRAINING, heals), 500: (TRAINING, replace(heals, state=ReplicaState.TRAINING))}
    for at_ms, replicas in looks.items():
        timeline.look([job(*replicas, step=at_ms)], 10_000 + at_ms)
    for at_ms in range(750, 11_000, 250):
        timeline.look([job(*looks[500], step=at_ms)], 10_000 + at_ms)
    assert timeline.points("job") == [(10_000, 1, 0), (10_500, 2, 500), (15_500, 2, 5_500), (20_500, 2, 10_500)]
    assert timeline.points("job", after_ms=15_500) == [(20_500, 2, 10_500)]


def test_a_clock_that_is_set_back_goes_on_from_the_last_look() -> None:
    timeline = Timeline()
    timeline.look([job(TRAINING)], 5_000)
    timeline.look([job(LOST)], 1_000)
    assert timeline.lanes("job") == {"a": [(5_000, Lane.TRAINING), (5_001, Lane.GONE)]}


def test_what_is_older_than_the_span_is_dropped() -> None:
    timeline = Timeline()
    timeline.look([job(TRAINING, *many(1)), job(TRAINING, name="other")], 1_000)
    timeline.look([job(LOST, *many(1))], 2_000)
    timeline.look([job(TRAINING, *many(1))], 3_000)
    for at_ms in range(POINT_MS, SPAN_MS + 20_000, POINT_MS):
        timeline.look([job(TRAINING, *many(1))], at_ms)
    assert timeline.lanes("job") == {"a": [(3_000, Lane.TRAINING)], "replica_0": [(1_000, Lane.TRAINING)]}
    assert timeline.points("job")[0][0] >= timeline.now_ms - SPAN_MS - POINT_MS
    assert "other" not in timeline.jobs
    assert (timeline._num_lanes, timeline._num_runs) == (2, 2)


def check_counts(timeline: Timeline) -> None:
    lanes = [runs for each in timeline._jobs.values() for runs in each.lanes.values()]
    assert timeline._num_lanes == len(lanes) <= module.LANES_MOST
    assert timeline._num_runs == sum(map(len, lanes)) <= module.RUNS_MOST


def test_lanes_are_bounded_and_those_of_the_gone_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LANES_MOST", 3)
    timeline = Timeline()
    for index in range(10):  # a replica that crashes as soon as it comes
        timeline.look([job(replace(TRAINING, replica_id=f"replica_{index}"))], 1_000 + index)
        check_counts(timeline)
    assert list(timeline.lanes("job")) == ["replica_7", "replica_8", "replica_9"]
    timeline.look([job(*many(10))], 2_000)
    check_counts(timeline)
    assert len(timeline.lanes("job")) == 3


def test_runs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUNS_MOST", 20)
    monkeypatch.setattr(module, "RUNS_OF_A_LANE", 5)
    timeline = Timeline()
    states = (ReplicaState.TRAINING, ReplicaState.LOST)
    for turn in range(100):
        timeline.look([job(*many(4, states[turn % 2]))], 1_000 + turn)
        check_counts(timeline)
    assert all(len(runs) > 2 and runs[-1] == (1_099, Lane.GONE) for runs in timeline.lanes("job").values())


def test_points_and_jobs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOBS_MOST", 3)
    timeline = Timeline()
    for turn in range(2 * module.POINTS_MOST):
        timeline.look([job(*many(turn % 2))], 1_000 + turn)
    points = timeline.points("job")
    assert len(points) == module.POINTS_MOST
    assert points[-1] == (1_000 + turn, 1, 0)
    for index in range(10):
        timeline.look([job(TRAINING, name=f"job_{index}")], 100_000 + index * POINT_MS)
    assert len(timeline._jobs) == 3
    check_counts(timeline)


def test_readers_of_a_moment_share_an_answer_and_get_no_less() -> None:
    assert over_http.rounded(0) == 0
    assert over_http.rounded(1_700_000_004_999) == over_http.rounded(1_700_000_000_000) == 1_700_000_000_000


def test_hours_of_a_hundred_replicas_that_come_and_go_cost_no_more_memory() -> None:
    timeline = Timeline()
    tracemalloc.start()
    try:
        for turn in range(400):  # each minute one is new
            ids = [f"replica_{index}:{(turn + index) // 100}" for index in range(100)]
            timeline.look([job(*[replace(TRAINING, replica_id=each) for each in ids], step=turn)], turn * 60_000)
            if turn == 200:
                before, _ = tracemalloc.get_traced_memory()
        check_counts(timeline)
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
        assert before < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_look_at_a_thousand_replicas_and_an_answer_take_milliseconds() -> None:
    timeline = Timeline()
    jobs = [job(*many(1_000))]
    timeline.look(jobs, 1_000)
    took_s = []
    for turn in range(5):  # the best of them: other processes take the core away
        began = time.perf_counter()
        timeline.look(jobs, 2_000 + turn)
        over_http.as_bytes(timeline, "job", 1_000_000, 0)
        took_s.append(time.perf_counter() - began)
    assert min(took_s) < 0.02
