"""When a wait is said, and for whom: the decisions of both logs, without a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tft_coord.core import effects, events
from tft_coord.core.config import JobSettings
from tft_coord.core.lighthouse import LighthouseConfig, LighthouseCore
from tft_coord.core.names import base_name, shorten
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.replica_group import ReplicaGroupCore
from tft_coord.core.stragglers import PaceKind, StragglerNotice
from tft_coord.core.types import Hello, Member, Purpose, QuorumKey, RankRequest, WaitsFor
from tft_coord.core.waits import Notice, WaitNotice
from tft_coord.timeouts import Timeouts
from tft_coord.transport.address import peer_address

UUID = "0f3a9c1d-1234-4abc-8def-0123456789ab"


def test_a_uuid_is_cut_and_other_words_are_not() -> None:
    assert shorten(f"replica_1:{UUID} was lost, {UUID}") == "replica_1:0f3a9c1d was lost, 0f3a9c1d"
    assert shorten("a-b-c-d-e: step 4 of host-1-2-3-4") == "a-b-c-d-e: step 4 of host-1-2-3-4"


@pytest.mark.parametrize(
    "text",
    [
        "replica {}",
        "replica {}: lost",
        "replica {}/0",
        "replica a:eu:{}/12, quorum 7",
        "replica ns/a:{} was lost.",
        "[a:{}/0 - step 1]",
        "serving step 7 to ['{}', 'a:{}']",
        "replica_id={} address=host:1",
        "replica {}.",
    ],
)
def test_the_uuid_of_a_replica_id_is_cut(text: str) -> None:
    assert shorten(text.replace("{}", UUID)) == text.replace("{}", UUID[:8])


@pytest.mark.parametrize(
    "text",
    [
        "TFT_TOKEN_FILE names /run/pods/{}/token, which can't be read",
        "/data/{}",
        "'{}/token' is no file",
        "http://host:1/{}/state",
        "job train-{} has ended",
        "job {} has ended",
        "job '{}': waiting",
        "{}.pt is no checkpoint",
        "{}-part-1",
    ],
)
def test_a_uuid_that_is_no_replica_id_is_left_whole(text: str) -> None:
    """The error named a file, or a job, that there is not."""
    assert shorten(text.replace("{}", UUID)) == text.replace("{}", UUID)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv6:%5B::1%5D:35658", "[::1]:35658"),
        ("ipv4:10.0.0.1:35658", "10.0.0.1:35658"),
        ("unix:a.socket", "unix:a.socket"),
    ],
)
def test_where_a_call_comes_from_is_an_address(peer: str, address: str) -> None:
    assert peer_address(peer) == address


@pytest.mark.parametrize(
    ("replica_id", "name"), [(f"replica_1:{UUID}", "replica_1"), (UUID, ""), ("replica_1", ""), ("a:1", "")]
)
def test_the_name_that_a_user_gave(replica_id: str, name: str) -> None:
    assert base_name(replica_id) == name


def said(looks: Sequence[tuple[int, int | None]]) -> list[tuple[int, Notice]]:
    """The lines of one waiter. Args: looks: (when, since when it waits)."""
    notice = WaitNotice()
    found = ((now_ms, notice.look(since_ms, now_ms)) for now_ms, since_ms in looks)
    return [(now_ms, line) for now_ms, line in found if line is not None]


def test_a_wait_is_said_after_5_s_after_30_s_then_each_minute_and_at_its_end() -> None:
    looks = [(now_ms, 1_000) for now_ms in range(1_000, 160_000, 1_000)] + [(160_000, None), (161_000, None)]
    assert said(looks) == [
        (6_000, Notice(5)),
        (31_000, Notice(30)),
        (91_000, Notice(90)),
        (151_000, Notice(150)),
        (160_000, Notice(159, is_over=True)),
    ]


def test_a_short_wait_is_never_said() -> None:
    assert said([(now_ms, now_ms // 4_000 * 4_000) for now_ms in range(0, 60_000, 500)]) == []


def test_a_look_that_comes_late_says_one_line() -> None:
    assert said([(0, 0), (100_000, 0), (101_000, 0)]) == [(100_000, Notice(100))]


@pytest.mark.timeout(10)
def test_a_wait_that_is_said_to_last_for_ages_is_one_line_and_costs_nothing() -> None:
    """A beat may say any number of milliseconds; counting up to it stopped the lighthouse for good."""
    notice = WaitNotice()
    assert notice.look(-(2**63), 0) == Notice(2**63 // 1_000)
    assert notice.look(-(2**63), 50_000) in (None, Notice((2**63 + 50_000) // 1_000))
    assert notice.look(-(2**63), 120_000) == Notice((2**63 + 120_000) // 1_000)


def test_a_beat_that_jitters_is_no_new_wait() -> None:
    looks = [(now_ms, 1_000 + now_ms % 700) for now_ms in range(1_000, 20_000, 900)]
    assert len(said(looks)) == 1


def test_the_next_wait_begins_anew() -> None:
    looks: list[tuple[int, int | None]] = [(0, 0), (6_000, 0), (7_000, 7_000), (8_000, 7_000), (12_500, 7_000)]
    assert said(looks) == [(6_000, Notice(6)), (7_000, Notice(7, is_over=True)), (12_500, Notice(5))]


# --- the lighthouse ----------------------------------------------------------------------------------------------


class Table:
    """A lighthouse with two members, which have a quorum."""

    def __init__(self, min_replicas: int = 1, jobs: Mapping[str, JobSettings] | None = None) -> None:
        self.now_ms = 0
        self.core = LighthouseCore(
            LighthouseConfig(min_replicas, jobs=jobs or {}),
            started_ms=1_000,
            cluster_id="c",
            nonces=lambda: 1,
            now_ms=0,
        )
        for stream, name in enumerate(("a", "b"), start=1):
            hello = Hello("job", name, 10, f"{name}-host:1", ready=True)
            self.handle(events.HelloReceived(stream, hello))
        self.now_ms = 1_000
        self.ask(1, "a", 1)
        self.ask(2, "b", 1)

    def handle(self, event: events.LighthouseEvent) -> list[effects.LighthouseEffect]:
        return self.core.handle(event, self.now_ms, 1_000_000 + self.now_ms)

    def ask(self, stream: int, name: str, request: int) -> None:
        self.handle(events.QuorumRequested(stream, request, Member(name, address=f"{name}-host:1"), None))

    def beat(self, stream: int, phase: Phase, since_ms: int, step: int = 7) -> None:
        self.handle(events.BeatReceived(stream, 0, Progress(step, phase, since_ms)))

    def run(self, until_ms: int, *beats: tuple[int, Phase, int]) -> list[tuple[int, object]]:
        """Look once a second; each beat is (stream, phase, when that phase began)."""
        out: list[tuple[int, object]] = []
        while self.now_ms < until_ms:
            self.now_ms += 1_000
            for stream, phase, began_ms in beats:
                self.beat(stream, phase, self.now_ms - began_ms)
            self.core.tick(self.now_ms, 1_000_000 + self.now_ms)
            out += [(self.now_ms, order) for order in self.core.look_at_waits(self.now_ms)]
        return out


def test_a_member_that_fell_silent_is_a_warning_though_nobody_asks() -> None:
    table = Table()
    table.run(2_000, (1, Phase.OUTSIDE, 0), (2, Phase.OUTSIDE, 0))
    assert table.core.warnings("job") == ()
    table.run(20_000, (1, Phase.OUTSIDE, 0))
    (warning,) = table.core.warnings("job")
    assert warning.startswith("member b has been silent for 18 s. Continue it (SIGCONT) if it is stopped")
    table.run(21_000, (1, Phase.OUTSIDE, 0), (2, Phase.OUTSIDE, 0))
    assert table.core.warnings("job") == ()


def test_with_two_replicas_the_missing_one_is_named_with_its_place_and_address() -> None:
    table = Table()
    key = table.core.quorum("job")
    assert key is not None
    table.now_ms = 2_000
    member = Member("a", address="a-host:1", step=1)
    table.handle(events.QuorumRequested(1, 2, member, key.key))
    orders = table.run(40_000, (1, Phase.WAITING, 2_000), (2, Phase.OUTSIDE, 1_500))
    told = [order for _, order in orders if isinstance(order, effects.TellWait)]
    assert {order.stream for order in told} == {1}  # who waits, and nobody else
    sentence = (
        "1 of 2 healthy replicas have asked, and a majority is needed; not asked: b at b-host:1 (step 7, between "
        "two steps for 5 s); ends when it asks or is lost"
    )
    lines = [(now_ms, order) for now_ms, order in orders if isinstance(order, effects.WaitNoticed)]
    assert lines[0] == (7_000, effects.WaitNoticed("job", 5, False, sentence, ("b",)))
    assert [(now_ms, line.seconds) for now_ms, line in lines] == [(7_000, 5), (32_000, 30)]
    assert "b at b-host:1" in table.core.wait_sentence("job", table.now_ms)
    table.handle(events.QuorumRequested(2, 2, Member("b", address="b-host:1", step=1), key.key))
    (over,) = [order for _, order in table.run(41_000) if isinstance(order, effects.WaitNoticed)]
    assert over.is_over


def test_a_job_whose_quorum_stands_is_said_to_train() -> None:
    """`tft doctor` said of it that it waits for "a replica to ask for a quorum"."""
    table = Table()
    table.core.tick(table.now_ms, 1_000_000)
    assert table.core.wait_sentence("job", table.now_ms) == "nothing; the job is training"
    for stream in (1, 2):
        table.handle(events.DeathReported(stream, "killed"))
    assert table.core.wait_sentence("job", table.now_ms) == "a replica to ask for a quorum"


def test_the_sentence_is_right_before_the_rule_is_applied_again() -> None:
    table = Table(min_replicas=2)
    table.core.tick(table.now_ms, 1_000_000)
    held = table.core.quorum("job")
    assert held is not None
    member = Member("a", address="a-host:1", step=1)
    table.handle(events.QuorumRequested(1, 2, member, held.key))
    assert table.core.waiting_for("job") == "a replica to ask for a quorum"
    assert table.core.wait_sentence("job", table.now_ms).startswith("1 of min_replicas 2 have asked; not asked: b")


def test_a_member_that_was_lost_is_named_where_too_few_are_left() -> None:
    table = Table(min_replicas=2)
    table.handle(events.DeathReported(2, "its process ended"))
    table.ask(1, "a", 2)
    table.now_ms = 9_000
    sentence = table.core.wait_sentence("job", table.now_ms)
    assert "b at b-host:1 (lost 8 s ago: its manager server reports: its process ended)" in sentence
    assert sentence.endswith("settings file (then SIGHUP), or by its restart with a lower --min-replicas")


def test_the_key_that_lowers_the_least_of_one_job_is_named() -> None:
    """Its own number beats the one of all jobs, which the sentence named."""
    table = Table(min_replicas=1, jobs={"job": JobSettings(min_replicas=2)})
    table.handle(events.DeathReported(2, "its process ended"))
    table.ask(1, "a", 2)
    sentence = table.core.wait_sentence("job", table.now_ms)
    assert sentence.endswith("or jobs.job.min_replicas is lowered in the lighthouse's settings file (then SIGHUP)")
    table.core.reconfigure(LighthouseConfig(min_replicas=2, jobs={"job": JobSettings(max_replicas=9)}))
    assert "or min_replicas is lowered" in table.core.wait_sentence("job", table.now_ms)


def test_who_waits_in_a_reduction_is_told_who_is_not_in_it() -> None:
    table = Table()
    orders = table.run(9_000, (1, Phase.REDUCING, 2_000), (2, Phase.OWN, 1_000))
    (line,) = [order for _, order in orders if isinstance(order, effects.WaitNoticed)]
    assert "waits for b at b-host:1 (step 7, busy with its own part of the step for 6 s)" in line.sentence
    assert {order.stream for _, order in orders if isinstance(order, effects.TellWait)} == {1}


def test_a_job_whose_steps_are_short_tells_and_says_nothing() -> None:
    table = Table()
    for _ in range(60):
        assert table.run(table.now_ms + 1_000, (1, Phase.REDUCING, table.now_ms), (2, Phase.OWN, table.now_ms)) == []


# --- the manager server ------------------------------------------------------------------------------------------


def group(world_size: int) -> ReplicaGroupCore:
    core = ReplicaGroupCore(
        replica_id=f"r:{UUID}", address="r:1", store_address="s:1", world_size=world_size, timeouts=Timeouts()
    )
    for rank in range(world_size):
        core.handle(events.RankConnected(rank, rank + 1, 1), 0)
    return core


def asked(core: ReplicaGroupCore, rank: int, now_ms: int) -> None:
    request = RankRequest(step=3, lineage=None, checkpoint_metadata="", attempt=1)
    core.handle(events.RankAsked(rank, 10 + rank, request, 60_000), now_ms)


def test_the_error_at_the_deadline_says_what_the_lighthouse_has_said() -> None:
    core = group(1)
    asked(core, 0, 0)
    told = core.handle(events.WaitTold("not asked: b at b-host:1"), 3_000)
    assert told == [effects.TellRank(0, WaitsFor("not asked: b at b-host:1"))]
    failed = [order for order in core.tick(60_000) if isinstance(order, effects.FailRank)]
    assert [order.message for order in failed] == [
        "timed out waiting for a quorum; the lighthouse reports: not asked: b at b-host:1"
    ]
    asked(core, 0, 61_000)  # what was said of the last wait says nothing of this one
    (failed_again,) = [order for order in core.tick(130_000) if isinstance(order, effects.FailRank)]
    assert "tft doctor" in failed_again.message


def test_the_error_at_the_deadline_of_a_straggler_says_until_when_it_is_left_out() -> None:
    core = group(1)
    news = StragglerNotice("r", PaceKind.LEFT_OUT, 4_000, 400, pause_ms=80_000, sentence="it is left out")
    core.handle(events.PaceTold(news), 10_000)
    asked(core, 0, 11_000)
    (failed,) = [order for order in core.tick(70_000) if isinstance(order, effects.FailRank)]
    assert failed.message == (
        "timed out waiting for a quorum; replica r is left out as a straggler: its own part of a step takes 4.00 s "
        "(median of the others: 0.40 s). It is left out for 20 s more, and may join again for a trial after that. Keep "
        "asking: steps without a quorum do not count as failures meanwhile. Check its host for a slow or shared "
        "device, slow data loading, or thermal throttling"
    )
    asked(core, 0, 71_000)
    (failed,) = [order for order in core.tick(140_000) if isinstance(order, effects.FailRank)]
    assert "Its pause is over, and it joins for a trial when the others ask for the next quorum" in failed.message
    core.handle(events.PaceTold(StragglerNotice("r", PaceKind.LET_BACK)), 141_000)
    asked(core, 0, 142_000)
    (failed,) = [order for order in core.tick(210_000) if isinstance(order, effects.FailRank)]
    assert "straggler" not in failed.message


def test_a_rank_that_waits_for_others_of_its_group_is_told_for_which() -> None:
    core = group(2)
    asked(core, 0, 0)
    core.handle(events.RankProgressed(1, Progress(3, Phase.OWN, 4_000)), 5_000)
    waits = Progress(3, Phase.WAITING, 5_000, excused=True)
    sentence = (
        "1 of 2 ranks of this group have not asked for the quorum: rank 1 (step 3, busy with its own part of the step "
        "for 4 s)"
    )
    assert core.handle(events.RankProgressed(0, waits), 5_000) == [effects.TellRank(0, WaitsFor(sentence))]


def test_a_rank_that_waits_for_a_vote_is_told_who_has_not_voted() -> None:
    core = group(2)
    core.handle(events.RankVoted(0, 5, QuorumKey(1, 1), 3, Purpose.COMMIT, True, 60_000, False), 0)
    (told,) = core.handle(events.RankProgressed(0, Progress(3, Phase.WAITING, 4_000)), 4_000)
    assert isinstance(told, effects.TellRank)
    assert told.news == WaitsFor("1 of 2 ranks of this group have not voted: rank 1 (no report yet)")


# --- two lives of one name ---------------------------------------------------------------------------------------

OTHER = "1f3a9c1d-1234-4abc-8def-0123456789ab"


class Names:
    """A lighthouse to which replicas come."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.beats: set[int] = set()
        self.core = LighthouseCore(
            LighthouseConfig(), started_ms=1_000, cluster_id="c", nonces=lambda: 1, now_ms=self.now_ms
        )

    def comes(self, stream: int, replica_id: str, *, replaces: str = "", host: str = "", pid: int = 0) -> None:
        address = f"{host or f'host{stream}'}:{stream}"
        hello = Hello("job", replica_id, 10, address, replaces, pid=pid or 100 + stream)
        self.core.handle(events.HelloReceived(stream, hello), self.now_ms, 1_000_000)
        self.beats.add(stream)

    def run(self, seconds: int) -> list[effects.TellWait | effects.WaitNoticed | effects.Warned]:
        out = []
        for _ in range(seconds):
            self.now_ms += 1_000
            for stream in self.beats:
                self.core.handle(events.BeatReceived(stream, 0, None), self.now_ms, 1_000_000)
            self.core.tick(self.now_ms, 1_000_000)
            out += self.core.look_at_waits(self.now_ms)
        return out


