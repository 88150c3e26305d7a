"""The gathering of facts from the environment, this machine and the lighthouses.

Law of this file: it reads, and changes nothing. A failed check is a fact as well.
"""

from __future__ import annotations

import socket
import stat
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psutil
import torch

from tft_algos.errors import ConfigError
from tft_algos.manager.config import ManagerConfig, from_environment
from tft_algos.manager.quorum.group_store import is_loopback, own_host
from tft_coord import TLS, LighthouseClient
from tft_coord.core.types import Refusal
from tft_coord.errors import ConfigError as CoordinationConfigError
from tft_coord.errors import CoordinationError, RefusedError, UnknownCallError
from tft_coord.security import read_token
from tft_coord.timeouts import Timeouts
from tft_coord.tokens import Token
from tft_coord.transport.address import target
from tft_suite.doctor.facts import Facts, LighthouseFacts
from tft_suite.doctor.findings import INSTALL_TORCHFT, INTERFACE_VARIABLES, PACKAGES
from tft_suite.drain import LIGHTHOUSE, message_for_cli

SECRET: Final = "TFT_TOKEN"
DEPENDENCIES: Final = ("torch", "grpcio", "protobuf", "aiohttp")
PREFIXES: Final = ("TFT_", "TORCHFT_", "TORCHELASTIC_")
NAMES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *INTERFACE_VARIABLES)


def survey(environ: Mapping[str, str], *, lighthouse: str | None, timeout: timedelta) -> Facts:
    """Gather all facts.

    Args:
        environ: the variables that a Manager here would read.
        lighthouse: addresses, separated by commas. None: those of the environment.
        timeout: for each address of a lighthouse.
    """
    hostname = own_host()
    timeouts: Timeouts | None = None
    # Even if other settings are wrong, a given lighthouse is asked.
    addresses = lighthouse or next((environ[name] for name in LIGHTHOUSE if environ.get(name)), "")
    token, tls, setting_error = _token(environ), _tls(environ), ""
    try:
        resolved = from_environment(ManagerConfig(lighthouse_addr=lighthouse), environ, own_host=lambda: hostname)
    except ConfigError as error:
        setting_error = str(error)
    else:
        timeouts = resolved.timeouts
    named = list(dict.fromkeys(address.strip() for address in addresses.split(",") if _is_address(address)))
    return Facts(
        versions=_versions(),
        setting_error=setting_error,
        hostname=hostname,
        hostname_is_loopback=is_loopback(hostname),
        interfaces=_interfaces(),
        environ={
            name: "set" if name == SECRET else value
            for name, value in sorted(environ.items())
            if name in NAMES or name.startswith(PREFIXES)
        },
        token_is_set=token is not None or bool(environ.get("TFT_TOKEN_FILE")),
        token_file_mode=_mode(environ.get("TFT_TOKEN_FILE", "")),
        timeouts=timeouts,
        lighthouses=tuple(_ask(address, token=token, tls=tls, timeout=timeout) for address in named),
        accelerator=_accelerator(),
    )


def _tls(environ: Mapping[str, str]) -> TLS | None:
    try:
        return TLS.from_environment(environ)
    except CoordinationConfigError:
        return None  # the settings' own error reports this


def _token(environ: Mapping[str, str]) -> Token:
    try:
        return read_token(environ)
    except CoordinationConfigError:
        return None  # the settings' own error reports this


def _is_address(address: str) -> bool:
    try:
        return bool(target(address.strip()))
    except CoordinationConfigError:
        return False  # the settings' own error reports this


def _versions() -> dict[str, str]:
    found = {name: _version(name) for name in (*PACKAGES, *DEPENDENCIES)}
    return found | {name: version for name in INSTALL_TORCHFT if (version := _version(name))}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _interfaces() -> dict[str, tuple[str, ...]]:
    return {
        name: tuple(each.address.split("%")[0] for each in found if each.family in (socket.AF_INET, socket.AF_INET6))
        for name, found in psutil.net_if_addrs().items()
    }


def _mode(path: str) -> int | None:
    try:
        return stat.S_IMODE(Path(path).stat().st_mode) if path else None
    except OSError:
        return None  # the settings' own error reports that it can't be read


def _accelerator() -> str:
    if not torch.accelerator.is_available():
        return "none"
    device = torch.accelerator.current_accelerator()
    return f"{torch.accelerator.device_count()} x {device.type if device is not None else 'unknown'}"


def _ask(address: str, *, token: Token, tls: TLS | None, timeout: timedelta) -> LighthouseFacts:
    local_address = _route_to(address)
    try:
        with LighthouseClient(address, timeout, token=token, waits=False, tls=tls) as client:
            description = client.describe(timeout)
            clock_ahead_ms = description.now_ms - time.time_ns() // 1_000_000
    except UnknownCallError:
        return LighthouseFacts(address=address, is_foreign=True, local_address=local_address)
    except CoordinationError as error:
        is_standby = isinstance(error, RefusedError) and error.code == Refusal.STANDBY.value
        return LighthouseFacts(
            address=address, trouble=message_for_cli(error), is_standby=is_standby, local_address=local_address
        )
    return LighthouseFacts(
        address=address,
        description=description,
        clock_ahead_ms=clock_ahead_ms,
        answers_anybody=token is not None and _answers_anybody(address, tls, timeout),
        local_address=local_address,
    )


def _answers_anybody(address: str, tls: TLS | None, timeout: timedelta) -> bool:
    """Return whether a lighthouse answers without a secret. A lighthouse with a secret refuses such a call."""
    try:
        with LighthouseClient(address, timeout, waits=False, tls=tls) as client:
            client.describe(timeout)
    except CoordinationError:
        return False  # refused, as it should be, or no answer this time, which says nothing about secrets
    return True


def _route_to(address: str) -> str:
    """Return this machine's address for packets to that address; "" if it can't be found."""
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        found = socket.getaddrinfo(parts.hostname, parts.port or 1, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # connecting a datagram socket sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return ""
