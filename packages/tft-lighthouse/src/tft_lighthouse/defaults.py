"""The defaults of the command and of the embedded server.

Law of this file: plain values, so that the command can print them without importing anything.
"""

from typing import Final

BIND: Final = "[::]:29510"
HTTP_BIND_ENV: Final = "TFT_LIGHTHOUSE_HTTP_BIND"
JOB_TOKENS_ENV: Final = "TFT_LIGHTHOUSE_JOB_TOKENS"
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
