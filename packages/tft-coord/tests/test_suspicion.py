"""Silence while others wait: who is probed, who is lost, and who is not."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tft_coord.core import effects, events
from tft_coord.core.lighthouse import LighthouseConfig, LighthouseCore
from tft_coord.core.progress import GroupProgress, Phase, Progress
from tft_coord.core.suspicion import (
    LOST_SILENT,
    PROBE_EVERY_MS,
    UNANSWERED_MOST,
    WAITS_MS,
    Findings,
    LongWait,
    Sighting,
    Suspicion,
    most_wait,
)
from tft_coord.core.types import Hello, Member, QuorumKey
from tft_coord.timeouts import Timeouts

TIMEOUTS = Timeouts()


def nobody(_: Collection[str]) -> Collection[str]:
    return ()


class Three:
    """Members a, b and c of one quorum: b and c wait, a does not."""

    def __init__(self, timeouts: Timeouts = TIMEOUTS) -> None:
        self.core = Suspicion(timeouts)
        self.signs = {"a": 0, "b": 0, "c": 0}
        self.heard: dict[str, int] = {}  # where it is not the last sign
        self.waits = {"a": False, "b": True, "c": True}
        self.stopped, self.stopped_long = "", False
        for name in self.signs:
            self.core.answered(name, self.core.begin(name, 0), 10)

    def look(self, now_ms: int, spared: Collection[str] = ()) -> Findings:
        members = [
            Sighting(
                name,
                sign_ms,
                self.heard.get(name, sign_ms),
                self.waits[name],
                stopped=self.stopped if name == "a" else "",
                stopped_long=self.stopped_long and name == "a",
            )
            for name, sign_ms in self.signs.items()
        ]
        return self.core.look(members, now_ms, lambda _: spared)

    def hear_the_waiting(self, now_ms: int) -> None:
        self.signs |= {"b": now_ms, "c": now_ms}


def test_who_does_not_wait_is_probed_twice_a_second() -> None:
    three = Three()
    probed = []
    for now_ms in range(500, 2_000, 100):
        three.hear_the_waiting(now_ms)
        probed += [(name, now_ms) for name, _ in three.look(now_ms, spared=["a"]).probes]
    assert probed == [("a", 500), ("a", 1_000), ("a", 1_500)]


def test_nobody_is_probed_where_few_wait() -> None:
    three = Three()
    three.waits["b"] = False
    assert three.look(2_000) == Findings()


def test_a_second_of_silence_and_an_unanswered_probe_are_a_loss() -> None:
    three = Three()
    three.signs["a"] = 300
    ((name, _),) = three.look(700).probes
    assert name == "a"
    for now_ms in range(800, 1_300, 100):
        three.hear_the_waiting(now_ms)
        assert three.look(now_ms).lost == ()
    ((name, reason),) = three.look(1_300).lost
    assert name == "a"
    assert reason == (
        f"{LOST_SILENT} for 1000 ms and left a probe unanswered for 600 ms, while 2 of 2 other members waited for it"
    )


def test_an_answered_probe_is_a_sign_of_life() -> None:
    three = Three()
    ((_, number),) = three.look(500).probes
    three.core.answered("a", number, 900)
    three.signs["a"] = 900
    three.hear_the_waiting(1_800)
    assert three.look(1_800).lost == ()


def test_twice_the_slowest_recent_answer_is_waited_for() -> None:
    three = Three()
    ((_, number),) = three.look(500).probes
    three.core.answered("a", number, 1_300)  # after 800 ms
    three.signs["a"] = 1_300
    assert [name for name, _ in three.look(1_400).probes] == ["a"]
    three.hear_the_waiting(2_900)
    assert three.look(2_900).lost == ()  # unanswered for 1,500 ms
    three.hear_the_waiting(3_000)
    assert [name for name, _ in three.look(3_000).lost] == ["a"]


def test_a_minute_later_a_slow_answer_counts_no_more() -> None:
    three = Three()
    ((_, slow),) = three.look(500).probes
    three.core.answered("a", slow, 4_500)
    ((_, quick),) = three.look(5_000).probes
    three.core.answered("a", quick, 5_010)
    assert [name for name, _ in three.look(70_000).probes] == ["a"]
    three.hear_the_waiting(70_500)
    assert [name for name, _ in three.look(70_500).lost] == ["a"]


def test_who_has_never_answered_is_not_judged() -> None:
    three = Three()
    three.core.begin("a", 0)
    three.hear_the_waiting(4_000)
    assert three.look(4_000).lost == ()


def test_the_waiting_must_have_been_heard_since_the_probe() -> None:
    """Else the fault may be the lighthouse's own. They are asked, once the probe has been unanswered for a while."""
    three = Three()
    three.hear_the_waiting(500)
    assert [name for name, _ in three.look(500).probes] == ["a"]
    assert three.look(600).probes == ()
    assert [name for name, _ in three.look(700).probes] == ["b", "c"]
    assert three.look(1_500).lost == ()
    three.signs["b"] = 1_550  # one of two is not most
    assert three.look(1_600).lost == ()
    three.signs["c"] = 1_600
    assert [name for name, _ in three.look(1_700).lost] == ["a"]


