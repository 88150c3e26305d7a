"""torchft's Manager over tft's: arguments, precedence of the environment, types of errors, log lines, futures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

import tft_algos
from tft_algos.testing import FakeGroup, MemoryTransport, ScriptedCoordinator, plan_of
from tft_coord.core.types import Plan
from tft_coord.errors import RequestTimeoutError
from torchft.manager import (
    ExceptionWithTraceback,
    Manager,
    WorldSizeMode,
    extract_trailing_digits,
    get_timeout,
)
from torchft.process_group import ProcessGroup

TWO = timedelta(seconds=2)


OURS = tft_algos.Manager


class Rig:
    """A Manager whose lighthouse, peers and transport are scripts. `settings` are what tft's Manager was given."""

    def __init__(self, patch: pytest.MonkeyPatch, *answers: Plan | Exception, others: float = 0.0, **arguments: Any):
        self.group = FakeGroup(others)
        self.coordinator = ScriptedCoordinator(answers)
        self.settings: dict[str, Any] = {}
        self.positional: tuple[Any, ...] = ()
        patch.setattr("torchft.manager.tft_algos.Manager", self._make)
        arguments = {"pg": self.group, "load_state_dict": None, "state_dict": None, "min_replica_size": 1} | arguments
        self.manager = Manager(**arguments, lighthouse_addr="localhost:1")

    def _make(self, *args: Any, **settings: Any) -> tft_algos.Manager:
        self.positional, self.settings = args, dict(settings)
        settings["checkpoint_transport"] = settings["checkpoint_transport"] or MemoryTransport()
        return OURS(*args, coordinator=self.coordinator, **settings)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    """Make rigs outside of any launcher, and shut them down."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TFT_TOKEN", "TFT_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("TIMEOUT_SEC", "QUORUM_TIMEOUT_SEC", "CONNECT_TIMEOUT_SEC", "QUORUM_RETRIES", "MANAGER_PORT"):
        monkeypatch.delenv(f"TORCHFT_{name}", raising=False)
    made: list[Rig] = []

    def make(*answers: Plan | Exception, **arguments: Any) -> Rig:
        made.append(Rig(monkeypatch, *answers, **arguments))
        return made[-1]

    yield make
    for each in made:
        each.manager.shutdown()


def test_the_arguments_go_by_position_too(rig: Any) -> None:
    group = FakeGroup()
    with pytest.raises(TypeError):
        Manager(group, None, None)  # type: ignore[call-arg]
    made = rig(plan_of(), min_replica_size=2, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES)
    assert made.positional[3] == 2
    assert made.settings["world_size_mode"] is WorldSizeMode.FIXED_WITH_SPARES


def test_an_unsaid_timeout_stays_unsaid_and_the_groups_own_counts(rig: Any) -> None:
    made = rig()
    assert made.settings["timeout"] is None
    assert made.group.timeout is None
    assert made.settings["quorum_timeout"] is None  # tft's 70 s, as a lighthouse waits 60 s for stragglers
    made = rig(timeout=timedelta(seconds=60))
    assert made.group.timeout == timedelta(seconds=60)


def test_the_environment_comes_before_the_arguments(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "7")
    monkeypatch.setenv("TORCHFT_QUORUM_TIMEOUT_SEC", "8.5")
    monkeypatch.setenv("TORCHFT_CONNECT_TIMEOUT_SEC", "9")
    monkeypatch.setenv("TORCHFT_QUORUM_RETRIES", "4")
    made = rig(timeout=TWO, quorum_timeout=TWO, connect_timeout=TWO, quorum_retries=1)
    config = made.manager.strategy.config
    assert config.timeout == timedelta(seconds=7)
    assert config.quorum_timeout == timedelta(seconds=8.5)
    assert config.connect_timeout == timedelta(seconds=9)
    assert config.quorum_retries == 4
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "soon")
    with pytest.raises(ValueError, match="TORCHFT_TIMEOUT_SEC is 'soon'"):
        rig()


def test_one_state_function_alone_means_neither(rig: Any) -> None:
    made = rig(state_dict=dict)
    assert made.positional[1:3] == (None, None)
    made.manager.register_state_dict_fn("late", lambda _: None, dict)
    with pytest.raises(AssertionError, match="late"):
        made.manager.register_state_dict_fn("late", lambda _: None, dict)
    with pytest.warns(DeprecationWarning, match="register_state_dict_fn"):
        made.manager.set_state_dict_fns(lambda _: None, dict)


def test_a_group_without_a_time_out_of_its_own_is_enough(rig: Any) -> None:
    class Mine(ProcessGroup):
        def configure(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
            return

    assert rig(pg=Mine(), timeout=TWO).manager.current_step() == 0
    with pytest.raises(ValueError, match="give a process group"):
        rig(pg=object())


def test_orders_that_make_no_sense_are_assertion_errors(rig: Any) -> None:
    manager = rig().manager
    with pytest.raises(AssertionError, match="must call start_quorum before wait_quorum"):
        manager.wait_quorum()
    with pytest.raises(AssertionError, match="must call start_quorum before allreduce"):
        manager.allreduce(torch.ones(1))
    assert manager.num_participants() == 0
    assert manager.participating_rank() is None
    assert not manager.is_participating()
    assert not hasattr(manager, "_anything")
    with pytest.raises(KeyError, match="batches_committed"):
        manager.load_state_dict({"step": 3})
    manager.load_state_dict({"step": 3, "batches_committed": 6})
    assert (manager.current_step(), manager.batches_committed()) == (3, 6)


def test_a_vote_for_one_quorum_is_answered_twice_and_counts_once(rig: Any) -> None:
    manager = rig(plan_of()).manager
    manager.start_quorum()
    assert manager.should_commit()
    assert manager.should_commit()
    assert manager.current_step() == 1
    assert manager.state_dict()["step"] == 1


def test_steps_of_a_future_have_run_when_the_work_was_waited_for(rig: Any) -> None:
    manager = rig(plan_of(size=2), others=3.0).manager
    manager.start_quorum()
    tensor = torch.ones(2)
    work = manager.allreduce(tensor)
    order: list[str] = []
    future = work.get_future().then(lambda done: order.append("first") or done.value() * 10)
    future.add_done_callback(lambda done: order.append("second"))
    assert order == []
    assert work.wait()
    assert order == ["first", "second"]
    assert torch.equal(tensor, torch.full((2,), 3.5))  # half of its own, and 3
    assert torch.equal(future.wait(), torch.full((2,), 35.0))
    assert future.done()
    with pytest.raises(NotImplementedError):
        future.set_result(None)
    with pytest.raises(ValueError, match="floating point tensor"):
        manager.allreduce(torch.ones(2, dtype=torch.int64))
    assert torch.equal(
        manager.allreduce(torch.ones(1), reduce_op=ReduceOp.SUM).get_future().value(), torch.tensor([4.0])
    )


def test_a_step_of_a_future_that_raises_fails_the_step_and_not_the_loop(rig: Any) -> None:
    manager = rig(plan_of(size=2)).manager
    manager.start_quorum()
    work = manager.allreduce(torch.ones(2))
    work.get_future().then(lambda done: 1 / 0)
    assert not work.wait()
    error = manager.errored()
    assert isinstance(error, ExceptionWithTraceback)
    assert isinstance(error.original_exception, ZeroDivisionError)
    assert "Traceback" in error.stack_trace
    assert not manager.should_commit()


def test_a_synchronous_quorum_raises_a_time_out_and_the_manager_stays_usable(rig: Any) -> None:
    made = rig(RequestTimeoutError("nobody came"), plan_of(), use_async_quorum=False)
    with pytest.raises(TimeoutError, match="nobody came"):
        made.manager.start_quorum()
    made.manager.start_quorum()
    assert made.manager.should_commit()


def test_too_many_failures_are_a_runtime_error_of_torchfts_words(rig: Any) -> None:
    manager = rig(plan_of(), plan_of(2), max_retries=0).manager
    manager.start_quorum()
    manager.report_error(RuntimeError("mine"))
    with pytest.raises(RuntimeError, match="should_commit failed 1 times consecutively, exceeding max_retries=0"):
        manager.should_commit()


def test_a_wrapped_future_yields_its_default(rig: Any) -> None:
    manager = rig(plan_of()).manager
    manager.start_quorum()
    failing: torch.futures.Future[int] = torch.futures.Future()
    wrapped = manager.wrap_future(failing, 7)
    failing.set_exception(RuntimeError("broken"))
    assert wrapped.wait() == 7
    assert "broken" in str(manager.errored())


def test_the_lines_that_people_search_for(rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    made = rig(plan_of(size=2, healing=[1]), min_replica_size=1)
    manager = made.manager
    assert [each.name for each in (manager.quorum_logger, manager.commits_logger, manager.errors_logger)] == [
        "torchft_quorums",
        "torchft_commits",
        "torchft_errors",
    ]
    manager.start_quorum()
    manager.report_error(RuntimeError("mine"))
    assert not manager.should_commit()
    said = [record.getMessage() for record in caplog.records if record.name == "torchft.manager"]
    assert any("peers need recovery from us [1]" in line for line in said)
    assert any("reconfiguring for quorum_id=1" in line for line in said)
    assert any("should_commit=False enough_replicas=True, errored=mine" in line for line in said)
    (quorum,) = [vars(record) for record in caplog.records if record.name == "torchft_quorums"]
    (commit,) = [vars(record) for record in caplog.records if record.name == "torchft_commits"]
    assert (quorum["quorum_id"], quorum["step"], quorum["rank"], quorum["job_id"]) == (1, 0, 0, "unknown")
    assert commit["commit_result"] is False


def test_small_helpers() -> None:
    assert extract_trailing_digits("a12") == 12
    assert extract_trailing_digits("") == 0
    assert extract_trailing_digits("1a") == 0
    assert get_timeout(None, TWO) == TWO
    assert get_timeout("1.5", TWO) == timedelta(seconds=1.5)
    with pytest.raises(ValueError, match="soon"):
        get_timeout("soon", TWO)
