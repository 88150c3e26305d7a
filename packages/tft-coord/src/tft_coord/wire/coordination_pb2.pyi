import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Via(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORE: _ClassVar[Via]
    GROUP: _ClassVar[Via]
    STATE: _ClassVar[Via]

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMIT: _ClassVar[Purpose]
    STAGED: _ClassVar[Purpose]
    WITHOUT_OWN: _ClassVar[Purpose]
    MATCHED: _ClassVar[Purpose]
    SPREAD: _ClassVar[Purpose]
    TAKEN: _ClassVar[Purpose]
    LOADED: _ClassVar[Purpose]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTSIDE: _ClassVar[Phase]
    OWN: _ClassVar[Phase]
    WAITING: _ClassVar[Phase]
    REDUCING: _ClassVar[Phase]

class PaceKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLOW: _ClassVar[PaceKind]
    KEEPS_UP: _ClassVar[PaceKind]
    LEFT_OUT: _ClassVar[PaceKind]
    LET_BACK: _ClassVar[PaceKind]
    SHARE: _ClassVar[PaceKind]
STORE: Via
GROUP: Via
STATE: Via
COMMIT: Purpose
STAGED: Purpose
WITHOUT_OWN: Purpose
MATCHED: Purpose
SPREAD: Purpose
TAKEN: Purpose
LOADED: Purpose
OUTSIDE: Phase
OWN: Phase
WAITING: Phase
REDUCING: Phase
SLOW: PaceKind
KEEPS_UP: PaceKind
LEFT_OUT: PaceKind
LET_BACK: PaceKind
SHARE: PaceKind

class RaftMessageRequest(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: bytes
    def __init__(self, message: _Optional[bytes] = ...) -> None: ...

class RaftMessageResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("rank", "address")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    address: str
    def __init__(self, rank: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ("requester",)
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    requester: NodeInfo
    def __init__(self, requester: _Optional[_Union[NodeInfo, _Mapping]] = ...) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    def __init__(self, peers: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ...) -> None: ...

class QuorumMember(_message.Message):
    __slots__ = ("replica_id", "address", "store_address", "step", "world_size", "shrink_only", "data", "commit_failures", "reconfigure_handles", "session", "lineage", "live", "torn", "needs_configure", "failed_heals", "init_sync", "allow_heal", "use_async_quorum", "fixed_with_spares", "min_replica_size", "unreached", "store_failed", "poor_sources", "lease_ms")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHRINK_ONLY_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURE_HANDLES_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    TORN_FIELD_NUMBER: _ClassVar[int]
    NEEDS_CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    FAILED_HEALS_FIELD_NUMBER: _ClassVar[int]
    INIT_SYNC_FIELD_NUMBER: _ClassVar[int]
    ALLOW_HEAL_FIELD_NUMBER: _ClassVar[int]
    USE_ASYNC_QUORUM_FIELD_NUMBER: _ClassVar[int]
    FIXED_WITH_SPARES_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICA_SIZE_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_FIELD_NUMBER: _ClassVar[int]
    STORE_FAILED_FIELD_NUMBER: _ClassVar[int]
    POOR_SOURCES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: str
    commit_failures: int
    reconfigure_handles: _containers.RepeatedScalarFieldContainer[str]
    session: int
    lineage: int
    live: bool
    torn: bool
    needs_configure: bool
    failed_heals: int
    init_sync: bool
    allow_heal: bool
    use_async_quorum: bool
    fixed_with_spares: bool
    min_replica_size: int
    unreached: _containers.RepeatedCompositeFieldContainer[Unreached]
    store_failed: bool
    poor_sources: _containers.RepeatedScalarFieldContainer[str]
    lease_ms: int
    def __init__(self, replica_id: _Optional[str] = ..., address: _Optional[str] = ..., store_address: _Optional[str] = ..., step: _Optional[int] = ..., world_size: _Optional[int] = ..., shrink_only: bool = ..., data: _Optional[str] = ..., commit_failures: _Optional[int] = ..., reconfigure_handles: _Optional[_Iterable[str]] = ..., session: _Optional[int] = ..., lineage: _Optional[int] = ..., live: bool = ..., torn: bool = ..., needs_configure: bool = ..., failed_heals: _Optional[int] = ..., init_sync: bool = ..., allow_heal: bool = ..., use_async_quorum: bool = ..., fixed_with_spares: bool = ..., min_replica_size: _Optional[int] = ..., unreached: _Optional[_Iterable[_Union[Unreached, _Mapping]]] = ..., store_failed: bool = ..., poor_sources: _Optional[_Iterable[str]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class Unreached(_message.Message):
    __slots__ = ("replica_id", "via", "why")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    VIA_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    via: Via
    why: str
    def __init__(self, replica_id: _Optional[str] = ..., via: _Optional[_Union[Via, str]] = ..., why: _Optional[str] = ...) -> None: ...

class Quorum(_message.Message):
    __slots__ = ("quorum_id", "participants", "created", "nonce")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    participants: _containers.RepeatedCompositeFieldContainer[QuorumMember]
    created: _timestamp_pb2.Timestamp
    nonce: int
    def __init__(self, quorum_id: _Optional[int] = ..., participants: _Optional[_Iterable[_Union[QuorumMember, _Mapping]]] = ..., created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., nonce: _Optional[int] = ...) -> None: ...

class LighthouseQuorumRequest(_message.Message):
    __slots__ = ("requester",)
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    requester: QuorumMember
    def __init__(self, requester: _Optional[_Union[QuorumMember, _Mapping]] = ...) -> None: ...

class LighthouseQuorumResponse(_message.Message):
    __slots__ = ("quorum",)
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    quorum: Quorum
    def __init__(self, quorum: _Optional[_Union[Quorum, _Mapping]] = ...) -> None: ...

class LighthouseHeartbeatRequest(_message.Message):
    __slots__ = ("replica_id",)
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    def __init__(self, replica_id: _Optional[str] = ...) -> None: ...

class LighthouseHeartbeatResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ManagerQuorumRequest(_message.Message):
    __slots__ = ("group_rank", "step", "checkpoint_metadata", "shrink_only", "init_sync", "commit_failures", "reconfigure_handle", "lineage", "live", "torn", "needs_configure", "failed_heals", "allow_heal", "use_async_quorum", "fixed_with_spares", "min_replica_size", "data", "held", "attempt", "fingerprint", "unreached", "poor_sources", "lease_ms")
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_METADATA_FIELD_NUMBER: _ClassVar[int]
    SHRINK_ONLY_FIELD_NUMBER: _ClassVar[int]
    INIT_SYNC_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    TORN_FIELD_NUMBER: _ClassVar[int]
    NEEDS_CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    FAILED_HEALS_FIELD_NUMBER: _ClassVar[int]
    ALLOW_HEAL_FIELD_NUMBER: _ClassVar[int]
    USE_ASYNC_QUORUM_FIELD_NUMBER: _ClassVar[int]
    FIXED_WITH_SPARES_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICA_SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_FIELD_NUMBER: _ClassVar[int]
    POOR_SOURCES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    group_rank: int
    step: int
    checkpoint_metadata: str
    shrink_only: bool
    init_sync: bool
    commit_failures: int
    reconfigure_handle: str
    lineage: int
    live: bool
    torn: bool
    needs_configure: bool
    failed_heals: int
    allow_heal: bool
    use_async_quorum: bool
    fixed_with_spares: bool
    min_replica_size: int
    data: str
    held: QuorumKey
    attempt: int
    fingerprint: _containers.RepeatedCompositeFieldContainer[FingerprintPart]
    unreached: _containers.RepeatedCompositeFieldContainer[Unreached]
    poor_sources: _containers.RepeatedScalarFieldContainer[str]
    lease_ms: int
    def __init__(self, group_rank: _Optional[int] = ..., step: _Optional[int] = ..., checkpoint_metadata: _Optional[str] = ..., shrink_only: bool = ..., init_sync: bool = ..., commit_failures: _Optional[int] = ..., reconfigure_handle: _Optional[str] = ..., lineage: _Optional[int] = ..., live: bool = ..., torn: bool = ..., needs_configure: bool = ..., failed_heals: _Optional[int] = ..., allow_heal: bool = ..., use_async_quorum: bool = ..., fixed_with_spares: bool = ..., min_replica_size: _Optional[int] = ..., data: _Optional[str] = ..., held: _Optional[_Union[QuorumKey, _Mapping]] = ..., attempt: _Optional[int] = ..., fingerprint: _Optional[_Iterable[_Union[FingerprintPart, _Mapping]]] = ..., unreached: _Optional[_Iterable[_Union[Unreached, _Mapping]]] = ..., poor_sources: _Optional[_Iterable[str]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class ManagerQuorumResponse(_message.Message):
    __slots__ = ("quorum_id", "recover_src_manager_address", "recover_src_replica_rank", "recover_dst_replica_ranks", "store_address", "max_step", "max_replica_rank", "max_world_size", "replica_rank", "replica_world_size", "heal", "commit_failures", "replica_ids", "reconfigure_handles", "nonce", "unchanged", "lineage", "sources", "serve", "up_to_date", "participants", "min_replica_size", "store_replica_id", "lease_ms")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    RECOVER_SRC_MANAGER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RECOVER_SRC_REPLICA_RANK_FIELD_NUMBER: _ClassVar[int]
    RECOVER_DST_REPLICA_RANKS_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLICA_RANK_FIELD_NUMBER: _ClassVar[int]
    MAX_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_RANK_FIELD_NUMBER: _ClassVar[int]
    REPLICA_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEAL_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    REPLICA_IDS_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURE_HANDLES_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    SERVE_FIELD_NUMBER: _ClassVar[int]
    UP_TO_DATE_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICA_SIZE_FIELD_NUMBER: _ClassVar[int]
    STORE_REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    recover_src_manager_address: str
    recover_src_replica_rank: int
    recover_dst_replica_ranks: _containers.RepeatedScalarFieldContainer[int]
    store_address: str
    max_step: int
    max_replica_rank: int
    max_world_size: int
    replica_rank: int
    replica_world_size: int
    heal: bool
    commit_failures: int
    replica_ids: _containers.RepeatedScalarFieldContainer[str]
    reconfigure_handles: _containers.RepeatedScalarFieldContainer[str]
    nonce: int
    unchanged: bool
    lineage: int
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    serve: bool
    up_to_date: _containers.RepeatedScalarFieldContainer[int]
    participants: _containers.RepeatedScalarFieldContainer[int]
    min_replica_size: int
    store_replica_id: str
    lease_ms: int
    def __init__(self, quorum_id: _Optional[int] = ..., recover_src_manager_address: _Optional[str] = ..., recover_src_replica_rank: _Optional[int] = ..., recover_dst_replica_ranks: _Optional[_Iterable[int]] = ..., store_address: _Optional[str] = ..., max_step: _Optional[int] = ..., max_replica_rank: _Optional[int] = ..., max_world_size: _Optional[int] = ..., replica_rank: _Optional[int] = ..., replica_world_size: _Optional[int] = ..., heal: bool = ..., commit_failures: _Optional[int] = ..., replica_ids: _Optional[_Iterable[str]] = ..., reconfigure_handles: _Optional[_Iterable[str]] = ..., nonce: _Optional[int] = ..., unchanged: bool = ..., lineage: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., serve: bool = ..., up_to_date: _Optional[_Iterable[int]] = ..., participants: _Optional[_Iterable[int]] = ..., min_replica_size: _Optional[int] = ..., store_replica_id: _Optional[str] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class CheckpointMetadataRequest(_message.Message):
    __slots__ = ("rank",)
    RANK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    def __init__(self, rank: _Optional[int] = ...) -> None: ...

class CheckpointMetadataResponse(_message.Message):
    __slots__ = ("checkpoint_metadata",)
    CHECKPOINT_METADATA_FIELD_NUMBER: _ClassVar[int]
    checkpoint_metadata: str
    def __init__(self, checkpoint_metadata: _Optional[str] = ...) -> None: ...

class ShouldCommitRequest(_message.Message):
    __slots__ = ("should_commit", "group_rank", "step", "key", "purpose", "leaving", "stands")
    SHOULD_COMMIT_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    STANDS_FIELD_NUMBER: _ClassVar[int]
    should_commit: bool
    group_rank: int
    step: int
    key: QuorumKey
    purpose: Purpose
    leaving: bool
    stands: bool
    def __init__(self, should_commit: bool = ..., group_rank: _Optional[int] = ..., step: _Optional[int] = ..., key: _Optional[_Union[QuorumKey, _Mapping]] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., leaving: bool = ..., stands: bool = ...) -> None: ...

class ShouldCommitResponse(_message.Message):
    __slots__ = ("should_commit", "leaves", "stands")
    SHOULD_COMMIT_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    STANDS_FIELD_NUMBER: _ClassVar[int]
    should_commit: bool
    leaves: bool
    stands: bool
    def __init__(self, should_commit: bool = ..., leaves: bool = ..., stands: bool = ...) -> None: ...

class KillRequest(_message.Message):
    __slots__ = ("msg",)
    MSG_FIELD_NUMBER: _ClassVar[int]
    msg: str
    def __init__(self, msg: _Optional[str] = ...) -> None: ...

class KillResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QuorumKey(_message.Message):
    __slots__ = ("quorum_id", "nonce")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    nonce: int
    def __init__(self, quorum_id: _Optional[int] = ..., nonce: _Optional[int] = ...) -> None: ...

class FingerprintPart(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("replica_rank", "replica_id", "address")
    REPLICA_RANK_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    replica_rank: int
    replica_id: str
    address: str
    def __init__(self, replica_rank: _Optional[int] = ..., replica_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("job", "replica_id", "session", "address", "replaces", "ready", "held", "lighthouse_started_ms", "cluster_id", "left", "num_answers", "pid", "tries_peers", "answers_probes", "unpacks", "lease_ms")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LIGHTHOUSE_STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    NUM_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    TRIES_PEERS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_PROBES_FIELD_NUMBER: _ClassVar[int]
    UNPACKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    job: str
    replica_id: str
    session: int
    address: str
    replaces: str
    ready: bool
    held: QuorumKey
    lighthouse_started_ms: int
    cluster_id: str
    left: bool
    num_answers: int
    pid: int
    tries_peers: bool
    answers_probes: bool
    unpacks: bool
    lease_ms: int
    def __init__(self, job: _Optional[str] = ..., replica_id: _Optional[str] = ..., session: _Optional[int] = ..., address: _Optional[str] = ..., replaces: _Optional[str] = ..., ready: bool = ..., held: _Optional[_Union[QuorumKey, _Mapping]] = ..., lighthouse_started_ms: _Optional[int] = ..., cluster_id: _Optional[str] = ..., left: bool = ..., num_answers: _Optional[int] = ..., pid: _Optional[int] = ..., tries_peers: bool = ..., answers_probes: bool = ..., unpacks: bool = ..., lease_ms: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("step", "phase", "since_ms", "excused", "slowest_step_ms")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    EXCUSED_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    step: int
    phase: Phase
    since_ms: int
    excused: bool
    slowest_step_ms: int
    def __init__(self, step: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ..., since_ms: _Optional[int] = ..., excused: bool = ..., slowest_step_ms: _Optional[int] = ...) -> None: ...

class Spent(_message.Message):
    __slots__ = ("commit", "detect", "abort", "quorum", "reconfigure", "heal", "serve", "redo", "wait", "start")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    DETECT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURE_FIELD_NUMBER: _ClassVar[int]
    HEAL_FIELD_NUMBER: _ClassVar[int]
    SERVE_FIELD_NUMBER: _ClassVar[int]
    REDO_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    commit: int
    detect: int
    abort: int
    quorum: int
    reconfigure: int
    heal: int
    serve: int
    redo: int
    wait: int
    start: int
    def __init__(self, commit: _Optional[int] = ..., detect: _Optional[int] = ..., abort: _Optional[int] = ..., quorum: _Optional[int] = ..., reconfigure: _Optional[int] = ..., heal: _Optional[int] = ..., serve: _Optional[int] = ..., redo: _Optional[int] = ..., wait: _Optional[int] = ..., start: _Optional[int] = ...) -> None: ...

class Stall(_message.Message):
    __slots__ = ("number", "quorum_before", "quorum_after", "step", "failed_rounds", "spent")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    QUORUM_BEFORE_FIELD_NUMBER: _ClassVar[int]
    QUORUM_AFTER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FAILED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    number: int
    quorum_before: int
    quorum_after: int
    step: int
    failed_rounds: int
    spent: Spent
    def __init__(self, number: _Optional[int] = ..., quorum_before: _Optional[int] = ..., quorum_after: _Optional[int] = ..., step: _Optional[int] = ..., failed_rounds: _Optional[int] = ..., spent: _Optional[_Union[Spent, _Mapping]] = ...) -> None: ...

class TrainerReport(_message.Message):
    __slots__ = ("total", "stalls")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    STALLS_FIELD_NUMBER: _ClassVar[int]
    total: Spent
    stalls: _containers.RepeatedCompositeFieldContainer[Stall]
    def __init__(self, total: _Optional[_Union[Spent, _Mapping]] = ..., stalls: _Optional[_Iterable[_Union[Stall, _Mapping]]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("healed_bytes", "progress", "own_ms", "waits", "number", "report")
    HEALED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    OWN_MS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    healed_bytes: int
    progress: Progress
    own_ms: int
    waits: bool
    number: int
    report: TrainerReport
    def __init__(self, healed_bytes: _Optional[int] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., own_ms: _Optional[int] = ..., waits: bool = ..., number: _Optional[int] = ..., report: _Optional[_Union[TrainerReport, _Mapping]] = ...) -> None: ...

class QuorumRequest(_message.Message):
    __slots__ = ("request", "member", "held", "fingerprint", "as_before")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    AS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    request: int
    member: QuorumMember
    held: QuorumKey
    fingerprint: _containers.RepeatedCompositeFieldContainer[FingerprintPart]
    as_before: bool
    def __init__(self, request: _Optional[int] = ..., member: _Optional[_Union[QuorumMember, _Mapping]] = ..., held: _Optional[_Union[QuorumKey, _Mapping]] = ..., fingerprint: _Optional[_Iterable[_Union[FingerprintPart, _Mapping]]] = ..., as_before: bool = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason", "serve_ms", "finished_step")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SERVE_MS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_STEP_FIELD_NUMBER: _ClassVar[int]
    reason: str
    serve_ms: int
    finished_step: int
    def __init__(self, reason: _Optional[str] = ..., serve_ms: _Optional[int] = ..., finished_step: _Optional[int] = ...) -> None: ...

class Withdraw(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: int
    def __init__(self, request: _Optional[int] = ...) -> None: ...

class QuorumReport(_message.Message):
    __slots__ = ("quorum",)
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    quorum: Quorum
    def __init__(self, quorum: _Optional[_Union[Quorum, _Mapping]] = ...) -> None: ...

class PeerAddresses(_message.Message):
    __slots__ = ("replica_id", "addresses")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, replica_id: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class TryPeers(_message.Message):
    __slots__ = ("number", "peers")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    peers: _containers.RepeatedCompositeFieldContainer[PeerAddresses]
    def __init__(self, number: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[PeerAddresses, _Mapping]]] = ...) -> None: ...

class PeersTried(_message.Message):
    __slots__ = ("number", "unreached")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_FIELD_NUMBER: _ClassVar[int]
    number: int
    unreached: _containers.RepeatedCompositeFieldContainer[Unreached]
    def __init__(self, number: _Optional[int] = ..., unreached: _Optional[_Iterable[_Union[Unreached, _Mapping]]] = ...) -> None: ...

class Death(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Probed(_message.Message):
    __slots__ = ("number", "stopped", "stopped_ms")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    STOPPED_MS_FIELD_NUMBER: _ClassVar[int]
    number: int
    stopped: str
    stopped_ms: int
    def __init__(self, number: _Optional[int] = ..., stopped: _Optional[str] = ..., stopped_ms: _Optional[int] = ...) -> None: ...

class Late(_message.Message):
    __slots__ = ("key", "step")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    key: QuorumKey
    step: int
    def __init__(self, key: _Optional[_Union[QuorumKey, _Mapping]] = ..., step: _Optional[int] = ...) -> None: ...

class ToLighthouse(_message.Message):
    __slots__ = ("hello", "beat", "quorum_request", "withdraw", "quorum_report", "death", "leave", "peers_tried", "probed", "late")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    QUORUM_REQUEST_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    QUORUM_REPORT_FIELD_NUMBER: _ClassVar[int]
    DEATH_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    PEERS_TRIED_FIELD_NUMBER: _ClassVar[int]
    PROBED_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    beat: Beat
    quorum_request: QuorumRequest
    withdraw: Withdraw
    quorum_report: QuorumReport
    death: Death
    leave: Leave
    peers_tried: PeersTried
    probed: Probed
    late: Late
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., quorum_request: _Optional[_Union[QuorumRequest, _Mapping]] = ..., withdraw: _Optional[_Union[Withdraw, _Mapping]] = ..., quorum_report: _Optional[_Union[QuorumReport, _Mapping]] = ..., death: _Optional[_Union[Death, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., peers_tried: _Optional[_Union[PeersTried, _Mapping]] = ..., probed: _Optional[_Union[Probed, _Mapping]] = ..., late: _Optional[_Union[Late, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session", "lighthouse_started_ms", "cluster_id", "heartbeat_timeout_ms", "join_timeout_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LIGHTHOUSE_STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    JOIN_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    session: int
    lighthouse_started_ms: int
    cluster_id: str
    heartbeat_timeout_ms: int
    join_timeout_ms: int
    def __init__(self, session: _Optional[int] = ..., lighthouse_started_ms: _Optional[int] = ..., cluster_id: _Optional[str] = ..., heartbeat_timeout_ms: _Optional[int] = ..., join_timeout_ms: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("code", "message", "silent_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    silent_ms: int
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., silent_ms: _Optional[int] = ...) -> None: ...

class Lost(_message.Message):
    __slots__ = ("session", "message")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    session: int
    message: str
    def __init__(self, session: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class LossNotice(_message.Message):
    __slots__ = ("key", "replica_id", "session", "reason", "lives")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LIVES_FIELD_NUMBER: _ClassVar[int]
    key: QuorumKey
    replica_id: str
    session: int
    reason: str
    lives: bool
    def __init__(self, key: _Optional[_Union[QuorumKey, _Mapping]] = ..., replica_id: _Optional[str] = ..., session: _Optional[int] = ..., reason: _Optional[str] = ..., lives: bool = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AskToLeave(_message.Message):
    __slots__ = ("reason", "serve_ms")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SERVE_MS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    serve_ms: int
    def __init__(self, reason: _Optional[str] = ..., serve_ms: _Optional[int] = ...) -> None: ...

class Waits(_message.Message):
    __slots__ = ("sentence", "warns")
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    WARNS_FIELD_NUMBER: _ClassVar[int]
    sentence: str
    warns: bool
    def __init__(self, sentence: _Optional[str] = ..., warns: bool = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class NewcomerAsks(_message.Message):
    __slots__ = ("replica_id",)
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    def __init__(self, replica_id: _Optional[str] = ...) -> None: ...

class Straggler(_message.Message):
    __slots__ = ("replica_id", "kind", "own_ms", "median_ms", "share", "pause_ms", "sentence")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OWN_MS_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_MS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    kind: PaceKind
    own_ms: int
    median_ms: int
    share: float
    pause_ms: int
    sentence: str
    def __init__(self, replica_id: _Optional[str] = ..., kind: _Optional[_Union[PaceKind, str]] = ..., own_ms: _Optional[int] = ..., median_ms: _Optional[int] = ..., share: _Optional[float] = ..., pause_ms: _Optional[int] = ..., sentence: _Optional[str] = ...) -> None: ...

class QuorumNews(_message.Message):
    __slots__ = ("key", "broken", "recalled", "beat", "age_ms")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    RECALLED_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    key: QuorumKey
    broken: bool
    recalled: bool
    beat: int
    age_ms: int
    def __init__(self, key: _Optional[_Union[QuorumKey, _Mapping]] = ..., broken: bool = ..., recalled: bool = ..., beat: _Optional[int] = ..., age_ms: _Optional[int] = ...) -> None: ...

class QuorumAnswer(_message.Message):
    __slots__ = ("request", "quorum", "unchanged", "refused", "packed")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    request: int
    quorum: Quorum
    unchanged: QuorumKey
    refused: Refused
    packed: Packed
    def __init__(self, request: _Optional[int] = ..., quorum: _Optional[_Union[Quorum, _Mapping]] = ..., unchanged: _Optional[_Union[QuorumKey, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., packed: _Optional[_Union[Packed, _Mapping]] = ...) -> None: ...

class Packed(_message.Message):
    __slots__ = ("size", "data")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    size: int
    data: bytes
    def __init__(self, size: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class FromLighthouse(_message.Message):
    __slots__ = ("welcome", "refused", "lost", "ask_for_quorum", "answer", "loss_notice", "ask_to_leave", "newcomer_asks", "released", "waits", "try_peers", "probe", "straggler", "quorum_news")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    ASK_FOR_QUORUM_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    LOSS_NOTICE_FIELD_NUMBER: _ClassVar[int]
    ASK_TO_LEAVE_FIELD_NUMBER: _ClassVar[int]
    NEWCOMER_ASKS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    TRY_PEERS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    STRAGGLER_FIELD_NUMBER: _ClassVar[int]
    QUORUM_NEWS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refused: Refused
    lost: Lost
    ask_for_quorum: QuorumKey
    answer: QuorumAnswer
    loss_notice: LossNotice
    ask_to_leave: AskToLeave
    newcomer_asks: NewcomerAsks
    released: Released
    waits: Waits
    try_peers: TryPeers
    probe: Probe
    straggler: Straggler
    quorum_news: QuorumNews
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., lost: _Optional[_Union[Lost, _Mapping]] = ..., ask_for_quorum: _Optional[_Union[QuorumKey, _Mapping]] = ..., answer: _Optional[_Union[QuorumAnswer, _Mapping]] = ..., loss_notice: _Optional[_Union[LossNotice, _Mapping]] = ..., ask_to_leave: _Optional[_Union[AskToLeave, _Mapping]] = ..., newcomer_asks: _Optional[_Union[NewcomerAsks, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., waits: _Optional[_Union[Waits, _Mapping]] = ..., try_peers: _Optional[_Union[TryPeers, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., straggler: _Optional[_Union[Straggler, _Mapping]] = ..., quorum_news: _Optional[_Union[QuorumNews, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("job", "replica_id", "reason", "serve_ms")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SERVE_MS_FIELD_NUMBER: _ClassVar[int]
    job: str
    replica_id: str
    reason: str
    serve_ms: int
    def __init__(self, job: _Optional[str] = ..., replica_id: _Optional[str] = ..., reason: _Optional[str] = ..., serve_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribedJob(_message.Message):
    __slots__ = ("name", "quorum_id", "num_members", "waiting_for", "warnings")
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    quorum_id: int
    num_members: int
    waiting_for: str
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., quorum_id: _Optional[int] = ..., num_members: _Optional[int] = ..., waiting_for: _Optional[str] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("version", "started_ms", "now_ms", "cluster_id", "min_replicas", "join_timeout_ms", "heartbeat_timeout_ms", "quorum_tick_ms", "jobs", "torchft", "lost_state_timeout_ms", "stragglers")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    NOW_MS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    JOIN_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    QUORUM_TICK_MS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    TORCHFT_FIELD_NUMBER: _ClassVar[int]
    LOST_STATE_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    STRAGGLERS_FIELD_NUMBER: _ClassVar[int]
    version: str
    started_ms: int
    now_ms: int
    cluster_id: str
    min_replicas: int
    join_timeout_ms: int
    heartbeat_timeout_ms: int
    quorum_tick_ms: int
    jobs: _containers.RepeatedCompositeFieldContainer[DescribedJob]
    torchft: DescribedJob
    lost_state_timeout_ms: int
    stragglers: str
    def __init__(self, version: _Optional[str] = ..., started_ms: _Optional[int] = ..., now_ms: _Optional[int] = ..., cluster_id: _Optional[str] = ..., min_replicas: _Optional[int] = ..., join_timeout_ms: _Optional[int] = ..., heartbeat_timeout_ms: _Optional[int] = ..., quorum_tick_ms: _Optional[int] = ..., jobs: _Optional[_Iterable[_Union[DescribedJob, _Mapping]]] = ..., torchft: _Optional[_Union[DescribedJob, _Mapping]] = ..., lost_state_timeout_ms: _Optional[int] = ..., stragglers: _Optional[str] = ...) -> None: ...

class RankHello(_message.Message):
    __slots__ = ("group_rank", "session")
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    group_rank: int
    session: int
    def __init__(self, group_rank: _Optional[int] = ..., session: _Optional[int] = ...) -> None: ...

class RankBeat(_message.Message):
    __slots__ = ("healed_bytes", "progress", "own_ms", "number", "report")
    HEALED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    OWN_MS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    healed_bytes: int
    progress: Progress
    own_ms: int
    number: int
    report: TrainerReport
    def __init__(self, healed_bytes: _Optional[int] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., own_ms: _Optional[int] = ..., number: _Optional[int] = ..., report: _Optional[_Union[TrainerReport, _Mapping]] = ...) -> None: ...

class RankLeaves(_message.Message):
    __slots__ = ("reason", "serve_ms", "group_rank", "finished_step")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SERVE_MS_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_STEP_FIELD_NUMBER: _ClassVar[int]
    reason: str
    serve_ms: int
    group_rank: int
    finished_step: int
    def __init__(self, reason: _Optional[str] = ..., serve_ms: _Optional[int] = ..., group_rank: _Optional[int] = ..., finished_step: _Optional[int] = ...) -> None: ...

class RankProcess(_message.Message):
    __slots__ = ("pid", "started", "boot_id", "pid_namespace")
    PID_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    pid: int
    started: int
    boot_id: str
    pid_namespace: int
    def __init__(self, pid: _Optional[int] = ..., started: _Optional[int] = ..., boot_id: _Optional[str] = ..., pid_namespace: _Optional[int] = ...) -> None: ...

class RankGoodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankCall(_message.Message):
    __slots__ = ("call", "timeout_ms", "quorum", "vote", "leaves")
    CALL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    call: int
    timeout_ms: int
    quorum: ManagerQuorumRequest
    vote: ShouldCommitRequest
    leaves: RankLeaves
    def __init__(self, call: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., quorum: _Optional[_Union[ManagerQuorumRequest, _Mapping]] = ..., vote: _Optional[_Union[ShouldCommitRequest, _Mapping]] = ..., leaves: _Optional[_Union[RankLeaves, _Mapping]] = ...) -> None: ...

class RankWithdraw(_message.Message):
    __slots__ = ("call",)
    CALL_FIELD_NUMBER: _ClassVar[int]
    call: int
    def __init__(self, call: _Optional[int] = ...) -> None: ...

class ToManagerServer(_message.Message):
    __slots__ = ("hello", "beat", "goodbye", "call", "withdraw", "process", "late")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    hello: RankHello
    beat: RankBeat
    goodbye: RankGoodbye
    call: RankCall
    withdraw: RankWithdraw
    process: RankProcess
    late: Late
    def __init__(self, hello: _Optional[_Union[RankHello, _Mapping]] = ..., beat: _Optional[_Union[RankBeat, _Mapping]] = ..., goodbye: _Optional[_Union[RankGoodbye, _Mapping]] = ..., call: _Optional[_Union[RankCall, _Mapping]] = ..., withdraw: _Optional[_Union[RankWithdraw, _Mapping]] = ..., process: _Optional[_Union[RankProcess, _Mapping]] = ..., late: _Optional[_Union[Late, _Mapping]] = ...) -> None: ...

class RankAnswer(_message.Message):
    __slots__ = ("call", "plan", "verdict", "refused")
    CALL_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    call: int
    plan: ManagerQuorumResponse
    verdict: ShouldCommitResponse
    refused: Refused
    def __init__(self, call: _Optional[int] = ..., plan: _Optional[_Union[ManagerQuorumResponse, _Mapping]] = ..., verdict: _Optional[_Union[ShouldCommitResponse, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class GroupLost(_message.Message):
    __slots__ = ("message", "left")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    message: str
    left: bool
    def __init__(self, message: _Optional[str] = ..., left: bool = ...) -> None: ...

class KillRank(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class FromManagerServer(_message.Message):
    __slots__ = ("welcome", "refused", "answer", "loss_notice", "group_lost", "ask_to_leave", "newcomer_asks", "kill", "released", "waits", "straggler", "quorum_news")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    LOSS_NOTICE_FIELD_NUMBER: _ClassVar[int]
    GROUP_LOST_FIELD_NUMBER: _ClassVar[int]
    ASK_TO_LEAVE_FIELD_NUMBER: _ClassVar[int]
    NEWCOMER_ASKS_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    STRAGGLER_FIELD_NUMBER: _ClassVar[int]
    QUORUM_NEWS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refused: Refused
    answer: RankAnswer
    loss_notice: LossNotice
    group_lost: GroupLost
    ask_to_leave: AskToLeave
    newcomer_asks: NewcomerAsks
    kill: KillRank
    released: Released
    waits: Waits
    straggler: Straggler
    quorum_news: QuorumNews
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., answer: _Optional[_Union[RankAnswer, _Mapping]] = ..., loss_notice: _Optional[_Union[LossNotice, _Mapping]] = ..., group_lost: _Optional[_Union[GroupLost, _Mapping]] = ..., ask_to_leave: _Optional[_Union[AskToLeave, _Mapping]] = ..., newcomer_asks: _Optional[_Union[NewcomerAsks, _Mapping]] = ..., kill: _Optional[_Union[KillRank, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., waits: _Optional[_Union[Waits, _Mapping]] = ..., straggler: _Optional[_Union[Straggler, _Mapping]] = ..., quorum_news: _Optional[_Union[QuorumNews, _Mapping]] = ...) -> None: ...
