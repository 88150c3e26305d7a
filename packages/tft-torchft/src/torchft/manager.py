"""torchft's Manager: its 22 arguments, its methods and its errors, over the Manager of tft_algos.

In torchft the environment takes precedence over an argument, so it does here.

Law of this file: names, arguments, defaults and types of errors. The Manager is tft_algos's.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

import tft_algos
from tft_algos import ConfigError, TooManyFailuresError, WorldSizeMode
from tft_algos.manager.strategy import follow_records
from torchft._errors import OrderError, asserted
from torchft._managed_work import _ManagedWork
from torchft._records import COMMITS, ERRORS, QUORUMS, RecordWriter
from torchft._settings import OWN_HOSTNAME, SIXTY_SECONDS, advertised, given, unless_set
from torchft.checkpointing._adapting import for_manager
from torchft.checkpointing.transport import CheckpointTransport
from torchft.process_group import ProcessGroup, ProcessGroupWrapper

__all__ = [
    "CONNECT_TIMEOUT_SEC_ENV",
    "IS_TRITON_AVAILABLE",
    "MANAGER_ADDR_KEY",
    "MANAGER_PORT_ENV",
    "QUORUM_RETRIES_ENV",
    "QUORUM_TIMEOUT_SEC_ENV",
    "REPLICA_ID_KEY",
    "TIMEOUT_SEC_ENV",
    "TORCH_FR_DUMP_TEMP_FILE_ENV",
    "ExceptionWithTraceback",
    "Manager",
    "WorldSizeMode",
    "extract_trailing_digits",
    "get_timeout",
]

T = TypeVar("T")

MANAGER_ADDR_KEY: Final = "manager_addr"
REPLICA_ID_KEY: Final = "replica_id"
MANAGER_PORT_ENV: Final = "TORCHFT_MANAGER_PORT"
TIMEOUT_SEC_ENV: Final = "TORCHFT_TIMEOUT_SEC"
QUORUM_TIMEOUT_SEC_ENV: Final = "TORCHFT_QUORUM_TIMEOUT_SEC"
CONNECT_TIMEOUT_SEC_ENV: Final = "TORCHFT_CONNECT_TIMEOUT_SEC"
QUORUM_RETRIES_ENV: Final = "TORCHFT_QUORUM_RETRIES"
TORCH_FR_DUMP_TEMP_FILE_ENV: Final = "TORCH_FR_DUMP_TEMP_FILE"
IS_TRITON_AVAILABLE: Final = importlib.util.find_spec("triton") is not None
"""Whether Triton is installed. Quantized reductions work without it here."""

_HEARTBEAT_INTERVAL = timedelta(milliseconds=100)


def get_timeout(timeout_sec_env: str | None, default_timeout_sec: timedelta) -> timedelta:
    """Return the seconds in the text of an environment variable, or the default if there is none.

    Raises: ValueError: the text is no number.
    """
    return default_timeout_sec if timeout_sec_env is None else timedelta(seconds=float(timeout_sec_env))


def extract_trailing_digits(s: str) -> int:
    """Return the number at the end of a text, 0 without one."""
    found = re.search(r"[0-9]+$", s)
    return int(found.group()) if found else 0


class ExceptionWithTraceback(tft_algos.ExceptionWithTraceback):
    """An error of a step, with its traceback. Next: read `original_exception`.

    Args:
        e: the error.
    """

    def __init__(self, e: Exception) -> None:
        super().__init__(e)


class _UserState:
    """The methods of a Manager for the user's state and its own."""

    _ours: tft_algos.Manager

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[Any], object],
        state_dict: Callable[[], Any],
        *,
        compared: bool = True,
    ) -> None:
        """Add a part of the user's state. Raises: AssertionError: the key is used already."""
        with asserted(ConfigError):
            self._ours.register_state_dict_fn(key, load_state_dict, state_dict, compared=compared)

    def set_state_dict_fns(self, load_state_dict: Callable[[Any], object], state_dict: Callable[[], Any]) -> None:
        """Register state without a key. Deprecated: use `register_state_dict_fn`. Raises: AssertionError: twice."""
        with asserted(ConfigError):
            self._ours.set_state_dict_fns(load_state_dict, state_dict)

    def allow_state_dict_read(self) -> None:
        """Mark the user's state as complete again."""
        self._ours.allow_state_dict_read()

    def disallow_state_dict_read(self) -> None:
        """Mark the user's state as half written."""
        self._ours.disallow_state_dict_read()

    def state_dict(self) -> dict[str, int]:
        """Return this Manager's own state: step, batches_committed, and tft's lineage."""
        return self._ours.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Take over a Manager's state. Raises: KeyError: step or batches_committed is missing."""
        for name in ("step", "batches_committed"):
            if name not in state_dict:
                raise KeyError(name)
        self._ours.load_state_dict(state_dict)


