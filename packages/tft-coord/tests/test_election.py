"""One lighthouse in the election: which call comes next, what counts as a renewal, and when it stops to answer."""

from __future__ import annotations

import pytest

from tft_coord.core.election import (
    IDS_OF_A_TERM,
    Answer,
    Began,
    Call,
    Campaign,
    Decision,
    Done,
    ElectionCore,
    Ended,
    Failed,
    Floor,
    Grant,
    Granted,
    Leader,
    LeaderChanged,
    Look,
    Looked,
    Renew,
    Renewed,
    Revoke,
)

TTL_MS = 2_000
WALL_MS = 1_800_000_000_000
TERM = 7  # of the store
OURS = Leader("us:1", 11, 40, WALL_MS)
OTHER = Leader("other:1", 12, 30, WALL_MS - 5)


def next_call(core: ElectionCore, now_ms: int, expected: type[Call], wall_ms: int = WALL_MS) -> Call:
    call = core.call(now_ms, wall_ms)
    assert type(call) is expected
    return call


def make(
    core: ElectionCore, expected: type[Call], answer: Answer, *, sent_ms: int, now_ms: int | None = None
) -> list[Decision]:
    call = next_call(core, sent_ms, expected)
    return core.answered(call, answer, sent_ms, sent_ms if now_ms is None else now_ms)


def leads_at(now_ms: int) -> ElectionCore:
    """Return a core that has made a lease at that time, and leads."""
    core = ElectionCore(ttl_ms=TTL_MS)
    make(core, Look, Looked(None, Floor(), TERM), sent_ms=now_ms)
    make(core, Grant, Granted(OURS.lease, TTL_MS), sent_ms=now_ms)
    make(core, Campaign, Done(), sent_ms=now_ms)
    assert make(core, Look, Looked(OURS, Floor(WALL_MS, 40), TERM), sent_ms=now_ms) == [Began(OURS, False)]
    return core


def test_the_first_of_all_campaigns_and_leads() -> None:
    core = ElectionCore(ttl_ms=TTL_MS)
    assert make(core, Look, Looked(None, Floor(), TERM), sent_ms=0) == []
    assert next_call(core, 1, Grant) == Grant(TTL_MS)
    assert core.answered(Grant(TTL_MS), Granted(11, TTL_MS), 1, 5) == []
    assert next_call(core, 5, Campaign) == Campaign(11, 0, WALL_MS)
    assert core.answered(Campaign(11, 0, WALL_MS), Done(), 5, 9) == []
    assert not core.leads(9), "only a look shows who has won"
    assert make(core, Look, Looked(OURS, Floor(WALL_MS, 40), TERM), sent_ms=9) == [Began(OURS, False)]
    assert core.leads(9)
    assert core.leads_until_ms == 1 + 1_800, "the lease counts from the sending of its grant, less a tenth"


def test_a_campaign_whose_answer_was_lost_may_have_won() -> None:
    core = ElectionCore(ttl_ms=TTL_MS)
    make(core, Look, Looked(None, Floor(), TERM), sent_ms=0)
    make(core, Grant, Granted(11, TTL_MS), sent_ms=1)
    assert make(core, Campaign, Failed(), sent_ms=2, now_ms=502) == []
    assert core.call(502, WALL_MS) is None
    assert make(core, Look, Looked(OURS, Floor(WALL_MS, 40), TERM), sent_ms=752) == [Began(OURS, False)]


def test_one_whose_campaign_took_longer_than_its_lease_does_not_lead() -> None:
    core = ElectionCore(ttl_ms=TTL_MS)
    make(core, Look, Looked(None, Floor(), TERM), sent_ms=0)
    make(core, Grant, Granted(11, TTL_MS), sent_ms=1)
    make(core, Campaign, Done(), sent_ms=2)
    out = make(core, Look, Looked(OURS, Floor(WALL_MS, 40), TERM), sent_ms=3, now_ms=1_801)
    assert out == [LeaderChanged(OURS)]
    assert not core.leads(1_801)
    assert next_call(core, 1_801, Revoke) == Revoke(11), "its key is in the way of all"


def test_a_standby_looks_until_the_leader_is_gone_and_then_follows_it() -> None:
    core = ElectionCore(ttl_ms=TTL_MS)
    floor = Floor(OTHER.started_ms, 30)
    assert make(core, Look, Looked(OTHER, floor, TERM), sent_ms=0) == [LeaderChanged(OTHER)]
    assert core.call(249, WALL_MS) is None
    assert core.next_ms == 250
    assert make(core, Look, Looked(OTHER, floor, TERM), sent_ms=250) == []
    assert make(core, Look, Looked(None, floor, TERM), sent_ms=500) == [LeaderChanged(None)]
    make(core, Grant, Granted(11, TTL_MS), sent_ms=500)
    campaign = next_call(core, 501, Campaign)
    assert campaign == Campaign(11, 30, OTHER.started_ms + IDS_OF_A_TERM), "ids are above all of the last leader's"
    core.answered(campaign, Done(), 501, 502)
    assert make(core, Look, Looked(OURS, floor, TERM), sent_ms=502) == [Began(OURS, True)]


@pytest.mark.parametrize("behind_ms", [0, 3_600_000])
def test_ids_rise_above_the_floor_whatever_the_clock_says(behind_ms: int) -> None:
    core = ElectionCore(ttl_ms=TTL_MS)
    make(core, Look, Looked(None, Floor(WALL_MS, 3), TERM), sent_ms=0)
    make(core, Grant, Granted(11, TTL_MS), sent_ms=0)
    campaign = next_call(core, 0, Campaign, WALL_MS - behind_ms)
    assert campaign == Campaign(11, 3, WALL_MS + IDS_OF_A_TERM)


