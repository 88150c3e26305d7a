"""A trainer like torchtitan's fault-tolerant experiment: killed, restarted and healed.

The trainer runs FSDP2 over the replica group's own mesh. Gradients, losses and token counts go through a
ManagedProcessGroup. Model, optimizer, scheduler and counters are registered after the first step. The user's functions
run collectives over the ranks of the group when state is taken. One story runs for groups of one and of two processes,
and each test checks one side of it.

Each failure of that experiment on torchft follows, with the tests that exclude it here:
- The state was taken on a thread, in the middle of the forward pass, and parameters were half resharded:
  `test_the_state_is_taken_on_the_training_thread_between_backward_and_vote` here; for FSDP2 at every place of a step,
  `test_healing_fsdp2.py`; for one process, `test_the_snapshot_is_taken_after_the_reductions_and_before_the_vote` of
  tft-algos.
- With two processes a group, step 0 hung, because one rank of each group healed and its state function waited for the
  other: `test_groups_heal_whole_from_step_0_on_with_collectives_in_their_state_functions` here,
  `test_a_group_of_two_joins_heals_whole_dies_and_comes_back_to_the_same_store` of `test_two_rank_groups.py`.
- After a heal the newcomer trained with a stale learning rate, undetected:
  `test_a_newcomer_has_the_learning_rate_of_the_others` here; for the detection,
  `test_a_newcomer_that_kept_its_own_learning_rate_is_named_and_stopped` of `test_divergence.py`.
- The survivor stalled until the heartbeat timeout after a kill:
  `test_survivors_go_on_without_waiting_for_a_heartbeat_time_out` here, `test_cut_cable.py` and
  `test_every_way_to_die.py` for other deaths.
- A replica that was restarted at once made the survivor wait:
  `test_a_replica_that_has_not_asked_yet_is_not_waited_for` here, `test_who_has_never_asked_is_waited_for_by_nobody` of
  tft-coord.
- A sender that died in the middle of a transfer surfaced as an error about a buffer's length:
  `test_a_source_killed_on_the_way_is_replaced_by_another` and the conformance suite's `check_a_killed_source` of
  tft-ckpt; in a job, `test_where_a_source_is_killed_as_it_serves_another_group_serves_on` of `test_healing_fsdp2.py`.
- The sender's vote waited for the slowest reader: `check_the_copy_is_of_its_moment` and `check_a_stalled_reader` of
  tft-ckpt's conformance suite, `test_a_newcomer_heals_and_its_snapshot_is_not_torn_by_the_sources_optimizer` of
  `test_manager_training.py`.
- Losses and token counts by functional collectives after the vote, gradients by dist.all_reduce in FSDP2's hook:
  `test_losses_and_token_counts_are_reduced_after_the_vote` and `test_equal_steps_are_equal_states` here, and
  `test_one_votes_no_and_both_reduce_what_the_other_committed` of `test_manager_after_the_verdict.py`; that it is the
  mean, `test_fsdp2_across_groups.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from integration_tests.conftest import spawning
from integration_tests.language_model import (
    FOR_EVER,
    Cluster,
    Event,
    Spec,
    Trainer,
    join_own_group,
    live,
    local,
)
from tft_algos import Manager, Optimizer
from tft_algos.testing import digest
from tft_lighthouse import LighthouseServer
from tft_pg import ManagedProcessGroup, ProcessGroupGloo

# Long enough that a wait for one of them would be visible.
HEARTBEAT_TIMEOUT_MS: Final = 30_000
JOIN_TIMEOUT_MS: Final = 30_000
WELL_BELOW_S: Final = 12.0
STEPS_WITHOUT_THE_OTHER: Final = 10
TOKENS: Final = {"a": 2**40, "b": 3}  # more than a float can count exactly
LOSS: Final = {"a": 1.5, "b": 4.0}
PEAK_RATE: Final = 0.1


def rate_after(steps: int) -> float:
    """Return the scheduled learning rate, which differs at every step."""
    return PEAK_RATE / (1 + steps)


class TrainState:
    """The progress of the job, as a trainer counts it beside its Manager."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.step = int(state["step"])


def reduced_over_groups(manager: Manager, managed: ManagedProcessGroup, name: str) -> dict[str, Any]:
    """Return loss and tokens of the past step, of all groups, and whether there was an error."""
    loss, tokens = torch.tensor(LOSS[name]), torch.tensor(TOKENS[name])
    results = [funcol.all_reduce(tensor, op, managed).item() for tensor in (loss, tokens) for op in ("sum", "max")]
    return {"loss": results[:2], "tokens": results[2:], "failed": manager.errored() is not None}


def train(spec: Spec, connection: Connection) -> None:
    """Run the life of a trainer, in its own process."""
    os.environ.update(spec.environment)
    live(lambda tell: _train(spec, connection, tell), connection)


