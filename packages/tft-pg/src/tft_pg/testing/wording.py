"""Checks of the word of a round: the same sum for every rank that gets one, and an error in time for all others.

Law of this file: peers are threads of this process, and a rank dies by its `abort`; real deaths are in `dying`.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

from tft_pg.base import ProcessGroup
from tft_pg.errors import (
    AbortedError,
    CollectiveTimeoutError,
    ConfigError,
    NotConfiguredError,
    OperationRefusedError,
    PeerDisconnectedError,
    ProcessGroupClosedError,
)
from tft_pg.testing.bench import GUARD_S, Bench
from tft_pg.testing.subject import Subject, all_work, failure, require
from tft_pg.word import WORD_VALUES_MAX, WordExchange

__all__ = [
    "CHECKS",
    "a_late_word_fails_at_its_deadline",
    "a_leaver_waits_until_its_last_word_has_passed",
    "a_rank_that_is_ahead_is_waited_for",
    "a_sum_that_does_not_fit_is_refused_everywhere",
    "a_word_is_one_sum_everywhere",
    "a_word_needs_a_group",
    "a_word_that_can_not_be_is_refused",
    "abort_ends_a_word",
    "all_or_an_error_wherever_a_rank_dies",
    "rounds_are_not_mixed",
    "words_of_two_configures_are_not_mixed",
]

_GUARD = timedelta(seconds=GUARD_S)
_HOUR = timedelta(hours=1)
_ROUNDS = 5
_AHEAD_S = 0.1
_INT64_MAX = (1 << 63) - 1
_INT64_MIN = -(1 << 63)


def _start(group: ProcessGroup, words: Sequence[int], round_number: int, limit: timedelta = _GUARD) -> WordExchange:
    return group.exchange_word(words, round_number=round_number, timeout=limit)


def _exchanged(group: ProcessGroup, words: Sequence[int], round_number: int) -> tuple[int, ...]:
    return _start(group, words, round_number).wait()


def a_word_is_one_sum_everywhere(subject: Subject) -> None:
    """Check that every rank gets the sum of each value, in every size, for any number of values, in every round."""
    with Bench(subject.make) as bench:
        groups = [bench.make() for _ in range(subject.most)]
        for size in subject.world_sizes:
            bench.configure(groups[:size])
            for number in range(_ROUNDS):
                found = bench.all(
                    groups[:size],
                    lambda rank, group, number=number: _exchanged(group, [1, rank, -rank, number * rank], number),  # type: ignore[misc]
                )
                ranks = sum(range(size))
                assert found == [(size, ranks, -ranks, number * ranks)] * size, found
            for count in (1, WORD_VALUES_MAX):
                words = list(range(count))
                round_number = (1 << 40) + count
                found = bench.all(
                    groups[:size],
                    lambda rank, group, words=words, number=round_number: _exchanged(group, words, number),  # type: ignore[misc]
                )
                assert found == [tuple(size * value for value in words)] * size, found
            all_work(bench, groups[:size])


def a_sum_that_does_not_fit_is_refused_everywhere(subject: Subject) -> None:
    """Check that 64-bit sums are exact, also with larger intermediate sums. If a final sum overflows, all ranks
    get an error.
    """
    size = subject.most
    with Bench(subject.make) as bench:
        groups = bench.configured(size)
        # The values of the first two of three ranks overflow together, and the third's brings the sum back.
        values = [_INT64_MAX, _INT64_MAX, _INT64_MIN, *[0] * size][:size] if size != 2 else [_INT64_MAX, _INT64_MIN]
        found = bench.all(groups, lambda rank, group: _exchanged(group, [values[rank], -values[rank] // 2], 1))
        assert found == [(sum(values), sum(-value // 2 for value in values))] * size, found
        if size == 1:
            return
        for number, value in ((2, _INT64_MAX), (3, _INT64_MIN)):
            errors = bench.all(
                groups,
                lambda rank, group, number=number, value=value: failure(  # type: ignore[misc]
                    group, partial(_exchanged, group, [value, 1], number)
                ),
            )
            for error in errors:
                require(error, OperationRefusedError)
        assert bench.all(groups, lambda rank, group: _exchanged(group, [rank], 4)) == [(sum(range(size)),)] * size
        all_work(bench, groups)


def a_word_that_can_not_be_is_refused(subject: Subject) -> None:
    """Check that invalid values and rounds are refused at once, and the group keeps working."""
    with Bench(subject.make) as bench:
        groups = bench.configured(subject.most)
        for words, number in (
            ([], 1),
            ([0] * (WORD_VALUES_MAX + 1), 1),
            ([_INT64_MAX + 1], 1),
            ([_INT64_MIN - 1], 1),
            (["1"], 1),
            ([1.5], 1),
            ([1], -1),
            ([1], 1 << 64),
        ):
            for group in groups:
                require(failure(group, partial(_start, group, words, number)), ConfigError)  # type: ignore[arg-type]
        require(failure(groups[0], lambda: _start(groups[0], [1], 1, timedelta(0))), ConfigError)
        assert bench.all(groups, lambda rank, group: _exchanged(group, [1], 1)) == [(len(groups),)] * len(groups)


def a_word_needs_a_group(subject: Subject) -> None:
    """Check that a word raises the same errors as a collective before `configure`, after `abort` and after
    `shutdown`.
    """
    with Bench(subject.make) as bench:
        groups = [bench.make() for _ in range(subject.most)]
        if not subject.ready:
            require(failure(groups[0], partial(_start, groups[0], [1], 1)), NotConfiguredError)
        bench.configure(groups)
        for group in groups:
            group.abort()
            require(failure(group, partial(_start, group, [1], 1)), AbortedError)
        bench.configure(groups)
        assert bench.all(groups, lambda rank, group: _exchanged(group, [1], 1)) == [(len(groups),)] * len(groups)
        for group in groups:
            group.shutdown()
            require(failure(group, partial(_start, group, [1], 1)), ProcessGroupClosedError)


def rounds_are_not_mixed(subject: Subject) -> None:
    """Check that no rank gets a sum if one rank has a different round or number of values."""
    size = subject.most
    if size < 2:
        return
    with Bench(subject.make) as bench:
        groups = [bench.make() for _ in range(size)]
        for words, numbers in (
            ([[1]] * size, [7] * (size - 1) + [8]),
            ([[1]] * size, [8] + [7] * (size - 1)),
            ([[1]] * (size - 1) + [[1, 2]], [7] * size),
            ([[1, 2, 3]] + [[1]] * (size - 1), [7] * size),
        ):
            bench.configure(groups)

            def act(
                rank: int,
                group: ProcessGroup,
                words: Sequence[Sequence[int]] = words,
                numbers: Sequence[int] = numbers,
            ) -> Exception | None:
                return _aborting(group, partial(_exchanged, group, words[rank], numbers[rank]))

            for error in bench.all(groups, act):
                require(error, PeerDisconnectedError)
        bench.configure(groups)
        all_work(bench, groups)


def _aborting(group: ProcessGroup, act: Callable[[], object]) -> Exception | None:
    """Return the error of an action. After an error, abort the group, as a rank that does not commit does."""
    error = failure(group, act)
    if error is not None:
        group.abort()
    return error


def words_of_two_configures_are_not_mixed(subject: Subject) -> None:
    """Check that a new `configure` discards an unfinished word, and may use its round number again."""
    size = subject.most
    if size < 2:
        return
    with Bench(subject.make) as bench:
        groups = bench.configured(size)
        started = [_start(group, [100], 1) for group in groups[:-1]]
        bench.configure(groups)
        assert bench.all(groups, lambda rank, group: _exchanged(group, [1], 1)) == [(size,)] * size
        for exchange in started:
            try:
                sums = exchange.wait()
            except (AbortedError, PeerDisconnectedError):
                continue
            raise AssertionError(f"a word of a group that is gone ended with {sums}")
        all_work(bench, groups)


def a_rank_that_is_ahead_is_waited_for(subject: Subject) -> None:
    """Check that a rank may start the next round while others wait in this one. Both get their own sums."""
    size = subject.most
    if size < 2:
        return
    with Bench(subject.make) as bench:
        groups = bench.configured(size)
        ahead = [threading.Event() for _ in range(_ROUNDS)]

        def act(rank: int, group: ProcessGroup) -> list[tuple[int, ...]]:
            found = []
            for number in range(_ROUNDS):
                exchange = _start(group, [number], number)
                if rank:
                    ahead[number].set()
                elif number + 1 < _ROUNDS:
                    # In a large group no other rank can be ahead of one that does not read, and this wait expires.
                    ahead[number + 1].wait(_AHEAD_S)
                found.append(exchange.wait())
            return found

        assert bench.all(groups, act) == [[(size * number,) for number in range(_ROUNDS)]] * size
        all_work(bench, groups)


def a_late_word_fails_at_its_deadline(subject: Subject) -> None:
    """Check that a missing word fails the other ranks' exchange at the deadline, and their group too."""
    size = subject.most
    if size < 2:
        return
    with Bench(subject.make) as bench:
        groups = bench.configured(size)
        limit = timedelta(milliseconds=50)
        exchanges = [_start(group, [1], 1, limit) for group in groups[:-1]]
        error = failure(groups[0], exchanges[0].wait)
        require(error, CollectiveTimeoutError)
        require(groups[0].errored(), CollectiveTimeoutError)
        require(failure(groups[0], exchanges[0].wait), CollectiveTimeoutError)
        for group in groups:
            group.abort()
        for group, exchange in zip(groups[1:], exchanges[1:], strict=False):
            require(failure(group, exchange.wait), AbortedError, PeerDisconnectedError, CollectiveTimeoutError)
        bench.configure(groups)
        assert bench.all(groups, lambda rank, group: _exchanged(group, [1], 1)) == [(size,)] * size
        all_work(bench, groups)


