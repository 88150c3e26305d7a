"""A replica of another shape, or with other settings, is refused by name before it joins a reduction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from integration_tests.conftest import Spawn
from integration_tests.training import Event, Job, Launcher
from tft_coord.core.names import shorten
from tft_lighthouse import LighthouseServer

pytestmark = pytest.mark.timeout(180)  # several lives of real processes, on a machine that may be busy


@pytest.fixture
def job(spawn: Spawn) -> Iterator[Job]:
    with LighthouseServer("localhost:0", join_timeout_ms=30_000) as lighthouse:
        yield Job(spawn, lighthouse)


@pytest.mark.in_parts(always=["parameters"])
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"min_replica_size": 2}, "min_replica_size is '1' there and '2' here"),
        ({"model": "buckets"}, "parameter/0 is '2 parameters, their names"),
    ],
    ids=["min_replica_size", "parameters"],
)
def test_who_differs_is_refused_and_nobody_waits_for_it(job: Job, other: dict[str, Any], words: str) -> None:
    first = job.start("a", fingerprint={"data": "v3"})
    job.until(lambda: first.step >= 3, "a trains alone")
    stranger = job.start("b", **{"fingerprint": {"data": "v3"}} | other)
    job.until(lambda: stranger.ended is not None, "b is refused")
    assert stranger.ended is not None
    assert stranger.ended.text.startswith("RefusedError: ")
    assert f"differs from {shorten(first.of_kind('ready')[0].text)} of job 'default'" in stranger.ended.text
    assert words in stranger.ended.text
    assert stranger.commits == {}
    passed = first.step
    third = job.start("c", fingerprint={"data": "v3", "only here": "x"})
    job.until(lambda: third.committed_with(2) and first.committed_with(2), "c belongs to the job")
    assert first.step > passed
    assert first.of_kind("failed") == []
    job.finish([first, third])


@pytest.mark.in_parts
def test_ranks_of_one_group_that_differ_are_refused(job: Job) -> None:
    launcher = Launcher(job, "a")
    ranks = launcher.start_each([{"fingerprint": {"data": "v3"}}, {"fingerprint": {"data": "v4"}}])
    job.until(lambda: all(rank.ended for rank in ranks), "both ranks are refused")
    for rank in ranks:
        assert isinstance(rank.ended, Event)
        assert "differ: user/data is 'v3' on rank 0 and 'v4' on rank 1" in rank.ended.text
