"""One replica group of the demo: a plain training loop.

The loop is what a user would write. The demo only adds reports to the supervisor, and the rule that a replica does not
leave before all are done.

Law of this file: training. The process around it is in process. The kills are not known here.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, final

import torch
from torch.nn.functional import cross_entropy

from tft_algos.testing import digest
from tft_suite import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from tft_suite.demo.data import draw, load
from tft_suite.demo.events import HealingStarted, StepCommitted, StepDiscarded, TrainingEnded, one_line
from tft_suite.demo.link import Link
from tft_suite.demo.model import LEARNING_RATE, accuracy, make_net
from tft_suite.demo.process import ReplicaTask

BATCH = 256
TIMEOUT = timedelta(seconds=10)
DISCARDS_MAX = 50
CONNECT_TIMEOUT = timedelta(seconds=30)


@final
class StuckError(Exception):
    """No step commits any more."""


@final
class HeldError(Exception):
    """The reason for a vote of no after the last step. Such a step only serves others that heal."""


def train(task: ReplicaTask, link: Link) -> None:
    """Train to `task.steps`, then serve replicas that are behind, until stopped.

    Raises: any error of the training. The supervisor reports it.
    """
    torch.set_num_threads(1)  # the replicas share the cores
    train_part, test_part = load()
    # Replicas begin with different weights, so the first step heals.
    torch.manual_seed(task.seed * 1_000 + task.replica)
    net = make_net()
    inner = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)

    def state() -> dict[str, Any]:
        return {"net": net.state_dict(), "optimizer": inner.state_dict()}

    def load_state(healed: dict[str, Any]) -> None:
        net.load_state_dict(healed["net"])
        inner.load_state_dict(healed["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load_state,
        state_dict=state,
        min_replica_size=1,
        timeout=TIMEOUT,
        connect_timeout=CONNECT_TIMEOUT,
        rank=0,
        world_size=1,
        replica_id=f"replica_{task.replica}",
        lighthouse_addr=task.lighthouse_addr,
        hostname="127.0.0.1",
        token=task.token,
    )
    try:
        model = DistributedDataParallel(manager, net)
        optimizer = Optimizer(manager, inner)

        discards = 0

        def take_step() -> None:
            nonlocal discards
            before = manager.current_step()
            batch = draw(train_part, batch=BATCH, seed=task.seed, replica=task.replica, step=before)
            optimizer.zero_grad()
            loss = cross_entropy(model(batch.images), batch.labels)
            participants, took_part = manager.num_participants(), manager.is_participating()
            if participants and not took_part:
                link.send(HealingStarted(at_s=0, replica=task.replica))
            loss.backward()
            is_held = link.is_held  # read once, so that vote and report agree
            if is_held:
                manager.report_error(HeldError(f"replica {task.replica} is held at its last step, {task.steps}"))
            optimizer.step()
            step = manager.current_step()
            if is_held:
                return
            if step > before:
                link.send(
                    StepCommitted(
                        at_s=0,
                        replica=task.replica,
                        step=step,
                        participants=participants,
                        took_part=took_part,
                        loss=loss.item(),
                    )
                )
                discards = 0
            else:
                error = manager.errored()
                reason = "the vote was no" if error is None else one_line(error.original_exception)
                link.send(StepDiscarded(at_s=0, replica=task.replica, step=before, reason=reason))
                discards += 1
                if discards > DISCARDS_MAX:
                    raise StuckError(
                        f"replica {task.replica} discarded {discards} steps in a row after step {before}: {reason}"
                    )

        while not link.is_stopped:
            if manager.current_step() < task.steps or link.is_held:
                take_step()
            if manager.current_step() >= task.steps:
                link.send(
                    TrainingEnded(
                        at_s=0,
                        replica=task.replica,
                        step=manager.current_step(),
                        digest=digest(net.state_dict(), inner.state_dict()),
                        test_accuracy=accuracy(net, test_part),
                    )
                )
                link.wait_for_order()
    finally:
        manager.shutdown()
