"""What the tests of tft-coord share: hypothesis takes its time."""

from __future__ import annotations

from hypothesis import settings

# How long one example takes says more of the machine, which runs much else, than of what is tested.
settings.register_profile("on a busy machine", deadline=None)
settings.load_profile("on a busy machine")
