"""Every order of a few events on the lighthouse's core and on the group's, and that the search finds what is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tft_coord.core.commit import Votes
from tft_coord.core.lighthouse import Job
from tft_coord.core.progress import HangWatch
from tft_coord.core.types import Verdict
from tft_coord.testing import copied
from tft_sim.__main__ import main
from tft_sim.explore import ExplorationError, explore
from tft_sim.worlds import KINDS, STARTS, GroupWorld, LighthouseWorld


@pytest.mark.parametrize("start", STARTS)
def test_two_replicas_in_every_order_of_three_events(start: str) -> None:
    seen = explore(lambda: LighthouseWorld("ab", start=start), 3)
    assert seen.num_states > 200


@pytest.mark.parametrize("start", STARTS)
def test_three_replicas_in_every_order_of_two_events(start: str) -> None:
    seen = explore(lambda: LighthouseWorld("abc", start=start, min_replicas=2), 2)
    assert seen.num_states > 50


def test_a_group_in_every_order_of_three_events() -> None:
    assert explore(GroupWorld, 3).num_states > 200


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("num_replicas", "num_events"), [(1, 6), (2, 6), (3, 5)])
def test_up_to_three_replicas_in_every_order_of_several_events(num_replicas: int, num_events: int, start: str) -> None:
    """Three in every order of six take hours: scripts/explore_compiled.py."""
    run = _search("--explore", num_events, "--replicas", num_replicas, "--start", start)
    assert run.returncode == 0, run.stderr


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kinds", ["ask die leave hang wake grace", "ask break hello restart leave"])
def test_three_replicas_in_every_order_of_six_events_of_a_few_kinds(kinds: str, start: str) -> None:
    explore(lambda: LighthouseWorld("abc", start=start), 6, kinds=kinds.split())


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_group_in_every_order_of_six_events() -> None:
    explore(GroupWorld, 6)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_compiled_it_sees_the_same() -> None:
    script = Path(__file__).parents[3] / "scripts" / "explore_compiled.py"
    run = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "2 replicas, trained: 3053 states after every order of 3 events" in run.stdout


def _search(*arguments: object, broken: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which may be forked; `broken`: what is done to the cores before."""
    code = f"import sys\nfrom tft_sim.__main__ import main\n{broken}\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("--explore 2 --seeds 5", "--explore and --seeds exclude each other; give one"),
        ("--explore 2 --seed 0", "--explore and --seed exclude each other"),
        ("--explore 2 --story", "--explore and --story exclude each other"),
        ("--seeds 5 --kinds ask", "--kinds needs --explore; give --explore too"),
        ("--replicas 3", "--replicas needs --explore"),
        ("--explore 0", "--explore is 0 of 3 replicas; give at least 1"),
        ("--processes -1", "--processes is -1; give at least 1, or 0 for one for each core"),
    ],
)
def test_what_would_be_ignored_or_cannot_be_is_refused(
    call: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(call.split())
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1


def test_several_processes_see_what_one_sees() -> None:
    call = ("--explore", 4, "--replicas", 2, "--start", "joining", "--kinds", "ask,die,break,hello,grace")
    one, two = (_search(*call, "--processes", processes) for processes in (1, 2))
    assert one.stdout.count("\n") == 4, one.stderr
    assert two.stdout == one.stdout


ALL_MAY_NOT_HANG = """
from tft_sim.worlds import LighthouseWorld

def happen(self, choice, happen=LighthouseWorld.happen):
    happen(self, choice)
    assert not all(each.hangs for each in self._replicas.values()), "all hang"

LighthouseWorld.happen = happen
"""


def test_what_breaks_in_one_of_several_processes_is_shown() -> None:
    call = ("--explore", 3, "--replicas", 3, "--start", "trained", "--kinds", "hello,ask,break,die,leave,hang,silence")
    run = _search(*call, "--processes", 2, broken=ALL_MAY_NOT_HANG)
    assert run.returncode == 1
    assert run.stdout.count("\n") == 2, "no order of two breaks it"
    assert "3 replicas, trained: hang a → hang b → hang c: all hang" in run.stderr


def test_the_shortest_sequence_that_breaks_something_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def tells_nobody(self: Job, *_: object, **__: object) -> list[Any]:
        return []

    monkeypatch.setattr(Job, "_break_quorum", tells_nobody)
    with pytest.raises(ExplorationError, match=r"P3: b holds .*, which a left, and got no loss notice") as caught:
        explore(lambda: LighthouseWorld("ab", start="trained"), 3)
    assert caught.value.path == ("die a",)


def test_who_hangs_and_is_not_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HangWatch, "hung", lambda *_: None)
    with pytest.raises(ExplorationError, match=r"H2: a hangs since .* and is not lost") as caught:
        explore(lambda: LighthouseWorld("ab", start="trained"), 2)
    assert caught.value.path == ("hang a",)


