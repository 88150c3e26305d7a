"""The invariants of the protocol, checked on everything that a simulated cluster does.

Weights are digests. The digest after a commit covers the weights before it and all gradients that went into the mean.
So two members with equal digests have applied the same gradients in the same order, each exactly once.

Law of this file: observe only. Nothing here changes what it observes. The first violation is raised.
Source: docs/architecture.md, "Invariants", and docs/protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from tft_coord.core import effects, events
from tft_coord.core.fingerprint import Fingerprint, differences
from tft_coord.core.living_quorum import LIVES
from tft_coord.core.step.values import Check
from tft_coord.core.stragglers import PaceKind, StragglerNotice
from tft_coord.core.types import Hello, Member, Plan, Purpose, Quorum, QuorumKey, Refusal, Verdict
from tft_coord.timeouts import Timeouts
from tft_sim.reach_truth import ReachTruth

_EQUAL_SETTINGS = ("init_sync", "allow_heal", "use_async_quorum", "fixed_with_spares", "min_replica_size", "data")


class InvariantError(AssertionError):
    """A violated invariant. `invariant` is its code.

    - `I1` to `I9`: the number in docs/architecture.md, "Invariants".
    - `P1`: a replica is lost without cause, or too late.
    - `P2`: a quorum leaves out a replica that it must wait for, or waits without need.
    - `P3`: the survivors of a loss take too long to go on.
    - `P4`: a group does not heal as a whole.
    - `P5`: a replica is lost for a second of silence without cause, or is not lost and must be.
    - `P6`: members differ in a setting that must be equal.
    - `L1`: a graceful leave costs the other members something.
    - `E1`: the end of a job is reported wrongly, or a replica trains on after it.
    - `H1`: a replica is taken to hang and does not. `H2`: a replica hangs and is not lost.
    - `F1`: syncs in flight break their rules. They start in one quorum and commit in that order. They fail with that
      quorum, and with the first of them that fails.
    - `R1`, `R2`: bad links delay a quorum for too long, or a quorum leaves out a replica without need.
    - `S1` to `S5`: stragglers are judged or treated wrongly.
    - `W1`: the word of a round means different things to different members.
    - `W2`: two quorums of a job make progress at once.
    """

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


@dataclass(frozen=True, slots=True)
class Held:
    """The state that one rank holds."""

    step: int
    lineage: int | None
    weights: str


@dataclass(frozen=True, slots=True)
class Round:
    """A vote or a recovery that a group agrees on.

    The lineage distinguishes a step from the same step after a state was loaded by hand. The attempt distinguishes one
    recovery from the next under the same key. The attempt of a commit is 0.
    """

    key: QuorumKey
    step: int
    lineage: int
    purpose: Purpose
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Contribution:
    """The input of one member to a reduction.

    Args:
        replica_id: of the member.
        before: state of the member before the reduction.
        gradient: digest of its gradient, or None for zeros.
        part: name of the reduced part, such as a bucket or a fragment.
        factor: multiplies the member's tensor before the sum.
        divide_by: divides the sum, in a mean without weights.
        weight: the member's share in the sum of weights, which divides the mean. None: the mean has no weights.
    """

    replica_id: str
    before: Held
    gradient: str | None
    part: str
    factor: float = 1.0
    divide_by: float = 1.0
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class Reduced:
    """The result of one or several reductions, equal for every member that saw them end."""

    key: QuorumKey
    group_rank: int
    numbers: tuple[int, ...]
    gradients: tuple[str, ...]


class Attendance:
    """The observed liveness of one job's replicas during one life of a lighthouse.

    It checks that quorums fit that liveness (docs/protocol/sessions-and-quorums.md). It sees messages alone and knows
    nothing of the core that it checks.

    Args:
        min_replicas: smallest quorum.
        on_broken: called with the newest quorum's key and a replica id when that member is lost, or has a successor.
        on_left: called with the newest quorum's key, a replica id and a flag when that member asks for the next quorum.
            The flag is True if the request certainly breaks the quorum, because the member can't go on in it. (A member
            without the quorum may be given it again.)
        timeouts: bounds on the waits for live replicas, for healing replicas, and for a state whose only holder is lost
            and may come back.
        lost_state_ms: bound on the wait for a state whose holders fell silent.
    """

    def __init__(
        self,
        min_replicas: int,
        on_broken: Callable[[QuorumKey, str], None] = lambda _key, _who: None,
        on_left: Callable[[QuorumKey, str, bool], None] = lambda _key, _who, _surely: None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008  # frozen
        lost_state_ms: int = 0,
    ) -> None:
        self._lost_state_ms = max(lost_state_ms, timeouts.heartbeat_timeout_ms)
        self._broke: set[str] = set()  # replicas that were lost because their stream broke
        self._min_replicas = min_replicas
        self.timeouts = timeouts
        self._on_broken = on_broken
        self._on_left = on_left
        self._newest: Quorum | None = None
        self._sessions: dict[str, int] = {}  # of replicas that were welcomed, or are presumed to live
        self._ready: set[str] = set()
        self._lost: dict[str, int] = {}
        self._lost_ms: dict[str, int] = {}
        self._dead: set[str] = set()
        self._special: set[str] = set()
        self._streams: dict[str, int] = {}
        self._presumed: set[str] = set()
        self._strangers: set[str] = set()  # replicas whose parameters or settings are not those of the job
        self._replaced: set[str] = set()
        self._asking: dict[str, int] = {}  # stream of each pending request
        # newest request of each replica, with the quorum that it held
        self._said: dict[str, tuple[Member, QuorumKey | None]] = {}
        self._fingerprints: dict[str, Fingerprint] = {}  # newest fingerprint of each replica
        self._gone: dict[str, int] = {}  # session of each replica that has left the job
        self._finished: dict[str, int] = {}  # step of each replica that left because its training finished
        self._knew: set[str] = set()  # replicas known at the first finish since the newest quorum
        # end step, replicas of the ended run, its last quorum
        self._ended: tuple[int, set[str], QuorumKey | None] | None = None
        self._released: set[str] = set()  # replicas that were told that no peer heals from them any more
        self._asked_ms: dict[str, int] = {}  # time of each replica's first request since its last answer
        self._heals_ms: dict[str, int] = {}  # start time of each replica that heals
        # the same for replicas that may heal, because states differ in their quorum
        self._may_heal_ms: dict[str, int] = {}
        self._left_out: set[str] = set()  # stragglers that are left out, so no quorum waits for them
        self._reach = ReachTruth()
        self._skips_the_late = False  # the newest quorum was broken for a late member
        # bytes that each replica had received, and the time of its first report of that number
        self._healed: dict[str, tuple[int, int]] = {}

    def welcomed(self, hello: Hello, stream: int) -> None:
        """Record that a session is established on that stream."""
        replica_id, session = hello.replica_id, hello.session
        self._presumed.discard(replica_id)
        self._replaced.add(hello.replaces)
        if hello.replaces in self._lost and hello.replaces != replica_id:
            self._dead.add(hello.replaces)
        if replica_id in self._dead:
            raise InvariantError("I2", f"{replica_id} was reported dead and is welcomed")
        if session <= self._lost.get(replica_id, session - 1):
            raise InvariantError("I2", f"{replica_id} session {session} was lost and is welcomed")
        if session < self._sessions.get(replica_id, session):
            raise InvariantError("I2", f"{replica_id} session {session} is older than another that stands")
        self._lost.pop(replica_id, None)
        if session > self._sessions.get(replica_id, -1):
            # A new session breaks the heal of the session before, and its byte count starts at zero.
            self._heals_ms.pop(replica_id, None)
            self._healed.pop(replica_id, None)
        self._sessions[replica_id] = session
        if replica_id not in self._gone:
            self._look_at(replica_id)
        self._streams[replica_id] = stream
        self._asking.pop(replica_id, None)
        if hello.ready and replica_id not in self._strangers:
            self._ready.add(replica_id)
        if hello.left or replica_id in self._gone:
            self.left(stream)

    def takes_place(self, newer: Hello, older: Hello) -> None:
        """Check a stream that is closed for a newer hello: both hellos are of one process, or the older session is
        lost."""
        if older.replica_id in self._sessions and newer.address != older.address:
            who, first = older.replica_id, older.address
            raise InvariantError("I2", f"{who} lives at {first}, and another at {newer.address} takes its place")

    def left(self, stream: int) -> None:
        """Record that the replica on that stream has left: quorums stop waiting for it, and its own quorum runs to its
        end."""
        for replica_id, newest in self._streams.items():
            if newest == stream and replica_id in self._sessions:
                self._gone[replica_id] = self._sessions.pop(replica_id)
                self._asking.pop(replica_id, None)

    def finished(self, stream: int, step: int) -> None:
        """Record that the replica on that stream leaves because its training finished."""
        self._finished |= {each: step for each, newest in self._streams.items() if newest == stream}
        if not self._knew:
            self._knew = self._sessions.keys() | self._lost.keys() | self._gone.keys()

    def pace_changed(self, news: StragglerNotice) -> None:
        """Record that a straggler is left out, or let back."""
        if news.kind is PaceKind.LEFT_OUT:
            self._left_out.add(news.replica_id)
        elif news.kind is PaceKind.LET_BACK:
            self._left_out.discard(news.replica_id)

    def _out_of(self, newest: Quorum | None) -> set[str]:
        """Return the replicas that are left out, or none if no other member of the newest quorum lives."""
        members = set(newest.replica_ids) if newest is not None else set()
        return self._left_out if (members - self._left_out) & self._sessions.keys() else set()

    def num_ready(self) -> int:
        """Return the number of healthy replicas that count for a quorum."""
        return len(self._sessions.keys() & self._ready)

    def ended(self, step: int, now_ms: int) -> None:
        """Check that the job has ended at that step: a member of its last quorum finished there, and none can go on."""
        members = self._newest.replica_ids if self._newest is not None else ()
        trains = sorted(each for each in members if each in self._sessions or self._may_come_back(each, now_ms))
        if trains:
            raise InvariantError("E1", f"the job is said to have ended at step {step}, and {trains} of it train")
        if step != max((self._finished[each] for each in members if each in self._finished), default=None):
            raise InvariantError(
                "E1", f"the job is said to have ended at step {step}, where none of {members} finished"
            )
        self._ended = step, self._knew, self._newest.key if self._newest is not None else None
        self._ready &= self._asking.keys()

    def late(self, stream: int) -> None:
        """Record that the replica on that stream is behind a job that has ended, so it no longer counts."""
        self._ready -= {replica_id for replica_id, each in self._streams.items() if each == stream}

    def _look_who_is_late(self, quorum: Quorum, previous: Quorum | None) -> None:
        """Check that no replica of the ended run trains on from before its end.

        Until the next run begins, no known replica may train on. After that, no known replica with a state of the old
        run may train on, until a member has a state of the end.
        """
        self._knew = set()
        if self._ended is None:
            return
        step, known, last = self._ended
        if any(each.step >= step for each in quorum.members):
            self._ended = None
            return
        next_run = previous is not None and previous.key != last
        old = [each for each in quorum.members if each.replica_id in known and (each.live or not next_run)]
        if old:
            late = [each.replica_id for each in old]
            raise InvariantError("E1", f"the job has ended at step {step}, and {late} train on in {quorum.key}")
        self._ended = step, known.difference(quorum.replica_ids), last  # members of the next run belong to that run

    def released(self, stream: int) -> None:
        """Record that the replica on that stream was told that no peer heals from it any more. Its end is then no
        loss."""
        self._released |= {each for each, newest in self._streams.items() if newest == stream}

    def asked(
        self,
        member: Member,
        stream: int,
        held: QuorumKey | None = None,
        fingerprint: Fingerprint = (),
        now_ms: int = 0,
    ) -> None:
        """Record a request for a quorum. A late request on an older stream, or of a lost session, is ignored."""
        if self._streams.get(member.replica_id) != stream or member.replica_id not in self._sessions:
            return
        self._asked_ms.setdefault(member.replica_id, now_ms)
        self._heals_ms.pop(member.replica_id, None)
        if fingerprint:
            self._fingerprints[member.replica_id] = fingerprint
        self._strangers.discard(member.replica_id)
        self._ready.add(member.replica_id)
        self._asking[member.replica_id] = stream
        # A replica that fails to heal repeatedly is not counted for a while. A replica with shrink_only does not count
        # newcomers.
        self._special.discard(member.replica_id)
        if member.failed_heals > 1 or member.shrink_only:
            self._special.add(member.replica_id)
        self._said[member.replica_id] = member, held
        self._reach.asked(member, held, self._newest, now_ms)
        self._look_if_left(member.replica_id)

    def _look_if_left(self, replica_id: str) -> None:
        """Report a member of the newest quorum that asks for the next one, and whether it can go on in the newest."""
        member, held = self._said[replica_id]
        before = self._newest.member(replica_id) if self._newest is not None else None
        if self._newest is not None and before is not None and before.session == self._sessions[replica_id]:
            self._on_left(self._newest.key, replica_id, member.needs_configure and held == self._newest.key)

    def differs(self, stream: int) -> None:
        """Record that the replica on that stream does not belong to the job, so it does not count."""
        names = {replica_id for replica_id, each in self._streams.items() if each == stream}
        self._strangers |= names
        self._ready -= names

    def turned_out(self, stream: int) -> None:
        """Forget the replica on that stream, because members of another kind take precedence over this kind.

        Sessions without a stream are forgotten too. Either these replicas named them, or their streams broke a moment
        ago.
        """
        for replica_id in [replica_id for replica_id, each in self._streams.items() if each == stream]:
            for each in {replica_id} | (self._sessions.keys() - self._streams.keys()):
                self._sessions.pop(each, None)
                self._asking.pop(each, None)
                self._ready.discard(each)
            self._presumed.clear()
            self._newest = None

    def healed(self, stream: int, num_bytes: int, now_ms: int) -> None:
        """Record the number of bytes of state that the replica on that stream has received."""
        for replica_id in [each for each, newest in self._streams.items() if newest == stream]:
            if num_bytes > self._healed.get(replica_id, (0, 0))[0]:
                self._healed[replica_id] = num_bytes, now_ms

    def answered(self, stream: int, quorum: Quorum | None, now_ms: int = 0) -> None:
        """Record the answer on that stream: the newest quorum in its present form. None: the replica goes on in it."""
        newest = self._newest
        for replica_id in [each for each, asked in self._asking.items() if asked == stream]:
            self._asked_ms.pop(replica_id, None)
            own = quorum.member(replica_id) if quorum is not None else None
            if quorum is not None and own is not None and own.step < max(each.step for each in quorum.members):
                self._heals_ms[replica_id] = now_ms
            self._may_heal_ms.pop(replica_id, None)
            states = {(each.step, each.lineage) for each in quorum.members} if quorum is not None else set()
            # With init_sync, every member but the first may heal at step 0. States without a lineage are never equal.
            if own is not None and (own.torn or own.step == 0 or own.lineage is None or len(states) > 1):
                self._may_heal_ms[replica_id] = now_ms
        if quorum is not None:
            if newest is not None and newest.key == quorum.key:
                self._newest = quorum
        elif newest is not None:
            said = {each: self._said[each][0] for each, asked in self._asking.items() if asked == stream}
            self._newest = replace(
                newest,
                members=tuple(
                    replace(each, step=now.step, lineage=now.lineage, torn=now.torn)
                    if (now := said.get(each.replica_id)) is not None
                    else each
                    for each in newest.members
                ),
            )

    def other_kind_trains(self, quorum: Quorum) -> None:
        """Check that no replica of this kind lives when torchft members are given a quorum."""
        ours = sorted(each for each in self._sessions if each in self._streams)
        if ours:
            raise InvariantError("P6", f"{', '.join(quorum.replica_ids)} of torchft's train, and {ours} of ours live")

    def asks_no_more(self, stream: int) -> None:
        """Forget the request on that stream: it was answered or withdrawn, or its stream ended."""
        self._asking = {replica_id: asked for replica_id, asked in self._asking.items() if asked != stream}

    def drop_presumed(self) -> None:
        """Forget the replicas that are only presumed to live, because another quorum became the newest."""
        self._sessions = {name: session for name, session in self._sessions.items() if name not in self._presumed}
        self._ready -= self._presumed  # only the older quorum showed that these had ever asked
        self._presumed.clear()

    def reported(self, quorum: Quorum) -> None:
        """Take over the newest quorum from before this life: presume its members to live, and those of an older one no
        more."""
        self.drop_presumed()
        for member in quorum.members:
            name = member.replica_id
            if name in self._gone:
                continue
            if name not in self._sessions and name not in self._lost and name not in self._replaced:
                self._sessions[name] = member.session
                self._presumed.add(name)
                self._ready.add(name)
        self._newest = quorum
        for member in quorum.members:
            self._look_at(member.replica_id)
            if member.replica_id in self._asking:  # the request came before this lighthouse knew of the quorum
                self._look_if_left(member.replica_id)

    def closed(self, stream: int) -> None:
        """Record that a stream has ended."""
        self._streams = {replica_id: each for replica_id, each in self._streams.items() if each != stream}

    def lost(self, replica_id: str, session: int, *, dead: bool, broke: bool = False, now_ms: int = 0) -> None:
        """Record that the lighthouse took a replica for lost, because its stream broke or for another reason."""
        if replica_id in self._released:
            raise InvariantError(
                "L1", f"{replica_id} session {session} had left, nobody healed from it, and it is lost"
            )
        if broke and replica_id in self._streams:
            raise InvariantError("I2", f"{replica_id} session {session} is lost by a stream that broke, and it stands")
        self._sessions.pop(replica_id, None)
        self._asking.pop(replica_id, None)
        self._heals_ms.pop(replica_id, None)
        self._reach.lost(replica_id)
        self._lost[replica_id] = session
        self._lost_ms[replica_id] = now_ms
        self._broke = (self._broke | {replica_id}) if broke else (self._broke - {replica_id})
        if dead:
            self._dead.add(replica_id)
        self._look_at(replica_id)

    def death_reported(self, stream: int) -> None:
        """Record a reported end of a trainer. For a replica that still lives, the lighthouse declares the loss
        itself."""
        self._dead |= {each for each, newest in self._streams.items() if newest == stream and each in self._lost}

    def shrinks_to_few(self) -> bool:
        """Return whether enough replicas have asked, and one of them has shrink_only set."""
        before = self._newest.replica_ids if self._newest is not None else ()
        asking = [self._said[each][0] for each in self._asking if each in self._said]
        shrinks = any(member.shrink_only and member.replica_id in before for member in asking)
        return shrinks and len(asking) >= self._min_replicas

    def lives(self, replica_id: str) -> bool:
        """Return whether the replica has a session."""
        return replica_id in self._sessions

    def is_last_holder(self, replica_id: str, step_now: int = 0) -> bool:
        """Return whether no other live replica holds the newest quorum's state.

        Args:
            replica_id: the replica in question.
            step_now: its present step. The replica may have gone on in a standing quorum.
        """
        whole = [member for member in self._newest.members if not member.torn] if self._newest is not None else []
        step = max((member.step for member in whole), default=0)
        if step_now > step and {each.replica_id for each in whole if each.replica_id in self._sessions} == {replica_id}:
            return True  # all live holders have gone on with it
        if step_now > step + 1:
            return False
        held = [member for member in whole if member.step == step]
        lineages = {member.lineage for member in held if member.replica_id == replica_id}
        living = {each.replica_id for each in held if each.replica_id in self._sessions and each.lineage in lineages}
        return step > 0 and living == {replica_id}

    def is_member(self, replica_id: str) -> bool:
        """Return whether the replica is a member of the newest quorum."""
        return self._newest is not None and self._newest.member(replica_id) is not None

    def is_dead(self, replica_id: str) -> bool:
        """Return whether the replica's end was reported, or another replica has replaced it."""
        return replica_id in self._dead

    def _look_at(self, replica_id: str) -> None:
        """Report that the newest quorum is broken, if the state of that replica breaks it."""
        for member in self._newest.members if self._newest is not None else ():
            if member.replica_id != replica_id:
                continue
            assert self._newest is not None
            # A dead replica can't come back as any session, older or newer than the lost one.
            lost = self._lost.get(replica_id, -1) >= (0 if self.is_dead(replica_id) else member.session)
            newest = self._sessions.get(replica_id, self._gone.get(replica_id, member.session))
            followed = newest > member.session
            if lost or followed or (replica_id in self._replaced and replica_id not in self._sessions):
                self._on_broken(self._newest.key, replica_id)

    def goes_on_without(self, *, late: bool) -> None:
        """Record that the newest quorum is broken because members wait in it for a late or asking member."""
        self._skips_the_late = self._skips_the_late or late

    def nobody_else_is_waited_for(self, waits: str, now_ms: int = 0) -> None:
        """Check a moment without a new quorum: a live replica has not asked, or too few have."""
        if self._waits_for_links(waits, now_ms) or LIVES in waits:
            return  # the simulator checks at the end that a step commits within the bound
        out = self._out_of(self._newest)
        living = {each for each in self._sessions if each in self._ready and each not in out}
        asking = living & self._asking.keys()
        shown = asking - self._reach.in_trial()
        if asking == living and len(shown) >= self._min_replicas and not self._special & living:
            before = self._newest.members if self._newest is not None else ()
            away = any(self._may_come_back(member.replica_id, now_ms) for member in before)
            if away and waits.startswith("the state of step"):
                return  # `formed` checks that a quorum is not formed too early
            raise InvariantError("I6", f"all that live have asked, {sorted(asking)}, and no quorum forms: {waits}")
        before_ids = {member.replica_id for member in self._newest.members} if self._newest is not None else set()
        before_ids -= self._gone.keys() | out
        able = asking - self._reach.excused(before_ids, now_ms)
        enough = len(able) >= self._min_replicas and not self._special & living
        if before_ids and before_ids <= asking and enough and not self._reach.is_torn_apart(before_ids):
            raise InvariantError("P2", f"all of the last quorum have asked, {sorted(asking)}, and none forms: {waits}")

    def tries(self, stream: int, number: int) -> None:
        """Record that the replica on that stream is asked to try its peers."""
        for replica_id in [each for each, newest in self._streams.items() if newest == stream]:
            self._reach.tries(replica_id, number)

    def tried(self, stream: int, number: int, unreached: Collection[str]) -> None:
        """Record that the replica on that stream has tried its peers, and which of them it could not reach."""
        for replica_id in [each for each, newest in self._streams.items() if newest == stream]:
            self._reach.tried(replica_id, number, unreached)

    def _waits_for_links(self, waits: str, now_ms: int) -> bool:
        """Return whether the lighthouse may wait because of bad links. (R1 is the bound on that wait.)"""
        if waits.startswith("the report of"):
            return self._reach.waits_for_both_ends(now_ms, self.timeouts.quorum_tick_ms)
        if waits.startswith("the trial of"):
            return bool(self._reach.in_trial())
        return waits.startswith(("a set of at least", "a replica that all others reach"))

    def _look_who_is_left_out(self, quorum: Quorum, previous: Quorum | None, now_ms: int) -> None:
        """Check R2: a quorum leaves out no replica for a bad link without need, and never all holders of the newest
        state."""
        ids, before = set(quorum.replica_ids), previous.members if previous is not None else ()
        living = {each for each in self._sessions if each in self._ready}
        slow = self._out_of(previous)  # stragglers are left out for another reason
        waiting = {each: self._said[each][0] for each in self._asking if each in living and each not in slow}
        if self._special & living:
            return
        names = [each.replica_id for each in before]
        wrong = self._reach.needless(ids, waiting, names, self._min_replicas, now_ms)
        if wrong is not None:
            raise InvariantError("R2", f"quorum {quorum.key}: {wrong}")
        step = max((each.step for each in quorum.members if not each.torn), default=0)
        away = living.difference(ids, waiting) & self._reach.excused(ids, now_ms)
        away = {each for each in away if not self._may_be_stalled(each, ids, now_ms)}
        hold = [each.replica_id for each in before if each.replica_id in away and each.step > step and not each.torn]
        waited_ms = now_ms - min(self._asked_ms[replica_id] for replica_id in ids)
        if hold and waited_ms < self.timeouts.join_timeout_ms:
            raise InvariantError("R2", f"quorum {quorum.key} goes on from step {step} without {hold}, which hold more")

    def _may_come_back(self, replica_id: str, now_ms: int) -> bool:
        """Return whether the replica is lost, its death is not reported, and its absence is still short."""
        if replica_id not in self._lost or self.is_dead(replica_id) or replica_id in self._gone:
            return False
        broke = replica_id in self._broke
        patience_ms = self.timeouts.heartbeat_timeout_ms if broke else self._lost_state_ms
        return now_ms - self._lost_ms[replica_id] < patience_ms

    def _look_who_starts_over(self, quorum: Quorum, previous: Quorum, now_ms: int) -> None:
        """Check that no quorum goes on from an older state while a holder of the last quorum's state may come back."""
        whole = [member for member in previous.members if not member.torn]
        step = max((member.step for member in whole), default=0)
        held = [member for member in whole if member.step == step]
        if step == 0 or len({member.lineage for member in held}) > 1:
            return  # nothing to lose, or the core has to choose among several states
        if any(member.step >= step and not member.torn for member in quorum.members):
            return
        away = [member.replica_id for member in held if self._may_come_back(member.replica_id, now_ms)]
        if away:
            raise InvariantError("I3", f"quorum {quorum.key} goes on from before step {step}, which {away} held")

    def _differs_from(self, replica_id: str, others: Collection[str]) -> bool:
        """Return whether the replica's fingerprint differs from that of one of the others."""
        own = self._fingerprints.get(replica_id, ())
        return any(differences(dict(self._fingerprints.get(other, ())), own) for other in others)

    def formed(self, quorum: Quorum, previous: Quorum | None, now_ms: int = 0) -> None:
        """Check a quorum with a new id: its members live, are enough, and include survivors and their state."""
        self._newest = quorum
        skips_the_late, self._skips_the_late = self._skips_the_late, False
        self._look_who_is_ahead(quorum)
        self._look_who_is_late(quorum, previous)
        if previous is not None:
            self._look_who_starts_over(quorum, previous, now_ms)
        ids = set(quorum.replica_ids)
        if len(ids) < self._min_replicas:
            raise InvariantError("I2", f"quorum {quorum.key} has {len(ids)} members, min_replicas {self._min_replicas}")
        if not ids <= self._asking.keys():
            raise InvariantError("I2", f"{ids - self._asking.keys()} did not ask to be in quorum {quorum.key}")
        for member in quorum.members:
            if self._sessions.get(member.replica_id) != member.session:
                raise InvariantError("I2", f"{member.replica_id} is in quorum {quorum.key} and does not live")
        self._look_who_is_left_out(quorum, previous, now_ms)
        excused = self._reach.excused(ids, now_ms)
        self._reach.formed(ids)
        before = set(previous.replica_ids) - self._gone.keys() if previous is not None else set()
        out = self._out_of(previous)
        awaited = before - out - excused
        if awaited and awaited <= ids:
            return
        living = {each for each in self._sessions if each in self._ready}
        if before & living and not before & ids:
            raise InvariantError("I2", f"quorum {quorum.key} leaves out all survivors of the last, {before & living}")
        # A replica that differs from the members does not count. It learns so when it asks, or if it asks just now.
        living = {each for each in living - excused - out if not self._differs_from(each, ids)}
        if self._special & living:
            return
        living = {each for each in living if each in ids or not self._may_be_stalled(each, ids, now_ms)}
        if 2 * len(ids) <= len(living) - self._reach.num_outside(living, ids, now_ms):
            raise InvariantError("I2", f"quorum {quorum.key} has {len(ids)} of {len(living)} that live")
        if not skips_the_late:
            self._look_who_was_not_waited_for(quorum, living - ids, now_ms)

    def _may_be_stalled(self, replica_id: str, formed: Collection[str], now_ms: int) -> bool:
        """Return whether the replica may wait for a state without having received a byte. No quorum waits for it
        then."""
        since_ms = self._may_heal_ms.get(replica_id)
        if since_ms is None or self._healed.get(replica_id, (0, -1))[1] >= since_ms:
            return False
        asked_ms = min(self._asked_ms[each] for each in formed)
        return now_ms - max(since_ms, asked_ms) >= self.timeouts.first_byte_ms

    def _look_who_is_ahead(self, quorum: Quorum) -> None:
        """Check that a state loaded from outside does not overtake the job's own."""
        live = max((member.step for member in quorum.members if member.live), default=None)
        for member in quorum.members:
            if live is not None and member.step > live and not member.live:
                raise InvariantError("I3", f"{member.replica_id} takes quorum {quorum.key} to a step from outside")

    def _look_who_was_not_waited_for(self, quorum: Quorum, late: Collection[str], now_ms: int) -> None:
        """Check that live replicas are waited for until join_timeout, and healing replicas for as long as bytes
        arrive."""
        waited_ms = now_ms - min(self._asked_ms[replica_id] for replica_id in quorum.replica_ids)
        if late and waited_ms < self.timeouts.join_timeout_ms:
            raise InvariantError("P2", f"quorum {quorum.key} has waited {waited_ms} ms at most for {sorted(late)}")
        for replica_id in late:
            since_ms = self._heals_ms.get(replica_id, now_ms - self.timeouts.heal_timeout_ms)
            _, healed_ms = self._healed.get(replica_id, (0, -1))
            arrive = healed_ms >= since_ms and now_ms - healed_ms < self.timeouts.heartbeat_timeout_ms
            if now_ms - since_ms < self.timeouts.heal_timeout_ms and arrive:
                raise InvariantError("P2", f"quorum {quorum.key} leaves {replica_id} out, which heals")


