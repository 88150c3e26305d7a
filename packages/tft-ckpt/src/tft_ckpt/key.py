"""The name of a state.

Equal step numbers do not mean equal states, and a quorum id may occur again after a restart. So a name contains the
quorum of the state (id and nonce), the committed step, and the lineage of its commits.

Law of this file: one frozen value, its order, and its spelling in addresses; no I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tft_ckpt.errors import ConfigError

__all__ = ["StateKey"]

_SPELLING = re.compile(r"(0|[1-9][0-9]{0,18})\.([0-9a-f]{16})\.(0|[1-9][0-9]{0,18})\.([0-9a-f]{16})")
_SIGNED_MAX = 2**63 - 1
_UNSIGNED_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class StateKey:
    """The name of one state of one job.

    Fields:
        quorum_id: the quorum of the state, 0 to 2^63 - 1.
        nonce: that quorum's random word, 64 bits unsigned.
        step: committed steps, 0 to 2^63 - 1.
        lineage: digest of the previous commits, 64 bits unsigned.

    Raises: ConfigError: a field is no integer or out of its range.
    """

    quorum_id: int
    nonce: int
    step: int
    lineage: int

    def __post_init__(self) -> None:
        limits = {
            "quorum_id": _SIGNED_MAX,
            "nonce": _UNSIGNED_MAX,
            "step": _SIGNED_MAX,
            "lineage": _UNSIGNED_MAX,
        }
        for name, limit in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= limit:
                raise ConfigError(f"StateKey.{name} is {value!r}; give an integer from 0 to {limit}")

    def __str__(self) -> str:
        """Return the key as used in addresses, for example ``7.00000000000000ab.120.0123456789abcdef``."""
        return f"{self.quorum_id}.{self.nonce:016x}.{self.step}.{self.lineage:016x}"

    @classmethod
    def parse(cls, text: str) -> StateKey:
        """Parse the output of ``str(key)``.

        Raises: ConfigError: the text is no key.
        """
        match = _SPELLING.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text[:80]!r} is not a state key; give quorum_id.nonce.step.lineage")
        quorum_id, nonce, step, lineage = match.groups()
        return cls(quorum_id=int(quorum_id), nonce=int(nonce, 16), step=int(step), lineage=int(lineage, 16))

    def comes_after(self, other: StateKey) -> bool:
        """Return whether a source that has ``other`` may still get this state later."""
        return (self.quorum_id, self.step) > (other.quorum_id, other.step)
