"""Several lighthouses that elect a leader in a store, under random faults from one seed.

The store stalls, loses answers and changes its own leader, and a member that was cut off renews leases without effect.
The lighthouses are stopped for up to 30 seconds, killed and restarted. Their clocks run at different speeds, and their
wall clocks jump. The real election core must never let two of them answer at the same time, or by ids of one range.

Law of this file: the store, the shells of the cores, the faults and the checks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tft_coord.core.election import (
    Answer,
    Began,
    Call,
    Campaign,
    Done,
    ElectionCore,
    Ended,
    Failed,
    Floor,
    Grant,
    Granted,
    Leader,
    Look,
    Looked,
    Renew,
    Renewed,
    Revoke,
)
from tft_sim.clock import VirtualClock
from tft_sim.invariants import InvariantError
from tft_sim.process import Process, State

TTL_MS: Final = 2_000
DEADLINE_MS: Final = 500  # of a call
ANSWERS_APART_MS: Final = 20
WALL_MS: Final = 1_800_000_000_000
STOPPED_MOST_MS: Final = 30_000
DRIFT_MOST: Final = 0.03  # of a clock's speed
JUMP_MOST_MS: Final = 600_000  # of a wall clock
LEADS_WITHIN_MS: Final = 8_000  # once the faults have ended


@dataclass(slots=True)
class ElectionReport:
    """A finished run: the leaders in order, how many answers they gave, and the faults that struck."""

    leaders: list[Leader] = field(default_factory=list)
    num_answers: int = 0
    num_ended: int = 0  # leaders that ended themselves
    num_late: int = 0  # answers that were checked before a stop and went out after it
    num_false_renewals: int = 0


class LeaseStore:
    """The keys and leases, as the majority of the store has them. Members that are cut off know less."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._leases: dict[int, int] = {}  # lease -> end
        self._num_leases = 0
        self._leader: Leader | None = None
        self._floor = Floor()
        self._revision = 1
        self.term = 1

    def elect(self) -> None:
        """Begin a new term of the store's own leader."""
        self.term += 1

    def handle(self, call: Call, address: str) -> Answer:
        """Handle a call by a member of the majority."""
        self._expire()
        match call:
            case Look():
                return Looked(self._leader, self._floor, self.term)
            case Grant(ttl_ms):
                self._num_leases += 1
                self._leases[self._num_leases] = self._clock.now_ms + ttl_ms
                return Granted(self._num_leases, ttl_ms)
            case Campaign(lease, floor_revision, started_ms):
                if lease not in self._leases:
                    return Failed()
                if self._leader is None and self._floor.revision == floor_revision:
                    self._revision += 1
                    self._leader = Leader(address, lease, self._revision, started_ms)
                    self._floor = Floor(started_ms, self._revision)
                return Done()
            case Renew(lease):
                if lease in self._leases:
                    self._leases[lease] = self._clock.now_ms + TTL_MS
                return Renewed(TTL_MS if lease in self._leases else 0, self.term)
            case Revoke(lease):
                self._leases.pop(lease, None)
                self._expire()
                return Done()

    def _expire(self) -> None:
        self._leases = {lease: end for lease, end in self._leases.items() if end > self._clock.now_ms}
        if self._leader is not None and self._leader.lease not in self._leases:
            self._leader = None


