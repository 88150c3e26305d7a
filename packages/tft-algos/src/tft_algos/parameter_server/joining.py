"""How the two sides of a session join their group.

Law of this file: what both sides share of a session's beginning. It knows no HTTP and no thread.
"""

from __future__ import annotations

from tft_pg import ConfigureError, ProcessGroupError

__all__ = ["why_not_joined"]

_REMEDY_OF_JOBS = "; ask for a new quorum"  # a session has no quorum


def why_not_joined(error: ProcessGroupError, peer: str) -> str:
    """Return why a group was not built, without the advice for the members of a quorum.

    Args:
        error: of `configure`.
        peer: the other side of the session, as the subject of a sentence.
    """
    if isinstance(error, ConfigureError) and error.missing_ranks:
        return f"{peer} did not join in time"
    return str(error).partition(_REMEDY_OF_JOBS)[0]
