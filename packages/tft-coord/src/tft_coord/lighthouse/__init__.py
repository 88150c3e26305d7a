"""The parts of a lighthouse server, for `tft-lighthouse` and for a lighthouse of your own.

- The cores: `ProtocolRouter` and the cores of each kind of job, their `events` and `effects`, and the values in them.
- The `election` of one lighthouse among several.
- The wire: `codec`, `packing`, the `services` and the limits of names and members.
- The transport: `Server`, `Outbox`, `LoopShare`, addresses, and `grpc` itself, which this project imports in one place.
- The process: the secret, the loggers, and the limit of open files.

Law of this folder: exported names of other modules, and nothing else.
"""

from __future__ import annotations

from tft_coord.client.kill import kill_group
from tft_coord.compat.router import TORCHFT_JOB, ProtocolRouter
from tft_coord.compat.rule import TorchftCore
from tft_coord.compat.views import DescribedJob, LighthouseDescription
from tft_coord.core import effects, election, events
from tft_coord.core.config import JobSettings, LighthouseConfig, Limits
from tft_coord.core.effects import JobEnded, JobFailed, PaceChanged, QuorumFormed, ReplicaLeft, ReplicaLost, WaitNoticed
from tft_coord.core.lighthouse import LighthouseCore
from tft_coord.core.names import base_name, shorten
from tft_coord.core.stalls import Spent, Stall, TrainerReport
from tft_coord.core.status import JobState, JobStatus, ReplicaState, ReplicaStatus, WaitStatus
from tft_coord.core.types import MAX_INT64, Quorum, QuorumNews, Refusal
from tft_coord.descriptors import raise_limit
from tft_coord.forks import Inheritance, let_go_in_child
from tft_coord.logs import configure_process, field, logger_for_people, quoted
from tft_coord.rpc import grpc
from tft_coord.security import (
    ALL_JOBS,
    HOW_TO_SERVE_OTHERS,
    Gate,
    bind_without_secret,
    check_host_without_secret,
    is_for_this_machine,
    opens_job,
    read_insecure,
    read_job_tokens,
    read_token,
    read_token_file,
)
from tft_coord.tls import TLS
from tft_coord.tokens import JobTokens, Token, TokenFile, check
from tft_coord.transport.address import (
    check_host,
    host_of,
    interface_of,
    is_loopback,
    join_host_port,
    peer_address,
    target,
)
from tft_coord.transport.loop import LoopShare
from tft_coord.transport.names import names
from tft_coord.transport.outbox import Outbox
from tft_coord.transport.server import Server
from tft_coord.transport.settings import fail, server_options
from tft_coord.variables import KNOWN_VARIABLES, nearest_variable
from tft_coord.wire import codec, packing, services
from tft_coord.wire.limits import MAX_ADDRESS_BYTES, MAX_MEMBERS, MAX_NAME_BYTES
from tft_coord.wire.services import Context

__all__ = [
    "ALL_JOBS",
    "HOW_TO_SERVE_OTHERS",
    "KNOWN_VARIABLES",
    "MAX_ADDRESS_BYTES",
    "MAX_INT64",
    "MAX_MEMBERS",
    "MAX_NAME_BYTES",
    "TLS",
    "TORCHFT_JOB",
    "Context",
    "DescribedJob",
    "Gate",
    "Inheritance",
    "JobEnded",
    "JobFailed",
    "JobSettings",
    "JobState",
    "JobStatus",
    "JobTokens",
    "LighthouseConfig",
    "LighthouseCore",
    "LighthouseDescription",
    "Limits",
    "LoopShare",
    "Outbox",
    "PaceChanged",
    "ProtocolRouter",
    "Quorum",
    "QuorumFormed",
    "QuorumNews",
    "Refusal",
    "ReplicaLeft",
    "ReplicaLost",
    "ReplicaState",
    "ReplicaStatus",
    "Server",
    "Spent",
    "Stall",
    "Token",
    "TokenFile",
    "TorchftCore",
    "TrainerReport",
    "WaitNoticed",
    "WaitStatus",
    "base_name",
    "bind_without_secret",
    "check",
    "check_host",
    "check_host_without_secret",
    "codec",
    "configure_process",
    "effects",
    "election",
    "events",
    "fail",
    "field",
    "grpc",
    "host_of",
    "interface_of",
    "is_for_this_machine",
    "is_loopback",
    "join_host_port",
    "kill_group",
    "let_go_in_child",
    "logger_for_people",
    "names",
    "nearest_variable",
    "opens_job",
    "packing",
    "peer_address",
    "quoted",
    "raise_limit",
    "read_insecure",
    "read_job_tokens",
    "read_token",
    "read_token_file",
    "server_options",
    "services",
    "shorten",
    "target",
]
