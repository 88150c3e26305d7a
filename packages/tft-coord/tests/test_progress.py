"""Hangs: what ranks say of where they are, what a group makes of it, and what the lighthouse does about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tft_coord.core import effects, events
from tft_coord.core.effects import LighthouseEffect
from tft_coord.core.lighthouse import LighthouseConfig, LighthouseCore
from tft_coord.core.progress import GroupProgress, HangWatch, Phase, Progress
from tft_coord.core.replica_group import ReplicaGroupCore
from tft_coord.core.session import SendBeat, SendHello, SessionCore
from tft_coord.core.types import MAX_INT64, Hello, Member, Purpose, Quorum, QuorumKey, RankRequest
from tft_coord.timeouts import Timeouts
from tft_coord.wire import codec

LIMIT_MS = 2_000
TIMEOUTS = Timeouts(slowest_step_ms=LIMIT_MS)
SILENT_MS = 2_500  # two beats and a half
OWN, OUTSIDE, WAITING, REDUCING = Phase.OWN, Phase.OUTSIDE, Phase.WAITING, Phase.REDUCING


def word(
    phase: Phase, since_ms: int = 0, *, step: int = 7, excused: bool = False, limit_ms: int = LIMIT_MS
) -> Progress:
    return Progress(step, phase, since_ms, excused, limit_ms)


# --- the value ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "is_hung", "is_stuck"),
    [
        (word(OWN, LIMIT_MS), True, False),
        (word(OWN, LIMIT_MS - 1), False, False),
        (word(OWN, 1_200_000, excused=True), False, False),  # a compilation of 20 minutes
        (word(OWN, 1_200_000, limit_ms=0), False, False),
        (word(OUTSIDE, 300_000), False, False),  # an evaluation of 5
        (word(WAITING, 300_000), False, False),
        (word(REDUCING, LIMIT_MS), False, True),
        (word(REDUCING, LIMIT_MS - 1), False, False),
        (word(REDUCING, 300_000, limit_ms=0), False, False),
    ],
)
def test_only_own_work_that_is_not_excused_hangs(said: Progress, is_hung: bool, is_stuck: bool) -> None:
    assert (said.is_hung, said.is_stuck) == (is_hung, is_stuck)


# --- a group -----------------------------------------------------------------------------------------------------


def group_of(*words: Progress, at_ms: int = 0) -> GroupProgress:
    progress = GroupProgress(len(words), TIMEOUTS)
    for rank, said in enumerate(words):
        progress.reported(rank, said, at_ms)
    return progress


def test_a_group_whose_ranks_say_nothing_says_nothing() -> None:
    progress = GroupProgress(2, TIMEOUTS)
    progress.votes(0, 5)
    progress.ended(0, 4, 5)
    progress.asked(0, 3, 5)
    progress.planned(0, 3, 6, excused=False, heals=False)
    assert progress.now(100_000) is None
    assert not progress.is_hung(100_000)


@pytest.mark.parametrize(
    ("words", "together"),
    [
        # The rank that is longest in its own work, if any is.
        ((word(OWN, 100), word(OWN, 900)), word(OWN, 900)),
        ((word(REDUCING, 5_000), word(OWN, 30)), word(OWN, 30)),
        ((word(OWN, 9_000, excused=True), word(OWN, 30)), word(OWN, 30)),
        ((word(OWN, 9_000, excused=True), word(WAITING, 30)), word(OWN, 9_000, excused=True)),
        # All reduce, for as long as the last of them.
        ((word(REDUCING, 5_000), word(REDUCING, 30)), word(REDUCING, 30)),
        ((word(REDUCING, 5_000), word(REDUCING, 30, step=8)), word(WAITING, 30, step=8)),
        # One waits: so does the group.
        ((word(REDUCING, 5_000), word(WAITING, 30)), word(WAITING, 30)),
        ((word(OUTSIDE, 40), word(WAITING, 30)), word(WAITING, 30)),
        ((word(OUTSIDE, 40), word(OUTSIDE, 30)), word(OUTSIDE, 30)),
    ],
)
def test_ranks_make_one_word(words: tuple[Progress, ...], together: Progress) -> None:
    assert group_of(*words).now(0) == together
    assert group_of(*reversed(words)).now(0) == together


def test_a_rank_that_was_not_heard_of_does_not_reduce() -> None:
    progress = GroupProgress(2, TIMEOUTS)
    progress.reported(0, word(REDUCING, 5_000), 0)
    said = progress.now(0)
    assert said is not None
    assert said.phase is WAITING


class TestSilence:
    """A rank that holds its interpreter's lock can't beat: it is judged by what was last heard of it."""

    def test_what_it_said_runs_on(self) -> None:
        progress = group_of(word(OWN, 100))
        assert progress.now(1_800) == word(OWN, 1_900)
        assert not progress.is_hung(1_899)
        assert progress.is_hung(1_900)

    def test_what_can_not_be_still_fits_the_wire(self) -> None:
        progress = group_of(word(OWN, MAX_INT64 - 10))
        said = progress.now(1_800)
        assert said == word(OWN, MAX_INT64)
        beat = events.BeatReceived(1, 0, said)
        assert codec.decode_to_lighthouse(1, codec.encode_to_lighthouse(beat)) == beat

    def test_between_two_steps_it_is_only_late(self) -> None:
        assert group_of(word(OUTSIDE, 100)).now(300_000) == word(OUTSIDE, 300_100)

    def test_where_the_quorum_stands_its_next_step_may_have_begun(self) -> None:
        """Nothing is seen of that: a trainer that is stopped then would be between two steps for ever."""
        progress = group_of(word(OWN, 100))
        progress.ended(0, 8, 50, stands=True)
        late_ms = max(LIMIT_MS, SILENT_MS + 1)
        assert progress.now(49 + late_ms) == word(OUTSIDE, late_ms - 1, step=8), "join_timeout may decide until then"
        assert progress.now(50 + late_ms) == word(OWN, late_ms, step=8)
        assert progress.is_hung(50 + late_ms)
        progress.reported(0, word(OUTSIDE, late_ms, step=8), 50 + late_ms)
        assert not progress.is_hung(60 + late_ms), "it evaluates, and says so"
        progress.ended(0, 8, 60 + late_ms)
        assert not progress.is_hung(1_000_000)

    @pytest.mark.parametrize("phase", [WAITING, REDUCING])
    def test_nobody_holds_the_lock_while_it_waits(self, phase: Phase) -> None:
        progress = group_of(word(phase, 60_000))
        assert progress.now(SILENT_MS) == word(phase, 60_000 + SILENT_MS)
        assert progress.now(SILENT_MS + 1) == word(OWN, SILENT_MS + 1)
        assert progress.is_hung(SILENT_MS + 1)

    def test_a_plan_begins_its_own_work_whatever_it_said_before(self) -> None:
        progress = group_of(word(OUTSIDE))
        progress.asked(0, 8, 100)
        assert progress.now(100) == word(WAITING, step=8, excused=True)
        progress.planned(0, 8, 200, excused=False, heals=False)
        assert progress.now(200 + LIMIT_MS) == word(OWN, LIMIT_MS, step=8)
        assert progress.is_hung(200 + LIMIT_MS)

    def test_what_is_excused_stays_so(self) -> None:
        progress = group_of(word(OUTSIDE))
        progress.asked(0, 8, 0)
        assert not progress.is_hung(1_000_000)  # whether its step is excused, nobody knows yet
        progress.planned(0, 8, 0, excused=True, heals=False)
        assert not progress.is_hung(1_000_000)
        progress.votes(0, 0)
        assert not progress.is_hung(1_000_000)

    def test_the_step_after_a_healing_is_excused_too(self) -> None:
        progress = group_of(word(OUTSIDE))
        for heals, hung in ((True, False), (False, False), (False, True)):
            progress.planned(0, 8, 0, excused=False, heals=heals)
            assert progress.is_hung(LIMIT_MS) is hung

    def test_a_verdict_ends_the_step(self) -> None:
        progress = group_of(word(OWN, 100))
        progress.ended(0, 8, 50)
        assert progress.now(1_000) == word(OUTSIDE, 950, step=8)

    @pytest.mark.parametrize("late", [word(WAITING, 116), word(REDUCING, 2), word(OWN, 300)])
    def test_a_beat_that_the_verdict_overtook_says_nothing(self, late: Progress) -> None:
        """It was on its way when the rank was answered, and evaluates now without giving its lock up."""
        progress = group_of(word(OWN, 100))
        progress.ended(0, 8, 50)
        progress.reported(0, late, 53)
        assert not progress.is_hung(1_000_000)

    def test_nor_does_one_that_a_request_overtook(self) -> None:
        progress = group_of(word(OUTSIDE))
        progress.asked(0, 8, 100)
        progress.reported(0, word(OUTSIDE, 300), 102)
        assert progress.now(110) == word(WAITING, 10, step=8, excused=True)

    def test_the_next_beat_is_believed(self) -> None:
        """The answer may have been lost: it waits still."""
        progress = group_of(word(OWN, 100))
        progress.planned(0, 8, 50, excused=False, heals=False)
        for at_ms in (60, 60 + TIMEOUTS.beat_interval_ms):
            progress.reported(0, word(WAITING, at_ms), at_ms)
        assert progress.now(2_000) == word(WAITING, 2_000)

    def test_so_is_one_of_what_came_after(self) -> None:
        progress = group_of(word(OWN, 100))
        progress.ended(0, 8, 50)
        progress.reported(0, word(OWN, 1), 60)  # its optimizer
        assert progress.is_hung(60 + LIMIT_MS)

    def test_a_beat_that_was_long_on_its_way_makes_no_hang_shorter(self) -> None:
        """Beats that were held up come together; the first of them would seem to tell of a trainer that goes on."""
        progress = group_of(word(OWN, 2_900), at_ms=10_000)
        progress.reported(0, word(OWN, 4_000), 12_000)  # almost a second late
        assert progress.now(12_000) == word(OWN, 4_900)
        progress.reported(0, word(OWN, 4_900), 12_000)
        assert progress.now(12_500) == word(OWN, 5_400)

    def test_nor_do_those_that_a_stopped_manager_server_reads_together(self) -> None:
        """When it was stopped it had heard of a hang that was young. It wakes up, tells of a hang, and reads beats each
        of which seems to tell of what began since; but each tells of a beat more than the one before."""
        progress = group_of(word(OWN, 300), at_ms=10_000)
        assert progress.is_hung(13_700)
        for told_ms in (1_300, 2_300, 3_300):
            progress.reported(0, word(OWN, told_ms), 13_700)
            assert progress.now(13_700) == word(OWN, 4_000)

    def test_nor_the_first_of_them_after_a_plan(self) -> None:
        progress = group_of(word(WAITING), at_ms=9_000)
        progress.planned(0, 7, 10_000, excused=False, heals=False)
        progress.reported(0, word(OWN, 1_000), 13_000)
        assert progress.now(13_000) == word(OWN, 3_000)

    @pytest.mark.parametrize(
        ("said", "at_ms"),
        [
            (word(OWN, 2_500), 12_000),
            (word(OWN, 3_899), 13_000),
            (word(OWN, 5_000, step=8), 12_000),
            (word(REDUCING, 2_500), 0),
        ],
    )
    def test_what_began_after_the_last_beat_is_believed(self, said: Progress, at_ms: int) -> None:
        progress = group_of(word(OWN, 2_900), at_ms=10_000)
        progress.reported(0, said, at_ms)
        assert progress.now(at_ms) == said


KEY = QuorumKey(7, 9)


class TestGroupCore:
    """The manager server's core hears where its ranks are, and sees it where they can't tell."""

    @staticmethod
    def trained(key: QuorumKey = KEY) -> ReplicaGroupCore:
        core = ReplicaGroupCore(replica_id="a", address="a:1", store_address="a:2", world_size=1, timeouts=TIMEOUTS)
        core.handle(events.RankConnected(0, 1, 1), 0)
        core.handle(events.RankProgressed(0, word(OUTSIDE)), 0)
        TestGroupCore.answer(core, key, 0)
        return core

    @staticmethod
    def answer(core: ReplicaGroupCore, key: QuorumKey, now_ms: int, step: int = 3, lease_ms: int = 0) -> None:
        held = core.quorum.key if core.quorum is not None else None
        core.handle(events.RankAsked(0, step, RankRequest(step, step, held=held), now_ms + 60_000), now_ms)
        member = Member("a", address="a:1", store_address="a:2", step=step, lineage=step, lease_ms=lease_ms)
        core.handle(events.QuorumArrived(core._last_request, Quorum(key, (member,))), now_ms)

    def test_the_first_step_of_a_key_is_excused_and_the_next_is_not(self) -> None:
        core = self.trained()
        assert core.progress(500) == word(OWN, 500, step=3, excused=True)
        self.answer(core, KEY, 1_000, step=4)
        assert core.progress(1_500) == word(OWN, 500, step=4)
        assert core.is_hung(1_000 + LIMIT_MS)
        self.answer(core, QuorumKey(8, 1), 2_000, step=5)
        assert not core.is_hung(1_000_000)

    def test_an_unchanged_answer_begins_a_step_as_well(self) -> None:
        core = self.trained()
        core.handle(events.RankAsked(0, 20, RankRequest(4, 4, held=KEY), 60_000), 1_000)
        core.handle(events.UnchangedArrived(core._last_request, KEY), 1_000)
        assert core.progress(1_500) == word(OWN, 500, step=4)  # the step that it asked for, not that of the plan
        assert core.is_hung(1_000 + LIMIT_MS)

    @pytest.mark.parametrize("lease_ms", [0, 30_000])
    @pytest.mark.parametrize("is_unchanged", [False, True])
    def test_a_group_of_one_sends_no_votes_so_its_lease_says_whether_its_next_step_may_have_begun(
        self, lease_ms: int, is_unchanged: bool
    ) -> None:
        core = self.trained()
        self.answer(core, KEY, 1_000, step=4, lease_ms=lease_ms)
        if is_unchanged:
            core.handle(events.RankAsked(0, 20, RankRequest(5, 5, held=KEY), 60_000), 1_000)
            core.handle(events.UnchangedArrived(core._last_request, KEY), 1_000)
        core.handle(events.RankProgressed(0, word(OUTSIDE, 0, step=9)), 2_500)
        silent_ms = max(LIMIT_MS, SILENT_MS + 1)
        assert not core.is_hung(2_500 + silent_ms - 1)
        assert core.is_hung(2_500 + silent_ms) == (lease_ms > 0)

    def test_the_verdict_of_a_commit_ends_the_step_and_no_other(self) -> None:
        core = self.trained()
        for purpose, phase in ((Purpose.STAGED, WAITING), (Purpose.COMMIT, OUTSIDE)):
            core.handle(events.RankVoted(0, 30, KEY, 3, purpose, True, 60_000), 100)
            said = core.progress(200)
            assert said is not None
            assert (said.phase, said.since_ms) == (phase, 100)

    def test_a_rank_that_the_group_has_not_is_not_heard(self) -> None:
        core = self.trained()
        core.handle(events.RankProgressed(5, word(OWN, 1_000_000)), 0)
        assert not core.is_hung(0)


# --- a session ---------------------------------------------------------------------------------------------------


class TestSession:
    """A loss ends with a newer session whose trainer lives: while it hangs, none is opened."""

    @staticmethod
    def welcomed() -> SessionCore:
        core = SessionCore(job="job", replica_id="a", address="a:1", session=10, timeouts=TIMEOUTS, jitter=lambda: 0.0)
        core.start(0)
        core.stream_opened(0)
        core.welcomed(10, 1, 0)
        return core

    @staticmethod
    def hellos(orders: list[object]) -> list[int]:
        return [order.hello.session for order in orders if isinstance(order, SendHello)]

    def test_a_beat_tells_where_the_group_is(self) -> None:
        said = word(REDUCING, 30)
        assert self.welcomed().tick(1_000, lambda: said) == [SendBeat(0, said)]

    def test_a_hung_trainer_opens_no_session_until_it_goes_on(self) -> None:
        core = self.welcomed()
        assert core.told_lost(10, 100, hung=True) == []
        assert core.hangs
        assert core.tick(5_000) == []
        assert self.hellos([*core.went_on(6_000)]) == [11]
        assert not core.hangs
        assert core.went_on(6_001) == []

    def test_a_stream_that_breaks_meanwhile_says_the_session_that_was_lost(self) -> None:
        core = self.welcomed()
        core.told_lost(10, 100, hung=True)
        core.stream_broke(200)
        assert self.hellos([*core.stream_opened(300)]) == [10]
        assert core.told_lost(10, 301, hung=True) == []
        assert self.hellos([*core.went_on(400)]) == [11]

    def test_a_lighthouse_that_has_forgotten_the_loss_is_said_the_same_session(self) -> None:
        core = self.welcomed()
        core.told_lost(10, 100, hung=True)
        core.stream_broke(200)
        assert self.hellos([*core.stream_opened(300)]) == [10]
        core.welcomed(10, 2, 301)
        assert not core.hangs
        assert core.went_on(400) == []

    def test_who_goes_on_without_a_stream_learns_of_the_loss_when_it_has_one(self) -> None:
        core = self.welcomed()
        core.told_lost(10, 100, hung=True)
        core.stream_broke(200)
        assert core.went_on(250) == []
        assert self.hellos([*core.stream_opened(300)]) == [10]
        assert self.hellos([*core.told_lost(10, 301)]) == [11]


# --- the lighthouse ----------------------------------------------------------------------------------------------


class Job:
    """A lighthouse, and three groups that train together in one quorum; streams 1, 2 and 3."""

    def __init__(self, names: str = "abc") -> None:
        self.core = LighthouseCore(
            LighthouseConfig(timeouts=TIMEOUTS), started_ms=1_000, cluster_id="c", nonces=lambda: 1, now_ms=0
        )
        self.names = names
        self.now_ms = 0
        self.requests = 0
        self.pass_ms(400)
        for name in names:
            self.hello(name)
        for name in names:
            self.ask(name)
        self.quorum = self.newest()

    def newest(self) -> Quorum:
        quorum = self.core.quorum("job")
        assert quorum is not None
        return quorum

    def stream(self, name: str) -> int:
        return self.names.index(name) + 1

    def give(self, event: events.LighthouseEvent) -> list[LighthouseEffect]:
        return self.core.handle(event, self.now_ms, 1_000 + self.now_ms)

    def hello(self, name: str, session: int = 1) -> list[LighthouseEffect]:
        hello = Hello("job", name, session, f"{name}:1", ready=True)
        return self.give(events.HelloReceived(self.stream(name), hello))

    def ask(self, name: str, step: int = 5, held: QuorumKey | None = None) -> list[LighthouseEffect]:
        self.requests += 1
        member = Member(name, address=f"{name}:1", step=step, lineage=step, live=True)
        return self.give(events.QuorumRequested(self.stream(name), self.requests, member, held))

    def beat(self, name: str, said: Progress | None) -> list[LighthouseEffect]:
        return self.give(events.BeatReceived(self.stream(name), 0, said))

    def pass_ms(self, ms: int) -> list[LighthouseEffect]:
        out: list[LighthouseEffect] = []
        for _ in range(ms // 100):
            self.now_ms += 100
            out += self.core.tick(self.now_ms, 1_000 + self.now_ms)
        return out


def lost(orders: list[LighthouseEffect]) -> list[str]:
    return [order.replica_id for order in orders if isinstance(order, effects.ReplicaLost)]


def notices(orders: list[LighthouseEffect]) -> dict[int, tuple[str, bool]]:
    return {
        order.stream: (order.notice.replica_id, order.notice.lives)
        for order in orders
        if isinstance(order, effects.NotifyLoss)
    }


class TestLighthouse:
    def test_who_hangs_is_lost_and_its_quorum_is_broken(self) -> None:
        job = Job()
        job.beat("a", word(REDUCING, 1_500))
        job.beat("c", word(REDUCING, 1_500))
        assert job.beat("b", word(OWN, LIMIT_MS)) == []
        orders = job.pass_ms(100)
        assert lost(orders) == ["b"]
        assert notices(orders) == {1: ("b", False), 3: ("b", False)}
        (told,) = (order for order in orders if isinstance(order, effects.TellLost))
        assert told.stream == 2
        assert "its trainer hangs: busy with step 7 for 2000 ms, longer than slowest_step (2000 ms)" in told.message
        assert lost(job.pass_ms(1_000)) == []

    def test_the_others_go_on_at_once_and_it_comes_back_by_a_newer_session(self) -> None:
        job = Job()
        job.beat("b", word(OWN, LIMIT_MS))
        job.pass_ms(100)
        for name in "ac":
            job.ask(name, 5, job.quorum.key)
        assert job.newest().replica_ids == ("a", "c")
        assert [type(order) for order in job.hello("b", 1)] == [effects.TellLost]
        job.hello("b", 2)
        job.ask("b", 5, job.quorum.key)
        for name in "ac":
            job.ask(name, 6, job.newest().key)
        assert job.newest().replica_ids == ("a", "b", "c")

    @pytest.mark.parametrize(
        "said",
        [
            None,
            word(OWN, LIMIT_MS - 1),
            word(OWN, 1_200_000, excused=True),
            word(OUTSIDE, 300_000),
            word(WAITING, 300_000),
            word(REDUCING, 300_000),
            word(OWN, 300_000, limit_ms=0),
        ],
    )
    def test_nobody_else_hangs(self, said: Progress | None) -> None:
        job = Job()
        job.beat("b", said)
        assert job.pass_ms(1_000) == []

    @pytest.mark.parametrize("moved", ["a beat", "a request"])
    def test_who_has_moved_before_the_look_is_not_lost(self, moved: str) -> None:
        job = Job()
        job.beat("b", word(OWN, LIMIT_MS))
        if moved == "a beat":
            job.beat("b", word(OWN, 10, step=8))
        else:
            job.ask("b", 6, job.quorum.key)
        assert lost(job.pass_ms(1_000)) == []

    def test_the_one_that_is_longest_in_its_own_work_is_lost_and_the_others_have_a_while(self) -> None:
        """Groups that wait for it in collectives of their own seem busy too."""
        job = Job()
        job.beat("a", word(OWN, 3_000))
        job.beat("b", word(OWN, 3_500))
        assert lost(job.pass_ms(100)) == ["b"]
        job.beat("c", word(OWN, 6_000))
        assert lost(job.pass_ms(TIMEOUTS.heartbeat_timeout_ms - 200)) == []
        job.beat("a", word(OWN, 10))  # it was behind b
        job.beat("c", word(OWN, 11_000))
        assert lost(job.pass_ms(200)) == ["c"]
        assert lost(job.pass_ms(4_000)) == []

    def test_the_last_holder_of_the_state_is_not_lost(self) -> None:
        """Without it the others would start over, and nobody gains by that."""
        job = Job()
        for name in "ac":
            job.ask(name, 3, job.quorum.key)
        job.ask("b", 6, job.quorum.key)
        assert [member.step for member in job.newest().members] == [3, 6, 3]
        job.beat("b", word(OWN, 9_000))
        assert lost(job.pass_ms(1_000)) == []
        job.ask("a", 6, job.newest().key)
        job.ask("c", 6, job.newest().key)
        job.ask("b", 6, job.newest().key)
        assert [member.step for member in job.newest().members] == [6, 6, 6]
        job.beat("b", word(OWN, 9_000))
        assert lost(job.pass_ms(100)) == ["b"]

    @pytest.mark.parametrize("told", ["before it left", "since it left", "before a newer stream said that it had left"])
    def test_who_hangs_and_has_left_gives_the_others_no_time(self, told: str) -> None:
        job = Job()
        leaves = events.LeaveReceived(job.stream("a"), "drained", 10_000)
        if told != "since it left":
            job.beat("a", word(OWN, 9_000))
        if told == "before a newer stream said that it had left":
            hello = Hello("job", "a", 2, "a:1", ready=True, left=True)
            job.give(events.HelloReceived(job.stream("a"), hello))
        else:
            job.give(leaves)
        if told == "since it left":
            job.beat("a", word(OWN, 9_000))
        job.beat("b", word(OWN, LIMIT_MS))
        assert lost(job.pass_ms(100)) == ["b"]

    def test_all_wait_in_one_reduction(self) -> None:
        job = Job()
        for name in "abc":
            assert job.pass_ms(100) == []
            job.beat(name, word(REDUCING, LIMIT_MS))
        orders = job.pass_ms(100)
        assert lost(orders) == []
        assert notices(orders) == {1: ("a", True), 2: ("a", True), 3: ("a", True)}
        (sentence,) = {str(order.notice) for order in orders if isinstance(order, effects.NotifyLoss)}
        assert sentence == (
            f"quorum {job.quorum.key} is broken: replica a waits in a reduction of step 7, as all others do, for "
            "longer than slowest_step"
        )
        assert job.pass_ms(1_000) == []  # once
        for name in "abc":
            job.ask(name, 5, job.quorum.key)
        assert job.newest().key > job.quorum.key

    @pytest.mark.parametrize(
        "other",
        [word(REDUCING, LIMIT_MS - 1), word(REDUCING, 9_000, step=8), word(WAITING, 9_000), word(OUTSIDE, 9_000)],
    )
    def test_not_all_wait_in_it(self, other: Progress) -> None:
        job = Job()
        job.beat("a", word(REDUCING, LIMIT_MS))
        job.beat("b", word(REDUCING, LIMIT_MS))
        job.beat("c", other)
        assert job.pass_ms(1_000) == []

    def test_a_quorum_of_one_waits_for_nobody(self) -> None:
        job = Job("a")
        job.beat("a", word(REDUCING, 9_000))
        assert job.pass_ms(1_000) == []

    def test_what_was_said_before_the_lighthouse_was_away_is_not_believed(self) -> None:
        job = Job()
        job.beat("b", word(OWN, LIMIT_MS))
        job.now_ms += 3_000
        assert lost(job.pass_ms(100)) == []

    def test_a_lost_replica_is_not_lost_twice(self) -> None:
        job = Job()
        job.beat("b", word(OWN, LIMIT_MS))
        job.give(events.DeathReported(2, "killed"))
        assert lost(job.pass_ms(1_000)) == []


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(Phase), st.integers(0, 9_000), st.booleans())))
def test_who_waits_is_never_lost(beats: list[tuple[str, Phase, int, bool]]) -> None:
    job = Job()
    newest: dict[str, Progress] = {}
    for name, phase, since_ms, excused in beats:
        newest[name] = word(phase, since_ms, excused=excused)
        job.beat(name, newest[name])
        for one in lost(job.pass_ms(100)):
            said = newest[one]
            assert (said.phase, said.excused) == (OWN, False)
            assert said.since_ms >= LIMIT_MS


@pytest.mark.parametrize(
    ("keeps_pace", "of_others", "is_hung"),
    [(True, 5, True), (True, 4, False), (False, 5, False)],
    ids=["two steps behind", "one step behind", "it heals, or is in no quorum"],
)
def test_an_excused_step_that_the_others_have_left_behind_excuses_nothing(
    keeps_pace: bool, of_others: int, is_hung: bool
) -> None:
    """Where the quorum stands, a trainer that holds the interpreter's lock has last reported an earlier step."""
    watch = HangWatch(TIMEOUTS)
    watch.heard("b", replace(word(REDUCING), step=of_others), 0, keeps_pace=True)
    watch.heard("a", replace(word(OWN, LIMIT_MS, excused=True), step=3), 0, keeps_pace=keeps_pace)
    assert (watch.hung(0) is not None) == is_hung
    watch.begin_round()
    watch.heard("a", replace(word(OWN, LIMIT_MS, excused=True), step=3), 0, keeps_pace=True)
    assert watch.hung(0) is None


def test_nothing_is_kept_of_who_is_gone() -> None:
    watch = HangWatch(TIMEOUTS)
    ends: tuple[Callable[[str], None], ...] = (
        lambda name: watch.heard(name, None, 0),
        lambda name: watch.heard(name, word(OUTSIDE), 0),
        lambda _: watch.forget(),
    )
    for end in ends:
        for said in (word(OWN, LIMIT_MS), word(REDUCING, LIMIT_MS)):
            watch.heard("a", said, 0)
            end("a")
            assert watch._hung == {}
            assert watch._stuck == {}
