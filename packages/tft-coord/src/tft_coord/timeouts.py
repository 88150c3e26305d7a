"""All waiting times in one value, a few numbers from which the rest follow.

Waiting times clash in ways that nobody sees until a machine dies: a heartbeat time-out below the beat interval takes
the living for dead. So they are checked together, once, and the message names the two that clash.

Law of this file: numbers and the order between them; nothing here waits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from tft_coord.errors import SettingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Waiting times of one job, in milliseconds.

    Args:
        timeout_ms: one reduction, one vote, one step's worth of waiting inside the group.
        quorum_timeout_ms: a trainer's wait for the next quorum; also how long a lighthouse may be away.
        connect_timeout_ms: from a trainer's start until it reaches its manager server and store.
        heartbeat_timeout_ms: silence after which a replica is lost.
        join_timeout_ms: how long a quorum waits for healthy replicas that have not asked.
        heal_timeout_ms: how long a member that heals, and whose bytes arrive, is waited for.
        beat_interval_ms: between signs of life on a stream.
        reconnect_grace_ms: a broken stream that is back within it was never broken.
        quorum_tick_ms: how often the lighthouse looks at the clock.
    Raises: SettingError: a number is out of its range, or two of them clash; both are named.
    """

    timeout_ms: int = 60_000
    quorum_timeout_ms: int = 60_000
    connect_timeout_ms: int = 60_000
    heartbeat_timeout_ms: int = 5_000
    join_timeout_ms: int = 60_000
    heal_timeout_ms: int = 600_000
    beat_interval_ms: int = 1_000
    reconnect_grace_ms: int = 300
    quorum_tick_ms: int = 100

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise SettingError(f"{item.name} is {value!r}; give whole milliseconds")
            least = 0 if item.name == "join_timeout_ms" else 1
            if not least <= value <= 7 * 24 * 3_600_000:
                raise SettingError(f"{item.name} is {value}; give {least} to 604800000 milliseconds (a week)")
        # A replica may miss one beat without being taken for dead.
        self._check("beat_interval_ms", 2, "heartbeat_timeout_ms")
        self._check("quorum_tick_ms", 1, "heartbeat_timeout_ms")
        # A redial must come back before silence is judged.
        self._check("reconnect_grace_ms", 1, "heartbeat_timeout_ms")

    def _check(self, small: str, factor: int, large: str) -> None:
        if getattr(self, small) * factor > getattr(self, large):
            times = f"{factor} x {small}" if factor > 1 else small
            raise SettingError(
                f"{times} ({getattr(self, small) * factor} ms) exceeds {large} ({getattr(self, large)} ms); "
                f"lower {small} or raise {large}"
            )

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
