"""The end of a job: who finishes, when the job has ended, and who comes too late for it."""

from __future__ import annotations

import itertools

import pytest

from tft_coord.core import effects, events
from tft_coord.core.job_end import Ended, JobEnd
from tft_coord.core.lighthouse import LighthouseConfig, LighthouseCore
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.types import Hello, Member, QuorumKey, Refusal
from tft_coord.errors import JobOverError
from tft_coord.timeouts import Timeouts
from tft_coord.transport.settings import error_of_code

KEY, NEXT = QuorumKey(7, 1), QuorumKey(8, 1)
FRESH = {"step": 0, "live": False}
TIMEOUTS = Timeouts()
FIRST, SECOND = ("trainer:" + digit * 8 + "-0000-4000-8000-000000000000" for digit in "12")


class Lighthouse:
    """A lighthouse, and replicas whose stream number is their place in the alphabet."""

    def __init__(self) -> None:
        self.core = LighthouseCore(
            LighthouseConfig(timeouts=TIMEOUTS),
            started_ms=1_000_000,
            cluster_id="cluster",
            nonces=itertools.count(1).__next__,
            now_ms=0,
        )
        self.now_ms = 10_000  # its first grace is over
        self.held: dict[str, QuorumKey] = {}
        self.requests = itertools.count(1)

    def give(self, event: events.LighthouseEvent) -> list[effects.LighthouseEffect]:
        return self._learn(self.core.handle(event, self.now_ms, 1_000_000 + self.now_ms))

    def tick(self) -> list[effects.LighthouseEffect]:
        self.now_ms += 100
        return self._learn(self.core.tick(self.now_ms, 1_000_000 + self.now_ms))

    def _learn(self, orders: list[effects.LighthouseEffect]) -> list[effects.LighthouseEffect]:
        for order in orders:
            if isinstance(order, effects.AnswerQuorum):
                self.held[chr(96 + order.stream)] = order.quorum.key
        return orders

    def hello(self, *names: str, replaces: str = "", ready: bool = False, named: str = "") -> None:
        for name in names:
            hello = Hello("job", named or name, 1, f"{name}:1", replaces=replaces, ready=ready)
            self.give(events.HelloReceived(ord(name) - 96, hello))

    def beat(self, *names: str) -> None:
        for name in names:
            self.give(events.BeatReceived(ord(name) - 96, 0))

    def ask(self, name: str, step: int, *, live: bool = True, named: str = "") -> list[effects.LighthouseEffect]:
        member = Member(
            named or name, address=f"{name}:1", store_address=f"{name}:2", step=step, lineage=step, live=live
        )
        return self.give(events.QuorumRequested(ord(name) - 96, next(self.requests), member, self.held.get(name)))

    def finish(self, name: str, step: int) -> list[effects.LighthouseEffect]:
        return self.give(events.LeaveReceived(ord(name) - 96, f"finished at step {step}", 5_000, step))

    def leave(self, name: str) -> list[effects.LighthouseEffect]:
        return self.give(events.LeaveReceived(ord(name) - 96, "it is preempted", 5_000))

    def end(self, name: str) -> list[effects.LighthouseEffect]:
        """Its process ends."""
        return self.give(events.DeathReported(ord(name) - 96, "signal 9")) + self.give(
            events.StreamClosed(ord(name) - 96)
        )


def ended(orders: list[effects.LighthouseEffect]) -> list[tuple[int, tuple[str, ...]]]:
    return [(order.step, order.replica_ids) for order in orders if isinstance(order, effects.JobEnded)]


def members(orders: list[effects.LighthouseEffect]) -> list[tuple[str, ...]]:
    return [order.quorum.replica_ids for order in orders if isinstance(order, effects.QuorumFormed)]


def refused(orders: list[effects.LighthouseEffect]) -> list[tuple[str, Refusal]]:
    return [(chr(96 + order.stream), order.refusal) for order in orders if isinstance(order, effects.RefuseRequest)]


@pytest.fixture
def two() -> Lighthouse:
    """a and b train together from step 5; c is there, and evaluates."""
    lighthouse = Lighthouse()
    lighthouse.hello("a", "b", ready=True)
    lighthouse.hello("c")
    lighthouse.ask("a", 5)
    assert members(lighthouse.ask("b", 5)) == [("a", "b")]
    return lighthouse


