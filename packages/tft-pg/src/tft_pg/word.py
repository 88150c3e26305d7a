"""The word: a few integers that each rank exchanges with all other ranks at the end of a round.

A training step commits on all replica groups or on none. So its ranks must report their results to each other, and all
must learn the same. A collective of the data plane can do that, but takes milliseconds if several processes share a
machine. Groups of this package send the word over plain connections that they keep for it, see `backends.word_line`.
This file holds the interface, the checks of its arguments, and an allreduce version for all other groups.

A successful word proves that every rank has started its word of the same round. The caller makes it prove more: a rank
starts its word after its own reductions of the round have ended, on the device too. Nothing here waits for the
reductions.

Law of this file: no connections; a group is only asked for an allreduce.
"""

from __future__ import annotations

import abc
import copy
import operator
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, final

import torch
import torch.distributed as dist

from tft_pg.errors import (
    CollectiveTimeoutError,
    ConfigError,
    OperationRefusedError,
    PeerDisconnectedError,
    ProcessGroupError,
)
from tft_pg.settings import checked_timeout

__all__ = [
    "LINGER",
    "WORD_VALUES_MAX",
    "EndedExchange",
    "WordExchange",
    "check_round",
    "checked_sums",
    "checked_values",
    "exchange_word_by_allreduce",
]

WORD_VALUES_MAX: Final = 32
"""The largest number of integers in a word."""

LINGER: Final = timedelta(seconds=1)
"""How long a rank that leaves keeps its connections, at most, so that its last word can pass."""

_INT64_MIN: Final = -(1 << 63)
_INT64_MAX: Final = (1 << 63) - 1
_ROUND_MAX: Final = (1 << 64) - 1


class WordExchange(abc.ABC):
    """One rank's part in the exchange of one word, from its start on."""

    @abc.abstractmethod
    def wait(self) -> tuple[int, ...]:
        """Wait for the words of all other ranks. Only one thread may wait at a time.

        The waiting thread receives the words itself; no background thread does. The call may be repeated.

        Returns: the sum of each value over all ranks, the same on every rank whose wait returns.
        Raises:
            PeerDisconnectedError: the connection to a rank has ended, or a rank sent something other than its word of
                this round. `rank` names it.
            CollectiveTimeoutError: a rank has not sent its word in time. The error names the rank. Abort the group.
            AbortedError, ProcessGroupClosedError: `abort`, `configure` or `shutdown` was called on this rank.
            OperationRefusedError: a sum does not fit into 64 bits. Every rank gets this error, and the group keeps
            working.
        """


@final
class EndedExchange(WordExchange):
    """An exchange that has ended. In a group of one the word is the sum."""

    def __init__(self, sums: tuple[int, ...]) -> None:
        self._sums = sums

    def wait(self) -> tuple[int, ...]:
        return self._sums


def checked_values(words: Sequence[int]) -> tuple[int, ...]:
    """Return the values of a word. Raises: ConfigError: no value, too many values, or a value that is no
    64-bit integer.
    """
    try:
        values = tuple(map(operator.index, words))
    except TypeError as error:
        raise ConfigError(f"a word holds integers, but this one is {words!r} ({error})") from None
    if not 1 <= len(values) <= WORD_VALUES_MAX:
        raise ConfigError(f"a word holds 1 to {WORD_VALUES_MAX} integers, but this one has {len(values)}")
    if min(values) < _INT64_MIN or max(values) > _INT64_MAX:
        raise ConfigError(f"a word holds signed 64-bit integers, but this one is {values}; use smaller values")
    return values


def check_round(round_number: int, last_round: int) -> None:
    """Check the number of a round. Raises: ConfigError: it is out of range, or not above the last word's round."""
    if not 0 <= round_number <= _ROUND_MAX:
        raise ConfigError(f"round_number is {round_number}; pass 0 to 2**64 - 1")
    if round_number <= last_round:
        raise ConfigError(
            f"round_number is {round_number}, but the last one was {last_round}; pass a higher number for each word "
            "until the next configure"
        )


def checked_sums(sums: tuple[int, ...], round_number: int) -> tuple[int, ...]:
    """Return the sums unchanged. Raises: OperationRefusedError: a sum does not fit into 64 bits."""
    if min(sums) < _INT64_MIN or max(sums) > _INT64_MAX:
        raise OperationRefusedError(
            f"exchange_word: a sum of round {round_number} does not fit into 64 bits ({sums}); use values below "
            "2**63 / world size"
        )
    return sums


# --- through an allreduce ---------------------------------------------------------------------------------------------

