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

Law of this file: reading the clock at existing points of the Manager, and adding up. Nothing is decided.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, final

from tft_coord.core.stalls import STALLS_MOST, Spent, Stall, TrainerReport
from tft_coord.core.types import QuorumKey

USUAL_OF: Final = 5  # committed steps, whose median wait in reductions is the usual one
UNUSUAL: Final = 2.0  # times the usual wait


class Wait(enum.Enum):
    """What the training thread waits for. Of nested waits the first of these counts."""

    STATE = enum.auto()
    QUORUM = enum.auto()
    ROUND = enum.auto()  # a reduction, a word, a vote, and the end of what a failed step has left running


class _Raw(enum.Enum):
    """Time whose cause the verdict decides."""

    BETWEEN = enum.auto()
    OWN = enum.auto()
    ROUND = enum.auto()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The time up to a verdict since the one before, in seconds: `spent_s` sums to `lasted_s`."""

    lasted_s: float
    spent_s: Mapping[Spent, float]


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
        self.total_s: dict[Spent, float] = {}
        self._spent_s: dict[Spent, float] = {}

    def add(self, spent_s: Mapping[Spent, float]) -> None:
        """Add the time of a round."""
        for each, seconds in spent_s.items():
            _add(self._spent_s, each, seconds)

    def commits(self, key: QuorumKey, step: int) -> Stall | None:
        """Begin anew after a commit. Return the stall that ends with it; None: nothing was wrong since the last one."""
        before, self.key = self.key, key
        spent_s, self._spent_s = self._spent_s, {}
        failed_rounds, self.failed_rounds = self.failed_rounds, 0
        if before == key and not failed_rounds:
            return None
        for each, seconds in spent_s.items():
            _add(self.total_s, each, seconds)
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
        self._waits = dict.fromkeys(Wait, 0)
        self._booked: dict[Spent | _Raw, float] = {}  # since the last verdict
        self._is_between = self._is_planned = self._is_broken = self._heals = False
        self._usual_s: deque[float] = deque(maxlen=USUAL_OF)
        self._total_s: dict[Spent, float] = {}
        self._stalls = _Stalls()
        self.of_state = self.waiting(Wait.STATE)
        self.of_quorum = self.waiting(Wait.QUORUM)
        self.of_round = self.waiting(Wait.ROUND)

    # --- what happens -------------------------------------------------------------------------------------------------

    def waiting(self, wait: Wait, also: AbstractContextManager[object] | None = None) -> AbstractContextManager[None]:
        """Return a context for the time in which the training thread waits; it may be entered again and again.

        `also`: another context, entered with it.
        """
        return _Waiting(self, wait, also)

    def waits(self, wait: Wait, by: int) -> None:
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
        stalls = self._stalls
        with self._lock:
            self._book()
            booked, self._booked = self._booked, {}
            spent_s = self._judged(booked, committed=committed, is_same=key is not None and key == stalls.key)
            self._heals, self._is_between = False, committed
            stalls.add(spent_s)
            for each, seconds in spent_s.items():
                _add(self._total_s, Spent.START if stalls.key is None and each is not Spent.HEAL else each, seconds)
            stalls.failed_rounds += not committed
            stall = stalls.commits(key, step) if committed and key is not None else None
        return StepTimes(sum(spent_s.values()), spent_s), stall

    # --- what is known ------------------------------------------------------------------------------------------------

    def report(self) -> TrainerReport:
        """Return the times up to the last verdict, and the newest stalls."""
        with self._lock:
            return TrainerReport({each: int(s * 1_000) for each, s in self._total_s.items()}, self._stalls.newest)

    def totals(self) -> Totals:
        """Return the sums up to the last verdict."""
        with self._lock:
            return Totals(dict(self._total_s), self._stalls.number, dict(self._stalls.total_s))

    # --- with the lock held -------------------------------------------------------------------------------------------

    def _book(self) -> None:
        now_s = self._monotonic()
        _add(self._booked, self._cause(), now_s - self._since_s)
        self._since_s = now_s

    def _cause(self) -> Spent | _Raw:
        if self._waits[Wait.STATE]:
            return Spent.HEAL if self._heals else Spent.SERVE
        if self._waits[Wait.QUORUM]:
            return Spent.RECONFIGURE if self._is_planned else Spent.QUORUM
        if self._waits[Wait.ROUND]:
            return Spent.ABORT if self._is_broken else _Raw.ROUND
        return _Raw.BETWEEN if self._is_between else _Raw.OWN

    def _judged(self, booked: Mapping[Spent | _Raw, float], *, committed: bool, is_same: bool) -> dict[Spent, float]:
        """Return what was booked, by its final causes. `is_same`: the quorum of the last commit."""
        spent: dict[Spent, float] = {}
        round_s = booked.get(_Raw.ROUND, 0.0)
        for each, seconds in booked.items():
            if isinstance(each, Spent):
                is_wait = each is Spent.QUORUM and is_same and committed and not self._stalls.failed_rounds
                _add(spent, Spent.WAIT if is_wait else each, seconds)
            elif each is not _Raw.ROUND:
                _add(spent, Spent.COMMIT if committed or each is _Raw.BETWEEN else Spent.REDO, seconds)
        if not committed:
            _add(spent, Spent.DETECT, round_s)
            return spent
        usual_s = UNUSUAL * sorted(self._usual_s)[len(self._usual_s) // 2] if self._usual_s else round_s
        self._usual_s.append(round_s)
        _add(spent, Spent.WAIT, max(0.0, round_s - usual_s))
        _add(spent, Spent.COMMIT, min(round_s, usual_s))
        return spent


@final
class _Waiting(AbstractContextManager[None]):
    """A wait of the training thread, as a context that may be entered again and again."""

    def __init__(self, account: TimeAccount, wait: Wait, also: AbstractContextManager[object] | None) -> None:
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


def _add(to: dict[Spent, float] | dict[Spent | _Raw, float], cause: Spent, seconds: float) -> None:
    if seconds:
        to[cause] = to.get(cause, 0.0) + seconds


def _milliseconds(seconds: Mapping[Spent, float]) -> dict[Spent, int]:
    """Return whole milliseconds whose sum is that of the seconds, rounded once."""
    found, so_far_s, so_far_ms = {}, 0.0, 0
    for each in Spent:
        so_far_s += seconds.get(each, 0.0)
        part_ms = max(0, round(so_far_s * 1_000) - so_far_ms)
        so_far_ms += part_ms
        if part_ms:
            found[each] = part_ms
    return found
