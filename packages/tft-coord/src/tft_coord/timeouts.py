"""All waiting times in one value, a few numbers from which the rest follow.

Waiting times clash in ways that nobody sees until a machine dies: a heartbeat time-out below the beat interval takes
the living for dead. So they are checked together, once, and the message names the two that clash.

Law of this file: numbers and the order between them; nothing here waits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final

from tft_coord.errors import SettingError

_DERIVED: Final[Any] = None  # not said: it follows from the others
ROUND_TRIPS_TO_BE_BACK: Final = 3
LONGEST_MS: Final = 7 * 24 * 3_600_000
LEASE_BEATS_LEAST: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Waiting times of one job, in milliseconds. A few are said, the others follow from them where they are not.

    Args:
        timeout_ms: one reduction, one vote, one step's worth of waiting inside the group.
        heartbeat_timeout_ms: silence after which a replica is lost.
        join_timeout_ms: how long a quorum waits for healthy replicas that have not asked.
        connect_timeout_ms: from a trainer's start until it reaches its manager server and store.
        quorum_timeout_ms: a trainer's wait for the next quorum; also how long a lighthouse may be away. Default: a
            minute, or more where `timeout_ms`, or the waiting for stragglers and then for the silent, takes longer;
            70 s where the others are left as they are.
        heal_timeout_ms: how long a member that heals, and whose bytes arrive, is waited for. Default: ten minutes, or
            ten times `timeout_ms` if that is longer.
        slowest_step_ms: a trainer that is busy with its own part of a step for longer hangs; the first step after a
            start, a healing or a reconfiguration may take any time. 0: nobody ever hangs.
        beat_interval_ms: between signs of life on a stream. Default: a second, at most half of `heartbeat_timeout_ms`
            and at most `slowest_step_ms`.
        reconnect_grace_ms: a broken stream that is back within it was never broken. Default: 300, at most
            `heartbeat_timeout_ms`.
        quorum_tick_ms: how often the lighthouse looks at the clock. Default: 100, at most `heartbeat_timeout_ms`.
        lease_ms: how long a replica that speaks the word of a round goes on in a standing quorum without hearing from
            the lighthouse. 0: it asks in every step. The smallest of a quorum's members counts. Default: a minute, or
            four times `beat_interval_ms` if that is longer.
    Raises: SettingError: a number is out of its range, or two of them clash; both are named.
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
        # A replica may miss one beat without being taken for dead.
        self._check("beat_interval_ms", 2, "heartbeat_timeout_ms")
        self._check("quorum_tick_ms", 1, "heartbeat_timeout_ms")
        # A redial must come back before silence is judged.
        self._check("reconnect_grace_ms", 1, "heartbeat_timeout_ms")
        # Beats tell who hangs; a step that is shorter than one can't be told from the next.
        if self.slowest_step_ms:
            self._check("beat_interval_ms", 1, "slowest_step_ms")
        # Answers to beats renew the lease. With fewer beats in it one late answer would stop the job.
        if self.lease_ms:
            self._check("beat_interval_ms", LEASE_BEATS_LEAST, "lease_ms")

    def _derived(self) -> dict[str, int]:
        # Stragglers are waited for, and then whoever has gone silent in the meantime is found out.
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
        """How long a healing replica that waits for its state may have received nothing: a source needs a while to take
        its state, and to compute the checksums of a large one, before the first byte goes out."""
        return max(self.heartbeat_timeout_ms, self.join_timeout_ms // 4)

    def _check_range(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise SettingError(f"{name} is {value!r}; give whole milliseconds")
        least = {"join_timeout_ms": 0, "heartbeat_timeout_ms": 2, "slowest_step_ms": 0, "lease_ms": 0}.get(name, 1)
        if not least <= value <= LONGEST_MS:
            raise SettingError(f"{name} is {value}; give {least} to {LONGEST_MS} milliseconds (a week)")

    def _check(self, small: str, factor: int, large: str) -> None:
        if getattr(self, small) * factor > getattr(self, large):
            times = f"{factor} x {small}" if factor > 1 else small
            raise SettingError(
                f"{times} ({getattr(self, small) * factor} ms) exceeds {large} ({getattr(self, large)} ms); "
                f"lower {small} or raise {large}"
            )

    def doubts(self) -> tuple[str, ...]:
        """Orders that work, and that hardly anybody wants: what each does, and its remedy, one sentence each."""
        found = []
        if self.quorum_timeout_ms <= self.join_timeout_ms:
            found.append(
                f"quorum_timeout_ms ({self.quorum_timeout_ms}) is not above join_timeout_ms ({self.join_timeout_ms}): "
                "a trainer gives up before the lighthouse has stopped waiting for stragglers; raise the first, or "
                "lower the lighthouse's --join_timeout_ms"
            )
        if self.quorum_timeout_ms <= self.heartbeat_timeout_ms:
            found.append(
                f"quorum_timeout_ms ({self.quorum_timeout_ms}) is not above heartbeat_timeout_ms "
                f"({self.heartbeat_timeout_ms}): a trainer gives up before a silent replica is known to be lost; raise "
                "the first, or lower the lighthouse's --heartbeat_timeout_ms"
            )
        if self.heal_timeout_ms < self.timeout_ms:
            found.append(
                f"heal_timeout_ms ({self.heal_timeout_ms}) is below timeout_ms ({self.timeout_ms}): whoever heals is "
                "given less time than one reduction; raise the first"
            )
        return tuple(found)

    def too_far(self, round_trip_ms: int) -> str:
        """Say what a lighthouse that answers only after so long does to these, and what to set; empty: nothing.

        A stream that breaks is made anew in two round trips, and its first words take half of one.
        """
        needed_ms = ROUND_TRIPS_TO_BE_BACK * round_trip_ms
        if needed_ms <= self.heartbeat_timeout_ms:
            return ""
        return (
            f"answers after {round_trip_ms} ms: a stream that breaks is not back within heartbeat_timeout_ms "
            f"({self.heartbeat_timeout_ms}), and each such break is a loss; set the lighthouse's "
            f"--heartbeat-timeout-ms to at least {needed_ms}, and the trainers' TFT_HEARTBEAT_TIMEOUT_SEC to at least "
            f"{needed_ms / 1000:g}, or run the lighthouse nearer to the replicas"
        )

    def beside(self, heartbeat_timeout_ms: int, join_timeout_ms: int) -> Timeouts:
        """These, with a lighthouse's own where it is the lighthouse that waits.

        Args:
            heartbeat_timeout_ms, join_timeout_ms: as it says; out of range counts as the nearest number in it.
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
        """How long a member must have been silent before nobody waits for the quorum in which it may go on by itself.

        Clock rates differ by a few percent at most, and a round that began at the end of the lease takes a moment.
        """
        return lease_ms + lease_ms // 20 + self.heartbeat_timeout_ms

    @property
    def forget_after_ms(self) -> int:
        """The lighthouse forgets a lost replica after this."""
        return 10 * self.heartbeat_timeout_ms

    @property
    def redial_fast_for_ms(self) -> int:
        """For so long after a break a client redials every 50 to 100 ms."""
        return 1_000

    @property
    def flap_window_ms(self) -> int:
        """Three losses by stream alone within it, and the replica is judged by heartbeat_timeout_ms."""
        return 600_000
