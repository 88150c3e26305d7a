"""What the time of this rank's training thread goes to: every moment of it belongs to one cause.

The time between two verdicts is booked when the second one arrives, because only the verdict says whether own work and
reductions counted. All bookings therefore sum to the wall time up to the last verdict.

Where several steps are in flight, the time before a verdict is booked on the step of that verdict.

| time of the training thread | the step commits | it fails |
|---|---|---|
| own work between two steps, after a commit | commit | commit |
| own work in a step | commit | redo |
| waiting in a reduction, a word or a vote, up to the notice of a loss or an error | commit, and `wait` for what is
longer than twice the usual | detect |
| waiting there after the notice | abort | abort |
| waiting for a quorum | quorum, or `wait` if the quorum is the same as before | quorum |
| building its process group | reconfigure | reconfigure |
| taking, or giving, live state | heal, or serve | heal, or serve |

Until the first commit of this process, all but `heal` is booked as `start`.

A step has about ten of these readings, so they work on lists of numbers, not on mappings.

Law of this file: reading the clock at existing points of the Manager, and adding up. Nothing is decided.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, final

from tft_coord.core.stalls import STALLS_MOST, Spent, Stall, TrainerReport
from tft_coord.core.types import QuorumKey

USUAL_OF: Final = 5  # committed steps, whose median wait in reductions is the usual one
UNUSUAL: Final = 2.0  # times the usual wait

_SPENT: Final = tuple(Spent)
_COMMIT, _DETECT, _ABORT, _QUORUM, _RECONFIGURE, _HEAL, _SERVE, _REDO, _WAIT, _START = range(len(_SPENT))
# Time whose cause the verdict decides.
_BETWEEN, _OWN, _ROUND = range(len(_SPENT), len(_SPENT) + 3)
_NOTHING: Final = (0.0,) * (len(_SPENT) + 3)


class Wait(enum.IntEnum):
    """What the training thread waits for. Of nested waits the first of these counts."""

    STATE = 0
    QUORUM = 1
    ROUND = 2  # a reduction, a word, a vote, and the end of what a failed step has left running


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The time up to a verdict since the one before.

    Args:
        seconds: by cause, in the order of `Spent`.
    """

    seconds: Sequence[float]

    @property
    def lasted_s(self) -> float:
        """Return the sum."""
        return sum(self.seconds)

    @property
    def spent_s(self) -> dict[Spent, float]:
        """Return the parts that are not 0."""
        return _named(self.seconds)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the life of a Manager, in seconds.

    Args:
        spent_s: of all time up to the last verdict.
        num_stalls: how many stalls have ended, with the start.
        stalls_s: of all stalls.
    """

    spent_s: Mapping[Spent, float]
    num_stalls: int
    stalls_s: Mapping[Spent, float]


@final
class _Stalls:
    """The stalls of one rank: the time since its last commit, and what has become a stall.

    Attributes:
        key: of the quorum of the last commit. None: there was none.
        failed_rounds: rounds since then that did not commit.
        newest: the newest stalls, the oldest first.
        number: how many there were.
        total_s: the sum of all.
    """

    def __init__(self) -> None:
        self.key: QuorumKey | None = None
        self.failed_rounds = 0
        self.newest: tuple[Stall, ...] = ()
        self.number = 0
        self.total_s = [0.0] * len(_SPENT)
        self._spent_s = [0.0] * len(_SPENT)  # in rounds that failed, since the last commit

    def failed(self, seconds: Sequence[float]) -> None:
        """Add the time of a round that did not commit."""
        self.failed_rounds += 1
        _add(self._spent_s, seconds)

    def commits(self, key: QuorumKey, step: int, seconds: Sequence[float]) -> Stall | None:
        """Begin anew after a commit. Return the stall that ends with it; None: nothing was wrong since the last one.

        `seconds`: of the round that committed.
        """
        before, self.key = self.key, key
        if before == key and not self.failed_rounds:
            return None
        spent_s, self._spent_s = self._spent_s, [0.0] * len(_SPENT)
        failed_rounds, self.failed_rounds = self.failed_rounds, 0
        _add(spent_s, seconds)
        _add(self.total_s, spent_s)
        self.number += 1
        before_id = before.quorum_id if before is not None else None
        stall = Stall(self.number, before_id, key.quorum_id, step, failed_rounds, _milliseconds(spent_s))
        self.newest = (*self.newest, stall)[-STALLS_MOST:]
        return stall


@final
class TimeAccount:
    """The times of one rank. Any thread may call its methods.

    Args:
        monotonic: returns the time in seconds.
    Attributes:
        of_state, of_quorum, of_round: contexts, entered while the training thread waits for that.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._since_s = monotonic()
        self._waits = [0] * len(Wait)
        self._booked = list(_NOTHING)  # since the last verdict
        self._is_between = self._is_planned = self._is_broken = self._heals = False
        self._usual_s: deque[float] = deque(maxlen=USUAL_OF)
        self._total_s = [0.0] * len(_SPENT)
        self._stalls = _Stalls()
        self.of_state = self.waiting(Wait.STATE)
        self.of_quorum = self.waiting(Wait.QUORUM)
        self.of_round = self.waiting(Wait.ROUND)

    # --- what happens -------------------------------------------------------------------------------------------------

    def waiting(self, wait: Wait, also: AbstractContextManager[object] | None = None) -> AbstractContextManager[None]:
        """Return a context for the time in which the training thread waits; it may be entered again and again.

        `also`: another context, entered with it.
        """
        return _Waiting(self, int(wait), also)

    def waits(self, wait: int, by: int) -> None:
        """Record that a wait begins (1) or ends (-1)."""
        with self._lock:
            self._book()
            self._waits[wait] += by

    def step_begins(self) -> None:
        """Record that a step begins: what follows is part of it, and its plan is not known yet."""
        with self._lock:
            self._book()
            self._is_between = self._is_planned = self._is_broken = False

    def planned(self, *, heals: bool) -> None:
        """Record that the answer to the request for a quorum is here. `heals`: this rank takes live state."""
        with self._lock:
            self._book()
            self._is_planned, self._is_broken, self._heals = True, False, heals

    def broke(self) -> None:
        """Record that the step is known to fail: a member was lost, or an error was reported."""
        with self._lock:
            self._book()
            self._is_broken = True

    def step_ended(self, *, committed: bool, key: QuorumKey | None, step: int) -> tuple[StepTimes, Stall | None]:
        """Record a verdict.

        Args:
            committed: the verdict.
            key: of the step's quorum. None: it has none.
            step: the committed steps now.
        Returns: the times up to it since the last verdict, and the stall that it ends.
        """
        stalls, stall = self._stalls, None
        with self._lock:
            self._book()
            booked, self._booked = self._booked, list(_NOTHING)
            seconds = self._judged(booked, committed=committed, is_same=key == stalls.key)
            self._heals, self._is_between = False, committed
            if stalls.key is None:
                self._total_s[_HEAL] += seconds[_HEAL]
                self._total_s[_START] += sum(seconds) - seconds[_HEAL]
            else:
                _add(self._total_s, seconds)
            if committed and key is not None:
                stall = stalls.commits(key, step, seconds)
            else:
                stalls.failed(seconds)
        return StepTimes(seconds), stall

    # --- what is known ------------------------------------------------------------------------------------------------

    def report(self) -> TrainerReport:
        """Return the times up to the last verdict, and the newest stalls."""
        with self._lock:
            total_ms = {_SPENT[cause]: int(s * 1_000) for cause, s in enumerate(self._total_s) if s}
            return TrainerReport(total_ms, self._stalls.newest)

    def totals(self) -> Totals:
        """Return the sums up to the last verdict."""
        with self._lock:
            return Totals(_named(self._total_s), self._stalls.number, _named(self._stalls.total_s))

    # --- with the lock held -------------------------------------------------------------------------------------------

    def _book(self) -> None:
        now_s = self._monotonic()
        of_state, of_quorum, of_round = self._waits
        if of_state:
            cause = _HEAL if self._heals else _SERVE
        elif of_quorum:
            cause = _RECONFIGURE if self._is_planned else _QUORUM
        elif of_round:
            cause = _ABORT if self._is_broken else _ROUND
        else:
            cause = _BETWEEN if self._is_between else _OWN
        self._booked[cause] += now_s - self._since_s
        self._since_s = now_s

    def _judged(self, booked: list[float], *, committed: bool, is_same: bool) -> list[float]:
        """Return what was booked, by its final causes. `is_same`: the quorum of the last commit."""
        seconds = booked[: len(_SPENT)]
        own_s, round_s = booked[_OWN], booked[_ROUND]
        seconds[_COMMIT] = booked[_BETWEEN]
        if not committed:
            seconds[_REDO], seconds[_DETECT] = own_s, round_s
            return seconds
        if is_same and not self._stalls.failed_rounds:
            seconds[_WAIT], seconds[_QUORUM] = seconds[_QUORUM], 0.0
        usual_s = UNUSUAL * sorted(self._usual_s)[len(self._usual_s) // 2] if self._usual_s else round_s
        self._usual_s.append(round_s)
        seconds[_WAIT] += max(0.0, round_s - usual_s)
        seconds[_COMMIT] += own_s + min(round_s, usual_s)
        return seconds


@final
class _Waiting(AbstractContextManager[None]):
    """A wait of the training thread, as a context that may be entered again and again."""

    def __init__(self, account: TimeAccount, wait: int, also: AbstractContextManager[object] | None) -> None:
        self._account = account
        self._wait = wait
        self._also = also

    def __enter__(self) -> None:
        self._account.waits(self._wait, 1)
        if self._also is not None:
            self._also.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._also is not None:
            self._also.__exit__(kind, error, at)
        self._account.waits(self._wait, -1)


def _add(to: list[float], seconds: Sequence[float]) -> None:
    for cause, more in enumerate(seconds):
        if more:
            to[cause] += more


def _named(seconds: Sequence[float]) -> dict[Spent, float]:
    return {_SPENT[cause]: s for cause, s in enumerate(seconds) if s}


def _milliseconds(seconds: Sequence[float]) -> dict[Spent, int]:
    """Return whole milliseconds whose sum is that of the seconds, rounded once."""
    found, so_far_s, so_far_ms = {}, 0.0, 0
    for cause, s in enumerate(seconds):
        so_far_s += s
        part_ms = max(0, round(so_far_s * 1_000) - so_far_ms)
        so_far_ms += part_ms
        if part_ms:
            found[_SPENT[cause]] = part_ms
    return found
