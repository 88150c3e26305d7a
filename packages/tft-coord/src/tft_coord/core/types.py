"""The values of the protocol: members, quorums, keys and states.

A quorum is named by its key, the pair of an id that only rises and a random nonce. No restart can therefore make two
quorums share a name. A replica's state is named by its step and its lineage, because two replicas can reach the same
step by different ways.

Law of this file: frozen values without behaviour beyond checking and comparing themselves.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

from tft_coord.core.fingerprint import Fingerprint
from tft_coord.errors import ProtocolError

MAX_UINT64 = 2**64 - 1
MAX_INT64 = 2**63 - 1
UNREACHED_MOST = 64  # in one request
TRIED_MOST = 16  # peers of one trial
POOR_SOURCES_MOST = 16  # in one member's request


@dataclass(frozen=True, slots=True, order=True)
class QuorumKey:
    """The name of a quorum: (id, nonce). Orders by id, then nonce.

    Source: docs/protocol/sessions-and-quorums.md, "Id and nonce".
    """

    quorum_id: int
    nonce: int

    def __post_init__(self) -> None:
        if not 0 <= self.quorum_id <= MAX_INT64:
            raise ProtocolError(f"quorum id {self.quorum_id} is outside 0..2^63-1; the peer speaks another protocol")
        if not 0 <= self.nonce <= MAX_UINT64:
            raise ProtocolError(f"nonce {self.nonce} is outside 0..2^64-1; the peer speaks another protocol")

    def __str__(self) -> str:
        return f"{self.quorum_id}.{self.nonce:016x}"


def _check_names(**names: str) -> None:
    """Check that names are printable, because a log line contains them. Raises: ProtocolError: one would break the
    line."""
    for what, name in names.items():
        if not name.isprintable():
            raise ProtocolError(f"{what} is {name[:80]!r}; give printable characters only, without line breaks")


class Via(enum.Enum):
    """The port of a member that another member uses."""

    STORE = "store"  # its rendezvous store
    GROUP = "group"  # its port in the process group
    STATE = "state"  # its state server


@dataclass(frozen=True, slots=True)
class Unreached:
    """A report that a member could not reach another one, or got nothing from it.

    Args:
        replica_id: of the other one.
        via: the port that was tried.
        why: one sentence for the log, or "".
    """

    replica_id: str
    via: Via
    why: str = ""

    def __post_init__(self) -> None:
        if not self.replica_id:
            raise ProtocolError("a report of a peer that was not reached has no replica id; name the peer")
        _check_names(replica_id=self.replica_id, why=self.why)


@dataclass(frozen=True, slots=True)
class PeerAddresses:
    """The addresses of a member, each `host:port`."""

    replica_id: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """One replica group as a member of a quorum, or as it asks for one.

    Args:
        replica_id: unique name of the replica group's life, `name:uuid4`.
        session: number of the manager server's session; 0 for clients without a stream. Set by the lighthouse.
        address: of its manager server, `host:port`.
        store_address: of its rendezvous store, `host:port`.
        step: committed steps.
        lineage: 64-bit digest of the way it came to that step; None when unknown, which equals nothing.
        world_size: processes in the group; 0 from a torchft client that does not say.
        shrink_only: the next quorum must have only members of the previous one.
        commit_failures: failed commits in a row, the maximum over its ranks.
        needs_configure: its process group can't be used: aborted, failed or never configured.
        live: its state was committed or healed in this job (False: fresh, or loaded from outside).
        torn: its ranks hold different states; it heals as a whole, and is no source and no participant.
        failed_heals: healings in a row that failed.
        unreached: the peers that its ranks could not reach since their last request; () in a quorum.
        store_failed: its rendezvous store was unreachable in the round before. Set by the lighthouse.
        poor_sources: replica ids that were silent, wrong or slow when it healed from them; sorted.
        init_sync, allow_heal, use_async_quorum, fixed_with_spares, min_replica_size: the settings that the plan depends
            on.
        data: JSON of the user, forwarded and not used.
        reconfigure_handles: one per group rank, forwarded and not used.
        lease_ms: how long it goes on in a standing quorum without hearing from the lighthouse. 0: it exchanges the word
            of a round and asks in every step. None: it exchanges no word (torchft's members and older versions of this
            project).
    """

    replica_id: str
    session: int = 0
    address: str = ""
    store_address: str = ""
    step: int = 0
    lineage: int | None = None
    world_size: int = 1
    shrink_only: bool = False
    commit_failures: int = 0
    live: bool = False
    torn: bool = False
    needs_configure: bool = False
    failed_heals: int = 0
    poor_sources: tuple[str, ...] = ()
    init_sync: bool = True
    allow_heal: bool = True
    use_async_quorum: bool = True
    fixed_with_spares: bool = False
    min_replica_size: int = 1
    data: str = ""
    reconfigure_handles: tuple[str, ...] = ()
    unreached: tuple[Unreached, ...] = ()
    store_failed: bool = False
    lease_ms: int | None = None

    def __post_init__(self) -> None:
        if not self.replica_id:
            raise ProtocolError("a quorum member has no replica id; give the Manager a replica_id")
        _check_names(replica_id=self.replica_id)
        if not 0 <= self.step <= MAX_INT64:
            raise ProtocolError(f"replica {self.replica_id} reports step {self.step}; a step is 0..2^63-1")
        if self.lineage is not None and not 0 <= self.lineage <= MAX_UINT64:
            raise ProtocolError(f"replica {self.replica_id} reports lineage {self.lineage}; a lineage is 64 bits")
        if self.world_size < 0:
            raise ProtocolError(f"replica {self.replica_id} reports world_size {self.world_size}; it is at least 0")
        if self.lease_ms is not None and self.lease_ms < 0:
            raise ProtocolError(f"replica {self.replica_id} reports lease_ms {self.lease_ms}; it is at least 0")

    @property
    def identity(self) -> tuple[object, ...]:
        """Return the fields whose change makes an existing process group unusable: neither steps nor lineages are among
        them."""
        return (
            self.replica_id,
            self.session,
            self.address,
            self.store_address,
            self.reconfigure_handles,
            self.world_size,
        )

    @property
    def settings(self) -> tuple[object, ...]:
        """Return the fields that the plan and the user read besides step and lineage; every member hears of a
        change."""
        return (
            self.torn,
            self.init_sync,
            self.allow_heal,
            self.use_async_quorum,
            self.fixed_with_spares,
            self.min_replica_size,
            self.data,
            self.lease_ms,
        )


@dataclass(frozen=True, slots=True)
class Quorum:
    """An ordered list of members with a key.

    Args:
        key: (id, nonce).
        members: sorted by replica id, unique, at least one.
        created_ms: wall-clock milliseconds since 1970 at which the lighthouse formed it.
    Raises: ProtocolError: the members are not sorted, repeat, or there are none.
    """

    key: QuorumKey
    members: tuple[Member, ...]
    created_ms: int = 0

    def __post_init__(self) -> None:
        ids = [member.replica_id for member in self.members]
        if not ids:
            raise ProtocolError(f"quorum {self.key} has no members; the peer speaks another protocol")
        for first, second in itertools.pairwise(ids):
            if first >= second:
                raise ProtocolError(f"quorum {self.key} has members out of order or twice: {first}, {second}")

    @property
    def replica_ids(self) -> tuple[str, ...]:
        return tuple(member.replica_id for member in self.members)

    def member(self, replica_id: str) -> Member | None:
        """Return the member of that id, or None."""
        for member in self.members:
            if member.replica_id == replica_id:
                return member
        return None

    @property
    def lease_ms(self) -> int | None:
        """Return the smallest lease of its members. 0: they ask in every step. None: one of them exchanges no word."""
        leases = [member.lease_ms for member in self.members]
        return None if None in leases else min(lease for lease in leases if lease is not None)


class Refusal(enum.Enum):
    """The reason of a refused session or request, named by what the caller can do next."""

    DUPLICATE = "duplicate"  # another living process has this replica id: end one of them
    STALE = "stale"  # an older session or stream: the replica uses a newer one
    DEAD = "dead"  # its trainer was reported dead: start with a new replica id
    LOST = "lost"  # it was declared lost: open a newer session
    AHEAD = "ahead"  # its loaded state is ahead of every live one: load an older one, or start the job from it
    DIFFERS = "differs"  # its parameters or settings differ from the job's: correct what the message names
    OTHER_KIND = "other_kind"  # torchft's members and this project's never share a job
    MALFORMED = "malformed"  # the message breaks the protocol
    CLOCK = "clock"  # the lighthouse's clock is more than a year behind the numbers of this replica: set it right
    OLD_LIGHTHOUSE = "old_lighthouse"  # a newer lighthouse serves this cluster
    LEFT = "left"  # it has left the job: end this process; a new life of it joins under a new replica id
    OVER = "job_over"  # the job ended at a later step: load the state of that step, or start a new run
    UNKNOWN = "unknown"  # the name is unknown: look at the names in the message
    FULL = "full"  # a limit of the lighthouse is reached: raise it, or end what is not needed


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a stream to the lighthouse.

    Args:
        job: of the replica.
        replica_id: as in Member.
        session: rises over the life of a replica id: one number per loss and per manager-server process. A redial keeps
            it.
        address: of the manager server, `host:port`; tells two processes with one replica id apart.
        replaces: replica id of its predecessor in the same place, or "".
        ready: it has asked some lighthouse for a quorum once in its life.
        held: key of the newest quorum that it holds or has held, or None.
        lighthouse_started_ms: start time of the newest lighthouse that it has accepted, 0 if none.
        cluster_id: of that lighthouse; start times are compared within one cluster only.
        left: it has left the job, and serves its state for a while.
        num_answers: how often `held` was given to it or confirmed.
        pid: of its trainer, for warnings; 0: not said.
        answers_probes: its manager server answers probes, so a second of silence may be judged.
        tries_peers: its manager server dials its peers on request (`TryPeers`).
        lease_ms: as in Member; 0 also where it is not said. A lighthouse without memory waits for so long for the
            members of `held`.
        unpacks: it can decode a packed quorum.
    """

    job: str
    replica_id: str
    session: int
    address: str
    replaces: str = ""
    ready: bool = False
    held: QuorumKey | None = None
    lighthouse_started_ms: int = 0
    cluster_id: str = ""
    left: bool = False
    num_answers: int = 0
    pid: int = 0
    answers_probes: bool = False
    tries_peers: bool = False
    lease_ms: int = 0
    unpacks: bool = True

    def __post_init__(self) -> None:
        _check_names(replica_id=self.replica_id, job=self.job)