class Attendances:
    """The `Attendance` of each job, built from all messages of one life of a lighthouse.

    Args:
        new: makes an `Attendance` for an unknown job.
    """

    def __init__(self, new: Callable[[], Attendance]) -> None:
        self._new = new
        self._of_job: dict[str, Attendance] = {}
        self._hellos: dict[int, Hello] = {}
        self._said_hello_last = 0  # stream of the newest hello
        # stream, quorum key and time of the question to each job
        self._asked: dict[str, tuple[int, QuorumKey, int]] = {}

    def of(self, job: str) -> Attendance:
        """Return the attendance of that job."""
        if job not in self._of_job:
            self._of_job[job] = self._new()
        return self._of_job[job]

    def job_of(self, stream: int) -> str:
        """Return the job that the stream's hello named, or "" before the hello."""
        hello = self._hellos.get(stream)
        return hello.job if hello is not None else ""

    def hello_of(self, stream: int) -> Hello:
        """Return the first message of a welcomed stream."""
        return self._hellos[stream]

    def heard(self, event: events.LighthouseEvent, now_ms: int) -> None:
        """Record an event that the lighthouse receives."""
        if isinstance(event, events.HelloReceived):
            self._hellos[event.stream] = event.hello
            self._said_hello_last = event.stream
        job = self.job_of(event.stream)
        attendance = self.of(job)
        match event:
            case events.QuorumRequested():
                attendance.asked(event.member, event.stream, event.held, event.fingerprint, now_ms)
            case events.BeatReceived():
                attendance.healed(event.stream, event.healed_bytes, now_ms)
            case events.RequestWithdrawn():
                attendance.asks_no_more(event.stream)
            case events.StreamClosed():
                attendance.asks_no_more(event.stream)
                attendance.closed(event.stream)
            case events.PeersTried():
                attendance.tried(event.stream, event.number, [each.replica_id for each in event.unreached])
            case events.DeathReported():
                attendance.death_reported(event.stream)
            case events.LeaveReceived():
                if event.finished_step is not None:
                    attendance.finished(event.stream, event.finished_step)
                attendance.left(event.stream)
            case events.QuorumReported():
                if event.quorum is not None and self._is_asked(job, event.stream, event.quorum.key, now_ms):
                    attendance.reported(event.quorum)

    def _is_asked(self, job: str, stream: int, key: QuorumKey, now_ms: int) -> bool:
        """Return whether the lighthouse awaits news of that quorum on that stream. It gives up after a
        heartbeat_timeout."""
        *asked, since_ms = self._asked.get(job, (None, None, 0))
        return asked == [stream, key] and now_ms - since_ms < self.of(job).timeouts.heartbeat_timeout_ms

    def decided(self, order: effects.LighthouseEffect, now_ms: int) -> None:
        """Record and check an effect that the lighthouse decides."""
        match order:
            case effects.QuorumFormed():
                self.of(order.job).formed(order.quorum, order.previous, now_ms)
                self.of(order.job).drop_presumed()
            case effects.ReplicaLost():
                dead = order.reason.startswith(("its manager server reports", "replaced by"))
                broke = order.reason.startswith("its stream broke")
                self.of(order.job).lost(order.replica_id, order.session, dead=dead, broke=broke, now_ms=now_ms)
            case effects.JobEnded():
                self.of(order.job).ended(order.step, now_ms)
            case effects.PaceChanged():
                self.of(order.job).pace_changed(order.news)
            case effects.AnswerQuorum() | effects.AnswerUnchanged() | effects.RefuseRequest():
                if isinstance(order, effects.RefuseRequest) and order.refusal is Refusal.DIFFERS:
                    self.of(self.job_of(order.stream)).differs(order.stream)
                if isinstance(order, effects.RefuseRequest) and order.refusal is Refusal.OVER:
                    self.of(self.job_of(order.stream)).late(order.stream)
                if not isinstance(order, effects.RefuseRequest):
                    quorum = order.quorum if isinstance(order, effects.AnswerQuorum) else None
                    self.of(self.job_of(order.stream)).answered(order.stream, quorum, now_ms)
                self.of(self.job_of(order.stream)).asks_no_more(order.stream)
            case effects.RefuseSession() if order.refusal is Refusal.OTHER_KIND:
                self.of(self.job_of(order.stream)).turned_out(order.stream)
            case effects.Release():
                self.of(self.job_of(order.stream)).released(order.stream)
            case effects.CloseStream():
                newer, older = self._hellos[self._said_hello_last], self._hellos[order.stream]
                self.of(older.job).takes_place(newer, older)
            case effects.TryPeers():
                self.of(self.job_of(order.stream)).tries(order.stream, order.number)
            case effects.AskForQuorum():
                self._asked[self.job_of(order.stream)] = order.stream, order.key, now_ms
            case effects.Welcome():
                self.of(self.job_of(order.stream)).welcomed(self._hellos[order.stream], order.stream)


