"""`tft drain`: an operator asks a replica to leave its job after its running step.

Law of this file: one call to the lighthouse; who is asked, and what becomes of it, is the lighthouse's.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from tft_coord import CoordinationError, LighthouseClient
from tft_coord.security import read_token
from tft_suite.errors import SettingError

LIGHTHOUSE = ("TFT_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE")


def drain(
    replica: str, environ: Mapping[str, str], *, lighthouse: str | None, job: str, reason: str, timeout: timedelta
) -> str:
    """Ask it. Returns: a sentence that says so. Raises: SettingError: there is nobody to ask, or it was refused."""
    said = lighthouse or next((environ[name] for name in LIGHTHOUSE if environ.get(name)), "")
    if not said:
        raise SettingError(f"no lighthouse is known; give --lighthouse, or set {LIGHTHOUSE[0]}")
    address = said.split(",")[0].strip()
    try:
        with LighthouseClient(address, timeout, token=read_token(environ)) as client:
            client.drain(job, replica, timeout, reason=reason)
    except CoordinationError as error:
        raise SettingError(f"{replica} was not asked to leave: {error}") from error
    return f"{replica} of job {job} was asked to leave; it does after its running step"
