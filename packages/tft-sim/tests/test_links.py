"""The simulator's links between members, and the invariants about them."""

from __future__ import annotations

import pytest

from tft_coord.core.types import Hello, Member, Quorum, QuorumKey, Unreached, Via
from tft_sim import InvariantError, VirtualClock
from tft_sim.group import SimulatedGroup
from tft_sim.invariants import Contribution, Held, Invariants
from tft_sim.link_faults import is_connected_enough
from tft_sim.links import FAILS_AFTER_MS, Links, all_of, both_ways
from tft_sim.liveness_truth import LivenessTruth

FIRST, SECOND = QuorumKey(1, 1), QuorumKey(2, 2)


class TestGroup:
    """Its members need links."""

    def meets(self, store: str = "a") -> tuple[VirtualClock, Links, SimulatedGroup]:
        clock, links = VirtualClock(), Links()
        group = SimulatedGroup(
            FIRST, 0, ("a", "b", "c"), clock, Invariants(), lambda: 5, lambda *_: False, links, store
        )
        links.on_change = group.update
        return clock, links, group

    def test_who_uses_a_bad_link_finds_out_after_a_while_and_says_whom(self) -> None:
        clock, links, group = self.meets()
        links.cut([("a", "b", Via.GROUP)])
        waiters = [group.join(name) for name in ("a", "b", "c")]
        clock.run_until(FAILS_AFTER_MS)
        assert [waiter.done for waiter in waiters] == [True, False, False]
        assert not waiters[0].value
        assert [(each.replica_id, each.via) for each in group.unreached_by("a")] == [("b", Via.GROUP)]
        assert group.unreached_by("b") == []

    def test_a_link_that_works_again_in_time_was_never_bad(self) -> None:
        clock, links, group = self.meets()
        links.cut(both_ways("b", "c"))
        waiters = [group.join(name) for name in ("a", "b", "c")]
        clock.run_until(500)
        links.mend()
        assert [waiter.value for waiter in waiters] == [True] * 3

    def test_a_reduction_fails_where_a_link_does(self) -> None:
        clock, links, group = self.meets()
        for name in ("a", "b", "c"):
            group.join(name)
        links.cut(both_ways("b", "c"))
        waiters = [
            group.reduce(1, Contribution(name, Held(3, 103, "w"), "g", "bucket 0", divide_by=3.0))
            for name in ("a", "b", "c")
        ]
        clock.run_until(FAILS_AFTER_MS)
        assert [waiter.done for waiter in waiters] == [False, True, True]
        assert [each.replica_id for name in "bc" for each in group.unreached_by(name)] == ["c", "b"]

    def test_who_does_not_reach_the_store_says_so(self) -> None:
        clock, links, group = self.meets()
        links.cut([("c", "a", Via.STORE)])
        waiters = [group.join(name) for name in ("a", "b", "c")]
        clock.run_until(FAILS_AFTER_MS)
        assert [waiter.done for waiter in waiters] == [False, False, True]
        assert [(each.replica_id, each.via) for each in group.unreached_by("c")] == [("a", Via.STORE)]


def test_a_dead_store_is_reached_by_nobody() -> None:
    assert sorted(all_of("a", "abc", Via.STORE), key=str) == [(name, "a", Via.STORE) for name in "abc"]


def test_who_can_go_on() -> None:
    assert is_connected_enough("ab", both_ways("a", "b"), 1)
    assert not is_connected_enough("ab", both_ways("a", "b"), 2)
    assert is_connected_enough("abc", both_ways("a", "b"), 2)
    assert not is_connected_enough("abc", all_of("a", "abc"), 2)


class TestAttendance:
    """R2: who may be left out."""

    def liveness(self) -> LivenessTruth:
        liveness = LivenessTruth(1)
        for stream, name in enumerate("abc", start=1):
            liveness.welcomed(Hello("j", name, 1, f"{name}:1", ready=True), stream)
        return liveness

    def asked(self, liveness: LivenessTruth, name: str, *unreached: str, step: int = 3) -> Member:
        reports = tuple(Unreached(other, Via.GROUP) for other in unreached)
        member = Member(name, session=1, step=step, lineage=step, needs_configure=bool(reports), unreached=reports)
        liveness.asked(member, "abc".index(name) + 1, FIRST, (), 1_000)
        return member

    def formed(self, liveness: LivenessTruth, members: dict[str, Member], names: str) -> None:
        previous = Quorum(FIRST, tuple(members[name] for name in "abc"))
        liveness.formed(Quorum(SECOND, tuple(members[name] for name in names)), previous, 1_100)

    def test_one_end_of_a_bad_pair_may_be(self) -> None:
        liveness = self.liveness()
        reports = {"a": "b", "b": "a", "c": ""}
        members = {name: self.asked(liveness, name, *other) for name, other in reports.items()}
        self.formed(liveness, members, "ac")

    @pytest.mark.parametrize(("names", "words"), [("a", "reach all of"), ("c", "would be enough")])
    def test_nobody_else_may(self, names: str, words: str) -> None:
        liveness = self.liveness()
        star = {"a": "c", "b": "c", "c": "ab"}
        reports = star if names == "c" else {"a": "b", "b": "a", "c": ""}
        members = {name: self.asked(liveness, name, *other) for name, other in reports.items()}
        with pytest.raises(InvariantError, match=words) as broken:
            self.formed(liveness, members, names)
        assert broken.value.invariant == "R2"

    def test_the_only_holder_may_not(self) -> None:
        liveness = self.liveness()
        members = {"a": self.asked(liveness, "a", "b"), "b": self.asked(liveness, "b", "a", step=4)}
        members["c"] = self.asked(liveness, "c")
        with pytest.raises(InvariantError, match=r"continue without any of \['b'\], which hold step 4"):
            self.formed(liveness, members, "ac")
