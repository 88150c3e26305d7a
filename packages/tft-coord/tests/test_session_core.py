"""The manager server's end of its stream: when it dials, what it says, what it believes."""

from __future__ import annotations

import pytest

from tft_coord.core.session import (
    Dial,
    GiveUp,
    HangUp,
    Look,
    Say,
    SendBeat,
    SendHello,
    SendRequest,
    SendWithdraw,
    SessionCore,
    SessionEffect,
)
from tft_coord.core.types import Member, QuorumKey, Refusal
from tft_coord.timeouts import Timeouts

TIMEOUTS = Timeouts()
KEY = QuorumKey(5, 1)


def session(jitter: float = 0.5) -> SessionCore:
    return SessionCore(
        job="job", replica_id="a", address="a:1", session=100, timeouts=TIMEOUTS, jitter=lambda: jitter, replaces="b"
    )


def welcomed() -> SessionCore:
    core = session()
    core.start(0)
    core.stream_opened(1)
    core.welcomed(100, 50, 2)
    return core


def test_hello_goes_first_and_says_everything() -> None:
    core = session()
    assert core.start(0) == [Dial(0)]
    (sent,) = core.stream_opened(1)
    assert isinstance(sent, SendHello)
    assert (sent.hello.job, sent.hello.replica_id, sent.hello.session) == ("job", "a", 100)
    assert (sent.hello.address, sent.hello.replaces, sent.hello.ready, sent.hello.held) == ("a:1", "b", False, None)


def test_the_round_trip_is_from_a_hello_to_its_welcome() -> None:
    core = session()
    core.start(0)
    core.stream_opened(1_000)
    assert core.round_trip_ms is None
    core.welcomed(100, 50, 1_250)
    assert core.round_trip_ms == 250
    core.told_lost(100, 5_000)
    core.welcomed(101, 50, 9_000)
    assert core.round_trip_ms == 250, "this hello was not a stream's first"
    core.stream_broke(10_000)
    core.stream_opened(11_000)
    core.welcomed(101, 50, 11_040)
    assert core.round_trip_ms == 40


def test_nothing_but_beats_is_sent_before_the_welcome() -> None:
    """A welcome may take longer than `heartbeat_timeout`: silence until then would be a loss."""
    core = of_two_addresses()
    core.start(0)
    core.stream_opened(1)
    assert core.ask(1, Member("a"), None, 2) == []
    assert core.tick(1_000) == []
    assert core.tick(1_001) == [SendBeat(0)], "no look at the other lighthouse either"
    assert core.say_waits(None) == []
    assert core.tick(2_001) == [SendBeat(0)]
    assert core.welcomed(100, 50, 2_002) == [SendRequest(1, Member("a"), None)]


def test_an_open_request_is_said_again_on_every_new_stream() -> None:
    core = welcomed()
    assert core.ask(1, Member("a"), KEY, 10) == [SendRequest(1, Member("a"), KEY)]
    core.stream_broke(20)
    (sent,) = core.stream_opened(80)
    assert isinstance(sent, SendHello)
    assert (sent.hello.session, sent.hello.ready, sent.hello.held) == (100, True, KEY)
    assert core.welcomed(100, 50, 90) == [SendRequest(1, Member("a"), KEY)]


def test_a_request_given_up_while_the_stream_is_broken_is_not_said_again() -> None:
    core = welcomed()
    core.ask(1, Member("a"), None, 10)
    core.stream_broke(20)
    assert core.withdraw(1, 30) == []
    core.stream_opened(80)
    assert core.welcomed(100, 50, 90) == []


def test_withdrawing_is_for_the_open_request() -> None:
    core = welcomed()
    core.ask(1, Member("a"), None, 10)
    assert core.withdraw(2, 11) == []
    assert core.withdraw(1, 12) == [SendWithdraw(1)]
    assert core.withdraw(1, 13) == []


def test_answers_to_other_requests_are_not_believed() -> None:
    core = welcomed()
    core.ask(1, Member("a"), None, 10)
    core.ask(2, Member("a"), None, 11)
    assert not core.answered(1, KEY)
    assert core.held is None
    assert core.answered(2, KEY)
    assert core.held == KEY
    assert not core.answered(2, KEY)


