"""A warning about a misspelt environment variable of a trainer.

Law of this file: one warning. `tft_coord.variables` has the names.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tft_coord.variables import nearest_variable

__all__ = ["warn_of_misspelt"]

_log = logging.getLogger("tft_algos.manager")


def warn_of_misspelt(environ: Mapping[str, str]) -> None:
    """Log a warning for each variable whose name is nearly that of a known one, and which is therefore ignored."""
    for name in sorted(environ):
        if (nearest := nearest_variable(name)) is not None:
            _log.warning("the environment variable %s is ignored; the nearest variable is %s", name, nearest)
