"""What a rank's time goes to: every moment has one cause, and the causes sum to the wall time."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import tft_algos.manager.metrics
from tft_algos import ConfigError, ManagerClosedError, export_metrics
from tft_algos.manager.step.time_account import TimeAccount, Wait
from tft_algos.testing import ManualClock, plan_of
from tft_coord.core.stalls import STALLS_MOST, Spent
from tft_coord.core.types import QuorumKey

FIRST, SECOND = QuorumKey(1, 7), QuorumKey(2, 7)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def account(clock: ManualClock) -> TimeAccount:
    return TimeAccount(clock.monotonic)


def commits(account: TimeAccount, clock: ManualClock, step: int, key: QuorumKey = FIRST) -> None:
    """A step of 100 ms of own work and 10 ms in reductions, which commits."""
    account.step_begins()
    clock.pass_s(0.1)
    with account.of_round:
        clock.pass_s(0.01)
    account.step_ended(committed=True, key=key, step=step)


def test_a_loss_in_parts(account: TimeAccount, clock: ManualClock) -> None:
    commits(account, clock, 1)
    clock.pass_s(0.005)  # the optimizer steps
    account.step_begins()
    clock.pass_s(0.1)  # forward and backward
    with account.of_round:
        clock.pass_s(0.3)  # a member is gone
        account.broke()
        clock.pass_s(0.002)
    times, stall = account.step_ended(committed=False, key=FIRST, step=1)
    assert times.lasted_s == pytest.approx(0.407)
    assert times.spent_s == pytest.approx({Spent.COMMIT: 0.005, Spent.REDO: 0.1, Spent.DETECT: 0.3, Spent.ABORT: 0.002})
    assert stall is None
    with account.of_round:
        clock.pass_s(0.004)  # what the failed step has left running
    account.step_begins()
    with account.of_quorum:
        clock.pass_s(0.02)
        account.planned(heals=False)
        clock.pass_s(0.03)
    with account.of_state:
        clock.pass_s(0.04)  # a newcomer takes state here
    clock.pass_s(0.1)
    with account.of_round:
        clock.pass_s(0.01)
    _, stall = account.step_ended(committed=True, key=SECOND, step=2)
    assert stall is not None
    assert (stall.number, stall.quorum_before, stall.quorum_after, stall.step, stall.failed_rounds) == (2, 1, 2, 2, 1)
    assert stall.spent_ms == {
        Spent.COMMIT: 115,
        Spent.DETECT: 300,
        Spent.ABORT: 6,
        Spent.QUORUM: 20,
        Spent.RECONFIGURE: 30,
        Spent.SERVE: 40,
        Spent.REDO: 100,
    }
    assert stall.lasted_ms == 611, "from the last commit to this one"


def test_until_the_first_commit_all_but_the_healing_is_the_start(account: TimeAccount, clock: ManualClock) -> None:
    clock.pass_s(1.0)
    account.step_begins()
    with account.of_quorum:
        clock.pass_s(2.0)
        account.planned(heals=True)
        clock.pass_s(0.5)
    with account.of_state:
        clock.pass_s(3.0)
    _, stall = account.step_ended(committed=True, key=FIRST, step=5)
    assert account.totals().spent_s == pytest.approx({Spent.START: 3.5, Spent.HEAL: 3.0})
    assert stall is not None
    assert stall.quorum_before is None
    assert stall.spent_ms == {Spent.COMMIT: 1_000, Spent.QUORUM: 2_000, Spent.RECONFIGURE: 500, Spent.HEAL: 3_000}


def test_a_steady_step_is_no_stall_and_a_slow_peer_is_a_wait(account: TimeAccount, clock: ManualClock) -> None:
    for step in range(1, 7):
        commits(account, clock, step)
    account.step_begins()
    with account.of_quorum:
        clock.pass_s(0.2)  # the same members, one of which came late
    with account.of_round:
        clock.pass_s(5.0)
    times, stall = account.step_ended(committed=True, key=FIRST, step=7)
    assert stall is None
    assert times.spent_s == pytest.approx({Spent.WAIT: 5.18, Spent.COMMIT: 0.02})


def test_an_inner_wait_counts_as_the_more_special_one(account: TimeAccount, clock: ManualClock) -> None:
    account.step_begins()
    with account.of_round:
        clock.pass_s(0.1)
        with account.of_quorum:
            clock.pass_s(0.2)
        clock.pass_s(0.1)
    times, _ = account.step_ended(committed=False, key=None, step=0)
    assert times.spent_s == pytest.approx({Spent.DETECT: 0.2, Spent.QUORUM: 0.2})


def test_a_context_ends_with_the_error_that_it_lets_through(account: TimeAccount, clock: ManualClock) -> None:
    with pytest.raises(ValueError, match="x"), account.waiting(Wait.QUORUM, also=account.of_state):
        raise ValueError("x")
    clock.pass_s(1.0)
    times, _ = account.step_ended(committed=False, key=None, step=0)
    assert times.spent_s == {Spent.REDO: 1.0}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_parts_sum_to_the_wall_time(account: TimeAccount, clock: ManualClock, seed: int) -> None:
    rng = random.Random(seed)
    key, began_s, commit_s, stalled_ms = FIRST, clock.now_s, clock.now_s, 0.0
    for step in range(300):
        for _ in range(rng.randrange(8)):
            clock.pass_s(rng.expovariate(100))
            happens = rng.choice(
                [account.broke, account.step_begins, lambda: account.planned(heals=rng.random() < 0.5)]
            )
            with rng.choice([account.of_state, account.of_quorum, account.of_round]):
                clock.pass_s(rng.expovariate(100))
                happens()
                clock.pass_s(rng.expovariate(100))
        committed = rng.random() < 0.8
        key = SECOND if rng.random() < 0.1 else FIRST
        _, stall = account.step_ended(committed=committed, key=key, step=step)
        if stall is not None:
            assert stall.lasted_ms == pytest.approx(1_000 * (clock.now_s - commit_s), abs=0.51)
            stalled_ms += stall.lasted_ms
        if committed:
            commit_s = clock.now_s
        assert sum(account.totals().spent_s.values()) == pytest.approx(clock.now_s - began_s)
    report = account.report()
    assert sum(report.total_ms.values()) == pytest.approx(1_000 * (clock.now_s - began_s), rel=0.01)
    assert len(report.stalls) == STALLS_MOST
    assert 1_000 * sum(account.totals().stalls_s.values()) == pytest.approx(stalled_ms, rel=0.01)


# --- a Manager --------------------------------------------------------------------------------------------------------


def test_a_managers_causes_sum_to_its_wall_time(rigs: Any, clock: ManualClock) -> None:
    """Time passes in a quorum, a configure, a reduction, a vote, and between all of them."""
    rig = rigs(plan_of(), plan_of(), plan_of(8, step=2), clock=clock, verdicts=[True, False, True])
    slow(rig.coordinator, "quorum", clock, 0.3)
    slow(rig.group, "configure", clock, 0.2)
    for _ in range(3):
        clock.pass_s(1.0)
        rig.manager.start_quorum()
        clock.pass_s(0.5)
        rig.manager.allreduce(rig.weights.tensor.clone()).wait()
        rig.manager.should_commit()
    spent_s = rig.manager.status().spent_s
    assert sum(spent_s.values()) == pytest.approx(clock.now_s, rel=0.01)
    assert spent_s["start"] > 0


def slow(part: Any, name: str, clock: ManualClock, seconds: float) -> None:
    original = getattr(part, name)

    def slowly(*arguments: Any, **named: Any) -> Any:
        clock.pass_s(seconds)
        return original(*arguments, **named)

    setattr(part, name, slowly)


def test_an_incident_has_one_line_and_a_step_has_one_on_request(
    rigs: Any, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tft_algos.manager"):
        rig = rigs(plan_of(), plan_of(), clock=clock, verdicts=[True, True], log_steps=True, job="llama")
        assert rig.step()
        assert rig.step()
    lines = [record.getMessage().partition("] ")[2] for record in caplog.records]
    (incident,) = [line for line in lines if line.startswith("incident=")]
    assert incident.startswith("incident=1 job=llama step=1 quorum=none->1 failed_rounds=0 lasted_s=0.000")
    steps = [line for line in lines if line.startswith("step=")]
    assert [line.split(" lasted_s=")[0] for line in steps] == [
        "step=0 job=llama attempt=1 committed=true quorum=1 members=1 participants=1",
        "step=1 job=llama attempt=2 committed=true quorum=1 members=1 participants=1",
    ]


def test_without_the_setting_no_step_has_a_line(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tft_algos.manager"):
        assert rigs(plan_of(), verdicts=[True]).step()
    assert not any("] step=" in record.getMessage() for record in caplog.records)


def test_the_setting_comes_from_the_environment_too(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFT_LOG_STEPS", "1")
    assert rigs(plan_of()).manager.strategy.config.log_steps
    assert not rigs(plan_of(), log_steps=False).manager.strategy.config.log_steps
    monkeypatch.setenv("TFT_LOG_STEPS", "yes")
    with pytest.raises(ConfigError, match="TFT_LOG_STEPS is 'yes'; give 0 or 1"):
        rigs(plan_of())
    with pytest.raises(ConfigError, match="log_steps is 1; give True or False"):
        rigs(plan_of(), log_steps=1)


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_a_registry_has_the_metrics_until_the_manager_ends(rigs: Any, clock: ManualClock) -> None:
    rig, registry = rigs(plan_of(), clock=clock, verdicts=[True], job="llama"), CollectorRegistry()
    export_metrics(rig.manager, registry)
    clock.pass_s(2.0)
    assert rig.step()
    where = {"job": "llama", "replica": rig.coordinator.replica_id, "rank": "0"}
    found = registry.get_sample_value
    assert found("tft_badput_seconds_total", {**where, "cause": "start"}) == pytest.approx(2.0)
    assert found("tft_goodput_seconds_total", where) == 0.0
    assert found("tft_committed_steps_total", where) == 1.0
    assert found("tft_incident_phase_seconds_count", {**where, "phase": "commit"}) == 1.0
    assert found("tft_incident_phase_seconds_sum", {**where, "phase": "commit"}) == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="give each Manager of a process a registry of its own"):
        export_metrics(rig.manager, registry)
    rig.manager.shutdown()
    assert generate_latest(registry) == b""
    with pytest.raises(ManagerClosedError):
        export_metrics(rig.manager, registry)


def test_a_user_may_remove_the_metrics(rigs: Any) -> None:
    rig, registry = rigs(plan_of()), CollectorRegistry()
    export_metrics(rig.manager, registry)
    (collector,) = list(registry._collector_to_names)
    registry.unregister(collector)
    rig.manager.shutdown()


def test_without_prometheus_client_the_error_names_the_extra(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tft_algos.manager.metrics.__dict__["__builtins__"], "__import__", _no_prometheus)
    with pytest.raises(ConfigError, match=r"install tft-algos\[metrics\]"):
        export_metrics(rigs(plan_of()).manager)


_import = __import__


def _no_prometheus(name: str, *arguments: Any) -> Any:
    if name.startswith("prometheus_client"):
        raise ImportError(name)
    return _import(name, *arguments)
