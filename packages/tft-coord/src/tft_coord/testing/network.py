"""A network in memory: streams and single messages between processes, with faults by rule.

It behaves as gRPC over TCP does. A stream keeps its messages in order; none is lost in the middle: what can't be
delivered waits, and if it waits too long the stream breaks for both ends. A single message (one leg of a unary call)
that is lost is an error at its sender. Rules say what happens between which processes; they are directed, so a cable
that works one way only is two lines of a test.

Law of this file: moving messages. Nothing here knows what they say.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from tft_coord.testing.clock import VirtualClock
from tft_coord.testing.process import Process, State


class Fate(enum.Enum):
    """What a rule does to a message."""

    PASS = "pass"
    DELAY = "delay"
    DROP = "drop"  # a stream breaks; a single message is an error at once
    PARTITION = "partition"  # as a cut cable: messages wait, and after the keep-alive the stream breaks
    HOLD = "hold"  # messages wait until released, however long


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to messages from `source` to `target` (names or shell patterns). The newest rule that fits counts.

    Args:
        source, target: names, or patterns as `a:*`.
        fate: what happens.
        low_ms, high_ms: bounds of the delay, for DELAY.
    """

    source: str
    target: str
    fate: Fate
    low_ms: int = 0
    high_ms: int = 0

    def fits(self, source: str, target: str) -> bool:
        return fnmatchcase(source, self.source) and fnmatchcase(target, self.target)


@dataclass(slots=True)
class _Way:
    """One direction of a stream."""

    last_at_ms: int = 0
    waiting: list[Any] = field(default_factory=list)


class Stream:
    """A connection between two processes, in order both ways. Made by `Network.dial`."""

    def __init__(self, network: Network, number: int, client: Process, server: Process) -> None:
        self.number = number
        self.client = client
        self.server = server
        self.open = True
        self._network = network
        self._ways = {client.name: _Way(), server.name: _Way()}
        self._on_message: dict[str, Callable[[Any], None]] = {}
        self._on_closed: dict[str, Callable[[], None]] = {}

    def listen(self, end: Process, on_message: Callable[[Any], None], on_closed: Callable[[], None]) -> None:
        """Say what that end does with messages and with the end of the stream."""
        self._on_message[end.name] = on_message
        self._on_closed[end.name] = on_closed

    def send(self, sender: Process, message: Any) -> None:
        """Send; nothing is heard of it if the stream has ended."""
        if self.open:
            self._network.on_stream(self, sender, message)

    def close(self, closer: Process) -> None:
        """End it; the other end learns of it after all that was sent before. The closer is not told."""
        if self.open:
            self._network.end_stream(self, told=[self.other(closer)])

    def other(self, end: Process) -> Process:
        """The process at the other end."""
        return self.server if end is self.client else self.client


