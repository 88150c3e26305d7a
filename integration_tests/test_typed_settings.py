"""The type checker's knowledge of the settings: `make lint` checks this file, and fails at an unused ignore comment."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tft_algos import ConfigError, Manager, UnknownSettingError
from tft_pg import ProcessGroupDummy


def test_a_misspelt_setting_is_refused_by_both() -> None:
    with pytest.raises(UnknownSettingError, match="the nearest is 'timeout'"):
        Manager(ProcessGroupDummy(), timeuot=timedelta(seconds=1))  # type: ignore[call-arg]


def test_a_setting_of_another_type_is_refused_by_both() -> None:
    with pytest.raises(ConfigError, match="timeout is 60"):
        Manager(ProcessGroupDummy(), timeout=60)  # type: ignore[arg-type]