def abort_ends_a_word(subject: Subject) -> None:
    """Check that `abort` from another thread ends a waiting word, here and on the other ranks."""
    size = subject.most
    if size < 2:
        return
    with Bench(subject.make) as bench:
        groups = bench.configured(size)
        entered = threading.Barrier(size)

        def wait(group: ProcessGroup) -> Exception | None:
            exchange = _start(group, [1], 1, _HOUR)
            entered.wait(GUARD_S)
            return failure(group, exchange.wait)

        waits = [bench.start(partial(wait, group)) for group in groups[:-1]]
        entered.wait(GUARD_S)
        groups[0].abort()
        require(waits[0]().get(), AbortedError)
        # The others have rank 0's word and wait for the last rank's. Rank 0's abort must end that wait soon.
        for finish in waits[1:]:
            require(finish().get(), PeerDisconnectedError)
        require(failure(groups[-1], partial(_exchanged, groups[-1], [1], 1)), PeerDisconnectedError)
        bench.configure(groups)
        assert bench.all(groups, lambda rank, group: _exchanged(group, [1], 1)) == [(size,)] * size
        all_work(bench, groups)


class _Death(enum.Enum):
    """The moment at which a rank ends."""

    BEFORE = "before its word"
    STARTED = "after it has started its word"
    ENDED = "as soon as its word has ended"


