"""A session's core as hypothesis drives it: whatever it is told, in whatever order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tft_coord.core.session import (
    Dial,
    GiveUp,
    HangUp,
    SendBeat,
    SendHello,
    SendRequest,
    SendWithdraw,
    SessionCore,
    SessionEffect,
)
from tft_coord.core.types import Member, QuorumKey, Refusal
from tft_coord.timeouts import Timeouts

DEEP = settings(max_examples=150, stateful_step_count=20, deadline=None, derandomize=True, database=None)
TIMEOUTS = Timeouts(
    heartbeat_timeout_ms=900,
    join_timeout_ms=1_200,
    reconnect_grace_ms=300,
    quorum_tick_ms=300,
    beat_interval_ms=300,
)


class Sessions(RuleBasedStateMachine):
    """A manager server's end of its stream: whatever it is told, what it says keeps the order of the protocol."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.core = SessionCore(
            job="job", replica_id="a", address="a:1", session=100, timeouts=TIMEOUTS, jitter=lambda: 0.5
        )
        self.is_open = False
        self.greeted: int | None = None  # the session of the newest hello on this stream
        self.welcome = False
        self.request: int | None = None
        self.num_requests = 0
        self.newest_id = 0
        self.highest_session = 100
        self.over = False
        self.dials = self.heard(self.core.start(0))

    def heard(self, orders: list[SessionEffect]) -> int:
        """Takes what the core says; returns the number of dials."""
        dials = 0
        for order in orders:
            assert not (self.over and not isinstance(order, HangUp)), "it has given up, and speaks"
            match order:
                case Dial():
                    assert order.at_ms >= self.now_ms
                    dials += 1
                case SendHello():
                    assert self.is_open
                    assert order.hello.session >= self.highest_session
                    self.highest_session = self.greeted = order.hello.session
                    self.welcome = False
                case SendRequest():
                    assert self.welcome, "a request goes out on a session that does not stand"
                    assert order.request == self.request, "what is not open is said"
                case SendWithdraw():
                    assert self.welcome
                case SendBeat():
                    assert self.is_open
                    assert self.greeted == self.highest_session, "a beat is of the session that was announced last"
                case GiveUp():
                    self.over = True
                case HangUp():
                    self.is_open = self.welcome = False
        return dials

    @rule()
    def stream_opens(self) -> None:
        if not self.is_open:
            self.is_open = True
            self.greeted = None
            self.heard(self.core.stream_opened(self.now_ms))
            assert self.over or self.greeted is not None, "the hello goes first"

    @rule()
    def stream_breaks(self) -> None:
        self.is_open = self.welcome = False
        assert self.heard(self.core.stream_broke(self.now_ms)) == (0 if self.over else 1)

    @precondition(lambda self: self.is_open and self.greeted is not None)
    @rule(started_ms=st.integers(1, 3), cluster=st.sampled_from(["x", "y"]), late=st.booleans())
    def is_welcomed(self, started_ms: int, cluster: str, late: bool) -> None:
        assert self.greeted is not None
        session = self.greeted - late  # of an older hello: not believed
        older = cluster == self.core.cluster_id and started_ms < self.core.lighthouse_started_ms
        self.welcome = (self.welcome or not late) and not (older and not late)
        self.heard(self.core.welcomed(session, started_ms, self.now_ms, cluster))

    @precondition(lambda self: self.is_open and self.greeted is not None)
    @rule(late=st.booleans())
    def is_told_lost(self, late: bool) -> None:
        assert self.greeted is not None
        before = self.core.session
        self.heard(self.core.told_lost(self.greeted - late, self.now_ms))
        assert self.core.session == before + (not late), "a loss ends with a newer session, and only its own"

    @precondition(lambda self: self.is_open and not self.over)
    @rule(refusal=st.sampled_from([Refusal.STALE, Refusal.OLD_LIGHTHOUSE, Refusal.DUPLICATE, Refusal.DEAD]))
    def is_refused(self, refusal: Refusal) -> None:
        self.heard(self.core.told_refused(refusal, "for a reason", self.now_ms))
        assert not self.is_open
        assert refusal is not Refusal.DEAD or self.over

    @rule(held=st.integers(0, 5))
    def asks(self, held: int) -> None:
        self.num_requests += 1
        self.request = self.num_requests
        key = QuorumKey(held, 1) if held else None
        self.heard(self.core.ask(self.request, Member("a"), key, self.now_ms))

    @rule()
    def withdraws(self) -> None:
        request, self.request = self.request, None
        self.heard(self.core.withdraw(request or 0, self.now_ms))

    @rule(late=st.booleans())
    def is_answered(self, late: bool) -> None:
        self.newest_id += 1
        number = (self.request or 0) - late
        fits = self.request is not None and not late
        assert self.core.answered(number, QuorumKey(self.newest_id + 10, 1)) == fits
        if fits:
            self.request = None

    @rule(ms=st.sampled_from([1, 300, 1_500]))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms
        self.heard(self.core.tick(self.now_ms))

    @invariant()
    def the_session_never_falls(self) -> None:
        assert self.core.session >= self.highest_session
        assert (self.core.open_request.request if self.core.open_request is not None else None) == self.request


TestSessions = Sessions.TestCase
TestSessions.settings = DEEP
