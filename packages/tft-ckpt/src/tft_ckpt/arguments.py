"""Checks of arguments that all transports share.

Law of this file: arguments to plain values, or one sentence about what is wrong with them.
"""

from __future__ import annotations

from datetime import timedelta

from tft_ckpt.errors import ConfigError
from tft_ckpt.key import StateKey

__all__ = ["key_of", "positive_seconds"]


def key_of(key: StateKey | None, step: int) -> StateKey:
    """Return the name of the requested state.

    Raises: ConfigError: the key names another step.
    """
    if key is None:
        return StateKey(quorum_id=0, nonce=0, step=step, lineage=0)
    if key.step != step:
        raise ConfigError(f"step is {step}, but key names step {key.step}; give the same step in both")
    return key


def positive_seconds(timeout: timedelta) -> float:
    """Return a timeout in seconds. Raises: ConfigError: it is not a timedelta above zero."""
    if not isinstance(timeout, timedelta):
        raise ConfigError(f"timeout is {timeout!r}; give a timedelta, such as timedelta(seconds=60)")
    seconds = timeout.total_seconds()
    if seconds <= 0:
        raise ConfigError(f"timeout is {seconds:g} s; give more than 0")
    return seconds