class TestTheLighthouse:
    def test_the_job_ends_with_its_last_member(self, two: Lighthouse) -> None:
        assert ended(two.finish("a", 9)) == []
        assert ended(two.finish("b", 9)) == [(9, ("a", "b"))]
        assert ended(two.tick()) == []  # once

    def test_a_member_that_dies_after_another_has_finished_ends_the_job_too(self, two: Lighthouse) -> None:
        two.finish("a", 9)
        assert ended(two.end("b")) == [(9, ("a",))]

    def test_a_member_that_is_lost_and_may_live_has_a_heartbeat_timeout_to_come_back(self, two: Lighthouse) -> None:
        """Only its stream broke, in the very step in which the other finished."""
        two.finish("a", 9)
        two.give(events.StreamClosed(2))
        lost_ms = two.now_ms + TIMEOUTS.reconnect_grace_ms
        while two.now_ms < lost_ms + TIMEOUTS.heartbeat_timeout_ms - 100:
            assert ended(two.tick()) == []
        assert ended(two.tick() + two.tick()) == [(9, ("a",))]

    def test_a_member_that_is_back_in_time_trains_on_and_so_does_who_heals_from_it(self, two: Lighthouse) -> None:
        two.finish("a", 9)
        two.give(events.StreamClosed(2))
        while two.now_ms < 10_000 + 2 * TIMEOUTS.reconnect_grace_ms:
            assert ended(two.tick()) == []
        two.held.clear()
        two.give(events.HelloReceived(2, Hello("job", "b", 2, "b:1", ready=True)))
        assert members(two.ask("b", 8)) == [("b",)]
        two.end("c")
        two.hello("d", replaces="c")
        two.ask("d", 0, live=False)
        assert members(two.ask("b", 9)) == [("b", "d")]

    def test_a_state_of_the_end_takes_the_end_back(self, two: Lighthouse) -> None:
        """Its loop is longer: whoever is behind heals from it, also a replica of the same run."""
        two.finish("a", 9)
        two.finish("b", 9)
        assert members(two.ask("c", 9)) == [("c",)]
        two.hello("d", replaces="c")
        two.hello("e")
        assert refused(two.ask("e", 5)) == []

    def test_where_no_member_has_finished_the_job_has_not_ended(self, two: Lighthouse) -> None:
        assert ended(two.leave("a") + two.end("b") + two.tick()) == []
        assert members(two.ask("c", 4)) == [("c",)]

    def test_a_member_that_trains_on_goes_on_from_where_it_is(self, two: Lighthouse) -> None:
        """It may have lost the step that the other has committed and finished with."""
        two.finish("a", 9)
        assert members(two.ask("b", 8)) == [("b",)]
        assert ended(two.finish("b", 12)) == [(12, ("b",))]

    @pytest.mark.parametrize("live", [True, False])
    def test_a_replica_that_was_there_is_late(self, two: Lighthouse, live: bool) -> None:
        two.finish("a", 9)
        two.finish("b", 9)
        assert refused(two.ask("c", 8, live=live)) == [("c", Refusal.OVER)]

    def test_a_replica_that_waits_when_the_job_ends_is_late(self, two: Lighthouse) -> None:
        two.ask("c", 0, live=False)
        two.finish("a", 9)
        orders = two.finish("b", 9)
        assert refused(orders) == [("c", Refusal.OVER)]
        (order,) = [each for each in orders if isinstance(each, effects.RefuseRequest)]
        assert "job job ended at step 9, finished by a, b; replica c of that run is at step 0" in order.message

    @pytest.mark.parametrize("step", [9, 12])
    def test_a_state_of_the_end_or_beyond_goes_on(self, two: Lighthouse, step: int) -> None:
        two.finish("a", 9)
        two.finish("b", 9)
        assert members(two.ask("c", step)) == [("c",)]

    @pytest.mark.parametrize("step", [0, 8], ids=["fresh", "from a checkpoint"])
    def test_a_replica_that_comes_later_begins_a_new_run_and_waits_for_nobody_of_the_old(
        self, two: Lighthouse, step: int
    ) -> None:
        two.ask("c", 5)
        two.give(events.RequestWithdrawn(3, 3))  # it has asked before, so that others would wait for it
        two.finish("a", 9)
        two.finish("b", 9)
        two.now_ms += 1
        two.hello("d")
        assert members(two.ask("d", step, live=False)) == [("d",)]
        assert refused(two.ask("c", 5) + two.tick()) == [("c", Refusal.OVER)]  # also while the new run trains
        assert members(two.ask("d", step + 1)) == []  # its quorum stands
        assert ended(two.finish("d", step + 1)) == [(step + 1, ("d",))]

    def test_the_successor_of_a_replica_of_the_run_belongs_to_it(self, two: Lighthouse) -> None:
        two.end("c")
        two.finish("a", 9)
        two.finish("b", 9)
        two.now_ms += 1
        two.hello("d", replaces="c")
        assert refused(two.ask("d", 0, live=False)) == [("d", Refusal.OVER)]

    @pytest.mark.parametrize("replaces", ["", "a"], ids=["another start", "the next Manager of a's script"])
    def test_who_starts_after_the_first_has_finished_begins_a_new_run(self, two: Lighthouse, replaces: str) -> None:
        """b still saves its result. A sweep, or pretraining and then finetuning, begins anew in the same script."""
        two.finish("a", 9)
        two.now_ms += 1
        two.hello("d", replaces=replaces)
        assert members(two.ask("d", 0, live=False)) == []
        orders = two.finish("b", 9)
        assert (ended(orders), refused(orders), members(orders)) == ([(9, ("a", "b"))], [], [("d",)])
        two.hello("e", replaces="b")
        two.ask("e", 0, live=False)
        orders = two.ask("d", 1)
        assert (refused(orders), members(orders)) == ([], [("d", "e")])

    @pytest.mark.parametrize("forgotten", [False, True])
    @pytest.mark.parametrize("how", ["crash", "exception"])
    @pytest.mark.parametrize("replaces", [True, False], ids=["under torchrun", "under another supervisor"])
    def test_who_ended_unfinished_and_is_started_again_belongs_to_the_run(
        self, two: Lighthouse, how: str, forgotten: bool, replaces: bool
    ) -> None:
        two.hello("d", named=FIRST)
        (two.end if how == "crash" else two.leave)("d")
        if forgotten:
            for _ in range(TIMEOUTS.forget_after_ms // 1_000 + 10):
                two.now_ms += 900
                two.beat("a", "b", "c")
                two.tick()
        two.finish("a", 9)
        two.finish("b", 9)
        two.now_ms += 1
        two.hello("e", named=SECOND, replaces=FIRST if replaces else "")
        assert refused(two.ask("e", 0, live=False, named=SECOND)) == [("e", Refusal.OVER)]

    def test_the_successor_of_one_that_died_before_it_said_hello_belongs_to_the_run(self, two: Lighthouse) -> None:
        two.finish("a", 9)
        two.finish("b", 9)
        two.now_ms += 1
        two.hello("d", replaces="of whom nobody has heard")
        assert refused(two.ask("d", 0, live=False)) == [("d", Refusal.OVER)]

    def test_when_a_new_run_has_begun_who_was_unfinished_heals_from_it(self, two: Lighthouse) -> None:
        two.end("c")
        two.finish("a", 9)
        two.finish("b", 9)
        two.now_ms += 1
        two.hello("d")
        orders = two.ask("d", 0, live=False)
        assert members(orders) == [("d",)]
        warning = (
            "job job ended at step 9, finished by a, b; a new run starts from step 0. If you do not want it, end it "
            "and load the result of step 9"
        )
        assert [order for order in orders if isinstance(order, (effects.Warned, effects.TellWait))] == [
            effects.Warned("job", warning),
            effects.TellWait(4, warning, True),
        ]
        two.hello("e", replaces="c")
        two.ask("e", 0, live=False)
        orders = two.ask("d", 1)
        assert (refused(orders), members(orders)) == ([], [("d", "e")])
        two.ask("d", 2)
        assert refused(two.ask("e", 2)) == []  # it has healed, and its state is of the new run
        assert not any(isinstance(order, effects.Warned) for order in orders)

    def test_a_state_of_the_run_that_comes_back_is_late_until_a_new_run_begins(self, two: Lighthouse) -> None:
        two.finish("a", 9)
        two.finish("b", 9)
        two.now_ms += 1
        two.hello("e")  # under an id that this lighthouse does not know
        assert refused(two.ask("e", 5)) == [("e", Refusal.OVER)]

    def test_a_source_that_has_finished_may_end_when_the_healed_one_is_between_two_steps(self, two: Lighthouse) -> None:
        """It may evaluate there for long; that it has healed shows before it asks."""
        two.ask("a", 6)
        two.ask("b", 6)
        two.ask("c", 0, live=False)
        two.ask("a", 7)
        assert members(two.ask("b", 7)) == [("a", "b", "c")]
        assert [order for order in two.finish("a", 8) if isinstance(order, effects.Release)] == []
        for progress, released in (
            (Progress(0, Phase.OUTSIDE, 5), []),
            (Progress(0, Phase.WAITING, 5), []),
            (Progress(8, Phase.WAITING, 5), []),
            (Progress(8, Phase.OUTSIDE, 5), [effects.Release(1)]),
        ):
            two.give(events.BeatReceived(3, 0, progress))
            assert [order for order in two.tick() if isinstance(order, effects.Release)] == released

    def test_a_lighthouse_that_has_forgotten_the_job_knows_no_end(self, two: Lighthouse) -> None:
        two.finish("a", 9)
        two.finish("b", 9)
        for name in "abc":
            two.give(events.StreamClosed(ord(name) - 96))
        for _ in range(TIMEOUTS.forget_after_ms // 100 + 100):
            two.tick()
        assert two.core.jobs == ()


class TestTheEnd:
    def test_it_is_the_highest_step_of_those_that_finished(self) -> None:
        end = JobEnd()
        end.finished("a", 8, 5)
        end.finished("b", 9, 7)
        end.finished("z", 20, 8)  # of another quorum
        assert end.look(KEY, ["a", "b", "c"], ["c"]) is None
        assert end.look(KEY, ["a", "b", "c"], []) == Ended(9, ("a", "b"), KEY, 5)
        assert end.look(KEY, ["a", "b", "c"], []) is None

    def test_those_who_finished_before_the_newest_quorum_do_not_count(self) -> None:
        end = JobEnd()
        end.finished("a", 8, 5)
        end.trains_on(8)
        assert end.look(NEXT, ["a", "b"], []) is None
        end.finished("b", 12, 20)
        assert end.look(NEXT, ["a", "b"], []) == Ended(12, ("b",), NEXT, 20)

    @pytest.mark.parametrize(("step", "is_over"), [(8, True), (9, False), (10, False)])
    def test_it_is_one_no_more_when_the_job_trains_on_from_there(self, step: int, is_over: bool) -> None:
        end = JobEnd()
        end.finished("a", 9, 5)
        end.look(KEY, ["a"], [])
        end.trains_on(step)
        assert (end.ended is not None) is is_over

    @pytest.mark.parametrize(
        ("step", "live", "since_ms", "newest", "late"),
        [
            (8, True, 4, KEY, True),
            (0, False, 5, KEY, True),
            (0, False, 6, KEY, False),
            (8, True, 6, KEY, True),
            (8, True, 6, NEXT, False),
            (8, True, 4, NEXT, True),
            (8, False, 4, NEXT, False),
            (9, True, 4, KEY, False),
        ],
    )
    def test_who_is_late(self, step: int, live: bool, since_ms: int, newest: QuorumKey, late: bool) -> None:
        end = JobEnd()
        assert not end.is_late(Member("c", step=step, live=live), since_ms, newest)
        end.finished("a", 9, 5)
        end.look(KEY, ["a"], [])
        assert end.is_late(Member("c", step=step, live=live), since_ms, newest) is late


def test_the_refusal_is_an_error_of_its_own() -> None:
    error = error_of_code(Refusal.OVER.value, "it has ended", "rank 0's quorum")
    assert isinstance(error, JobOverError)
    assert (str(error), error.code) == ("rank 0's quorum: it has ended", "job_over")
