"""The view of a running demo: a live picture on a terminal, lines elsewhere.

Both views draw the same state of the run, and keep no facts of their own.

Law of this file: from a RunState and the time to the output. It starts nothing, and the run does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tft_suite.demo.run_state import Note, ReplicaState, RunState, State

NOTES_MAX, NOTES_MIN = 12, 3
REDRAW_AFTER_S = 0.1
LINES_AROUND = 8  # lines of the picture besides replicas and notes
PROGRESS_LINES = 10

STYLES = {
    State.STARTING: "grey62",
    State.HEALING: "yellow",
    State.TRAINING: "green",
    State.DEAD: "red",
    State.DONE: "bold green",
}


class View(Protocol):
    """A view that shows a run while it lasts, inside a `with`."""

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, run_state: RunState, now_s: float) -> None:
        """Show the run.

        The supervisor calls this after each batch of events, and some ten times a second without events.
        """


def view_for(console: Console, *, steps: int) -> View:
    """Return the live view if the console is a terminal. Otherwise return the lines."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console, steps=steps)
    return LineView(lambda line: console.out(line, highlight=False), steps=steps)


@final
class LiveView:
    """A table of the replicas, with the last notes below. It is drawn at most ten times a second, and at the end."""

    def __init__(self, console: Console, *, steps: int) -> None:
        self._steps = steps
        self._console = console
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._drawn_s = -REDRAW_AFTER_S
        self._latest: tuple[RunState, float] | None = None

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._latest is not None:
            self._draw(*self._latest)
        self._live.stop()

    def show(self, run_state: RunState, now_s: float) -> None:
        self._latest = run_state, now_s
        if now_s - self._drawn_s >= REDRAW_AFTER_S:
            self._draw(run_state, now_s)

    def _draw(self, run_state: RunState, now_s: float) -> None:
        self._drawn_s = now_s
        room = self._console.height - LINES_AROUND - len(run_state.replicas)
        num_notes = max(NOTES_MIN, min(NOTES_MAX, room))
        self._live.update(picture(run_state, steps=self._steps, now_s=now_s, num_notes=num_notes), refresh=True)


@final
class LineView:
    """A view with a line for each note, and a line of progress for every tenth of the steps."""

    def __init__(self, write: Callable[[str], None], *, steps: int) -> None:
        self._write = write
        self._steps = steps
        self._num_notes = 0
        self._progress = 0

    def __enter__(self) -> LineView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing, because nothing is open."""

    def show(self, run_state: RunState, now_s: float) -> None:
        for note in run_state.notes[self._num_notes :]:
            self._write(line_of(note))
        self._num_notes = len(run_state.notes)
        progress = run_state.step * PROGRESS_LINES // self._steps
        if progress > self._progress:
            self._progress = progress
            self._write(line_of(Note(now_s, progress_of(run_state, steps=self._steps))))


def line_of(note: Note) -> str:
    return f"[{note.at_s:6.1f} s] {note.text}"


def progress_of(run_state: RunState, *, steps: int) -> str:
    """Return one line about the progress of the run."""
    losses = [who.loss for who in run_state.replicas if who.loss is not None]
    loss = f", loss {sum(losses) / len(losses):.4f}" if losses else ""
    return f"step {run_state.step} of {steps}, {participants_of(run_state)}{loss}"


def participants_of(run_state: RunState) -> str:
    return f"{run_state.participants} participant{'' if run_state.participants == 1 else 's'}"


def picture(run_state: RunState, *, steps: int, now_s: float, num_notes: int = NOTES_MAX) -> RenderableType:
    """Return the whole live view, with the last `num_notes` notes."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("replica", justify="right")
    table.add_column("state", min_width=10)
    table.add_column("step", justify="right", min_width=len(str(steps)))
    table.add_column("", ratio=1)
    table.add_column("loss", justify="right", min_width=7)
    table.add_column("starts", justify="right")
    for who in run_state.replicas:
        table.add_row(*row(who, steps=steps))
    summary = Text(f"step {run_state.step} of {steps}   {participants_of(run_state)}   {now_s:.0f} s", style="bold")
    notes = Text(no_wrap=True, overflow="ellipsis")
    for note in run_state.notes[-num_notes:]:
        notes.append(f"{note.at_s:6.1f} s  ", style="dim")
        notes.append(f"{note.text}\n", style="red" if note.is_bad else "")
    return Panel(Group(summary, Text(), table, Text(), notes), title="tft demo", title_align="left", border_style="dim")


def row(who: ReplicaState, *, steps: int) -> list[RenderableType]:
    step = who.step or 0
    style = STYLES[who.state]
    return [
        str(who.replica),
        Text(f"● {who.state.value}", style=style),
        "-" if who.step is None else str(step),
        ProgressBar(total=steps, completed=step, complete_style=style, finished_style=style),
        "-" if who.loss is None else f"{who.loss:.4f}",
        str(who.num_starts),
    ]
