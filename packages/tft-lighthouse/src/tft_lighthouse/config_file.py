"""The file of settings: TOML to keys, and the settings in force to TOML.

Law of this file: bytes to a table, and values to text; what a key means is in `settings`.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from typing import Any, Final

from tft_coord import ConfigError
from tft_lighthouse.settings import DEFAULT, JOBS, SETTINGS, Given, Settings
from tft_lighthouse.version import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_BYTES: Final = 1024 * 1024
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


def read(path: str) -> dict[str, Any]:
    """Return the keys of the file.

    Raises: ConfigError: it can't be read, is too large, or is no TOML; the message has the line.
    """
    if not path.isprintable():
        raise ConfigError(f"--config is {path[:64]!r}; give the path of a TOML file")
    try:
        # Without O_NONBLOCK the open call would wait for ever for the writer of a pipe.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path}: this is no regular file; give the path of a TOML file")
            found = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}; correct --config") from error
    if len(found) > MAX_BYTES:
        raise ConfigError(f"{path}: the file has more than {MAX_BYTES} bytes; give the settings alone")
    try:
        return tomllib.loads(found.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is no UTF-8; save the file as UTF-8") from None
    except RecursionError:
        raise ConfigError(f"{path}: its values are nested too deeply; give the settings alone") from None
    except ValueError as error:  # TOML's own, and of numbers with thousands of digits
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: this is no TOML: {reason[:200]}") from None


def written(settings: Settings, secret_from: str | None) -> str:
    """Return the settings in force as TOML, each with its source; the same text is a valid file of settings.

    Args:
        settings: in force.
        secret_from: what has set the shared secret; None: there is none. The secret itself is never written.
    """
    return "".join(f"{line}\n" for line in _lines(settings, secret_from))


def _lines(settings: Settings, secret_from: str | None) -> Iterator[str]:
    yield f"# the settings of tft-lighthouse {__version__} that are in force, and the source of each"
    yield f"# file: {settings.file or 'none'}"
    yield f"# shared secret: {f'set by {secret_from}' if secret_from is not None else 'none'}"
    for setting in SETTINGS:
        found = settings.values[setting.name]
        if found.value is None:
            yield f"# {setting.name} is not set"
        else:
            yield f"{setting.name} = {_toml(found.value)}  # {found.source}"
    for job, values in settings.jobs.items():
        yield f"\n[{JOBS}.{job if _BARE.fullmatch(job) else _toml(job)}]"
        for name, found in values.items():
            assert found.source != DEFAULT, "only a file sets the values of a job"
            yield f"{name} = {_toml(found.value)}  # {found.source}"


def _toml(value: Given) -> str:
    """Return a value as TOML. A text is printable, so JSON's escapes of it are TOML's."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