def test_excused_silence_of_the_waiting_is_no_message() -> None:
    """Seed 212824: two waiting members had disconnected, and the lighthouse's own outage had excused their silence."""
    three = Three()
    three.look(500)
    three.hear_the_waiting(1_600)  # excused
    three.heard = {"b": 400, "c": 450}
    assert three.look(1_600).lost == ()
    three.heard = {"b": 1_500, "c": 1_500}
    assert [name for name, _ in three.look(1_600).lost] == ["a"]


def test_answers_that_have_waited_for_the_lighthouse_are_not_slow() -> None:
    three = Three()
    ((_, number),) = three.look(500).probes
    three.core.restart()
    three.signs = dict.fromkeys("abc", 3_000)
    three.core.answered("a", number, 3_000)
    assert [name for name, _ in three.look(3_100).probes] == ["a"]
    three.hear_the_waiting(3_900)
    assert three.look(3_900).lost == ()
    three.hear_the_waiting(4_000)
    assert [name for name, _ in three.look(4_000).lost] == ["a"]  # with the bound of quick answers


def test_whom_the_others_need_is_spared() -> None:
    three = Three()
    three.look(500)
    three.hear_the_waiting(2_000)
    assert three.look(2_000, spared=["a"]).lost == ()


def test_who_is_stopped_is_lost_at_once() -> None:
    three = Three()
    three.stopped = "rank 0 is stopped"
    assert three.look(500).lost == (("a", "its process is stopped: rank 0 is stopped"),)
    assert three.look(500, spared=["a"]).lost == ()


def test_with_a_short_heartbeat_timeout_silence_is_judged_by_that_alone() -> None:
    three = Three(Timeouts(heartbeat_timeout_ms=1_000))
    three.look(500)
    three.hear_the_waiting(5_000)
    assert three.look(5_000).lost == ()
    three.stopped = "rank 0 is stopped"
    assert [name for name, _ in three.look(5_100).lost] == ["a"]


def test_who_is_stopped_for_long_is_lost_though_few_wait_and_though_it_is_the_last() -> None:
    three = Three()
    three.waits["b"] = False
    three.stopped, three.stopped_long = "rank 0 is stopped", True
    assert [name for name, _ in three.look(5_000, spared=["a"]).lost] == ["a"]
    three.waits["c"] = False
    assert three.look(5_100) == Findings()


def test_a_member_that_never_answers_is_asked_no_more() -> None:
    three = Three()
    sent = sum(len(three.look(now_ms, spared=["a"]).probes) for now_ms in range(500, 100_000, PROBE_EVERY_MS))
    assert sum(1 for _ in range(UNANSWERED_MOST)) <= sent <= 3 * UNANSWERED_MOST


@pytest.mark.parametrize(
    ("waiting", "members", "expected"),
    [(0, 1, False), (0, 2, False), (1, 2, True), (1, 3, False), (2, 3, True), (2, 4, True), (2, 5, False)],
)
def test_more_than_half_of_the_others_must_wait(waiting: int, members: int, expected: bool) -> None:
    assert most_wait(waiting, members) is expected


