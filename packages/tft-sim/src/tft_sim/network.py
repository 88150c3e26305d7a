"""A network in memory: streams and single messages between processes, with faults by rule.

It behaves as gRPC over TCP does. A stream keeps its messages in order and loses none in the middle. Undeliverable
messages wait, and if they wait too long the stream breaks for both ends. The loss of a single message (one leg of a
unary call) is an error at its sender. Another message may overtake it, and a client's retry duplicates it. Rules say
what happens between which processes. Rules are directed, so a cable that works one way only is two lines of a test.

Law of this file: moving messages. Nothing here knows their content.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from tft_sim.clock import VirtualClock
from tft_sim.marks import Marks
from tft_sim.process import Process, State


class Fate(enum.Enum):
    """The effect of a rule on a message."""

    PASS = "pass"
    DELAY = "delay"
    DROP = "drop"  # a stream breaks; a single message is an error at once
    PARTITION = "partition"  # as a cut cable: messages wait, and the stream breaks after the keep-alive
    HOLD = "hold"  # messages wait until released, without a limit
    DUPLICATE = "duplicate"  # a single message arrives twice; a stream keeps its own messages in order
    REORDER = "reorder"  # each single message has its own delay; streams as above
    LAG = "lag"  # the messages of streams are late; single messages overtake them


@dataclass(frozen=True, slots=True)
class Rule:
    """A fault between `source` and `target` (names or shell patterns). The newest matching rule applies.

    Args:
        source, target: names, or patterns such as `a:*`.
        fate: effect on each message.
        low_ms, high_ms: bounds of the delay, for DELAY, REORDER and LAG. For DUPLICATE: of the time between the two.
    """

    source: str
    target: str
    fate: Fate
    low_ms: int = 0
    high_ms: int = 0

    def matches(self, source: str, target: str) -> bool:
        return fnmatchcase(source, self.source) and fnmatchcase(target, self.target)


@dataclass(slots=True)
class _Direction:
    """One direction of a stream."""

    last_at_ms: int = 0
    waiting: list[Any] = field(default_factory=list)


class Stream:
    """A connection between two processes, in order both ways. `Network.dial` creates it."""

    def __init__(self, network: Network, number: int, client: Process, server: Process) -> None:
        self.number = number
        self.client = client
        self.server = server
        self.open = True
        self.end_reported = False  # the stream ended with a process, and that process's host reported it
        self.open_since_ms: int | None = None  # time since which both ends know that it is open
        self._network = network
        self._directions = {client.name: _Direction(), server.name: _Direction()}
        # messages that came before the end listened
        self._early: dict[str, list[Any]] = {client.name: [], server.name: []}
        self._on_message: dict[str, Callable[[Any], None]] = {}
        self._on_closed: dict[str, Callable[[], None]] = {}
        self._closed: set[str] = set()  # ends that know that the stream has ended

    def listen(self, end: Process, on_message: Callable[[Any], None], on_closed: Callable[[], None]) -> None:
        """Set that end's handlers for messages and for the end of the stream."""
        self._on_message[end.name] = on_message
        self._on_closed[end.name] = on_closed
        early, self._early[end.name] = self._early[end.name], []
        for message in early:
            on_message(message)

    def hear(self, end: Process, message: Any) -> None:
        """Deliver a message to that end. An end that knows of the stream's end reads nothing more."""
        if end.name in self._closed:
            return
        on_message = self._on_message.get(end.name)
        if on_message is None:
            self._early[end.name].append(message)
        else:
            on_message(message)

    def send(self, sender: Process, message: Any, *, extra: bool = False) -> None:
        """Send a message. If the stream has ended, the message is discarded.

        Args:
            sender: the sending end.
            message: any value.
            extra: its delay is drawn from a separate source.
        """
        if self.open:
            self._network.send_on_stream(self, sender, message, extra=extra)

    def close(self, closer: Process) -> None:
        """End the stream. The other end learns of it after all messages sent before. The closer is not told."""
        if self.open:
            self._network.end_stream(self, notify=[self.other(closer)])

    def notify_closed(self, end: Process) -> None:
        """Tell that end that the stream has ended."""
        self._closed.add(end.name)
        on_closed = self._on_closed.get(end.name)
        if on_closed is not None:
            end.run(on_closed)

    def other(self, end: Process) -> Process:
        """Return the process at the other end."""
        return self.server if end is self.client else self.client


