"""Checks of a group's life: configured again and again, aborted at any time, bounded in time, and shut down
permanently.

Law of this file: peers are threads of this process, and no rank dies; deaths are in `dying`.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch.distributed import ReduceOp

from tft_pg.base import ProcessGroup
from tft_pg.errors import (
    AbortedError,
    CollectiveTimeoutError,
    ConfigError,
    ConfigureError,
    NotConfiguredError,
    PeerDisconnectedError,
    ProcessGroupClosedError,
    StoreAddressError,
)
from tft_pg.testing.bench import GUARD_S, Bench
from tft_pg.testing.cases import CASES, Case, Sample
from tft_pg.testing.subject import Subject, agree, all_work, failure, reduce_ones, require

__all__ = [
    "CHECKS",
    "a_missing_peer_fails_configure",
    "a_used_prefix_is_refused",
    "abort_and_configure_may_race",
    "abort_before_configure_is_harmless",
    "abort_ends_a_running_collective",
    "abort_ends_a_running_configure",
    "abort_leaves_an_error_until_configure",
    "bad_arguments_are_errors",
    "reconfigure_changes_rank_and_size",
    "set_timeout_acts_at_once",
    "shutdown_is_for_ever",
    "shutdown_leaves_nothing",
    "use_before_configure_is_an_error",
]

_HOUR = timedelta(hours=1)
_RACES = 12
_RACE_S = 0.006


def use_before_configure_is_an_error(subject: Subject) -> None:
    """Check that an unconfigured group raises `NotConfiguredError`, reports no error, and can be printed."""
    with Bench(subject.make) as bench:
        group = bench.make()
        assert group.errored() is None
        assert type(group).__name__ in repr(group)
        assert group.getBackendName()
        if not subject.ready:
            require(failure(group, group.size), NotConfiguredError)
            _every_collective_fails(bench, NotConfiguredError)


def bad_arguments_are_errors(subject: Subject) -> None:
    """Check that a bad rank, address or timeout is refused at once, and the group keeps working."""
    with Bench(subject.make) as bench:
        groups = bench.configured(subject.most)
        group, address = groups[0], bench.fresh_address()
        for rank, world_size in ((-1, 1), (subject.most, subject.most), (0, 0)):
            error = failure(group, partial(group.configure, address, rank, world_size))
            require(error, ConfigError)
        require(failure(group, lambda: group.set_timeout(timedelta(0))), ConfigError)
        if subject.meets_peers:
            require(failure(group, lambda: group.configure("nowhere", 0, 1)), StoreAddressError)
        all_work(bench, groups)


def shutdown_is_for_ever(subject: Subject) -> None:
    """Check that every use after `shutdown` raises `ProcessGroupClosedError`, also before the first `configure`.
    `shutdown` may be repeated.
    """
    with Bench(subject.make) as bench:
        for group in [bench.make(), *bench.configured(subject.most)]:
            group.shutdown()
            group.shutdown()
            group.abort()
            _every_collective_fails(bench, ProcessGroupClosedError, group)
            address = bench.fresh_address()
            require(failure(group, partial(group.configure, address, 0, 1)), ProcessGroupClosedError)
            require(group.errored(), ProcessGroupClosedError)


def shutdown_leaves_nothing(subject: Subject) -> None:
    """Check that `shutdown` restores the number of the process's threads and descriptors."""
    with Bench(subject.make) as bench:
        all_work(bench, bench.configured(subject.most))  # torch keeps some resources from the first use on
    with Bench(subject.make) as bench:
        before = _resources()
        groups = bench.configured(subject.most)
        all_work(bench, groups)
        for group in groups:
            group.shutdown()
        # The store's server notices a disconnected client a moment later.
        _until(lambda: not _beyond(before), lambda: f"left behind: {', '.join(_beyond(before))}")


def reconfigure_changes_rank_and_size(subject: Subject) -> None:
    """Check that the same groups work in every size and order, one configure after another."""
    with Bench(subject.make) as bench:
        groups = [bench.make() for _ in range(subject.most)]
        for world_size in (*subject.world_sizes, *reversed(subject.world_sizes)):
            for members in (groups[:world_size], groups[:world_size][::-1]):
                bench.configure(members)
                all_work(bench, members)


