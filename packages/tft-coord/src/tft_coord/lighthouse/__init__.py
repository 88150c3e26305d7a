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
from tft_coord.logs import configure_process, logger_for_people
from tft_coord.rpc import grpc
from tft_coord.security import (
    HOW_TO_SERVE_OTHERS,
    admits,
    bind_without_secret,
    check_host_without_secret,
    check_token,
    read_insecure,
    read_token,
    read_token_file,
)
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
from tft_coord.wire import codec, packing, services
from tft_coord.wire.limits import MAX_ADDRESS_BYTES, MAX_MEMBERS, MAX_NAME_BYTES
from tft_coord.wire.services import Context

__all__ = [
    "HOW_TO_SERVE_OTHERS",
    "MAX_ADDRESS_BYTES",
    "MAX_INT64",
    "MAX_MEMBERS",
    "MAX_NAME_BYTES",
    "TORCHFT_JOB",
    "Context",
    "DescribedJob",
    "Inheritance",
    "JobEnded",
    "JobFailed",
    "JobSettings",
    "JobState",
    "JobStatus",
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
    "TorchftCore",
    "TrainerReport",
    "WaitNoticed",
    "WaitStatus",
    "admits",
    "base_name",
    "bind_without_secret",
    "check_host",
    "check_host_without_secret",
    "check_token",
    "codec",
    "configure_process",
    "effects",
    "election",
    "events",
    "fail",
    "grpc",
    "host_of",
    "interface_of",
    "is_loopback",
    "join_host_port",
    "kill_group",
    "let_go_in_child",
    "logger_for_people",
    "names",
    "packing",
    "peer_address",
    "raise_limit",
    "read_insecure",
    "read_token",
    "read_token_file",
    "server_options",
    "services",
    "shorten",
    "target",
]
