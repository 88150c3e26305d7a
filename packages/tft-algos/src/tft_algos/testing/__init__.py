"""What a test of a training strategy needs: the digest of a state, and stand-ins for what lies outside the process.

Law of this folder: public, and used by this project's own tests; nothing here runs in production.
"""

from __future__ import annotations

from tft_algos.testing.digest import digest
from tft_algos.testing.fakes import FakeGroup, MemoryTransport, ScriptedCoordinator, plan_of

__all__ = ["FakeGroup", "MemoryTransport", "ScriptedCoordinator", "digest", "plan_of"]