# The tensor has the same size for every word, because ranks that disagree about the size of a reduction crash each
# other's process. Its head holds the number of ranks. The head also holds the round, the length and the squares of
# both, so that different rounds or lengths are detected. n numbers all equal x if their sum is n * x and the sum of
# their squares is n * x * x.
_HEAD: Final = 5
_ELEMENTS: Final = _HEAD + 2 * WORD_VALUES_MAX
_ROUND_BITS: Final = 20
_HALF_BITS: Final = 32
_HALF_MASK: Final = (1 << _HALF_BITS) - 1
_SHORTEST: Final = timedelta(milliseconds=1)


def exchange_word_by_allreduce(
    group: dist.ProcessGroup, words: Sequence[int], *, round_number: int, timeout: timedelta
) -> WordExchange:
    """Exchange a word by an allreduce of int64 on the CPU, in a group that keeps no connections for words.

    All ranks of the group must call this function, in the order of their other collectives.

    Args:
        group: any torch group that reduces CPU tensors.
        words, round_number, timeout: as for `ProcessGroup.exchange_word`.

    Returns: the exchange. Its `wait` raises the errors of the group's Works, converted to this package's errors.
    Raises: ConfigError: an argument is invalid. ProcessGroupError, RuntimeError: raised by the group.
    """
    values = checked_values(words)
    check_round(round_number, -1)
    return _AllreduceExchange(group, values, round_number, checked_timeout(timeout))


@final
class _AllreduceExchange(WordExchange):
    def __init__(
        self, group: dist.ProcessGroup, values: tuple[int, ...], round_number: int, timeout: timedelta
    ) -> None:
        self._round_number = round_number
        self._timeout = timeout
        self._deadline_s = time.monotonic() + timeout.total_seconds()
        self._world_size = group.size()
        self._short_round = round_number % (1 << _ROUND_BITS)
        self._num_values = len(values)
        self._outcome: tuple[int, ...] | ProcessGroupError | None = None
        head = [1, self._short_round, self._short_round**2, len(values), len(values) ** 2]
        halves = [half for value in values for half in (value >> _HALF_BITS, value & _HALF_MASK)]
        padding = [0] * (_ELEMENTS - _HEAD - len(halves))
        self._tensor = torch.tensor([*head, *halves, *padding], dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]  # as torch's own code does
        options.timeout = timeout
        self._work: dist.Work | None = group.allreduce([self._tensor], options)

    def wait(self) -> tuple[int, ...]:
        if self._outcome is None:
            try:
                self._outcome = self._wait()
            except ProcessGroupError as error:
                self._outcome = copy.copy(error)
                raise
            finally:
                self._work = None
        if isinstance(self._outcome, ProcessGroupError):
            raise copy.copy(self._outcome)
        return self._outcome

    def _wait(self) -> tuple[int, ...]:
        assert self._work is not None
        left = timedelta(seconds=self._deadline_s - time.monotonic())
        try:
            ended_well = self._work.wait(max(left, _SHORTEST))
        except ProcessGroupError:
            raise
        except RuntimeError as error:  # raised by a group of another package
            reason = (str(error).splitlines() or [""])[0]
            if time.monotonic() >= self._deadline_s:
                raise CollectiveTimeoutError(
                    f"exchange_word: round {self._round_number} was not reduced within "
                    f"{self._timeout.total_seconds():g} s ({reason}); abort the group and configure it again"
                ) from error
            raise PeerDisconnectedError(
                f"exchange_word: the reduction of round {self._round_number} failed ({reason}); configure the group "
                "without the disconnected rank"
            ) from error
        if not ended_well:
            raise self._disagreement("the group swallowed an error")
        return self._sums()

    def _sums(self) -> tuple[int, ...]:
        found = self._tensor.tolist()
        ranks, number = self._world_size, self._num_values
        if found[0] != ranks:
            raise self._disagreement(f"{found[0]} of {ranks} ranks were summed")
        if found[1:3] != [ranks * self._short_round, ranks * self._short_round**2]:
            raise self._disagreement("the ranks are in different rounds")
        if found[3:5] != [ranks * number, ranks * number**2]:
            raise self._disagreement("the ranks' words have different lengths")
        halves = found[_HEAD : _HEAD + 2 * number]
        sums = tuple((high << _HALF_BITS) + low for high, low in zip(halves[::2], halves[1::2], strict=True))
        return checked_sums(sums, self._round_number)

    def _disagreement(self, why: str) -> PeerDisconnectedError:
        return PeerDisconnectedError(
            f"exchange_word: no sum of round {self._round_number}, because {why}; abort the group and configure it "
            "again"
        )
