"""The contract of `tft_pg.ProcessGroup` as a list of checks that any group can be put through.

A fake or a wrapper that passes them can stand for the real thing, and a real one that passes them can be trusted
with a training job. Each check is a function of a `Subject`; its docstring says what holds. The law of this file: the
list only; what a group computes is checked in `computing`, how it lives in `living`, what a
round's word is in `wording`, what a peer's death does in `dying`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from multiprocessing.reduction import ForkingPickler

from tft_pg.base import ProcessGroup
from tft_pg.errors import InvalidSetting
from tft_pg.testing import computing, dying, living, wording
from tft_pg.testing.subject import Subject

__all__ = ["CHECKS", "check_process_group"]

CHECKS: tuple[Callable[[Subject], None], ...] = (*computing.CHECKS, *living.CHECKS, *wording.CHECKS, *dying.CHECKS)
"""Every check, each a function of a `Subject`; a test runner makes one test of each."""


def check_process_group(
    make: Callable[[], ProcessGroup],
    *,
    world_sizes: tuple[int, ...] = (1, 2, 3),
    ready: bool = False,
    meets_peers: bool = True,
    lacks: Collection[str] = (),
) -> None:
    """Put a kind of group through every check; raises AssertionError, or the group's own error, at the first fault.

    Args:
        make: makes one unconfigured group. It is sent to child processes by pickling if there are peers.
        world_sizes: the sizes that it can have; a group of one only skips what needs a peer.
        ready: whether it works before its first `configure`.
        meets_peers: whether `configure` waits for the other ranks.
        lacks: collectives that it does not have, and refuses; by their names in `tft_pg.COLLECTIVES`.
    Raises: InvalidSetting: `make` can't be pickled; nothing was checked then.
    """
    subject = Subject(make, tuple(world_sizes), ready, meets_peers, frozenset(lacks))
    _require_sendable(subject)
    for check in CHECKS:
        check(subject)


def _require_sendable(subject: Subject) -> None:
    if subject.most < 2:
        return
    try:
        ForkingPickler.dumps(subject.make)
    except Exception as error:  # of whatever type its parts raise
        raise InvalidSetting(
            f"{subject.make!r} can't be sent to the processes that the checks start ({error}); give a class, or a "
            "function at the top of a module"
        ) from error
