"""Thousands of replicas on one lighthouse: what each of them costs its core, and what is left of them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tft_coord.compat.rule import TorchftCore
from tft_coord.core import effects, events, lighthouse
from tft_coord.core.lighthouse import LighthouseConfig, LighthouseCore
from tft_coord.core.liveness import Replica
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.quorum import Form, Situation, Wait, decide
from tft_coord.core.types import Hello, Member, QuorumKey
from tft_coord.timeouts import Timeouts

STARTED_MS = 1_700_000_000_000
NUMBER = 300


class Rule:
    """The quorum rule, and how often it was applied."""

    def __init__(self) -> None:
        self.applied = 0

    def __call__(self, situation: Situation) -> Form | Wait:
        self.applied += 1
        return decide(situation)


@pytest.fixture
def rule(monkeypatch: pytest.MonkeyPatch) -> Rule:
    rule = Rule()
    monkeypatch.setattr(lighthouse, "decide", rule)
    return rule


def a_core(min_replicas: int = 1, timeouts: Timeouts = Timeouts()) -> LighthouseCore:  # noqa: B008  # frozen
    config = LighthouseConfig(min_replicas, timeouts)
    return LighthouseCore(config, started_ms=STARTED_MS, cluster_id="c", nonces=lambda: 7, now_ms=0)


def come(core: LighthouseCore, number: int, now_ms: int) -> None:
    for stream in range(number):
        hello = Hello("job", f"r{stream:05}:0", 1, f"h{stream}:1")
        core.handle(events.HelloReceived(stream, hello), now_ms, STARTED_MS + now_ms)


def ask(core: LighthouseCore, request: int, held: QuorumKey | None, streams: Iterable[int], now_ms: int) -> list[Any]:
    out: list[Any] = []
    for stream in streams:
        member = Member(f"r{stream:05}:0", step=request, lineage=request, live=request > 1)
        asked = events.QuorumRequested(stream, request, member, held)
        out += core.handle(asked, now_ms, STARTED_MS + now_ms)
    return out


def key_of(core: LighthouseCore) -> QuorumKey:
    quorum = core.quorum("job")
    assert quorum is not None
    return quorum.key


def test_each_quorum_takes_the_rule_a_few_times_and_not_once_a_request(rule: Rule) -> None:
    core = a_core(NUMBER)
    come(core, NUMBER, now_ms=1_000)
    held = None
    for request in range(1, 6):
        rule.applied = 0
        # The last one, longer than join_timeout: from then on any majority would do.
        now_ms = 1_000 + 200_000 * (request == 5)
        out = ask(core, request, held, range(NUMBER), now_ms)
        held = key_of(core)
        assert rule.applied <= 3
        answers = [one for one in out if not isinstance(one, effects.QuorumFormed)]
        assert len(answers) == NUMBER
        assert {type(one) for one in answers} == {effects.AnswerQuorum if request == 1 else effects.AnswerUnchanged}


def test_so_do_newcomers_who_find_a_job_that_is_busy(rule: Rule) -> None:
    core = a_core()
    come(core, NUMBER, now_ms=1_000)
    ask(core, 1, None, range(1), 1_000)
    assert key_of(core).quorum_id == STARTED_MS + 1
    rule.applied = 0
    ask(core, 1, None, range(1, NUMBER), 1_000)
    assert rule.applied <= 1
    out = ask(core, 2, key_of(core), range(1), 1_000)
    assert sum(isinstance(one, effects.AnswerQuorum) for one in out) == NUMBER


def test_who_is_missing_last_ends_the_waiting_whatever_has_come_between() -> None:
    core = a_core(2)
    come(core, 6, now_ms=1_000)
    ask(core, 1, None, range(2), 1_000)
    first = key_of(core)
    now_ms = 1_100
    ask(core, 2, None, [2, 3, 4], now_ms)
    core.handle(events.RequestWithdrawn(3, 2), now_ms, STARTED_MS + now_ms)
    core.handle(events.DeathReported(5, "the end"), now_ms, STARTED_MS + now_ms)
    ask(core, 2, first, [0], now_ms)
    assert key_of(core) == first
    out = ask(core, 2, first, [1], now_ms)
    quorum = core.quorum("job")
    assert quorum is not None
    assert quorum.replica_ids == ("r00000:0", "r00001:0", "r00002:0", "r00004:0")
    assert sum(isinstance(one, effects.AnswerQuorum) for one in out) == 4


def test_the_clock_applies_the_rule_the_more_seldom_the_more_there_are(rule: Rule) -> None:
    """While thousands ask, what has come from them must not wait for one look at all of them after the other."""
    core = a_core(NUMBER, Timeouts(quorum_tick_ms=10))
    come(core, NUMBER, now_ms=1_000)
    ask(core, 1, None, range(NUMBER - 1), 1_000)
    rule.applied = 0
    for now_ms in range(1_010, 1_910, 10):
        core.tick(now_ms, STARTED_MS + now_ms)
    assert 25 <= rule.applied <= 31  # once in 30 ms, and not once in 10
    # Whatever may change the answer is looked at in the next tick.
    rule.applied = 0
    core.handle(events.DeathReported(0, "the end"), 1_910, STARTED_MS + 1_910)
    core.handle(events.RequestWithdrawn(1, 1), 1_910, STARTED_MS + 1_910)
    core.tick(1_920, STARTED_MS + 1_920)
    assert rule.applied == 1


def test_join_timeout_ends_by_the_clock_however_many_there_are() -> None:
    core = a_core(1, Timeouts(quorum_tick_ms=10, join_timeout_ms=2_000, heartbeat_timeout_ms=60_000))
    come(core, NUMBER, now_ms=1_000)
    ask(core, 1, None, [0], 1_000)
    first = key_of(core)
    ask(core, 1, None, range(1, NUMBER), 1_100)
    ask(core, 2, first, [0], 1_100)
    ask(core, 3, key_of(core), range(NUMBER), 1_100)  # nobody recovers any more
    key = key_of(core)
    ask(core, 4, key, range(NUMBER - 1), 1_200)
    for now_ms in range(1_210, 3_300, 10):
        core.tick(now_ms, STARTED_MS + now_ms)
    assert key_of(core) > key
    quorum = core.quorum("job")
    assert quorum is not None
    assert len(quorum.members) == NUMBER - 1


def test_a_reconnection_of_everybody_costs_each_of_them_little(rule: Rule) -> None:
    core = a_core(NUMBER)
    come(core, NUMBER, now_ms=1_000)
    ask(core, 1, None, range(NUMBER), 1_000)
    rule.applied = 0
    for stream in range(NUMBER):
        core.handle(events.StreamClosed(stream), 1_100, STARTED_MS)
    come(core, NUMBER, now_ms=1_150)
    assert rule.applied == 0
    ask(core, 2, key_of(core), range(NUMBER), 1_200)
    assert rule.applied <= 2


class Looks:
    """How often a replica is looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken = 0
        for name in ("healthy", "watched"):
            monkeypatch.setattr(Replica, name, property(self._counted(getattr(Replica, name).fget)))

    def _counted(self, right: Callable[[Replica], bool]) -> Callable[[Replica], bool]:
        def look(replica: Replica) -> bool:
            self.taken += 1
            return right(replica)

        return look


