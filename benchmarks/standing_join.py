"""P19: one replica joins thousands in a standing quorum, and the time counts until all have the new quorum.

n groups stand: each holds a stream, sends a numbered beat once a second, and is answered. One newcomer asks. The
lighthouse recalls the n members, each asks, and all n + 1 receive the new quorum. The time runs from the newcomer's
request to the last answer. A member asks as soon as it hears the recall, as if its round had no length. The newcomer
reaches the peers of its trial at once. A real job adds the rest of a step and a dial.

The comparison is torchft's lighthouse, whose members ask in every step. Its time is that of n + 1 members in one
quorum, from the first request to the last answer, as in P10. The systems take turns within one run.

Law of this file: the messages of the groups. The connections belong to the swarm.
"""

from __future__ import annotations

import functools
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

import psutil

from benchmarks import peer, servers
from benchmarks.lighthouse_scale import PATIENT, at_step, members, open_sessions, our_command, unary_rounds
from benchmarks.row import Row
from benchmarks.swarm import SPARE_DESCRIPTORS, Connection, Swarm, allow_descriptors, swarm
from tft_coord.core import effects, events
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.types import Hello, Member, QuorumKey
from tft_coord.wire import codec, services

JUDGED: Final = 1_000
RATIO_BAR: Final = 0.35
TURNS: Final = {1_000: 5, 10_000: 3}
LEASE_MS: Final = 60_000
BEAT_S: Final = 1.0
# More beats a second, each with its answer, would take over half of the lighthouse's one core. So with more groups each
# group beats less often here. A Manager has no setting for that.
BEATS_PER_S_MOST: Final = 2_000
WITHIN_S: Final = 300.0
# Bytes kept of a quorum's answer to the other members. They identify the quorum, and no other message is longer. Whole
# answers of ten thousand members would take eleven gigabytes.
HEAD_BYTES: Final = 8 << 10
# The measured memory of a group in a quorum of ten thousand, in both processes and in the kernel's buffers, plus some.
GROUP_BYTES: Final = 1 << 20

_ANSWER: Final = codec.frame_quorum_answer(1, b"")[:1]
_decode = functools.lru_cache(maxsize=256)(codec.decode_from_lighthouse)


class NotAnsweredError(RuntimeError):
    """A missing answer: a member was not answered in time."""


@dataclass(frozen=True)
class Joined:
    """The measurement of one newcomer's join.

    Args:
        took_s: time from its request to the last answer.
        lighthouse_s, swarm_s: CPU seconds of the server and of the clients in that time.
        beats_core: the share of a core that the server spent on beats before, while all stood.
    """

    took_s: float
    lighthouse_s: float
    swarm_s: float
    beats_core: float


@final
class _Group:
    """A replica group on its connection.

    Args:
        connection: of the group.
        member: the group's member in its requests.
    """

    def __init__(self, connection: Connection, member: Member) -> None:
        self.connection = connection
        self.member = member
        self.answer = b""  # the newest answer
        self.answered_s = 0.0  # arrival time of the newest answer
        self.num_renewals = 0  # number of beats that were answered
        self.on_recall = b""  # the request that it sends on a recall
        connection.keep_bytes = HEAD_BYTES
        connection.on_message = self._told

    def keep_all(self) -> None:
        """Keep its answers whole."""
        self.connection.keep_bytes = None

    def request(self, number: int, step: int, held: QuorumKey | None) -> bytes:
        """Return a request as bytes on the wire. Every request after the first contains only the changes."""
        previous = at_step(self.member, step - 1) if number > 1 else None
        asked = events.QuorumRequested(0, number, at_step(self.member, step), held)
        return self.connection.framed(codec.encode_to_lighthouse(asked, previous))

    def ask(self, words: bytes) -> None:
        """Send a request."""
        self.answer = b""
        self.connection.send(words)

    @property
    def quorum(self) -> effects.AnswerQuorum | effects.AnswerUnchanged:
        """Return the answer to its request. Raises: RuntimeError: a refusal."""
        answer = codec.decode_from_lighthouse(self.answer)
        if not isinstance(answer, effects.AnswerQuorum | effects.AnswerUnchanged):
            raise RuntimeError(f"the lighthouse refuses {self.member.replica_id} a quorum: {answer}")
        return answer

    def _told(self, message: bytes) -> None:
        if message[:1] == _ANSWER:
            self.answer, self.answered_s = message, time.perf_counter()
            return
        match _decode(message):
            case effects.TellNewest(_, news):
                self.num_renewals += news.beat > 0
                if news.recalled and self.on_recall:
                    words, self.on_recall = self.on_recall, b""
                    self.ask(words)
            case effects.TryPeers(_, number):
                self._say(events.PeersTried(0, number, ()))
            case effects.Welcome() | effects.AnnounceNewcomer() | effects.TellWait():
                pass
            case other:
                raise RuntimeError(f"{self.member.replica_id} received an unexpected message: {other}")

    def _say(self, event: events.LighthouseEvent) -> None:
        self.connection.send(self.connection.framed(codec.encode_to_lighthouse(event)))