class Network:
    """All streams and messages of a simulation.

    Args:
        clock: virtual time.
        rng: for delays only.
        delay_ms: bounds of the delay of an ordinary message.
        keepalive_ms: a stream that can't deliver for so long breaks; also how long a dial waits.
    """

    def __init__(
        self, clock: VirtualClock, rng: random.Random, *, delay_ms: tuple[int, int] = (1, 5), keepalive_ms: int = 2_000
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._delay_ms = delay_ms
        self._keepalive_ms = keepalive_ms
        self._rules: list[Rule] = []
        self._streams: dict[int, Stream] = {}
        self._held: list[tuple[Process, Process, Callable[[], None], Callable[[], None]]] = []
        self._numbers = itertools.count(1)

    # --- rules ----------------------------------------------------------------------------------------------------

    def add(self, rule: Rule) -> Rule:
        """Let a rule hold from now on; returns it, for `remove`."""
        self._rules.append(rule)
        if rule.fate is Fate.PARTITION:
            for stream in list(self._streams.values()):
                self._watch(stream)
        return rule

    def remove(self, rule: Rule) -> None:
        """End a rule; what it kept waiting goes on."""
        if rule in self._rules:
            self._rules.remove(rule)
            self._release()

    def clear(self) -> None:
        """End all rules."""
        self._rules.clear()
        self._release()

    def break_streams(self, source: str, target: str) -> int:
        """Break every stream dialed from `source` to `target`, for both ends; returns how many there were."""
        broken = [
            stream
            for stream in self._streams.values()
            if fnmatchcase(stream.client.name, source) and fnmatchcase(stream.server.name, target)
        ]
        for stream in broken:
            self.end_stream(stream, told=[stream.client, stream.server])
        return len(broken)

    # --- processes ------------------------------------------------------------------------------------------------

    def ended(self, process: Process) -> None:
        """A process was killed or vanished: its streams end, at once or when the others notice."""
        for stream in list(self._streams.values()):
            if process in (stream.client, stream.server):
                other = stream.other(process)
                if process.state is State.VANISHED:
                    self._clock.after(self._keepalive_ms, partial(self.end_stream, stream, told=[other]))
                else:
                    self.end_stream(stream, told=[other])

    # --- streams --------------------------------------------------------------------------------------------------

    def dial(
        self,
        client: Process,
        server: Process,
        *,
        accepted: Callable[[Stream], None],
        opened: Callable[[Stream], None],
        failed: Callable[[], None],
    ) -> None:
        """Open a stream: `accepted` at the server, then `opened` at the client; or `failed` at the client."""
        stream = Stream(self, next(self._numbers), client, server)
        outcome: list[bool] = []

        def give_up() -> None:
            if not outcome:
                outcome.append(False)
                self.end_stream(stream, told=[server])
                client.run(failed)

        def answer() -> None:
            if outcome:
                return
            if not stream.open:
                give_up()  # it broke before the client knew that it stood
                return
            outcome.append(True)
            opened(stream)

        def accept() -> None:
            if stream.open and not outcome:
                self._streams[stream.number] = stream
                accepted(stream)
                self.message(server, client, answer, give_up)
                self._watch(stream)

        self.message(client, server, accept, give_up)
        self._clock.after(self._keepalive_ms, give_up)

    def on_stream(self, stream: Stream, sender: Process, message: Any) -> None:
        """Called by `Stream.send`."""
        target = stream.other(sender)
        way = stream._ways[sender.name]
        rule = self._rule(sender, target)
        if rule.fate is Fate.DROP:
            self.end_stream(stream, told=[stream.client, stream.server])
        elif way.waiting or rule.fate in (Fate.PARTITION, Fate.HOLD):
            way.waiting.append(message)
        else:
            self._deliver(stream, sender, message, self._delay(rule))

    def end_stream(self, stream: Stream, *, told: list[Process]) -> None:
        """Break a stream; each end that is told learns of it after what was sent to it before."""
        if not stream.open:
            return
        stream.open = False
        self._streams.pop(stream.number, None)
        for process in told:
            sender = stream.other(process)
            rule = self._rule(sender, process)
            delay_ms = self._keepalive_ms if rule.fate is Fate.PARTITION else self._delay(rule)
            way = stream._ways[sender.name]
            at_ms = max(way.last_at_ms, self._clock.now_ms + delay_ms)
            on_closed = stream._on_closed.get(process.name)
            if on_closed is not None:
                self._clock.at(at_ms, partial(process.run, on_closed))

    # --- single messages ------------------------------------------------------------------------------------------

    def message(self, source: Process, target: Process, deliver: Callable[[], None], lost: Callable[[], None]) -> None:
        """Move one message; `deliver` happens in the target, or `lost` in the source."""
        rule = self._rule(source, target)
        if rule.fate is Fate.HOLD:
            self._held.append((source, target, deliver, lost))
            return
        delay_ms = self._delay(rule)
        if rule.fate is Fate.DROP:
            self._clock.after(delay_ms, lambda: source.run(lost))
        elif rule.fate is Fate.PARTITION:
            self._clock.after(self._keepalive_ms, lambda: source.run(lost))
        else:
            self._clock.after(delay_ms, lambda: self._arrive(source, target, deliver, lost))

    # --- inside ---------------------------------------------------------------------------------------------------

    def _arrive(self, source: Process, target: Process, deliver: Callable[[], None], lost: Callable[[], None]) -> None:
        if target.alive:
            target.run(deliver)
        else:
            wait_ms = self._keepalive_ms if target.state is State.VANISHED else 0
            self._clock.after(wait_ms, lambda: source.run(lost))

    def _deliver(self, stream: Stream, sender: Process, message: Any, delay_ms: int) -> None:
        target = stream.other(sender)
        way = stream._ways[sender.name]
        way.last_at_ms = max(way.last_at_ms, self._clock.now_ms + delay_ms)
        on_message = stream._on_message.get(target.name)
        if on_message is not None:
            self._clock.at(way.last_at_ms, lambda: target.run(lambda: on_message(message)))

    def _rule(self, source: Process, target: Process) -> Rule:
        for rule in reversed(self._rules):
            if rule.fits(source.name, target.name):
                return rule
        return Rule("*", "*", Fate.PASS)

    def _delay(self, rule: Rule) -> int:
        low_ms, high_ms = (rule.low_ms, rule.high_ms) if rule.fate is Fate.DELAY else self._delay_ms
        return self._rng.randint(low_ms, high_ms)

    def _cut(self, stream: Stream) -> bool:
        both = ((stream.client, stream.server), (stream.server, stream.client))
        return any(self._rule(source, target).fate is Fate.PARTITION for source, target in both)

    def _watch(self, stream: Stream) -> None:
        """A cut either way ends a stream: what is not acknowledged within the keep-alive breaks it for both."""
        if not self._cut(stream):
            return

        def judge() -> None:
            if stream.open and self._cut(stream):
                stream.open = False
                self._streams.pop(stream.number, None)
                for process in (stream.client, stream.server):
                    on_closed = stream._on_closed.get(process.name)
                    if on_closed is not None:
                        process.run(on_closed)

        self._clock.after(self._keepalive_ms, judge)

    def _release(self) -> None:
        for stream in list(self._streams.values()):
            for sender in (stream.client, stream.server):
                way = stream._ways[sender.name]
                rule = self._rule(sender, stream.other(sender))
                if rule.fate in (Fate.PASS, Fate.DELAY):
                    waiting, way.waiting = way.waiting, []
                    for message in waiting:
                        self._deliver(stream, sender, message, self._delay(rule))
        held, self._held = self._held, []
        for source, target, deliver, lost in held:
            self.message(source, target, deliver, lost)
