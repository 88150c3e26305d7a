"""The watch over ends: each trainer that ends itself must have a reason.

A trainer may end because of an event in itself, its group or its job. It may not end because the lighthouse died, slept
or could not be reached. It may not end because a core takes a healthy replica for dead, duplicated or different. So the
watch compares each end with the events that the cluster knows of.

Law of this file: observe only, as in `invariants.py`. It needs the cluster to know the events of each process.
"""

from __future__ import annotations

from collections.abc import Iterator

from tft_coord.core.fingerprint import Fingerprint
from tft_coord.core.lighthouse import CLOCKS_DIFFER_MOST_MS
from tft_coord.core.types import Hello, Quorum, QuorumKey, RankRequest, Refusal
from tft_sim.invariants import InvariantError
from tft_sim.lighthouse_process import JOB
from tft_sim.manager_process import ManagerProcess, Replica
from tft_sim.process import State
from tft_sim.rank import Rank
from tft_sim.waiting import Refused
from tft_sim.watched import World


class EndTruth:
    """The checks I8 and I9: a trainer that ends itself has a reason, and the answer names it (design.md section 10).

    Args:
        cluster: the watched cluster.
    """

    def __init__(self, cluster: World) -> None:
        self._cluster = cluster
        self._deaths: set[str] = set()  # replica ids of groups whose end was reported
        self._lost: set[str] = set()  # hosts whose manager server has found that a rank is gone
        self._away_ms: dict[ManagerProcess, dict[int, int]] = {}  # start of the absence of each rank's stream
        self._torn: set[str] = set()  # hosts that were given a quorum without a whole state
        self._asked: dict[str, RankRequest] = {}  # newest request of each rank, with what it said of its state
        self._refused: set[tuple[str, str]] = set()  # ranks that were refused something for a reason, and the code
        self._keys: dict[str, set[QuorumKey]] = {}  # quorums that the manager servers of each host were given

    def rank_stream_closed(self, manager: ManagerProcess, rank: int) -> None:
        """Record that a manager server has noticed the end of a rank's newest stream."""
        self._away_ms.setdefault(manager, {})[rank] = self._cluster.clock.now_ms

    def rank_stream_opened(self, manager: ManagerProcess, rank: int) -> None:
        """Record that the rank has another stream."""
        self._away_ms.get(manager, {}).pop(rank, None)

    def quorum_received(self, manager: ManagerProcess, quorum: Quorum) -> None:
        """Record that a manager server has received a quorum."""
        if all(self._may_be_torn(each) for each in quorum.replica_ids):
            self._torn.add(manager.replica.host)
        self._keys.setdefault(manager.replica.host, set()).add(quorum.key)

    def requested(self, trainer: Rank, request: RankRequest) -> None:
        """Record a rank's request to its manager server for a quorum."""
        self._asked[trainer.name] = request

    def death_reported(self, manager: ManagerProcess, reason: str) -> None:
        """Check that a manager server reports its group as lost only if a rank has ended, or was away for a grace."""
        replica, now_ms = manager.replica, self._cluster.clock.now_ms
        grace_ms = self._cluster.timeouts.reconnect_grace_ms
        away = any(now_ms - since_ms >= grace_ms for since_ms in self._away_ms.get(manager, {}).values())
        gone = any(not trainer.alive or trainer.left for trainer in replica.trainers)
        if not (away or gone or replica.ended):
            raise InvariantError(
                "I8", f"the death of {replica.host} is reported ({reason}), and all its ranks are alive"
            )
        self._deaths.add(replica.replica_id)
        self._lost.add(replica.host)

    def gave_up(self, replica: Replica, trainer: Rank, answer: Refused, deadline_ms: int) -> None:
        """Check that a rank's failed request was not cut short of its deadline."""
        if self._has_reason(replica, answer.code):
            self._refused.add((trainer.name, answer.code))
        if answer.code == "deadline" and self._cluster.clock.now_ms < deadline_ms:
            raise InvariantError(
                "I8", f"{trainer.name} receives a deadline error before its deadline, {deadline_ms} ms"
            )

    def no_verdict(self, replica: Replica, trainer: Rank, since_ms: int) -> None:
        """Check a rank that received no verdict in time, and ends with its group: its manager server was out of
        reach."""
        manager = replica.manager
        if manager is None or manager.state is not State.RUNNING or replica.ended:
            return
        felt_ms = self._cluster.network.calm_since_ms(trainer.name, manager.name)
        if max(felt_ms, manager.running_since_ms, trainer.running_since_ms) <= since_ms:
            raise InvariantError(
                "I5", f"{trainer.name} has voted at {since_ms} ms, was reachable since, and has no verdict"
            )

    def refused(self, hello: Hello, refusal: Refusal, message: str) -> None:
        """Check that a refused session has a sound reason. After some refusals the replica does not end yet."""
        lives = self._lives_of(hello.replica_id)
        replica = next(each for each in lives if hello.address.startswith(f"{each.host}/"))
        match refusal:
            case Refusal.OLD_LIGHTHOUSE:
                sound = self._cluster.standby is not None
            case Refusal.STALE if replica.manager is not None and replica.manager.session.session > hello.session:
                sound = True  # the refusal was late, because the replica has a newer stream
            case Refusal.DUPLICATE | Refusal.STALE:
                # The lighthouse may take the replica's previous manager server for live for a while.
                sound = replica.num_managers > 1 or self._has_reason(replica, Refusal.DUPLICATE.value)
            case Refusal.MALFORMED:
                sound = False
            case Refusal.CLOCK:
                sound = hello.session > self._cluster.wall_ms + CLOCKS_DIFFER_MOST_MS
            case _:
                sound = self._has_reason(replica, refusal.value)
        if not sound:
            raise InvariantError("I9", f"{replica.host} is refused ({refusal.value}) without a reason: {message}")

    def ended(self, replica: Replica, trainer: Rank, reason: str, answer: Refused) -> None:
        """Check that a trainer ends itself only for a reason, and that the answer names it."""
        # The training loop reaches its end a while after the answer.
        if (trainer.name, answer.code) not in self._refused and not self._has_reason(replica, answer.code):
            raise InvariantError("I8", f"{trainer.name} ends ({reason}) without a cause: {answer.message}")
        keys = self._keys.get(replica.host, set())
        names = [replica.replica_id, *self._cluster.torchft, *map(str, keys)]
        if not reason.startswith("vote") and not any(name in answer.message for name in names):
            raise InvariantError(
                "I9",
                f"{trainer.name} ends ({reason}) with an error that names no replica and no quorum: {answer.message!r}",
            )

    def _has_reason(self, replica: Replica, code: str) -> bool:
        match code:
            case "group_lost":
                return replica.host in self._lost
            case "manager_died":
                return replica.world_size > 1 and (replica.manager is None or not replica.manager.alive)
            case "no_verdict":
                return True  # checked when the deadline passed
            case "unloadable":
                return any(trainer.recovery.failed_loads > 1 for trainer in replica.trainers)
            case "diverged":
                return any(
                    trainer.recovery.num_corruptions for each in self._cluster.lives for trainer in each.trainers
                )
            case Refusal.DEAD.value:
                replaced = any(each.replaces == replica.replica_id for each in self._cluster.lives)
                return replaced or replica.replica_id in self._deaths
            case Refusal.DUPLICATE.value:
                return any(each.host != replica.host for each in self._lives_of(replica.replica_id))
            case Refusal.OTHER_KIND.value:
                return replica.job == JOB and len(self._cluster.torchft) > 0
            case Refusal.DIFFERS.value:
                return any(self._evicts(other, replica) for other in self._cluster.lives)
            case Refusal.AHEAD.value:
                return any(self._is_behind(other, replica) for other in self._cluster.lives)
            case Refusal.OVER.value:
                finished = [trainer.finished_step for other in self._cluster.lives for trainer in other.trainers]
                own = min(trainer.step for trainer in replica.trainers)
                return any(step is not None and step > own for step in finished)
            case Refusal.MALFORMED.value:
                return replica.host in self._torn
            case _:
                return False

    def _lives_of(self, replica_id: str) -> Iterator[Replica]:
        return (each for each in self._cluster.lives if each.replica_id == replica_id)

    def _evicts(self, other: Replica, replica: Replica) -> bool:
        """Return whether the other replica differs, and its claim has equal weight: training outweighs a fresh
        start."""
        if other.job != replica.job or _fingerprint(other) == _fingerprint(replica):
            return False
        # A member may not have received its quorum yet.
        stands = _has_trained(other) or self._cluster.our_lighthouse.liveness_of(other.job).is_member(other.replica_id)
        return not _has_trained(replica) or stands

    def _is_behind(self, other: Replica, replica: Replica) -> bool:
        """Return whether the other replica has the job's own state, and this one is ahead with a state from outside."""
        if other.job != replica.job or other.replica_id == replica.replica_id:
            return False
        loaded = not all(trainer.live for trainer in replica.trainers)
        live = any(trainer.live for trainer in other.trainers)
        return loaded and live and _step(replica) > _step(other)

    def _may_be_torn(self, replica_id: str) -> bool:
        """Return whether the replica's ranks hold different or incomplete states, by their newest requests.

        The live state of a rank may differ from its request by now.
        """
        for replica in self._lives_of(replica_id):
            requests = [self._asked[each.name] for each in replica.trainers if each.name in self._asked]
            if len({(each.step, each.lineage) for each in requests}) > 1 or any(each.torn for each in requests):
                return True
        return False


def _fingerprint(replica: Replica) -> Fingerprint:
    return replica.trainers[0].settings.fingerprint(replica.world_size)


def _has_trained(replica: Replica) -> bool:
    return any(trainer.held is not None for trainer in replica.trainers)


def _step(replica: Replica) -> int:
    return min(trainer.step for trainer in replica.trainers)
