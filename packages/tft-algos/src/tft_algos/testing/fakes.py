"""Fakes for coordination and transport, in memory, with answers that the test wrote beforehand.

With them, a Manager runs in one process without a socket. The test plays the lighthouse, the other replicas and the
network.

Law of this file: no threads, and no waiting unless the test requests it. A fake without a further answer raises.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from tft_algos.manager.reduce.reduction import changing
from tft_ckpt import (
    CheckpointTransport,
    ConfigError,
    StagedCheckpoint,
    StateKey,
    StateUnavailableError,
    TransportClosedError,
)
from tft_coord.core.lineage import initial_lineage
from tft_coord.core.progress import Progress
from tft_coord.core.types import DrainComplete, Plan, Purpose, QuorumKey, RankRequest, Source, Verdict
from tft_coord.notifications import Notification
from tft_pg.work import PendingWork

_LOOK_S = 0.01


def plan_of(
    quorum_id: int = 1,
    *,
    step: int = 0,
    lineage: int | None = None,
    rank: int = 0,
    size: int = 1,
    healing: Sequence[int] = (),
    participants: Sequence[int] | None = None,
    min_replica_size: int = 1,
    store_address: str = "localhost:1",
) -> Plan:
    """Return a plan, as replica `rank` of `size` gets it.

    Args:
        quorum_id: the id in the key. The nonce of the key is the same number.
        step, lineage: the reference. None: the lineage of a fresh state.
        healing: replica ranks that heal. All others hold the reference.
        participants: replica ranks. None: all that hold the reference.
    """
    names = [f"replica_{member}" for member in range(size)]
    holders = tuple(member for member in range(size) if member not in healing)
    counted = tuple(participants) if participants is not None else holders
    heal = rank in healing
    return Plan(
        key=QuorumKey(quorum_id, quorum_id),
        replica_id=names[rank],
        replica_rank=rank,
        replica_world_size=size,
        replica_ids=tuple(names),
        step=step,
        lineage=initial_lineage("default") if lineage is None else lineage,
        heal=heal,
        sources=tuple(Source(member, names[member], names[member]) for member in holders) if heal else (),
        recover_dst_replica_ranks=tuple(healing) if rank == holders[0] else (),
        serve=bool(healing) and rank in holders,
        store_address=store_address,
        up_to_date=holders,
        participants=counted,
        participating_rank=counted.index(rank) if rank in counted else None,
        min_replica_size=min_replica_size,
        store_replica_id=names[holders[0]],
    )


@final
class ScriptedCoordinator:
    """A coordinator that answers a Manager's questions from two lists.

    Args:
        answers: to its quorum requests, in order: a Plan, a QuorumKey for "unchanged", or an exception to raise.
        verdicts: to its votes, in order. After the end of the list, the verdict is the Manager's vote.
        replica_id: of the group.
    `requests`, `votes` and `gathered` hold the requests, the votes, and the values given to the other ranks of the
    group. The other ranks give `other_ranks`, and the first `rank` of them come before this one. `listener` is the
    Manager's function for news, and `progress` its function for its progress.
    """

    def __init__(
        self,
        answers: Iterable[Plan | QuorumKey | Exception],
        verdicts: Iterable[bool | Verdict | Exception] = (),
        *,
        replica_id: str = "replica_0",
    ) -> None:
        self._answers = deque(answers)
        self._verdicts = deque(verdicts)
        self.replica_id = replica_id
        self.requests: list[RankRequest] = []
        self.votes: list[tuple[QuorumKey, int, bool, Purpose]] = []
        self.gathered: list[tuple[str, str]] = []
        self.left: list[tuple[str, timedelta]] = []
        self.finished_steps: list[int | None] = []  # one entry for each leave
        self.other_ranks: tuple[str, ...] = ()
        self.rank = 0
        self.healed_bytes = 0
        self.beats = 0  # those that a Manager asked for
        self.closed = False
        self.progress: Callable[[], Progress | None] = lambda: None
        self.listener: Callable[[Notification], None] = lambda _: None

    def quorum(self, request: RankRequest, timeout: timedelta) -> Plan | QuorumKey:
        self.requests.append(request)
        if not self._answers:
            raise AssertionError("the script has no answer for this quorum request")
        answer = self._answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def vote(
        self, step: int, yes: bool, timeout: timedelta, *, key: QuorumKey, purpose: Purpose, leaving: bool = False
    ) -> Verdict:
        self.votes.append((key, step, yes, purpose))
        verdict = self._verdicts.popleft() if self._verdicts else yes
        if isinstance(verdict, Exception):
            raise verdict
        return verdict if isinstance(verdict, Verdict) else Verdict(verdict, leaving)

    def leave(self, reason: str, serve: timedelta, timeout: timedelta, *, finished_step: int | None = None) -> None:
        self.left.append((reason, serve))
        self.finished_steps.append(finished_step)
        if finished_step is not None:
            self.listener(DrainComplete())  # no member heals from it

    def gather(self, name: str, value: str, timeout: timedelta) -> tuple[str, ...]:
        self.gathered.append((name, value))
        return (*self.other_ranks[: self.rank], value, *self.other_ranks[self.rank :])

    def follow(self, progress: Callable[[], Progress]) -> None:
        self.progress = progress

    def beat(self) -> None:
        self.beats += 1

    def listen(self, listener: Callable[[Notification], None]) -> None:
        self.listener = listener

    def source_metadata(self, address: str, timeout: timedelta) -> str:
        return address

    def healed(self, bytes_total: int) -> None:
        self.healed_bytes = bytes_total

    def close(self) -> None:
        self.closed = True


@final
class ManualClock:
    """A clock that stands still until the test lets time pass.

    `waited_s` holds the durations of waits that timed out. Such a wait ends at once, and advances the time.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waited_s: list[float] = []
        self._alarms: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        if not event.is_set():
            self.waited_s.append(timeout_s)
            self.pass_s(timeout_s)
        return event.is_set()

    def after(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], object]:
        alarm = (self.now_s + delay_s, callback)
        self._alarms.append(alarm)
        return lambda: self._alarms.remove(alarm) if alarm in self._alarms else None

    @property
    def num_alarms(self) -> int:
        """Return the number of alarms that are set and not due."""
        return len(self._alarms)

    def pass_s(self, seconds: float) -> None:
        """Let time pass. Callbacks that are due run in order, on the calling thread."""
        self.now_s += seconds
        due = sorted((alarm for alarm in self._alarms if alarm[0] <= self.now_s), key=lambda alarm: alarm[0])
        self._alarms = [alarm for alarm in self._alarms if alarm not in due]
        for _, callback in due:
            callback()


