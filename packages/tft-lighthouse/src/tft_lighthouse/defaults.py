"""The defaults and the ranges of the command and of the embedded server.

Law of this file: plain values, so that the command can print them without importing anything.
"""

from typing import Final

BIND: Final = "[::]:29510"
MIN_REPLICAS: Final = 1
QUORUM_TICK_MS: Final = 100
JOIN_TIMEOUT_MS: Final = 60_000
HEARTBEAT_TIMEOUT_MS: Final = 5_000
STRAGGLERS: Final = ("warn", "leave-out", "shrink", "off")  # the first is the default
STRAGGLER_RATIO: Final = 2.0
ON_LOST_STATE: Final = "wait"
LOST_STATE_CHOICES: Final = ("wait", "restart")
LOST_STATE_TIMEOUT_MS: Final = 30_000
LOG_FORMATS: Final = ("text", "json")  # the first is the default
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
MAX_JOBS: Final = 1_000
MAX_REPLICAS: Final = 20_000
MAX_STREAMS: Final = 50_000
MAX_MESSAGE_BYTES: Final = 8 * 1024 * 1024  # a quorum of 20,000 members, which a replica reports to a new lighthouse
# The ranges of tft-coord, which is not imported for them; a test compares.
QUORUM_MOST: Final = 100_000
JOBS_MOST: Final = 100_000
STREAMS_MOST: Final = 1_000_000
MESSAGE_BYTES_LEAST: Final = 64 * 1024
MESSAGE_BYTES_MOST: Final = 64 * 1024 * 1024
