"""The observed liveness of each job's replicas, and the checks that a lighthouse's quorums fit it.

Law of this file: observe only, as in `invariants.py`. It sees messages alone, and nothing of the core that it checks.
Source: docs/protocol/sessions-and-quorums.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from tft_coord.core import effects, events
from tft_coord.core.fingerprint import Fingerprint, differences
from tft_coord.core.living_quorum import LIVES
from tft_coord.core.stragglers import PaceKind, StragglerNotice
from tft_coord.core.types import Hello, Member, Quorum, QuorumKey, Refusal
from tft_coord.timeouts import Timeouts
from tft_sim.invariants import InvariantError
from tft_sim.reach_truth import ReachTruth


class _JobEnd:
    """The end of a job, as its replicas report it, and the check that none of them trains on from before it (E1)."""

    def __init__(self) -> None:
        self._finished: dict[str, int] = {}  # step of each replica that left because its training finished
        self._known: set[str] = set()  # replicas known at the first finish since the newest quorum
        # end step, replicas of the ended run, its last quorum
        self._ended: tuple[int, set[str], QuorumKey | None] | None = None

    def finished(self, ids: Collection[str], step: int, known: Collection[str]) -> None:
        """Record that these replicas have finished. `known`: all replicas that the lighthouse knows."""
        self._finished |= dict.fromkeys(ids, step)
        self._known = self._known or set(known)

    def ended(self, step: int, members: Collection[str], last: QuorumKey | None) -> None:
        """Check that a member of the last quorum finished at the step where the job ended."""
        if step != max((self._finished[each] for each in members if each in self._finished), default=None):
            raise InvariantError(
                "E1", f"the job is reported to have ended at step {step}, and none of {members} finished there"
            )
        self._ended = step, self._known, last

    def formed(self, quorum: Quorum, previous: Quorum | None) -> None:
        """Check that no replica of the ended run trains on from before its end.

        Until the next run begins, no known replica may train on. After that, no known replica with a state of the old
        run may train on, until a member has a state of the end.
        """
        self._known = set()
        if self._ended is None:
            return
        step, known, last = self._ended
        if any(each.step >= step for each in quorum.members):
            self._ended = None
            return
        next_run = previous is not None and previous.key != last
        late = [each.replica_id for each in quorum.members if each.replica_id in known and (each.live or not next_run)]
        if late:
            raise InvariantError("E1", f"the job has ended at step {step}, and {late} still train in {quorum.key}")
        self._ended = step, known.difference(quorum.replica_ids), last  # members of the next run belong to that run


class LivenessTruth:
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
        self._lost_by_stream: set[str] = set()  # replicas that were lost because their stream broke
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
        self._not_counted: set[str] = set()
        self._streams: dict[str, int] = {}
        self._presumed: set[str] = set()
        self._mismatched: set[str] = set()  # replicas whose parameters or settings are not those of the job
        self._replaced: set[str] = set()
        self._asking: dict[str, int] = {}  # stream of each pending request
        # newest request of each replica, with the quorum that it held
        self._requests: dict[str, tuple[Member, QuorumKey | None]] = {}
        self._fingerprints: dict[str, Fingerprint] = {}  # newest fingerprint of each replica
        self._left_sessions: dict[str, int] = {}  # session of each replica that has left the job
        self._end = _JobEnd()
        self._released: set[str] = set()  # replicas that were told that no peer heals from them any more
        self._asked_ms: dict[str, int] = {}  # time of each replica's first request since its last answer
        self._heals_ms: dict[str, int] = {}  # start time of each replica that heals
        # the same for replicas that may heal, because states differ in their quorum
        self._may_heal_ms: dict[str, int] = {}
        self._left_out: set[str] = set()  # stragglers that are left out, so no quorum waits for them
        self._reach = ReachTruth()
        self._excludes_late = False  # the newest quorum was broken for a late member
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
            raise InvariantError("I2", f"{replica_id} session {session} is welcomed, and a newer session is open")
        self._lost.pop(replica_id, None)
        if session > self._sessions.get(replica_id, -1):
            # A new session breaks the heal of the session before, and its byte count starts at zero.
            self._heals_ms.pop(replica_id, None)
            self._healed.pop(replica_id, None)
        self._sessions[replica_id] = session
        if replica_id not in self._left_sessions:
            self._report_if_broken(replica_id)
        self._streams[replica_id] = stream
        self._asking.pop(replica_id, None)
        if hello.ready and replica_id not in self._mismatched:
            self._ready.add(replica_id)
        if hello.left or replica_id in self._left_sessions:
            self.left(stream)

    def stream_replaced(self, newer: Hello, older: Hello) -> None:
        """Check a stream that is closed for a newer hello: both hellos are of one process, or the older session is
        lost."""
        if older.replica_id in self._sessions and newer.address != older.address:
            who, first = older.replica_id, older.address
            raise InvariantError("I2", f"{who} is alive at {first}, and a hello from {newer.address} closes its stream")

    def left(self, stream: int) -> None:
        """Record that the replica on that stream has left: quorums stop waiting for it, and its own quorum runs to its
        end."""
        for replica_id, newest in self._streams.items():
            if newest == stream and replica_id in self._sessions:
                self._left_sessions[replica_id] = self._sessions.pop(replica_id)
                self._asking.pop(replica_id, None)

    def finished(self, stream: int, step: int) -> None:
        """Record that the replica on that stream leaves because its training finished."""
        known = self._sessions.keys() | self._lost.keys() | self._left_sessions.keys()
        self._end.finished([each for each, newest in self._streams.items() if newest == stream], step, known)

    def ended(self, step: int, now_ms: int) -> None:
        """Check that the job has ended at that step: a member of its last quorum finished there, and none can go on."""
        members = self._newest.replica_ids if self._newest is not None else ()
        trains = sorted(each for each in members if each in self._sessions or self._may_come_back(each, now_ms))
        if trains:
            raise InvariantError("E1", f"the job is reported to have ended at step {step}, and {trains} still train")
        self._end.ended(step, members, self._newest.key if self._newest is not None else None)
        self._ready &= self._asking.keys()

    def pace_changed(self, news: StragglerNotice) -> None:
        """Record that a straggler is left out, or let back."""
        if news.kind is PaceKind.LEFT_OUT:
            self._left_out.add(news.replica_id)
        elif news.kind is PaceKind.LET_BACK:
            self._left_out.discard(news.replica_id)

    def _outside_stragglers(self, newest: Quorum | None) -> set[str]:
        """Return the replicas that are left out, or none if no other member of the newest quorum lives."""
        members = set(newest.replica_ids) if newest is not None else set()
        return self._left_out if (members - self._left_out) & self._sessions.keys() else set()

    def num_ready(self) -> int:
        """Return the number of healthy replicas that count for a quorum."""
        return len(self._sessions.keys() & self._ready)

    def late(self, stream: int) -> None:
        """Record that the replica on that stream is behind a job that has ended, so it no longer counts."""
        self._ready -= {replica_id for replica_id, each in self._streams.items() if each == stream}

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
        self._mismatched.discard(member.replica_id)
        self._ready.add(member.replica_id)
        self._asking[member.replica_id] = stream
        # A replica that fails to heal repeatedly is not counted for a while. A replica with shrink_only does not count
        # newcomers.
        self._not_counted.discard(member.replica_id)
        if member.failed_heals > 1 or member.shrink_only:
            self._not_counted.add(member.replica_id)
        self._requests[member.replica_id] = member, held
        self._reach.asked(member, held, self._newest, now_ms)
        self._report_if_left(member.replica_id)

    def _report_if_left(self, replica_id: str) -> None:
        """Report a member of the newest quorum that asks for the next one, and whether it can go on in the newest."""
        member, held = self._requests[replica_id]
        before = self._newest.member(replica_id) if self._newest is not None else None
        if self._newest is not None and before is not None and before.session == self._sessions[replica_id]:
            self._on_left(self._newest.key, replica_id, member.needs_configure and held == self._newest.key)

    def settings_differ(self, stream: int) -> None:
        """Record that the replica on that stream does not belong to the job, so it does not count."""
        names = {replica_id for replica_id, each in self._streams.items() if each == stream}
        self._mismatched |= names
        self._ready -= names

    def evicted(self, stream: int) -> None:
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
            requests = {each: self._requests[each][0] for each, asked in self._asking.items() if asked == stream}
            self._newest = replace(
                newest,
                members=tuple(
                    replace(each, step=now.step, lineage=now.lineage, torn=now.torn)
                    if (now := requests.get(each.replica_id)) is not None
                    else each
                    for each in newest.members
                ),
            )

    def check_single_kind(self, quorum: Quorum) -> None:
        """Check that no replica of this kind lives when torchft members are given a quorum."""
        ours = sorted(each for each in self._sessions if each in self._streams)
        if ours:
            raise InvariantError(
                "P6", f"torchft's members {', '.join(quorum.replica_ids)} train, and {ours} of this protocol are alive"
            )

    def request_ended(self, stream: int) -> None:
        """Forget the request on that stream: it was answered or withdrawn, or its stream ended."""
        self._asking = {replica_id: asked for replica_id, asked in self._asking.items() if asked != stream}

    def _drop_presumed(self) -> None:
        """Forget the replicas that are only presumed to live, because another quorum became the newest."""
        self._sessions = {name: session for name, session in self._sessions.items() if name not in self._presumed}
        self._ready -= self._presumed  # only the older quorum showed that these had ever asked
        self._presumed.clear()

    def reported(self, quorum: Quorum) -> None:
        """Take over the newest quorum from before this life: presume its members to live, and those of an older one no
        more."""
        self._drop_presumed()
        for member in quorum.members:
            name = member.replica_id
            if not any(name in known for known in (self._left_sessions, self._sessions, self._lost, self._replaced)):
                self._sessions[name] = member.session
                self._presumed.add(name)
                self._ready.add(name)
        self._newest = quorum
        for member in quorum.members:
            self._report_if_broken(member.replica_id)
            if member.replica_id in self._asking:  # the request came before this lighthouse knew of the quorum
                self._report_if_left(member.replica_id)

    def closed(self, stream: int) -> None:
        """Record that a stream has ended."""
        self._streams = {replica_id: each for replica_id, each in self._streams.items() if each != stream}

    def lost(self, replica_id: str, session: int, *, dead: bool, broke: bool = False, now_ms: int = 0) -> None:
        """Record that the lighthouse took a replica for lost, because its stream broke or for another reason."""
        if replica_id in self._released:
            raise InvariantError(
                "L1", f"{replica_id} session {session} is reported lost after it left and was released"
            )
        if broke and replica_id in self._streams:
            raise InvariantError(
                "I2", f"{replica_id} session {session} is lost for a broken stream, and its stream is open"
            )
        self._sessions.pop(replica_id, None)
        self._asking.pop(replica_id, None)
        self._heals_ms.pop(replica_id, None)
        self._reach.lost(replica_id)
        self._lost[replica_id] = session
        self._lost_ms[replica_id] = now_ms
        self._lost_by_stream = (self._lost_by_stream | {replica_id}) if broke else (self._lost_by_stream - {replica_id})
        if dead:
            self._dead.add(replica_id)
        self._report_if_broken(replica_id)

    def death_reported(self, stream: int) -> None:
        """Record a reported end of a trainer. For a replica that still lives, the lighthouse declares the loss
        itself."""
        self._dead |= {each for each, newest in self._streams.items() if newest == stream and each in self._lost}

    def shrink_only_blocks(self) -> bool:
        """Return whether enough replicas have asked, and one of them has shrink_only set."""
        before = self._newest.replica_ids if self._newest is not None else ()
        asking = [self._requests[each][0] for each in self._asking if each in self._requests]
        shrinks = any(member.shrink_only and member.replica_id in before for member in asking)
        return shrinks and len(asking) >= self._min_replicas

    def is_alive(self, replica_id: str) -> bool:
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
        alive = {each.replica_id for each in held if each.replica_id in self._sessions and each.lineage in lineages}
        return step > 0 and alive == {replica_id}

    def is_member(self, replica_id: str) -> bool:
        """Return whether the replica is a member of the newest quorum."""
        return self._newest is not None and self._newest.member(replica_id) is not None

    def is_dead(self, replica_id: str) -> bool:
        """Return whether the replica's end was reported, or another replica has replaced it."""
        return replica_id in self._dead

    def _report_if_broken(self, replica_id: str) -> None:
        """Report that the newest quorum is broken, if the state of that replica breaks it."""
        for member in self._newest.members if self._newest is not None else ():
            if member.replica_id != replica_id:
                continue
            assert self._newest is not None
            # A dead replica can't come back as any session, older or newer than the lost one.
            lost = self._lost.get(replica_id, -1) >= (0 if self.is_dead(replica_id) else member.session)
            newest = self._sessions.get(replica_id, self._left_sessions.get(replica_id, member.session))
            followed = newest > member.session
            if lost or followed or (replica_id in self._replaced and replica_id not in self._sessions):
                self._on_broken(self._newest.key, replica_id)

    def quorum_broken_for(self, *, late: bool) -> None:
        """Record that the newest quorum is broken because members wait in it for a late or asking member."""
        self._excludes_late = self._excludes_late or late

    def check_wait(self, waits: str, now_ms: int = 0) -> None:
        """Check a moment without a new quorum: a live replica has not asked, or too few have."""
        if self._waits_for_links(waits, now_ms) or LIVES in waits:
            return  # the simulator checks at the end that a step commits within the bound
        out = self._outside_stragglers(self._newest)
        alive = {each for each in self._sessions if each in self._ready and each not in out}
        asking = alive & self._asking.keys()
        shown = asking - self._reach.untried()
        if asking == alive and len(shown) >= self._min_replicas and not self._not_counted & alive:
            before = self._newest.members if self._newest is not None else ()
            away = any(self._may_come_back(member.replica_id, now_ms) for member in before)
            if away and waits.startswith("the state of step"):
                return  # `formed` checks that a quorum is not formed too early
            raise InvariantError("I6", f"all live replicas have asked, {sorted(asking)}, and no quorum forms: {waits}")
        before_ids = {member.replica_id for member in self._newest.members} if self._newest is not None else set()
        before_ids -= self._left_sessions.keys() | out
        able = asking - self._reach.excused(before_ids, now_ms)
        enough = len(able) >= self._min_replicas and not self._not_counted & alive
        if before_ids and before_ids <= asking and enough and not self._reach.has_bad_link(before_ids):
            raise InvariantError(
                "P2", f"all members of the last quorum have asked, {sorted(asking)}, and no quorum forms: {waits}"
            )

    def trial_started(self, stream: int, number: int) -> None:
        """Record that the replica on that stream is asked to try its peers."""
        for replica_id in [each for each, newest in self._streams.items() if newest == stream]:
            self._reach.trial_started(replica_id, number)

    def trial_ended(self, stream: int, number: int, unreached: Collection[str]) -> None:
        """Record that the replica on that stream has tried its peers, and which of them it could not reach."""
        for replica_id in [each for each, newest in self._streams.items() if newest == stream]:
            self._reach.trial_ended(replica_id, number, unreached)

    def _waits_for_links(self, waits: str, now_ms: int) -> bool:
        """Return whether the lighthouse may wait because of bad links. (R1 is the bound on that wait.)"""
        if waits.startswith("the report of"):
            return self._reach.waits_for_both_ends(now_ms, self.timeouts.quorum_tick_ms)
        if waits.startswith("the trial of"):
            return bool(self._reach.untried())
        return waits.startswith(("a set of at least", "a replica that all others can reach"))

    def _check_exclusions(self, quorum: Quorum, previous: Quorum | None, now_ms: int) -> None:
        """Check R2: a quorum leaves out no replica for a bad link without need, and never all holders of the newest
        state."""
        ids, before = set(quorum.replica_ids), previous.members if previous is not None else ()
        alive = {each for each in self._sessions if each in self._ready}
        slow = self._outside_stragglers(previous)  # stragglers are left out for another reason
        waiting = {each: self._requests[each][0] for each in self._asking if each in alive and each not in slow}
        if self._not_counted & alive:
            return
        names = [each.replica_id for each in before]
        wrong = self._reach.needless(ids, waiting, names, self._min_replicas, now_ms)
        if wrong is not None:
            raise InvariantError("R2", f"quorum {quorum.key}: {wrong}")
        step = max((each.step for each in quorum.members if not each.torn), default=0)
        away = alive.difference(ids, waiting) & self._reach.excused(ids, now_ms)
        away = {each for each in away if not self._may_be_stalled(each, ids, now_ms)}
        hold = [each.replica_id for each in before if each.replica_id in away and each.step > step and not each.torn]
        waited_ms = now_ms - min(self._asked_ms[replica_id] for replica_id in ids)
        if hold and waited_ms < self.timeouts.join_timeout_ms:
            raise InvariantError(
                "R2", f"quorum {quorum.key} continues from step {step} without {hold}, which hold a newer state"
            )

    def _may_come_back(self, replica_id: str, now_ms: int) -> bool:
        """Return whether the replica is lost, its death is not reported, and its absence is still short."""
        if replica_id not in self._lost or self.is_dead(replica_id) or replica_id in self._left_sessions:
            return False
        broke = replica_id in self._lost_by_stream
        patience_ms = self.timeouts.heartbeat_timeout_ms if broke else self._lost_state_ms
        return now_ms - self._lost_ms[replica_id] < patience_ms

    def _check_older_state(self, quorum: Quorum, previous: Quorum, now_ms: int) -> None:
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
            raise InvariantError("I3", f"quorum {quorum.key} continues from before step {step}, which {away} held")

    def _differs_from(self, replica_id: str, others: Collection[str]) -> bool:
        """Return whether the replica's fingerprint differs from that of one of the others."""
        own = self._fingerprints.get(replica_id, ())
        return any(differences(dict(self._fingerprints.get(other, ())), own) for other in others)

    def formed(self, quorum: Quorum, previous: Quorum | None, now_ms: int = 0) -> None:
        """Check a quorum with a new id: its members live, are enough, and include survivors and their state."""
        self._newest = quorum
        excludes_late, self._excludes_late = self._excludes_late, False
        self._check_loaded_state(quorum)
        self._end.formed(quorum, previous)
        if previous is not None:
            self._check_older_state(quorum, previous, now_ms)
        ids = set(quorum.replica_ids)
        if len(ids) < self._min_replicas:
            raise InvariantError("I2", f"quorum {quorum.key} has {len(ids)} members, min_replicas {self._min_replicas}")
        if not ids <= self._asking.keys():
            raise InvariantError("I2", f"{ids - self._asking.keys()} did not ask to be in quorum {quorum.key}")
        for member in quorum.members:
            if self._sessions.get(member.replica_id) != member.session:
                raise InvariantError("I2", f"{member.replica_id} is in quorum {quorum.key} without a live session")
        self._check_exclusions(quorum, previous, now_ms)
        excused = self._reach.excused(ids, now_ms)
        self._reach.formed(ids)
        before = set(previous.replica_ids) - self._left_sessions.keys() if previous is not None else set()
        out = self._outside_stragglers(previous)
        awaited = before - out - excused
        if awaited and awaited <= ids:
            return
        alive = {each for each in self._sessions if each in self._ready}
        if before & alive and not before & ids:
            raise InvariantError(
                "I2", f"quorum {quorum.key} leaves out all survivors of the last quorum, {before & alive}"
            )
        # A replica that differs from the members does not count. It learns so when it asks, or if it asks just now.
        alive = {each for each in alive - excused - out if not self._differs_from(each, ids)}
        if self._not_counted & alive:
            return
        alive = {each for each in alive if each in ids or not self._may_be_stalled(each, ids, now_ms)}
        if 2 * len(ids) <= len(alive) - self._reach.num_bad_links_outside(alive, ids, now_ms):
            raise InvariantError("I2", f"quorum {quorum.key} has {len(ids)} of {len(alive)} live replicas")
        if not excludes_late:
            # A bad link to a live member of the last quorum keeps a replica out, also of a quorum without that member.
            kept_out = self._reach.excused(ids | (before & self._sessions.keys()), now_ms)
            self._check_late_replicas(quorum, alive - ids - kept_out, now_ms)

    def _may_be_stalled(self, replica_id: str, formed: Collection[str], now_ms: int) -> bool:
        """Return whether the replica may wait for a state without having received a byte. No quorum waits for it
        then."""
        since_ms = self._may_heal_ms.get(replica_id)
        if since_ms is None or self._healed.get(replica_id, (0, -1))[1] >= since_ms:
            return False
        return now_ms - max(since_ms, min(self._asked_ms[each] for each in formed)) >= self.timeouts.first_byte_ms

    def _check_loaded_state(self, quorum: Quorum) -> None:
        """Check that a state loaded from outside does not overtake the job's own."""
        live = max((member.step for member in quorum.members if member.live), default=None)
        for member in quorum.members:
            if live is not None and member.step > live and not member.live:
                raise InvariantError(
                    "I3", f"{member.replica_id} sets the step of quorum {quorum.key} with a state loaded from outside"
                )

    def _check_late_replicas(self, quorum: Quorum, late: Collection[str], now_ms: int) -> None:
        """Check that live replicas are waited for until join_timeout, and healing replicas for as long as bytes
        arrive."""
        waited_ms = now_ms - min(self._asked_ms[replica_id] for replica_id in quorum.replica_ids)
        if late and waited_ms < self.timeouts.join_timeout_ms:
            raise InvariantError("P2", f"quorum {quorum.key} waited only {waited_ms} ms for {sorted(late)}")
        for replica_id in late:
            since_ms = self._heals_ms.get(replica_id, now_ms - self.timeouts.heal_timeout_ms)
            _, healed_ms = self._healed.get(replica_id, (0, -1))
            arrive = healed_ms >= since_ms and now_ms - healed_ms < self.timeouts.heartbeat_timeout_ms
            if now_ms - since_ms < self.timeouts.heal_timeout_ms and arrive:
                raise InvariantError("P2", f"quorum {quorum.key} leaves out {replica_id}, which is healing")