class Candidate(Process):
    """One lighthouse: the core, its clocks, and the answers that it gives while it leads."""

    def __init__(self, name: str, election: Election, core: ElectionCore) -> None:
        super().__init__(name, election.clock)
        self.core = core
        self.wall_ahead_ms = 0
        self.slow_until_ms = 0  # answers to it are late
        self.cut_until_ms = 0  # no call of it arrives, once its answers are no longer late
        self._election = election
        self._speed = 1 + election.random.uniform(-DRIFT_MOST, DRIFT_MOST)
        self._term: Leader | None = None
        self._num_ids = 0

    def now_ms(self) -> int:
        """Return the time of its own clock, which also runs while it is stopped."""
        return int(self.clock.now_ms * self._speed)

    def start(self) -> None:
        """Take part, and answer as long as the core allows it."""
        self._next()
        self._answer()

    def _next(self) -> None:
        call = self.core.call(self.now_ms(), WALL_MS + self.clock.now_ms + self.wall_ahead_ms)
        if call is None:
            self._note(lambda: self.core.tick(self.now_ms()))
            self.after(max(1, self.core.next_ms - self.now_ms()), self._next)
            return
        sent_ms = self.now_ms()
        answered = False

        def answer(what: Answer) -> None:
            nonlocal answered
            if not answered:
                answered = True
                self._note(lambda: self.core.answered(call, what, sent_ms, self.now_ms()))
                self._next()

        self.after(DEADLINE_MS, lambda: answer(Failed()))
        self._election.send(self, call, lambda what: self.run(lambda: answer(what)))

    def _note(self, decide: Callable[[], object]) -> None:
        decisions = decide()
        assert isinstance(decisions, list)
        for decision in decisions:
            if isinstance(decision, Began):
                self._term, self._num_ids = decision.leader, 0
                self._election.began(decision.leader)
            elif isinstance(decision, Ended):
                self._term = None
                self._election.report.num_ended += 1

    def _answer(self) -> None:
        self.after(ANSWERS_APART_MS, self._answer)
        if not self.core.leads(self.now_ms()):
            return
        assert self._term is not None, "it leads"
        self._num_ids += 1
        number, term = self._term.started_ms + self._num_ids, self._term
        if (
            not self._election.is_calm and self._election.random.random() < 0.004
        ):  # it is stopped between the check and the answer
            self._election.stop(self)
            self.run(lambda: self._election.answered(term, number, checked_ms=None))
        else:
            self._election.answered(term, number, checked_ms=self.clock.now_ms)