def _train(spec: Spec, connection: Connection, tell: Callable[[Event], None]) -> None:
    _, ranks = join_own_group()
    torch.manual_seed(os.getpid())  # its own weights, so that healing has an effect
    with Manager(
        ProcessGroupGloo(),
        replica_id=spec.name,
        lighthouse_addr=spec.lighthouse,
        hostname="localhost",
        timeout=timedelta(seconds=20),
    ) as manager:
        managed = ManagedProcessGroup(manager)
        managed.register("replicas")
        model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 11))
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
        for layer in (model[1], model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(
                    lambda gradients: dist.all_reduce(gradients, group=managed, op=dist.ReduceOp.AVG)
                )
        adam = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda steps: rate_after(steps) / PEAK_RATE)
        counters = TrainState()
        optimizer = Optimizer(manager, adam)
        phase = "start"

        def touched(what: str) -> None:
            tell(Event(what, manager.current_step(), text=f"{threading.current_thread().name}, {phase}"))

        def take_model() -> dict[str, Any]:
            touched("taken")
            return get_model_state_dict(model)

        def load_model(state: dict[str, Any]) -> None:
            set_model_state_dict(model, state)
            touched("healed")

        def take_optimizer() -> dict[str, Any]:
            dist.barrier()
            return adam.state_dict()

        def take_training() -> dict[str, Any]:
            # This gathers each parameter over the ranks of this group.
            whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            return {"whole": whole, "schedule": schedule.state_dict(), "counters": counters.state_dict()}

        def load_training(state: dict[str, Any]) -> None:
            whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            assert digest(whole) == digest(state["whole"]), "the model was healed before"
            schedule.load_state_dict(state["schedule"])
            counters.load_state_dict(state["counters"])

        tell(Event("ready"))
        if spec.details["holds"]:
            connection.recv()
        last, is_first = FOR_EVER, True
        while manager.current_step() < last:
            if connection.poll():
                last = connection.recv()
            optimizer.zero_grad()
            phase = "forward"
            tokens = torch.randint(11, (4, 5))
            logits = model(tokens)
            phase = "backward"
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
            error = manager.errored()
            phase = "vote"
            optimizer.step()
            phase = "after the vote"
            if is_first:
                is_first = False
                manager.register_state_dict_fn("model", load_model, take_model)
                manager.register_state_dict_fn("optimizer", adam.load_state_dict, take_optimizer)
                with pytest.warns(DeprecationWarning, match="register_state_dict_fn"):
                    manager.set_state_dict_fns(load_training, take_training)
            told = reduced_over_groups(manager, managed, spec.name)  # after any verdict, as the others do
            if not manager.status().committed:
                tell(Event("failed", manager.current_step(), text=str(error)))
                continue
            told |= {"rate": adam.param_groups[0]["lr"], "at": time.time()}
            schedule.step()
            counters.step += 1
            told["counted"] = counters.step
            state = digest(local(model.state_dict()), local(adam.state_dict()), schedule.state_dict(), counters.step)
            participants = manager.num_participants()
            lineage = manager.state_dict()["lineage"]
            tell(Event("commit", manager.current_step(), lineage, state, participants, text=json.dumps(told)))
        tell(Event("loss", manager.current_step()))
        managed.unregister()
    dist.destroy_process_group()


# --- the story ---


@dataclass(frozen=True)
class Story:
    """The history of two groups, one of which was killed and restarted.

    Args:
        cluster: at its end.
        killed_at, back_at: highest steps when a process of group b was killed, and when its successor began to ask.
    """

    cluster: Cluster
    killed_at: int
    back_at: int

    def commits(self, name: str, start: int = 0) -> list[dict[int, dict[str, Any]]]:
        """Return the reports of each step with its participants, for each rank of a group, in one start of it."""
        return [
            {step: json.loads(event.text) | {"groups": event.participants} for step, event in trainer.commits.items()}
            for trainer in self.trainers_of(name, start)
        ]

    def trainers_of(self, name: str, start: int) -> list[Trainer]:
        """Return the ranks of a group in one start of it."""
        group = next(each for each in self.cluster.groups if each.name == name)
        number = len(group.trainers)
        return [trainer for _, trainer in group.all_trainers[start * number : (start + 1) * number]]

    def trainers(self) -> list[Trainer]:
        """Return the trainers of every start."""
        return [trainer for group in self.cluster.groups for _, trainer in group.all_trainers]


