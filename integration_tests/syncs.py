"""A trainer whose steps are syncs: a small model under DiLoCo, which reports the outcome of each sync.

The trainer runs under the supervisor of `language_model`. After a commit it reports the digest of the state that all
replicas share: the global weights and the outer optimizers' state of all fragments. They change with commits alone.

The trainer checks two facts itself, and ends with an error otherwise. A sync does not commit if its reduction failed.
The live weights equal the global ones where they have to, above all after a failed sync.

Law of this file: the trainer and its settings. The tests hold the requirements.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final, final

import torch
import torch.distributed as dist

from integration_tests.language_model import (
    Event,
    Spec,
    live,
    manager_with_faults,
)
from tft_algos import DiLoCo, Manager
from tft_algos.manager.interfaces import ProcessGroupLike
from tft_algos.testing import Fault, InjectedError, Place, digest

WIDTHS: Final = (8, 24, 16, 40, 8)  # fragments have different sizes, so that a reduction's size identifies its fragment


@dataclass(frozen=True)
class Syncs:
    """The sync settings of a test's replicas.

    Args:
        fragments: number of fragments.
        sync_every: inner steps from one sync of a fragment to its next.
        delay: tau. From `sync_every / fragments` on, a sync begins before the one before it has ended.
        alpha: share of the local parameters that stays when a sync ends.
        step_s: minimum duration of an inner step.
        own: other settings for the replica of that name.
    """

    fragments: int = 2
    sync_every: int = 4
    delay: int = 0
    alpha: float = 0.0
    step_s: float = 0.005
    own: dict[str, Syncs] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        """Return the maximum number of concurrent syncs."""
        return -(-self.delay // (self.sync_every // self.fragments)) if self.delay else 1


@final
class Watched:
    """A process group that remembers the last reduction of each size, until it is reconfigured."""

    def __init__(self, inside: ProcessGroupLike) -> None:
        self._inside = inside
        self._last: dict[int, dist.Work] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)

    def configure(self, store_addr: str, rank: int, world_size: int, **placement: Any) -> None:
        self._last.clear()
        self._inside.configure(store_addr, rank, world_size, **placement)

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.ReduceOp | dist.ReduceOp.RedOpType) -> dist.Work:
        size = sum(tensor.numel() for tensor in tensors)
        self._last.pop(size, None)
        work = self._inside.allreduce(tensors, opts)
        self._last[size] = work
        return work

    def errored(self) -> Exception | None:
        return self._inside.errored()

    def abort(self) -> None:
        self._inside.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        self._inside.set_timeout(timeout)

    def shutdown(self) -> None:
        self._inside.shutdown()

    def check(self, size: int, step: int) -> None:
        """Check the reduction of that size. Raises: AssertionError: the sync committed this step although it failed."""
        work = self._last.get(size)
        if work is None:  # a quorum of one
            return
        assert work.is_completed(), f"step {step} committed, and its reduction of {size} numbers had not ended"
        try:
            work.wait(timedelta(seconds=1))
        except Exception as error:
            raise AssertionError(f"step {step} committed, and its reduction had failed: {error}") from error


@dataclass(frozen=True)
class Verdict:
    """The verdict on a sync.

    Args:
        step: committed steps before it.
        committed: the verdict.
        participants: of the sync.
    """

    step: int
    committed: bool
    participants: int


@final
class Verdicts(logging.Handler):
    """The verdicts of a Manager, from its log records."""

    def __init__(self, manager: Manager) -> None:
        super().__init__()
        self._verdicts: list[Verdict] = []
        manager.commits_logger.setLevel(logging.DEBUG)
        manager.commits_logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        facts = vars(record)
        self._verdicts.append(Verdict(facts["step"], facts["commit_result"], facts["num_participants"]))

    def taken(self) -> list[Verdict]:
        """Return the verdicts since the last call."""
        verdicts, self._verdicts = self._verdicts, []
        return verdicts


def make_fragments(number: int) -> tuple[torch.nn.Sequential, list[torch.nn.Module]]:
    """Return a model, and its layers in that many parts."""
    pairs = list(itertools.pairwise(WIDTHS))
    layers = [torch.nn.Linear(inputs, outputs) for inputs, outputs in pairs]
    share = len(layers) // number
    parts = [torch.nn.ModuleList(layers[first : first + share]) for first in range(0, len(layers), share)]
    return torch.nn.Sequential(*layers), list(parts)


def train(spec: Spec, connection: Connection) -> None:
    """Run the life of a trainer, in its own process."""
    os.environ.update(spec.environment)
    live(lambda report: _train(spec, connection, report), connection)


def _train(spec: Spec, connection: Connection, report: Callable[[Event], None]) -> None:
    syncs: Syncs = spec.details.own.get(spec.name, spec.details)
    torch.manual_seed(sum(spec.name.encode()))  # only healing makes the weights equal
    model, fragments = make_fragments(syncs.fragments)
    sizes = [sum(parameter.numel() for parameter in each.parameters()) for each in fragments]
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = [torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True) for each in fragments]
    groups: list[Watched] = []

    def watch(group: ProcessGroupLike) -> ProcessGroupLike:
        groups.append(Watched(group))
        return groups[0]

    manager, injector = manager_with_faults(spec, report, around=watch)
    injector.module(model)
    for optimizer in outer:
        injector.optimizer(optimizer)
    with manager:
        strategy = DiLoCo(
            manager,
            fragments,
            inner,
            outer,
            sync_every=syncs.sync_every,
            use_bucketization=True,
            fragment_sync_delay=syncs.delay,
            fragment_update_alpha=syncs.alpha,
        )
        verdicts = Verdicts(manager)
        report(Event("ready"))
        last: int | None = None

        def look(error: Exception | None = None) -> None:
            """Report the syncs that have ended, and check them."""
            for verdict in verdicts.taken():
                # The opening reduces nothing, and belongs to no fragment.
                fragment = (verdict.step - 1) % syncs.fragments if verdict.step else None
                if verdict.committed and error is None:
                    if fragment is not None:
                        groups[0].check(sizes[fragment], verdict.step)
                    state_digest = digest(strategy.state_dict())
                    lineage = manager.state_dict()["lineage"]
                    report(Event("commit", verdict.step + 1, lineage, state_digest, verdict.participants))
                else:
                    report(Event("failed", verdict.step, text=str(error or "")))
                if fragment is not None and error is None and not (verdict.committed and syncs.alpha):
                    shared = strategy.state_dict()[f"StreamingDiLoCoFragment_{fragment}"]["original_parameters"]
                    live = fragments[fragment].state_dict()
                    assert digest(list(live.values())) == digest(list(shared.values())), f"after {verdict}"

        with strategy:
            look()
            while manager.current_step() < (last or spec.settings.steps):
                while connection.poll() or (last is None and manager.current_step() == spec.hold_at):
                    match connection.recv():
                        case Fault() as fault:
                            injector.inject(fault)
                        case int(step):
                            last = step
                error: Exception | None = None
                inner.zero_grad()
                model(torch.randn(4, WIDTHS[0])).square().mean().backward()
                time.sleep(syncs.step_s)
                try:
                    inner.step()
                except InjectedError as raised:
                    if raised.fault.place is not Place.OPTIMIZER:
                        raise
                    error = raised  # a loop that continues after its outer optimizer raised: this replica heals
                look(error)
        report(Event("loss", manager.current_step()))
