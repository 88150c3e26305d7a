"""A client of a lighthouse's HTTP port.

Law of this file: one request, and what is wrong in a sentence. It follows no redirect and uses no proxy, because the
request carries the job's secret.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tft_coord.errors import ConfigError as CoordinationConfigError
from tft_coord.security import call_metadata, read_token
from tft_coord.tls import TLS
from tft_coord.transport.address import check_scheme, host_of, join_host_port, targets
from tft_coord.transport.diagnosis import diagnose
from tft_coord.transport.trust import UntrustedError, why_untrusted
from tft_suite.drain import LIGHTHOUSE
from tft_suite.errors import ConfigError

SCHEMA_VERSION: Final = 1
ANSWER_MOST_BYTES: Final = 64 * 1024 * 1024
NO_SECRET: Final = 401
ERROR_MOST: Final = 1_000  # characters


def http_addresses(environ: Mapping[str, str], *, lighthouse: str | None, http: str | None) -> tuple[str, ...]:
    """Return the addresses of the lighthouses' HTTP ports, as `host:port`.

    Args:
        environ: names the lighthouse if neither argument is given.
        lighthouse: addresses of gRPC ports; the HTTP port is the next one.
        http: addresses of HTTP ports.
    Raises: ConfigError: no address is known, or one is invalid.
    """
    text = http or lighthouse or next((environ[name] for name in LIGHTHOUSE if environ.get(name)), "")
    if not text:
        raise ConfigError(f"no lighthouse is known; give --lighthouse or --http, or set {LIGHTHOUSE[0]}")
    try:
        found = targets(text)
        check_scheme(text, has_certificates=TLS.from_environment(environ) is not None)
    except CoordinationConfigError as error:
        raise ConfigError(str(error)) from error
    if http:
        return found
    ports = [int(each.rpartition(":")[2]) + 1 for each in found]
    if max(ports) > 65535:
        raise ConfigError(f"{text} has no next port for HTTP; give --http")
    return tuple(join_host_port(host_of(each), port) for each, port in zip(found, ports, strict=True))


def fetch(addresses: Sequence[str], path: str, environ: Mapping[str, str], *, timeout_s: float) -> dict[str, Any]:
    """Return the JSON at that path of the first lighthouse that answers.

    Args:
        addresses: of HTTP ports.
        path: with the query.
        environ: has the job's secret, if there is one.
        timeout_s: for each address.
    Raises: ConfigError: none answers, or the secret is missing or wrong; the message has a reason for each address.
    """
    return _first(addresses, "GET", path, environ, timeout_s)


def post(addresses: Sequence[str], path: str, environ: Mapping[str, str], *, timeout_s: float) -> dict[str, Any]:
    """Ask the lighthouses for a change, one after the other until one takes it, and return its answer.

    Args and Raises: as for `fetch`.
    """
    return _first(addresses, "POST", path, environ, timeout_s)


def _first(
    addresses: Sequence[str], method: str, path: str, environ: Mapping[str, str], timeout_s: float
) -> dict[str, Any]:
    try:
        metadata, tls = call_metadata(read_token(environ)), TLS.from_environment(environ)
    except CoordinationConfigError as error:
        raise ConfigError(str(error)) from error
    headers = {"Accept": "application/json", **dict(metadata)}
    failures = []
    for address in addresses:
        try:
            found = _ask(address, method, path, headers, timeout_s, tls)
            return found if method == "POST" else _of_our_version(address, found)
        except ConfigError as error:
            failures.append(str(error))
    raise ConfigError("; ".join(failures))


def _ask(
    address: str, method: str, path: str, headers: Mapping[str, str], timeout_s: float, tls: TLS | None
) -> dict[str, Any]:
    host, port = host_of(address), int(address.rpartition(":")[2])
    connection = (
        http.client.HTTPConnection(host, port, timeout=timeout_s)
        if tls is None
        else http.client.HTTPSConnection(host, port, timeout=timeout_s, context=tls.client_context())
    )
    try:
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        body = answer.read(ANSWER_MOST_BYTES + 1)
    except TimeoutError as error:
        raise ConfigError(f"{address} did not answer within {timeout_s:g} s (--timeout)") from error
    except (OSError, http.client.HTTPException) as error:
        untrusted = why_no_trust(error, address, tls)
        if untrusted:
            raise ConfigError(f"the HTTP port at {address} can't be used: {untrusted}") from error
        raise ConfigError(
            f"no HTTP answer from {address} ({error}); check that the lighthouse runs with --http-bind, or give --http"
        ) from error
    finally:
        connection.close()
    return _checked(address, answer.status, body)


def why_no_trust(error: Exception, address: str, tls: TLS | None) -> str:
    """Return what is wrong with the certificates of either side, after a request that failed; "": nothing known."""
    if isinstance(error, OSError) and (why := why_untrusted(error, host_of(address))):
        return why
    # A connection that ended without an answer may be one without TLS to a port with it, or the other way around.
    why_not = diagnose(address, tls) if isinstance(error, ConnectionError) else None
    return str(why_not) if isinstance(why_not, UntrustedError) else ""


def _checked(address: str, status: int, body: bytes) -> dict[str, Any]:
    if len(body) > ANSWER_MOST_BYTES:
        raise ConfigError(f"the answer of {address} is longer than {ANSWER_MOST_BYTES} bytes")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{address} is no lighthouse's HTTP port (status {status}, and no JSON); check the port")
    if status == NO_SECRET:
        raise ConfigError(
            f"{address} refuses the request (status {status}), because it requires a shared secret, and this command "
            "has none or a different one; set TFT_TOKEN or TFT_TOKEN_FILE as for the lighthouse"
        )
    if status != 200:
        raise ConfigError(f"{address} answers with status {status}: {str(found.get('error', ''))[:ERROR_MOST]}")
    return found


def _of_our_version(address: str, found: dict[str, Any]) -> dict[str, Any]:
    if found.get("schema_version") != SCHEMA_VERSION:
        version = str(found.get("schema_version"))[:20]
        raise ConfigError(f"{address} speaks schema version {version}; use the tft-suite of its version")
    return found
