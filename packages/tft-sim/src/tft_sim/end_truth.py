"""The watch over ends: which trainer ends itself, and whether it has to.

A trainer may end because of what happened to it, to its group, or to the job that it is in. It may not end because the
lighthouse died, slept or could not be reached, nor because a core takes a sound one for one that is dead, that is there
twice or that differs. So each end is held against what the cluster knows to have happened.

Law of this file: looking on, as in `invariants.py`; it needs the cluster to know what has happened to whom.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tft_coord.core.fingerprint import Fingerprint
from tft_coord.core.lighthouse import CLOCKS_DIFFER_MOST_MS
from tft_coord.core.types import Hello, Quorum, QuorumKey, RankRequest, Refusal
from tft_sim.invariants import InvariantBroken
from tft_sim.lighthouse_process import JOB
from tft_sim.process import State
from tft_sim.trainer import Trainer
from tft_sim.waiting import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tft_sim.cluster import Cluster, Replica
    from tft_sim.manager_process import ManagerProcess


class EndTruth:
    """Whether a trainer that ends itself has a reason to, I8, and has heard it by name, I9 (design.md section 10).

    Args:
        cluster: that it watches.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._deaths: set[str] = set()  # replica ids of groups whose end was reported
        self._lost: set[str] = set()  # hosts whose manager server has found that a rank is gone
        self._away_ms: dict[ManagerProcess, dict[int, int]] = {}  # since when each rank's stream is
        self._torn: set[str] = set()  # hosts that were given a quorum in which nobody has a whole state
        self._asked: dict[str, RankRequest] = {}  # by each rank, what it has said of its state last
        self._refused: set[tuple[str, str]] = set()  # ranks that were refused something with a reason, and the code
        self._keys: dict[str, set[QuorumKey]] = {}  # of the quorums that the manager servers of each host were given

    def rank_went(self, manager: ManagerProcess, rank: int) -> None:
        """A manager server has heard that a rank's newest stream is gone."""
        self._away_ms.setdefault(manager, {})[rank] = self._cluster.clock.now_ms

    def rank_came(self, manager: ManagerProcess, rank: int) -> None:
        """That rank has another stream."""
        self._away_ms.get(manager, {}).pop(rank, None)

    def given(self, manager: ManagerProcess, quorum: Quorum) -> None:
        """A manager server has got a quorum."""
        if all(self._may_be_torn(each) for each in quorum.replica_ids):
            self._torn.add(manager.replica.host)
        self._keys.setdefault(manager.replica.host, set()).add(quorum.key)

    def asks(self, trainer: Trainer, request: RankRequest) -> None:
        """A rank asks its manager server for a quorum."""
        self._asked[trainer.name] = request

    def death_reported(self, manager: ManagerProcess, reason: str) -> None:
        """A manager server takes its group for lost: a rank has ended, or was away for a grace."""
        replica, now_ms = manager.replica, self._cluster.clock.now_ms
        grace_ms = self._cluster.timeouts.reconnect_grace_ms
        away = any(now_ms - since_ms >= grace_ms for since_ms in self._away_ms.get(manager, {}).values())
        gone = any(not trainer.alive or trainer.left for trainer in replica.trainers)
        if not (away or gone or replica.ended):
            raise InvariantBroken("I8", f"the end of {replica.host} is reported ({reason}), and all of it lives")
        self._deaths.add(replica.replica_id)
        self._lost.add(replica.host)

    def gave_up(self, replica: Replica, trainer: Trainer, answer: Refused, deadline_ms: int) -> None:
        """A rank's request has failed: the time that it was given is not cut short."""
        if self._has_to(replica, answer.code):
            self._refused.add((trainer.name, answer.code))
        if answer.code == "deadline" and self._cluster.clock.now_ms < deadline_ms:
            raise InvariantBroken("I8", f"{trainer.name} is told that it has no more time, until {deadline_ms} ms")

    def no_verdict(self, replica: Replica, trainer: Trainer, since_ms: int) -> None:
        """A rank has got no verdict in time, and ends with its group: nothing came through, or nobody answered."""
        manager = replica.manager
        if manager is None or manager.state is not State.RUNNING or replica.ended:
            return
        felt_ms = self._cluster.network.calm_since_ms(trainer.name, manager.name)
        if max(felt_ms, manager.running_since_ms, trainer.running_since_ms) <= since_ms:
            raise InvariantBroken("I5", f"{trainer.name} votes since {since_ms} ms, within reach, and gets no verdict")

    def refused(self, hello: Hello, refusal: Refusal, message: str) -> None:
        """A lighthouse refuses a session; for some reasons that is not the end yet."""
        lives = self._lives_of(hello.replica_id)
        replica = next(each for each in lives if hello.address.startswith(f"{each.host}/"))
        match refusal:
            case Refusal.OLD_LIGHTHOUSE:
                sound = self._cluster.standby is not None
            case Refusal.STALE if replica.manager is not None and replica.manager.session.session > hello.session:
                sound = True  # said on a stream that it has given up since, it was late: a newer one stands
            case Refusal.DUPLICATE | Refusal.STALE:
                # The manager server that it had before may be taken to live for a while.
                sound = replica.num_managers > 1 or self._has_to(replica, Refusal.DUPLICATE.value)
            case Refusal.MALFORMED:
                sound = False
            case Refusal.CLOCK:
                sound = hello.session > self._cluster.wall_ms + CLOCKS_DIFFER_MOST_MS
            case _:
                sound = self._has_to(replica, refusal.value)
        if not sound:
            raise InvariantBroken("I9", f"{replica.host} is refused ({refusal.value}), and nothing is wrong: {message}")

    def ended(self, replica: Replica, trainer: Trainer, reason: str, answer: Refused) -> None:
        """A trainer ends itself, because it was refused something."""
        # Its training loop comes to that a while after the answer.
        if (trainer.name, answer.code) not in self._refused and not self._has_to(replica, answer.code):
            raise InvariantBroken("I8", f"{trainer.name} ends ({reason}), and has no reason to: {answer.message}")
        keys = self._keys.get(replica.host, set())
        names = [replica.replica_id, *self._cluster.torchft, *map(str, keys)]
        if not reason.startswith("vote") and not any(name in answer.message for name in names):
            raise InvariantBroken("I9", f"{trainer.name} ends ({reason}), and this names nobody: {answer.message!r}")

    def _has_to(self, replica: Replica, code: str) -> bool:
        match code:
            case "group_lost":
                return replica.host in self._lost
            case "manager_died":
                return replica.world_size > 1 and (replica.manager is None or not replica.manager.alive)
            case "no_verdict":
                return True  # looked at when the time was over
            case "unloadable":
                return any(trainer.recovery.failed_loads > 1 for trainer in replica.trainers)
            case "diverged":
                return any(trainer.recovery.astray for each in self._cluster.lives for trainer in each.trainers)
            case Refusal.DEAD.value:
                replaced = any(each.replaces == replica.replica_id for each in self._cluster.lives)
                return replaced or replica.replica_id in self._deaths
            case Refusal.DUPLICATE.value:
                return any(each.host != replica.host for each in self._lives_of(replica.replica_id))
            case Refusal.OTHER_KIND.value:
                return replica.job == JOB and len(self._cluster.torchft) > 0
            case Refusal.DIFFERS.value:
                return any(self._turns_out(other, replica) for other in self._cluster.lives)
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

    def _turns_out(self, other: Replica, replica: Replica) -> bool:
        """Whether that one differs, and what it says weighs as much: who has trained yields to none that has not."""
        if other.job != replica.job or _fingerprint(other) == _fingerprint(replica):
            return False
        # A member may not have heard of its quorum.
        stands = _has_trained(other) or self._cluster.our_lighthouse.attendance_of(other.job).is_member(
            other.replica_id
        )
        return not _has_trained(replica) or stands

    def _is_behind(self, other: Replica, replica: Replica) -> bool:
        """Whether that one has a state of this job's own, and this one is ahead of it with one loaded from outside."""
        if other.job != replica.job or other.replica_id == replica.replica_id:
            return False
        loaded = not all(trainer.live for trainer in replica.trainers)
        live = any(trainer.live for trainer in other.trainers)
        return loaded and live and _step(replica) > _step(other)

    def _may_be_torn(self, replica_id: str) -> bool:
        """Whether its ranks hold different states, or half of one: as they said, for it may be another one by now."""
        for replica in self._lives_of(replica_id):
            said = [self._asked[each.name] for each in replica.trainers if each.name in self._asked]
            if len({(each.step, each.lineage) for each in said}) > 1 or any(each.torn for each in said):
                return True
        return False


def _fingerprint(replica: Replica) -> Fingerprint:
    return replica.trainers[0].settings.fingerprint(replica.world_size)


def _has_trained(replica: Replica) -> bool:
    return any(trainer.held is not None for trainer in replica.trainers)


def _step(replica: Replica) -> int:
    return min(trainer.step for trainer in replica.trainers)