def abort_before_configure_is_harmless(subject: Subject) -> None:
    """Check that an abort before any configure leaves an error until the next `configure`, which works."""
    with Bench(subject.make) as bench:
        groups = [bench.make() for _ in range(subject.most)]
        for group in groups:
            group.abort()
            require(group.errored(), AbortedError)
        bench.configure(groups)
        all_work(bench, groups)


def abort_leaves_an_error_until_configure(subject: Subject) -> None:
    """Check that `abort` leaves an error, collectives then raise `AbortedError`, and a new `configure` clears both."""
    with Bench(subject.make) as bench:
        groups = bench.configured(subject.most)
        for _ in range(2):
            for group in groups:
                group.abort()
                group.abort()
                require(group.errored(), AbortedError)
                require(failure(group, partial(reduce_ones, group)), AbortedError)
            bench.configure(groups)
            all_work(bench, groups)


def abort_ends_a_running_collective(subject: Subject) -> None:
    """Check that `abort` from another thread ends a collective whose last peer never joins, here and on the others.

    After that, the collective writes into no tensor, even if the group is used again.
    """
    if subject.most < 2:
        return
    with Bench(subject.make) as bench:
        groups = bench.configured(subject.most)
        for group in groups:
            group.set_timeout(_HOUR)
        tensors = [torch.ones(1000) for _ in groups[:-1]]
        works = [group.allreduce([tensor], ReduceOp.SUM) for group, tensor in zip(groups, tensors, strict=False)]
        waits = [bench.start(partial(failure, group, work.wait)) for group, work in zip(groups, works, strict=False)]
        groups[0].abort()
        require(waits[0]().get(), AbortedError)
        for group, finish in zip(groups[1:], waits[1:], strict=False):
            require(finish().get(), PeerDisconnectedError)
            require(group.errored(), PeerDisconnectedError)
        left = [tensor.clone() for tensor in tensors]
        require(failure(groups[-1], partial(reduce_ones, groups[-1])), PeerDisconnectedError)
        bench.configure(groups)
        all_work(bench, groups)
        agree(tensors, left)


def abort_ends_a_running_configure(subject: Subject) -> None:
    """Check that `abort` from another thread ends a `configure` whose peer never joins. The next one works."""
    if subject.most < 2 or not subject.meets_peers:
        return
    with Bench(subject.make) as bench:
        groups = [bench.make() for _ in range(subject.most)]
        for _ in range(3):
            address = bench.fresh_address()
            entered = threading.Event()

            def configure(address: str = address, entered: threading.Event = entered) -> None:
                entered.set()
                groups[0].configure(address, 0, subject.most, timeout=_HOUR)

            running = bench.start(partial(failure, groups[0], configure))
            assert entered.wait(GUARD_S)
            # The first abort may come before the configure begins, where it has no effect, or during it.
            finished = threading.Event()
            aborting = bench.start(partial(_abort_until, groups[0], finished))
            try:
                error = running().get()
            finally:
                finished.set()
                aborting().get()
            require(error, AbortedError)
            require(groups[0].errored(), AbortedError)
        bench.configure(groups)
        all_work(bench, groups)


def a_missing_peer_fails_configure(subject: Subject) -> None:
    """Check that a `configure` with a missing peer fails at its deadline and names the rank. The next one works."""
    if subject.most < 2 or not subject.meets_peers:
        return
    with Bench(subject.make) as bench:
        groups = [bench.make() for _ in range(subject.most)]
        limit = timedelta(milliseconds=200)
        address = bench.fresh_address()
        error = failure(groups[0], lambda: groups[0].configure(address, 0, subject.most, timeout=limit))
        require(error, ConfigureError)
        assert isinstance(error, ConfigureError)
        assert error.missing_ranks == tuple(range(1, subject.most)), error
        require(groups[0].errored(), ConfigureError)
        require(failure(groups[0], lambda: reduce_ones(groups[0])), NotConfiguredError)
        bench.configure(groups)
        all_work(bench, groups)


def a_used_prefix_is_refused(subject: Subject) -> None:
    """Check that a second `configure` under the same prefix fails on every rank with an error that says so,
    without hanging.
    """
    if not subject.meets_peers:
        return
    with Bench(subject.make) as bench:
        groups = [bench.make() for _ in range(subject.most)]
        address = bench.fresh_address()

        def configure(rank: int, group: ProcessGroup) -> BaseException | None:
            return failure(group, lambda: group.configure(address, rank, len(groups)))

        assert bench.all(groups, configure) == [None] * len(groups)
        for error in bench.all(groups, configure):
            require(error, ConfigureError)
            assert "fresh prefix" in str(error), error
        bench.configure(groups)
        all_work(bench, groups)