@final
class FakeGroup:
    """A process group in which only this process exists. The other members are a number.

    Args:
        others: the contribution of all other members. A sum adds it to every element.
    `calls` holds the tensors as they arrived, `configured` the arguments of each configure, and `num_aborts` the number
    of aborts. While `holds` is set, each operation waits for `abort`, as if the other members never came, or for
    `come`. `waits` is set when an operation waits.
    """

    def __init__(self, others: float = 0.0) -> None:
        self.others = others
        self.calls: list[torch.Tensor] = []
        self.configured: list[tuple[str, int, int]] = []
        self.timeout: timedelta | None = None
        self.closed = False
        self.failing_configure: Exception | None = None
        self.failing_call: Exception | None = None
        self.failing_wait: Exception | None = None
        self.num_aborts = 0
        self.holds = False
        self.waits = threading.Event()
        self._waiting: list[tuple[PendingWork, list[torch.Tensor]]] = []
        self._error: Exception | None = None

    def configure(self, store_addr: str, rank: int, world_size: int, **identity: object) -> None:
        self.configured.append((store_addr, rank, world_size))
        error, self.failing_configure = self.failing_configure, None
        self._end_waiting(RuntimeError("configured anew"))
        if self.holds:
            waiting = self._hold([])
            try:
                waiting.wait()
            except Exception as aborted:
                error = aborted
        self._error = error
        if error is not None:
            raise error

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.ReduceOp | dist.ReduceOp.RedOpType) -> dist.Work:
        if self._error is not None:
            raise self._error
        error, self.failing_call = self.failing_call, None
        if error is not None:
            raise error
        self.calls.append(tensors[0].clone())
        if self.holds:
            return self._hold(tensors)
        work = self._pending()
        error, self.failing_wait = self.failing_wait, None
        if error is not None:
            self._error = error
            work.fail(error)
        else:
            self._finish(work, tensors)
        return work

    def come(self, number: int = 1) -> None:
        """Let the other members join the oldest `number` waiting reductions, which then end."""
        for _ in range(number):
            self._finish(*self._waiting.pop(0))

    def _finish(self, work: PendingWork, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            with changing(tensor):
                tensor.add_(self.others)
        work.finish(tensors)

    def _pending(self) -> PendingWork:
        return PendingWork(on_timeout=lambda limit: TimeoutError(str(limit)), limit=timedelta(seconds=10))

    def _hold(self, tensors: list[torch.Tensor]) -> PendingWork:
        work = self._pending()
        self._waiting.append((work, tensors))
        self.waits.set()
        return work

    def errored(self) -> Exception | None:
        return self._error

    def abort(self) -> None:
        self.num_aborts += 1
        self._error = RuntimeError("aborted")
        self._end_waiting(self._error)

    def _end_waiting(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, []
        for work, _ in waiting:
            work.fail(error)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def shutdown(self) -> None:
        self.closed = True
        self._end_waiting(RuntimeError("shut down"))


@final
class MemoryStaged(StagedCheckpoint):
    """A state that a `MemoryTransport` has staged. `end` says what happened to it: "" so far."""

    def __init__(self, transport: MemoryTransport, state: Any) -> None:
        self.end = ""
        self._transport = transport
        self._state = state

    def offer(self, dst_ranks: list[int], *, key: StateKey) -> None:
        self.end = "offered"
        self._transport.send_checkpoint(dst_ranks, key.step, self._state, timedelta(seconds=1), key=key)

    def drop(self) -> None:
        self.end = "dropped"


@final
class MemoryTransport(CheckpointTransport[Any]):
    """A transport that keeps sent states in a dictionary, and receives from it.

    `sent_to` holds the receivers of each send. `received_from` holds, for each receive, the source's rank and metadata
    and the other sources. `receiving` is set when the first receive begins. `staged` holds the staged states.

    Args:
        shelf: states by key, the same object for sender and receiver.
        endless: a receive never ends, unless it is cancelled.
    """

    def __init__(self, shelf: dict[StateKey | None, Any] | None = None, *, endless: bool = False) -> None:
        self.shelf: dict[StateKey | None, Any] = {} if shelf is None else shelf
        self.sent_to: list[list[int]] = []
        self.staged: list[MemoryStaged] = []
        self.received_from: list[tuple[int, str, list[str]]] = []
        self.receiving = threading.Event()
        self._endless = endless
        self.closed = False

    stages = True

    def metadata(self) -> str:
        return "memory"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta, *, key: StateKey | None = None
    ) -> None:
        self.sent_to.append(dst_ranks)
        self.shelf[key] = state_dict

    def stage_checkpoint(self, state_dict: Any, timeout: timedelta) -> StagedCheckpoint:
        staged = MemoryStaged(self, state_dict)
        self.staged.append(staged)
        return staged

    def refuse_checkpoint(
        self, step: int, sentence: str, *, key: StateKey | None = None, dst_ranks: Sequence[int] = ()
    ) -> None:
        self.shelf[key] = StateUnavailableError(sentence, source=self.metadata(), key=key)

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
        if into is not None:
            raise ConfigError("this transport hands out the state itself and writes into none; leave `into` out")
        self.received_from.append((src_rank, metadata, list(sources)))
        self.receiving.set()
        while self._endless:
            if cancelled is not None and cancelled():
                raise TransportClosedError(f"the receiving of the state {key} was cancelled")
            time.sleep(_LOOK_S)
        if key not in self.shelf:
            raise StateUnavailableError(f"nobody offers the state {key}", source=metadata, key=key)
        found = self.shelf[key]
        if isinstance(found, StateUnavailableError):
            raise found
        return found

    def disallow_checkpoint(self) -> None:
        """Do nothing, because the test owns the states."""

    def abort(self) -> None:
        """Do nothing, because no operation runs."""

    def shutdown(self, wait: bool = True) -> None:
        self.closed = True
