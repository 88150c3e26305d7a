"""The settings of a parameter server.

Law of this file: settings, their checks, and the environment that completes them. Nothing is started here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from tft_algos.errors import ConfigError
from tft_coord.errors import ConfigError as CoordinationConfigError
from tft_coord.security import check_token, read_insecure, read_token
from tft_coord.tls import TLS
from tft_coord.tokens import Token
from tft_pg import ConfigError as GroupConfigError
from tft_pg.settings import checked_timeout

__all__ = ["ServerSettings", "checked_flag", "resolve_insecure", "resolve_tls", "resolve_token", "seconds_of"]

_PORT_MAX = 65535


@dataclass(frozen=True)
class ServerSettings:
    """The settings of one server. They check themselves.

    Args:
        port, store_port: 0 for a free port.
        bind: the name or address to listen on. None: all interfaces with a secret, and loopback without one.
        advertise_addr: the name or address that clients are given. None: this machine's.
        max_sessions: the number of sessions at one time.
        join_timeout: how long a client may take to configure its group.

    Raises: ConfigError: a setting is invalid.
    """

    port: int
    store_port: int
    bind: str | None
    advertise_addr: str | None
    max_sessions: int
    join_timeout: timedelta

    def __post_init__(self) -> None:
        for name, port in (("port", self.port), ("store_port", self.store_port)):
            if type(port) is not int or not 0 <= port <= _PORT_MAX:
                raise ConfigError(f"{name} is {port!r}; give a number from 0 (any free port) to {_PORT_MAX}")
        if type(self.max_sessions) is not int or self.max_sessions < 1:
            raise ConfigError(f"max_sessions is {self.max_sessions!r}; give a number above zero")
        seconds_of("join_timeout", self.join_timeout)
        for name, host in (("bind", self.bind), ("advertise_addr", self.advertise_addr)):
            if host is not None and type(host) is not str:
                raise ConfigError(f"{name} is {host!r}; give a name or an address as a string, or None")


def checked_flag(name: str, flag: bool) -> bool:
    """Return the flag. Raises: ConfigError: it is not a bool."""
    if type(flag) is not bool:
        raise ConfigError(f"{name} is {flag!r}; give True or False")
    return flag


def seconds_of(name: str, timeout: timedelta) -> float:
    """Return a time-out in seconds. Raises: ConfigError: it is not a timedelta above zero."""
    try:
        return checked_timeout(timeout).total_seconds()
    except GroupConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def resolve_tls(tls: TLS | None, environ: Mapping[str, str] = os.environ) -> TLS | None:
    """Return the certificates: the argument, else what TFT_TLS_CERT, TFT_TLS_KEY and TFT_TLS_CA name, else None.

    Raises: ConfigError: the argument is no TLS, or the files can't be used.
    """
    if tls is not None and not isinstance(tls, TLS):
        raise ConfigError(f"tls is of type {type(tls).__name__}; give a tft_coord.TLS, or None")
    try:
        return tls if tls is not None else TLS.from_environment(environ)
    except CoordinationConfigError as error:
        raise ConfigError(str(error)) from error


def resolve_token(token: str | None, environ: Mapping[str, str] = os.environ) -> Token:
    """Return the job's secret: the argument, else what TFT_TOKEN or TFT_TOKEN_FILE names, else None.

    Raises: ConfigError: the secret is invalid, or can't be read.
    """
    if token is not None and type(token) is not str:
        raise ConfigError(f"token is of type {type(token).__name__}; give the job's secret as a string, or None")
    try:
        return check_token(token) if token is not None else read_token(environ)
    except CoordinationConfigError as error:
        raise ConfigError(str(error)) from error


def resolve_insecure(insecure: bool | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a server without a secret may serve other machines: the argument, else TFT_INSECURE.

    Raises: ConfigError: the argument is not a bool, or TFT_INSECURE is neither 0 nor 1.
    """
    try:
        return checked_flag("insecure", insecure) if insecure is not None else read_insecure(environ)
    except CoordinationConfigError as error:
        raise ConfigError(str(error)) from error
