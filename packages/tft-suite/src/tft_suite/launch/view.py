"""What `tft launch` shows: its notes as lines and, on a terminal, a table of the groups below them.

Law of this file: from states to text. It decides nothing, and a closed terminal ends nothing.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Final, TextIO, final

from tft_suite.launch.core import Group, GroupState
from tft_suite.launch.jobs import Replica
from tft_suite.launch.processes import clean

DRAW_EVERY_S: Final = 0.5
LINES_FREE: Final = 4  # lines of the terminal that the table leaves to the notes
RED, DIM, PLAIN = "\x1b[31m", "\x1b[2m", "\x1b[0m"
COLUMNS: Final = ("replica", "state", "attempt", "step", "since")


@final
class View:
    """The output of a launcher.

    Args:
        out: where it writes.
        is_live: `out` is a terminal, so the table is drawn again and again.
    """

    def __init__(self, out: TextIO, *, is_live: bool) -> None:
        self._out = out
        self._is_live = is_live
        self._num_lines = 0
        self._drawn_s = 0.0

    def note(self, text: str, *, is_bad: bool = False) -> None:
        """Print a line, above the table."""
        stamp = time.strftime("%H:%M:%S")
        colour, plain = (RED, PLAIN) if is_bad and self._is_live else ("", "")
        self._write(f"{self._cleared()}{stamp} {colour}{clean(text)}{plain}\n")
        self._drawn_s = 0.0

    def show(self, groups: Sequence[Group], replicas: Mapping[int, Replica], now_s: float) -> None:
        """Draw the table, at most twice a second and on a terminal only."""
        if not self._is_live or now_s - self._drawn_s < DRAW_EVERY_S:
            return
        self._drawn_s = now_s
        size = shutil.get_terminal_size()
        lines = [line[: size.columns - 1] for line in table(groups, replicas, now_s)]
        room = max(2, size.lines - LINES_FREE)
        if len(lines) > room:
            lines = [*lines[: room - 1], f"… and {len(lines) - room + 1} more"]
        text = self._cleared() + "".join(f"{DIM}{line}{PLAIN}\n" for line in lines)
        self._num_lines = len(lines)
        self._write(text)

    def close(self) -> None:
        """Remove the table."""
        self._write(self._cleared())

    def _cleared(self) -> str:
        number, self._num_lines = self._num_lines, 0
        return f"\x1b[{number}F\x1b[J" if number else ""

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):
            self._is_live = False  # the reader has gone, and the job goes on


def table(groups: Sequence[Group], replicas: Mapping[int, Replica], now_s: float) -> list[str]:
    """Return the groups in lines, the header first."""
    rows = [COLUMNS, *(row(group, replicas.get(group.replica), now_s) for group in groups)]
    widths = [max(len(each[column]) for each in rows) for column in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(each, widths, strict=True)).rstrip() for each in rows]


def row(group: Group, replica: Replica | None, now_s: float) -> tuple[str, ...]:
    """Return the cells of a group."""
    state, since = group.state.value, f"{max(0.0, now_s - group.started_s):.0f} s"
    if group.state is GroupState.RUNNING and replica is not None:
        state = replica.state.replace("_", " ")
    elif group.state is GroupState.WAITING:
        since = f"in {max(0.0, group.until_s - now_s):.0f} s"
    elif group.state not in (GroupState.RUNNING, GroupState.ENDING, GroupState.DRAINING):
        since = "-"
    step = "-" if replica is None else str(replica.step)
    return str(group.replica), state, str(group.attempt), step, since