class Members(dict[str, Member]):
    """The members of a quorum, and how often they were looked through."""

    looks = 0

    def values(self) -> Any:
        self.looks += 1
        return super().values()


def test_beats_of_a_whole_job_that_heals_look_through_its_members_once() -> None:
    core = a_core(NUMBER)
    come(core, NUMBER, now_ms=1_000)
    ask(core, 0, None, range(NUMBER), 1_000)  # all but the first heal
    job = core._jobs["job"]
    members = job._members = Members(job._members)
    for step, phase in ((0, Phase.OUTSIDE), (0, Phase.WAITING), (1, Phase.OUTSIDE)):
        progress = Progress(step, phase, since_ms=10, excused=False, slowest_step_ms=600_000)
        for stream in range(NUMBER):
            core.handle(events.BeatReceived(stream, 1, progress), 1_100, STARTED_MS)
        assert [each.has_healed for each in job.liveness.replicas.values()][1:] == [step == 1] * (NUMBER - 1)
    assert members.looks <= 1


def test_streams_that_break_together_cost_each_a_look_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    core = a_core(NUMBER)
    come(core, NUMBER, now_ms=1_000)
    ask(core, 1, None, range(NUMBER), 1_000)
    looks = Looks(monkeypatch)
    for stream in range(NUMBER):
        core.handle(events.StreamClosed(stream), 1_100, STARTED_MS)
    assert looks.taken <= 3 * NUMBER
    assert [one for one in core.tick(5_900, STARTED_MS) if isinstance(one, effects.ReplicaLost)] == []