def set_timeout_acts_at_once(subject: Subject) -> None:
    """Check that `set_timeout` on a live group bounds the next operation, for several collectives."""
    if subject.most < 2:
        return
    with Bench(subject.make) as bench:
        groups = [bench.make() for _ in range(subject.most)]
        sample = Sample(0, subject.most)
        for row in ("allreduce", "recv", "broadcast", "barrier"):
            groups[0].set_timeout(_HOUR)
            bench.configure(groups)
            groups[0].set_timeout(timedelta(milliseconds=100))
            case = next(case for case in CASES if case.row == row)
            error = failure(groups[0], partial(_run, groups[0], case, sample))
            require(error, CollectiveTimeoutError)
            require(groups[0].errored(), CollectiveTimeoutError)
        groups[0].set_timeout(timedelta(seconds=GUARD_S))
        bench.configure(groups)
        all_work(bench, groups)


def _run(group: ProcessGroup, case: Case, sample: Sample) -> None:
    for work in case.start(group, sample).works:
        work.wait()


def _every_collective_fails(bench: Bench, kind: type[Exception], group: ProcessGroup | None = None) -> None:
    """Check that every collective fails, on this group or on a new group for each."""
    for case in CASES:
        on = group or bench.make()
        require(failure(on, partial(case.start, on, Sample(0, 2))), kind)


def abort_and_configure_may_race(subject: Subject) -> None:
    """Check that aborts at random moments of a configure end it or have no effect. The next configure works."""
    rng = random.Random(4)
    with Bench(subject.make) as bench:
        groups = [bench.make() for _ in range(subject.most)]
        for _ in range(_RACES):
            address = bench.fresh_address()
            delays_s = [rng.random() * _RACE_S for _ in groups]

            def race(
                rank: int, group: ProcessGroup, address: str = address, delays_s: list[float] = delays_s
            ) -> Exception | None:
                ended = threading.Event()
                aborting = bench.start(partial(_abort_until, group, ended, first_s=delays_s[rank]))
                try:
                    return failure(group, partial(group.configure, address, rank, subject.most))
                finally:
                    ended.set()
                    aborting().get()

            for error in bench.all(groups, race):
                assert error is None or isinstance(error, (AbortedError, ConfigureError)), f"{error!r}"
        bench.configure(groups)
        all_work(bench, groups)


def _abort_until(group: ProcessGroup, finished: threading.Event, *, first_s: float = 0.005) -> None:
    if finished.wait(first_s):
        return
    group.abort()
    while not finished.wait(0.005):
        group.abort()


def _resources() -> tuple[Counter[str], Counter[str]]:
    """Return the threads and the descriptors of this process, each with a name."""
    return _names("task", _thread_name), _names("fd", os.readlink)


def _names(directory: str, read: Callable[[str], str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for entry in os.listdir(f"/proc/self/{directory}"):
        with suppress(OSError):  # it has ended in the meantime
            found[read(f"/proc/self/{directory}/{entry}")] += 1
    return found


def _thread_name(task: str) -> str:
    return "thread " + Path(task, "comm").read_text().strip()


def _beyond(before: tuple[Counter[str], Counter[str]]) -> list[str]:
    """Return the names that are new, if there are more threads or more descriptors than before."""
    return [
        name
        for now, then in zip(_resources(), before, strict=True)
        if now.total() > then.total()
        for name in (now - then).elements()
    ]


def _until(condition: Callable[[], bool], describe: Callable[[], str]) -> None:
    """Poll until a condition holds that nothing signals."""
    pause = threading.Event()
    for _ in range(500):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(describe())


CHECKS: tuple[Callable[[Subject], None], ...] = (
    use_before_configure_is_an_error,
    bad_arguments_are_errors,
    shutdown_is_for_ever,
    shutdown_leaves_nothing,
    reconfigure_changes_rank_and_size,
    abort_before_configure_is_harmless,
    abort_leaves_an_error_until_configure,
    abort_ends_a_running_collective,
    abort_ends_a_running_configure,
    a_missing_peer_fails_configure,
    a_used_prefix_is_refused,
    set_timeout_acts_at_once,
    abort_and_configure_may_race,
)
"""How a group lives; each a function of a `Subject`."""
