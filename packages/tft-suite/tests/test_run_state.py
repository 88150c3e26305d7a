"""What one watches, live or in lines."""

from __future__ import annotations

from io import StringIO
from signal import SIGKILL, SIGSEGV

from demo_script import a_good_run, committed, done, ended, healing, killed, started
from rich.console import Console

from tft_suite.demo.events import Event, ReplicaFailed, StepDiscarded
from tft_suite.demo.run_state import RunState, State
from tft_suite.demo.view import LineView, LiveView, picture, view_for


def story_of(*events: Event, replicas: int = 3) -> RunState:
    run_state = RunState(replicas)
    for event in events:
        run_state.apply(event)
    return run_state


def test_the_states_of_a_replica() -> None:
    life: list[tuple[Event, State]] = [
        (started(1, 0.0), State.STARTING),
        (healing(1, 1.0), State.HEALING),
        (committed(1, 1, 1.1), State.TRAINING),
        (killed(1, 1, 1.2), State.DEAD),
        (ended(1, 1.3, -SIGKILL), State.DEAD),
        (started(1, 1.4), State.STARTING),
        (healing(1, 2.0), State.HEALING),
        (committed(1, 3, 2.1), State.TRAINING),
        (done(1, 3, 2.2), State.DONE),
        (ended(1, 2.3), State.DONE),
    ]
    run_state = RunState(3)
    for event, state in life:
        run_state.apply(event)
        assert run_state.replicas[1].state is state
    assert run_state.replicas[1].num_starts == 2
    assert run_state.replicas[1].is_gone


def test_the_notes_tell_the_run_with_times() -> None:
    notes = [f"{note.at_s:.1f} {note.text}" for note in story_of(*a_good_run()).notes]
    assert [note for note in notes if "replica 1" in note or "participants" in note] == [
        "0.0 replica 1 starts (pid 1001)",
        "1.0 replica 1 commits step 1, its first",
        "4.0 replica 1 is killed (kill -9) after its commit of step 4",
        "4.0 replica 1 starts again (pid 1001)",
        "5.0 participants 3 -> 2 in step 5",
        "5.5 replica 1 heals from a peer",
        "6.5 replica 1 commits step 6, its first since its death 2.5 s ago",
        "7.0 participants 2 -> 3 in step 7",
        "10.5 replica 1 is at its last step, 10",
    ]


def test_what_went_wrong_is_told_too() -> None:
    run_state = story_of(
        started(0),
        StepDiscarded(at_s=1.0, replica=0, step=3, reason="PeerDisconnectedError: gone"),
        StepDiscarded(at_s=1.1, replica=0, step=3, reason="PeerDisconnectedError: gone"),
        ReplicaFailed(at_s=2.0, replica=0, error="ValueError: no"),
        ended(0, 2.1, 1),
        ended(1, 2.2, -SIGSEGV),
    )
    assert [note.text for note in run_state.notes if note.is_bad] == [
        "replica 0 discards the step after 3: PeerDisconnectedError: gone",
        "replica 0 failed: ValueError: no",
        "replica 0 ended: exit code 1",
        "replica 1 ended: by SIGSEGV",
    ]


def test_lines_come_once_each_and_progress_with_every_tenth() -> None:
    lines: list[str] = []
    view = LineView(lines.append, steps=10)
    run_state = RunState(3)
    with view:
        for event in a_good_run():
            run_state.apply(event)
            view.show(run_state, event.at_s)
            view.show(run_state, event.at_s)
    assert lines[0] == "[   0.0 s] replica 0 starts (pid 1000)"
    assert "[   4.0 s] step 4 of 10, 3 participants, loss 0.5000" in lines
    assert len([line for line in lines if " of 10, " in line]) == 10
    assert len(lines) == len(run_state.notes) + 10


def test_the_picture_shows_every_replica_its_state_and_the_last_notes() -> None:
    console = Console(width=100, height=40, record=True, force_terminal=True, file=StringIO())
    run_state = story_of(*a_good_run()[:18])
    console.print(picture(run_state, steps=10, now_s=4.06))
    text = console.export_text()
    assert "step 4 of 10" in text
    assert "3 participants" in text
    assert text.count("● training") == 2
    assert "● starting" in text
    assert "replica 1 is killed (kill -9) after its commit of step 4" in text


def test_the_live_view_draws_what_was_last_whenever_that_was() -> None:
    file = StringIO()
    run_state = RunState(3)
    with LiveView(Console(width=100, height=40, force_terminal=True, file=file), steps=10) as view:
        for event in a_good_run():
            run_state.apply(event)
            view.show(run_state, 1.0 + event.at_s / 1_000)
        drawn = file.getvalue()
    assert "step 10 of 10" not in drawn
    assert "step 10 of 10" in file.getvalue()


def test_a_console_that_is_no_terminal_gets_lines() -> None:
    assert isinstance(view_for(Console(file=StringIO()), steps=10), LineView)
    assert isinstance(view_for(Console(file=StringIO(), force_terminal=True), steps=10), LiveView)
