"""The limits of a lighthouse and the settings of single jobs, in its cores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tft_coord.compat.rule import TorchftCore
from tft_coord.core import config, effects, events
from tft_coord.core.config import JobSettings, LighthouseConfig, Limits
from tft_coord.core.lighthouse import LighthouseCore
from tft_coord.core.types import Hello, Member, Refusal
from tft_coord.errors import ConfigError
from tft_coord.timeouts import Timeouts

STARTED_MS = 1_700_000_000_000
SETTLED_MS = 1_000  # a lighthouse that has just started waits for a moment
FORGOTTEN_MS = SETTLED_MS + Timeouts().forget_after_ms + 10_000


def a_core(settings: LighthouseConfig) -> LighthouseCore:
    return LighthouseCore(settings, started_ms=STARTED_MS, cluster_id="c", nonces=lambda: 7, now_ms=0)


def hello(
    core: LighthouseCore, stream: int, name: str, job: str = "job", now_ms: int = SETTLED_MS, replaces: str = ""
) -> Refusal | None:
    """Return why the hello is refused, or None."""
    said = Hello(job, name, 1, f"{name}:1", replaces=replaces)
    out = core.handle(events.HelloReceived(stream, said), now_ms, STARTED_MS + now_ms)
    return next((one.refusal for one in out if isinstance(one, effects.RefuseSession)), None)


def message(core: LighthouseCore, stream: int, name: str, job: str = "job") -> str:
    out = core.handle(events.HelloReceived(stream, Hello(job, name, 1, f"{name}:1")), SETTLED_MS, STARTED_MS)
    (refused,) = (one for one in out if isinstance(one, effects.RefuseSession))
    return refused.message


def ask(core: LighthouseCore, stream: int, name: str, now_ms: int = SETTLED_MS) -> list[Any]:
    asked = events.QuorumRequested(stream, 1, Member(name), None)
    return core.handle(asked, now_ms, STARTED_MS + now_ms)


def close_all(core: LighthouseCore, streams: range, until_ms: int) -> None:
    for stream in streams:
        core.handle(events.DeathReported(stream, "the end"), SETTLED_MS, STARTED_MS)
        core.handle(events.StreamClosed(stream), SETTLED_MS, STARTED_MS)
    for now_ms in range(SETTLED_MS, until_ms, 100):
        core.tick(now_ms, STARTED_MS + now_ms)


def test_a_job_too_many_is_refused_until_one_is_forgotten() -> None:
    core = a_core(LighthouseConfig(limits=Limits(max_jobs=2)))
    assert hello(core, 1, "a", "one") is None
    assert hello(core, 2, "b", "two") is None
    assert hello(core, 3, "c", "three") is Refusal.FULL
    assert message(core, 4, "c", "three") == (
        "replica c is the first of job 'three', and this lighthouse knows 2 jobs, the most that it may serve "
        "(max_jobs 2). Raise max_jobs of the lighthouse, use another one, or wait: it forgets a job 50 s after its "
        "last replica"
    )
    assert core.jobs == ("one", "two")
    assert hello(core, 5, "d", "two") is None
    close_all(core, range(1, 2), FORGOTTEN_MS)
    assert hello(core, 6, "c", "three", FORGOTTEN_MS) is None


def test_a_replica_too_many_is_refused_and_a_known_one_returns() -> None:
    core = a_core(LighthouseConfig(limits=Limits(max_replicas=2)))
    assert hello(core, 1, "a") is None
    assert hello(core, 2, "b") is None
    assert hello(core, 3, "c") is Refusal.FULL
    assert message(core, 3, "c") == (
        "job 'job' has 2 connected replicas, the most that it may have (max_replicas 2), so replica c can't join. "
        "Raise max_replicas of the lighthouse, for all jobs or for this one, or end a replica"
    )
    assert hello(core, 4, "a") is None  # on another stream
    assert hello(core, 5, "d", "another job") is None
    assert hello(core, 6, "a2", replaces="a") is None  # its predecessor has ended
    core.handle(events.StreamClosed(4), SETTLED_MS, STARTED_MS)
    assert hello(core, 7, "c") is Refusal.FULL
    core.handle(events.StreamClosed(6), SETTLED_MS, STARTED_MS)
    assert hello(core, 7, "c") is None


def test_a_refused_replica_is_not_waited_for_and_the_job_trains() -> None:
    core = a_core(LighthouseConfig(limits=Limits(max_replicas=1)))
    hello(core, 1, "a")
    hello(core, 2, "b")
    assert ask(core, 2, "b") == []
    assert any(isinstance(one, effects.AnswerQuorum) for one in ask(core, 1, "a"))


def test_lost_replicas_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tft_coord.core.room.LOST_KEPT_MOST", 3)
    core = a_core(LighthouseConfig())
    for stream in range(1, 4):
        assert hello(core, stream, f"r{stream}") is None
    close_all(core, range(1, 4), SETTLED_MS + 200)
    assert hello(core, 9, "another") is Refusal.FULL
    assert "3 lost replicas that are still remembered" in message(core, 9, "another")


def test_a_job_of_its_own_settings() -> None:
    jobs = {"job": JobSettings(min_replicas=2, max_replicas=3), "small": JobSettings(max_replicas=1)}
    settings = LighthouseConfig(min_replicas=1, jobs=jobs)
    assert settings.of_job("other") is settings
    assert (settings.of_job("job").min_replicas, settings.of_job("job").limits.max_replicas) == (2, 3)
    assert (settings.of_job("small").min_replicas, settings.of_job("small").limits.max_replicas) == (1, 1)
    core = a_core(settings)
    hello(core, 1, "a")
    ask(core, 1, "a")
    assert core.quorum("job") is None
    assert core.waiting_for("job") == "1 of min_replicas 2 have asked"
    hello(core, 2, "b", "other")
    ask(core, 2, "b")
    assert core.quorum("other") is not None


def test_other_settings_hold_from_the_next_look_on() -> None:
    settings = LighthouseConfig(min_replicas=2)
    core = a_core(settings)
    hello(core, 1, "a")
    ask(core, 1, "a")
    core.tick(1_100, STARTED_MS + 1_100)
    assert core.quorum("job") is None
    core.reconfigure(replace(settings, jobs={"job": JobSettings(min_replicas=1, max_replicas=1)}))
    out = core.tick(1_200, STARTED_MS + 1_200)
    assert any(isinstance(one, effects.AnswerQuorum) for one in out)
    assert hello(core, 2, "b", now_ms=1_200) is Refusal.FULL
    core.reconfigure(settings)
    assert hello(core, 2, "b", now_ms=1_200) is None


def test_a_cover_of_bad_links_keeps_the_new_least_number() -> None:
    core = a_core(LighthouseConfig(min_replicas=2))
    hello(core, 1, "a")
    core.reconfigure(LighthouseConfig(min_replicas=3))
    assert core._jobs["job"]._reach.min_replicas == 3


def test_torchfts_members_have_the_same_limit() -> None:
    core = TorchftCore(LighthouseConfig(limits=Limits(max_replicas=2)), started_ms=STARTED_MS)
    for name in "abc":
        core.handle(events.HeartbeatReceived(name), 0, STARTED_MS)
    status = core.status("default", 0)
    assert status is not None
    assert [each.replica_id for each in status.replicas] == ["a", "b"]
    (refused,) = core.handle(events.UnaryQuorumRequested(1, Member("c")), 0, STARTED_MS)
    assert isinstance(refused, effects.RefuseUnary)
    assert (refused.call, refused.refusal) == (1, Refusal.FULL)
    assert "has 2 members, the most that it may have (max_replicas), so replica c can't join" in refused.message
    core.handle(events.UnaryQuorumRequested(2, Member("a")), 0, STARTED_MS)
    formed = core.handle(events.UnaryQuorumRequested(3, Member("b")), 0, STARTED_MS)
    assert any(isinstance(one, effects.AnswerUnaryQuorum) for one in formed)
    core.reconfigure(LighthouseConfig())
    core.handle(events.HeartbeatReceived("c"), 1, STARTED_MS)
    status = core.status("default", 1)
    assert status is not None
    assert len(status.replicas) == 3


def test_members_of_the_other_form_are_bounded_too() -> None:
    core = TorchftCore(LighthouseConfig(limits=Limits(max_replicas=3)), started_ms=STARTED_MS)
    core.handle(events.UnaryQuorumRequested(0, Member("a", reconfigure_handles=("h",))), 0, STARTED_MS)
    for call in range(1, 9):
        core.handle(events.UnaryQuorumRequested(call, Member(f"m{call}")), 0, STARTED_MS)
    assert len(core._beats) + len(core._refused_ms) == 3


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Limits(max_jobs=0), "max_jobs is 0; give 1 to 100000"),
        (lambda: Limits(max_streams=True), "max_streams is True; give 1 to 1000000"),
        (lambda: Limits(max_replicas=10**6), "max_replicas is 1000000; give 1 to 100000"),
        (lambda: JobSettings(min_replicas=0), "min_replicas is 0; give 1 to 100000"),
        (lambda: JobSettings(max_replicas=1.5), "max_replicas is 1.5; give 1 to 100000"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_number_is_named(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        make()


def test_the_largest_numbers_are_those_of_the_wire() -> None:
    from tft_coord.wire.limits import MAX_MEMBERS

    assert config.QUORUM_MOST == MAX_MEMBERS
