"""Who lives: graces, sick networks, flapping links, deaths for ever, duplicates, and forgetting."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tft_coord.core.liveness import Accepted, Liveness, OpenRequest, Rejected
from tft_coord.core.types import Hello, Member, Refusal
from tft_coord.timeouts import Timeouts

TIMEOUTS = Timeouts()  # grace 300 ms, heartbeat_timeout 5 s, forgotten after 50 s


def hello(name: str, session: int = 1, address: str = "", **changes: object) -> Hello:
    return Hello("job", name, session, address or f"{name}:1", **changes)  # type: ignore[arg-type]


def job_of(*names: str) -> Liveness:
    liveness = Liveness(TIMEOUTS)
    for stream, name in enumerate(names, 1):
        assert isinstance(liveness.hello(stream, hello(name, ready=True), 0), Accepted)
    return liveness


def lost(liveness: Liveness, now_ms: int) -> list[str]:
    return [each.replica.replica_id for each in liveness.judge(now_ms)]


def rejected(result: Accepted | Rejected) -> tuple[Refusal, str]:
    assert isinstance(result, Rejected)
    return result.refusal, result.message


class TestGrace:
    def test_a_break_is_a_loss_after_the_grace(self) -> None:
        liveness = job_of("a", "b")
        liveness.stream_closed(1, 1_000)
        assert lost(liveness, 1_299) == []
        assert lost(liveness, 1_300) == ["a"]

    def test_a_redial_within_it_keeps_the_session(self) -> None:
        liveness = job_of("a", "b")
        liveness.stream_closed(1, 1_000)
        result = liveness.hello(9, hello("a"), 1_299)
        assert isinstance(result, Accepted)
        assert lost(liveness, 1_400) == []
        assert liveness.replicas["a"].session == 1

    def test_the_closing_of_an_older_stream_is_ignored(self) -> None:
        liveness = job_of("a")
        result = liveness.hello(9, hello("a"), 100)
        assert isinstance(result, Accepted)
        assert result.replaced_stream == 1
        liveness.stream_closed(1, 200)
        assert lost(liveness, 4_000) == []
        assert liveness.sign(1, 4_000) is None  # and so is what it says

    def test_silence_is_a_loss(self) -> None:
        liveness = job_of("a", "b")
        liveness.sign(1, 100)
        assert lost(liveness, 5_000) == ["b"]
        assert lost(liveness, 5_100) == ["a"]

    def test_a_loss_ends_only_with_a_newer_session(self) -> None:
        liveness = job_of("a")
        assert lost(liveness, 5_000) == ["a"]
        assert liveness.sign(1, 5_001) is liveness.replicas["a"]
        assert not liveness.replicas["a"].healthy
        refusal, message = rejected(liveness.hello(1, hello("a"), 5_002))
        assert refusal is Refusal.LOST
        assert "open a newer session" in message
        assert isinstance(liveness.hello(1, hello("a", session=2), 5_003), Accepted)
        assert liveness.replicas["a"].healthy

    def test_an_older_session_is_refused(self) -> None:
        liveness = job_of("a")
        assert isinstance(liveness.hello(1, hello("a", session=4), 10), Accepted)
        assert rejected(liveness.hello(2, hello("a", session=3), 20))[0] is Refusal.STALE


class TestSickNetwork:
    def test_most_of_four_streams_at_once_kill_nobody(self) -> None:
        liveness = job_of(*"abcd")
        for stream in (1, 2, 3):
            liveness.stream_closed(stream, 1_000 + stream)
        assert lost(liveness, 5_900) == []
        assert lost(liveness, 6_010) == ["a", "b", "c", "d"]  # heartbeat_timeout counted anew, and nobody came back

    def test_ends_that_were_told_are_no_sickness(self) -> None:
        """Most of the job's processes are killed at once: their hosts close their connections."""
        liveness = job_of(*"abcdef")
        for stream in (1, 2, 3, 4, 5):
            liveness.stream_closed(stream, 1_000, by_peer=True)
        assert lost(liveness, 1_300) == ["a", "b", "c", "d", "e"]

    def test_they_count_neither_among_the_broken_nor_among_all(self) -> None:
        liveness = job_of(*"abcdefgh")
        for stream in (1, 2):
            liveness.stream_closed(stream, 1_000, by_peer=True)
        for stream in (3, 4, 5):
            liveness.stream_closed(stream, 1_000)
        assert lost(liveness, 1_300) == ["a", "b", "c", "d", "e"], "three of six are not most"
        liveness = job_of(*"abcdefgh")
        for stream in (1, 2):
            liveness.stream_closed(stream, 1_000, by_peer=True)
        for stream in (3, 4, 5, 6):
            liveness.stream_closed(stream, 1_000)
        assert lost(liveness, 1_300) == ["a", "b"], "of four of six nobody knows"

    def test_one_whose_end_was_told_may_be_back(self) -> None:
        liveness = job_of(*"abcd")
        liveness.stream_closed(1, 1_000, by_peer=True)
        liveness.hello(9, hello("a"), 1_200)
        assert lost(liveness, 1_300) == []

    def test_half_of_four_are_judged(self) -> None:
        liveness = job_of(*"abcd")
        liveness.stream_closed(1, 1_000)
        liveness.stream_closed(2, 1_000)
        assert lost(liveness, 1_300) == ["a", "b"]

    def test_who_is_back_is_not_counted(self) -> None:
        liveness = job_of(*"abcd")
        liveness.stream_closed(1, 1_000)
        liveness.hello(9, hello("a"), 1_050)
        liveness.stream_closed(2, 1_100)
        liveness.stream_closed(3, 1_100)
        assert lost(liveness, 1_400) == ["b", "c"]

    def test_nor_is_one_whose_death_was_reported_meanwhile(self) -> None:
        liveness = job_of(*"abcde")
        liveness.stream_closed(1, 1_000)
        liveness.hello(9, hello("f", replaces="a"), 1_050)
        for stream in (2, 3):
            liveness.stream_closed(stream, 1_100)
        assert lost(liveness, 1_400) == ["b", "c"]

    def test_three_streams_are_too_few_to_tell(self) -> None:
        liveness = job_of(*"abc")
        for stream in (1, 2, 3):
            liveness.stream_closed(stream, 1_000)
        assert lost(liveness, 1_300) == ["a", "b", "c"]

    def test_breaks_farther_apart_than_a_grace_are_not_one_sickness(self) -> None:
        liveness = job_of(*"abcd")
        liveness.stream_closed(1, 1_000)
        assert lost(liveness, 1_300) == ["a"]
        liveness.stream_closed(2, 1_400)
        liveness.stream_closed(3, 1_500)
        assert lost(liveness, 1_700) == ["b"]

    def test_a_reported_death_still_counts(self) -> None:
        liveness = job_of(*"abcde")
        reported = liveness.death(1, "rank 0 ended", 1_000)
        assert reported is not None
        assert reported.replica.dead
        for stream in (1, 2, 3, 4, 5):
            liveness.stream_closed(stream, 1_001)
        assert lost(liveness, 1_400) == []
        assert not liveness.replicas["a"].healthy

    def test_when_the_lighthouse_was_away_nobody_is_lost_by_it(self) -> None:
        liveness = job_of("a", "b")
        liveness.stream_closed(1, 1_000)
        liveness.excuse_all(6_000)
        assert lost(liveness, 6_500) == []
        assert lost(liveness, 11_000) == ["a", "b"]

    def test_an_excuse_ends_with_the_next_stream(self) -> None:
        liveness = job_of("a", "b")
        liveness.stream_closed(1, 1_000)
        liveness.excuse_all(6_000)
        liveness.hello(5, hello("a"), 6_100)
        liveness.stream_closed(5, 7_000)
        assert lost(liveness, 7_300) == ["a"]


