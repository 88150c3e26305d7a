"""Who is left out because others can't reach it: the smallest cover, the pauses, and what the lighthouse does."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import pytest

from tft_coord.core import effects, events, reach
from tft_coord.core.bad_links import BadLinks, Pair, around_of
from tft_coord.core.lighthouse import Job as Job_
from tft_coord.core.lighthouse import LighthouseConfig, LighthouseCore
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.reach import EXACT_MOST, Limits, Reach
from tft_coord.core.types import Hello, Member, Quorum, QuorumKey, Unreached, Via
from tft_coord.timeouts import Timeouts

STARTED_MS = 1_700_000_000_000
FREE = Limits(100)


def same(pairs: list[Pair]) -> dict[str, tuple[int, ...]]:
    return {name: (0, 0) for pair in pairs for name in pair}


def smallest_cover(pairs: list[Pair], order: Mapping[str, tuple[int, ...]], limits: Limits) -> set[str] | None:
    return reach.smallest_cover(around_of(pairs), order, limits)


# --- the cover --------------------------------------------------------------------------------------------------------


def test_the_hub_of_a_star_covers_it() -> None:
    pairs = [("a", "h"), ("b", "h"), ("c", "h")]
    assert smallest_cover(pairs, same(pairs), FREE) == {"h"}


def test_of_two_that_would_do_the_first_in_order_is_chosen_and_then_the_higher_id() -> None:
    assert smallest_cover([("a", "b")], {"a": (0, 0), "b": (1, 0)}, FREE) == {"a"}
    assert smallest_cover([("a", "b")], {"a": (0, 0), "b": (0, 0)}, FREE) == {"b"}


def test_a_ring_that_is_cut_twice_loses_one_on_each_side() -> None:
    pairs = [("a", "b"), ("c", "d")]
    assert smallest_cover(pairs, same(pairs), FREE) == {"b", "d"}


def test_limits_make_it_larger_or_impossible() -> None:
    pairs = [("a", "h"), ("b", "h")]
    assert smallest_cover(pairs, same(pairs), Limits(2, (frozenset("h"),))) == {"a", "b"}
    assert smallest_cover(pairs, same(pairs), Limits(1, (frozenset("h"),))) is None
    assert smallest_cover([("a", "b")], same([("a", "b")]), Limits(0)) is None


@pytest.mark.parametrize("seed", range(40))
def test_it_is_as_small_as_any_that_is_found_by_trying_all(seed: int) -> None:
    rng = random.Random(seed)
    names = "abcdefgh"
    pairs = [pair for pair in combinations(names, 2) if rng.random() < 0.3] or [("a", "b")]
    needed = frozenset(rng.sample(names, rng.randint(1, 3)))
    limits = Limits(rng.randint(2, 7), (needed,))
    order = {name: (rng.randint(0, 1), rng.randint(0, 3)) for name in names}
    sizes = [
        number
        for number in range(len(names) + 1)
        for chosen in map(set, combinations(names, number))
        if all(chosen.intersection(pair) for pair in pairs) and limits.allow(chosen)
    ]
    found = smallest_cover(pairs, order, limits)
    assert (len(found) if found is not None else None) == min(sizes, default=None)
    assert found is None or (all(found.intersection(pair) for pair in pairs) and limits.allow(found))


def test_twenty_members_that_are_all_ends_take_no_time() -> None:
    pairs = [(f"r{one:02}", f"r{one + 10:02}") for one in range(EXACT_MOST // 2)]
    found = smallest_cover(pairs, same(pairs), FREE)
    assert found is not None
    assert len(found) == EXACT_MOST // 2


def test_of_more_members_a_cover_is_found_that_has_nobody_to_spare() -> None:
    rng = random.Random(1)
    names = [f"r{number:03}" for number in range(200)]
    pairs = [pair for pair in combinations(names, 2) if rng.random() < 0.02]
    found = smallest_cover(pairs, same(pairs), Limits(190, (frozenset(names[:3]),)))
    assert found is not None
    assert all(found.intersection(pair) for pair in pairs)
    assert not any(all(found.difference({name}).intersection(pair) for pair in pairs) for name in found)
    assert not found.issuperset(names[:3])


def test_of_more_members_none_is_found_where_too_few_may_go() -> None:
    pairs = [(f"r{one:03}", f"r{one + 50:03}") for one in range(50)]
    assert smallest_cover(pairs, same(pairs), Limits(49)) is None


# --- the lighthouse ---------------------------------------------------------------------------------------------------


class Job:
    """Replicas on one lighthouse, which ask when they are told to."""

    def __init__(self, names: str, min_replicas: int = 1) -> None:
        config = LighthouseConfig(min_replicas, Timeouts())
        self.core = LighthouseCore(config, started_ms=STARTED_MS, cluster_id="c", nonces=lambda: 7, now_ms=0)
        self.now_ms = 1_000
        self.said: list[Any] = []
        self.keys: dict[str, QuorumKey] = {}
        self._requests = 0
        self._here: set[str] = set()
        self._progress: dict[str, Progress] = {}
        for name in names:
            self.come(name)

    def come(self, name: str, *, tries_peers: bool = False) -> None:
        self._here.add(name)
        hello = Hello("job", name, 1, f"{name}:1", ready=True, tries_peers=tries_peers)
        self._do(events.HelloReceived(ord(name), hello))

    @property
    def trial(self) -> effects.TryPeers:
        """The last that was asked for."""
        return [order for order in self.said if isinstance(order, effects.TryPeers)][-1]

    def tried(self, name: str, *unreached: str) -> None:
        missed = tuple(Unreached(each, Via.GROUP, "no answer") for each in unreached)
        asked = [order for order in self.said if isinstance(order, effects.TryPeers) and order.stream == ord(name)]
        self._do(events.PeersTried(ord(name), asked[-1].number, missed))

    def ask(self, name: str, *reports: Unreached, step: int = 1, works: bool = True, **other: Any) -> None:
        self._requests += 1
        works = works and not reports
        member = Member(
            name,
            address=f"{name}:1",
            step=step,
            lineage=step,
            live=step > 0,
            needs_configure=not works,
            unreached=reports,
            **other,
        )
        self._do(events.QuorumRequested(ord(name), self._requests, member, self.keys.get(name)))

    def beat(self, name: str, step: int) -> None:
        self._progress[name] = Progress(step=step, phase=Phase.OUTSIDE, since_ms=0, excused=False, slowest_step_ms=0)

    def wait(self, ms: int) -> None:
        for _ in range(0, ms, 100):
            self.now_ms += 100
            for name in self._here:
                self._do(events.BeatReceived(ord(name), 0, self._progress.get(name)))
            self._take(self.core.tick(self.now_ms, STARTED_MS + self.now_ms))

    def _do(self, event: events.LighthouseEvent) -> None:
        self._take(self.core.handle(event, self.now_ms, STARTED_MS + self.now_ms))

    def _take(self, out: list[Any]) -> None:
        self.said += out
        for order in out:
            if isinstance(order, effects.AnswerQuorum):
                self.keys[chr(order.stream)] = order.quorum.key

    @property
    def quorum(self) -> Quorum:
        quorum = self.core.quorum("job")
        assert quorum is not None
        return quorum

    @property
    def members(self) -> str:
        return "".join(self.quorum.replica_ids)

    @property
    def waits(self) -> str:
        return self.core.waiting_for("job")


def group(name: str) -> Unreached:
    return Unreached(name, Via.GROUP, "timed out")


def store(name: str) -> Unreached:
    return Unreached(name, Via.STORE, "refused")


def a_job(names: str, min_replicas: int = 1) -> Job:
    """They have trained together for a step."""
    job = Job(names, min_replicas)
    job.wait(500)
    for step in (1, 2):
        for name in names:
            job.ask(name, step=step, works=step > 1)
        assert job.members == names
    return job


def test_a_quorum_has_no_reports() -> None:
    job = a_job("abc")
    for name in "abc":
        job.ask(name, Unreached("a", Via.STATE), step=3)
    assert all(member.unreached == () for member in job.quorum.members)


def test_one_end_of_a_bad_pair_is_left_out_and_both_sides_are_told() -> None:
    job = a_job("abc")
    job.ask("a", group("b"), step=3)
    job.ask("c", step=3, works=False)
    job.ask("b", group("a"), step=3)
    assert job.members == "ac"
    (warned,) = [order.sentence for order in job.said if isinstance(order, effects.Warned)]
    assert "b is left out of the next quorum: it can't be reached by a (group: timed out; tried again in 5 s)" in warned
    told = [chr(order.stream) for order in job.said if isinstance(order, effects.TellWait)]
    assert sorted(told) == ["a", "b"]
    job.wait(200)
    assert job.waits.startswith("b can't be reached by a (group: timed out; tried again in 4 s)")


def test_half_of_the_members_go_on() -> None:
    job = a_job("abcd")
    for name in "ab":
        job.ask(name, group("c"), group("d"), step=3)
    for name in "cd":
        job.ask(name, group("a"), group("b"), step=3)
    assert job.members == "ab"


def test_the_other_end_is_waited_for_for_a_second() -> None:
    job = a_job("abc")
    job.ask("a", group("c"), step=3)
    job.ask("b", step=3, works=False)
    job.wait(900)
    assert job.waits.startswith("the report of c, 1000 ms at most: c can't be reached by a")
    job.wait(100)
    assert job.members == "ab"


def test_the_report_of_the_other_end_can_change_who_is_left_out() -> None:
    job = a_job("abcd")
    job.ask("d", group("a"), step=3)
    job.ask("b", step=3, works=False)
    job.ask("c", step=3, works=False)
    job.ask("a", group("b"), group("c"), group("d"), step=3)
    assert job.members == "bcd"


def test_who_was_in_no_group_yet_is_left_out_first() -> None:
    job = a_job("bc")
    job.come("a")
    job.ask("a", step=0, works=False)
    for name in "bc":
        job.ask(name, step=3)
    assert job.members == "abc"
    job.ask("a", group("c"), step=0)
    job.ask("c", group("a"), step=3)
    job.ask("b", step=3, works=False)
    assert job.members == "bc"


def test_the_only_holder_of_the_newest_state_stays() -> None:
    job = a_job("abc")
    job.ask("c", group("a"), group("b"), step=4)
    job.ask("a", group("c"), step=3)
    job.ask("b", group("c"), step=3)
    assert job.members == "c"


def test_a_holder_that_has_not_asked_yet_stays_too() -> None:
    job = a_job("abcd")
    for name in "cd":  # they have committed the step that a and b have lost, as their beats say
        job.beat(name, step=3)
    for name in "ab":
        job.ask(name, group("c"), group("d"), step=2)
    job.wait(1_500)
    assert "left out: a can't be reached by c, d" in job.waits or job.waits.startswith("a can't be reached by c, d")
    for name in "cd":
        job.ask(name, step=3, works=False)
    assert job.members == "cd"


def test_who_is_left_out_is_tried_again_after_a_pause_that_doubles() -> None:
    job = a_job("abc")
    for pause_ms in (5_000, 10_000, 20_000):
        job.ask("a", group("b"), step=3)
        job.ask("b", group("a"), step=3)
        job.ask("c", step=3, works=False)
        assert job.members == "ac"
        job.wait(pause_ms - 500)
        for name in "ac":
            job.ask(name, step=3)
        assert job.members == "ac"
        job.wait(500)
        for name in "ac":
            job.ask(name, step=3)
        assert job.members == "abc"


def test_a_group_that_was_built_proves_its_links() -> None:
    job = a_job("abc")
    job.ask("a", group("b"), step=3)
    job.ask("b", group("a"), step=3)
    job.ask("c", step=3, works=False)
    job.wait(5_000)
    for name in "ac":
        job.ask(name, step=4)
    assert job.members == "abc"
    for name in "abc":
        job.ask(name, step=5)
    job.ask("a", group("b"), step=6)
    job.ask("b", group("a"), step=6)
    job.ask("c", step=6, works=False)
    job.wait(4_900)
    for name in "ac":
        job.ask(name, step=7)
    assert job.members == "ac"
    job.wait(100)
    for name in "ac":
        job.ask(name, step=8)
    assert job.members == "abc"  # after 5 s again


def test_a_member_of_the_same_quorum_that_saw_nothing_proves_nothing() -> None:
    job = a_job("abc")
    job.ask("a", group("b"), step=3)
    job.ask("c", step=3)  # it has committed before the link failed
    job.ask("b", group("a"), step=3)
    assert job.members == "ac"


def test_below_min_replicas_none_goes_on_and_all_are_tried_again() -> None:
    job = a_job("ab", min_replicas=2)
    key = job.quorum.key
    for number in (1_000, 2_000, 4_000, 5_000, 5_000):
        job.ask("a", group("b"), step=3)
        job.ask("b", group("a"), step=3)
        assert job.waits.startswith("a set of at least 2 replicas that reach one another and hold the newest state: a")
        job.wait(number - 100)
        assert job.quorum.key == key
        job.wait(200)
        assert job.quorum.key > key
        key = job.quorum.key
        assert job.members == "ab"


def test_a_store_that_was_missed_is_avoided_and_nobody_is_left_out() -> None:
    job = a_job("abc")
    for name in "bc":
        job.ask(name, store("a"), step=3)
    job.ask("a", step=3, works=False)
    assert [(each.replica_id, each.store_failed) for each in job.quorum.members] == [
        ("a", True),
        ("b", False),
        ("c", False),
    ]
    job.wait(5_000)
    for name in "abc":
        job.ask(name, step=4)
    assert not any(each.store_failed for each in job.quorum.members)


def test_who_misses_another_store_as_well_is_left_out() -> None:
    job = a_job("abc")
    for owner in "ab":
        job.ask("c", store(owner), step=3)
        for name in "ab":
            job.ask(name, step=3, works=False)
    assert job.members == "ab"


def test_its_own_store_that_is_dead_leaves_nobody_out_but_one_that_misses_all() -> None:
    job = a_job("abc")
    job.ask("a", store("a"), step=3)
    for name in "bc":
        job.ask(name, step=3, works=False)
    assert job.members == "abc"
    assert job.quorum.members[0].store_failed
    job.ask("a", store("b"), step=3)
    for name in "bc":
        job.ask(name, step=3, works=False)
    assert job.members == "bc"


def test_one_that_can_not_build_a_group_itself_is_left_out_and_named() -> None:
    job = a_job("abc")
    job.ask("c", group("c"), step=3)
    for name in "ab":
        job.ask(name, step=3, works=False)
    assert job.members == "ab"
    assert "c is left out of the next quorum: it can't build a process group itself (group" in str(job.said)
    job.wait(5_000)
    job.ask("c", step=3, works=False)
    for name in "ab":
        job.ask(name, step=4)
    assert job.members == "abc", "it is tried again"


def test_one_that_was_in_no_quorum_puts_nobody_out() -> None:
    """It has met nobody; its own trial says whom it reaches."""
    job = a_job("abc")
    for name in "xy":
        job.come(name)
        job.ask(name, group("a"), step=0)
    for name in "abc":
        job.ask(name, step=4)
    assert job.members == "abcxy"


def test_who_did_not_come_because_it_missed_the_store_is_not_left_out_for_that() -> None:
    job = a_job("abc")
    job.ask("c", store("a"), step=3)
    for name in "ab":
        job.ask(name, group("c"), step=3)
    assert job.members == "abc"
    assert job.quorum.members[0].store_failed


def test_an_old_store_report_holds_nobody_up() -> None:
    job = a_job("abc")
    job.ask("c", store("a"), step=3)
    for name in "ab":
        job.ask(name, step=3, works=False)
    for step in (4, 5):
        for name in "abc":
            job.ask(name, step=step)
        assert job.members == "abc"
    job.ask("c", store("b"), step=6)  # the first one is long over
    for name in "ab":
        job.ask(name, step=6, works=False)
    assert job.members == "abc"


def test_state_servers_leave_nobody_out() -> None:
    job = a_job("abc")
    for _ in range(3):
        for name in "abc":
            job.ask(name, Unreached("a", Via.STATE, "refused"), step=3)
        assert job.members == "abc"


def test_what_survivors_of_a_loss_say_of_one_another_leaves_nobody_out() -> None:
    job = a_job("abc")
    job._do(events.DeathReported(ord("c"), "killed"))
    job.ask("a", group("b"), group("c"), step=3)
    job.ask("b", group("a"), step=3)
    assert job.members == "ab"
    job.ask("a", group("b"), step=3)  # in the next quorum nobody was lost
    job.ask("b", group("a"), step=3)
    assert job.members == "a"


def test_who_is_away_puts_nobody_out_of_a_quorum_that_trains() -> None:
    job = a_job("abc")
    job.ask("b", group("c"), step=3)
    job.ask("c", group("b"), step=3)
    job.ask("a", step=3, works=False)
    assert job.members == "ab"
    job.ask("a", step=4)
    job.ask("b", step=4)
    assert job.members == "ab"


def test_two_that_are_away_put_nobody_out_either() -> None:
    job = a_job("abcd")
    for name in "cd":
        job.ask(name, group("b"), step=3)
    job.ask("b", group("c"), group("d"), step=4)  # the only holder: it stays
    job.ask("a", step=3, works=False)
    assert job.members == "ab"
    for name in "cd":
        job._do(events.StreamClosed(ord(name)))
        job.come(name)  # they have not asked again yet
    job.ask("a", step=4)
    job.ask("b", step=4)
    assert job.members == "ab"


def test_nobody_waits_for_one_that_is_kept_out_and_has_not_asked() -> None:
    job = a_job("abc")
    job.ask("b", group("c"), step=3)
    job.ask("c", group("b"), step=3)
    job.ask("a", step=3, works=False)
    request = max(order.request for order in job.said if isinstance(order, effects.AnswerQuorum))
    job._do(events.RequestWithdrawn(ord("c"), request - 1))
    job.come("c")  # its stream is new, and it has not asked on it yet
    for step in (4, 5):
        job.ask("a", step=step)
        job.ask("b", step=step, works=False)
        job.wait(200)
        assert job.waits == "a replica to ask for a quorum"


def test_a_stranger_that_is_named_is_nobody() -> None:
    job = a_job("ab")
    job.ask("a", group("z"), step=3)
    job.ask("b", step=3, works=False)
    assert job.members == "ab"


def test_what_is_said_twice_of_one_quorum_counts_once() -> None:
    job = a_job("abc")
    for _ in range(4):
        job.ask("a", group("b"), step=3)
    job.ask("b", group("a"), step=3)
    job.ask("c", step=3, works=False)
    job.wait(5_000)
    for name in "ac":
        job.ask(name, step=4)
    assert job.members == "abc"


def test_who_is_kept_out_is_missing_nowhere() -> None:
    job = a_job("abc")
    job.ask("b", group("c"), step=3)
    job.ask("a", step=3, works=False)
    job.wait(1_000)
    assert job.members == "ab"
    job.ask("a", step=4)
    sentence = job.core.wait_sentence("job", job.now_ms)
    assert "not asked: b at b:1" in sentence
    assert "c at c:1" not in sentence


def counts(right: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def counted(*rest: Any) -> Any:
        calls.append(1)
        return right(*rest)

    return counted


def reach_of(job: Job) -> Reach:
    return job.core._jobs["job"]._reach


def test_the_word_of_one_member_proves_no_link_of_another() -> None:
    job = a_job("abc")
    job.ask("a", group("b"), step=3)
    job.ask("b", group("a"), step=3)
    job.ask("c", step=3, works=False)
    job.wait(5_000)
    for name in "ac":
        job.ask(name, step=4)
    assert job.members == "abc"
    for name in "ca":
        job.ask(name, step=5)
    assert len(reach_of(job)._links) == 1
    job.ask("b", step=5)
    assert len(reach_of(job)._links) == 0


def test_a_reason_is_kept_short() -> None:
    job = a_job("ab")
    job.ask("a", Unreached("b", Via.GROUP, "x" * 4_000), step=3)
    link = reach_of(job)._links.link("a", "b")
    assert link is not None
    assert len(link.reports["a"]) < 320


def test_a_member_that_lost_its_answer_is_given_it_again_while_a_store_is_avoided() -> None:
    job = a_job("abc")
    for name in "bc":
        job.ask(name, store("a"), step=3)
    held = job.keys["a"]
    job.ask("a", step=3, works=False)
    key = job.quorum.key
    assert job.quorum.members[0].store_failed
    job._do(events.StreamClosed(ord("a")))
    job.come("a")
    job.keys["a"] = held
    job.ask("a", step=3, works=False)
    assert job.quorum.key == key
    assert job.keys["a"] == key
    assert not [order for order in job.said if isinstance(order, effects.NotifyLoss) and order.notice.key == key]


def test_the_cover_is_found_once_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    job = a_job("abcd", min_replicas=3)
    found: list[int] = []
    right = reach.smallest_cover
    monkeypatch.setattr(reach, "smallest_cover", counts(right, found))
    for name in "ab":
        job.ask(name, group("c"), group("d"), step=3)
    for name in "cd":
        job.ask(name, group("a"), group("b"), step=3)
    before = len(found)
    for _ in range(8):
        job.wait(100)
    assert job.waits.startswith("a set of at least 3 replicas")
    assert len(found) == before
    job.wait(1_000)
    assert job.members == "abcd"  # all are tried again


def test_what_is_gone_is_looked_for_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    right = BadLinks.forget_gone
    monkeypatch.setattr(BadLinks, "forget_gone", counts(right, looks))
    job = a_job("abcd")
    for name in "abc":
        job.ask(name, group("d"), step=3)
    assert len(looks) == 1


def test_of_many_that_are_left_out_all_are_named_and_nobody_is_told_of_each() -> None:
    names = [chr(number) for number in range(ord("A"), ord("A") + 60)]
    job = a_job("".join(names))
    for name in names[30:]:
        job.ask(name, *(group(other) for other in names[:30]), step=3)
    for name in names[:30]:
        job.ask(name, *(group(other) for other in names[30:]), step=3)
    assert len(job.quorum.members) == 30
    warned = [order.sentence for order in job.said if isinstance(order, effects.Warned)]
    assert len(warned) == 21
    out = set(names) - set(job.quorum.replica_ids)
    assert all(any(name in each.partition(" left out of")[0] for each in warned) for name in out)
    told = [order.stream for order in job.said if isinstance(order, effects.TellWait)]
    assert all(told.count(ord(name)) <= 3 for name in job.quorum.replica_ids)


def test_the_own_word_of_one_that_missed_its_own_store_proves_it() -> None:
    links = BadLinks()
    links.report("b", "b", "store: refused", QuorumKey(1, 1), 0)
    links.prove("a", {"a"}, QuorumKey(2, 1))
    assert links.counted(100, None) == {"b": {"b"}}
    links.prove("b", {"a", "b"}, QuorumKey(2, 1))
    assert links.counted(100, None) == {}
    assert len(links) == 0


def test_of_many_one_that_misses_its_own_store_is_left_out_too() -> None:
    pairs = [(f"r{number:03}", "r999") for number in range(40)] + [("r005", "r005")]
    assert smallest_cover(pairs, same(pairs), FREE) == {"r999", "r005"}


def test_a_name_that_starts_again_goes_on_with_its_pause() -> None:
    lives = [f"n:{number:08}-1111-4222-8333-444444444444" for number in range(3)]
    links = BadLinks()
    for number, (name, length_ms) in enumerate(zip(lives, (5_000, 10_000, 20_000), strict=True)):
        now_ms = number * 60_000
        links.report("a", name, "no answer", QuorumKey(number, 1), now_ms)
        link = links.link("a", name)
        assert link is not None
        assert link.pause.length_ms == length_ms
        assert links.counted(now_ms, None) == {"a": {name}, name: {"a"}}
        links.forget_gone({"a"}, now_ms + 1_000)
        assert links.counted(now_ms + 1_000, None) == {}
    links.prove("a", {lives[2]}, QuorumKey(9, 1))  # it was in a group that was built
    links.report("a", lives[2], "no answer", QuorumKey(10, 1), 200_000)
    link = links.link("a", lives[2])
    assert link is not None
    assert link.pause.length_ms == 5_000


def test_what_counts_is_the_same_when_it_is_found_anew() -> None:
    rng = random.Random(3)
    links = BadLinks()
    now_ms = 0
    for number in range(400):
        now_ms += rng.randrange(200)
        one, other = rng.sample("abcdefgh", 2)
        key = QuorumKey(number // 20, 1)
        match rng.randrange(4):
            case 0:
                links.prove(one, set(rng.sample("abcdefgh", 3)) - {one}, key)
            case 1:
                links.forget_gone("abcdefgh".replace(one, ""), now_ms)
            case _:
                links.report(one, other, "no answer", key, now_ms)
        kept = links.counted(now_ms, None)
        kept = {name: set(others) for name, others in kept.items()}
        links.changed()
        assert links.counted(now_ms, None) == kept


# --- trials -----------------------------------------------------------------------------------------------------------


def a_newcomer(job: Job, name: str = "n") -> None:
    job.come(name, tries_peers=True)
    job.ask(name, step=0, works=False)
    job.wait(100)


def test_a_newcomer_is_let_in_when_it_has_reached_its_peers() -> None:
    job = a_job("ab")
    a_newcomer(job)
    assert [peer.replica_id for peer in job.trial.peers] == ["a", "b"]
    for name in "ab":
        job.ask(name, step=3)
    assert job.members == "ab"  # nobody waits for its trial
    job.tried("n")
    for name in "ab":
        job.ask(name, step=4)
    assert job.members == "abn"


def test_one_that_does_not_reach_them_is_kept_out_and_told_why() -> None:
    job = a_job("ab")
    a_newcomer(job)
    job.tried("n", "b")
    for name in "ab":
        job.ask(name, step=3)
    assert job.members == "ab"
    job.wait(100)
    assert job.waits == "n can't reach b (no answer; it tries again in 1 s)"
    sentence = job.core.wait_sentence("job", job.now_ms)
    assert sentence == f"left out: {job.waits}; the others train on; ends when the link works again"
    told = [chr(order.stream) for order in job.said if isinstance(order, effects.TellWait)]
    assert sorted(told) == ["b", "n"]
    job.wait(1_000)
    job.tried("n")
    for name in "ab":
        job.ask(name, step=4)
    assert job.members == "abn"


def test_whom_the_holder_of_the_newest_state_does_not_reach_goes_in_its_place_and_is_told_why() -> None:
    job = a_job("ab")
    job.come("n", tries_peers=True)
    job.ask("n", step=9, works=False)
    job.wait(100)
    job.tried("n", "b")
    for name in "ab":
        job.ask(name, step=3)
    assert job.members == "an"
    (warned,) = [order.sentence for order in job.said if isinstance(order, effects.Warned)]
    assert warned.startswith("b is left out of the next quorum: it can't be reached by n (no answer)")
    told = [chr(order.stream) for order in job.said if isinstance(order, effects.TellWait)]
    assert sorted(told) == ["b", "n"]


def test_a_trial_that_may_find_a_set_is_waited_for_before_all_are_tried_again() -> None:
    """c has to be in it, for it trained, and is torn; a has the newest whole state, and does not reach c."""
    job = a_job("c")
    a_newcomer(job, "a")
    job.tried("a", "c")
    job.ask("c", step=3, torn=True)
    assert job.waits.startswith("a set of at least 1 replicas that reach one another and hold the newest state")
    job.wait(800)
    a_newcomer(job, "b")
    job.wait(300)
    assert job.waits == "the trial of b, which may complete a set"
    job.tried("b")
    job.wait(100)
    assert job.members == "bc"


def test_a_trial_that_finds_no_set_is_not_waited_for_longer_than_it_may_take() -> None:
    job = a_job("c")
    a_newcomer(job, "a")
    job.tried("a", "c")
    job.ask("c", step=3, torn=True)
    job.wait(800)
    a_newcomer(job, "b")
    job.wait(5_400)
    assert job.members == "abc"


def test_two_newcomers_that_miss_one_member_do_not_put_it_out() -> None:
    job = a_job("ab")
    for name in "mn":
        a_newcomer(job, name)
        job.tried(name, "b")
    for name in "ab":
        job.ask(name, step=3)
    assert job.members == "ab"


def test_one_that_failed_because_of_a_bad_member_is_let_in_where_the_others_need_it() -> None:
    job = a_job("ab", min_replicas=2)
    a_newcomer(job)
    job.tried("n", "b")
    job.ask("a", group("b"), step=3)
    job.ask("b", group("a"), step=3)
    assert job.members == "an"


def test_where_no_quorum_fits_without_it_it_is_let_in_after_a_hold() -> None:
    job = a_job("ab", min_replicas=2)
    a_newcomer(job)
    job.tried("n", "a")
    job._do(events.DeathReported(ord("b"), "killed"))
    job.ask("a", step=3, works=False)
    assert job.waits.startswith("a set of at least 2 replicas that reach one another and hold the newest state: ")
    job.wait(1_000)
    assert job.members == "an"


def test_one_that_alone_holds_the_newest_state_is_waited_for_until_its_trial_is_over() -> None:
    job = a_job("ab")
    job.come("n", tries_peers=True)
    job.ask("n", step=5)
    job.wait(100)
    for name in "ab":
        job.ask(name, step=3, works=False)
    assert job.waits == "the trial of n, which alone has the newest state"
    job.tried("n", "b")
    assert job.members == "an"


def test_the_very_first_quorum_needs_no_trial() -> None:
    job = Job("")
    job.wait(500)
    for name in "ab":
        job.come(name, tries_peers=True)
    for name in "ab":
        job.ask(name, step=0, works=False)
    assert job.members == "ab"
    assert not [order for order in job.said if isinstance(order, effects.TryPeers)]


def test_one_that_is_left_out_by_a_report_is_tried_when_its_pause_is_over() -> None:
    job = a_job("a")
    job.come("n", tries_peers=True)
    job.ask("n", step=0, works=False)
    job.wait(100)
    job.tried("n")
    job.ask("a", step=3)
    assert job.members == "an"
    job.ask("a", group("n"), step=3)
    job.ask("n", group("a"), step=0)
    assert job.members == "a"
    number = job.trial.number
    job.wait(4_900)
    assert job.trial.number == number
    job.wait(200)
    assert job.trial.number == number + 1
    job.ask("a", step=4)
    assert job.members == "a"
    job.tried("n")
    job.ask("a", step=5)
    assert job.members == "an"


def test_a_newcomer_in_its_trial_is_no_majority() -> None:
    job = a_job("a")
    for name in "mn":
        a_newcomer(job, name)
    job.ask("a", step=3)
    assert job.members == "a"


def test_the_rule_is_applied_once_for_all_newcomers_whose_trials_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    job = a_job("ab")
    for name in "lmn":
        job.come(name, tries_peers=True)
        job.ask(name, step=0, works=False)
    job.wait(100)
    asked = {order.stream: order.number for order in job.said if isinstance(order, effects.TryPeers)}
    looks: list[int] = []
    right = Job_._form
    monkeypatch.setattr(Job_, "_form", counts(right, looks))
    for name in "lmn":
        assert not looks
        job._do(events.PeersTried(ord(name), asked[ord(name)], ()))
    assert len(looks) == 1
    for name in "ab":
        job.ask(name, step=3)
    assert job.members == "ablmn"
