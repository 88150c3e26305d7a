"""The settings of a lighthouse's cores: the rules of its quorums, and the limits on what its clients may use.

Law of this file: checked values, and what they are for one job; nothing here decides about a replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Final

from tft_coord.core.stragglers import StragglerPolicy
from tft_coord.errors import ConfigError
from tft_coord.timeouts import LONGEST_MS, Timeouts

QUORUM_MOST: Final = 100_000  # members
JOBS_MOST: Final = 100_000
# Lost replicas are remembered for a while, beside those that are connected.
LOST_KEPT_MOST: Final = 10_000


def _check_number(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{name} is {value!r}; give 1 to {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """The settings of one job that differ from those of all jobs.

    Args:
        min_replicas: smallest quorum; None: as for all jobs.
        max_replicas: most connected replicas; None: as for all jobs.
    Raises: ConfigError: a number is out of its range.
    """

    min_replicas: int | None = None
    max_replicas: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None:
                _check_number(item.name, value, QUORUM_MOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the clients of a lighthouse may use of it.

    Args:
        max_jobs: jobs that are remembered; a job is forgotten some time after its last replica.
        max_replicas: connected replicas of one job.
        max_streams: open streams and waiting calls of all jobs.
    Raises: ConfigError: a number is out of its range.
    """

    max_jobs: int = 1_000
    max_replicas: int = 20_000
    max_streams: int = 50_000

    def __post_init__(self) -> None:
        for name, most in (("max_jobs", JOBS_MOST), ("max_replicas", QUORUM_MOST), ("max_streams", 1_000_000)):
            _check_number(name, getattr(self, name), most)


@dataclass(frozen=True, slots=True)
class LighthouseConfig:
    """The settings of a lighthouse.

    Args:
        min_replicas: smallest quorum, at least 1.
        timeouts: join, heartbeat, grace and heal timeouts.
        stragglers: the policy for a replica that slows the others down.
        lost_state_timeout_ms: how long a job waits for a lost newest state whose holders fell silent, before it goes on
            from an older one. At least heartbeat_timeout applies; holders that were lost in another way get
            heartbeat_timeout.
        limits: what clients may use.
        jobs: the settings of single jobs, by name.
        min_replicas_of: the job whose own settings have given min_replicas; "": those of all jobs.
    Raises: ConfigError: min_replicas is out of its range or above max_replicas, or the timeout is negative or longer
        than a week.
    """

    min_replicas: int = 1
    timeouts: Timeouts = Timeouts()  # noqa: RUF009  # frozen
    stragglers: StragglerPolicy = StragglerPolicy()  # noqa: RUF009  # frozen
    lost_state_timeout_ms: int = 0
    limits: Limits = Limits()  # frozen
    jobs: Mapping[str, JobSettings] = field(default_factory=dict, hash=False)
    min_replicas_of: str = ""

    def __post_init__(self) -> None:
        if self.min_replicas < 1:
            raise ConfigError(f"min_replicas is {self.min_replicas}; give at least 1")
        if not 0 <= self.lost_state_timeout_ms <= LONGEST_MS:
            raise ConfigError(
                f"lost_state_timeout_ms is {self.lost_state_timeout_ms}; give 0 to {LONGEST_MS} milliseconds (a week)"
            )
        _check_room(self.min_replicas, self.limits.max_replicas)
        for name, own in self.jobs.items():
            least, most = own.min_replicas or self.min_replicas, own.max_replicas or self.limits.max_replicas
            _check_room(least, most, f" of job {name}")

    @property
    def lost_state_ms(self) -> int:
        """Return how long the job waits for a state whose holders fell silent."""
        return max(self.timeouts.heartbeat_timeout_ms, self.lost_state_timeout_ms)

    def of_job(self, name: str) -> LighthouseConfig:
        """Return the settings as they are for one job."""
        own = self.jobs.get(name)
        if own is None:
            return self
        limits = self.limits if own.max_replicas is None else replace(self.limits, max_replicas=own.max_replicas)
        least, least_of = (self.min_replicas, "") if own.min_replicas is None else (own.min_replicas, name)
        return replace(self, min_replicas=least, limits=limits, jobs={}, min_replicas_of=least_of)

    @property
    def how_to_lower(self) -> str:
        """Return how an operator lowers min_replicas, as the end of a sentence."""
        if self.min_replicas_of:
            return (
                f"jobs.{self.min_replicas_of}.min_replicas is lowered in the lighthouse's settings file (then SIGHUP)"
            )
        return (
            "min_replicas is lowered in the lighthouse's settings file (then SIGHUP), or by its restart with a lower "
            "--min-replicas"
        )


def _check_room(least: int, most: int, which: str = "") -> None:
    if least > most:
        raise ConfigError(
            f"min_replicas{which} ({least}) exceeds max_replicas{which} ({most}), so no quorum could form; lower "
            "min_replicas or raise max_replicas"
        )
