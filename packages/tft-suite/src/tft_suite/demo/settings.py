"""The settings of a demo run, checked once.

Law of this file: one frozen value. It reads and starts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from tft_suite.demo.schedule import kill_window
from tft_suite.errors import ConfigError

REPLICAS_MAX = 16
STEPS_MAX = 1_000_000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """One demo run.

    Args:
        replicas: replica groups, each one process. 1 to 16.
        steps: committed steps at which all replicas stop.
        kills: the number of kills. A kill needs a second replica, from which the killed one heals.
        seed: of the kills, the initial weights and the samples.
        out: folder for report.json, timeline.png and a log of each replica. It is made if it does not exist.
    Raises: ConfigError: a number is out of its range, or the kills don't fit. The message is one sentence.
    """

    replicas: int = 3
    steps: int = 400
    kills: int = 2
    seed: int = 0
    out: Path = Path("tft-demo")

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= REPLICAS_MAX:
            raise ConfigError(f"--replicas is {self.replicas}; give 1 to {REPLICAS_MAX}.")
        if not 1 <= self.steps <= STEPS_MAX:
            raise ConfigError(f"--steps is {self.steps}; give 1 to {STEPS_MAX}.")
        if self.kills < 0:
            raise ConfigError(f"--kills is {self.kills}; give 0 or more.")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"--seed is {self.seed}; give 0 to {2**32 - 1}.")
        if self.out == Path() or not str(self.out).isprintable():
            raise ConfigError(f"--out is {str(self.out)!r}; give a folder of its own, in printable characters.")
        if self.kills and self.replicas < 2:
            raise ConfigError(
                "--kills needs --replicas 2 or more, as a killed replica heals from another; else give --kills 0."
            )
        if self.kills > (room := len(kill_window(self.steps))):
            raise ConfigError(
                f"--kills {self.kills} does not fit into {room} steps (15 % to 50 % of --steps {self.steps}); "
                "raise --steps."
            )
