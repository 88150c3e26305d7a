"""What the text of an error says: short replica ids, and one sentence once."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import pytest

import tft_algos.errors
import tft_ckpt.errors
import tft_coord.errors
import tft_pg.errors
from tft_algos.testing import plan_of
from tft_coord.errors import RefusedError

WHOLE = "replica_1:0f3a9c1d-1234-4abc-8def-0123456789ab"
SAYS = f"replica {WHOLE} is gone"
BASES = (
    tft_algos.errors.TrainingError,
    tft_ckpt.errors.CheckpointError,
    tft_coord.errors.CoordinationError,
    tft_pg.errors.ProcessGroupError,
)


OURS = {"tft_coord.core.step.errors", *(base.__module__ for base in BASES), tft_algos.errors.__name__}


def kinds(base: type[Exception]) -> list[type[Exception]]:
    """Of a package's own file of errors; all others inherit the text from these."""
    below = (deeper for kind in base.__subclasses__() for deeper in kinds(kind))
    return [kind for kind in (base, *below) if kind.__module__ in OURS]


@pytest.mark.parametrize(
    "kind",
    [kind for base in BASES for kind in kinds(base) if kind is not tft_algos.errors.ExceptionWithTraceback],
)
def test_every_error_says_short_ids_and_keeps_whole_ones(kind: type[Exception]) -> None:
    try:
        error = kind(SAYS)
    except TypeError:  # it has facts, which do not matter here
        error = kind.__new__(kind)
        Exception.__init__(error, SAYS)
    assert str(error) == "replica replica_1:0f3a9c1d is gone"
    assert error.args == (SAYS,)


def test_the_records_for_machines_have_whole_ids(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tft_errors")
    rig = rigs(plan_of(7))
    rig.manager.start_quorum()
    rig.manager.report_error(tft_coord.errors.UnreachableError(SAYS))
    (record,) = [record for record in caplog.records if record.name == "tft_errors"]
    assert record.error == SAYS  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [RefusedError, tft_coord.errors.ReplicaGroupLostError])
def test_what_ends_a_start_is_said_once_and_with_few_frames(
    rigs: Any, caplog: pytest.LogCaptureFixture, kind: type[Exception], use_async_quorum: bool
) -> None:
    """A wrong secret was said three times, behind the frames of a thread that had only heard of it."""
    rig = rigs(kind("the secret is wrong"), use_async_quorum=use_async_quorum)
    with pytest.raises(kind, match="the secret is wrong") as raised:
        rig.step()
    text = "".join(traceback.format_exception(raised.value))
    assert text.count("the secret is wrong") == 1
    assert "concurrent/futures" not in text
    assert len(traceback.extract_tb(raised.value.__traceback__)) <= 8
    assert "the secret is wrong" not in caplog.text