def test_a_refused_request_leaves_what_is_held() -> None:
    core = welcomed()
    core.ask(1, Member("a"), KEY, 10)
    assert core.answered(1, None)
    assert core.held == KEY


@pytest.mark.parametrize("jitter", [0.0, 0.5, 0.999])
def test_redials_are_fast_for_a_second_and_never_slower_than_the_grace(jitter: float) -> None:
    core = session(jitter)
    core.start(0)
    core.stream_opened(1)
    core.welcomed(100, 50, 2)
    now_ms = 10_000
    gaps = []
    orders = core.stream_broke(now_ms)
    while now_ms < 15_000:
        (dial,) = orders
        assert isinstance(dial, Dial)
        gaps.append((now_ms, dial.at_ms - now_ms))
        now_ms = dial.at_ms
        orders = core.stream_broke(now_ms)  # the dial failed
    assert all(50 <= gap <= 100 for at_ms, gap in gaps if at_ms < 11_000)
    assert all(100 <= gap < TIMEOUTS.reconnect_grace_ms for at_ms, gap in gaps if at_ms >= 11_000)
    # Thousands that lost one lighthouse do not come back in step.
    assert {gap for at_ms, gap in gaps if at_ms < 11_000} == {50 + int(50 * jitter)}
    assert {gap for at_ms, gap in gaps if at_ms >= 11_000} == {100 + int(150 * jitter)}


def test_dials_that_are_answered_but_refused_slow_down_too() -> None:
    core = session(0.0)
    core.start(0)
    now_ms, last_ms = 0, 0
    for _ in range(40):
        core.stream_opened(now_ms)
        assert core.told_refused(Refusal.OLD_LIGHTHOUSE, "old", now_ms) == [HangUp()]
        (dial,) = core.stream_broke(now_ms)
        assert isinstance(dial, Dial)
        last_ms, now_ms = now_ms, dial.at_ms
    assert now_ms - last_ms == 100


def test_told_that_it_is_lost_it_opens_a_newer_session_on_the_same_stream() -> None:
    core = welcomed()
    core.ask(1, Member("a"), None, 10)
    (sent,) = core.told_lost(100, 20)
    assert isinstance(sent, SendHello)
    assert sent.hello.session == 101
    assert core.tick(5_000) == [SendBeat(0)]  # the request not before the welcome
    assert core.welcomed(101, 50, 30) == [SendRequest(1, Member("a"), None)]
    assert core.told_lost(100, 40) == []  # said twice


def test_the_hello_names_the_quorum_whose_losses_it_may_have_missed() -> None:
    core = welcomed()
    core.ask(1, Member("a"), None, 10)
    assert core.answered(1, KEY)
    core.ask(2, Member("a", step=6), KEY, 12)
    assert core.answered(2, KEY)
    core.ask(3, Member("a", step=7), KEY, 14)
    core.stream_broke(20)
    sent, *_ = core.stream_opened(80)
    assert isinstance(sent, SendHello)
    assert (sent.hello.held, sent.hello.num_answers) == (KEY, 2)
    core.welcomed(100, 50, 90)
    (sent,) = core.told_lost(100, 95)  # its own loss was one of them
    assert isinstance(sent, SendHello)
    assert (sent.hello.session, sent.hello.held) == (101, KEY)


def test_a_request_that_names_an_older_quorum_does_not_take_the_hello_back() -> None:
    """A late copy of a request comes after its answer: the ranks are in the newer quorum, whose losses they need."""
    core = welcomed()
    core.ask(1, Member("a"), KEY, 10)
    newer = QuorumKey(6, 1)
    assert core.answered(1, newer)
    assert core.ask(2, Member("a"), KEY, 20) == [SendRequest(2, Member("a"), KEY)]
    core.withdraw(2, 21)
    core.stream_broke(30)
    (sent,) = core.stream_opened(80)
    assert isinstance(sent, SendHello)
    assert sent.hello.held == newer