# --- who says that it waits ----------------------------------------------------------------------------------------


def test_a_long_wait_is_said_once() -> None:
    wait = LongWait()
    looks = [None, 0, 100, WAITS_MS, 400, 500, None, 50, WAITS_MS + 20, 700, 10, 200, WAITS_MS]
    assert [wait.look(each) for each in looks] == [each in (3, 8, 12) for each in range(len(looks))]


def group(world_size: int = 2) -> GroupProgress:
    return GroupProgress(world_size, TIMEOUTS)


def waits(since_ms: int, phase: Phase = Phase.REDUCING) -> Progress:
    return Progress(5, phase, since_ms)


def test_a_group_waits_when_all_its_ranks_have_said_so() -> None:
    ranks = group()
    ranks.reported(0, waits(300), 1_000)
    assert ranks.waits_since_ms(1_000) is None
    ranks.reported(1, waits(320), 1_100)
    assert ranks.waits_since_ms(1_100) == 780
    ranks.reported(1, Progress(5, Phase.OWN, 10), 1_200)
    assert ranks.waits_since_ms(1_200) is None


def test_a_wait_that_had_just_begun_is_no_proof_of_one_that_lasts() -> None:
    """Whoever is stopped in a reduction has said with its last beat that it was in one."""
    ranks = group(1)
    ranks.reported(0, waits(5), 1_000)
    assert ranks.waits_since_ms(1_600) is None


def test_who_has_asked_waits_whatever_its_beats_say() -> None:
    ranks = group(1)
    ranks.reported(0, Progress(5, Phase.OUTSIDE, 0), 1_000)
    ranks.asked(0, 5, 1_010)
    assert ranks.waits_since_ms(1_200) is None
    assert ranks.waits_since_ms(1_310) == 1_010


def test_what_was_said_long_ago_is_no_wait() -> None:
    ranks = group(1)
    ranks.reported(0, waits(400), 1_000)
    assert ranks.waits_since_ms(2_400) == 600
    assert ranks.waits_since_ms(2_600) is None


# --- in the lighthouse -------------------------------------------------------------------------------------------


class Quorum:
    """A lighthouse with a quorum of a, b and c, on the streams 1, 2 and 3."""

    def __init__(self, *, answers_probes: bool = True) -> None:
        self.core = LighthouseCore(
            LighthouseConfig(), started_ms=1_000_000, cluster_id="c", nonces=iter(range(1, 100)).__next__, now_ms=0
        )
        self.now_ms = 1_000
        self.probe_of: dict[int, int] = {}  # by each stream, the number of the newest
        for stream, name in enumerate("abc", 1):
            hello = Hello("job", name, 1, f"{name}:1", ready=True, answers_probes=answers_probes)
            for order in self.do(events.HelloReceived(stream, hello)):
                if isinstance(order, effects.Probe):
                    self.do(events.ProbeAnswered(stream, order.number))
        self.step = 0
        self.ask_all()

    def do(self, event: events.LighthouseEvent) -> list[effects.LighthouseEffect]:
        return self._out(self.core.handle(event, self.now_ms, self.now_ms + 1_000_000))

    def _out(self, orders: list[effects.LighthouseEffect]) -> list[effects.LighthouseEffect]:
        self.probe_of.update({each.stream: each.number for each in orders if isinstance(each, effects.Probe)})
        return orders

    def says_stopped(self, number: int) -> list[str]:
        """c says after that probe that it is stopped. Returns: who is lost by it."""
        out = self.do(events.ProbeAnswered(3, number, "rank 0 is stopped"))
        return [each.replica_id for each in out if isinstance(each, effects.ReplicaLost)]

    def ask(self, stream: int) -> list[effects.LighthouseEffect]:
        member = Member("abc"[stream - 1], step=self.step, lineage=7, live=self.step > 0)
        held = self.core.quorum("job")
        key: QuorumKey | None = held.key if held is not None else None
        return self.do(events.QuorumRequested(stream, self.step + 1, member, key))

    def ask_all(self) -> None:
        for stream in (1, 2, 3):
            self.ask(stream)
        self.step += 1

    def pass_ms(self, time_ms: int) -> list[effects.LighthouseEffect]:
        out: list[effects.LighthouseEffect] = []
        for _ in range(0, time_ms, 100):
            self.now_ms += 100
            out += self._out(self.core.tick(self.now_ms, self.now_ms + 1_000_000))
        return out


