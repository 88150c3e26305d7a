"""The contract of `tft_pg.ProcessGroup` as a list of checks for any group.

A fake or a wrapper that passes these checks can replace the real group. A real group that passes them can be trusted
with a training job. Each check is a function of a `Subject`, and its docstring states the requirement.

Law of this file: the list only. The checks are in `computing` (results), `living` (life cycle), `wording` (words) and
`dying` (deaths of peers).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from multiprocessing.reduction import ForkingPickler

from tft_pg.base import ProcessGroup
from tft_pg.errors import ConfigError
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
    """Run every check on a kind of group. Raises AssertionError, or the group's own error, at the first fault.

    Args:
        make: makes one unconfigured group. With peers, it is pickled and sent to child processes.
        world_sizes: the supported sizes. A group of one only skips the checks that need a peer.
        ready: whether the group works before its first `configure`.
        meets_peers: whether `configure` waits for the other ranks.
        lacks: the unsupported collectives, which the group refuses; by their names in `tft_pg.COLLECTIVES`.

    Raises: ConfigError: `make` can't be pickled; nothing was checked then.
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
    except Exception as error:  # pickling raises any type of error
        raise ConfigError(
            f"{subject.make!r} can't be sent to the processes that the checks start ({error}); give a class, or a "
            "function at the top of a module"
        ) from error
