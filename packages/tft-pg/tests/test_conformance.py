"""Every group and every stack of two wrappers passes the published conformance suite."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tft_pg import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupWrapper,
)
from tft_pg.testing import CHECKS, Subject, check_process_group


def plain() -> ProcessGroup:
    return ProcessGroupWrapper(ProcessGroupGloo())


def swallowing() -> ProcessGroup:
    return ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo())


def faulty() -> ProcessGroup:
    return FakeProcessGroupWrapper(ProcessGroupGloo())


SUBJECTS = {
    "gloo": Subject(ProcessGroupGloo),
    "plain": Subject(plain, world_sizes=(1, 2)),
    "swallowing": Subject(swallowing, world_sizes=(1, 2)),
    "faulty": Subject(faulty, world_sizes=(1, 2)),
    "dummy": Subject(ProcessGroupDummy, world_sizes=(1,), ready=True, meets_peers=False),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_conformance(subject: Subject, check: Callable[[Subject], None]) -> None:
    check(subject)


_WRAPPERS: tuple[Callable[[ProcessGroup], ProcessGroup], ...] = (
    ProcessGroupWrapper,
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
)


@pytest.mark.parametrize("outer", _WRAPPERS)
@pytest.mark.parametrize("inner", _WRAPPERS)
def test_every_stack_of_two_wrappers_over_dummy(
    outer: Callable[[ProcessGroup], ProcessGroup], inner: Callable[[ProcessGroup], ProcessGroup]
) -> None:
    check_process_group(lambda: outer(inner(ProcessGroupDummy())), world_sizes=(1,), ready=True, meets_peers=False)
