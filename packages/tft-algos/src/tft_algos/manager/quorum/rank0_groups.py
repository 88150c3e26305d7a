"""Islands: replica groups of different sizes, in which group rank 0 alone communicates with other groups.

Usually every rank communicates with the same rank of other groups. All groups then have the same number of ranks and
shard their tensors alike. Islands may differ. Rank 0 of an island reduces, gives and fetches for all its ranks. Tensors
between islands are whole, not sharded. The ranks of an island gather their parts before, and take their parts of the
result afterwards.

Law of this file: what a rank of an island does differently from a rank of another group. The Manager decides whether it
happens, and `shards` how a whole tensor is sharded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed as dist

from tft_algos.dtensors import is_dtensor
from tft_algos.errors import ConfigError, HealingError, UserStateError
from tft_algos.manager.config import ResolvedConfig
from tft_algos.manager.interfaces import Coordinator, ProcessGroupLike
from tft_algos.manager.recovery.healing import state_key
from tft_ckpt import CheckpointTransport, PGTransport
from tft_ckpt.state.walk import Path, map_leaves
from tft_coord.core.types import Plan
from tft_pg import DummyWork

NOTHING: Final = ""


@final
class NullGroup:
    """The process group of a rank that reduces nothing, because rank 0 of its island does. It never has an error.

    Args:
        group: the user's group. It is never configured, and is shut down with this one.
    """

    def __init__(self, group: ProcessGroupLike) -> None:
        self._group = group

    def configure(
        self,
        store_addr: str,
        rank: int,
        world_size: int,
        *,
        replica_id: str,
        quorum_id: int | None,
        group_rank: int,
        group_world_size: int,
        global_ranks: Sequence[int] | None,
    ) -> None:
        """Do nothing, because this rank is in no group."""

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.ReduceOp | dist.ReduceOp.RedOpType) -> dist.Work:
        """Leave the tensors as they are."""
        return DummyWork(tensors)

    def errored(self) -> Exception | None:
        return None

    def abort(self) -> None:
        """Do nothing, because no operation runs."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing, because no operation takes time."""

    def shutdown(self) -> None:
        self._group.shutdown()


def check_transport(config: ResolvedConfig) -> None:
    """Check that the transport can spread state to all ranks of an island.

    Raises: ConfigError: the transport reaches only members of its process group, and not all ranks are members.
    """
    spreads = config.rank0_synchronization_only and config.world_size > 1
    if spreads and isinstance(config.checkpoint_transport, PGTransport):
        raise ConfigError(
            "checkpoint_transport is a PGTransport, which reaches only group rank 0 with rank0_synchronization_only, "
            "and the other ranks receive the state from rank 0; give an HTTPTransport, or none"
        )


def global_ranks(replica_world_size: int, config: ResolvedConfig) -> list[int]:
    """Return the ranks in the whole job that this rank communicates with, for messages. For islands: their places."""
    if config.rank0_synchronization_only:
        return list(range(replica_world_size))
    return [replica * config.world_size + config.rank for replica in range(replica_world_size)]


def refuse_strategy(manager: object, name: str) -> None:
    """Refuse a strategy that averages gradients of every rank, if the Manager reduces those of rank 0 only.

    Args:
        manager: the Manager that the strategy was given. An object of the user's own class is accepted.
        name: the name of the strategy.
    Raises: ConfigError: the Manager has rank0_synchronization_only.
    """
    config = getattr(getattr(manager, "strategy", None), "config", None)
    if getattr(config, "rank0_synchronization_only", False) is True:
        raise ConfigError(
            f"{name} averages the gradients of every rank, and this Manager has rank0_synchronization_only, with which "
            "only group rank 0 reduces; use LocalSGD or DiLoCo, or a Manager without it"
        )


# --- giving -----------------------------------------------------------------------------------------------------------


def whole(state: Any, *, keep: bool = True) -> Any:
    """Return a state with whole tensors in place of DTensors.

    This is a collective of each DTensor's mesh, in the order of the state. A tensor that several processes shared is on
    the CPU afterwards, so that no accelerator has to hold all of it.

    Args:
        state: mappings, lists and tuples. The state is not changed. A part without DTensors is not copied.
        keep: False: take part, and free each tensor at once.
    """

    def unsharded(_: Path, leaf: Any) -> Any:
        if not is_dtensor(leaf):
            return leaf
        if leaf.device_mesh.size() == 1 and not any(placement.is_partial() for placement in leaf.placements):
            return leaf.to_local()
        full: torch.Tensor = leaf.full_tensor().detach()
        return full.cpu() if keep else None

    return map_leaves(state, unsharded)