class Election:
    """The lighthouses, the store and the faults of one run.

    Args:
        seed: of all that is random.
        num_candidates: lighthouses.
        make: makes a core; another one than the real one must fail.
    """

    def __init__(self, seed: int, *, num_candidates: int = 3, make: Callable[[], ElectionCore] | None = None) -> None:
        self.random = random.Random(seed)
        self.clock = VirtualClock()
        self.store = LeaseStore(self.clock)
        self.report = ElectionReport()
        self._make = make or (lambda: ElectionCore(ttl_ms=TTL_MS))
        self._stalled_until_ms = 0
        self._cut_off: tuple[int, int] | None = None  # the term of a member that was cut off, and until when
        self._names = [f"lighthouse_{number}" for number in range(num_candidates)]
        self._candidates: dict[str, Candidate] = {}
        self.is_calm = False
        self._ids: dict[int, int] = {}  # started_ms -> the highest id that its leader has given

    def run(self, faults_ms: int) -> ElectionReport:
        """Let faults strike for that long, then none; return what has happened.

        Raises: InvariantError: `I1`: two leaders share a range of ids, or a later one is below an earlier one. `I6`:
            nobody leads although the faults have ended. `P2`: two may answer at one time.
        """
        for name in self._names:
            self._start(name)
        self._strike()
        self.clock.run_until(faults_ms)
        self.is_calm, self._stalled_until_ms, self._cut_off = True, 0, None
        for candidate in self._candidates.values():
            candidate.slow_until_ms = candidate.cut_until_ms = 0
            candidate.resume()
        led = self.clock.run_until(self.clock.now_ms + LEADS_WITHIN_MS, self._one_leads)
        if not led:
            raise InvariantError("I6", f"no lighthouse leads {LEADS_WITHIN_MS} ms after the last fault")
        return self.report

    def send(self, candidate: Candidate, call: Call, answer: Callable[[Answer], None]) -> None:
        """Carry a call to a member of the store, and its answer back. Both take time, and either may be lost."""
        there_ms, back_ms = self._delay_ms(), self._delay_ms()
        is_lost = not self.is_calm and self.random.random() < 0.05
        if self.clock.now_ms < candidate.slow_until_ms:
            there_ms, back_ms = 0, self.random.randint(DEADLINE_MS // 2, DEADLINE_MS - 1)
        elif self.clock.now_ms < candidate.cut_until_ms:
            return

        def arrive() -> None:
            what = self._handle(call, candidate.name)
            if what is not None and not is_lost:
                self.clock.after(back_ms, lambda: answer(what))

        wait_ms = max(0, self._stalled_until_ms - self.clock.now_ms)
        self.clock.after(there_ms + wait_ms, arrive)

    def began(self, leader: Leader) -> None:
        """Note a new leader. Raises: InvariantError: its ids are not above all earlier ones."""
        if self.report.leaders:
            before = self.report.leaders[-1]
            if leader.token > before.token and leader.started_ms <= self._ids.get(before.started_ms, before.started_ms):
                raise InvariantError("I1", f"{leader} begins below the ids of {before}")
        self.report.leaders.append(leader)
        self._check_one_leads()

    def answered(self, term: Leader, number: int, *, checked_ms: int | None) -> None:
        """Note an answer; `checked_ms` None: its sender was stopped after the check.

        Raises: InvariantError: two leaders may answer now, or the id is in the range of another one.
        """
        self.report.num_answers += 1
        self.report.num_late += checked_ms is None
        self._check_one_leads()
        self._ids[term.started_ms] = max(number, self._ids.get(term.started_ms, 0))
        for started_ms, highest in self._ids.items():
            if started_ms != term.started_ms and started_ms < number <= highest:
                raise InvariantError("I1", f"id {number} of {term} is also one of the leader from {started_ms}")

    def stop(self, candidate: Candidate) -> None:
        """Stop a process with SIGSTOP for a while."""
        candidate.stop()
        self.clock.after(self.random.randint(50, STOPPED_MOST_MS), candidate.resume)

    def _check_one_leads(self) -> None:
        leading = [each.name for each in self._candidates.values() if each.alive and each.core.leads(each.now_ms())]
        if len(leading) > 1:
            raise InvariantError("P2", f"{' and '.join(leading)} may answer at {self.clock.now_ms} ms")

    def _start(self, name: str) -> None:
        self._candidates[name] = Candidate(name, self, self._make())
        self._candidates[name].start()

    def _one_leads(self) -> bool:
        return any(each.state is State.RUNNING and each.core.leads(each.now_ms()) for each in self._candidates.values())

    def _delay_ms(self) -> int:
        slow = not self.is_calm and self.random.random() < 0.05
        return self.random.randint(0, 700) if slow else self.random.randint(0, 5)

    def _handle(self, call: Call, address: str) -> Answer | None:
        if self._cut_off is not None and self.clock.now_ms < self._cut_off[1] and self.random.random() < 0.5:
            if isinstance(call, Renew):  # it takes itself for the store's leader
                self.report.num_false_renewals += 1
                return Renewed(TTL_MS, self._cut_off[0])
            return None  # it finds no majority
        return self.store.handle(call, address)

    def _strike(self) -> None:
        if self.is_calm:
            return
        self.clock.after(self.random.randint(100, 3_000), self._strike)
        victim = self._candidates[self.random.choice(self._names)]
        match self.random.choice(("stop", "kill", "stall", "elect", "jump", "cut")):
            case "stop":
                self.stop(victim)
            case "kill":
                victim.end()
                self.clock.after(self.random.randint(10, 2_000), lambda: self._revive(victim))
            case "stall":
                lasts_ms = self.random.choice((300, 1_000, 20_000))
                self._stalled_until_ms = self.clock.now_ms + lasts_ms
            case "elect":
                self._cut_off = self.store.term, self.clock.now_ms + self.random.randint(100, 4_000)
                self.store.elect()
            case "cut":
                victim.slow_until_ms = self.clock.now_ms + self.random.randint(0, 3_000)
                victim.cut_until_ms = victim.slow_until_ms + self.random.randint(500, 5_000)
            case "jump":
                victim.wall_ahead_ms = self.random.randint(-JUMP_MOST_MS, JUMP_MOST_MS)

    def _revive(self, victim: Candidate) -> None:
        if self._candidates[victim.name] is victim:
            self._start(victim.name)