def test_beats_go_once_an_interval_with_the_bytes_that_came() -> None:
    core = welcomed()
    assert core.tick(1_000) == []
    assert core.tick(1_001) == [SendBeat(0)]
    core.healed(700)
    core.healed(600)  # ever rising
    assert core.next_beat_ms == 2_001
    assert core.tick(2_001) == [SendBeat(700)]


def test_an_older_lighthouse_is_not_believed() -> None:
    core = welcomed()
    core.stream_broke(10)
    core.stream_opened(20)
    assert core.welcomed(100, 49, 30) == [HangUp()]
    core.stream_broke(30)
    core.stream_opened(90)
    assert core.welcomed(100, 51, 95) == []
    assert core.lighthouse_started_ms == 51


def test_a_lighthouse_of_another_cluster_is_a_restart_whatever_its_clock_says() -> None:
    core = welcomed()
    core.stream_broke(10)
    core.stream_opened(20)
    assert core.welcomed(100, 49, 30, "another") == []
    assert (core.lighthouse_started_ms, core.cluster_id) == (49, "another")


def test_a_stale_session_jumps_ahead_ever_farther() -> None:
    """A clock was set back by an hour: one number a dial would take days."""
    core = session()
    start = core.session
    for _ in range(25):
        assert core.told_refused(Refusal.STALE, "stale", 0) == [HangUp()]
    assert core.session - start > 3_600_000


def test_a_stale_session_of_a_hung_trainer_is_not_raised() -> None:
    """Another process had its id meanwhile and has ended; a newer session would say that this trainer lives."""
    core = session()
    core.start(0)
    start = core.session
    assert core.told_refused(Refusal.STALE, "stale", 10, hung=True) == [HangUp()]
    assert core.session == start
    assert isinstance(core.stream_broke(11)[0], Dial)
    assert core.told_refused(Refusal.STALE, "stale", 20) == [HangUp()]
    assert core.session == start + 1


def test_a_duplicate_waits_until_the_first_would_be_lost_and_then_gives_up() -> None:
    core = session()
    core.start(0)
    assert core.told_refused(Refusal.DUPLICATE, "a already lives", 1_000) == [HangUp()]
    assert core.told_refused(Refusal.DUPLICATE, "a already lives", 6_299) == [HangUp()]
    gives_up = GiveUp("duplicate", "a already lives")
    assert core.told_refused(Refusal.DUPLICATE, "a already lives", 6_300) == [gives_up, HangUp()]
    assert core.refused == gives_up
    assert core.stream_broke(6_301) == []
    assert core.stream_opened(6_302) == [HangUp()]


def test_a_duplicate_that_is_heard_no_more_may_be_dead_however_long_that_takes() -> None:
    """A lighthouse that was away, or sick, loses nobody then, so that the time alone proves nothing."""
    core = session()
    core.start(0)
    assert core.told_refused(Refusal.DUPLICATE, "a already lives", 1_000, 200) == [HangUp()]
    for silent_ms in (200, 3_200, 59_200):
        assert core.told_refused(Refusal.DUPLICATE, "a already lives", 1_000 + silent_ms, silent_ms) == [HangUp()]
    assert core.told_refused(Refusal.DUPLICATE, "a already lives", 61_000, 54_701) == [HangUp()]
    assert core.refused is None
    gives_up = GiveUp("duplicate", "a already lives")
    assert core.told_refused(Refusal.DUPLICATE, "a already lives", 61_000, 54_700) == [gives_up, HangUp()]


@pytest.mark.parametrize("refusal", [Refusal.DEAD, Refusal.MALFORMED, Refusal.OTHER_KIND])
def test_the_rest_is_final(refusal: Refusal) -> None:
    core = welcomed()
    assert core.told_refused(refusal, "why", 10) == [GiveUp(refusal.value, "why"), HangUp()]


@pytest.mark.parametrize("refusal", [Refusal.CLOCK, Refusal.FULL])
def test_a_fault_that_an_operator_corrects_is_waited_for_by_whoever_was_served(refusal: Refusal) -> None:
    """Field report D4: the lighthouse was restarted with a clock far behind, and every trainer ended."""
    core = welcomed()
    core.stream_broke(5)
    core.stream_opened(6)
    assert core.told_refused(refusal, "set it right", 10) == [HangUp()]
    assert core.refused is None
    assert isinstance(core.stream_broke(11)[0], Dial)