class Invariants:
    """The invariants I1 to I5 of one job, over its whole life. (I6 belongs to the simulator, which has to stop the
    faults.)

    Args:
        initial_step: step at which the job's replicas start. Their states are not compared before its first commit.
        several_lighthouses: two lighthouses may form quorums at once, until all replicas have followed to the newer.
    """

    def __init__(self, *, initial_step: int = 0, several_lighthouses: bool = False) -> None:
        self.num_commits = 0
        self.newest_commit: tuple[int, int] = (0, 0)  # (step, members in the reduction)
        self._initial_step = initial_step
        self._several_lighthouses = several_lighthouses
        self._highest_id = 0
        self._members: dict[QuorumKey, tuple[str, ...]] = {}
        self._formed: set[QuorumKey] = set()
        self._plans: dict[tuple[QuorumKey, int, int, int], tuple[object, ...]] = {}
        self._groups: dict[tuple[QuorumKey, int], tuple[str, tuple[str, ...]]] = {}
        self._places: dict[tuple[QuorumKey, int, int], str] = {}
        self._states: dict[tuple[int, int, int], str] = {}
        self._lineages: dict[tuple[int, int], set[int]] = {}
        self._after: dict[tuple[Round, int], Held] = {}
        self._votes: dict[tuple[str, Round], dict[int, bool]] = {}
        self._verdicts: dict[tuple[str, Round], Verdict] = {}
        self._committed: set[tuple[str, int, Round]] = set()
        self._held_by: dict[str, QuorumKey] = {}
        self._left_with: dict[str, tuple[int, int | None]] = {}
        self._delivered: set[tuple[str, int, QuorumKey, int]] = set()
        # syncs in flight of each rank, oldest first
        self._flights: dict[tuple[str, int], list[tuple[QuorumKey, int]]] = {}
        self._words: dict[tuple[QuorumKey, int, int], bool] = {}  # meaning of the word, by round and group rank
        self._without_word: set[tuple[str, int, QuorumKey, int]] = set()  # ranks for which the word did not complete
        self._last_rounds: dict[QuorumKey, set[int]] = {}  # rounds agreed on after a newer quorum had committed
        self._newest_committed: QuorumKey | None = None
        self._twins: set[str] = set()
        self._unknown: frozenset[QuorumKey] = frozenset()  # quorums that a restarted lighthouse could not know of

    def started_at(self, wall_ms: int) -> bool:
        """Record that another lighthouse starts.

        Args:
            wall_ms: start time by the wall clock.
        Returns: whether the clock was set back so far that its first id may be below an id given before. I1 then starts
            afresh for the job. For the quorums of each replica it still holds, because each replica reports what it
            holds.
        """
        if wall_ms >= self._highest_id:
            return False
        self._highest_id = 0
        self._newest_committed = None
        return True

    # --- I1, I2 ---------------------------------------------------------------------------------------------------

    def formed(self, quorum: Quorum) -> None:
        """Check a quorum that a lighthouse reports as formed."""
        kinds = {(each.world_size, *(getattr(each, name) for name in _EQUAL_SETTINGS)) for each in quorum.members}
        if len(kinds) > 1:
            raise InvariantError("P6", f"quorum {quorum.key} has members of different settings: {kinds}")
        # Two lighthouses don't know each other's quorums. A replica that moves between them still sees ids rise
        # (`received`).
        if quorum.key.quorum_id <= self._highest_id and not self._several_lighthouses:
            raise InvariantError("I1", f"quorum {quorum.key} was formed after one with id {self._highest_id}")
        if quorum.key in self._formed:
            raise InvariantError("I1", f"key {quorum.key} was given twice")
        self._highest_id = quorum.key.quorum_id
        self._formed.add(quorum.key)

    def answered(self, replica_id: str, quorum: Quorum) -> None:
        """Check a quorum that a lighthouse gives to a replica."""
        if quorum.key not in self._formed:
            raise InvariantError("I1", f"{replica_id} is given quorum {quorum.key}, which was never formed")
        ids = quorum.replica_ids
        if list(ids) != sorted(set(ids)):
            raise InvariantError("I2", f"quorum {quorum.key} is out of order or has a member twice: {ids}")
        if replica_id not in ids:
            raise InvariantError("I2", f"{replica_id} is given quorum {quorum.key} without itself: {ids}")
        known = self._members.setdefault(quorum.key, ids)
        if known != ids:
            raise InvariantError("I2", f"quorum {quorum.key} has members {known} for one and {ids} for another")

    def received(self, replica_id: str, key: QuorumKey) -> None:
        """Check an answer that has reached a replica. (An answer that was lost with its lighthouse reached no
        replica.)"""
        before = self._held_by.get(replica_id)
        if before is not None and key < before:
            raise InvariantError("I1", f"{replica_id} is given quorum {key} after {before}")
        self._held_by[replica_id] = key

    def started_anew(self, replica_id: str, held: QuorumKey | None) -> None:
        """Record that the replica's manager server was restarted: its ranks' last quorum counts only if they report
        it."""
        self._held_by.pop(replica_id, None)
        if held is not None:
            self._held_by[replica_id] = held

    def planned_from(self, plan: Plan, quorum: Quorum) -> None:
        """Check the plan that a manager server makes of a quorum: it starts at the highest step of a whole member."""
        highest = max(member.step for member in quorum.members if not member.torn)
        if plan.step != highest:
            raise InvariantError("I3", f"{plan.replica_id} goes on from step {plan.step} in {plan.key}, not {highest}")

    def planned(self, plan: Plan, group_rank: int, in_flight: int = 0) -> None:
        """Check a plan that a rank is given: its common part is equal for all members.

        Several plans may be of one step, if that many syncs of the same quorum are in flight.
        """
        common = (plan.replica_ids, plan.up_to_date, plan.participants, plan.min_replica_size)
        known = self._plans.setdefault((plan.key, plan.step, plan.lineage, in_flight), common)
        if known != common:
            raise InvariantError(
                "I2", f"two plans of quorum {plan.key} at step {plan.step}: {known} and {common} (rank {group_rank})"
            )
        if plan.heal == (plan.replica_rank in plan.up_to_date):
            raise InvariantError("I3", f"{plan.replica_id} in {plan.key} is told both to heal and to be the source")

    # --- I4 -------------------------------------------------------------------------------------------------------

    def joined_group(self, plan: Plan, group_rank: int) -> None:
        """Check that ranks meet at one store per quorum, under a prefix made of the key and the group rank."""
        place = (plan.key, group_rank)
        claims = (plan.store_address, plan.replica_ids)
        known = self._groups.setdefault(place, claims)
        if known != claims:
            raise InvariantError("I4", f"under key {plan.key} rank {group_rank}: {known} meets {claims}")
        seat = (plan.key, group_rank, plan.replica_rank)
        if seat in self._places:
            raise InvariantError(
                "I4", f"{plan.replica_id} takes place {plan.replica_rank} in {plan.key}, as {self._places[seat]} did"
            )
        self._places[seat] = plan.replica_id

    # --- I3 -------------------------------------------------------------------------------------------------------

    def reduced(self, key: QuorumKey, group_rank: int, given: Mapping[str, Contribution]) -> None:
        """Check a reduction that all members have reached: all members with gradients have the same state."""
        counted = [contribution for contribution in given.values() if contribution.gradient is not None]
        states = {contribution.before for contribution in counted}
        if len(states) > 1:
            shown = ", ".join(f"{each.replica_id} at {each.before}" for each in counted)
            raise InvariantError("I3", f"one mean in quorum {key}, rank {group_rank}, of different states: {shown}")

        parts = {contribution.part for contribution in given.values()}
        if len(parts) > 1:
            raise InvariantError("I3", f"one mean in quorum {key}, rank {group_rank}, of {sorted(parts)}")
        self._look_at_mean(key, group_rank, given.values())

    @staticmethod
    def _look_at_mean(key: QuorumKey, group_rank: int, given: Collection[Contribution]) -> None:
        """Check that the shares of the contributors add up to one, for every member."""
        where = f"one mean in quorum {key}, rank {group_rank}"
        weights = [each.weight for each in given if each.weight is not None]
        if len(weights) not in (0, len(given)):
            raise InvariantError("I4", f"{where}, is weighted by {len(weights)} of {len(given)} members")
        total = sum(each.factor for each in given if each.gradient is not None)
        for each in given:
            divides = sum(weights) if weights else each.divide_by
            if total and abs(total / divides - 1.0) > 1e-9:
                raise InvariantError("I3", f"{where}: {each.replica_id} divides {total:g} by {divides:g}")

    def delivered(self, replica_id: str, reduced: Reduced) -> None:
        """Record that a rank has received the result of a reduction."""
        for number in reduced.numbers:
            self._delivered.add((replica_id, reduced.group_rank, reduced.key, number))

    def holds(self, replica_id: str, group_rank: int, held: Held) -> None:
        """Check a rank's state: equal step and lineage mean equal weights, on every rank and at every time."""
        if held.lineage is None or held.step <= self._initial_step:
            return
        name = (group_rank, held.step, held.lineage)
        self._lineages.setdefault((group_rank, held.step), set()).add(held.lineage)
        known = self._states.setdefault(name, held.weights)
        if known != held.weights:
            raise InvariantError(
                "I3", f"{replica_id} rank {group_rank} holds {held.weights} at step {held.step}, others {known}"
            )

    def committed(self, replica_id: str, group_rank: int, vote: Round, num_members: int, after: Held) -> None:
        """Check and record that a rank's optimizer has stepped."""
        name = (replica_id, group_rank, vote)
        if name in self._committed:
            raise InvariantError("I5", f"{replica_id} rank {group_rank} steps twice for {vote}")
        self._committed.add(name)
        verdict = self._verdicts.get((replica_id, vote))
        if verdict is None or not verdict.yes:
            raise InvariantError("I5", f"{replica_id} rank {group_rank} steps without a yes ({verdict}) for {vote}")
        known = self._after.setdefault((vote, group_rank), after)
        if known != after:
            raise InvariantError("I3", f"{replica_id} has {after} after {vote}, others {known}")
        self.holds(replica_id, group_rank, after)
        self.num_commits += 1
        newest = self._newest_committed
        if vote.key not in self._unknown and (newest is None or vote.key > newest):
            self._newest_committed = vote.key
        self.newest_commit = (vote.step, num_members)

    def applied(self, replica_id: str, group_rank: int, vote: Round, reduced: Reduced) -> None:
        """Check the reductions that a rank's optimizer has stepped with."""
        known = [(replica_id, group_rank, reduced.key, number) in self._delivered for number in reduced.numbers]
        if (replica_id, group_rank, vote.key, vote.step) in self._without_word:
            raise InvariantError("W1", f"{replica_id} rank {group_rank} commits {vote} without the word of the others")
        if reduced.key != vote.key or not all(known):
            raise InvariantError("I5", f"{replica_id} rank {group_rank} steps on a failed reduction in {vote}")

    def has_twin(self, replica_id: str) -> None:
        """Record that two processes run under that id by mistake.

        A replacement for one of them reports its end, and the other goes on until it hears of that.
        """
        self._twins.add(replica_id)

    def started_over(self, quorum: Quorum, *, durable: bool) -> None:
        """Record the first quorum of a lighthouse that no replica names an earlier quorum to.

        Members of an earlier quorum that can't reach it go on until their lease expires. A lighthouse with a durable
        counter waits for that. Its ids are lower than theirs if its clock was set back.
        """
        self._unknown = frozenset() if durable else frozenset(self._formed - {quorum.key})
        self._newest_committed = None

    # --- standing quorums -----------------------------------------------------------------------------------------

    def worded(self, replica_id: str, group_rank: int, vote: Round, yes: bool | None) -> None:
        """Check that the word of a round means the same for all ranks for which it has completed.

        No two quorums of a job make progress at once. After a newer quorum has committed, an older one may end the
        current round, and begins no other.

        Args:
            replica_id: of the rank.
            group_rank: of the rank.
            vote: the round.
            yes: meaning of the word. None: it did not complete for this rank.
        """
        if yes is None:
            self._without_word.add((replica_id, group_rank, vote.key, vote.step))
            return
        # A lone member may have gone back to an earlier step by hand.
        self._without_word.discard((replica_id, group_rank, vote.key, vote.step))
        known = self._words.setdefault((vote.key, vote.step, group_rank), yes)
        if known != yes:
            raise InvariantError("W1", f"the word of {vote} is a {yes} for {replica_id} and a {known} for others")
        newest = self._newest_committed
        if replica_id in self._twins:
            return
        if vote.key in self._unknown:
            return
        if yes and newest is not None and vote.key < newest and not self._several_lighthouses:
            rounds = self._last_rounds.setdefault(vote.key, set())
            rounds.add(vote.step)
            if len(rounds) > 1:
                raise InvariantError(
                    "W2", f"{replica_id} agrees on steps {sorted(rounds)} of {vote.key}, and {newest} has committed"
                )

    # --- syncs in flight ------------------------------------------------------------------------------------------

    def started(self, host: str, group_rank: int, key: QuorumKey, fragment: int) -> None:
        """Record that a rank starts a sync of that fragment."""
        flight = self._flights.setdefault((host, group_rank), [])
        if (key, fragment) in flight:
            raise InvariantError("F1", f"{host} rank {group_rank} has fragment {fragment} in flight twice in {key}")
        flight.append((key, fragment))

    def quorum_known(self, host: str, group_rank: int, key: QuorumKey) -> None:
        """Record that a rank is given a plan. Its syncs in flight of another quorum have failed then."""
        flight = self._flights.get((host, group_rank), [])
        if any(of != key for of, _ in flight):
            flight.clear()

    def fell(self, host: str, group_rank: int) -> None:
        """Record that all syncs in flight of a rank are discarded: the oldest one's verdict is no, or the rank dropped
        all."""
        self._flights.pop((host, group_rank), None)

    def landed(self, host: str, group_rank: int, key: QuorumKey, fragment: int) -> None:
        """Check that a rank commits its oldest sync in flight."""
        flight = self._flights.get((host, group_rank), [])
        if flight[:1] != [(key, fragment)]:
            raise InvariantError(
                "F1", f"{host} rank {group_rank} commits fragment {fragment} of {key}, and in flight are {flight}"
            )
        del flight[0]

    def was_committed(self, vote: Round, group_rank: int) -> bool:
        """Return whether a member has committed that reduction."""
        return (vote, group_rank) in self._after

    def num_lineages(self, group_rank: int, step: int) -> int:
        """Return the number of different states that have been held at that step."""
        return len(self._lineages.get((group_rank, step), ()))

    def loads(self, host: str, group_rank: int, staged: Round) -> None:
        """Check that a rank loads a fetched state only if all ranks of its group have fetched theirs."""
        verdict = self._verdicts.get((host, staged))
        if verdict is None or not verdict.yes:
            raise InvariantError("P4", f"{host} rank {group_rank} loads a state that not all of its group have")

    # --- I5 -------------------------------------------------------------------------------------------------------

    def voted(self, replica_id: str, group_rank: int, vote: Round, yes: bool) -> None:
        """Check that a rank never changes its vote."""
        votes = self._votes.setdefault((replica_id, vote), {})
        if votes.setdefault(group_rank, yes) != yes:
            raise InvariantError("I5", f"{replica_id} rank {group_rank} changes its vote for {vote}")

    def left(self, replica_id: str, group_rank: int, held: Held, check: Check | None, *, torn: bool) -> None:
        """Check that all ranks of a group leave after the same step, unless their states are torn.

        A rank may not know its lineage, because it loaded its state by hand and no quorum came since. It may leave
        beside ranks that know theirs. `check`: its last comparison, which another rank may not have made.
        """
        if torn or held.lineage is None:
            return
        state = (held.step, check.before if check is not None and check.after == held.lineage else held.lineage)
        known = self._left_with.setdefault(replica_id, state)
        if known != state:
            raise InvariantError("L1", f"{replica_id} rank {group_rank} leaves with {state}, others with {known}")

    def decided(self, replica_id: str, world_size: int, vote: Round, verdict: Verdict) -> None:
        """Check a verdict that a rank is given: yes only if all voted yes, and the same for all."""
        votes = self._votes.get((replica_id, vote), {})
        if verdict.yes and not (len(votes) == world_size and all(votes.values())):
            raise InvariantError("I5", f"{replica_id} gets a yes of votes {votes} for {vote}")
        if self._verdicts.setdefault((replica_id, vote), verdict) != verdict:
            raise InvariantError("I5", f"{replica_id} gets both verdicts for {vote}")