class Network:
    """All streams and messages of a simulation.

    Args:
        clock: virtual time.
        rng: for delays only.
        extra_rng: for the delays of extra messages. So the delays of the others stay the same if a process sends more.
        marks: of the simulation.
        delay_ms: bounds of the delay of an ordinary message.
        keepalive_ms: a stream that can't deliver for this long breaks. A dial waits for as long.
    """

    def __init__(
        self,
        clock: VirtualClock,
        rng: random.Random,
        marks: Marks | None = None,
        *,
        delay_ms: tuple[int, int] = (1, 5),
        keepalive_ms: int = 2_000,
        extra_rng: random.Random | None = None,
    ) -> None:
        self.on_mend: Callable[[], None] = lambda: None  # called when a rule has ended
        self._clock = clock
        self._rng = rng
        self._extra_rng = extra_rng if extra_rng is not None else random.Random("extra")
        self._marks = marks if marks is not None else Marks()
        self._delay_ms = delay_ms
        self._keepalive_ms = keepalive_ms
        self._rules: list[Rule] = []
        self._ended_rules: list[tuple[Rule, int]] = []  # each with the time until which its effect lasted
        self._newest_arrival_ms: dict[tuple[str, str], int] = {}  # of single messages already sent
        self._streams: dict[int, Stream] = {}
        self._held_messages: list[tuple[Process, Process, Callable[[], None], Callable[[], None]]] = []
        self._numbers = itertools.count(1)

    # --- rules ----------------------------------------------------------------------------------------------------

    def add(self, rule: Rule) -> Rule:
        """Activate a rule, and return it for `remove`."""
        self._rules.append(rule)
        if rule.fate is Fate.PARTITION:
            for stream in list(self._streams.values()):
                self._break_if_cut(stream)
        return rule

    def remove(self, rule: Rule) -> None:
        """End a rule, and deliver the messages that it held back."""
        if rule in self._rules:
            self._rules.remove(rule)
            self._ended_rules.append((rule, self._clock.now_ms + rule.high_ms))
            self._deliver_held()
            self.on_mend()

    def clear(self) -> None:
        """End all rules."""
        for rule in list(self._rules):
            self.remove(rule)

    def is_cut(self, one: str, other: str) -> bool:
        """Return whether no message comes through between these two. One-way traffic is never acknowledged, so it
        counts."""
        if not any(rule.fate is Fate.PARTITION for rule in self._rules):
            return False
        return Fate.PARTITION in (self._rule_for(one, other).fate, self._rule_for(other, one).fate)

    def calm_since_ms(self, one: str, other: str) -> int:
        """Return the time since which no rule disturbs messages between these two, in either direction."""
        since_ms = 0
        for source, target in ((one, other), (other, one)):
            if self._rule_for(source, target).fate is not Fate.PASS:
                return self._clock.now_ms
            effect_ended_ms = [until_ms for rule, until_ms in self._ended_rules if rule.matches(source, target)]
            since_ms = max(since_ms, *effect_ended_ms, 0)
        return since_ms

    def break_streams(self, source: str, target: str, *, server_late_ms: int | None = None) -> int:
        """Break every stream dialed from `source` to `target`, and return their number.

        Args:
            source, target: names or patterns.
            server_late_ms: delay after which the target learns of it. None: both ends learn of it at once.
        """
        broken = [
            stream
            for stream in self._streams.values()
            if fnmatchcase(stream.client.name, source) and fnmatchcase(stream.server.name, target)
        ]
        for stream in broken:
            if server_late_ms is None:
                self.end_stream(stream, notify=[stream.client, stream.server])
            else:
                self.end_stream(stream, notify=[stream.client])
                self._clock.after(server_late_ms, partial(stream.notify_closed, stream.server))
        return len(broken)

    # --- processes ------------------------------------------------------------------------------------------------

    def ended(self, process: Process) -> None:
        """End the streams of a process that was killed or vanished, at once or when the other end notices."""
        for stream in list(self._streams.values()):
            if process in (stream.client, stream.server):
                other = stream.other(process)
                if process.state is State.VANISHED:
                    self._clock.after(self._keepalive_ms, partial(self.end_stream, stream, notify=[other]))
                else:
                    stream.end_reported = stream.open and not self.is_cut(process.name, other.name)
                    self.end_stream(stream, notify=[other])

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
        """Open a stream: call `accepted` at the server, then `opened` at the client, or `failed` at the client."""
        stream = Stream(self, next(self._numbers), client, server)
        outcome: list[bool] = []

        def give_up() -> None:
            if not outcome:
                outcome.append(False)
                self.end_stream(stream, notify=[server])
                client.run(failed)

        def answer() -> None:
            if outcome:
                return
            if not stream.open:
                give_up()  # the stream broke before the client knew that it was open
                return
            outcome.append(True)
            stream.open_since_ms = self._clock.now_ms
            opened(stream)

        def accept() -> None:
            if stream.open and not outcome:
                self._streams[stream.number] = stream
                accepted(stream)
                self._move(server, client, answer, give_up, self._stream_rule(server, client))
                self._break_if_cut(stream)

        self._move(client, server, accept, give_up, self._stream_rule(client, server))
        self._clock.after(self._keepalive_ms, give_up)

    def send_on_stream(self, stream: Stream, sender: Process, message: Any, *, extra: bool = False) -> None:
        """Move a message of a stream. `Stream.send` calls this."""
        target = stream.other(sender)
        direction = stream._directions[sender.name]
        rule = self._stream_rule(sender, target)
        if rule.fate is Fate.DROP:
            self.end_stream(stream, notify=[stream.client, stream.server])
        elif direction.waiting or rule.fate in (Fate.PARTITION, Fate.HOLD):
            direction.waiting.append(message)
        else:
            self._deliver(stream, sender, message, self._delay(rule, self._extra_rng if extra else self._rng))

    def end_stream(self, stream: Stream, *, notify: list[Process]) -> None:
        """Break a stream. Each end in `notify` learns of it after the messages that were sent to it before."""
        if not stream.open:
            return
        stream.open = False
        self._streams.pop(stream.number, None)
        for process in notify:
            sender = stream.other(process)
            rule = self._stream_rule(sender, process)
            delay_ms = self._keepalive_ms if rule.fate is Fate.PARTITION else self._delay(rule)
            direction = stream._directions[sender.name]
            at_ms = max(direction.last_at_ms, self._clock.now_ms + delay_ms)
            self._clock.at(at_ms, partial(stream.notify_closed, process))

    # --- single messages ------------------------------------------------------------------------------------------

    def message(self, source: Process, target: Process, deliver: Callable[[], None], lost: Callable[[], None]) -> None:
        """Move one message: call `deliver` in the target, or `lost` in the source."""
        rule = self._rule_for(source.name, target.name)
        arrives_ms = self._move(source, target, deliver, lost, rule)
        if arrives_ms is None:
            return
        direction = (source.name, target.name)
        if arrives_ms < self._newest_arrival_ms.get(direction, 0):
            self._marks.hit("a call overtook another")
        self._newest_arrival_ms[direction] = max(arrives_ms, self._newest_arrival_ms.get(direction, 0))
        if rule.fate is Fate.DUPLICATE:
            self._marks.hit("a call came twice")
            again_ms = arrives_ms + self._rng.randint(rule.low_ms, rule.high_ms)
            self._clock.at(again_ms, lambda: target.run(deliver))

    # --- inside ---------------------------------------------------------------------------------------------------

    def _move(
        self, source: Process, target: Process, deliver: Callable[[], None], lost: Callable[[], None], rule: Rule
    ) -> int | None:
        """Send one message, and return its arrival time, or None if it does not arrive."""
        if rule.fate is Fate.HOLD:
            self._held_messages.append((source, target, deliver, lost))
            return None
        delay_ms = self._keepalive_ms if rule.fate is Fate.PARTITION else self._delay(rule)
        if rule.fate in (Fate.DROP, Fate.PARTITION):
            self._clock.after(delay_ms, lambda: source.run(lost))
            return None
        self._clock.after(delay_ms, lambda: self._arrive(source, target, deliver, lost))
        return self._clock.now_ms + delay_ms

    def _arrive(self, source: Process, target: Process, deliver: Callable[[], None], lost: Callable[[], None]) -> None:
        if target.alive:
            target.run(deliver)
        else:
            wait_ms = self._keepalive_ms if target.state is State.VANISHED else 0
            self._clock.after(wait_ms, lambda: source.run(lost))

    def _deliver(self, stream: Stream, sender: Process, message: Any, delay_ms: int) -> None:
        target = stream.other(sender)
        direction = stream._directions[sender.name]
        direction.last_at_ms = max(direction.last_at_ms, self._clock.now_ms + delay_ms)
        self._clock.at(direction.last_at_ms, lambda: target.run(lambda: stream.hear(target, message)))

    def _rule_for(self, source: str, target: str) -> Rule:
        for rule in reversed(self._rules):
            if rule.matches(source, target):
                return rule
        return Rule("*", "*", Fate.PASS)

    def _stream_rule(self, source: Process, target: Process) -> Rule:
        """Return the rule in effect for a connection."""
        rule = self._rule_for(source.name, target.name)
        if rule.fate is Fate.LAG:
            return replace(rule, fate=Fate.DELAY)
        return Rule("*", "*", Fate.PASS) if rule.fate in (Fate.DUPLICATE, Fate.REORDER) else rule

    def _delay(self, rule: Rule, rng: random.Random | None = None) -> int:
        own = rule.fate in (Fate.DELAY, Fate.REORDER)
        low_ms, high_ms = (rule.low_ms, rule.high_ms) if own else self._delay_ms
        return (rng or self._rng).randint(low_ms, high_ms)

    def _is_stream_cut(self, stream: Stream) -> bool:
        both = ((stream.client, stream.server), (stream.server, stream.client))
        return any(self._rule_for(source.name, target.name).fate is Fate.PARTITION for source, target in both)

    def _break_if_cut(self, stream: Stream) -> None:
        """End a stream that is cut in either direction: data not acknowledged within the keep-alive breaks it for both
        ends."""
        if not self._is_stream_cut(stream):
            return

        def judge() -> None:
            if stream.open and self._is_stream_cut(stream):
                stream.open = False
                self._streams.pop(stream.number, None)
                stream.notify_closed(stream.client)
                stream.notify_closed(stream.server)

        self._clock.after(self._keepalive_ms, judge)

    def _deliver_held(self) -> None:
        for stream in list(self._streams.values()):
            for sender in (stream.client, stream.server):
                direction = stream._directions[sender.name]
                rule = self._stream_rule(sender, stream.other(sender))
                if rule.fate not in (Fate.PARTITION, Fate.HOLD):
                    waiting, direction.waiting = direction.waiting, []
                    for message in waiting:
                        self._deliver(stream, sender, message, self._delay(rule))
        held, self._held_messages = self._held_messages, []
        for source, target, deliver, lost in held:
            self.message(source, target, deliver, lost)
