"""`tft kill`: an operator ends the processes of a replica at once.

Law of this file: one request to the lighthouse, which finds the replica and reaches its processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from tft_suite.errors import ConfigError
from tft_suite.operate.client import post


def kill(
    replica: str, addresses: Sequence[str], environ: Mapping[str, str], *, job: str, reason: str, timeout_s: float
) -> dict[str, Any]:
    """Ask the processes of a replica to end.

    The job may be at any lighthouse of the list. The first one that knows the replica takes the request.

    Args:
        replica: its id, the short form of it, or its name.
        addresses: of HTTP ports.
        environ: has the job's secret, if there is one.
        job: of the replica.
        reason: for the logs; "": none is given.
        timeout_s: for each address.
    Returns: the lighthouse's answer and the job: `job`, `replica_id`, `asked_to`.
    Raises: ConfigError: the replica's name can't be one, or all lighthouses refused.
    """
    if not replica.strip() or not replica.isprintable():
        raise ConfigError(f"{replica!r} is not a replica id; give the id or the name of a replica")
    query = urlencode({"job": job} | ({"reason": reason} if reason else {}))
    try:
        answer = post(addresses, f"/replica/{quote(replica, safe='')}/kill?{query}", environ, timeout_s=timeout_s)
    except ConfigError as error:
        raise ConfigError(f"{replica} was not killed: {error}") from error
    return {"job": job, **answer}
