"""Every group and every stack of two wrappers passes the published conformance suite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tft_pg import (
    COLLECTIVES,
    ConfigError,
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupWrapper,
)
from tft_pg.testing import CHECKS, GLOO_LACKS, Combination, Subject, check_process_group, combinations
from tft_pg.testing.cases import CASES
from tft_pg.testing.computing import DTYPES, every_combination_agrees_or_is_refused
from tft_pg.testing.dying import every_death_at_every_point
from tft_pg.testing.living import reconfigure_changes_rank_and_size

_Wrapper = Callable[[ProcessGroup], ProcessGroup]
_Check = Callable[[Subject], None]

WRAPPERS: tuple[_Wrapper, ...] = (
    ProcessGroupWrapper,
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
)
ALL_SIZES = (1, 2, 3, 4, 5, 6, 7, 8)
# Seconds each, and a wrapper is nothing to them: for each kind of group once, for stacks in the soak.
LONG = (every_combination_agrees_or_is_refused, every_death_at_every_point)
SHORT = tuple(check for check in CHECKS if check not in LONG)


def stacked(outer: _Wrapper, inner: _Wrapper, backend: Callable[[], ProcessGroup]) -> ProcessGroup:
    return outer(inner(backend()))


def wrapped(wrapper: _Wrapper) -> ProcessGroup:
    return wrapper(ProcessGroupGloo())


GLOO = Subject(ProcessGroupGloo, lacks=GLOO_LACKS)
DUMMY = Subject(ProcessGroupDummy, world_sizes=(1,), ready=True, meets_peers=False)
STACKS = [(outer, inner) for outer in WRAPPERS for inner in WRAPPERS]


def over_gloo(outer: _Wrapper, inner: _Wrapper, world_sizes: tuple[int, ...]) -> Subject:
    return Subject(partial(stacked, outer, inner, ProcessGroupGloo), world_sizes, lacks=GLOO_LACKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("subject", [GLOO, DUMMY], ids=["gloo", "dummy"])
def test_every_group(subject: Subject, check: _Check) -> None:
    check(subject)


@pytest.mark.in_parts
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_wrapper_over_gloo(wrapper: _Wrapper) -> None:
    for check in SHORT:
        check(Subject(partial(wrapped, wrapper), (1, 2), lacks=GLOO_LACKS))


@pytest.mark.in_parts
@pytest.mark.parametrize(("outer", "inner"), STACKS)
def test_every_stack_of_two_wrappers_over_dummy(outer: _Wrapper, inner: _Wrapper) -> None:
    make = partial(stacked, outer, inner, ProcessGroupDummy)
    check_process_group(make, world_sizes=(1,), ready=True, meets_peers=False)


@pytest.mark.in_parts
@pytest.mark.parametrize(("outer", "inner"), STACKS)
def test_every_stack_of_two_wrappers_over_gloo(outer: _Wrapper, inner: _Wrapper) -> None:
    for check in STACKED:
        check(over_gloo(outer, inner, (2,)))


# What a second wrapper could spoil: forwarding, futures, errors that one of them keeps, and both ends of life.
STACKED = tuple(
    check
    for check in SHORT
    if check.__name__
    in {
        "every_size_agrees",
        "both_call_forms_agree",
        "torchs_functions_take_the_group",
        "futures_hold_the_results",
        "a_wait_may_be_given_up_and_repeated",
        "use_before_configure_is_an_error",
        "shutdown_is_for_ever",
        "abort_leaves_an_error_until_configure",
        "abort_ends_a_running_collective",
    }
)


def test_what_can_not_be_sent_to_other_processes_is_refused_before_any_check() -> None:
    made: list[ProcessGroup] = []

    def make() -> ProcessGroup:
        made.append(ProcessGroupDummy())
        return made[-1]

    with pytest.raises(ConfigError, match="give a class, or a function at the top of a module"):
        check_process_group(make)
    assert made == []


def test_gloo_grows_and_shrinks_from_one_rank_to_eight() -> None:
    reconfigure_changes_rank_and_size(Subject(ProcessGroupGloo, ALL_SIZES, lacks=GLOO_LACKS))


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_soak_gloo_in_every_size(check: _Check) -> None:
    check(Subject(ProcessGroupGloo, ALL_SIZES, lacks=GLOO_LACKS))


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", range(20))
def test_soak_the_whole_suite_twenty_times(run: int) -> None:
    """The bare group each time, and a stack: all of them come up twice."""
    outer, inner = STACKS[run % len(STACKS)]
    for subject in (GLOO, over_gloo(outer, inner, (1, 2, 3))):
        for check in CHECKS:
            check(subject)


# --- what there is -------------------------------------------------------------------------------------------------

FLOATS = ("float16", "bfloat16", "float32", "float64")
WHOLE = ("uint8", "int8", "int32", "int64")
COMPLEX = ("complex64", "complex128")
BITWISE = ("MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")
GLOO_REDUCES = {
    **dict.fromkeys(FLOATS, ("SUM", "AVG", "MIN", "MAX", "PRODUCT")),
    **dict.fromkeys(WHOLE, ("SUM", *BITWISE)),
    **dict.fromkeys(COMPLEX, ("SUM", "AVG")),
    "bool": BITWISE,
}
GLOO_MOVES = (*FLOATS, *WHOLE, "bool")
EVERY_DTYPE = tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES)


def gloo_has() -> set[Combination]:
    found = set()
    for case in GLOO.cases:
        if not case.sends:
            continue
        if case.reduces:
            found |= {Combination(case.row, dtype, op) for dtype, ops in GLOO_REDUCES.items() for op in ops}
        elif case.row in ("send", "recv", "recv_anysource"):
            found |= {Combination(case.row, dtype) for dtype in EVERY_DTYPE}
        else:
            more = COMPLEX if case.row == "broadcast" else ()
            found |= {Combination(case.row, dtype) for dtype in (*GLOO_MOVES, *more)}
    return found


def test_gloo_has_what_it_had() -> None:
    assert combinations(GLOO, 2) == gloo_has()


def test_every_collective_has_a_case() -> None:
    assert {case.row for case in CASES} == {row.name for row in COLLECTIVES}