class Manager(_UserState):
    """The manager of one replica group. See `tft_algos.Manager` for what it does.

    Args:
        pg: the process group across replica groups.
        load_state_dict, state_dict: load and return the user's state. With only one of them there is no state; state
            may be registered later.
        min_replica_size: minimum number of participants for a commit.
        use_async_quorum: request the quorum in the background of the forward pass.
        timeout: of a reduction, a vote and a transfer. If it is not given, the group keeps its own time-out.
        quorum_timeout: of a quorum. If it is not given, 70 s, because a lighthouse waits 60 s for stragglers by
            default. connect_timeout: of a connection.
        rank, world_size: of this process in its replica group.
        world_size_mode: see `WorldSizeMode`.
        store_addr, store_port: of the replica group's store.
        lighthouse_addr: of the lighthouse.
        replica_id: a name for this replica group.
        port: of the manager server.
        hostname: of this machine, for other replicas.
        heartbeat_interval: only checked. Beats follow from the time-outs.
        checkpoint_transport: moves live state. A transport of the user's own may be one of torchft's kind.
        init_sync: at step 0 all replicas take the weights of one replica.
        max_retries: maximum number of failed steps in a row.
        quorum_retries: only checked. Connection attempts continue until quorum_timeout has passed.
    Raises: ValueError: an argument or an environment variable is wrong or missing. RuntimeError, TimeoutError: the
        store did not answer.
    """

    def __init__(
        self,
        pg: Any,
        load_state_dict: Callable[[Any], object] | None,
        state_dict: Callable[[], Any] | None,
        min_replica_size: int,
        use_async_quorum: bool = True,
        timeout: timedelta = SIXTY_SECONDS,
        quorum_timeout: timedelta = SIXTY_SECONDS,
        connect_timeout: timedelta = SIXTY_SECONDS,
        rank: int | None = None,
        world_size: int | None = None,
        world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
        store_addr: str | None = None,
        store_port: int | None = None,
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        port: int | None = None,
        hostname: str = OWN_HOSTNAME,
        heartbeat_interval: timedelta = _HEARTBEAT_INTERVAL,
        checkpoint_transport: CheckpointTransport[Any] | None = None,
        init_sync: bool = True,
        max_retries: int | None = None,
        quorum_retries: int = 0,
    ) -> None:
        self._pg = pg
        # The groups of torchft's users need no time-out of their own.
        lacks_timeout = isinstance(pg, ProcessGroup) and type(pg).set_timeout is ProcessGroup.set_timeout
        has_state = load_state_dict is not None and state_dict is not None
        self._ours = tft_algos.Manager(
            ProcessGroupWrapper(pg=pg) if lacks_timeout else pg,
            load_state_dict if has_state else None,
            state_dict if has_state else None,
            min_replica_size,
            use_async_quorum=use_async_quorum,
            timeout=unless_set(TIMEOUT_SEC_ENV, given(timeout)),
            quorum_timeout=unless_set(QUORUM_TIMEOUT_SEC_ENV, given(quorum_timeout)),
            connect_timeout=unless_set(CONNECT_TIMEOUT_SEC_ENV, connect_timeout),
            rank=rank,
            world_size=world_size,
            world_size_mode=world_size_mode,
            store_addr=store_addr,
            store_port=store_port,
            lighthouse_addr=lighthouse_addr,
            replica_id=replica_id,
            port=port,
            hostname=advertised(hostname),
            heartbeat_interval=heartbeat_interval,
            checkpoint_transport=for_manager(checkpoint_transport),
            init_sync=init_sync,
            max_retries=max_retries,
            quorum_retries=None if os.environ.get(QUORUM_RETRIES_ENV) else quorum_retries,
        )
        self.quorum_logger, self.commits_logger, self.errors_logger = QUORUMS, COMMITS, ERRORS
        follow_records(self._ours.strategy, RecordWriter(self._ours, min_replica_size).write)

    def __getattr__(self, name: str) -> Any:
        """Return what tft's Manager has in addition: strategy, status, left, leave, replica_id and others."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._ours, name)

    # --- a step -------------------------------------------------------------------------------------------------------

    def start_quorum(
        self,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: timedelta | None = None,
        *,
        use_async_quorum: bool | None = None,
    ) -> None:
        """Begin a step: request a quorum. Raises, with a synchronous quorum: TimeoutError, RuntimeError."""
        self._ours.start_quorum(allow_heal, shrink_only, timeout, use_async_quorum=use_async_quorum)

    def wait_quorum(self) -> None:
        """Wait for the quorum. Raises: AssertionError: none was started. The error of the quorum."""
        if self._ours.strategy.attempt == 0:
            raise OrderError("must call start_quorum before wait_quorum")
        self._ours.wait_quorum()

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: Any = False,
        reduce_op: Any = dist.ReduceOp.AVG,
        *,
        weight: float | None = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Reduce a tensor over the participants, in place. A failure is reported and never raised.

        Returns: a Work. Steps that are added to its future with `then` have run when its `wait` returns.
        Raises: ValueError: AVG of whole numbers. AssertionError: no quorum was started.
        """
        if self._ours.strategy.attempt == 0:
            raise OrderError("must call start_quorum before allreduce")
        work = self._ours.allreduce(tensor, should_quantize, reduce_op, weight=weight, timeout=timeout)
        return _ManagedWork(self, work, tensor)

    def wrap_future(
        self, fut: torch.futures.Future[T], default: T, timeout: timedelta | None = None
    ) -> torch.futures.Future[T]:
        """Return a future that never fails. An error or a time-out is reported, and the result is `default`."""
        return self._ours.wrap_future(fut, default, timeout)

    def report_error(self, e: Exception) -> None:
        """Report that this step has failed."""
        self._ours.report_error(e)

    def errored(self) -> ExceptionWithTraceback | None:
        """Return the first error of this step, or None."""
        error = self._ours.errored()
        return None if error is None else ExceptionWithTraceback(error.original_exception)

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End a step. A second call in a step returns the same verdict.

        Returns: whether the optimizer steps now.
        Raises: RuntimeError: more steps in a row failed than max_retries allows, or this process can't continue.
            TimeoutError: no verdict arrived.
        """
        verdict = self._ours.strategy.verdict
        if verdict is not None:
            return verdict
        try:
            return self._ours.should_commit(timeout)
        except TooManyFailuresError as error:
            raise RuntimeError(
                f"should_commit failed {error.failures} times consecutively, exceeding "
                f"max_retries={self._ours.strategy.config.max_retries}; {error}"
            ) from error

    # --- facts --------------------------------------------------------------------------------------------------------

    def current_step(self) -> int:
        """Return the number of committed steps."""
        return self._ours.current_step()

    def batches_committed(self) -> int:
        """Return the sum over the committed steps of their participants."""
        return self._ours.batches_committed()

    def num_participants(self) -> int:
        """Return the number of participants of this step, 0 before the first."""
        return self._ours.num_participants()

    def participating_rank(self) -> int | None:
        """Return this group's rank among the participants. None: it gives zeros, or there was no quorum yet."""
        return self._ours.participating_rank()

    def is_participating(self) -> bool:
        """Return whether this group's gradients count in this step."""
        return self._ours.is_participating()

    # --- the end ------------------------------------------------------------------------------------------------------

    def shutdown(self, wait: bool = True) -> None:
        """End everything that this Manager started, and its process group. A second call does nothing."""
        self._ours.shutdown(wait)
