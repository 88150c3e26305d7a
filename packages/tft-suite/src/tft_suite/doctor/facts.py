"""The facts for a doctor, as plain values that a test can make.

Law of this file: frozen values. Nothing asks a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from tft_coord.compat.views import LighthouseDescription
from tft_coord.timeouts import Timeouts


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LighthouseFacts:
    """The answer from one address of a lighthouse.

    Args:
        address: as it was given.
        description: what the lighthouse says of itself. None: no answer.
        trouble: why there is no answer, in one sentence that names the address. "": there is an answer.
        is_standby: it does not lead its cluster, and refuses for that.
        is_foreign: the address is torchft's lighthouse.
        clock_ahead_ms: how far its clock is ahead of this machine's. Negative: behind.
        answers_anybody: a secret is set here, and the lighthouse answers clients without a secret.
        local_address: this machine's address on the route to it. "": unknown.
    """

    address: str
    description: LighthouseDescription | None = None
    trouble: str = ""
    is_standby: bool = False
    is_foreign: bool = False
    clock_ahead_ms: int = 0
    answers_anybody: bool = False
    local_address: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts that were found.

    Args:
        versions: installed version by distribution. "": not installed. Of those that install the module torchft, only
            what is installed.
        setting_error: why the environment's settings can't work, in one sentence. "": they can.
        hostname: the name by which other machines would reach this one.
        hostname_is_loopback: on every machine, that name means the machine itself.
        interfaces: addresses of each network interface, by its name.
        environ: the relevant variables that are set. For a secret, only that it is set.
        token_is_set: a shared secret is set.
        token_file_mode: permission bits of TFT_TOKEN_FILE. None: no such file.
        timeouts: the time-outs in force here. None: the settings can't work.
        lighthouses: one entry for each address.
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
