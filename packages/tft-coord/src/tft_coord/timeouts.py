"""All timeouts in one value: a few numbers from which the others follow.

Timeouts can contradict each other in ways that stay hidden until a machine dies. For example, a heartbeat timeout below
the beat interval declares living replicas lost. The numbers are therefore checked together, once, and the message names
the two that clash.

Law of this file: numbers and the order between them; nothing here waits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final

from tft_coord.errors import ConfigError

_DERIVED: Final[Any] = None  # the default of a number that follows from the others
ROUND_TRIPS_TO_BE_BACK: Final = 3
LONGEST_MS: Final = 7 * 24 * 3_600_000
LEASE_BEATS_LEAST: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """The timeouts of one job, in milliseconds. A few have plain defaults; the defaults of the others follow from them.

    Args:
        timeout_ms: one reduction, one vote, one step's worth of waiting inside the group.
        heartbeat_timeout_ms: silence after which a replica is lost.
        join_timeout_ms: how long a quorum waits for healthy replicas that have not asked.
        connect_timeout_ms: from a trainer's start until it reaches its manager server and store.
        quorum_timeout_ms: a trainer's wait for the next quorum; also how long a lighthouse may be away. Default: a
            minute, or more where `timeout_ms`, or the wait for stragglers and then for silent replicas, takes longer;
            70 s with the other defaults.
        heal_timeout_ms: how long others wait for a healing member whose bytes arrive. Default: ten minutes, or ten
            times `timeout_ms` if that is longer.
        slowest_step_ms: a trainer that is busy with its own part of a step for longer counts as hung. The first step
            after a start, a healing or a reconfiguration may take any time. 0: no trainer ever counts as hung.
        beat_interval_ms: between heartbeats on a stream. Default: a second, at most half of `heartbeat_timeout_ms` and
            at most `slowest_step_ms`.
        reconnect_grace_ms: a broken stream that is back within this time counts as never broken. Default: 300, at most
            `heartbeat_timeout_ms`.
        quorum_tick_ms: how often the lighthouse looks at the clock. Default: 100, at most `heartbeat_timeout_ms`.
        lease_ms: how long a replica that exchanges control words continues in a standing quorum without an answer of
            the lighthouse. 0: it asks in every step. The smallest of a quorum's members counts. Default: a minute,
            or four times `beat_interval_ms` if that is longer.
    Raises: ConfigError: a number is out of its range, or two of them clash; both are named.
    """

    timeout_ms: int = 60_000
    heartbeat_timeout_ms: int = 5_000
    join_timeout_ms: int = 60_000
    connect_timeout_ms: int = 60_000
    quorum_timeout_ms: int = _DERIVED
    heal_timeout_ms: int = _DERIVED
    slowest_step_ms: int = 600_000
    beat_interval_ms: int = _DERIVED
    reconnect_grace_ms: int = _DERIVED
    quorum_tick_ms: int = _DERIVED
    lease_ms: int = _DERIVED

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) is not _DERIVED or item.default is not _DERIVED:
                self._check_range(item.name)
        for name, value in self._derived().items():
            if getattr(self, name) is _DERIVED:
                object.__setattr__(self, name, value)
        # A replica may miss one beat without being declared lost.
        self._check("beat_interval_ms", 2, "heartbeat_timeout_ms")
        self._check("quorum_tick_ms", 1, "heartbeat_timeout_ms")
        # A redial must succeed before silence counts as a loss.
        self._check("reconnect_grace_ms", 1, "heartbeat_timeout_ms")
        # Beats show which trainer hangs, and can't tell a step that is shorter than their interval from the next one.
        if self.slowest_step_ms:
            self._check("beat_interval_ms", 1, "slowest_step_ms")
        # Answers to beats renew the lease. With fewer beats in it, one late answer would stop the job.
        if self.lease_ms:
            self._check("beat_interval_ms", LEASE_BEATS_LEAST, "lease_ms")

    def _derived(self) -> dict[str, int]:
        # A quorum waits for stragglers, and then for replicas that have gone silent in the meantime.
        waits_ms = self.join_timeout_ms + 2 * self.heartbeat_timeout_ms
        default_beat_ms = max(1, min(1_000, self.heartbeat_timeout_ms // 2, self.slowest_step_ms or 1_000))
        beat_ms = default_beat_ms if self.beat_interval_ms is _DERIVED else self.beat_interval_ms
        return {
            "quorum_timeout_ms": min(max(60_000, self.timeout_ms, waits_ms), LONGEST_MS),
            "heal_timeout_ms": min(max(600_000, 10 * self.timeout_ms), LONGEST_MS),
            "beat_interval_ms": default_beat_ms,
            "reconnect_grace_ms": min(300, self.heartbeat_timeout_ms),
            "quorum_tick_ms": min(100, self.heartbeat_timeout_ms),
            "lease_ms": min(max(60_000, LEASE_BEATS_LEAST * beat_ms), LONGEST_MS),
        }

    @property
    def first_byte_ms(self) -> int:
        """Return how long a healing replica may wait without receiving a byte.

        A source needs some time to take a snapshot, and to compute the checksums of a large one, before it sends the
        first byte.
        """
        return max(self.heartbeat_timeout_ms, self.join_timeout_ms // 4)

    def _check_range(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} is {value!r}; give whole milliseconds")
        least = {"join_timeout_ms": 0, "heartbeat_timeout_ms": 2, "slowest_step_ms": 0, "lease_ms": 0}.get(name, 1)
        if not least <= value <= LONGEST_MS:
            raise ConfigError(f"{name} is {value}; give {least} to {LONGEST_MS} milliseconds (a week)")

    def _check(self, small: str, factor: int, large: str) -> None:
        if getattr(self, small) * factor > getattr(self, large):
            times = f"{factor} x {small}" if factor > 1 else small
            raise ConfigError(
                f"{times} ({getattr(self, small) * factor} ms) exceeds {large} ({getattr(self, large)} ms); "
                f"lower {small} or raise {large}"
            )

    def warnings(self) -> tuple[str, ...]:
        """Return warnings about valid but doubtful settings, each with its effect and its remedy."""
        found = []
        if self.quorum_timeout_ms <= self.join_timeout_ms:
            found.append(
                f"quorum_timeout_ms ({self.quorum_timeout_ms}) is not above join_timeout_ms ({self.join_timeout_ms}): "
                "a trainer gives up while the lighthouse still waits for stragglers; raise quorum_timeout of the "
                "Manager, or lower join_timeout_ms of the lighthouse"
            )
        if self.quorum_timeout_ms <= self.heartbeat_timeout_ms:
            found.append(
                f"quorum_timeout_ms ({self.quorum_timeout_ms}) is not above heartbeat_timeout_ms "
                f"({self.heartbeat_timeout_ms}): a trainer gives up before a silent replica counts as lost; raise "
                "quorum_timeout of the Manager, or lower heartbeat_timeout_ms of the lighthouse"
            )
        if self.heal_timeout_ms < self.timeout_ms:
            found.append(
                f"heal_timeout_ms ({self.heal_timeout_ms}) is below timeout_ms ({self.timeout_ms}): a healing replica "
                "gets less time than one reduction; raise heal_timeout_ms"
            )
        return tuple(found)

    def too_far(self, round_trip_ms: int) -> str:
        """Return a warning about a lighthouse that answers only after so long, with the settings to change; "": none is
        needed.

        A broken stream reconnects in two round trips, and its first message takes half of one.
        """
        needed_ms = ROUND_TRIPS_TO_BE_BACK * round_trip_ms
        if needed_ms <= self.heartbeat_timeout_ms:
            return ""
        return (
            f"answers after {round_trip_ms} ms: a broken stream can't reconnect within heartbeat_timeout_ms "
            f"({self.heartbeat_timeout_ms}), so each break counts as a loss; set the lighthouse's "
            f"--heartbeat-timeout-ms to at least {needed_ms}, and the trainers' TFT_HEARTBEAT_TIMEOUT_SEC to at least "
            f"{needed_ms / 1000:g}, or run the lighthouse nearer to the replicas"
        )

    def merged_with(self, heartbeat_timeout_ms: int, join_timeout_ms: int) -> Timeouts:
        """Return these timeouts with the lighthouse's own numbers for the waits of the lighthouse.

        Args:
            heartbeat_timeout_ms, join_timeout_ms: the lighthouse's; out of range counts as the nearest number in it.
        """
        heartbeat_timeout_ms = min(max(heartbeat_timeout_ms, 2), LONGEST_MS)
        return replace(
            self,
            heartbeat_timeout_ms=heartbeat_timeout_ms,
            join_timeout_ms=min(max(join_timeout_ms, 0), LONGEST_MS),
            beat_interval_ms=max(1, min(self.beat_interval_ms, heartbeat_timeout_ms // 2)),
            reconnect_grace_ms=min(self.reconnect_grace_ms, heartbeat_timeout_ms),
            quorum_tick_ms=min(self.quorum_tick_ms, heartbeat_timeout_ms),
        )

    def silence_after_lease_ms(self, lease_ms: int) -> int:
        """Return how long a member must be silent before the others stop waiting for its quorum, which it may continue
        alone.

        Clock rates differ by a few percent at most, and a round that began at the end of the lease takes a moment.
        """
        return lease_ms + lease_ms // 20 + self.heartbeat_timeout_ms

    @property
    def forget_after_ms(self) -> int:
        """Return the time after which the lighthouse forgets a lost replica."""
        return 10 * self.heartbeat_timeout_ms

    @property
    def redial_fast_for_ms(self) -> int:
        """Return for how long after a break a client redials every 50 to 100 ms."""
        return 1_000

    @property
    def flap_window_ms(self) -> int:
        """Return the window in which three losses by stream alone make heartbeat_timeout_ms the only judge of a
        replica."""
        return 600_000