@dataclass(frozen=True, slots=True)
class LossNotice:
    """A notice for the other members that a quorum is broken: one member was lost, or can't go on. No other quorum is
    broken.

    Args:
        key: the newest quorum that the member is in.
        replica_id, session: of the lost member, or of the living one that can't go on.
        reason: why it was declared lost, or what it can't do, one phrase.
        lives: it was not lost; its state can still be fetched.
    """

    key: QuorumKey
    replica_id: str
    session: int
    reason: str
    lives: bool = False

    def __str__(self) -> str:
        what = self.reason if self.lives else f"was lost ({self.reason})"
        return f"quorum {self.key} is broken: replica {self.replica_id} {what}"


@dataclass(frozen=True, slots=True)
class QuorumNews:
    """The lighthouse's news about the newest quorum of a job.

    Args:
        key: of the newest quorum; None: the lighthouse knows none.
        broken: that quorum can't complete another round.
        recalled: its members must ask after their next word.
        beat: number of the answered beat; 0: it answers none.
        age_ms: to a rank: the time since the manager server sent the beat whose answer named `key` as the newest.
    """

    key: QuorumKey | None
    broken: bool = False
    recalled: bool = False
    beat: int = 0
    age_ms: int = 0


@dataclass(frozen=True, slots=True)
class NewcomerAsks:
    """A replica that will heal has asked for the next quorum. This is a hint: no decision depends on its arrival.

    Args:
        replica_id: of the newcomer.
    """

    replica_id: str


