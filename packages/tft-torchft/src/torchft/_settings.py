"""The settings that torchft takes from the environment, and the secret that tft needs in addition.

In torchft the environment takes precedence over an argument. In tft an argument takes precedence. So an argument is
dropped here if its variable is set, and tft then reads the variable.

Law of this file: values. Nothing is started.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Final

from tft_coord.security import read_insecure, read_token
from tft_coord.tls import TLS
from tft_coord.tokens import Token

SIXTY_SECONDS: Final = timedelta(seconds=60)
"""The default of torchft's time-outs. An argument that is this very object was not given."""

OWN_HOSTNAME: Final = socket.gethostname()


def unless_set(variable: str, value: timedelta | None) -> timedelta | None:
    """Return the argument, or None if the environment variable is set and takes precedence."""
    return None if os.environ.get(variable) else value


def given(value: timedelta) -> timedelta | None:
    """Return the argument, or None if it is the default."""
    return None if value is SIXTY_SECONDS else value


def secret() -> tuple[Token, bool]:
    """Return the job's secret, or None, and whether all hosts are served without one."""
    return read_token(os.environ), read_insecure(os.environ)


def certificates() -> TLS | None:
    """Return the job's certificates, or None."""
    return TLS.from_environment(os.environ)


def advertised(hostname: str) -> str | None:
    """Return the host name to advertise; None: tft finds one.

    torchft's default is this machine's name. tft knows better ones: without a secret, only this machine is served.
    """
    return None if hostname == OWN_HOSTNAME else hostname


def advertised_by_server(hostname: str, token: Token, *, insecure: bool) -> str:
    """Return the host name that a server advertises."""
    is_local = token is None and not insecure
    return "localhost" if is_local and hostname == OWN_HOSTNAME else hostname