def test_two_living_replicas_of_one_name_are_warned_of_on_all_sides_once() -> None:
    names = Names()
    names.comes(1, f"replica_1:{UUID}")
    names.comes(2, f"replica_2:{UUID}")
    assert names.run(10) == []
    names.comes(3, f"replica_1:{OTHER}")
    warning = (
        "two running replicas have the name 'replica_1': replica_1:0f3a9c1d at host1:1 (pid 101) and "
        "replica_1:1f3a9c1d at host3:3 (pid 103). End the older one if it has outlived its launcher, or give each "
        "group its own REPLICA_GROUP_ID"
    )
    assert names.run(60) == [
        effects.Warned("job", warning),
        *(effects.TellWait(stream, warning, True) for stream in (1, 2, 3)),
    ]
    assert names.core.warnings("job") == (warning,)
    names.beats.remove(1)
    names.core.handle(events.DeathReported(1, "killed"), names.now_ms, 1_000_000)
    names.run(1)
    assert names.core.warnings("job") == ()


@pytest.mark.parametrize(
    ("host", "pid", "is_one"), [("host1", 7, True), ("host2", 7, False), ("host1", 8, False), ("host1", 1, False)]
)
def test_two_lives_in_one_process_are_told_which_one_to_shut_down(host: str, pid: int, is_one: bool) -> None:
    """The advice to end the older worker would end the younger one too. Containers have a process 1 each."""
    names = Names()
    names.comes(1, f"replica_1:{UUID}", host="host1", pid=min(pid, 7))
    names.comes(2, f"replica_1:{OTHER}", host=host, pid=pid)
    names.run(60)
    (warning,) = names.core.warnings("job")
    assert warning.endswith("Both are in one process: call shutdown() on its earlier Manager first") is is_one
    assert ("End the older one" in warning) is not is_one


def test_a_restart_whose_predecessor_dies_is_no_second_life() -> None:
    names = Names()
    names.comes(1, f"replica_1:{UUID}")
    names.run(10)
    names.beats.clear()  # it was cut off, and is lost only when it has been silent for a while
    names.comes(2, f"replica_1:{OTHER}")
    assert names.run(30) == []
    names.comes(3, f"replica_1:{UUID.replace('0f', '2f')}", replaces=f"replica_1:{OTHER}")
    assert names.run(30) == []


@pytest.mark.parametrize(("one", "other"), [(UUID, OTHER), ("a:1", "a:2"), ("replica_1", "replica_2")])
def test_replicas_whose_names_no_user_gave_are_not_compared(one: str, other: str) -> None:
    names = Names()
    names.comes(1, one)
    names.comes(2, other)
    assert names.run(30) == []