def rank0_digests(
    state: Mapping[str, Any] | None,
    name: str,
    *,
    digest: Callable[[Mapping[str, Any]], str],
    is_torn: bool,
    config: ResolvedConfig,
    coordinator: Coordinator,
) -> tuple[str]:
    """Return what other islands compare: the digest of rank 0's whole state. All ranks call this.

    The digest does not depend on how the state is sharded here. A tensor that is whole on every rank must be the same
    on every rank.

    Args:
        state: the state of this rank. None: the state could not be taken.
        name: the name of this comparison, a new one each time.
        digest: computes a digest. It raises UserStateError.
        is_torn: the state of this rank is half written.
        config, coordinator: of this rank.
    Returns: the digest. "": a rank has no state to show, or a state that differs from rank 0's.
    Raises: RequestTimeoutError: a rank did not join. UserStateError: the state of this rank can't be compared.
    """

    def gather(what: str, value: str) -> tuple[str, ...]:
        return coordinator.gather(f"{what} {name}", value, config.timeout) if config.world_size > 1 else (value,)

    # The other ranks must not wait in a collective for a rank without a state.
    if not all(gather("ready for", "yes" if state is not None else NOTHING)) or state is None:
        return (NOTHING,)
    own = NOTHING
    error: UserStateError | None = None
    entire = whole(state, keep=not config.is_passive_rank)
    try:
        own = digest(map_leaves(state, lambda _, leaf: None if is_dtensor(leaf) else leaf))
        if not config.is_passive_rank:
            own += f" {digest(entire)}"
    except UserStateError as failure:
        own, error = NOTHING, failure
    digests = [words.split() for words in gather("of", NOTHING if is_torn else own)]
    if error is not None:
        raise error
    alike = all(digests) and len({words[0] for words in digests}) == 1
    return (digests[0][1] if alike else NOTHING,)


# --- taking -----------------------------------------------------------------------------------------------------------


def spread(
    state: Mapping[str, Any],
    plan: Plan,
    *,
    config: ResolvedConfig,
    coordinator: Coordinator,
    transport: CheckpointTransport[Any],
    received_before: int,
    cancelled: Callable[[], bool],
) -> Mapping[str, Any]:
    """Give the other ranks the state that rank 0 has fetched. All ranks call this.

    Args:
        state: the state of rank 0.
        plan: a plan that says to heal.
        config, coordinator, transport: of this rank.
        received_before: bytes that this process received in earlier healings.
        cancelled: returns whether the state is not needed any more.
    Returns: rank 0's state, on every rank.
    Raises: HealingError: this rank could not give or take the state.
    """
    metadata = NOTHING
    failure: Exception | None = None
    give_up_at = time.monotonic() + config.heal_timeout.total_seconds()
    if config.rank == 0:
        try:
            transport.send_checkpoint([], plan.step, state, config.heal_timeout, key=state_key(plan))
            metadata = transport.metadata()
        except Exception as error:  # any error of the user's own transport
            failure = error
    try:
        # A second attempt to spread the same state always belongs to another quorum, so the name is unique.
        name = f"spread {plan.key} {plan.step}"
        source = coordinator.gather(name, metadata, config.timeout)[0]
        if config.rank == 0:
            if failure is not None:
                raise failure
            return state
        if source == NOTHING:
            raise HealingError(
                f"rank 0 of replica {plan.replica_id} could not offer the state of step {plan.step} "
                "to the other ranks of its group"
            )
        left = timedelta(seconds=max(give_up_at - time.monotonic(), 0.001))
        received: Mapping[str, Any] = transport.recv_checkpoint(
            plan.replica_rank,
            source,
            plan.step,
            left,
            key=state_key(plan),
            progress=lambda received, _: coordinator.healed(received_before + received),
            cancelled=cancelled,
        )
    except Exception as error:
        raise HealingError(
            f"rank {config.rank} could not receive the state of step {plan.step} from rank 0 of replica "
            f"{plan.replica_id} ({error}); the next quorum tries again",
            sources=tuple(one.replica_id for one in plan.sources),
        ) from error
    return received