@final
class _Beats:
    """The beats of all groups: one for each group in `every_s`, spread over that time."""

    def __init__(self, groups: Sequence[_Group]) -> None:
        self.every_s = max(BEAT_S, len(groups) / BEATS_PER_S_MOST)
        self._groups = groups
        self._began_s = time.perf_counter()
        self._said = 0
        self._words = b""

    def send_what_is_due(self) -> None:
        number = len(self._groups)
        due = int((time.perf_counter() - self._began_s) / self.every_s * number)
        for index in range(self._said, due):
            lap, which = divmod(index, number)
            connection = self._groups[which].connection
            if which == 0 or not self._words:
                progress = Progress(1_000, Phase.OWN, since_ms=300, excused=False, slowest_step_ms=600_000)
                beat = events.BeatReceived(0, 0, progress, waits=False, number=lap + 1)
                self._words = connection.framed(codec.encode_to_lighthouse(beat))
            connection.send(self._words)
        self._said = due


def join(started: servers.Started, number: int, *, settle_beats: float = 2.0) -> Joined:
    """Let one replica join a standing quorum on tft's lighthouse.

    Args:
        started: that lighthouse. Its smallest quorum is `number`.
        number: of standing members.
        settle_beats: duration of the standing phase before, in beat intervals of one member.
    Raises: NotAnsweredError: a member was not answered in time. RuntimeError: a member did not receive the quorum of
    all.
    """
    server = psutil.Process(started.pid)
    *standing, joins = members(number + 1, LEASE_MS)
    with swarm(started.port, 0) as clients:
        open_sessions(clients, standing)
        pairs = zip(clients.connections, standing, strict=True)
        groups = [_Group(connection, member) for connection, member in pairs]
        groups[0].keep_all()
        beats = _Beats(groups)
        held = _stand(clients, beats, groups)
        for group in groups:
            group.on_recall = group.request(3, 2, held)
        before_s, began_s = _cpu_s(server), time.perf_counter()
        _serve(clients, beats, lambda: time.perf_counter() - began_s >= settle_beats * beats.every_s)
        beats_core = (_cpu_s(server) - before_s) / (time.perf_counter() - began_s)
        if not all(group.num_renewals for group in groups):
            raise RuntimeError("the lighthouse did not answer a beat of a standing member")

        newcomer = _Group(clients.connect(), joins)
        newcomer.keep_all()
        hello = Hello("bench", joins.replica_id, time.time_ns() // 1_000_000, joins.address, tries_peers=True)
        greeting = codec.encode_to_lighthouse(events.HelloReceived(0, hello))
        newcomer.connection.open_stream(services.LIGHTHOUSE_SESSION, greeting)
        _serve(clients, beats, lambda: newcomer.connection.answers > 0)
        words = newcomer.request(1, 0, None)
        everybody = [*groups, newcomer]
        for group in groups:
            group.answer = b""
        before_s, own_before_s, began_s = _cpu_s(server), time.process_time(), time.perf_counter()
        newcomer.ask(words)
        _serve(clients, beats, lambda: all(group.answer for group in everybody))
        took_s = max(group.answered_s for group in everybody) - began_s
        cpu = _cpu_s(server) - before_s, time.process_time() - own_before_s
    _check(groups, newcomer, held)
    return Joined(took_s, *cpu, beats_core)


def _stand(clients: Swarm, beats: _Beats, groups: Sequence[_Group]) -> QuorumKey:
    """Form the first quorum, in which all but one recover, and the same again, in which none does. Returns: its key."""
    key = None
    for step in (0, 1):
        words = [group.request(step + 1, step, key) for group in groups]
        for group, request in zip(groups, words, strict=True):
            group.ask(request)
        _serve(clients, beats, lambda: all(group.answer for group in groups))
        quorum = groups[0].quorum
        key = quorum.quorum.key if isinstance(quorum, effects.AnswerQuorum) else quorum.key
    if not all(isinstance(group.quorum, effects.AnswerUnchanged) for group in groups):
        raise RuntimeError("the lighthouse sent a whole quorum, although nothing had changed")
    assert key is not None
    return key


def _serve(clients: Swarm, beats: _Beats, done: Callable[[], bool]) -> None:
    give_up_s = time.perf_counter() + WITHIN_S
    while not done():
        if time.perf_counter() > give_up_s:
            raise NotAnsweredError(
                f"timed out after {WITHIN_S:.0f} s waiting for all answers; run it by hand to see why"
            )
        beats.send_what_is_due()
        clients.hear_for(0.01)


def _check(groups: Sequence[_Group], newcomer: _Group, held: QuorumKey) -> None:
    """Check that all have the same new quorum, with all of them as members."""
    for group in (groups[0], newcomer):
        answer = group.quorum
        if not isinstance(answer, effects.AnswerQuorum) or answer.quorum.key <= held:
            raise RuntimeError(f"{group.member.replica_id} received no new quorum")
        if len(answer.quorum.members) != len(groups) + 1:
            raise RuntimeError(f"the new quorum has {len(answer.quorum.members)} members, not {len(groups) + 1}")
    # Their requests have one number, so their answers have equal bytes. The head contains the length and the quorum's
    # id.
    head = groups[0].answer[:HEAD_BYTES]
    if any(group.answer[:HEAD_BYTES] != head for group in groups):
        raise RuntimeError("two members received different quorums")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def allowed(number: int) -> int:
    """Return the largest number of groups, up to `number`, that the open files and the memory of this machine allow.

    A lighthouse accepts connections up to half of its open files.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    files = number if hard == resource.RLIM_INFINITY else hard // 2 - SPARE_DESCRIPTORS
    return max(0, min(number, files, psutil.virtual_memory().available // GROUP_BYTES))


def our_turn(number: int) -> Joined:
    """Measure a join on a fresh lighthouse of tft."""
    allow_descriptors(number + SPARE_DESCRIPTORS)
    with servers.lighthouse(our_command(), min_replicas=number, flags=PATIENT) as started:
        return join(started, number)


def _peers_turn(number: int) -> float:
    allow_descriptors(number + SPARE_DESCRIPTORS)
    with servers.lighthouse(peer.lighthouse_command(), min_replicas=number, flags=PATIENT) as started:
        return unary_rounds(started.port, number, rounds=1)[0][0]


def measure(turns: dict[int, int]) -> Row:
    """Measure P19.

    Args:
        turns: number of turns by number of standing groups, including `JUDGED`. A number beyond the machine's limit is
            replaced by that limit.
    """
    ours: dict[int, list[Joined]] = {}
    theirs: list[float] = []
    for wanted, times in turns.items():
        number = wanted if wanted <= JUDGED else allowed(wanted)
        found = ours.setdefault(number, [])
        for _ in range(times):
            if number == JUDGED:
                theirs.append(_peers_turn(number + 1))
            try:
                found.append(our_turn(number))
            except NotAnsweredError:
                if number <= JUDGED:
                    raise
                break  # no bar is of that number, and the row shows that the figure is missing
    ratio = _median_s(ours[JUDGED]) / statistics.median(theirs)
    return Row(
        name="P19",
        what=f"{'/'.join(map(str, ours))} stand, 1 joins, p50",
        ours="/".join(f"{_median_s(found):.2f}" if found else f"> {WITHIN_S:.0f}" for found in ours.values()) + " s",
        peer=f"{statistics.median(theirs):.2f} s at {JUDGED}",
        other="; ".join(_costs(found) for found in ours.values() if found),
        ratio=ratio,
        bar=f"<= {RATIO_BAR} x at {JUDGED}",
        met=ratio <= RATIO_BAR,
    )


def _median_s(found: Sequence[Joined]) -> float:
    return statistics.median(joined.took_s for joined in found)


def _costs(found: Sequence[Joined]) -> str:
    server, clients, beats = (
        statistics.median(getattr(joined, name) for joined in found)
        for name in ("lighthouse_s", "swarm_s", "beats_core")
    )
    return f"CPU {server:.2f} + clients' {clients:.2f} s, beats {beats:.2f} core"