class Merge(enum.Enum):
    """The rule by which a field of the ranks' requests becomes the field of the same name in their group's member."""

    FIRST = "first"  # rank 0's value: all ranks have the same setting
    ANY = "any"  # True if it is so for one rank
    ALL = "all"  # True if it is so for each rank
    HIGHEST = "highest"
    LOWEST = "lowest"  # None if it is None for one rank
    UNION = "union"  # of names: sorted, POOR_SOURCES_MOST of them at most
    BY_HAND = "by_hand"  # `GroupCore` decides, because the field depends on others


MERGE: Final = "merge"  # the key of the rule in a field's metadata


def _merged(rule: Merge, default: Any) -> Any:
    return field(default=default, metadata={MERGE: rule})


@dataclass(frozen=True, slots=True)
class RankRequest:
    """One group rank's request to its manager server for the next quorum.

    Fields are as in Member, of this rank alone. Each field that Member has too names the rule by which the group's
    member gets it. `held` is the key of the quorum that its process group is configured for, or that it was last given.
    `checkpoint_metadata` says where its live state can be fetched. `attempt` counts this rank's requests from 1,
    including those that failed or were never sent; 0: not said. A rank's first request carries `fingerprint`, and so
    does the request after a change; empty: no change.
    """

    step: int = field(metadata={MERGE: Merge.LOWEST})
    lineage: int | None = _merged(Merge.BY_HAND, None)
    live: bool = _merged(Merge.ALL, False)
    torn: bool = _merged(Merge.BY_HAND, False)
    held: QuorumKey | None = None
    checkpoint_metadata: str = ""
    commit_failures: int = _merged(Merge.HIGHEST, 0)
    needs_configure: bool = _merged(Merge.BY_HAND, False)
    failed_heals: int = _merged(Merge.HIGHEST, 0)
    poor_sources: tuple[str, ...] = _merged(Merge.UNION, ())
    shrink_only: bool = _merged(Merge.ANY, False)
    init_sync: bool = _merged(Merge.ANY, True)
    allow_heal: bool = _merged(Merge.ALL, True)
    use_async_quorum: bool = _merged(Merge.FIRST, True)
    fixed_with_spares: bool = _merged(Merge.FIRST, False)
    min_replica_size: int = _merged(Merge.HIGHEST, 1)
    data: str = _merged(Merge.FIRST, "")
    reconfigure_handle: str = ""
    attempt: int = 0
    fingerprint: Fingerprint = ()
    unreached: tuple[Unreached, ...] = _merged(Merge.BY_HAND, ())
    lease_ms: int | None = _merged(Merge.LOWEST, None)


