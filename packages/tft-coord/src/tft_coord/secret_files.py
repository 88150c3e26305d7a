"""A warning about a file with a secret or a private key that other users may read.

Law of this file: permission bits, and one warning for each file.
"""

from __future__ import annotations

import logging
from typing import Final

OTHERS_MAY_READ: Final = 0o044
_KEPT_MOST: Final = 1_000

_log = logging.getLogger(__name__)
_warned: dict[str, None] = {}  # the oldest first


def warn_if_readable(path: str, mode: int) -> None:
    """Log a warning, once in a process, if the group or all users may read a file.

    Args:
        path: of the file.
        mode: its permission bits, as `os.stat` gives them.
    """
    if not mode & OTHERS_MAY_READ or path in _warned:
        return
    _warned[path] = None
    if len(_warned) > _KEPT_MOST:
        del _warned[next(iter(_warned))]
    _log.warning("%s has a secret, and other users may read it (mode %o); chmod 600 the file", path, mode & 0o777)
