"""timeline.png: the run as one picture.

Intuition: replicas are lanes over time, coloured by what they did; below them, who took part, and the loss. A kill is a
gap in one lane, and the picture shows at a glance that the other lanes have none.

Law of this file: `lanes` is pure; `draw` writes one file and keeps no state behind (no pyplot).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tft_suite.demo.events import (
    Event,
    HealingStarted,
    ProcessEnded,
    ProcessKilled,
    ProcessStarted,
    StepCommitted,
    TrainingEnded,
)
from tft_suite.demo.story import State

COLORS = {
    State.STARTING: "#9aa5b1",
    State.HEALING: "#f2a33a",
    State.TRAINING: "#3b8f5a",
    State.DEAD: "#c8383f",
}
SMOOTHED_OVER = 15


@final
@dataclass(frozen=True, slots=True)
class Span:
    """`replica` was in `state` from `start_s` to `end_s`."""

    replica: int
    state: State
    start_s: float
    end_s: float


def lanes(events: Sequence[Event], *, end_s: float) -> list[Span]:
    """What each replica did, without gaps from 0 to its end or `end_s`, in the order of the spans' ends."""
    now: dict[int, tuple[State, float]] = {}
    spans: list[Span] = []
    begun: set[int] = set()

    def change(event: Event, state: State | None) -> None:
        if event.replica in now:
            before, since_s = now[event.replica]
            if before is state:
                return
            spans.append(Span(event.replica, before, since_s, event.at_s))
            del now[event.replica]
        if state is not None:
            now[event.replica] = (state, event.at_s)

    for event in events:
        match event:
            case ProcessStarted():
                change(event, State.STARTING)
                if event.replica not in begun:
                    now[event.replica] = (State.STARTING, 0.0)  # the program that starts it, starts
                begun.add(event.replica)
            case HealingStarted():
                change(event, State.HEALING)
            case StepCommitted():
                change(event, State.TRAINING)
            case ProcessKilled():
                change(event, State.DEAD)
            case ProcessEnded():
                change(event, None if event.exit_code == 0 else State.DEAD)
            case _:
                pass
    spans += [Span(replica, state, since_s, end_s) for replica, (state, since_s) in sorted(now.items())]
    return spans


def draw(events: Sequence[Event], *, replicas: int, end_s: float, title: str, path: Path) -> None:
    """Write the picture of the run to `path` (PNG, 1500 x 900 pixels)."""
    figure = Figure(figsize=(15, 9), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1.3, 2.7])
    figure.suptitle(title, fontsize=14)

    for span in lanes(events, end_s=end_s):
        width_s = span.end_s - span.start_s
        top.barh(span.replica, width_s, left=span.start_s, height=0.62, color=COLORS[span.state], edgecolor="none")
    for event in events:
        if isinstance(event, ProcessKilled):
            text = f"kill -9 at step {event.step}"
            top.annotate(text, (event.at_s, event.replica - 0.33), (0, 3), textcoords="offset points", fontsize=9)
            for axes in (top, middle, bottom):
                axes.axvline(event.at_s, color=COLORS[State.DEAD], linewidth=1, linestyle=":")
        elif isinstance(event, TrainingEnded):
            top.plot(event.at_s, event.replica, marker="D", color="white", markersize=5)
    top.set_yticks(range(replicas), [f"replica {replica}" for replica in range(replicas)])
    top.set_ylim(replicas - 0.45, -0.7)
    handles: list[Patch | Line2D] = [Patch(color=color, label=state.value) for state, color in COLORS.items()]
    handles.append(
        Line2D([], [], marker="D", color="#3b8f5a", markerfacecolor="white", markersize=6, label="at its last step")
    )
    top.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), frameon=False)

    commits = [event for event in events if isinstance(event, StepCommitted)]
    firsts = list({commit.step: commit for commit in reversed(commits)}.values())[::-1]
    middle.step([c.at_s for c in firsts], [c.participants for c in firsts], where="post", color="#30518c")
    middle.set_ylabel("participants")
    middle.set_ylim(0, replicas + 0.5)
    middle.set_yticks(range(replicas + 1))

    for replica in range(replicas):
        own = [commit for commit in commits if commit.replica == replica]
        bottom.plot([c.at_s for c in own], [c.loss for c in own], ".", markersize=2.5, alpha=0.5, color=f"C{replica}")
    ordered = sorted(commits, key=lambda commit: commit.at_s)
    window = SMOOTHED_OVER * replicas
    smooth = [mean([c.loss for c in ordered[max(0, i - window + 1) : i + 1]]) for i in range(len(ordered))]
    bottom.plot([c.at_s for c in ordered], smooth, color="black", linewidth=1.5)
    bottom.set_yscale("log")
    bottom.set_ylabel("training loss\n(dots: by replica)")
    bottom.set_xlabel("seconds since the start")
    bottom.set_xlim(0, end_s)
    for axes in (top, middle, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.savefig(path)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