def test_a_link_that_flaps_is_judged_by_its_silence() -> None:
    liveness = job_of("a", "b")
    now_ms = 0
    streams = itertools.count(10)
    stream = 1
    for session in (2, 3, 4):
        now_ms += 2_000
        liveness.stream_closed(stream, now_ms)
        now_ms += 300
        liveness.sign(2, now_ms)
        assert lost(liveness, now_ms) == ["a"]
        stream = next(streams)
        assert isinstance(liveness.hello(stream, hello("a", session=session), now_ms), Accepted)
    liveness.stream_closed(stream, now_ms + 10)
    liveness.sign(2, now_ms + 4_000)
    assert lost(liveness, now_ms + 4_990) == []
    assert lost(liveness, now_ms + 5_000) == ["a"]
    # Ten minutes later its breaks count again.
    later_ms = now_ms + 600_000
    liveness.hello(99, hello("a", session=9), later_ms)
    liveness.stream_closed(99, later_ms)
    assert "a" in lost(liveness, later_ms + 300)


class TestDeath:
    def test_it_is_for_ever(self) -> None:
        liveness = job_of("a")
        liveness.death(1, "rank 0 ended: signal 9", 100)
        refusal, message = rejected(liveness.hello(2, hello("a", session=9), 200))
        assert refusal is Refusal.DEAD
        assert "under a new replica id" in message

    def test_of_one_that_was_already_lost_it_counts_too(self) -> None:
        liveness = job_of("a")
        assert lost(liveness, 5_000) == ["a"]
        assert liveness.death(1, "rank 0 ended", 5_100) is None
        assert rejected(liveness.hello(2, hello("a", session=9), 5_200))[0] is Refusal.DEAD

    def test_a_report_on_an_older_stream_is_ignored(self) -> None:
        liveness = job_of("a")
        liveness.hello(2, hello("a"), 100)
        assert liveness.death(1, "rank 0 ended", 200) is None
        assert liveness.replicas["a"].healthy

    def test_a_successor_ends_its_predecessor(self) -> None:
        liveness = job_of("a:1")
        result = liveness.hello(2, hello("a:2", replaces="a:1"), 100)
        assert isinstance(result, Accepted)
        assert result.lost is not None
        assert result.lost.reason == "replaced by a:2"
        assert rejected(liveness.hello(3, hello("a:1", session=5), 200))[0] is Refusal.DEAD


