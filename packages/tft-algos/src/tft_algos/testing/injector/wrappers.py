"""The parts of a Manager, each wrapped with an injector.

Law of this file: one wrapper for each part. A wrapper asks the injector at its places, fails in the part's own form,
and forwards everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial, update_wrapper
from typing import Any, Protocol, final

import torch
import torch.distributed as dist

from tft_algos.manager.interfaces import Coordinator, ProcessGroupLike, StandingCoordinator
from tft_algos.manager.step.control_words import standing_coordinator
from tft_algos.testing.injector.fault import Fault, Place
from tft_ckpt import CheckpointTransport, StateKey, StateUnavailableError
from tft_coord.core.progress import Progress
from tft_coord.core.types import Plan, Purpose, QuorumKey, QuorumNews, RankRequest, Verdict
from tft_coord.errors import RequestTimeoutError
from tft_coord.notifications import Notification
from tft_pg import WordExchange
from tft_pg.errors import ConfigureError, PeerDisconnectedError
from tft_pg.work import PendingWork


class Injector(Protocol):
    """The interface of the injector for a wrapper."""

    def reached(self, place: Place) -> Fault | None: ...

    def is_awaited(self, place: Place) -> bool: ...

    def check_attached(self) -> None: ...

    def release(self) -> None: ...


@final
class StruckGroup:
    """A wrapped process group.

    FAIL: configure raises ConfigureError. The Work of a reduction fails, and its connections break. The same holds for
    a word.
    """

    def __init__(self, inside: ProcessGroupLike, injector: Injector) -> None:
        self._inside = inside
        self._injector = injector

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inside, name)
        # If the wrapped group can't exchange a word, neither group has this method.
        return update_wrapper(partial(self._exchange_word, found), found) if name == "exchange_word" else found

    def _exchange_word(
        self, exchange: Callable[..., WordExchange], words: Sequence[int], *, round_number: int, timeout: timedelta
    ) -> WordExchange:
        fault = self._injector.reached(Place.WORD)
        if fault is not None:
            self._inside.abort()
            raise PeerDisconnectedError(fault.describe())
        return exchange(words, round_number=round_number, timeout=timeout)

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
        fault = self._injector.reached(Place.CONFIGURE)
        if fault is not None:
            raise ConfigureError(fault.describe())
        self._inside.configure(
            store_addr,
            rank,
            world_size,
            replica_id=replica_id,
            quorum_id=quorum_id,
            group_rank=group_rank,
            group_world_size=group_world_size,
            global_ranks=global_ranks,
        )

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.ReduceOp | dist.ReduceOp.RedOpType) -> dist.Work:
        fault = self._injector.reached(Place.REDUCTION)
        if fault is None:
            return self._inside.allreduce(tensors, opts)
        # The effect is that of a broken connection: the peers notice it, and the group is unusable until the next
        # configure.
        self._inside.abort()
        work = PendingWork(on_timeout=lambda limit: TimeoutError(str(limit)), limit=timedelta(seconds=1))
        work.fail(PeerDisconnectedError(fault.describe()))
        return work

    def errored(self) -> Exception | None:
        return self._inside.errored()

    def abort(self) -> None:
        self._inside.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        self._inside.set_timeout(timeout)

    def shutdown(self) -> None:
        self._injector.release()
        self._inside.shutdown()


class StruckCoordinator:
    """A wrapped coordinator. FAIL: a time-out, RequestTimeoutError. Only votes on a commit count as VOTE."""

    def __init__(self, inside: Coordinator, injector: Injector) -> None:
        self._inside = inside
        self._injector = injector

    @property
    def replica_id(self) -> str:
        return self._inside.replica_id

    def quorum(self, request: RankRequest, timeout: timedelta) -> Plan | QuorumKey:
        self._answered(Place.QUORUM)
        return self._inside.quorum(request, timeout)

    def vote(
        self, step: int, yes: bool, timeout: timedelta, *, key: QuorumKey, purpose: Purpose, leaving: bool = False
    ) -> Verdict:
        if purpose is Purpose.COMMIT:
            self._answered(Place.VOTE)
        return self._inside.vote(step, yes, timeout, key=key, purpose=purpose, leaving=leaving)

    def leave(self, reason: str, serve: timedelta, timeout: timedelta, *, finished_step: int | None = None) -> None:
        self._inside.leave(reason, serve, timeout, finished_step=finished_step)

    def _answered(self, place: Place) -> None:
        fault = self._injector.reached(place)
        if fault is not None:
            raise RequestTimeoutError(fault.describe())

    def listen(self, listener: Callable[[Notification], None]) -> None:
        self._inside.listen(listener)

    def follow(self, progress: Callable[[], Progress]) -> None:
        self._inside.follow(progress)

    def beat(self) -> None:
        self._inside.beat()

    def gather(self, name: str, value: str, timeout: timedelta) -> tuple[str, ...]:
        return self._inside.gather(name, value, timeout)

    def source_metadata(self, address: str, timeout: timedelta) -> str:
        return self._inside.source_metadata(address, timeout)

    def healed(self, bytes_total: int) -> None:
        self._inside.healed(bytes_total)

    def close(self) -> None:
        self._injector.release()
        self._inside.close()


@final
class StruckStandingCoordinator(StruckCoordinator):
    """A wrapped coordinator whose quorums may stand.

    While a fault may happen at a request, the job makes a request in every step. For this, the rank is told that its
    quorum is recalled, and its requests have a lease of zero.
    """

    def __init__(self, inside: StandingCoordinator, injector: Injector) -> None:
        super().__init__(inside, injector)
        self._standing = inside
        self._listener: Callable[[Notification], None] = lambda _: None
        self._key: QuorumKey | None = None  # of the last plan

    def quorum(self, request: RankRequest, timeout: timedelta) -> Plan | QuorumKey:
        self._answered(Place.QUORUM)
        if request.lease_ms and self._injector.is_awaited(Place.QUORUM):
            request = replace(request, lease_ms=0)
        answer = self._standing.quorum(request, timeout)
        self._key = answer.key if isinstance(answer, Plan) else answer
        return answer

    def vote(
        self,
        step: int,
        yes: bool,
        timeout: timedelta,
        *,
        key: QuorumKey,
        purpose: Purpose,
        leaving: bool = False,
        stands: bool = False,
    ) -> Verdict:
        if purpose is Purpose.COMMIT:
            self._answered(Place.VOTE)
        return self._standing.vote(step, yes, timeout, key=key, purpose=purpose, leaving=leaving, stands=stands)

    def listen(self, listener: Callable[[Notification], None]) -> None:
        self._listener = listener
        super().listen(listener)

    def number_beats(self, number: Callable[[], int]) -> None:
        def numbered() -> int:
            # This is repeated with each beat, because a fault may be requested at any time, and a recall counts for one
            # quorum.
            if self._key is not None and self._injector.is_awaited(Place.QUORUM):
                self._listener(QuorumNews(self._key, recalled=True))
            return number()

        self._standing.number_beats(numbered)

    def late(self, key: QuorumKey, step: int) -> None:
        self._standing.late(key, step)


def struck_coordinator(inside: Coordinator, injector: Injector) -> StruckCoordinator:
    """Wrap a coordinator. Quorums of the wrapper may stand if the quorums of the wrapped coordinator may stand."""
    standing = standing_coordinator(inside)
    return StruckCoordinator(inside, injector) if standing is None else StruckStandingCoordinator(standing, injector)


@final
class StruckTransport(CheckpointTransport[Any]):
    """A wrapped transport. FAIL: the state can't be sent and waiting receivers are told, or no source can give it."""

    def __init__(self, inside: CheckpointTransport[Any], injector: Injector) -> None:
        self._inside = inside
        self._injector = injector
        self.needs_group = inside.needs_group  # the base class has it, so __getattr__ is not asked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)

    def metadata(self) -> str:
        self._injector.check_attached()  # a step first calls this, on the user's thread
        return self._inside.metadata()

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta, *, key: StateKey | None = None
    ) -> None:
        fault = self._injector.reached(Place.SERVING)
        if fault is None:
            self._inside.send_checkpoint(dst_ranks, step, state_dict, timeout, key=key)
            return
        # The transport does not know the class of this object, so it refuses the state, and tells the waiting
        # receivers.
        self._inside.send_checkpoint(dst_ranks, step, {fault.describe(): _CantTravel()}, timeout, key=key)
        raise StateUnavailableError(fault.describe(), source=self._inside.metadata(), key=key)

    def check_state(self, state_dict: Any) -> None:
        self._inside.check_state(state_dict)

    def refuse_checkpoint(
        self, step: int, sentence: str, *, key: StateKey | None = None, dst_ranks: Sequence[int] = ()
    ) -> None:
        self._inside.refuse_checkpoint(step, sentence, key=key, dst_ranks=dst_ranks)

    def poor_sources(self) -> Mapping[str, str]:
        return self._inside.poor_sources()

    def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str,
        step: int,
        timeout: timedelta,
        *,
        key: StateKey | None = None,
        into: Any | None = None,
        sources: Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Any:
        fault = self._injector.reached(Place.HEALING)
        if fault is not None:
            raise StateUnavailableError(fault.describe(), source=metadata, key=key)
        return self._inside.recv_checkpoint(
            src_rank,
            metadata,
            step,
            timeout,
            key=key,
            into=into,
            sources=sources,
            progress=progress,
            cancelled=cancelled,
        )

    def prepare_to_send(self, num_bytes: int = 0) -> None:
        self._inside.prepare_to_send(num_bytes)

    def disallow_checkpoint(self) -> None:
        self._inside.disallow_checkpoint()

    def abort(self) -> None:
        self._inside.abort()

    def shutdown(self, wait: bool = True) -> None:
        self._injector.release()
        self._inside.shutdown(wait)


@final
class _CantTravel:
    """An object of a type that no transport can send."""