@pytest.mark.parametrize("refusal", [Refusal.CLOCK, Refusal.FULL])
def test_a_replica_that_starts_is_told_of_it_at_once(refusal: Refusal) -> None:
    core = session()
    core.start(0)
    core.stream_opened(1)
    gives_up = GiveUp(refusal.value, "set it right")
    assert core.told_refused(refusal, "set it right", 10) == [gives_up, HangUp()]


def test_a_lighthouse_that_is_sooner_out_of_patience_hears_us_more_often() -> None:
    core = session()
    core.start(0)
    core.stream_opened(1)
    core.welcomed(100, 50, 2, "c", 400)
    assert core.next_beat_ms == 202
    assert core.tick(202) == [SendBeat(0)]
    assert core.next_beat_ms == 402
    core.stream_broke(500)
    core.stream_opened(600)
    core.welcomed(100, 60, 601, "d", 60_000)  # its successor has more
    core.tick(core.next_beat_ms)
    assert core.next_beat_ms == 600 + 2 * TIMEOUTS.beat_interval_ms


# --- several addresses -----------------------------------------------------------------------------------------------


def several(number: int = 3) -> SessionCore:
    return SessionCore(
        job="job",
        replica_id="a",
        address="a:1",
        session=100,
        timeouts=TIMEOUTS,
        jitter=lambda: 0.5,
        num_addresses=number,
    )


def dialed(effects: list[SessionEffect]) -> int:
    (dial,) = effects
    assert isinstance(dial, Dial)
    return dial.address


def serve(core: SessionCore, cluster_id: str, started_ms: int = 50) -> list[SessionEffect]:
    core.stream_opened(1)
    return core.welcomed(core.session, started_ms, 2, cluster_id)


def test_the_next_address_is_dialed_when_one_cannot_be_reached() -> None:
    core = several()
    assert dialed(core.start(0)) == 0
    assert [dialed(core.stream_broke(at_ms)) for at_ms in (1, 100, 200)] == [1, 2, 0]


def test_a_stream_that_only_blinked_comes_back_to_the_same_address_and_then_to_the_next() -> None:
    core = several()
    core.start(0)
    core.stream_broke(1)
    assert serve(core, "ours") == []
    assert dialed(core.stream_broke(10)) == 1
    assert dialed(core.stream_broke(80)) == 2


def test_one_that_answers_no_more_is_left_for_the_next() -> None:
    core = several()
    core.start(0)
    serve(core, "ours")
    assert core.told_refused(Refusal.OLD_LIGHTHOUSE, "a newer one serves", 5) == [HangUp()]
    assert dialed(core.stream_broke(5)) == 1


def test_who_is_refused_as_stale_says_a_newer_session_to_the_same() -> None:
    core = several()
    core.start(0)
    core.stream_opened(1)
    core.told_refused(Refusal.STALE, "an older session", 2)
    assert dialed(core.stream_broke(3)) == 0


def test_of_several_addresses_a_lighthouse_of_another_cluster_is_hung_up_on_and_named_once() -> None:
    core = several(2)
    core.start(0)
    serve(core, "ours")
    core.stream_broke(10)
    assert dialed(core.stream_broke(20)) == 1
    (said, hung_up) = serve(core, "theirs", 99)
    assert isinstance(said, Say)
    assert "theirs" in said.message
    assert "ours" in said.message
    assert hung_up == HangUp()
    assert (core.cluster_id, core.lighthouse_started_ms) == ("ours", 50)
    assert core.ask(1, Member("a"), None, 30) == []  # nothing is asked of it
    assert dialed(core.stream_broke(40)) == 0
    assert dialed(core.stream_broke(50)) == 0  # and not the stranger's again
    assert serve(core, "ours", 51) == [SendRequest(1, Member("a"), None)]


def test_an_older_one_of_the_cluster_is_left_for_the_next() -> None:
    core = several(2)
    core.start(0)
    serve(core, "ours", 50)
    core.stream_broke(10)
    core.stream_broke(20)
    assert serve(core, "ours", 40) == [HangUp()]
    assert dialed(core.stream_broke(30)) == 0


