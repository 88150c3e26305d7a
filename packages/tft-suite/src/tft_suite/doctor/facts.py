"""What a doctor looks at, as plain values that a test can make.

Law of this file: frozen values; nothing that asks a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from tft_coord.timeouts import Timeouts
from tft_coord.views import LighthouseDescription


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LighthouseFacts:
    """What was heard from one address of a lighthouse.

    Args:
        address: as it was given.
        description: what it says of itself; None: it could not be heard.
        trouble: why not, in one sentence that names it; "" if it was.
        is_foreign: torchft's lighthouse answers there.
        clock_ahead_ms: of its clock, before this machine's; less than nothing: behind.
        answers_anybody: a secret is set here, and it answers who shows none.
        local_address: of this machine, on the way to it; "" if unknown.
    """

    address: str
    description: LighthouseDescription | None = None
    trouble: str = ""
    is_foreign: bool = False
    clock_ahead_ms: int = 0
    answers_anybody: bool = False
    local_address: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was found.

    Args:
        versions: installed version by distribution; "" if it is not installed.
        setting_error: why the environment's settings can't work, in one sentence; "" if they can.
        hostname: under which other machines would reach this one.
        hostname_is_loopback: that name means the own machine to whoever reads it.
        interfaces: addresses of each network interface, by its name.
        environ: the variables that matter and are set; of a secret only whether it is.
        token_is_set: a shared secret is.
        token_file_mode: permission bits of TFT_TOKEN_FILE, or None without.
        timeouts: in force here; None where the settings can't work.
        lighthouses: one for each address.
        accelerator: device type and count, or "none".
    """

    versions: dict[str, str]
    setting_error: str = ""
    hostname: str = ""
    hostname_is_loopback: bool = False
    interfaces: dict[str, tuple[str, ...]]
    environ: dict[str, str]
    token_is_set: bool = False
    token_file_mode: int | None = None
    timeouts: Timeouts | None = None
    lighthouses: tuple[LighthouseFacts, ...] = ()
    accelerator: str = "none"