def test_so_does_a_whole_job_that_leaves_together(monkeypatch: pytest.MonkeyPatch) -> None:
    core = a_core(NUMBER)
    come(core, NUMBER, now_ms=1_000)
    ask(core, 0, None, range(NUMBER), 1_000)  # all but the first heal
    looks = Looks(monkeypatch)
    out: list[Any] = []
    for stream in range(NUMBER):
        out += core.handle(events.LeaveReceived(stream, "preempted", 1_000), 1_100, STARTED_MS)
    assert looks.taken <= 10 * NUMBER
    assert [one.stream for one in out if isinstance(one, effects.Release)] == list(range(NUMBER))


def test_torchfts_clients_cost_the_rule_as_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[int] = []
    right = TorchftCore._decide

    def counted(self: TorchftCore, *arguments: Any) -> Any:
        applied.append(1)
        return right(self, *arguments)

    monkeypatch.setattr(TorchftCore, "_decide", counted)
    core = TorchftCore(LighthouseConfig(NUMBER), started_ms=STARTED_MS)
    for request in range(3):
        applied.clear()
        out: list[Any] = []
        for index in range(NUMBER):
            asked = events.UnaryQuorumRequested(request * NUMBER + index, Member(f"r{index:05}", step=request))
            out += core.handle(asked, 1_000, STARTED_MS)
        assert len(applied) <= 2
        assert sum(isinstance(one, effects.AnswerUnaryQuorum) for one in out) == NUMBER


# --- nothing grows with time ---------------------------------------------------------------------------------------


def weight(thing: object) -> int:
    """Number of objects that it keeps alive, itself included; classes, modules and functions are not its own."""
    seen: dict[int, object] = {}
    todo = [thing]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (type, type(sys), type(weight))):
            continue
        seen[id(one)] = one
        todo += gc.get_referents(one)
    return len(seen)


def live_and_die(core: LighthouseCore, lives: int, first_stream: int, now_ms: int) -> int:
    """Replicas that come, ask, beat and die in every way, fifty at a time. Returns: the time."""
    for start in range(first_stream, first_stream + lives, 50):
        now_ms += 1_000
        wall_ms = STARTED_MS + now_ms
        for stream in range(start, start + 50):
            name = f"r{stream}:u"
            hello = Hello("job" if stream % 3 else f"job {stream}", name, 1, f"h{stream}:1")
            core.handle(events.HelloReceived(stream, hello), now_ms, wall_ms)
            core.handle(events.QuorumRequested(stream, 1, Member(name), None), now_ms, wall_ms)
            core.handle(events.BeatReceived(stream, 1), now_ms, wall_ms)
        core.tick(now_ms, wall_ms)
        for stream in range(start, start + 50):
            if stream % 2:
                core.handle(events.DeathReported(stream, "the end"), now_ms, wall_ms)
            core.handle(events.StreamClosed(stream), now_ms, wall_ms)
        now_ms = let_pass(core, 1_200, now_ms)
    return now_ms


def let_pass(core: LighthouseCore, for_ms: int, now_ms: int) -> int:
    for _ in range(for_ms // 100):
        now_ms += 100
        core.tick(now_ms, STARTED_MS + now_ms)
    return now_ms


def test_ten_thousand_replicas_that_come_and_die_leave_nothing() -> None:
    timeouts = Timeouts(heartbeat_timeout_ms=1_000, beat_interval_ms=300, join_timeout_ms=0)
    core = a_core(timeouts=timeouts)
    forgotten_ms = timeouts.forget_after_ms + 3_000
    now_ms = let_pass(core, forgotten_ms, live_and_die(core, 100, first_stream=1, now_ms=1_000))
    before = weight(core)
    now_ms = live_and_die(core, 10_000, first_stream=1_001, now_ms=now_ms)
    assert weight(core) > before  # the last of them are still remembered
    let_pass(core, forgotten_ms, now_ms)
    assert core.jobs == ()
    assert weight(core) <= before


def test_nor_do_ten_thousand_of_torchfts() -> None:
    timeouts = Timeouts(heartbeat_timeout_ms=1_000, beat_interval_ms=300, join_timeout_ms=0)
    core = TorchftCore(LighthouseConfig(1, timeouts), started_ms=STARTED_MS)
    weights = []
    for call in range(10_001):
        now_ms = 100 * call
        name = f"r{call}:u"
        core.handle(events.HeartbeatReceived(name), now_ms, STARTED_MS)
        core.handle(events.UnaryQuorumRequested(call, Member(name, data="x" * 100)), now_ms, STARTED_MS)
        if call % 3 == 0:
            core.handle(events.UnaryRequestWithdrawn(call), now_ms, STARTED_MS)
        core.tick(now_ms, STARTED_MS)
        if call in (1_000, 10_000):
            weights.append(weight(core))
    assert weights[1] < 1.1 * weights[0]
