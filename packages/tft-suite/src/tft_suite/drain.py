"""`tft drain`: an operator asks a replica to leave its job after its running step.

Law of this file: one call to the lighthouse. The lighthouse finds the replica and handles the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from tft_coord import TLS, CoordinationError, LighthouseClient
from tft_coord.errors import ConfigError as CoordinationConfigError
from tft_coord.security import read_token
from tft_coord.transport.address import check_scheme, targets
from tft_suite.errors import ConfigError

LIGHTHOUSE = ("TFT_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE")
JOB = "TFT_JOB_ID"
DEFAULT_JOB = "default"


def message_for_cli(error: CoordinationError) -> str:
    """Return the message of an error, with this command's --timeout in place of the client's connect_timeout."""
    return str(error).replace("(connect_timeout)", "(--timeout)")


def drain(
    replica: str,
    environ: Mapping[str, str],
    *,
    lighthouse: str | None,
    job: str | None,
    reason: str,
    timeout: timedelta,
) -> str:
    """Ask a replica to leave.

    The job may be at any lighthouse of the list. The first lighthouse that knows the replica takes the request.

    Returns: the job of the replica.
    Raises: ConfigError: no lighthouse is known, or all refused.
    """
    if not replica.strip() or not replica.isprintable():
        raise ConfigError(f"{replica!r} is not a replica id; give the id or the name of a replica")
    addresses_text = lighthouse or next((environ[name] for name in LIGHTHOUSE if environ.get(name)), "")
    if not addresses_text:
        raise ConfigError(f"no lighthouse is known; give --lighthouse, or set {LIGHTHOUSE[0]}")
    job = job or environ.get(JOB) or DEFAULT_JOB
    failures: list[str] = []
    try:
        addresses, token = targets(addresses_text), read_token(environ)
        tls = TLS.from_environment(environ)
        check_scheme(addresses_text, has_certificates=tls is not None)
    except CoordinationConfigError as error:
        raise ConfigError(f"{replica} was not asked to leave: {error}") from error
    for address in addresses:
        try:
            with LighthouseClient(address, timeout, token=token, waits=False, tls=tls) as client:
                client.drain(job, replica, timeout, reason=reason)
        except CoordinationError as error:
            failures.append(message_for_cli(error))
        else:
            return job
    raise ConfigError(f"{replica} was not asked to leave: {'; '.join(failures)}")
