"""Small worlds around a core, for an exhaustive search.

One world has simple replicas around a lighthouse, which say hello, ask and hear. The other has the ranks of one group
around its manager server. They misbehave in every possible way. After every event the core's obligations to them are
checked.

Law of this file: worlds only. Nothing is random, and only events change a world.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tft_coord.core import effects, events
from tft_coord.core.assignment import assign
from tft_coord.core.config import LighthouseConfig
from tft_coord.core.lighthouse import LighthouseCore
from tft_coord.core.lineage import fold_lineage, initial_lineage
from tft_coord.core.progress import Phase, Progress
from tft_coord.core.replica_group import ReplicaGroupCore
from tft_coord.core.types import Hello, LossNotice, Member, Purpose, Quorum, QuorumKey, RankRequest, Refusal
from tft_coord.testing import frozen
from tft_coord.timeouts import Timeouts
from tft_sim.invariants import InvariantError, Invariants
from tft_sim.liveness_truth import LivenessTruth, LivenessTruths

JOB = "job"
TIMEOUTS = Timeouts(
    heartbeat_timeout_ms=900, join_timeout_ms=1_200, reconnect_grace_ms=300, quorum_tick_ms=300, beat_interval_ms=300
)
BUSY_FOR_LONG = Progress(0, Phase.OWN, TIMEOUTS.slowest_step_ms, slowest_step_ms=TIMEOUTS.slowest_step_ms)
WALL_MS = 1_000_000
STARTS = ("fresh", "trained", "joining", "restarted")
# Events of one replica, and events of all.
KINDS = (
    *("hello", "ask", "withdraw", "break", "die", "silence", "deafen", "echo", "leave", "hang", "wake"),
    *("grace", "join", "restart"),
)


# --- the lighthouse ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Replica:
    """One replica group as the lighthouse sees it: the messages that it sends and has received."""

    name: str
    number: int
    stream: int | None = None
    num_streams: int = 0
    session: int = WALL_MS
    welcomed: bool = False
    ready: bool = False
    deaf: bool = False  # messages to it are lost with its stream
    dead: bool = False  # its end was reported
    left: bool = False
    hangs: bool = False
    hung_ms: int = 0  # time since which nothing forbids its loss for the hang
    reported_busy: bool = False  # its newest beat reported the hang
    held_back: bool = False  # it was lost for the hang, and opens no newer session
    refused: bool = False
    request: int | None = None
    num_requests: int = 0
    step: int = 0
    lineage: int | None = field(default_factory=lambda: initial_lineage(JOB))
    live: bool = False
    quorum: Quorum | None = None
    held: QuorumKey | None = None
    notices: set[tuple[QuorumKey, str]] = field(default_factory=set)


class LighthouseWorld:
    """A lighthouse, and up to three replicas that misbehave in every possible way.

    Args:
        names: of the replicas, in order.
        start: `fresh`: no replica has come. `trained`: all have committed a step together. `joining`: all but the last
            have, and the last one asks. `restarted`: all have, and the lighthouse is new and knows no replica.
        min_replicas: of the lighthouse.
    """

    def __init__(self, names: str = "abc", *, start: str = "fresh", min_replicas: int = 1) -> None:
        self._config = LighthouseConfig(min_replicas=min_replicas, timeouts=TIMEOUTS)
        self._now_ms = 0
        self._num_lighthouses = 0
        self._num_quorums = 0
        self._replicas = {name: _Replica(name, number) for number, name in enumerate(names, 1)}
        self._invariants = Invariants()
        self._broken: set[tuple[QuorumKey, str]] = set()
        self._lost_by_hang_ms = -TIMEOUTS.heartbeat_timeout_ms
        self._new_lighthouse()
        self._run_ticks(2)
        trained = {"fresh": "", "trained": names, "joining": names[:-1], "restarted": names}[start]
        for name in trained:
            self._replicas[name].ready = True  # otherwise the first to ask would train before the others come
            self._connect(self._replicas[name])
        for _ in range(2):
            for name in trained:
                self._ask(self._replicas[name])
        if start == "joining":
            self._connect(self._replicas[names[-1]])
            self._ask(self._replicas[names[-1]])
        if start == "restarted":
            self._restart()

    # --- what can happen --------------------------------------------------------------------------------------------

    def choices(self) -> Sequence[str]:
        found = []
        for replica in self._replicas.values():
            if replica.refused:
                continue
            found.append(f"hello {replica.name}")  # a dead replica's hello may come late too
            if replica.stream is None:
                continue
            found += [f"break {replica.name}", f"die {replica.name}"]
            if not replica.dead:
                found += [f"silence {replica.name}"]
                found += [f"deafen {replica.name}"] if not replica.deaf else []
            if replica.hangs:
                found.append(f"wake {replica.name}")
            elif not replica.dead and not replica.left:
                found += [f"ask {replica.name}" if replica.request is None else f"withdraw {replica.name}"]
                found.append(f"leave {replica.name}")
                # A replica that waits for a quorum does not hang. A replica that has never trained is in no step.
                found += [f"hang {replica.name}"] if replica.request is None and replica.quorum is not None else []
            # the newest stream may not have replaced the older one yet
            if replica.num_streams > 1 and not replica.held_back:
                found.append(f"echo {replica.name}")
        return [*found, "grace", "join", "restart"]

    def happen(self, choice: str) -> None:
        what, _, name = choice.partition(" ")
        replica = self._replicas.get(name)
        match what:
            case "grace":
                self._run_ticks(2)
            case "join":
                self._run_ticks(TIMEOUTS.join_timeout_ms // TIMEOUTS.quorum_tick_ms)
            case "restart":
                self._restart()
            case _:
                assert replica is not None, f"nobody of that name: {choice}"
                self._replica_event(what, replica)
        self._check()

    def _replica_event(self, what: str, replica: _Replica) -> None:
        match what:
            case "hello":
                self._connect(replica)
            case "ask":
                self._ask(replica)
            case "withdraw":
                assert replica.request is not None
                request, replica.request = replica.request, None
                self._send(events.RequestWithdrawn(self._stream(replica), request))
            case "break":
                self._close(replica)
            case "die":
                replica.dead = True
                self._send(events.DeathReported(self._stream(replica), "rank 0 ended"))
            case "deafen":
                replica.deaf = True
            case "leave":
                replica.left, replica.request = True, None
                if replica.welcomed:
                    self._send_leave(replica)
            case "hang":  # for the maximum duration of a step, while all else stands still
                replica.hangs, replica.hung_ms = True, self._now_ms
                self._run_ticks(2)
            case "wake":
                self._wake(replica)
            case "silence":
                self._run_ticks(TIMEOUTS.heartbeat_timeout_ms // TIMEOUTS.quorum_tick_ms, silent=replica.name)
                self._restart_hang_times()
            case "echo":  # the last messages of the stream before the newest one arrive now
                older = 100 * replica.number + replica.num_streams - 1
                member = self._member(replica)
                self._send(events.QuorumRequested(older, replica.num_requests + 1, member, replica.held))
                self._send(events.DeathReported(older, "an echo"))
                self._send(events.StreamClosed(older))
            case _:
                raise AssertionError(f"no such event: {what}")

    def state(self) -> object:
        return frozen((self._core, self._replicas, self._now_ms, self._broken))

    def calm_down(self) -> None:
        """Let all live replicas come back and ask repeatedly. Soon they must be in one quorum, and in one state."""
        alive = [each for each in self._replicas.values() if not (each.dead or each.refused or each.left)]
        names = tuple(replica.name for replica in alive)
        if len(names) < self._config.min_replicas:
            return
        for replica in self._replicas.values():  # remains of dead replicas end, and deaf streams are noticed
            if (replica.dead or replica.deaf or replica.left) and replica.stream is not None:
                self._close(replica)
            if replica.hangs:
                self._wake(replica)
        num_ticks = (2 * TIMEOUTS.heartbeat_timeout_ms + TIMEOUTS.join_timeout_ms) // TIMEOUTS.quorum_tick_ms + 2
        for _ in range(num_ticks):
            for replica in alive:
                if replica.stream is None:
                    self._connect(replica)
                if replica.request is None and not replica.refused:
                    self._ask(replica)
            self._run_ticks(1)
            self._check()
            newest = self._core.quorum(JOB)
            one_state = len({(replica.step, replica.lineage) for replica in alive}) == 1
            together = newest is not None and newest.replica_ids == names
            if together and one_state and {replica.held for replica in alive} == {newest.key if newest else None}:
                return
        newest = self._core.quorum(JOB)
        shown = newest.replica_ids if newest is not None else "none"
        raise InvariantError("I6", f"{names} are alive, and the quorum is {shown}: {self._core.waiting_for(JOB)}")

    # --- what happens -----------------------------------------------------------------------------------------------

    def _new_lighthouse(self) -> None:
        self._num_lighthouses += 1
        self._core = LighthouseCore(
            self._config,
            started_ms=WALL_MS + self._now_ms,
            cluster_id=f"cluster-{self._num_lighthouses}",
            nonces=self._nonce,
            now_ms=self._now_ms,
        )
        self._life_began_ms = self._now_ms
        self._liveness = LivenessTruths(self._new_liveness)
        self._broken.clear()

    def _new_liveness(self) -> LivenessTruth:
        return LivenessTruth(self._config.min_replicas, on_broken=self._note_broken, timeouts=TIMEOUTS)

    def _note_broken(self, key: QuorumKey, who: str) -> None:
        self._broken.add((key, who))

    def _nonce(self) -> int:
        self._num_quorums += 1
        return self._num_quorums

    def _restart(self) -> None:
        self._now_ms += TIMEOUTS.quorum_tick_ms
        self._new_lighthouse()
        for replica in self._replicas.values():
            replica.stream, replica.welcomed, replica.deaf = None, False, False

    def _run_ticks(self, num_ticks: int, *, silent: str = "") -> None:
        for _ in range(num_ticks):
            self._now_ms += TIMEOUTS.quorum_tick_ms
            self._perform(self._core.tick(self._now_ms, WALL_MS + self._now_ms))
            for replica in self._replicas.values():
                if replica.stream is not None and replica.welcomed and replica.name != silent:
                    progress = BUSY_FOR_LONG if replica.hangs else None
                    replica.reported_busy = replica.hangs
                    self._send(events.BeatReceived(replica.stream, progress=progress))
            waits = self._core.waiting_for(JOB)
            starts = self._now_ms - self._life_began_ms < TIMEOUTS.reconnect_grace_ms
            if not starts and not waits.startswith("the members of quorum"):
                self._liveness.of(JOB).check_wait(waits, self._now_ms)

    def _stream(self, replica: _Replica) -> int:
        assert replica.stream is not None
        return replica.stream

    def _connect(self, replica: _Replica) -> None:
        """Say hello on a new stream. The lighthouse may not have noticed that the older one is gone."""
        replica.num_streams += 1
        replica.stream = 100 * replica.number + replica.num_streams
        replica.deaf = False
        self._send_hello(replica)

    def _send_hello(self, replica: _Replica) -> None:
        replica.welcomed = False
        address, held, left = f"{replica.name}:1", replica.held, replica.left
        hello = Hello(JOB, replica.name, replica.session, address, ready=replica.ready, held=held, left=left)
        self._send(events.HelloReceived(self._stream(replica), hello))

    def _close(self, replica: _Replica) -> None:
        stream, replica.stream = self._stream(replica), None
        replica.welcomed, replica.deaf = False, False
        self._send(events.StreamClosed(stream))

    def _send_leave(self, replica: _Replica) -> None:
        self._send(events.LeaveReceived(self._stream(replica), "it was told to", serve_ms=10_000))

    def _wake(self, replica: _Replica) -> None:
        """End a hang. A replica that was lost meanwhile opens a newer session."""
        replica.hangs, replica.hung_ms = False, 0
        if replica.held_back:
            self._open_newer(replica)

    def _open_newer(self, replica: _Replica) -> None:
        replica.session += 1
        replica.held_back = False
        if replica.stream is not None:
            self._send_hello(replica)

    def _member(self, replica: _Replica) -> Member:
        return Member(
            replica.name,
            address=f"{replica.name}:1",
            step=replica.step,
            lineage=replica.lineage,
            live=replica.live,
            needs_configure=any(key == replica.held for key, _ in replica.notices),
            init_sync=False,
        )

    def _ask(self, replica: _Replica) -> None:
        replica.ready = True
        replica.num_requests += 1
        replica.request = replica.num_requests
        if replica.welcomed:
            self._send_request(replica)

    def _send_request(self, replica: _Replica) -> None:
        assert replica.request is not None
        member = self._member(replica)
        replica.reported_busy = False
        self._send(events.QuorumRequested(self._stream(replica), replica.request, member, replica.held))

    def _send(self, event: events.LighthouseEvent) -> None:
        self._liveness.heard(event, self._now_ms)
        self._perform(self._core.handle(event, self._now_ms, WALL_MS + self._now_ms))

    def _perform(self, orders: list[effects.LighthouseEffect]) -> None:
        """Deliver all effects at once, in order. Answers to them come after all of them."""
        for order in orders:
            self._liveness.decided(order, self._now_ms)
        for order in orders:
            match order:
                case effects.QuorumFormed():
                    self._invariants.formed(order.quorum)
                    self._restart_hang_times()
                case effects.ReplicaLost():
                    self._lost(order)
                case effects.ReplicaLeft() | effects.JobEnded() | effects.Warned() | effects.TellWait():
                    pass
                case effects.JobFailed():
                    raise order.error
                case _:
                    self._hear(order)

    def _lost(self, order: effects.ReplicaLost) -> None:
        if not order.reason.startswith("its trainer hangs"):
            return
        self._lost_by_hang_ms = self._now_ms
        if not self._replicas[order.replica_id].reported_busy:
            raise InvariantError("H1", f"{order.replica_id} is lost for a hang, and did not report one")

    def _hear(self, order: Any) -> None:
        replica = next((each for each in self._replicas.values() if each.stream == order.stream), None)
        if replica is None:
            return
        if isinstance(order, effects.AnswerQuorum):
            self._invariants.answered(replica.name, order.quorum)
        if isinstance(order, effects.Welcome):
            self._restart_hang_times()  # the replica has come, whether it hears of that or not
        if replica.deaf:
            return
        match order:
            case effects.Welcome():
                replica.welcomed, replica.held_back = True, False
                if replica.left:
                    self._send_leave(replica)
                if replica.request is not None:
                    self._send_request(replica)
            case effects.TellLost():
                if order.session == replica.session and not replica.hangs:
                    self._open_newer(replica)
                elif order.session == replica.session:
                    replica.welcomed, replica.held_back = False, True
            case effects.RefuseSession():
                replica.refused = order.refusal is Refusal.DEAD
                if not replica.dead and not replica.refused:
                    raise InvariantError("I9", f"{replica.name} is alive and is refused: {order.message}")
                self._close(replica)
            case effects.RefuseRequest():
                if order.request == replica.request:
                    replica.request = None
            case effects.AskForQuorum():
                held = replica.quorum if replica.quorum is not None and replica.quorum.key == order.key else None
                self._send(events.QuorumReported(order.stream, held))
            case effects.NotifyLoss():
                replica.notices.add((order.notice.key, order.notice.replica_id))
            case effects.AnswerQuorum():
                if order.request == replica.request:
                    self._commit(replica, order.quorum)
            case effects.AnswerUnchanged():
                if order.request == replica.request:
                    if replica.quorum is None or replica.quorum.key != order.key:
                        raise InvariantError("I2", f"{replica.name} receives 'unchanged' for {order.key}, and lacks it")
                    self._commit(replica, Quorum(order.key, tuple(self._as_own(replica, replica.quorum))))

    def _as_own(self, replica: _Replica, quorum: Quorum) -> list[Member]:
        """Return the members of an unchanged quorum: every member is where the asker is."""
        own = replace(self._member(replica), live=True, needs_configure=False)
        return [
            replace(own, replica_id=each.replica_id, session=each.session, address=each.address)
            for each in quorum.members
        ]

    def _commit(self, replica: _Replica, quorum: Quorum) -> None:
        """Heal if needed, reduce, and commit, all at once."""
        self._invariants.received(replica.name, quorum.key)
        common = assign(quorum)
        replica.request, replica.quorum, replica.held = None, quorum, quorum.key
        replica.step, replica.live = common.step + 1, True
        replica.lineage = fold_lineage(common.lineage, quorum.key, replica.step)
        replica.notices = {(key, who) for key, who in replica.notices if key >= quorum.key}

    def _check(self) -> None:
        """Check that reachable holders of a broken quorum were told, and that hanging replicas are lost."""
        for replica in self._replicas.values():
            self._check_hang(replica)
        for key, who in self._broken:
            for replica in self._replicas.values():
                reached = replica.welcomed and not replica.deaf and not replica.dead and replica.name != who
                if reached and replica.held == key and not any(key == broken for broken, _ in replica.notices):
                    raise InvariantError("P3", f"{replica.name} holds {key}, which {who} left, and got no loss notice")

    def _restart_hang_times(self) -> None:
        """Restart the hang times: a replica came, or there is a new quorum, so no replica is the spared last holder
        now."""
        for replica in self._replicas.values():
            replica.hung_ms = self._now_ms if replica.hangs else 0

    def _check_hang(self, replica: _Replica) -> None:
        """Check that a hanging replica is lost. Only one at a time is lost, and never the last holder of the state."""
        if not replica.hangs or not replica.welcomed or replica.deaf or replica.dead:
            return
        liveness = self._liveness.of(JOB)
        if not liveness.is_alive(replica.name) or liveness.is_last_holder(replica.name):
            return
        since_ms = max(replica.hung_ms, self._lost_by_hang_ms + TIMEOUTS.heartbeat_timeout_ms)
        if self._now_ms - since_ms >= 2 * TIMEOUTS.quorum_tick_ms:  # a beat has reported it, and a tick has come since
            raise InvariantError("H2", f"{replica.name} hangs since {since_ms} ms, is reachable, and is not lost")


# --- the group --------------------------------------------------------------------------------------------------------


class GroupWorld:
    """A manager server and the two ranks of its group. The lighthouse answers on command."""

    def __init__(self) -> None:
        self._timeouts = TIMEOUTS
        self._core = ReplicaGroupCore(
            replica_id="a", address="a:1", store_address="a:2", world_size=2, timeouts=self._timeouts
        )
        self._now_ms = 0
        self._calls = 0
        self._open: dict[int, tuple[int, str, QuorumKey | None]] = {}  # call -> (rank, its question, its quorum)
        self._streams: dict[int, int] = {0: 1, 1: 2}
        self._num_streams = 2
        self._request: int | None = None
        self._id = 0
        self._key: QuorumKey | None = None
        self._votes: dict[QuorumKey | None, dict[int, bool]] = {}
        self._verdicts: dict[QuorumKey | None, bool] = {}
        self._planned: set[int] = set()  # ranks that have a plan and have not asked for the next
        self._dead: set[int] = set()
        for rank in (0, 1):
            self._send(events.RankConnected(rank, self._streams[rank], session=1))

    def choices(self) -> Sequence[str]:
        found = []
        for rank in (0, 1):
            if rank in self._dead:
                continue
            found += [f"ask {rank}", f"die {rank}"]
            found += [f"yes {rank}", f"no {rank}"] if rank in self._planned else []
            found.append(f"break {rank}" if rank in self._streams else f"connect {rank}")
            if any(whose == rank for whose, *_ in self._open.values()):
                found.append(f"withdraw {rank}")
        if self._request is not None:
            found += ["quorum", "unchanged", "refuse"]
        return [*found, "notice", "grace", "deadline"]

    def happen(self, choice: str) -> None:
        what, _, rank = choice.partition(" ")
        if rank:
            self._rank_event(what, int(rank))
            return
        match what:
            case "quorum":
                self._id += 1
                member = Member("a", address="a:1", step=3, lineage=1, world_size=2, init_sync=False)
                self._key = QuorumKey(self._id, 1)
                self._send(events.QuorumArrived(self._take_request(), Quorum(self._key, (member,))))
            case "unchanged":
                self._send(events.UnchangedArrived(self._take_request(), QuorumKey(self._id, 1)))
            case "refuse":
                self._send(events.RequestRefused(self._take_request(), "lost", "it was lost"))
            case "notice":
                self._send(events.LossNoticed(LossNotice(QuorumKey(self._id + 1, 1), "b", 1, "gone")))
            case "grace" | "deadline":
                self._now_ms += self._timeouts.reconnect_grace_ms if what == "grace" else 5_000
                self._perform(self._core.tick(self._now_ms))
            case _:
                raise AssertionError(f"no such event: {choice}")

    def _take_request(self) -> int:
        assert self._request is not None
        request, self._request = self._request, None
        return request

    def _rank_event(self, what: str, rank: int) -> None:
        match what:
            case "ask":
                self._planned.discard(rank)
                call = self._call(rank, "quorum")
                request = RankRequest(step=3, lineage=1, held=self._key)
                self._send(events.RankAsked(rank, call, request, self._now_ms + 5_000))
            case "yes" | "no":
                known = self._votes.setdefault(self._key, {})
                known.setdefault(rank, what == "yes")
                call = self._call(rank, "vote")
                deadline_ms = self._now_ms + 5_000
                vote = events.RankVoted(rank, call, self._key, 3, Purpose.COMMIT, what == "yes", deadline_ms)
                self._send(vote)
            case "die":
                self._dead.add(rank)
                self._streams.pop(rank, None)
                self._send(events.RankDied(rank, "killed"))
            case "break":
                self._send(events.RankDisconnected(rank, self._streams.pop(rank)))
            case "connect":
                self._num_streams += 1
                self._streams[rank] = self._num_streams
                self._send(events.RankConnected(rank, self._num_streams, session=1))
            case "withdraw":
                for call in [call for call, (whose, *_) in self._open.items() if whose == rank]:
                    del self._open[call]
                    self._send(events.RankWithdrew(rank, call))

    def _call(self, rank: int, what: str) -> int:
        self._calls += 1
        if what == "vote":  # a repeated vote replaces the older call
            self._open = {call: each for call, each in self._open.items() if each[:2] != (rank, what)}
        self._open[self._calls] = rank, what, self._key
        return self._calls

    def state(self) -> object:
        own = (self._now_ms, self._id, self._request, self._planned, self._dead, self._streams, self._open)
        return frozen((self._core, own, self._votes, self._verdicts))

    def calm_down(self) -> None:
        """Let every deadline pass. Every call must have an answer."""
        self._now_ms += 5_000 + self._timeouts.reconnect_grace_ms
        self._perform(self._core.tick(self._now_ms))
        waiting = [what for _, what, _ in self._open.values()]
        if waiting:
            raise InvariantError("I5", f"calls have no answer after every deadline: {waiting}")
        due_ms = self._core.next_deadline_ms()
        if due_ms is not None:
            raise InvariantError("I5", f"no call is open at {self._now_ms} ms, and a deadline is set for {due_ms} ms")

    def _send(self, event: events.GroupEvent) -> None:
        self._perform(self._core.handle(event, self._now_ms))

    def _perform(self, orders: list[effects.GroupEffect]) -> None:
        for order in orders:
            match order:
                case effects.AskLighthouse():
                    asking = {rank for rank, what, _ in self._open.values() if what == "quorum"}
                    if asking != {0, 1} or self._core.lost is not None:
                        raise InvariantError("I2", f"the group asks for a quorum, and only ranks {asking} have asked")
                    self._request = order.request
                case effects.WithdrawFromLighthouse():
                    self._request = None
                case effects.AnswerPlan() | effects.AnswerRankUnchanged():
                    self._answered(order.call, order.rank)
                    self._planned.add(order.rank)
                case effects.FailRank():
                    self._answered(order.call, order.rank)
                case effects.AnswerVote():
                    self._decided(self._answered(order.call, order.rank), order.verdict.yes)
                case _:
                    pass

    def _answered(self, call: int, rank: int) -> QuorumKey | None:
        """Check that a call is answered once, to its own rank, unless it was withdrawn. Returns: its quorum."""
        whose, _, key = self._open.pop(call, (None, "", None))
        if whose != rank:
            raise InvariantError("I5", f"the answer to call {call} of rank {whose} went to rank {rank}")
        return key

    def _decided(self, key: QuorumKey | None, verdict: bool) -> None:
        votes = self._votes.get(key, {})
        if verdict and not (len(votes) == 2 and all(votes.values())):
            raise InvariantError("I5", f"the verdict is yes with votes {votes} in {key}")
        if self._verdicts.setdefault(key, verdict) != verdict:
            raise InvariantError("I5", f"a rank received both yes and no in {key}")