@dataclass(frozen=True, slots=True)
class Source:
    """An up-to-date replica group from which state can be fetched."""

    replica_rank: int
    replica_id: str
    address: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One group rank's part in a quorum. The plan is a function of the quorum, the replica id and the group rank alone.

    Args:
        key: of the quorum.
        replica_id, replica_rank, replica_world_size: this group, its place, and the number of members.
        replica_ids: of all members, by replica rank.
        step, lineage: the reference: the state that the step's reduction starts from.
        heal: this group fetches the reference before its gradients count.
        sources: of the reference; the first is the assigned one, the others hold the same bytes. Empty if heal is
            False.
        recover_dst_replica_ranks: members for which this group is the first source.
        serve: some member heals and this group holds the reference, so it takes a snapshot.
        store_address: of the rendezvous store of this group rank, `host:port`.
        store_replica_id: of the member that owns the store; "" from a peer that does not say.
        up_to_date: replica ranks that hold the reference.
        participants: replica ranks whose gradients count in this step.
        participating_rank: this group's place among them, or None.
        min_replica_size: participants needed for a commit.
        commit_failures: the maximum over members.
        reconfigure_handles: of this group rank, by replica rank; "" where a member has none.
        lease_ms: of the quorum, see `Quorum.lease_ms`.
    """

    key: QuorumKey
    replica_id: str
    replica_rank: int
    replica_world_size: int
    replica_ids: tuple[str, ...]
    store_address: str
    store_replica_id: str = ""
    reconfigure_handles: tuple[str, ...] = ()
    lease_ms: int | None = None
    # The fields above stay as they are while the quorum stands. Those below belong to one round.
    _: KW_ONLY
    step: int
    lineage: int
    heal: bool
    sources: tuple[Source, ...]
    recover_dst_replica_ranks: tuple[int, ...]
    serve: bool
    up_to_date: tuple[int, ...]
    participants: tuple[int, ...]
    participating_rank: int | None
    min_replica_size: int = 1
    commit_failures: int = 0

    @property
    def num_participants(self) -> int:
        return len(self.participants)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The agreement of a group's ranks in a round; final.

    Args:
        yes: all voted yes.
        leaves: the group leaves the job, with all its ranks after this step, because a rank has requested it.
        stands: no member asks, leaves or recovers, by the words of all ranks: the next round needs no request.
    """

    yes: bool
    leaves: bool = False
    stands: bool = False


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """A request that a group leave after its current step.

    Args:
        reason: why, with the caller.
        serve_ms: for how long the group may serve its state to healing replicas; 0: its own default.
    """

    reason: str
    serve_ms: int = 0


@dataclass(frozen=True, slots=True)
class DrainComplete:
    """The release of a group that has left: no replica heals from it any more, so it may end."""


@dataclass(frozen=True, slots=True)
class WaitsFor:
    """A sentence about the replicas that this rank waits for, or with `warns` a warning for its user.

    No decision depends on its arrival.
    """

    sentence: str
    warns: bool = False


@dataclass(frozen=True, slots=True)
class KillOrder:
    """An order that this process end now, with exit code 1. `message` names the reason and the caller."""

    message: str


class Purpose(enum.Enum):
    """The subject of a vote in a group.

    COMMIT: the step counts. The next ones belong to a healing, in this order. STAGED: each rank has fetched its part.
    SPREAD: where rank 0 fetches for all, each rank has the fetched state. WITHOUT_OWN: no rank needs its own state to
    use the fetched one. MATCHED: each rank's own state fits the fetched one. LOADED: each rank has loaded it. The last
    one belongs to a serving group where rank 0 gives for all. TAKEN: each rank could take its snapshot, so that they
    can combine them.
    """

    COMMIT = "commit"
    STAGED = "staged"
    WITHOUT_OWN = "without_own"
    MATCHED = "matched"
    SPREAD = "spread"
    TAKEN = "taken"
    LOADED = "loaded"