class TestDuplicates:
    def test_a_second_process_is_refused_by_name_while_the_first_lives(self) -> None:
        liveness = job_of("a")
        refusal, message = rejected(liveness.hello(2, hello("a", session=9, address="other:1"), 100))
        assert refusal is Refusal.DUPLICATE
        assert "a is already running at a:1" in message
        assert "connects again from other:1" in message

    def test_it_is_told_when_the_first_was_heard_in_truth(self) -> None:
        liveness = job_of("a")
        liveness.sign(1, 1_000)
        liveness.excuse_all(4_000)
        refused = liveness.hello(2, hello("a", session=9, address="other:1"), 4_500)
        assert isinstance(refused, Rejected)
        assert refused.silent_ms == 3_500
        liveness.sign(1, 4_600)
        refused = liveness.hello(2, hello("a", session=9, address="other:1"), 4_700)
        assert isinstance(refused, Rejected)
        assert refused.silent_ms == 100

    def test_it_may_come_once_the_first_is_lost(self) -> None:
        """A group restarted elsewhere after a silent death."""
        liveness = job_of("a")
        assert lost(liveness, 5_000) == ["a"]
        result = liveness.hello(2, hello("a", session=9, address="other:1"), 5_001)
        assert isinstance(result, Accepted)
        assert result.replaced_stream == 1

    def test_one_stream_is_one_replica(self) -> None:
        liveness = job_of("a")
        refusal, message = rejected(liveness.hello(1, hello("b"), 100))
        assert refusal is Refusal.MALFORMED
        assert "the stream of replica a says hello for b" in message
        assert liveness.of_stream(1) is liveness.replicas["a"]


class TestForgetting:
    def test_the_dead_are_forgotten(self) -> None:
        liveness = job_of("a", "b")
        for now_ms in range(0, 70_000, 1_000):
            liveness.sign(2, now_ms)
            if now_ms == 1_000:
                liveness.stream_closed(1, now_ms)
            liveness.judge(now_ms)
            assert ("a" in liveness.replicas) == (now_ms < 52_000), now_ms
        assert set(liveness.replicas) == {"b"}

    def test_nothing_grows_when_replicas_come_and_go(self) -> None:
        liveness = Liveness(TIMEOUTS)
        most = 0
        for number in range(500):
            now_ms = number * 1_000
            liveness.hello(number, hello(f"a:{number}"), now_ms)
            liveness.stream_closed(number, now_ms + 500)
            liveness.judge(now_ms + 900)
            most = max(most, len(liveness.replicas))
        assert most <= 52
        assert len(liveness._by_stream) == 0

    def test_one_whose_stream_is_open_still_hears_that_it_was_lost(self) -> None:
        """A host that was suspended for an hour wakes up; its connection never broke."""
        liveness = job_of("a")
        assert lost(liveness, 5_000) == ["a"]
        assert lost(liveness, 3_600_000) == []
        replica = liveness.sign(1, 3_600_000)
        assert replica is not None
        assert not replica.healthy


class TestRequests:
    def test_it_belongs_to_its_stream(self) -> None:
        """A caller that timed out while the stream was broken must not stay a member of the next quorum."""
        liveness = job_of("a")
        replica = liveness.replicas["a"]
        replica.request = OpenRequest(1, Member("a"), None, 700)
        liveness.stream_closed(1, 1_000)
        assert replica.request is None
        # Whoever asks again soon has waited since it first asked.
        assert replica.asked_ms(1_200, 5_000) == 700
        assert replica.asked_ms(6_000, 5_000) == 6_000

    def test_a_newer_session_counts_its_bytes_anew(self) -> None:
        liveness = job_of("a")
        liveness.replicas["a"].healed_bytes = 10_000
        liveness.hello(1, hello("a"), 100)
        assert liveness.replicas["a"].healed_bytes == 10_000
        liveness.hello(1, hello("a", session=2), 200)
        assert liveness.replicas["a"].healed_bytes == 0


