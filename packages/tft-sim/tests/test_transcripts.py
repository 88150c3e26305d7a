"""The golden transcripts: each is a page to read, and what the cores really do.

After a change on purpose: `pytest packages/tft-sim/tests/test_transcripts.py --rewrite-transcripts`, and read the
difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tft_sim.scenario import ScenarioError, parse, play

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
NEEDED = {
    "join",
    "restart",
    "two_joins",
    "newcomer",
    "death",
    "slow_joiner",
    "shrink_only",
    "split_brain",
    "commit_failure",
    "last_holder",
    "last_holder_without_memory",
    "lost_state",
    "nobody_names_the_quorum",
    "job_end",
    "many_deaths",
    "heals_over_group",
    "silence",
    "silent_source",
    "stragglers",
    "wrong_clock",
    "scenario_01_snapshot",
    "scenario_02_verdict",
    "scenario_03_lighthouse_without_memory",
    "scenario_04_sessions",
    "scenario_05_two_lighthouses",
    "scenario_06_members_that_differ",
    "scenario_07_same_list",
    "scenario_08_notices",
    "scenario_09_partial_commit",
    "scenario_10_long_healing",
    "scenario_11_hangs",
    "scenario_12_foreign_states",
    "scenario_13_syncs_in_flight",
    "scenario_14_sick_lighthouse",
    "scenario_15_foreign_lighthouse",
    "scenario_16_mixed_job",
    "scenario_17_rank_on_another_host",
    "scenario_18_shrinking_to_nothing",
    "scenario_19_unequal_groups",
    "scenario_20_leaving",
    "scenario_21_partial_connectivity",
    "standing_01_steady",
    "standing_02_recall",
    "standing_03_words",
    "standing_04_alone",
    "standing_05_leaving",
    "standing_06_lighthouse_away",
    "standing_07_nobody_starts_over",
    "standing_08_as_before",
    "standing_09_syncs",
    "standing_10_dies_before_its_word",
    "standing_11_dies_after_its_word",
}


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_what_happens_is_what_is_written(path: Path, request: pytest.FixtureRequest) -> None:
    written = path.read_text()
    happened = play(written)
    if request.config.getoption("--rewrite-transcripts", default=False):
        path.write_text(happened)
    else:
        assert happened == written


def test_no_transcript_is_missing() -> None:
    assert {path.stem for path in TRANSCRIPTS} == NEEDED


def test_each_is_on_the_page_of_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "transcripts.md").read_text()
    assert [path.name for path in TRANSCRIPTS if f"/transcripts/{path.name}\n" not in page] == []


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_each_begins_with_a_sentence(path: Path) -> None:
    first = parse(path.read_text())[0]
    assert first.comment.startswith("# ")
    assert first.comment.endswith((".", ":"))


def test_an_unknown_command_is_named() -> None:
    with pytest.raises(ScenarioError, match="there is no command 'explode'; there are abort, beat, break"):
        play("explode a\n----\n")


def test_a_block_without_its_line_is_named() -> None:
    with pytest.raises(ScenarioError, match="a block needs one command and '----' below it"):
        play("cluster\n")


def test_what_never_happens_is_named() -> None:
    with pytest.raises(ScenarioError, match="nothing like 'a commits' happened"):
        play("cluster min_replicas=2\n----\n\nstart a\n----\n\nuntil a commits\n----\n")
