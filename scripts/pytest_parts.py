"""The parts of the slow tests, of which `--part` runs one, and the order of the files.

Law of this file: the option, the marker, the choice and the order. Each test says itself whether it is slow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final
from zlib import crc32

import pytest

PARTS: Final = 12
EVERY_PART: Final = "all"
# These files take the longest, the longest first. They begin first: at the end of a run, one process would run the last
# of them alone.
LONGEST: Final = (
    "packages/tft-sim/tests/test_simulator.py",
    "integration_tests/test_train_lm.py",
    "integration_tests/test_every_way_to_die.py",
    "integration_tests/test_tutorial.py",
    "integration_tests/test_readme.py",
    "integration_tests/test_train_ddp.py",
    "integration_tests/test_forks.py",
    "integration_tests/test_manager_training.py",
    "packages/tft-pg/tests/test_abort_soak.py",
    "packages/tft-sim/tests/test_standing_quorums.py",
    "integration_tests/test_standing_jobs.py",
    "packages/tft-pg/tests/test_conformance.py",
    "integration_tests/test_stragglers.py",
    "integration_tests/test_faults_at_every_phase.py",
    "integration_tests/test_cut_cable.py",
    "integration_tests/test_leaving.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        default=EVERY_PART,
        help=f"run one of {PARTS} parts of the tests marked in_parts: a commit's hash chooses it; {EVERY_PART}: all "
        "parts (the default)",
    )


def part_of(text: str) -> int | None:
    """Return the part that a commit's hash chooses, or None for all parts.

    Raises UsageError: the text is not a hash.
    """
    if text == EVERY_PART:
        return None
    try:
        return int(text, 16) % PARTS
    except ValueError:
        raise pytest.UsageError(
            f"--part is {text!r}; give a commit's hash, a number below {PARTS}, or {EVERY_PART}"
        ) from None


def parts(tests: list[tuple[str, str]]) -> list[int]:
    """Return the part of each test.

    The cases of one function go to successive parts, beginning at a part that its name chooses.

    Args:
        tests: the name of each, and the fixture that computes its result, or the empty string. All tests of a file that
            name the same fixture are in one part.
    """
    found = []
    cases: Counter[str] = Counter()
    for test, fixture in tests:
        function = test.partition("::")[0] + "::" + fixture if fixture else test.partition("[")[0]
        found.append((crc32(function.encode()) + cases[function]) % PARTS)
        cases[function] += not fixture
    return found


def pytest_report_header(config: pytest.Config) -> str | None:
    part = part_of(config.getoption("--part"))
    return None if part is None else f"part {part} of {PARTS} of the slow tests (--part={part}; --part={EVERY_PART})"


@pytest.hookimpl(tryfirst=True)  # before -k and -m, so that they do not change the part of a test
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=place_of)  # stable, so each file keeps its order
    part = part_of(config.getoption("--part"))
    if part is None:
        return
    slow = [item for item in items if item.get_closest_marker("in_parts")]
    cases: defaultdict[str, set[str]] = defaultdict(set)
    for item in slow:
        cases[function_of(item)].add(case_of(item))
    others = set()
    for item, its_part in zip(slow, parts([(item.nodeid, fixture_of(item)) for item in slow]), strict=True):
        kept = always(item)
        if missing := kept - cases[function_of(item)]:
            raise pytest.UsageError(f"in_parts of {function_of(item)} has always={missing}; it has no such case")
        if its_part != part and case_of(item) not in kept:
            others.add(item)
    config.hook.pytest_deselected(items=[item for item in slow if item in others])
    items[:] = [item for item in items if item not in others]


def place_of(item: pytest.Item) -> int:
    """Return the place of a test's file among the longest, or the place after them."""
    file = item.nodeid.partition("::")[0]
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def case_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[2].removesuffix("]")


def always(item: pytest.Item) -> set[str]:
    """Return the cases of a test's function that are in every part."""
    marker = item.get_closest_marker("in_parts")
    return set(marker.kwargs.get("always", ())) if marker else set()


def fixture_of(item: pytest.Item) -> str:
    """Return the fixture that computes the results of several tests, or the empty string."""
    marker = item.get_closest_marker("in_parts")
    return str(marker.kwargs.get("fixture", "")) if marker else ""