def test_presumed_members_live_until_heartbeat_timeout_after_the_start() -> None:
    liveness = job_of("a")
    liveness.presume([Member("b", session=1), Member("a", session=7, address="elsewhere:1")], 0)  # a is here
    assert liveness.replicas["a"].session == 1
    liveness.sign(1, 4_000)
    assert lost(liveness, 4_999) == []
    assert lost(liveness, 5_000) == ["b"]


def test_who_has_a_successor_is_not_presumed() -> None:
    liveness = Liveness(TIMEOUTS)
    liveness.hello(1, hello("a:2", replaces="a:1"), 0)
    liveness.presume([Member("a:1"), Member("b:1")], 0)
    assert set(liveness.replicas) == {"a:2", "b:1"}


def test_members_of_an_older_quorum_are_presumed_no_more_when_a_newer_one_is_reported() -> None:
    liveness = Liveness(TIMEOUTS)
    liveness.presume([Member("a"), Member("b")], 0)
    liveness.hello(1, hello("b"), 10)
    liveness.presume([Member("c")], 0)
    assert set(liveness.replicas) == {"b", "c"}


def test_a_loss_of_one_that_was_only_presumed_stays_a_loss_when_a_newer_quorum_is_reported() -> None:
    liveness = Liveness(TIMEOUTS)
    liveness.presume([Member("c", session=4, address="x:1")], 0)
    [lost] = liveness.judge(TIMEOUTS.heartbeat_timeout_ms)
    assert lost.replica.replica_id == "c"
    liveness.presume([Member("c", session=4, address="x:1")], 0)
    rejected = liveness.hello(1, hello("c", 4, "x:1"), TIMEOUTS.heartbeat_timeout_ms)
    assert isinstance(rejected, Rejected)
    assert rejected.refusal is Refusal.LOST
    assert isinstance(liveness.hello(1, hello("c", 5, "x:1"), TIMEOUTS.heartbeat_timeout_ms), Accepted)


class Sessions(RuleBasedStateMachine):
    """Any order of hellos, breaks, deaths and time."""

    def __init__(self) -> None:
        super().__init__()
        self.liveness = Liveness(TIMEOUTS)
        self.now_ms = 0
        self.streams = itertools.count(1)
        self.open: dict[int, str] = {}
        self.dead: dict[str, int] = {}

    names = st.sampled_from(["a", "b", "c", "d", "e"])

    @rule(name=names, session=st.integers(1, 4), address=st.sampled_from(["x:1", "y:1"]))
    def say_hello(self, name: str, session: int, address: str) -> None:
        stream = next(self.streams)
        result = self.liveness.hello(stream, hello(name, session, address), self.now_ms)
        if isinstance(result, Accepted):
            assert name not in self.dead or self.now_ms - self.dead[name] >= TIMEOUTS.forget_after_ms
            if result.replaced_stream is not None:
                del self.open[result.replaced_stream]
            self.open[stream] = name

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if self.open:
            stream = data.draw(st.sampled_from(sorted(self.open)))
            del self.open[stream]
            self.liveness.stream_closed(stream, self.now_ms)

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        if self.open:
            stream = data.draw(st.sampled_from(sorted(self.open)))
            self.liveness.death(stream, "rank 0 ended", self.now_ms)
            self.dead[self.open[stream]] = self.now_ms

    @rule(ms=st.sampled_from([10, 299, 300, 2_000, 60_000]))
    def wait(self, ms: int) -> None:
        self.now_ms += ms
        for each in self.liveness.judge(self.now_ms):
            replica = each.replica
            assert each.request is None or replica.request is None
            silent = self.now_ms - replica.last_sign_ms >= TIMEOUTS.heartbeat_timeout_ms
            assert silent or each.stream is None

    @invariant()
    def streams_and_replicas_agree(self) -> None:
        by_stream = {stream: replica.replica_id for stream, replica in self.liveness._by_stream.items()}
        assert by_stream == {stream: name for stream, name in self.open.items() if stream in by_stream}
        for replica in self.liveness.replicas.values():
            assert replica.stream is None or by_stream[replica.stream] == replica.replica_id
            assert replica.request is None or replica.healthy
            assert replica.broken_ms is None or replica.stream is None


TestSessions = Sessions.TestCase
TestSessions.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
