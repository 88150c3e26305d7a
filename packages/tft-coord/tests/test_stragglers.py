"""The policy about stragglers, on a model: members that step together, and a watch that hears their beats."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tft_coord.core.effects import (
    JobFailed,
    LighthouseEffect,
    NotifyLoss,
    PaceChanged,
    QuorumFormed,
    ReplicaLost,
    TellStraggler,
)
from tft_coord.core.events import BeatReceived, HelloReceived, LighthouseEvent, QuorumRequested
from tft_coord.core.lighthouse import LighthouseConfig, LighthouseCore
from tft_coord.core.progress import GroupProgress, Phase, Progress
from tft_coord.core.stragglers import (
    LEAST_SHARE,
    PaceKind,
    QuorumContext,
    StragglerAction,
    StragglerNotice,
    StragglerPolicy,
    StragglerWatch,
)
from tft_coord.core.types import Hello, Member, Unreached, Via
from tft_coord.errors import ConfigError
from tft_coord.timeouts import Timeouts

BEAT_MS = 1_000


class Model:
    """Members that take their own time for each step, and wait for the slowest one.

    Args:
        own_ms: of each member, at a time.
    """

    def __init__(
        self, own_ms: dict[str, int], action: StragglerAction = StragglerAction.WARN, *, min_replicas: int = 1
    ) -> None:
        self.own_ms = own_ms
        self.policy = StragglerPolicy(action=action)
        self.watch = StragglerWatch(self.policy)
        self.now_ms = 0
        self.step = 0
        self.news: list[tuple[int, StragglerNotice]] = []
        self.ended: list[int] = []
        self.members = set(own_ms)
        self.min_replicas = min_replicas
        self.holders: set[str] | None = None
        self.shares = dict.fromkeys(own_ms, 1.0)
        self._steps_to = 0
        self._trial_step: dict[str, int] = {}

    def run(self, until_ms: int) -> Model:
        """Step and beat until then."""
        while self.now_ms < until_ms:
            step_ms = max(self._own(name) for name in self.members)
            while self._steps_to + step_ms <= self.now_ms:
                self._steps_to += step_ms
                self.step += 1
            for name in self.own_ms:
                self.watch.heard(name, self._progress(name))
            for change in self.watch.look(sorted(self.members), self.now_ms, self._quorum_context):
                news = change.news
                self.news.append((self.now_ms, news))
                if change.ends_quorum:
                    self.ended.append(self.now_ms)
                if news.kind in (PaceKind.LEFT_OUT, PaceKind.LET_BACK):
                    self._steps_to = self.now_ms  # the next quorum begins with a step of its own
                    (self.members.discard if news.kind is PaceKind.LEFT_OUT else self.members.add)(news.replica_id)
                    self._trial_step[news.replica_id] = self.step + 1
                if news.kind in (PaceKind.SHARE, PaceKind.KEEPS_UP):
                    self.shares[news.replica_id] = news.share
            self.now_ms += BEAT_MS
        return self

    def _own(self, name: str) -> int:
        return max(1, round(self.own_ms[name] * self.shares[name]))

    def _progress(self, name: str) -> Progress:
        if name not in self.members:
            return Progress(self.step, Phase.WAITING, 10_000, excused=True, own_ms=self._own(name))
        running_ms = self.now_ms - self._steps_to
        phase = Phase.OWN if running_ms < self._own(name) else Phase.REDUCING
        measured = self.step > self._trial_step.get(name, 0)
        excused = self.step == self._trial_step.get(name)
        return Progress(self.step, phase, running_ms, excused, own_ms=self._own(name) if measured else 0)

    def _quorum_context(self) -> QuorumContext:
        names = sorted(self.own_ms)
        waiting = [name for name in names if name not in self.members]
        holders = names if self.holders is None else self.holders
        return QuorumContext(names, sorted(self.members), waiting, holders, self.min_replicas)

    @property
    def kinds(self) -> list[tuple[str, str]]:
        """Who, and what has changed."""
        return [(news.replica_id, news.kind.name) for _, news in self.news]


def test_members_of_one_pace_are_not_warned_of() -> None:
    assert Model({"a": 400, "b": 500, "c": 700}).run(120_000).news == []


def test_a_straggler_is_warned_of_once_and_named_with_the_numbers() -> None:
    model = Model({"a": 400, "b": 500, "c": 1_500}).run(60_000)
    assert model.kinds == [("c", "SLOW")]
    at_ms, news = model.news[0]
    assert (news.own_ms, news.median_ms) == (1_500, 500)
    assert 5_000 <= at_ms <= 9_000
    assert news.sentence.startswith(
        "replica c is a straggler: its own part of a step takes 1.50 s (median of the others: 0.50 s)"
    )
    assert model.watch.warnings == (news.sentence,)


def test_it_is_said_once_that_it_keeps_up_again() -> None:
    model = Model({"a": 400, "b": 500, "c": 1_500}).run(20_000)
    model.own_ms["c"] = 500
    model.run(60_000)
    assert model.kinds == [("c", "SLOW"), ("c", "KEEPS_UP")]
    assert model.watch.warnings == ()


def test_around_the_border_nothing_flaps() -> None:
    model = Model({"a": 500, "b": 500, "c": 1_400}).run(20_000)
    for turn in range(60):
        model.own_ms["c"] = 800 if turn % 2 else 1_100
        model.run(model.now_ms + 2_000)
    assert model.kinds == [("c", "SLOW")]


def test_one_slow_step_is_no_straggler() -> None:
    model = Model({"a": 500, "b": 500, "c": 500}, StragglerAction.LEAVE_OUT).run(10_000)
    model.own_ms["c"] = 4_000
    model.run(14_000)
    model.own_ms["c"] = 500
    assert model.run(60_000).news == []


def test_short_steps_have_to_differ_by_more_than_a_hiccup() -> None:
    assert Model({"a": 10, "b": 10, "c": 45}).run(60_000).news == []


def test_a_straggler_is_left_out_and_tried_again_after_pauses_that_double() -> None:
    model = Model({"a": 400, "b": 400, "c": 2_000}, StragglerAction.LEAVE_OUT).run(600_000)
    out = [at_ms for at_ms, news in model.news if news.kind is PaceKind.LEFT_OUT]
    back = [at_ms for at_ms, news in model.news if news.kind is PaceKind.LET_BACK]
    pauses = [after - before for before, after in zip(out, back, strict=False)]
    assert pauses == [5_000, 10_000, 20_000, 40_000, 80_000, 160_000]
    assert {news.kind for _, news in model.news} == {PaceKind.LEFT_OUT, PaceKind.LET_BACK}


def test_a_replica_that_keeps_up_in_its_trial_stays() -> None:
    model = Model({"a": 400, "b": 400, "c": 2_000}, StragglerAction.LEAVE_OUT).run(20_000)
    model.own_ms["c"] = 400
    model.run(200_000)
    assert model.kinds[-2:] == [("c", "LET_BACK"), ("c", "KEEPS_UP")]
    assert model.members == {"a", "b", "c"}
    assert model.watch.left_out == frozenset()


def test_a_replica_that_kept_up_for_long_is_left_out_for_the_first_pause_again() -> None:
    model = Model({"a": 400, "b": 400, "c": 2_000}, StragglerAction.LEAVE_OUT).run(60_000)
    model.own_ms["c"] = 400
    model.run(2_000_000)
    model.own_ms["c"] = 2_000
    model.run(2_030_000)
    again = [news.pause_ms for at_ms, news in model.news if news.kind is PaceKind.LEFT_OUT and at_ms > 2_000_000]
    assert again[0] == 5_000


def test_a_replica_that_is_slow_again_soon_is_left_out_for_longer() -> None:
    model = Model({"a": 400, "b": 400, "c": 2_000}, StragglerAction.LEAVE_OUT).run(20_000)
    for _ in range(6):
        model.own_ms["c"] = 400
        model.run(model.now_ms + 20_000)
        model.own_ms["c"] = 2_000
        model.run(model.now_ms + 20_000)
    pauses = [news.pause_ms for _, news in model.news if news.kind is PaceKind.LEFT_OUT]
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 40_000


def test_a_step_that_runs_is_not_waited_for() -> None:
    model = Model({"a": 400, "b": 400, "c": 400}, StragglerAction.LEAVE_OUT).run(10_000)
    model.own_ms["c"] = 100_000
    model.run(18_000)
    assert model.kinds == [("c", "LEFT_OUT")]
    assert len(model.ended) == 1
    assert model.ended[0] - 10_000 <= 7_000


def test_in_a_trial_not_even_the_first_step_is_waited_for() -> None:
    model = Model({"a": 400, "b": 400, "c": 400}, StragglerAction.LEAVE_OUT).run(10_000)
    model.own_ms["c"] = 100_000
    model.run(100_000)
    trials = [at_ms for at_ms, news in model.news if news.kind is PaceKind.LET_BACK]
    assert len(trials) >= 3
    assert len(model.ended) == len(trials) + 1


@pytest.mark.parametrize(
    ("own_ms", "min_replicas", "holders", "why"),
    [
        ({"a": 400, "b": 2_000}, 1, None, "1 of 2 replicas are as slow, and only a minority is left out"),
        ({"a": 400, "b": 400, "c": 2_000}, 3, None, "2 replicas would stay, and at least 3 are needed"),
        ({"a": 400, "b": 400, "c": 2_000}, 1, {"c"}, "it alone holds the job's state"),
        (
            {"a": 400, "b": 400, "c": 400, "d": 2_000, "e": 2_100, "f": 2_000},
            1,
            None,
            "3 of 6 replicas are as slow, and only a minority is left out",
        ),
    ],
)
def test_nobody_is_left_out_whom_the_others_need(
    own_ms: dict[str, int], min_replicas: int, holders: set[str] | None, why: str
) -> None:
    model = Model(own_ms, StragglerAction.LEAVE_OUT, min_replicas=min_replicas)
    model.holders = holders
    model.run(120_000)
    assert {kind for _, kind in model.kinds} == {"SLOW"}
    assert model.news[0][1].sentence.endswith(f". It is not left out, because {why}")


def test_two_slow_of_three_are_not_stragglers() -> None:
    assert Model({"a": 400, "b": 2_000, "c": 2_000}, StragglerAction.LEAVE_OUT).run(120_000).news == []


def test_two_slow_of_five_are_left_out_together() -> None:
    model = Model({"a": 400, "b": 400, "c": 400, "d": 2_000, "e": 2_500}, StragglerAction.LEAVE_OUT).run(12_000)
    assert model.kinds == [("d", "LEFT_OUT"), ("e", "LEFT_OUT")]


def test_it_is_let_back_at_once_when_too_few_are_left() -> None:
    model = Model({"a": 400, "b": 400, "c": 2_000}, StragglerAction.LEAVE_OUT, min_replicas=2).run(10_000)
    assert model.kinds == [("c", "LEFT_OUT")]
    del model.own_ms["b"]
    model.members.discard("b")
    model.run(12_000)
    assert model.kinds[1] == ("c", "LET_BACK")
    assert "because too few replicas are left without it" in model.news[1][1].sentence


def test_a_replica_that_is_lost_while_it_is_left_out_is_not_kept_in_mind() -> None:
    model = Model({"a": 400, "b": 400, "c": 2_000}, StragglerAction.LEAVE_OUT).run(10_000)
    assert model.watch.left_out == {"c"}
    model.watch.gone("c")
    company = QuorumContext(["a", "b"], ["a", "b"], [], ["a", "b"], 1)
    looks = [model.watch.look("ab", now_ms, lambda: company) for now_ms in range(10_000, 20_000, BEAT_MS)]
    changes = [change for look in looks for change in look]
    assert [(change.news.replica_id, change.news.kind) for change in changes] == [("c", PaceKind.LET_BACK)]
    assert model.watch.left_out == frozenset()


def test_one_that_is_forgotten_is_not_left_out_either() -> None:
    model = Model({"a": 400, "b": 400, "c": 2_000}, StragglerAction.LEAVE_OUT).run(10_000)
    assert model.watch.left_out == {"c"}
    model.watch.gone("c")
    for number in range(20):  # other starts of the replicas, which have died since
        model.watch.heard(f"old:{number}", Progress(0, Phase.OUTSIDE, 0))
    company = QuorumContext(["a", "b", "c"], ["a", "b"], [], ["a", "b"], 1)
    answers = iter([company])  # it dies within this look
    dead = QuorumContext(["a", "b"], ["a", "b"], [], ["a", "b"], 1)
    for now_ms in range(10_000, 20_000, BEAT_MS):
        model.watch.look("ab", now_ms, lambda: next(answers, dead))
        assert model.watch.left_out == frozenset(), "it is let back, or forgotten"


def test_a_share_follows_the_pace_down_and_up() -> None:
    model = Model({"a": 400, "b": 400, "c": 1_600}, StragglerAction.SHRINK).run(60_000)
    assert [(kind, news.share) for (_, kind), (_, news) in zip(model.kinds, model.news, strict=True)] == [
        ("SHARE", 0.25)
    ]
    model.own_ms["c"] = 400
    model.run(200_000)
    assert model.shares["c"] == 1.0
    assert model.kinds == [("c", "SHARE"), ("c", "KEEPS_UP")]
    assert model.news[1][1].sentence == (
        "replica c keeps up again and must take its whole batch: its own part of a step takes 0.10 s (median of the "
        "others: 0.40 s)"
    )
    assert model.watch.warnings == ()


def test_a_share_that_rises_is_no_complaint() -> None:
    model = Model({"a": 400, "b": 400, "c": 4_000}, StragglerAction.SHRINK).run(30_000)
    model.own_ms["c"] = 800
    model.run(200_000)
    assert model.kinds == [("c", "SHARE"), ("c", "SHARE")]
    assert model.shares["c"] == 0.5
    assert model.news[1][1].sentence == (
        "replica c may take more of its batch again, 0.5: with the smaller part its own part of a step takes 0.08 s "
        "(median of the others: 0.40 s)"
    )


def test_who_does_not_take_its_share_is_warned_of_at_the_least_share() -> None:
    model = Model({"a": 400, "b": 400, "c": 4_000}, StragglerAction.SHRINK)
    model.shares = _Constant(model.shares)
    model.run(400_000)
    shares = [news.share for _, news in model.news if news.kind is PaceKind.SHARE]
    assert shares == [0.1, LEAST_SHARE]
    assert model.kinds[-1] == ("c", "SHARE")


class _Constant(dict[str, float]):
    def __setitem__(self, key: str, value: float) -> None:
        """Nothing changes it."""


def test_shares_do_not_flap() -> None:
    model = Model({"a": 400, "b": 400, "c": 1_600}, StragglerAction.SHRINK).run(30_000)
    for _ in range(10):
        model.own_ms["c"] = 400
        model.run(model.now_ms + 40_000)
        model.own_ms["c"] = 1_600
        model.run(model.now_ms + 40_000)
    assert len(model.news) <= 14  # of twenty changes of its pace


def test_off_hears_nothing() -> None:
    model = Model({"a": 400, "b": 400, "c": 40_000}, StragglerAction.OFF).run(200_000)
    assert model.news == []


def test_members_that_say_nothing_are_not_judged() -> None:
    watch = StragglerWatch(StragglerPolicy())
    for now_ms in range(0, 60_000, BEAT_MS):
        for name in "abcde":
            own_ms = {"a": 400, "b": 4_000}.get(name, 0)
            watch.heard(name, Progress(now_ms // 400, Phase.OWN, 10, own_ms=own_ms))
        assert watch.look("abcde", now_ms, _no_company) == []


def _no_company() -> QuorumContext:
    raise AssertionError("asked who is there, and nobody is slow")


def test_who_is_lost_is_judged_anew() -> None:
    model = Model({"a": 400, "b": 400, "c": 2_000}).run(20_000)
    assert model.kinds == [("c", "SLOW")]
    model.watch.gone("c")
    assert model.watch.warnings == ()
    model.run(40_000)
    assert model.kinds == [("c", "SLOW"), ("c", "SLOW")]


def test_a_share_is_told_to_who_says_hello_where_shares_change() -> None:
    model = Model({"a": 400, "b": 400, "c": 1_600}, StragglerAction.SHRINK).run(30_000)
    told = model.watch.share_of("c")
    assert told is not None
    assert told.share == 0.25
    fresh = StragglerWatch(model.policy).share_of("c")
    assert fresh is not None
    assert fresh.share == 1.0
    assert StragglerWatch(StragglerPolicy()).share_of("c") is None


def test_a_group_is_as_slow_as_its_slowest_rank() -> None:
    group = GroupProgress(2, Timeouts())
    group.reported(0, Progress(3, Phase.REDUCING, 10, own_ms=400), 0)
    group.reported(1, Progress(3, Phase.REDUCING, 20, own_ms=900), 0)
    assert group.now(0) == Progress(3, Phase.REDUCING, 10, own_ms=900)
    group.asked(1, 4, 10)
    group.planned(1, 4, 20, excused=False, heals=False)
    assert _own(group, 30) == 900


def _own(group: GroupProgress, now_ms: int) -> int:
    progress = group.now(now_ms)
    assert progress is not None
    return progress.own_ms


# --- the lighthouse -------------------------------------------------------------------------------------------------


class Table:
    """A lighthouse that leaves stragglers out, and replicas a, b and c that train together on streams 1, 2 and 3."""

    def __init__(
        self,
        *,
        min_replicas: int = 1,
        min_replica_size: int = 1,
        action: StragglerAction = StragglerAction.LEAVE_OUT,
    ) -> None:
        policy = StragglerPolicy(action=action)
        self.core = LighthouseCore(
            LighthouseConfig(min_replicas=min_replicas, stragglers=policy),
            started_ms=1_000_000,
            cluster_id="cluster",
            nonces=lambda: 7,
            now_ms=0,
        )
        self.now_ms = 1_000
        self.min_replica_size = min_replica_size
        self.requests = dict.fromkeys("abc", 0)
        self.core.tick(self.now_ms, self.now_ms)
        for stream, name in enumerate("abc", 1):
            self.give(HelloReceived(stream, Hello("job", name, 1, f"{name}:1", ready=True)))
        self.all_ask("abc", 5)

    def give(self, event: LighthouseEvent) -> list[LighthouseEffect]:
        return self.core.handle(event, self.now_ms, 1_000_000 + self.now_ms)

    def all_ask(self, names: str, step: int, *, bad: str = "") -> list[LighthouseEffect]:
        """`bad`: two that did not reach each other."""
        out: list[LighthouseEffect] = []
        quorum = self.core.quorum("job")
        held = quorum.key if quorum is not None else None
        for name in names:
            self.requests[name] += 1
            member = Member(
                name, address=f"{name}:1", step=step, lineage=step, live=True, min_replica_size=self.min_replica_size
            )
            if name in bad:
                unreached = (Unreached(bad.replace(name, ""), Via.GROUP, "no answer"),)
                member = replace(member, unreached=unreached, needs_configure=True)
            out += self.give(QuorumRequested("abc".index(name) + 1, self.requests[name], member, held))
        return out

    def beat(self, seconds: int, own_ms: dict[str, int], *, busy: str = "") -> list[LighthouseEffect]:
        """Let them train; `busy` is in one step all the time."""
        out: list[LighthouseEffect] = []
        for second in range(seconds):
            self.now_ms += 1_000
            for stream, name in enumerate("abc", 1):
                phase = Phase.OWN if name == busy else Phase.REDUCING
                since_ms = 1_000 * (second + 1) if name == busy else 10
                step = 5 if busy else 5 + second
                beat = Progress(step, phase, since_ms, own_ms=own_ms.get(name, 400))
                self.give(BeatReceived(stream, progress=beat))
            out += self.core.tick(self.now_ms, 1_000_000 + self.now_ms)
        return out


def kinds(orders: list[LighthouseEffect]) -> list[str]:
    return [order.news.kind.name for order in orders if isinstance(order, PaceChanged)]


def formed(orders: list[LighthouseEffect]) -> list[tuple[str, ...]]:
    return [order.quorum.replica_ids for order in orders if isinstance(order, QuorumFormed)]


def test_the_next_quorum_is_formed_without_the_straggler_and_does_not_wait_for_it() -> None:
    table = Table()
    orders = table.beat(8, {"c": 4_000})
    assert kinds(orders) == ["LEFT_OUT"]
    assert [order.stream for order in orders if isinstance(order, TellStraggler)] == [3]
    assert not [order for order in orders if isinstance(order, NotifyLoss)], "the running step is waited for"
    orders = table.all_ask("ab", 14)
    assert [(order.quorum.replica_ids, order.reason) for order in orders if isinstance(order, QuorumFormed)] == [
        (("a", "b"), "c is left out as a straggler")
    ]
    assert table.core.warnings("job")[0].startswith("replica c is left out of the next quorums for 5.00 s")
    assert table.all_ask("c", 14) == [], "it waits"


def test_all_are_told_when_a_step_is_not_waited_for() -> None:
    table = Table()
    table.beat(2, {})
    orders = table.beat(7, {}, busy="c")
    assert kinds(orders) == ["LEFT_OUT"]
    told = [(order.stream, str(order.notice)) for order in orders if isinstance(order, NotifyLoss)]
    assert [stream for stream, _ in told] == [1, 2, 3]
    assert told[0][1].endswith(
        "is broken: replica c is left out as a straggler: its own part of a step takes 5.00 s (median of the "
        "others: 0.40 s)"
    )
    assert not [order for order in orders if isinstance(order, ReplicaLost)]


def test_a_job_that_raises_costs_no_other_job_its_effects() -> None:
    table = Table()
    table.give(HelloReceived(9, Hello("other", "x", 1, "x:1", ready=True)))

    def raises(*_: object) -> list[LighthouseEffect]:
        raise KeyError("gone")

    table.core._jobs["job"].stragglers.look = raises  # type: ignore[method-assign, assignment]
    table.now_ms += 60_000
    table.core.tick(table.now_ms, 1_000_000 + table.now_ms)  # it was away; nobody is lost by that
    orders: list[LighthouseEffect] = []
    for _ in range(100):
        table.now_ms += 100
        orders += table.core.tick(table.now_ms, 1_000_000 + table.now_ms)
    assert {order.job for order in orders if isinstance(order, ReplicaLost)} == {"other"}
    failed = [order for order in orders if isinstance(order, JobFailed)]
    assert len(failed) == 100
    assert (failed[0].job, repr(failed[0].error)) == ("job", "KeyError('gone')")


def test_as_many_stay_as_a_commit_needs() -> None:
    orders = Table(min_replica_size=3).beat(8, {"c": 4_000})
    assert kinds(orders) == ["SLOW"]
    (news,) = [order.news for order in orders if isinstance(order, PaceChanged)]
    assert news.sentence.endswith("It is not left out, because 2 replicas would stay, and at least 3 are needed")


def test_who_can_not_be_reached_does_not_stay_in_a_straggler_s_place() -> None:
    table = Table(min_replicas=2)
    assert formed(table.all_ask("abc", 5, bad="bc")) == [("a", "b")]
    orders = table.beat(4, {"b": 4_000})  # it needs 5 s more than the pause of the link
    table.all_ask("abc", 9, bad="bc")
    orders += table.beat(4, {"b": 4_000})
    assert kinds(orders) == ["SLOW"]
    (news,) = [order.news for order in orders if isinstance(order, PaceChanged)]
    assert news.sentence.endswith("It is not left out, because 1 replicas would stay, and at least 2 are needed")


def test_a_straggler_is_let_back_when_a_link_between_the_others_fails() -> None:
    table = Table(min_replicas=2)
    assert kinds(table.beat(8, {"b": 4_000})) == ["LEFT_OUT"]
    assert formed(table.all_ask("bac", 14)) == [("a", "c")]
    assert formed(table.all_ask("ac", 15, bad="ac")) == []
    orders: list[LighthouseEffect] = []
    for _ in range(10):
        table.now_ms += 100
        orders += table.core.tick(table.now_ms, 1_000_000 + table.now_ms)
    assert kinds(orders) == ["LET_BACK"]
    assert formed(orders) == [("a", "b")]


def test_a_replica_that_says_hello_is_told_its_share() -> None:
    table = Table(action=StragglerAction.SHRINK)
    table.beat(8, {"c": 1_600})
    orders = table.give(HelloReceived(9, Hello("job", "c", 1, "c:1", ready=True)))
    told = [order.news for order in orders if isinstance(order, TellStraggler)]
    assert [(news.kind, news.share) for news in told] == [(PaceKind.SHARE, 0.25)]


def test_a_look_at_thousands_costs_little_while_all_keep_up() -> None:
    watch, names = StragglerWatch(StragglerPolicy()), [f"r{number}" for number in range(5_000)]
    for number, name in enumerate(names):
        watch.heard(name, Progress(7, Phase.REDUCING, 10, own_ms=400 + number % 50))
    began_s = time.process_time()
    for look in range(10):
        assert watch.look(names, look * 1_000, _no_company) == []
    assert time.process_time() - began_s < 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": "warn"}, "action is 'warn'; give a StragglerAction"),
        ({"ratio": 1.0}, "the straggler ratio is 1.0; give a number, 1.1 to 1000"),
        ({"ratio": "x"}, "the straggler ratio is 'x'; give a number, 1.1 to 1000"),
        ({"steps": "3"}, "steps is '3'; give a whole number"),
        ({"patience_ms": 0.5}, "patience_ms is 0.5; give a whole number"),
        ({"steps": 0}, "steps is 0; give at least 1"),
        ({"patience_ms": -1}, "patience_ms is -1"),
        ({"first_pause_ms": 400_000}, "first_pause_ms .400000. exceeds longest_pause_ms .300000."),
    ],
)
def test_a_policy_that_can_not_be_is_named(change: dict[str, object], message: str) -> None:
    make: Callable[..., StragglerPolicy] = replace
    with pytest.raises(ConfigError, match=message):
        make(StragglerPolicy(), **change)
