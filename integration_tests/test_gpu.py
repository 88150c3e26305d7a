"""Training on a GPU: two replica groups that reduce over NCCL on one device, one killed and started again.

NCCL takes two ranks on one device only if it thinks that they are on two machines. So each replica has its own
NCCL_HOSTID, and the data passes over the loopback interface.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from integration_tests.conftest import Spawn
from integration_tests.scripts import SECRET, Script, Shells
from integration_tests.test_train_lm import AT_ONCE, EXAMPLE, FT, LOCAL_SGD, STREAMING
from tft_algos import DistributedDataParallel, Manager, Optimizer
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupNCCL

STEPS = 30
KILLED_AT = 10
WAIT_S = 120.0
SMALL = ("--width=64", "--layers=2", "--context=32", "--batch=12", "--characters=100000", "--print_every=10")


def _why_no_gpu() -> str:
    if not dist.is_nccl_available():
        return "this torch has no NCCL"
    return "" if torch.cuda.is_available() else "there is no CUDA device here"


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(_why_no_gpu()), reason=_why_no_gpu() or "there is one"),
]


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    """Yield a lighthouse whose quorums have two replicas, so that a survivor waits for the other."""
    with LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=5_000, token=SECRET) as server:
        yield server


def environment(replica: int, lighthouse: LighthouseServer) -> dict[str, str]:
    """Return the variables of one replica."""
    return {
        "TFT_LIGHTHOUSE": str(lighthouse.address),
        "TFT_TOKEN": SECRET,
        "REPLICA_GROUP_ID": str(replica),
        "NUM_REPLICA_GROUPS": "2",
        "NCCL_HOSTID": f"machine-{replica}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 10)).cuda()


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    """Return the loss of a step. Its data depends only on the step, so every replica has the same gradient."""
    torch.manual_seed(1000 + step)
    inputs, labels = torch.randn(64, 256).cuda(), torch.randint(10, (64,)).cuda()
    return torch.nn.functional.cross_entropy(model(inputs), labels)


def weights_of(model: torch.nn.Module) -> bytes:
    return torch.cat([each.detach().flatten() for each in model.parameters()]).cpu().numpy().tobytes()


def train(variables: dict[str, str], killed_at: int | None, report: Connection) -> None:
    """Train to the last step and report the weights; or die in a step, between the reduction and its vote."""
    os.environ.update(variables)
    model = make_model()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Manager(ProcessGroupNCCL(), replica_id=f"replica_{variables['REPLICA_GROUP_ID']}") as manager:
        manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
        manager.register_state_dict_fn("optimizer", adam.load_state_dict, adam.state_dict)
        ddp = DistributedDataParallel(manager, model)
        optimizer = Optimizer(manager, adam)
        while (step := manager.current_step()) < STEPS:
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            if step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
        report.send_bytes(weights_of(model))
    report.close()


def weights_alone() -> bytes:
    model = make_model()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        adam.zero_grad()
        loss_of(model, step).backward()
        adam.step()
    return weights_of(model)


def test_gpu_a_killed_replica_heals_and_the_weights_are_those_of_a_run_without_failures(
    spawn: Spawn, lighthouse: LighthouseServer
) -> None:
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
    spawn(train, environment(0, lighthouse), None, pipes[0][1])
    first_life = spawn(train, environment(1, lighthouse), KILLED_AT, pipes[1][1])
    first_life.join(WAIT_S)
    assert first_life.exitcode == -signal.SIGKILL
    spawn(train, environment(1, lighthouse), None, pipes[2][1])
    found = []
    for read, _ in (pipes[0], pipes[2]):
        assert read.poll(WAIT_S)
        found.append(read.recv_bytes())
    assert found[0] == found[1]
    ours, alone = (torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (found[0], weights_alone()))
    torch.testing.assert_close(ours, alone)


@pytest.mark.parametrize(
    ("words", "last"),
    [
        pytest.param(["--steps=60"], "step 60", id="every step"),
        pytest.param(["--steps=60", *STREAMING], r"step \d+", id="Streaming DiLoCo"),
        pytest.param(["--steps=60", *STREAMING, *AT_ONCE], r"step \d+", id="DiLoCo"),
        pytest.param(["--steps=60", *STREAMING, *AT_ONCE, *LOCAL_SGD], r"step \d+", id="LocalSGD"),
    ],
)
def test_gpu_a_shell_that_is_killed_heals_and_both_end_with_one_loss(
    spawn: Spawn, lighthouse: LighthouseServer, words: list[str], last: str
) -> None:
    words = [*SMALL, f"{FT}process_group=nccl", *words]

    def start(replica: int) -> Script:
        shells = stack.enter_context(Shells(spawn, EXAMPLE, environment(replica, lighthouse)))
        return shells.start(replica, words)[0]

    with ExitStack() as stack:
        first, second = start(0), start(1)
        second.wait_for(r"step [2-4]\d .*participants 2 loss")
        second.kill()
        again = start(1)
        again.wait_for(r"healed from replica_0:\S+ to step \d+")
        losses = {
            re.findall(rf"^{last} validation loss (\d+\.\d+)$", each.ended(), re.MULTILINE)[0]
            for each in (first, again)
        }
    if "semi_sync" not in " ".join(words):
        assert len(losses) == 1
    assert all(2 < float(loss) < 4 for loss in losses), losses
