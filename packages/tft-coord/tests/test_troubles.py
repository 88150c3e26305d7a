"""What `tft doctor` says of a job: who is lost, silent or left out, and what to do."""

from __future__ import annotations

from tft_coord.core.liveness import Replica
from tft_coord.core.troubles import Troubles

STOPPED = "its process is stopped: rank 0 is stopped"
REMEDY = "Continue it (SIGCONT) if it is stopped, check its log and its network, or restart it"


def replica(name: str, heard_ms: int, lost_ms: int | None = None) -> Replica:
    found = Replica(name, 1, f"{name}:1", heard_ms, stream=1, heard_ms=heard_ms)
    if lost_ms is not None:
        found.lost, found.lost_ms, found.fell_silent = STOPPED, lost_ms, True
    return found


def look(
    *replicas: Replica,
    now_ms: int,
    members: tuple[str, ...] = (),
    out: tuple[str, ...] = (),
    troubles: Troubles | None = None,
) -> tuple[str, ...]:
    troubles = troubles or Troubles(5_000)
    troubles.look(
        replicas, members, "a replica to ask for a quorum", out, lambda name: f"{name} can't be reached by b", now_ms
    )
    return troubles.warnings


def test_a_job_that_is_well_has_none() -> None:
    assert look(replica("a", 99_000), replica("b", 99_500), now_ms=100_000, members=("a", "b")) == ()


def test_a_member_that_is_silent_is_named_though_nobody_waits_for_it() -> None:
    (warning,) = look(replica("a", 81_000), now_ms=100_000, members=("a",))
    assert warning == f"member a has been silent for 19 s. {REMEDY}"


def test_one_that_was_lost_is_named_for_a_minute_or_for_as_long_as_it_is_there() -> None:
    lost = replica("a", 70_000, lost_ms=75_000)
    said = f"a was lost 25 s ago ({STOPPED}) and has not come back. {REMEDY}"
    assert look(lost, replica("b", 100_000), now_ms=100_000, members=("b",)) == (said,)
    assert len(look(lost, replica("b", 140_000), now_ms=140_000, members=("b",))) == 1, "it is still stopped"
    lost.stream = None
    assert look(lost, replica("b", 140_000), now_ms=140_000, members=("b",)) == ()
    assert len(look(lost, now_ms=140_000, members=("a",))) == 1


def test_one_that_is_known_to_be_dead_or_has_left_or_was_replaced_is_not() -> None:
    dead, left = replica("a", 70_000, lost_ms=75_000), replica("b", 70_000, lost_ms=75_000)
    dead.dead, left.left = True, "drained"
    names = [f"c:0f3a9c1d-1234-4abc-8def-0123456789a{each}" for each in "bc"]
    replaced = replica(names[0], 70_000, lost_ms=75_000)
    assert look(dead, left, replaced, replica(names[1], 100_000), now_ms=100_000, members=("a", "b")) == ()


def test_one_that_is_left_out_is_named_with_since_when_and_by_whom() -> None:
    troubles = Troubles(5_000)
    a = replica("a", 200_000)
    for now_ms in range(0, 20_000, 1_000):
        is_tried = now_ms == 9_000  # again, for a moment, in vain
        said = look(a, now_ms=now_ms, out=() if is_tried else ("a",), troubles=troubles)
        assert bool(said) == (now_ms >= 2_000 and not is_tried)
    assert said == (
        "left out of the quorum for 19 s: a can't be reached by b. Check the names, the addresses, the interfaces "
        "and the firewalls on both sides",
    )
    assert look(a, now_ms=20_000, troubles=troubles) == ()