def test_nothing_is_probed_while_nobody_waits() -> None:
    quorum = Quorum()
    for _ in range(5):
        assert [each for each in quorum.pass_ms(900) if isinstance(each, effects.Probe)] == []
        for stream in (1, 2, 3):
            assert quorum.do(events.BeatReceived(stream, 0, waits(100))) == []
        quorum.ask_all()


def test_those_that_wait_for_a_quorum_have_the_other_probed() -> None:
    quorum = Quorum()
    quorum.pass_ms(400)
    quorum.ask(1)
    quorum.ask(2)
    assert quorum.pass_ms(200) == []
    assert [each.stream for each in quorum.pass_ms(200) if isinstance(each, effects.Probe)] == [3]


def test_those_that_say_that_they_wait_have_the_other_probed_at_once() -> None:
    quorum = Quorum()
    quorum.pass_ms(600)
    assert quorum.do(events.BeatReceived(1, 0, waits(300), waits=True)) == []
    (probe,) = quorum.do(events.BeatReceived(2, 0, waits(300), waits=True))
    assert isinstance(probe, effects.Probe)
    assert probe.stream == 3


def test_a_thousand_that_say_so_together_do_not_cost_a_million_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    core = LighthouseCore(
        LighthouseConfig(), started_ms=1_000_000, cluster_id="c", nonces=iter(range(1, 100)).__next__, now_ms=0
    )
    names = [f"r{number:04}" for number in range(1_000)]
    for stream, name in enumerate(names):
        core.handle(events.HelloReceived(stream, Hello("job", name, 1, "h:1", ready=True)), 1_000, 0)
    for stream, name in enumerate(names):
        core.handle(events.QuorumRequested(stream, 1, Member(name), None), 1_000, 0)
    looked: list[int] = []

    def look(_: Suspicion, members: Collection[Sighting], now_ms: int, spared: object) -> Findings:
        looked.append(now_ms)
        return Findings()

    monkeypatch.setattr(Suspicion, "look", look)
    for stream in range(999):
        core.handle(events.BeatReceived(stream, 0, waits(300), waits=True), 1_500 + stream // 100, 0)
    core.tick(1_600, 0)
    assert looked == [1_600]


def test_an_older_manager_server_is_sent_no_probe() -> None:
    quorum = Quorum(answers_probes=False)
    quorum.pass_ms(400)
    for stream in (1, 2):
        assert quorum.do(events.BeatReceived(stream, 0, waits(300), waits=True)) == []
    assert quorum.pass_ms(2_000) == []


def test_a_stop_that_was_said_a_while_ago_is_no_stop() -> None:
    """It may have gone on meanwhile; the next answer says."""
    quorum = Quorum()
    quorum.pass_ms(400)
    quorum.says_stopped(0)
    quorum.says_stopped(quorum.probe_of[3])
    quorum.pass_ms(700)
    for stream in (1, 2):
        quorum.do(events.BeatReceived(stream, 0, waits(300), waits=True))
    assert [each for each in quorum.pass_ms(100) if isinstance(each, effects.ReplicaLost)] == []
    assert quorum.says_stopped(quorum.probe_of[3]) == ["c"]


def test_a_stop_that_was_found_after_no_recent_probe_is_asked_after() -> None:
    """What was said has waited, on its way or for a lighthouse that was stopped itself."""
    quorum = Quorum()
    quorum.pass_ms(1_500)
    for stream in (1, 2):
        quorum.do(events.BeatReceived(stream, 0, waits(300), waits=True))
    old = quorum.probe_of[3]
    quorum.pass_ms(300)
    quorum.do(events.ProbeAnswered(3, old))
    quorum.pass_ms(300)
    new = quorum.probe_of[3]
    assert new > old
    assert quorum.says_stopped(old) == []
    assert quorum.says_stopped(new) == ["c"]
    assert quorum.says_stopped(0) == []
