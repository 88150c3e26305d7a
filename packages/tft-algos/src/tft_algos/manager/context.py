"""The objects that the parts of one Manager share.

Law of this file: one value, made once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from tft_algos.manager.config import ResolvedConfig
from tft_algos.manager.interfaces import Clock, Coordinator
from tft_algos.manager.recovery.user_state import UserState
from tft_algos.manager.step.error_reporter import ErrorReporter
from tft_algos.manager.step.mailbox import StepMailbox
from tft_algos.manager.step.time_account import TimeAccount
from tft_ckpt import CheckpointTransport


@dataclass(frozen=True, slots=True)
class ManagerContext:
    """The parts that other parts need, and the facts.

    Args:
        config: resolved.
        step: the mailbox of the steps.
        coordinator: represents this rank.
        transport: moves live state.
        user_state: the state that the user has registered.
        reports: receives errors and log lines.
        clock: returns the time.
        times: what the training thread's time goes to.
        closing: set when the Manager ends.
    """

    config: ResolvedConfig
    step: StepMailbox
    coordinator: Coordinator
    transport: CheckpointTransport[Any]
    user_state: UserState
    reports: ErrorReporter
    clock: Clock
    times: TimeAccount
    closing: threading.Event