def test_a_newer_one_of_the_cluster_that_serves_the_job_is_followed_to() -> None:
    core = several(3)
    core.start(0)
    serve(core, "ours", 50)
    beat, *looks = core.tick(core.next_beat_ms)
    assert isinstance(beat, SendBeat)
    assert looks == [Look(1), Look(2)]
    assert core.tick(core.next_beat_ms) == [SendBeat(0)]  # not at every beat
    assert core.looked(1, "ours", 49, serves=True) == []
    assert core.looked(1, "ours", 60, serves=False) == []
    assert core.looked(2, "ours", 60, serves=True) == [HangUp()]
    assert dialed(core.stream_broke(9_000)) == 2
    assert serve(core, "ours", 60) == []


def test_one_of_another_cluster_that_is_found_by_a_look_is_named_once_and_not_dialed() -> None:
    core = several(3)
    core.start(0)
    assert core.looked(1, "theirs", 60, serves=True) == []  # which cluster is ours is not known yet
    serve(core, "ours", 50)
    (said,) = core.looked(1, "theirs", 60, serves=True)
    assert isinstance(said, Say)
    assert said.address == 1
    assert "belongs to cluster theirs; of several lighthouses only those of cluster ours are used" in said.message
    assert core.looked(1, "theirs", 60, serves=True) == []
    core.stream_broke(70)
    assert dialed(core.stream_broke(80)) == 2
    assert core.looked(1, "ours", 90, serves=True) == []  # this one is not served now, and follows nobody
    serve(core, "ours", 50)
    assert core.looked(1, "ours", 40, serves=True) == []  # started anew, with the cluster's name
    core.stream_broke(100)
    assert [dialed(core.stream_broke(at)) for at in (110, 120)] == [0, 1]


def test_with_one_address_there_is_nowhere_else_to_look() -> None:
    core = welcomed()
    assert core.tick(core.next_beat_ms) == [SendBeat(0)]


def test_torchfts_lighthouse_serves_where_it_is_the_only_one() -> None:
    assert session().found_foreign() == []
    core = several(2)
    core.start(0)
    core.stream_opened(1)
    (said, hung_up) = core.found_foreign()
    assert isinstance(said, Say)
    assert "torchft's" in said.message
    assert hung_up == HangUp()
    assert dialed(core.stream_broke(2)) == 1


# --- a start against what is no lighthouse -----------------------------------------------------------------------


def of_two_addresses() -> SessionCore:
    return SessionCore(
        job="job",
        replica_id="a",
        address="a:1",
        session=100,
        timeouts=TIMEOUTS,
        jitter=lambda: 0.5,
        num_addresses=2,
    )


def test_a_wrong_server_or_secret_ends_a_start_at_once() -> None:
    core = session()
    core.start(0)
    give_up = GiveUp("unauthenticated", "wrong secret")
    assert core.dial_failed(0, "unauthenticated", "wrong secret") == [give_up]
    assert core.refused == give_up
    assert core.stream_broke(1) == []  # it dials no more


def test_a_lighthouse_that_is_only_away_is_waited_for() -> None:
    core = session()
    core.start(0)
    assert core.dial_failed(0, "", "refused") == []
    assert core.refused is None
    assert core.stream_broke(1) != []


def test_a_start_ends_only_when_every_address_is_wrong_at_once() -> None:
    core = of_two_addresses()
    core.start(0)
    assert core.dial_failed(0, "wrong_server", "w") == []
    assert core.dial_failed(1, "", "away") == []
    assert core.dial_failed(0, "", "away") == []
    assert core.dial_failed(1, "wrong_server", "w") == []
    assert core.dial_failed(0, "wrong_server", "both") == [GiveUp("wrong_server", "both")]


@pytest.mark.parametrize("torchft", [False, True])
def test_a_running_job_outlives_a_wrong_server(torchft: bool) -> None:
    core = session()
    core.start(0)
    if torchft:
        core.found_foreign()
    else:
        core.stream_opened(1)
        core.welcomed(100, 50, 2)
    core.stream_broke(3)
    assert core.dial_failed(0, "wrong_server", "w") == []
    assert core.refused is None
