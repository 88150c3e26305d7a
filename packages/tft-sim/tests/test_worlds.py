"""The worlds as hypothesis drives them: deeper than every order of a few events, and shorter to read than a seed."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tft_sim import GroupWorld, LighthouseWorld

DEEP = settings(max_examples=30, stateful_step_count=20, deadline=None, derandomize=True, database=None)


class Lighthouses(RuleBasedStateMachine):
    """Three replicas that live as badly as they like; in the end all that live must find together."""

    def __init__(self) -> None:
        super().__init__()
        self.world = LighthouseWorld("abc", start="trained")

    @rule(data=st.data())
    def anything(self, data: st.DataObject) -> None:
        self.world.happen(data.draw(st.sampled_from(self.world.choices())))

    def teardown(self) -> None:
        self.world.calm_down()


class Groups(RuleBasedStateMachine):
    """Two ranks, a lighthouse that answers when it likes; in the end nobody waits for an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.world = GroupWorld()

    @rule(data=st.data())
    def anything(self, data: st.DataObject) -> None:
        self.world.happen(data.draw(st.sampled_from(self.world.choices())))

    def teardown(self) -> None:
        self.world.calm_down()


TestLighthouses = Lighthouses.TestCase
TestLighthouses.settings = DEEP
TestGroups = Groups.TestCase
TestGroups.settings = DEEP
