"""The protocol's pages name every message, every state and every integer of the word that the code has."""

from __future__ import annotations

import dataclasses
import enum
import re
from pathlib import Path

import pytest

from tft_coord.core.standing import State, Word
from tft_coord.core.step import Healing, Phase
from tft_coord.core.step.recovery import VOTE_OF
from tft_coord.wire import coordination_pb2 as pb

DOCS = Path(__file__).parents[1] / "docs"
STREAMS = ("ToLighthouse", "FromLighthouse", "ToManagerServer", "FromManagerServer")


def page(name: str) -> str:
    return (DOCS / "protocol" / f"{name}.md").read_text()


@pytest.mark.parametrize("stream", STREAMS)
def test_the_table_of_the_wire_names_every_message_of_the_streams(stream: str) -> None:
    fields = pb.DESCRIPTOR.message_types_by_name[stream].fields
    # The lighthouse asks for a quorum's members by its key alone, which the table says in words.
    names = {kind.name for field in fields if (kind := field.message_type) is not None} - {"QuorumKey"}
    assert names
    assert {name for name in names if f"`{name}`" not in page("index")} == set()


@pytest.mark.parametrize(
    ("name", "states"), [("the-step", Phase), ("the-step", Healing), ("sessions-and-quorums", State)]
)
def test_the_tables_name_every_state(name: str, states: type[enum.Enum]) -> None:
    rows = set(re.findall(r"^\| ([A-Z]+) \|", page(name), re.MULTILINE))
    assert {state.name for state in states} - rows == set()


def test_the_table_of_the_word_names_its_integers_in_order() -> None:
    table = page("sessions-and-quorums").split("### The control word")[1].split("The words are added up")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [each.name for each in dataclasses.fields(Word)]


def test_the_table_of_the_stages_names_every_stage_and_its_vote() -> None:
    table = page("the-step").split("### The receiver")[1].split("### ")[0]
    rows = re.findall(r"^\| (\w+) \| [^|]*\| ([^|]*)\|", table, re.MULTILINE)
    votes = {stage: purposes for stage, purposes in rows if stage != "stage"}
    assert list(votes) == [stage.value for stage in VOTE_OF]
    assert [purpose.name for stage, purpose in VOTE_OF.items() if f"`{purpose.name}`" not in votes[stage.value]] == []


def test_every_diagram_is_inline_and_takes_its_colours_from_the_style_sheet() -> None:
    pages = {path: path.read_text() for path in DOCS.rglob("*.md") if "_build" not in path.parts}
    for diagram in sorted((DOCS / "_static").glob("*.svg")):
        text = diagram.read_text()
        assert '<svg class="diagram"' in text, f"{diagram.name} needs the class of docs/_static/diagrams.css"
        assert not re.search(r"<style|#[0-9a-fA-F]{6}", text), f"{diagram.name} sets colours of its own"
        holders = [path for path, said in pages.items() if f"_static/{diagram.name}" in said]
        assert holders, f"{diagram.name} is on no page"
        for path in holders:
            assert f"_static/{diagram.name})" not in pages[path], f"{path.name} has {diagram.name} as an image"
