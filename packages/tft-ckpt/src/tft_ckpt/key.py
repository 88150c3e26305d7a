"""The name of a state.

Equal step numbers are not equal states, and a quorum id alone may come again after a restart. So a state is named by
the quorum in which it was taken (id and nonce), the committed step, and the lineage of the commits that led to it.

Law of this file: one frozen value, its order, and its spelling in addresses; no I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tft_ckpt.errors import WrongSetting

__all__ = ["StateKey"]

_SPELLING = re.compile(r"(0|[1-9][0-9]{0,18})\.([0-9a-f]{16})\.(0|[1-9][0-9]{0,18})\.([0-9a-f]{16})")
_SIGNED_MAX = 2**63 - 1
_UNSIGNED_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class StateKey:
    """Names one state of one job.

    Fields:
        quorum_id: the quorum in which the state was taken, 0 to 2^63 - 1.
        nonce: that quorum's random word, 64 bits unsigned.
        step: committed steps, 0 to 2^63 - 1.
        lineage: digest of the commits that led here, 64 bits unsigned.
    Raises: WrongSetting: a field is no integer or out of its range.
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
                raise WrongSetting(f"StateKey.{name} is {value!r}; give an integer from 0 to {limit}")

    def __str__(self) -> str:
        """The key as it stands in addresses, for example ``7.00000000000000ab.120.0123456789abcdef``."""
        return f"{self.quorum_id}.{self.nonce:016x}.{self.step}.{self.lineage:016x}"

    @classmethod
    def parse(cls, text: str) -> StateKey:
        """Read what ``str(key)`` wrote.

        Raises: WrongSetting: the text is no key.
        """
        match = _SPELLING.fullmatch(text)
        if match is None:
            raise WrongSetting(f"{text[:80]!r} is no state key; write quorum_id.nonce.step.lineage")
        quorum_id, nonce, step, lineage = match.groups()
        return cls(quorum_id=int(quorum_id), nonce=int(nonce, 16), step=int(step), lineage=int(lineage, 16))

    def comes_after(self, other: StateKey) -> bool:
        """Whether a source that has ``other`` may still come to have this one."""
        return (self.quorum_id, self.step) > (other.quorum_id, other.step)