class LivenessTruths:
    """The `LivenessTruth` of each job, built from all messages of one life of a lighthouse.

    Args:
        new: makes a `LivenessTruth` for an unknown job.
    """

    def __init__(self, new: Callable[[], LivenessTruth]) -> None:
        self._new = new
        self._of_job: dict[str, LivenessTruth] = {}
        self._hellos: dict[int, Hello] = {}
        self._newest_hello_stream = 0  # stream of the newest hello
        # stream, quorum key and time of the question to each job
        self._asked: dict[str, tuple[int, QuorumKey, int]] = {}

    def of(self, job: str) -> LivenessTruth:
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
            self._newest_hello_stream = event.stream
        job = self.job_of(event.stream)
        liveness = self.of(job)
        match event:
            case events.QuorumRequested():
                liveness.asked(event.member, event.stream, event.held, event.fingerprint, now_ms)
            case events.BeatReceived():
                liveness.healed(event.stream, event.healed_bytes, now_ms)
            case events.RequestWithdrawn():
                liveness.request_ended(event.stream)
            case events.StreamClosed():
                liveness.request_ended(event.stream)
                liveness.closed(event.stream)
            case events.PeersTried():
                liveness.trial_ended(event.stream, event.number, [each.replica_id for each in event.unreached])
            case events.DeathReported():
                liveness.death_reported(event.stream)
            case events.LeaveReceived():
                if event.finished_step is not None:
                    liveness.finished(event.stream, event.finished_step)
                liveness.left(event.stream)
            case events.QuorumReported():
                if event.quorum is not None and self._is_asked(job, event.stream, event.quorum.key, now_ms):
                    liveness.reported(event.quorum)

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
                self.of(order.job)._drop_presumed()
            case effects.ReplicaLost():
                dead = order.reason.startswith(("its manager server reports", "replaced by"))
                broke = order.reason.startswith("its stream disconnected")
                self.of(order.job).lost(order.replica_id, order.session, dead=dead, broke=broke, now_ms=now_ms)
            case effects.JobEnded():
                self.of(order.job).ended(order.step, now_ms)
            case effects.PaceChanged():
                self.of(order.job).pace_changed(order.news)
            case effects.AnswerQuorum() | effects.AnswerUnchanged() | effects.RefuseRequest():
                if isinstance(order, effects.RefuseRequest) and order.refusal is Refusal.DIFFERS:
                    self.of(self.job_of(order.stream)).settings_differ(order.stream)
                if isinstance(order, effects.RefuseRequest) and order.refusal is Refusal.OVER:
                    self.of(self.job_of(order.stream)).late(order.stream)
                if not isinstance(order, effects.RefuseRequest):
                    quorum = order.quorum if isinstance(order, effects.AnswerQuorum) else None
                    self.of(self.job_of(order.stream)).answered(order.stream, quorum, now_ms)
                self.of(self.job_of(order.stream)).request_ended(order.stream)
            case effects.RefuseSession() if order.refusal is Refusal.OTHER_KIND:
                self.of(self.job_of(order.stream)).evicted(order.stream)
            case effects.Release():
                self.of(self.job_of(order.stream)).released(order.stream)
            case effects.CloseStream():
                newer, older = self._hellos[self._newest_hello_stream], self._hellos[order.stream]
                self.of(older.job).stream_replaced(newer, older)
            case effects.TryPeers():
                self.of(self.job_of(order.stream)).trial_started(order.stream, order.number)
            case effects.AskForQuorum():
                self._asked[self.job_of(order.stream)] = order.stream, order.key, now_ms
            case effects.Welcome():
                self.of(self.job_of(order.stream)).welcomed(self._hellos[order.stream], order.stream)
