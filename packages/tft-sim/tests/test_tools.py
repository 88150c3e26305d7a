"""The tools that test the rest: virtual time, processes, the network in memory, marks, and the invariant checkers."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tft_coord.core.fingerprint import FingerprintPart
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.types import Hello, Member, Purpose, Quorum, QuorumKey, Verdict
from tft_coord.timeouts import Timeouts
from tft_sim import (
    EventBudgetError,
    Fate,
    InvariantError,
    Invariants,
    Marks,
    Network,
    Process,
    Rule,
    Stream,
    VirtualClock,
)
from tft_sim.group import SimulatedGroup
from tft_sim.hang_truth import HangTruth, SentBeat
from tft_sim.intervals import Intervals
from tft_sim.invariants import Contribution, Held, Reduced, Round
from tft_sim.liveness_truth import LivenessTruth
from tft_sim.process import State


class TestClock:
    def test_events_happen_in_order_and_equal_times_as_they_came(self) -> None:
        clock = VirtualClock()
        seen: list[tuple[int, str]] = []
        for name, at_ms in (("late", 9), ("first", 5), ("second", 5), ("third", 5)):
            clock.at(at_ms, lambda name=name: seen.append((clock.now_ms, name)))  # type: ignore[misc]
        clock.run_until(100)
        assert seen == [(5, "first"), (5, "second"), (5, "third"), (9, "late")]
        assert clock.now_ms == 100

    def test_what_is_cancelled_does_not_happen(self) -> None:
        clock = VirtualClock()
        timer = clock.after(5, lambda: pytest.fail("cancelled"))
        timer.cancel()
        timer.cancel()
        clock.run_until(10)
        assert clock.num_events == 0

    def test_a_run_can_end_at_an_event(self) -> None:
        clock = VirtualClock()
        seen: list[int] = []
        for at_ms in (1, 2, 3):
            clock.at(at_ms, lambda: seen.append(clock.now_ms))
        assert clock.run_until(10, stop=lambda: len(seen) == 2)
        assert (seen, clock.now_ms) == ([1, 2], 2)
        assert not clock.run_until(10)

    def test_a_livelock_ends(self) -> None:
        clock = VirtualClock(budget_events=100)

        def again() -> None:
            clock.after(0, again)

        again()
        with pytest.raises(EventBudgetError, match="100 events have happened by 0 ms"):
            clock.run_until(1)


class TestStretches:
    def test_a_break_after_the_last_word_is_not_told(self) -> None:
        busy = Intervals()
        for is_so, at_ms in ((True, 100), (False, 900), (True, 950)):
            busy.record(is_so, at_ms)
        assert busy.longest_ms(2_000) == 1_050
        assert busy.observed_ms(2_000, silent_since_ms=950, heard_ms=700) == 1_900
        assert busy.observed_ms(2_000, silent_since_ms=950, heard_ms=920) == 1_050
        assert busy.observed_ms(2_000, silent_since_ms=50, heard_ms=0) == 0
        busy.record(False, 1_500)
        assert busy.observed_ms(2_000, silent_since_ms=950, heard_ms=700) == 1_400


def cable(keepalive_ms: int = 1_000) -> tuple[VirtualClock, Network, Process, Process, list[object], list[object]]:
    clock = VirtualClock()
    network = Network(clock, random.Random(1), delay_ms=(1, 9), keepalive_ms=keepalive_ms)
    return clock, network, Process("a", clock), Process("b", clock), [], []


def stream_of(
    clock: VirtualClock, network: Network, client: Process, server: Process, heard: list[object], answered: list[object]
) -> Stream:
    opened: list[Stream] = []

    def accepted(stream: Stream) -> None:
        stream.listen(server, heard.append, lambda: heard.append("closed"))

    def open_(stream: Stream) -> None:
        stream.listen(client, answered.append, lambda: answered.append("closed"))
        opened.append(stream)

    network.dial(client, server, accepted=accepted, opened=open_, failed=lambda: answered.append("failed"))
    clock.run_until(clock.now_ms + 50)
    assert opened
    return opened[0]


class TestNetwork:
    def test_a_stream_keeps_its_order_whatever_the_delays(self) -> None:
        clock, network, a, b, heard, answered = cable()
        stream = stream_of(clock, network, a, b, heard, answered)
        for number in range(100):
            stream.send(a, number)
        stream.send(b, "back")
        stream.close(a)
        clock.run_until(500)
        assert heard == [*range(100), "closed"]
        assert answered == ["back"] or answered == []

    def test_a_drop_breaks_the_stream_for_both(self) -> None:
        clock, network, a, b, heard, answered = cable()
        stream = stream_of(clock, network, a, b, heard, answered)
        stream.send(a, 1)
        network.add(Rule("a", "b", Fate.DROP))
        stream.send(a, 2)
        stream.send(a, 3)
        clock.run_until(500)
        assert heard == [1, "closed"]
        assert answered == ["closed"]

    def test_a_short_cut_delays_and_a_long_one_breaks(self) -> None:
        clock, network, a, b, heard, answered = cable(keepalive_ms=1_000)
        stream = stream_of(clock, network, a, b, heard, answered)
        rule = network.add(Rule("a", "b", Fate.PARTITION))
        stream.send(a, 1)
        stream.send(a, 2)
        clock.run_until(clock.now_ms + 900)
        assert heard == []
        network.remove(rule)
        clock.run_until(clock.now_ms + 200)
        assert heard == [1, 2]
        network.add(Rule("b", "a", Fate.PARTITION))  # one way only: nothing is acknowledged
        clock.run_until(clock.now_ms + 1_100)
        assert heard == [1, 2, "closed"]
        assert answered == ["closed"]

    def test_what_is_held_waits_as_long_as_one_likes(self) -> None:
        clock, network, a, b, heard, answered = cable()
        stream = stream_of(clock, network, a, b, heard, answered)
        rule = network.add(Rule("a", "b", Fate.HOLD))
        stream.send(a, 1)
        clock.run_until(60_000)
        assert heard == []
        network.remove(rule)
        clock.run_until(60_100)
        assert heard == [1]

    def test_the_newest_rule_that_fits_counts(self) -> None:
        clock, network, a, b, heard, answered = cable()
        stream = stream_of(clock, network, a, b, heard, answered)
        network.add(Rule("*", "*", Fate.DROP))
        network.add(Rule("a", "?", Fate.DELAY, 100, 100))
        before_ms = clock.now_ms
        stream.send(a, 1)
        clock.run_until(before_ms + 99)
        assert heard == []
        clock.run_until(before_ms + 100)
        assert heard == [1]

    def test_an_end_that_knows_that_a_stream_has_ended_reads_nothing_more(self) -> None:
        clock, network, a, b, heard, answered = cable()
        stream = stream_of(clock, network, a, b, heard, answered)
        network.add(Rule("a", "b", Fate.DELAY, 100, 100))
        stream.send(a, "late")
        network.break_streams("a", "b", server_late_ms=50)
        clock.run_until(clock.now_ms + 500)
        assert heard == answered == ["closed"]

    def test_the_killed_are_noticed_at_once_and_the_vanished_after_the_keepalive(self) -> None:
        for vanish, noticed_ms in ((False, 10), (True, 1_010)):
            clock, network, a, b, heard, answered = cable(keepalive_ms=1_000)
            stream_of(clock, network, a, b, heard, answered)
            died_ms = clock.now_ms
            b.end(vanish=vanish)
            network.ended(b)
            clock.run_until(died_ms + noticed_ms - 10)
            assert answered == []
            clock.run_until(died_ms + noticed_ms)
            assert answered == ["closed"]

    @pytest.mark.parametrize("how", ["killed", "vanished", "dropped", "cut"])
    def test_a_dial_that_can_not_succeed_fails(self, how: str) -> None:
        clock, network, a, b, _, answered = cable(keepalive_ms=1_000)
        if how in ("killed", "vanished"):
            b.end(vanish=how == "vanished")
        else:
            network.add(Rule("a", "b", Fate.DROP if how == "dropped" else Fate.PARTITION))
        network.dial(
            a,
            b,
            accepted=lambda _: pytest.fail("accepted"),
            opened=lambda _: pytest.fail("opened"),
            failed=lambda: answered.append("failed"),
        )
        clock.run_until(5_000)
        assert answered == ["failed"]

    def test_a_dial_to_one_that_dies_before_the_client_knows_fails(self) -> None:
        clock, network, a, b, _, answered = cable()

        def accepted(stream: Stream) -> None:
            b.end()
            network.ended(b)

        network.dial(
            a, b, accepted=accepted, opened=lambda _: pytest.fail("opened"), failed=lambda: answered.append("failed")
        )
        clock.run_until(5_000)
        assert answered == ["failed"]

    def test_what_comes_before_the_other_end_listens_waits_for_it(self) -> None:
        clock, network, a, b, _, _ = cable()
        heard: list[object] = []

        def opened(stream: Stream) -> None:
            stream.listen(a, heard.append, lambda: None)

        for _ in range(20):  # the welcome and the dial's own answer race
            network.dial(a, b, accepted=lambda stream: stream.send(b, "welcome"), opened=opened, failed=lambda: None)
        clock.run_until(100)
        assert heard == ["welcome"] * 20

    def test_a_stream_stands_when_both_ends_know(self) -> None:
        clock, network, a, b, _, _ = cable()
        network.add(Rule("b", "a", Fate.DELAY, 40, 40))
        accepted: list[Stream] = []
        network.dial(a, b, accepted=accepted.append, opened=lambda _: None, failed=lambda: None)
        clock.run_until(30)
        assert accepted[0].open_since_ms is None
        clock.run_until(60)
        assert accepted[0].open_since_ms is not None
        assert accepted[0].open_since_ms > 40

    def test_calls_come_twice_and_streams_do_not(self) -> None:
        clock, network, a, b, heard, answered = cable()
        network.add(Rule("a", "b", Fate.DUPLICATE, 100, 100))
        stream = stream_of(clock, network, a, b, heard, answered)
        stream.send(a, "on the stream")
        network.message(a, b, lambda: heard.append("call"), lambda: None)
        clock.run_until(clock.now_ms + 50)
        assert sorted(map(str, heard)) == ["call", "on the stream"]
        clock.run_until(clock.now_ms + 100)
        assert sorted(map(str, heard)) == ["call", "call", "on the stream"]

    def test_calls_overtake_one_another_and_a_streams_messages_do_not(self) -> None:
        clock, network, a, b, heard, answered = cable()
        network.add(Rule("a", "b", Fate.REORDER, 1, 500))
        stream = stream_of(clock, network, a, b, heard, answered)
        calls: list[int] = []
        for number in range(20):
            stream.send(a, number)
            network.message(a, b, partial(calls.append, number), lambda: None)
        clock.run_until(clock.now_ms + 30)
        assert heard == list(range(20))
        clock.run_until(clock.now_ms + 600)
        assert sorted(calls) == list(range(20))
        assert calls != sorted(calls)

    def test_a_cut_one_way_is_a_cut_and_an_end_is_told(self) -> None:
        clock, network, _, _, _, _ = cable()
        mended: list[int] = []
        network.on_mend = lambda: mended.append(clock.now_ms)
        rule = network.add(Rule("a", "b*", Fate.PARTITION))
        assert network.is_cut("b1", "a")
        assert not network.is_cut("b1", "c")
        assert network.calm_since_ms("a", "b") == clock.now_ms
        clock.run_until(70)
        network.remove(rule)
        assert (network.is_cut("a", "b1"), mended) == (False, [70])
        clock.run_until(200)
        assert network.calm_since_ms("b", "a") == 70
        assert network.calm_since_ms("c", "a") == 0

    def test_a_lost_call_is_an_error_at_its_sender(self) -> None:
        clock, network, a, b, heard, answered = cable()
        network.add(Rule("a", "b", Fate.DROP))
        network.message(a, b, lambda: heard.append("call"), lambda: answered.append("lost"))
        clock.run_until(100)
        assert (heard, answered) == ([], ["lost"])


class TestGroup:
    """The model of a process group: its traffic is of the network."""

    def meets(self) -> tuple[VirtualClock, set[frozenset[str]], SimulatedGroup]:
        clock, cuts = VirtualClock(), set[frozenset[str]]()
        group = SimulatedGroup(
            KEY, 0, ("a", "b", "c"), clock, Invariants(), lambda: 5, lambda *two: frozenset(two) in cuts
        )
        return clock, cuts, group

    def all_join(self, group: SimulatedGroup) -> None:
        waiters = [group.join(name) for name in ("a", "b", "c")]
        assert [waiter.value for waiter in waiters] == [True] * 3

    def given(self, name: str) -> Contribution:
        return Contribution(name, Held(3, 103, "w"), f"{name}'s", "bucket 0", divide_by=3.0)

    def test_a_rendezvous_across_a_cut_waits_for_its_end(self) -> None:
        _, cuts, group = self.meets()
        cuts.add(frozenset("ab"))
        waiters = [group.join(name) for name in ("a", "b", "c")]
        assert not any(waiter.done for waiter in waiters)
        cuts.clear()
        group.update()
        assert [waiter.value for waiter in waiters] == [True] * 3

    def test_a_reduction_across_a_cut_waits_for_its_end(self) -> None:
        clock, cuts, group = self.meets()
        self.all_join(group)
        cuts.add(frozenset("bc"))
        waiters = [group.reduce(1, self.given(name)) for name in ("a", "b", "c")]
        clock.run_until(100)
        assert not any(waiter.done for waiter in waiters)
        cuts.clear()
        group.update()
        clock.run_until(105)
        assert [waiter.value.gradients for waiter in waiters] == [("a's", "b's", "c's")] * 3

    def test_who_leaves_is_missed_by_those_whom_it_reaches(self) -> None:
        _, cuts, group = self.meets()
        self.all_join(group)
        waiters = {name: group.reduce(1, self.given(name)) for name in ("a", "b")}
        cuts.add(frozenset("bc"))
        group.leave("c")
        assert {name: waiter.done for name, waiter in waiters.items()} == {"a": True, "b": False}
        assert group.reduce(2, self.given("a")).done
        assert not group.reduce(2, self.given("b")).done
        cuts.clear()
        group.update()
        assert waiters["b"].done
        assert waiters["b"].value is None


class TestProcess:
    def test_a_stopped_one_does_everything_when_it_wakes_up(self) -> None:
        clock = VirtualClock()
        process = Process("a", clock)
        seen: list[str] = []
        actions: list[Callable[[], None]] = [lambda: seen.append("one"), lambda: seen.append("two")]
        process.stop()
        for action in actions:
            process.run(action)
        process.after(10, lambda: seen.append("timer"))
        clock.run_until(100)
        assert seen == []
        process.resume()
        assert seen == ["one", "two", "timer"]

    def test_a_dead_one_does_nothing_any_more(self) -> None:
        process = Process("a", VirtualClock())
        process.stop()
        process.run(lambda: pytest.fail("dead"))
        process.end()
        process.resume()
        process.run(lambda: pytest.fail("dead"))
        assert not process.alive


def test_marks_count_and_tell_what_is_missing() -> None:
    marks, more = Marks(), Marks()
    marks.hit("a")
    more.hit("a")
    more.hit("b")
    marks.add(more)
    assert (marks["a"], marks["b"], marks["c"]) == (2, 1, 0)
    assert marks.missing(["c", "a", "d"]) == ["c", "d"]
    assert str(marks) == "       2  a\n       1  b"


class TestHangTruth:
    """The watch over hangs, beside a trainer that hangs since 0 ms; its beats come on stream 1."""

    LIMIT_MS = 3_000

    @staticmethod
    def lost_at(at_ms: int, *late_ms: int) -> tuple[VirtualClock, HangTruth, Any]:
        """It is lost by its hang, when beats have been heard that were so late; gives its manager server."""
        clock, timeouts = VirtualClock(), Timeouts(slowest_step_ms=TestHangTruth.LIMIT_MS)
        stub: Any = SimpleNamespace
        trainer = stub(name="a:1/0", hangs=True, plan=None, phase_since_ms=0, stopped_since_ms=0, busy=Intervals())
        trainer.alive, trainer.state, trainer.running_since_ms = True, State.RUNNING, 0
        trainer.busy.record(True, 0)
        manager = stub(name="a:1/manager", address="a:1", running_since_ms=0)
        manager.replica = stub(replica_id="a:1", trainers=[trainer], manager=manager, alive=True)
        network = stub(calm_since_ms=lambda *_: 0)
        config = stub(trainers=stub(speaks=False))
        truth = HangTruth(stub(clock=clock, timeouts=timeouts, lives=[manager.replica], network=network, config=config))
        clock.run_until(at_ms)
        for each in late_ms:
            told = SentBeat(Progress(7, Phase.OWN, at_ms - each), sent_ms=at_ms - each, since_ms=0)
            truth.beat_received(trainer, 1, told)
        truth.lost("a:1", 1)
        return clock, truth, manager

    @pytest.mark.parametrize(
        ("late_ms", "known_at_ms"),
        [
            ((), 3_000),
            ((5,), 3_005),
            ((5, 1_400, 900, 400), 3_005),  # what was heard in time is known, whatever is heard later
            ((1_400, 900, 400), 3_400),  # a trainer that went on would say the same
        ],
    )
    def test_no_newer_session_is_opened_once_a_hang_can_be_known(
        self, late_ms: tuple[int, ...], known_at_ms: int
    ) -> None:
        clock, truth, manager = self.lost_at(2_900, *late_ms)
        clock.run_until(known_at_ms - 1)
        truth.session_opened(manager, Hello("job", "a:1", 2, "a:1"))
        clock.run_until(known_at_ms)
        truth.session_opened(manager, Hello("job", "a:1", 1, "a:1"))
        with pytest.raises(InvariantError, match="H2: a:1/0 still hangs, and its manager server opens a newer session"):
            truth.session_opened(manager, Hello("job", "a:1", 2, "a:1"))

    def test_a_beat_about_what_was_before_tells_nothing_of_a_hang(self) -> None:
        clock, truth, manager = self.lost_at(2_900, 5)
        before = SentBeat(Progress(7, Phase.WAITING, 30), sent_ms=-20, since_ms=-50)
        truth.beat_received(manager.replica.trainers[0], 1, before)
        clock.run_until(5_000)
        truth.session_opened(manager, Hello("job", "a:1", 2, "a:1"))

    def test_another_process_and_another_life_may_open_a_session(self) -> None:
        clock, truth, manager = self.lost_at(2_900, 5)
        clock.run_until(5_000)
        other: Any = SimpleNamespace(address="a:2", replica=SimpleNamespace(alive=True))
        truth.session_opened(other, Hello("job", "a:1", 2, "a:2"))
        truth.welcomed(Hello("job", "a:1", 1, "a:1"))  # by a lighthouse that has forgotten the loss
        truth.session_opened(manager, Hello("job", "a:1", 2, "a:1"))


KEY = QuorumKey(7, 1)
ROUND = Round(KEY, 3, 103, Purpose.COMMIT)


def quorum(key: QuorumKey, *names: str) -> Quorum:
    return Quorum(key, tuple(Member(name) for name in names))


class TestInvariants:
    """The checkers themselves: a checker that never complains proves nothing."""

    def broken(self, number: str, *calls: Callable[[Invariants], None]) -> None:
        looking = Invariants()
        for call in calls[:-1]:
            call(looking)
        with pytest.raises(InvariantError, match=f"^{number}: ") as caught:
            calls[-1](looking)
        assert caught.value.invariant == number

    def test_ids_rise(self) -> None:
        self.broken("I1", lambda i: i.formed(quorum(KEY, "a")), lambda i: i.formed(quorum(QuorumKey(7, 2), "a")))
        self.broken("I1", lambda i: i.formed(quorum(KEY, "a")), lambda i: i.formed(quorum(QuorumKey(6, 2), "a")))
        self.broken("I1", lambda i: i.answered("a", quorum(KEY, "a")))
        self.broken("I1", lambda i: i.received("a", KEY), lambda i: i.received("a", QuorumKey(6, 1)))

    def test_all_see_the_same_members(self) -> None:
        self.broken(
            "I2",
            lambda i: i.formed(quorum(KEY, "a", "b")),
            lambda i: i.answered("a", quorum(KEY, "a", "b")),
            lambda i: i.answered("b", quorum(KEY, "b")),
        )
        self.broken("I2", lambda i: i.formed(quorum(KEY, "a")), lambda i: i.answered("b", quorum(KEY, "a")))

    def test_a_loss_breaks_the_newest_quorum_of_its_session(self) -> None:
        broken: list[tuple[QuorumKey, str]] = []

        def lighthouse() -> LivenessTruth:
            broken.clear()
            looking = LivenessTruth(1, lambda key, who: broken.append((key, who)))
            for stream, name in enumerate(("a", "b")):
                looking.welcomed(Hello("job", name, 1, f"{name}:1"), stream)
                looking.asked(Member(name, session=1), stream)
            looking.formed(Quorum(KEY, (Member("a", session=1), Member("b", session=1))), None)
            return looking

        lighthouse().lost("b", 1, dead=False)
        assert broken == [(KEY, "b")]
        lighthouse().lost("c", 1, dead=True)
        assert broken == []
        lighthouse().welcomed(Hello("job", "b", 2, "b:2"), 9)
        assert broken == [(KEY, "b")]
        # One that has just started learns of the quorum after the loss, or after its member's successor.
        new = LivenessTruth(1, lambda key, who: broken.append((key, who)))
        broken.clear()
        new.lost("b", 1, dead=True)
        new.welcomed(Hello("job", "c", 1, "c:1", replaces="a"), 3)
        new.reported(Quorum(KEY, (Member("a", session=1), Member("b", session=1))))
        assert broken == [(KEY, "a"), (KEY, "b")]

    def test_who_goes_on_in_a_quorum_holds_the_state_of_its_newest_step(self) -> None:
        looking = LivenessTruth(1)
        looking.welcomed(Hello("job", "a", 1, "a:1"), 0)
        looking.asked(Member("a", session=1), 0)
        looking.formed(Quorum(KEY, (Member("a", session=1),)), None)
        assert not looking.is_last_holder("a")  # of nothing, before the first step
        looking.asked(Member("a", step=4, lineage=104), 0, KEY)
        looking.answered(0, None)
        assert looking.is_last_holder("a")
        other = Member("b", session=1, step=5, lineage=105)
        looking.answered(0, Quorum(KEY, (Member("a", session=1, step=4, lineage=104), other)))
        assert not looking.is_last_holder("a")

    def test_who_differs_from_those_in_a_quorum_is_no_part_of_its_majority(self) -> None:
        def lighthouse(size_of_b: str) -> LivenessTruth:
            looking = LivenessTruth(1)
            for stream, (name, size) in enumerate((("a", "2"), ("b", size_of_b))):
                looking.welcomed(Hello("job", name, 1, f"{name}:1"), stream)
                looking.asked(Member(name, session=1), stream, None, (FingerprintPart("group world size", size),))
            looking.request_ended(1)
            return looking

        lighthouse("3").formed(Quorum(KEY, (Member("a", session=1),)), None)
        with pytest.raises(InvariantError, match=r"1 of 2 live replicas"):
            lighthouse("2").formed(Quorum(KEY, (Member("a", session=1),)), None)

    @pytest.mark.parametrize("in_newer", [False, True])
    def test_who_was_only_in_an_older_quorum_is_not_known_to_have_asked(self, in_newer: bool) -> None:
        """A lighthouse without memory knows by the newest quorum alone who has ever asked."""
        a, b, c = (Member(name, session=1) for name in "abc")
        looking = LivenessTruth(1)
        looking.reported(Quorum(KEY, (a, b)))
        newer = Quorum(QuorumKey(KEY.quorum_id + 1, 1), (a, b, c) if in_newer else (a, c))
        looking.reported(newer)
        for stream, name in enumerate("ab"):
            looking.welcomed(Hello("job", name, 2, f"{name}:1", ready=False), stream)
        looking.asked(Member("a", session=2), 0)
        looking.lost("c", 1, dead=True)
        formed = Quorum(QuorumKey(KEY.quorum_id + 2, 1), (Member("a", session=2),))
        if not in_newer:
            looking.formed(formed, newer)
            return
        with pytest.raises(InvariantError, match=r"1 of 2 live replicas"):
            looking.formed(formed, newer)

    @pytest.mark.parametrize("is_refused", [False, True])
    def test_a_job_that_torchft_takes_over_forgets_those_too_whose_stream_just_broke(self, is_refused: bool) -> None:
        looking = LivenessTruth(1)
        for stream, name in enumerate("ab"):
            looking.welcomed(Hello("job", name, 1, f"{name}:1", ready=True), stream)
        looking.closed(1)
        if is_refused:
            looking.evicted(0)
        looking.welcomed(Hello("job", "c", 1, "c:1", ready=True), 2)
        looking.asked(Member("c", session=1), 2)
        formed = Quorum(KEY, (Member("c", session=1),))
        if is_refused:
            looking.formed(formed, None)
            return
        with pytest.raises(InvariantError, match=r"1 of 3 live replicas"):
            looking.formed(formed, None)

    def test_one_mean_is_of_one_state(self) -> None:
        one, two = Held(3, 103, "w1"), Held(3, 103, "w2")
        given = {"a": Contribution("a", one, "g", "bucket 0"), "b": Contribution("b", two, "h", "bucket 0")}
        self.broken("I3", lambda i: i.reduced(KEY, 0, given))
        zeros = {**given, "b": Contribution("b", two, None, "bucket 0")}
        Invariants().reduced(KEY, 0, zeros)

    def test_the_shares_of_a_mean_add_up_to_one(self) -> None:
        def mean(*shares: tuple[float, float, float | None]) -> dict[str, Contribution]:
            held = Held(3, 103, "w")
            return {
                str(i): Contribution(str(i), held, "g" if factor else None, "bucket 0", factor, divide_by, weight)
                for i, (factor, divide_by, weight) in enumerate(shares)
            }

        for wrong in (
            mean((0.5, 1.0, None), (0.5, 1.0, None), (0.5, 1.0, None)),
            mean((1.0, 2.0, None), (1.0, 3.0, None)),
            mean((0.5, 1.0, None), (0.0, 2.0, None)),
            mean((3.0, 1.0, 3.0), (1.0, 1.0, 2.0)),
        ):
            self.broken("I3", lambda i, wrong=wrong: i.reduced(KEY, 0, wrong))  # type: ignore[misc]
        self.broken("I4", lambda i: i.reduced(KEY, 0, mean((1.0, 2.0, None), (1.0, 2.0, 1.0))))
        Invariants().reduced(KEY, 0, mean((3.0, 1.0, 3.0), (1.0, 1.0, 1.0), (0.0, 1.0, 0.0)))
        Invariants().reduced(
            KEY, 0, mean((0.25, 0.75, None), (0.25, 0.75, None), (0.25, 0.75, None), (0.0, 0.75, None))
        )

    def test_one_mean_is_of_one_part(self) -> None:
        held = Held(3, 103, "w")
        given = {"a": Contribution("a", held, "g", "fragment 0"), "b": Contribution("b", held, None, "fragment 1")}
        self.broken("I3", lambda i: i.reduced(KEY, 0, given))

    def test_nothing_steps_on_a_reduction_that_it_has_not_heard_of(self) -> None:
        heard, whole = Reduced(KEY, 0, (1,), ("g",)), Reduced(KEY, 0, (1, 2), ("g", "h"))
        self.broken("I5", lambda i: i.delivered("a", heard), lambda i: i.applied("a", 0, ROUND, whole))
        self.broken("I5", lambda i: i.delivered("b", heard), lambda i: i.applied("a", 0, ROUND, heard))

    def test_syncs_in_flight_are_committed_in_order_and_fail_with_their_quorum(self) -> None:
        def two(looking: Invariants) -> None:
            looking.sync_started("a", 0, KEY, 0)
            looking.sync_started("a", 0, KEY, 1)

        self.broken("F1", two, lambda i: i.sync_started("a", 0, KEY, 1))
        self.broken("F1", two, lambda i: i.sync_committed("a", 0, KEY, 1))
        self.broken("F1", two, lambda i: i.sync_committed("a", 0, KEY, 0), lambda i: i.sync_committed("a", 0, KEY, 0))
        self.broken("F1", two, lambda i: i.syncs_discarded("a", 0), lambda i: i.sync_committed("a", 0, KEY, 0))
        newer = QuorumKey(KEY.quorum_id + 1, 1)
        self.broken("F1", two, lambda i: i.quorum_known("a", 0, newer), lambda i: i.sync_committed("a", 0, KEY, 0))

    def test_one_name_is_one_state(self) -> None:
        self.broken(
            "I3",
            lambda i: i.check_state("a", 0, Held(3, 103, "w1")),
            lambda i: i.check_state("b", 0, Held(3, 103, "w2")),
        )

    def test_a_commit_needs_a_yes_and_happens_once(self) -> None:
        after = Held(4, 104, "w4")

        def yes(looking: Invariants) -> None:
            looking.voted("a", 0, ROUND, True)
            looking.decided("a", 1, ROUND, Verdict(True))

        def commit(looking: Invariants) -> None:
            looking.committed("a", 0, ROUND, 1, after)

        self.broken("I5", commit)
        self.broken("I5", yes, commit, commit)

    def test_verdicts_are_final_and_of_all_ranks(self) -> None:
        self.broken("I5", lambda i: i.voted("a", 0, ROUND, True), lambda i: i.decided("a", 2, ROUND, Verdict(True)))
        self.broken(
            "I5", lambda i: i.decided("a", 2, ROUND, Verdict(False)), lambda i: i.decided("a", 2, ROUND, Verdict(True))
        )
        self.broken("I5", lambda i: i.voted("a", 0, ROUND, True), lambda i: i.voted("a", 0, ROUND, False))
        self.broken(
            "I5",
            lambda i: i.voted("a", 0, ROUND, True),
            lambda i: i.decided("a", 1, ROUND, Verdict(True)),
            lambda i: i.decided("a", 1, ROUND, Verdict(False)),
        )

    def test_those_that_commit_end_alike(self) -> None:
        def both(looking: Invariants) -> None:
            for name in ("a", "b"):
                looking.voted(name, 0, ROUND, True)
                looking.decided(name, 1, ROUND, Verdict(True))

        self.broken(
            "I3",
            both,
            lambda i: i.committed("a", 0, ROUND, 2, Held(4, 104, "w4")),
            lambda i: i.committed("b", 0, ROUND, 2, Held(4, 104, "w5")),
        )