def test_a_loss_of_one_that_has_left_and_may_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    released = Job._release_left

    def watches_on(self: Job, now_ms: int) -> list[Any]:
        serving = set(self._serving)
        out = released(self, now_ms)
        for replica_id in serving - self._serving:
            self.liveness.replicas[replica_id].serves = True
        return out

    monkeypatch.setattr(Job, "_release_left", watches_on)
    with pytest.raises(ExplorationError, match=r"L1: a session .* is reported lost after it left") as caught:
        explore(lambda: LighthouseWorld("ab", start="trained"), 3)
    assert caught.value.path[0] == "leave a"


def test_a_copy_of_a_world_goes_its_own_way() -> None:
    for world in (LighthouseWorld("ab", start="trained"), GroupWorld()):
        before = world.state()
        for choice in world.choices():
            copy = copied(world)
            assert copy.state() == before
            copy.happen(choice)
            copy.calm_down()
            assert world.state() == before


def test_what_remembers_its_surroundings_is_not_copied() -> None:
    world = GroupWorld()
    with pytest.raises(TypeError, match="can't be copied into another world"):
        copied([lambda: world])


def test_the_command_tries_every_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--explore", "1", "--replicas", "1"]) == 0
    told = capsys.readouterr().out
    assert "1 replicas, trained: " in told
    assert "a group of 2 ranks: 10 states after every order of 1 events, 9 tried" in told
    assert main(["--explore", "1", "--replicas", "1", "--start", "trained", "--kinds", "ask,leave"]) == 0
    assert capsys.readouterr().out == "1 replicas, trained: 3 states after every order of 1 events, 2 tried\n"
    for wrong, said in (
        (["--explore", "1", "--replicas", "4"], "give at least 1, of 1 to 3"),
        (["--explore", "1", "--kinds", "ask,dye"], "--kinds is ask,dye; of the lighthouse's events there are hello,"),
    ):
        with pytest.raises(SystemExit):
            main(wrong)
        assert said in capsys.readouterr().err


def test_an_order_that_breaks_something_is_shown_by_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(HangWatch, "hung", lambda *_: None)
    assert main(["--explore", "2", "--replicas", "2", "--start", "trained", "--kinds", "hang"]) == 1
    assert "2 replicas, trained: hang a: H2: a hangs since" in capsys.readouterr().err


def test_the_kinds_are_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    choices = LighthouseWorld.choices

    def noted(self: LighthouseWorld) -> Sequence[str]:
        found = choices(self)
        seen.update(choice.split()[0] for choice in found)
        return found

    monkeypatch.setattr(LighthouseWorld, "choices", noted)
    explore(lambda: LighthouseWorld("ab", start="trained"), 2)
    assert seen == set(KINDS)


def test_a_verdict_that_changes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cast = Votes.cast

    def always_yes(self: Votes, *arguments: Any, **said: bool) -> list[tuple[int, int, Verdict]]:
        return [(call, rank, Verdict(yes=True)) for call, rank, _ in cast(self, *arguments, **said)]

    monkeypatch.setattr(Votes, "cast", always_yes)
    with pytest.raises(ExplorationError, match="I5: the verdict is yes with votes"):
        explore(GroupWorld, 5)
