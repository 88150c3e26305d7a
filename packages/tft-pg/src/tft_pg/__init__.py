"""PyTorch process groups that can be reconfigured, aborted from another thread, and composed."""

from tft_pg.backends.accelerator import AcceleratorProcessGroup
from tft_pg.backends.device_library import AcceleratorBackend, Communicator
from tft_pg.backends.gloo import ProcessGroupGloo
from tft_pg.backends.nccl import ProcessGroupNCCL
from tft_pg.backends.reconfigurable import ReconfigurableProcessGroup
from tft_pg.backends.xccl import ProcessGroupXCCL
from tft_pg.base import ProcessGroup
from tft_pg.child.gloo import ProcessGroupBabyGloo
from tft_pg.child.group import ProcessGroupBaby
from tft_pg.child.nccl import ProcessGroupBabyNCCL
from tft_pg.child.xccl import ProcessGroupBabyXCCL
from tft_pg.debug import DebugServer, PagePlace
from tft_pg.errors import (
    AbortedError,
    CollectiveTimeoutError,
    CommunicatorFailedError,
    ConfigError,
    ConfigureError,
    NotConfiguredError,
    OperationRefusedError,
    PeerDisconnectedError,
    ProcessGroupClosedError,
    ProcessGroupError,
    StoreAddressError,
    StoreUnreachableError,
    TraceWriteError,
    UnsupportedOperationError,
)
from tft_pg.forwarding import forward
from tft_pg.futures import context_timeout, future_timeout, future_wait, stream_timeout
from tft_pg.handles import ReconfigureOptions, reconfigure_with_store, supports_reconfigure
from tft_pg.mesh import extend_device_mesh
from tft_pg.ops import COLLECTIVES, Collective
from tft_pg.recorder import dump_traces, flush_traces
from tft_pg.replica_group import init_group
from tft_pg.store import StoreAddress, create_store_client, format_store_addr, parse_store_addr
from tft_pg.word import WORD_VALUES_MAX, WordExchange, exchange_word_by_allreduce
from tft_pg.work import DummyWork
from tft_pg.wrappers.dummy import ProcessGroupDummy
from tft_pg.wrappers.faulty import FakeProcessGroupWrapper
from tft_pg.wrappers.managed import ManagedProcessGroup, ReducesOverParticipants
from tft_pg.wrappers.swallowing import ErrorSwallowingProcessGroupWrapper
from tft_pg.wrappers.wrapping import ProcessGroupWrapper, WrappingProcessGroup

__version__ = "0.1.0"

__all__ = [
    "COLLECTIVES",
    "WORD_VALUES_MAX",
    "AbortedError",
    "AcceleratorBackend",
    "AcceleratorProcessGroup",
    "Collective",
    "CollectiveTimeoutError",
    "Communicator",
    "CommunicatorFailedError",
    "ConfigError",
    "ConfigureError",
    "DebugServer",
    "DummyWork",
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ManagedProcessGroup",
    "NotConfiguredError",
    "OperationRefusedError",
    "PagePlace",
    "PeerDisconnectedError",
    "ProcessGroup",
    "ProcessGroupBaby",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupClosedError",
    "ProcessGroupDummy",
    "ProcessGroupError",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
    "ProcessGroupXCCL",
    "ReconfigurableProcessGroup",
    "ReconfigureOptions",
    "ReducesOverParticipants",
    "StoreAddress",
    "StoreAddressError",
    "StoreUnreachableError",
    "TraceWriteError",
    "UnsupportedOperationError",
    "WordExchange",
    "WrappingProcessGroup",
    "__version__",
    "context_timeout",
    "create_store_client",
    "dump_traces",
    "exchange_word_by_allreduce",
    "extend_device_mesh",
    "flush_traces",
    "format_store_addr",
    "forward",
    "future_timeout",
    "future_wait",
    "init_group",
    "parse_store_addr",
    "reconfigure_with_store",
    "stream_timeout",
    "supports_reconfigure",
]