@pytest.fixture(scope="module", params=[1, 2], ids=["one process a group", "two processes a group"])
def story(request: pytest.FixtureRequest, forkserver: ForkServerContext) -> Iterator[Story]:
    details = {"holds": False}
    with (
        spawning(forkserver) as spawn,
        LighthouseServer(
            "127.0.0.1:0", join_timeout_ms=JOIN_TIMEOUT_MS, heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS
        ) as lighthouse,
    ):
        cluster = Cluster(spawn, lighthouse, groups=2, ranks=request.param, trainer=train, details=details)
        try:
            cluster.until_together()
            a, b = cluster.groups
            details["holds"] = True
            killed_at = cluster.step
            cluster.kill(b.trainers[-1])
            cluster.until(lambda: b.starts == 2, "group b is started again")
            cluster.until(lambda: all(trainer.events for trainer in b.trainers), "it is ready, and holds")
            cluster.until_others_go_on(b, STEPS_WITHOUT_THE_OTHER)
            back_at = cluster.step
            b.send("go")
            cluster.until_together(after=back_at)
            cluster.finish()
            assert [a.starts, b.starts] == [1, 2]
            yield Story(cluster, killed_at, back_at)
        finally:
            cluster.close()


@pytest.mark.in_parts(fixture="story")
def test_equal_steps_are_equal_states(story: Story) -> None:
    assert story.cluster.check_digests() > 10
    for trainer in story.trainers():
        for step, event in trainer.commits.items():
            assert json.loads(event.text)["counted"] == step


@pytest.mark.in_parts(fixture="story")
def test_groups_heal_whole_from_step_0_on_with_collectives_in_their_state_functions(story: Story) -> None:
    healed = {
        (name, start): [
            [event.step for event in trainer.events if event.kind == "healed"]
            for trainer in story.trainers_of(name, start)
        ]
        for name, start in (("a", 0), ("b", 0), ("b", 1))
    }
    for of_ranks in healed.values():
        assert all(steps == of_ranks[0] for steps in of_ranks), f"the ranks of a group heal at the same steps: {healed}"
    # All begin with their own weights, so that one of the first two has to heal.
    assert sorted(len(healed[name, 0][0]) for name in "ab") == [0, 1]
    assert len(healed["b", 1][0]) == 1


@pytest.mark.in_parts(fixture="story")
def test_the_state_is_taken_on_the_training_thread_at_a_step_boundary(story: Story) -> None:
    where = {
        kind: {event.text for trainer in story.trainers() for event in trainer.events if event.kind == kind}
        for kind in ("taken", "healed")
    }
    assert where["healed"] == {"MainThread, vote"}
    # This is between backward and vote, or before the next step's forward pass if a newcomer has asked.
    assert {"MainThread, vote"} <= where["taken"] <= {"MainThread, vote", "MainThread, after the vote"}


@pytest.mark.in_parts(fixture="story")
def test_a_newcomer_has_the_learning_rate_of_the_others(story: Story) -> None:
    for told in story.commits("a") + story.commits("b") + story.commits("b", start=1):
        for step, facts in told.items():
            assert facts["rate"] == pytest.approx(rate_after(step - 1), rel=1e-12)
    first = min(story.commits("b", start=1)[0])
    assert first > story.back_at, "it was healed to where the others were"


@pytest.mark.in_parts(fixture="story")
def test_survivors_go_on_without_waiting_for_a_heartbeat_time_out(story: Story) -> None:
    for told in story.commits("a"):
        at = [told[step]["at"] for step in sorted(told) if story.killed_at <= step <= story.back_at]
        assert len(at) > STEPS_WITHOUT_THE_OTHER
        assert max(after - before for before, after in itertools.pairwise(at)) < WELL_BELOW_S


@pytest.mark.in_parts(fixture="story")
def test_a_replica_that_has_not_asked_yet_is_not_waited_for(story: Story) -> None:
    """Group b's manager server ran while group a committed all these steps alone."""
    for told in story.commits("a"):
        alone = [step for step, facts in told.items() if facts["groups"] == 1 and step > story.killed_at]
        assert len(alone) >= STEPS_WITHOUT_THE_OTHER
        at = [told[step]["at"] for step in sorted(told) if step >= story.back_at]
        assert max(after - before for before, after in itertools.pairwise(at)) < WELL_BELOW_S


@pytest.mark.in_parts(fixture="story")
def test_losses_and_token_counts_are_reduced_after_the_vote(story: Story) -> None:
    of_both = {"loss": [sum(LOSS.values()), max(LOSS.values())], "tokens": [sum(TOKENS.values()), max(TOKENS.values())]}
    of_a = {"loss": [LOSS["a"]] * 2, "tokens": [TOKENS["a"]] * 2}
    for told in story.commits("a"):
        for number, expected in ((1, of_a), (2, of_both)):
            results = [facts for facts in told.values() if facts["groups"] == number and not facts["failed"]]
            assert len(results) >= STEPS_WITHOUT_THE_OTHER
            assert [facts for facts in results if {key: facts[key] for key in expected} == expected]
    last = max(story.commits("a")[0])
    assert [told[last]["tokens"] for told in story.commits("a") + story.commits("b", start=1)] == [
        of_both["tokens"]
    ] * len(story.cluster.trainers)