def all_or_an_error_wherever_a_rank_dies(subject: Subject) -> None:
    """Check that a death at any point of a word gives the others one equal sum or an error. No rank hangs."""
    with Bench(subject.make) as bench:
        groups = [bench.make() for _ in range(subject.most)]
        for size in (size for size in subject.world_sizes if size > 1):
            for death in _Death:
                for victim in {0, size - 1}:
                    bench.configure(groups[:size])
                    _check_death(bench, groups[:size], victim, death)
        bench.configure(groups)
        all_work(bench, groups)


def _check_death(bench: Bench, groups: Sequence[ProcessGroup], victim: int, death: _Death) -> None:
    expected = (len(groups), sum(range(len(groups))))

    def act(rank: int, group: ProcessGroup) -> tuple[int, ...] | Exception | None:
        if rank == victim and death is _Death.BEFORE:
            group.abort()
            return None
        found: list[tuple[int, ...]] = []

        def exchange() -> None:
            started = _start(group, [1, rank], 1, _HOUR)
            if rank == victim and death is _Death.STARTED:
                group.abort()
            else:
                found.append(started.wait())

        error = failure(group, exchange)
        if error is not None or rank == victim:
            group.abort()
        return found[0] if found else error

    outcomes = bench.all(groups, act)
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, tuple):
            assert outcome == expected, f"rank {rank} got {outcome}, and a rank died {death.value}"
        elif rank != victim:
            require(outcome, PeerDisconnectedError)
    if death is _Death.BEFORE:
        assert not any(isinstance(outcome, tuple) for outcome in outcomes), outcomes


def a_leaver_waits_until_its_last_word_has_passed(subject: Subject) -> None:
    """Check that a rank that lingers after its last word, and then shuts down, leaves the others with the sum."""
    size = subject.most
    with Bench(subject.make) as bench:
        groups = bench.configured(size)

        def act(rank: int, group: ProcessGroup) -> tuple[int, ...]:
            sums = _exchanged(group, [1], 1)
            if rank == 0:
                group.linger(timedelta(seconds=1))
            if rank == 0 or size > 1:
                group.shutdown()
            return sums

        assert bench.all(groups, act) == [(size,)] * size


CHECKS: tuple[Callable[[Subject], None], ...] = (
    a_word_is_one_sum_everywhere,
    a_sum_that_does_not_fit_is_refused_everywhere,
    a_word_that_can_not_be_is_refused,
    a_word_needs_a_group,
    rounds_are_not_mixed,
    words_of_two_configures_are_not_mixed,
    a_rank_that_is_ahead_is_waited_for,
    a_late_word_fails_at_its_deadline,
    abort_ends_a_word,
    all_or_an_error_wherever_a_rank_dies,
    a_leaver_waits_until_its_last_word_has_passed,
)
"""What a word is; each a function of a `Subject`."""
