"""timeline.png: the run as one picture.

Replicas are lanes over time, coloured by their activity. Below are the participants and the loss. A kill is a gap in
one lane, and the other lanes visibly have none.

Law of this file: `lanes` is pure. `draw` writes one file and keeps no state (no pyplot).
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
)
from tft_suite.demo.report import deaths, faults, final_ends
from tft_suite.demo.run_state import State

COLORS = {
    State.STARTING: "#9aa5b1",
    State.HEALING: "#f2a33a",
    State.TRAINING: "#3b8f5a",
    State.DEAD: "#c8383f",
}
SMOOTHED_OVER = 5  # steps


@final
@dataclass(frozen=True, slots=True)
class Span:
    """The time from `start_s` to `end_s`, during which `replica` was in `state`."""

    replica: int
    state: State
    start_s: float
    end_s: float


def lanes(events: Sequence[Event], *, end_s: float) -> list[Span]:
    """Return what each replica did, without gaps from 0 to its end or `end_s`, in the order of the spans' ends."""
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
                    now[event.replica] = (State.STARTING, 0.0)  # the starting program counts as starting, from time 0
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
    for (_, kill), fault in zip(deaths(events), faults(events), strict=True):
        back = "never back" if fault.rejoin_s is None else f"back after {fault.rejoin_s:.1f} s"
        text = f"kill -9 at step {fault.at_step}, {back}"
        top.annotate(text, (kill.at_s, kill.replica - 0.33), (0, 3), textcoords="offset points", fontsize=9)
        # A dead replica is restarted at once, so a death is too short to see as a span.
        top.vlines(kill.at_s, kill.replica - 0.31, kill.replica + 0.31, color=COLORS[State.DEAD], linewidth=4)
        for axes in (top, middle, bottom):
            axes.axvline(kill.at_s, color=COLORS[State.DEAD], linewidth=1, linestyle=":", zorder=0)
    for end in final_ends(events).values():
        top.plot(end.at_s, end.replica, marker="D", color="white", markeredgecolor="black", markersize=7, zorder=3)
    top.set_yticks(range(replicas), [f"replica {replica}" for replica in range(replicas)])
    top.set_ylim(replicas - 0.45, -0.7)
    handles: list[Patch | Line2D] = [Patch(color=color, label=state.value) for state, color in COLORS.items()]
    diamond = Line2D([], [], linestyle="", marker="D", color="white", markeredgecolor="black", markersize=7)
    diamond.set_label("at its last step")
    handles.append(diamond)
    top.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), frameon=False)

    commits = [event for event in events if isinstance(event, StepCommitted)]
    firsts = list({commit.step: commit for commit in reversed(commits)}.values())[::-1]
    middle.step([c.at_s for c in firsts], [c.participants for c in firsts], where="post", color="#30518c")
    middle.set_ylabel("participants")
    middle.set_ylim(0, replicas + 0.5)
    middle.set_yticks(range(replicas + 1))

    counted = [commit for commit in commits if commit.took_part]
    for replica in range(replicas):
        own = [commit for commit in counted if commit.replica == replica]
        bottom.plot([c.at_s for c in own], [c.loss for c in own], ".", markersize=3.5, alpha=0.6, color=f"C{replica}")
    times, means = smoothed(counted, over=SMOOTHED_OVER)
    bottom.plot(times, means, color="black", linewidth=1.2)
    bottom.set_yscale("log")
    bottom.set_ylabel("training loss\n(dots: by replica)")
    bottom.set_xlabel("seconds since the start")
    bottom.set_xlim(0, end_s * 1.01)
    for axes in (top, middle, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.savefig(path)


def smoothed(commits: Sequence[StepCommitted], *, over: int) -> tuple[list[float], list[float]]:
    """Return times and mean losses of the steps, in order. Each mean covers a step and the `over` - 1 steps before."""
    by_step: dict[int, list[StepCommitted]] = {}
    for commit in commits:
        by_step.setdefault(commit.step, []).append(commit)
    steps = sorted(by_step)
    losses = [mean([commit.loss for commit in by_step[step]]) for step in steps]
    means = [mean(losses[max(0, index - over + 1) : index + 1]) for index in range(len(losses))]
    return [min(commit.at_s for commit in by_step[step]) for step in steps], means


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