def test_one_that_was_beaten_stands_by_and_lets_its_lease_end() -> None:
    core = ElectionCore(ttl_ms=TTL_MS)
    make(core, Look, Looked(None, Floor(), TERM), sent_ms=0)
    make(core, Grant, Granted(11, TTL_MS), sent_ms=0)
    make(core, Campaign, Done(), sent_ms=0)
    assert make(core, Look, Looked(OTHER, Floor(1, 30), TERM), sent_ms=0) == [LeaderChanged(OTHER)]
    assert core.call(0, WALL_MS) is None
    next_call(core, 250, Look)


def test_a_renewal_counts_from_its_sending_once_a_look_has_confirmed_it() -> None:
    core = leads_at(0)
    assert core.call(499, WALL_MS) is None
    assert make(core, Renew, Renewed(TTL_MS, TERM), sent_ms=500, now_ms=700) == []
    assert core.leads_until_ms == 1_800
    assert make(core, Look, Looked(OURS, Floor(), TERM), sent_ms=700, now_ms=900) == []
    assert core.leads_until_ms == 500 + 1_800
    assert core.next_ms == 1_000


@pytest.mark.parametrize(("renewed", "looked"), [(TERM + 1, TERM + 1), (TERM, TERM + 1), (TERM - 1, TERM)])
def test_a_renewal_by_a_store_that_changes_its_own_leader_does_not_count(renewed: int, looked: int) -> None:
    """A member that was cut off renews leases that the majority has ended."""
    core = leads_at(0)
    make(core, Renew, Renewed(TTL_MS, renewed), sent_ms=500)
    make(core, Look, Looked(OURS, Floor(), looked), sent_ms=501)
    assert core.leads_until_ms == 1_800
    make(core, Renew, Renewed(TTL_MS, looked), sent_ms=502)
    make(core, Look, Looked(OURS, Floor(), looked), sent_ms=503)
    assert core.leads_until_ms == 502 + 1_800


def test_a_leader_ends_before_its_lease_can_have_ended() -> None:
    core = leads_at(0)
    make(core, Renew, Failed(), sent_ms=500, now_ms=1_000)
    assert core.call(1_249, WALL_MS) is None
    make(core, Renew, Failed(), sent_ms=1_250, now_ms=1_750)
    assert core.leads(1_799)
    assert core.tick(1_799) == []
    assert not core.leads(1_800)
    assert core.tick(1_800) == [Ended(OURS, "it could not renew its lease in time")]
    assert core.tick(1_801) == []
    # Its key may still stand. It ends it, so that nobody waits for the lease.
    assert make(core, Revoke, Failed(), sent_ms=1_801) == []
    make(core, Look, Looked(OURS, Floor(WALL_MS, 40), TERM), sent_ms=2_051)
    assert make(core, Revoke, Done(), sent_ms=2_052) == []
    make(core, Look, Looked(None, Floor(WALL_MS, 40), TERM), sent_ms=2_053)
    make(core, Grant, Granted(13, TTL_MS), sent_ms=2_054)
    make(core, Campaign, Done(), sent_ms=2_055)
    again = Leader("us:1", 13, 41, WALL_MS + IDS_OF_A_TERM)
    assert make(core, Look, Looked(again, Floor(), TERM), sent_ms=2_056) == [Began(again, True)]


def test_one_that_was_stopped_for_long_ends_whatever_the_late_answer_says() -> None:
    core = leads_at(0)
    call = next_call(core, 500, Renew)
    assert core.answered(call, Renewed(TTL_MS, TERM), 500, 30_500) == [
        Ended(OURS, "it could not renew its lease in time")
    ]
    assert not core.leads(30_500)


def test_a_leader_whose_lease_the_store_has_ended_ends() -> None:
    core = leads_at(0)
    out = make(core, Renew, Renewed(0, TERM), sent_ms=500)
    assert out == [Ended(OURS, "the store has ended its lease")]
    assert not core.leads(500)


@pytest.mark.parametrize("found", [None, OTHER, Leader("us:1", 11, 41, WALL_MS)])
def test_a_leader_whose_key_is_gone_or_was_written_by_another_ends(found: Leader | None) -> None:
    core = leads_at(0)
    make(core, Renew, Renewed(TTL_MS, TERM), sent_ms=500)
    assert make(core, Look, Looked(found, Floor(), TERM), sent_ms=501) == [Ended(OURS, "its key in the store is gone")]
    assert core.leader == found


def test_a_store_that_grants_longer_leases_is_taken_at_its_word() -> None:
    core = ElectionCore(ttl_ms=TTL_MS)
    make(core, Look, Looked(None, Floor(), TERM), sent_ms=0)
    make(core, Grant, Granted(11, 10_000), sent_ms=0)
    make(core, Campaign, Done(), sent_ms=0)
    make(core, Look, Looked(OURS, Floor(), TERM), sent_ms=0)
    assert (core.leads_until_ms, core.next_ms) == (9_000, 2_500)


def test_a_store_that_is_away_is_asked_again_with_pauses() -> None:
    core = ElectionCore(ttl_ms=TTL_MS)
    for at_ms in (0, 250, 500):
        assert make(core, Look, Failed(), sent_ms=at_ms) == []
        assert core.call(at_ms + 249, WALL_MS) is None
    make(core, Look, Looked(None, Floor(), TERM), sent_ms=750)
    make(core, Grant, Failed(), sent_ms=750)
    assert core.call(999, WALL_MS) is None


def test_one_that_resigns_says_which_lease_to_end() -> None:
    core = leads_at(0)
    assert core.resign() == 11
    assert not core.leads(1)
    assert ElectionCore(ttl_ms=TTL_MS).resign() is None
