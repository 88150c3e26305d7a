"""One shared secret for each job: only a caller that shows it is served.

The secret travels as gRPC metadata `authorization: Bearer ...` on every call, and a server with a secret answers
nothing without it. One call of a stranger can end a replica or give the whole job other weights. A server without a
secret therefore serves only this machine, unless it is told to be insecure.

Law of this file: the secret, its source, its comparison, and the rules without one; no sockets.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Iterable, Mapping

from tft_coord.errors import ConfigError
from tft_coord.transport.address import interface_of, is_loopback

MAX_TOKEN_BYTES = 4096
_MAX_FILE_BYTES = MAX_TOKEN_BYTES + 16  # with line endings
METADATA_KEY = "authorization"
INSECURE = "TFT_INSECURE"
HOW_TO_SERVE_OTHERS = (
    "to serve other machines set TFT_TOKEN to the same secret in every process of the job (make one with "
    f"`openssl rand -hex 32`), or set {INSECURE}=1 to serve everybody without one"
)
_PREFIX = "Bearer "


def read_token(environment: Mapping[str, str]) -> str | None:
    """Return the secret that the environment names, or None.

    Args:
        environment: TFT_TOKEN is the secret itself, TFT_TOKEN_FILE the file that holds it.
    Raises: ConfigError: both are set, the file can't be read, or the secret is invalid.
    """
    token, path = environment.get("TFT_TOKEN"), environment.get("TFT_TOKEN_FILE")
    if token is not None and path is not None:
        raise ConfigError("TFT_TOKEN and TFT_TOKEN_FILE are both set; unset one of them")
    if path is not None:
        if not path:
            raise ConfigError("TFT_TOKEN_FILE is empty; give the path of a file, or unset it")
        return read_token_file(path, "TFT_TOKEN_FILE")
    if token is None:
        return None
    try:
        return check_token(token)
    except ConfigError as error:
        raise ConfigError(f"TFT_TOKEN is {'invalid' if token else 'empty; set it, or unset it'}: {error}") from None


def read_token_file(path: str, setting: str) -> str:
    """Return the secret in a file.

    Args:
        path: of the file.
        setting: what names it, for messages.
    Raises: ConfigError: the file can't be read, or holds no valid secret.
    """
    try:
        token = _read_file(path).decode().rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting} names {path}, which can't be read: {error}") from error
    try:
        return check_token(token)
    except ConfigError as error:
        raise ConfigError(f"{setting} names {path}, which holds no valid secret: {error}") from None


def _read_file(path: str) -> bytes:
    """Return the contents of the file if they may be a secret. Raises: OSError, ValueError: they can't be."""
    # Without O_NONBLOCK the open call would wait for ever for the writer of a pipe.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        found = file.read(_MAX_FILE_BYTES + 1)
    if len(found) > _MAX_FILE_BYTES:
        raise ValueError(f"it is larger than a shared secret, which has at most {MAX_TOKEN_BYTES} bytes")
    return found


def read_insecure(environment: Mapping[str, str]) -> bool:
    """Return whether TFT_INSECURE asks to serve everybody without a secret. Raises: ConfigError: it is neither 0 nor
    1."""
    text = environment.get(INSECURE) or "0"
    if text not in ("0", "1"):
        raise ConfigError(f"{INSECURE} is {text[:64]!r}; give 0 or 1")
    return text == "1"


def bind_without_secret(bind: str, name: str = "bind") -> str:
    """Return where a server without a secret listens: at loopback only.

    Args:
        bind: the requested `host:port`. All interfaces become `localhost`.
        name: of the setting.
    Raises: ConfigError: it names an interface that other machines reach.
    """
    host = interface_of(bind)
    if not host:
        return f"localhost:{bind.rpartition(':')[2]}"
    if not is_loopback(host):
        raise ConfigError(f"{name} is {bind!r} and no shared secret is set; {HOW_TO_SERVE_OTHERS}")
    return bind


def check_host_without_secret(name: str, host: str) -> None:
    """Check that a server without a secret may use that host as its name.

    Args:
        name: of the setting.
        host: a name or an address.
    Raises: ConfigError: it means another machine to others.
    """
    if not is_loopback(host):
        raise ConfigError(
            f"{name} is {host!r} and no shared secret is set, so the server accepts only this machine, as localhost; "
            f"{HOW_TO_SERVE_OTHERS}"
        )


def check_token(token: str) -> str:
    """Return the token if it is valid.

    Raises: ConfigError: it is empty, too long, or has characters that a header can't carry.
    """
    if not 0 < len(token) <= MAX_TOKEN_BYTES or not all("!" <= character <= "~" for character in token):
        raise ConfigError(
            f"the shared secret must be 1 to {MAX_TOKEN_BYTES} printable ASCII characters without spaces; "
            "make one with `openssl rand -hex 32`"
        )
    return token


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata that a client sends with every call."""
    return () if token is None else ((METADATA_KEY, _PREFIX + token),)


def admits(token: str | None, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Return whether a call with that metadata may be answered."""
    if token is None:
        return True
    expected = (_PREFIX + token).encode()
    shown = [value.encode() if isinstance(value, str) else value for key, value in metadata if key == METADATA_KEY]
    return len(shown) == 1 and hmac.compare_digest(shown[0], expected)
