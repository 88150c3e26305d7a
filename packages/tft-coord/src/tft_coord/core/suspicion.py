"""Suspicion: it finds silent members of a quorum in about a second, by waits and probes together.

A beat once a second proves little: one may be late on a busy machine, and `heartbeat_timeout` has to allow that. But
when a member is gone, the others soon wait for it in a reduction or for the next quorum, and report so. The lighthouse
then probes the members that do not wait. A manager server answers from its own process. A member that sends nothing for
a second and leaves a probe unanswered meanwhile is gone, unless the fault is on the lighthouse's side. Two conditions
exclude that: most others must wait, and must have been heard since that probe was sent.

Nothing is sent or computed while no member waits.

Law of this file: one job's probes and what follows from them; the caller gives the time, sends and loses.
Source: docs/protocol/sessions-and-quorums.md, "Silence and probes".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, final

from tft_coord.timeouts import Timeouts

WAITS_MS: Final = 300  # a wait of this length is reported
SILENT_MS: Final = 1_000  # a member may be lost after so long without a sign of life
UNANSWERED_MS: Final = 500  # the least time that a probe has for its answer
PROBE_EVERY_MS: Final = 500  # of one member
WITNESSES_AFTER_MS: Final = 200  # after so long an unanswered probe makes the lighthouse probe the waiting members too
UNANSWERED_MOST: Final = 64  # probes to one member; the next one waits for an answer or a hello
ANSWERS_KEPT: Final = 16  # of each member, for its slowest recent answer
RECENT_MS: Final = 60_000
WAIT_VALID_MS: Final = 2_500  # two beats and a half: one may be missed, and the next may be late
STOP_VALID_MS: Final = 700  # the process may be continued at any moment; the next answer repeats the stop

LOST_SILENT: Final = "gave no sign of life"  # the start of each reason of a loss by silence
LOST_STOPPED: Final = "its process is stopped"  # the start of each reason of a loss by a stop


@final
class LongWait:
    """The moment when a wait has lasted for `WAITS_MS`, once for each wait.

    The caller looks several times a second at a trainer's progress.
    """

    def __init__(self) -> None:
        self._reported = False
        self._since_ms = 0

    def look(self, waits_ms: int | None) -> bool:
        """Return whether to report the wait now. `waits_ms`: how long it has lasted; None: there is none."""
        if waits_ms is None or waits_ms < self._since_ms:
            self._reported = False  # that wait is over, or another one has begun
        self._since_ms = waits_ms or 0
        if self._reported or waits_ms is None or waits_ms < WAITS_MS:
            return False
        self._reported = True
        return True


@dataclass(frozen=True, slots=True)
class Sighting:
    """A healthy member of the newest quorum that has not left, as the lighthouse sees it.

    Args:
        replica_id: of the member.
        last_sign_ms: the time of its last sign of life, or since when its silence counts.
        heard_ms: the time of its last message. Only a message shows that this side can hear.
        waits: it has waited for others for `WAITS_MS`.
        may_be_probed: its stream is open, and it answers probes.
        may_be_lost: a second of silence may be judged; a flapping link forbids that.
        stopped: why it is known to be stopped, one phrase, or "".
        stopped_long: it has been stopped for heartbeat_timeout: nothing spares it any more, where another member waits.
    """

    replica_id: str
    last_sign_ms: int
    heard_ms: int
    waits: bool
    may_be_probed: bool = True
    may_be_lost: bool = True
    stopped: str = ""
    stopped_long: bool = False


@dataclass(frozen=True, slots=True)
class Findings:
    """The members to probe, each with a number, and the lost members, each with a reason."""

    probes: tuple[tuple[str, int], ...] = ()
    lost: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class _Probed:
    """The probes and answers of one member."""

    sent_ms: dict[int, int] = field(default_factory=dict)  # unanswered probes, the oldest first
    last_sent_ms: int | None = None
    last_number: int = 0
    answers: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=ANSWERS_KEPT))  # (when, how late)

    @property
    def oldest_ms(self) -> int | None:
        return next(iter(self.sent_ms.values()), None)

    def bound_ms(self, now_ms: int) -> int | None:
        """Return how long a probe may be unanswered; None: the member has answered none, so its delay is unknown."""
        if not self.answers:
            return None
        recent = [late_ms for at_ms, late_ms in self.answers if now_ms - at_ms < RECENT_MS] or [self.answers[-1][1]]
        return max(UNANSWERED_MS, 2 * max(recent))


class Suspicion:
    """The probes of one job.

    Args:
        timeouts: of the lighthouse. Where `heartbeat_timeout_ms` is no longer than a second, that alone judges silence.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._judges_silence = timeouts.heartbeat_timeout_ms > SILENT_MS
        self._probes: dict[str, _Probed] = {}
        self._last_number = 0

    def restart(self) -> None:
        """Restart all silence, because the lighthouse itself was suspended.

        Answers that have waited for the lighthouse meanwhile would seem slow, so their probes are dropped; due members
        are probed again.
        """
        for probed in self._probes.values():
            probed.sent_ms.clear()

    def begin(self, replica_id: str, now_ms: int) -> int:
        """Handle a member's open stream that answers probes.

        Returns: the number of its first probe, which measures the delay before that matters.
        """
        self.forget(replica_id)
        return self._send(replica_id, now_ms)

    def forget(self, replica_id: str) -> None:
        """Forget a member whose stream is gone, or whose session is a new one."""
        self._probes.pop(replica_id, None)

    def answered(self, replica_id: str, number: int, now_ms: int) -> None:
        """Record the answer to a probe, and to the earlier probes on the same stream."""
        probed = self._probes.get(replica_id)
        sent_ms = probed.sent_ms.get(number) if probed is not None else None
        if probed is None or sent_ms is None:
            return
        probed.answers.append((now_ms, now_ms - sent_ms))
        probed.sent_ms = {each: at_ms for each, at_ms in probed.sent_ms.items() if each > number}

    def is_new(self, replica_id: str, number: int, now_ms: int) -> bool:
        """Return whether a report after that probe is recent.

        It may have waited on its way, or for this lighthouse, while the process went on.
        """
        probed = self._probes.get(replica_id)
        if probed is None or probed.last_sent_ms is None or number != probed.last_number:
            return False
        return now_ms - probed.last_sent_ms < PROBE_EVERY_MS + (probed.bound_ms(now_ms) or UNANSWERED_MS)

    def ask_again(self, replica_id: str, now_ms: int) -> int | None:
        """Probe it once more. Returns: the number of the probe; None: the last one was sent just now."""
        return self._send(replica_id, now_ms) if self._is_due(replica_id, now_ms) else None

    def look(
        self, members: Collection[Sighting], now_ms: int, spared: Callable[[Collection[str]], Collection[str]]
    ) -> Findings:
        """Find the members to probe and the lost members.

        Args:
            members: all of the newest quorum that are healthy and have not left.
            now_ms: the time.
            spared: returns the members without which no other could go on; called when a member would be lost.
        """
        waiting = [each for each in members if each.waits]
        if not waiting:
            return Findings()
        most = most_wait(len(waiting), len(members))
        suspects = [each for each in members if not each.waits]
        lost: list[tuple[str, str]] = []
        for each in suspects:
            reason = self._why_lost(each, waiting, len(members), now_ms) if most or each.stopped_long else ""
            if reason and (each.stopped_long or each.replica_id not in spared([name for name, _ in lost])):
                lost.append((each.replica_id, reason))
        if not most:
            return Findings(lost=tuple(lost))
        gone = {name for name, _ in lost}
        asked = [each for each in suspects if each.replica_id not in gone]
        asked += self._witnesses_to_ask(asked, waiting, now_ms)
        probes = [
            (each.replica_id, self._send(each.replica_id, now_ms))
            for each in asked
            if each.may_be_probed and self._is_due(each.replica_id, now_ms)
        ]
        return Findings(tuple(probes), tuple(lost))

    def _why_lost(self, suspect: Sighting, waiting: Iterable[Sighting], num_members: int, now_ms: int) -> str:
        if suspect.stopped:
            return f"{LOST_STOPPED}: {suspect.stopped}"
        if not suspect.may_be_lost or not self._judges_silence:
            return ""
        probed = self._probes.get(suspect.replica_id)
        sent_ms, bound_ms = (probed.oldest_ms, probed.bound_ms(now_ms)) if probed is not None else (None, None)
        silent_ms = now_ms - suspect.last_sign_ms
        if sent_ms is None or bound_ms is None or silent_ms < SILENT_MS or now_ms - sent_ms < bound_ms:
            return ""
        heard = sum(1 for each in waiting if each.heard_ms > sent_ms)
        if not most_wait(heard, num_members):
            return ""  # the fault may be on this side
        return (
            f"{LOST_SILENT} for {silent_ms} ms and left a probe unanswered for {now_ms - sent_ms} ms, while {heard} of "
            f"{num_members - 1} other members waited for it"
        )

    def _witnesses_to_ask(
        self, suspects: Iterable[Sighting], waiting: Iterable[Sighting], now_ms: int
    ) -> list[Sighting]:
        """Return the waiting members that were not heard since a probe that has been unanswered for a while."""
        sent = [self._probes[each.replica_id].oldest_ms for each in suspects if each.replica_id in self._probes]
        late = [sent_ms for sent_ms in sent if sent_ms is not None and now_ms - sent_ms >= WITNESSES_AFTER_MS]
        return [each for each in waiting if each.heard_ms <= max(late)] if late else []

    def _is_due(self, replica_id: str, now_ms: int) -> bool:
        probed = self._probes.get(replica_id)
        last_ms = probed.last_sent_ms if probed is not None else None
        if probed is not None and len(probed.sent_ms) >= UNANSWERED_MOST:
            return False
        return last_ms is None or now_ms - last_ms >= PROBE_EVERY_MS

    def _send(self, replica_id: str, now_ms: int) -> int:
        probed = self._probes.setdefault(replica_id, _Probed())
        self._last_number += 1
        probed.last_sent_ms, probed.last_number = now_ms, self._last_number
        probed.sent_ms[self._last_number] = now_ms
        return self._last_number


def most_wait(num_waiting: int, num_members: int) -> bool:
    """Return whether more than half of the others wait for a member. No member is lost where more than half are
    silent."""
    return num_members > 1 and 2 * num_waiting > num_members - 1
