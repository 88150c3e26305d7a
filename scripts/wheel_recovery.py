"""Train two replicas with a package's wheel, kill one in a step, restart it, and check that it heals.

    TFT_LIGHTHOUSE=http://localhost:29510 python wheel_recovery.py tft_algos

Law of this file: scripts/check_wheels.py runs it where only the package is installed. So it imports only that package,
the package's requirements, and the standard library.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 12
KILLED_AT = 4
BOUND_S = 120


def train(module: str, replica: int, folder: Path, killed_at: int) -> None:
    """Train as one replica, and print the digest of the state after the last step."""
    import torch

    from tft_algos.durable import DurableCheckpoint
    from tft_algos.testing import digest
    from tft_pg import ProcessGroupGloo

    names = importlib.import_module(module)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(replica)
    model = torch.nn.Linear(8, 1)
    adam = torch.optim.AdamW(model.parameters())
    manager = names.Manager(
        ProcessGroupGloo(),
        lambda state: (model.load_state_dict(state["model"]), adam.load_state_dict(state["optimizer"])),
        lambda: {"model": model.state_dict(), "optimizer": adam.state_dict()},
        min_replica_size=2,  # all steps need both replicas, so both end after the same one
        replica_id=f"replica_{replica}",
        check_state_every=3,
    )
    ddp = names.DistributedDataParallel(manager, model)
    optimizer = names.Optimizer(manager, adam)
    checkpoint = DurableCheckpoint(manager, folder, model=model, optimizers=optimizer, every=5)
    while manager.current_step() < STEPS:
        optimizer.zero_grad()
        loss = ddp(torch.randn(4, 8)).square().mean()
        if manager.current_step() == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        checkpoint.save_if_due()
    print("digest", digest(model.state_dict(), adam.state_dict()), flush=True)
    manager.leave()  # after the last step, so that the other may end too
    manager.shutdown()


def start(module: str, replica: int, folder: Path, killed_at: int = -1) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, module, f"--replica={replica}", f"--folder={folder}"]
    return subprocess.Popen(
        [*command, f"--killed-at={killed_at}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def outputs_of_a_recovery(module: str, folder: Path, running: list[subprocess.Popen[str]]) -> tuple[str, str]:
    """Kill replica 1 and start it again. Returns: the outputs of replica 0 and of replica 1's second life."""
    running.append(start(module, 0, folder))
    running.append(start(module, 1, folder, KILLED_AT))
    first_life = running[1].communicate(timeout=BOUND_S)[0]
    if running[1].returncode != -signal.SIGKILL:
        raise SystemExit(f"replica 1 ended with {running[1].returncode} before it was killed\n{first_life}")
    running.append(start(module, 1, folder))
    back, stayed = (process.communicate(timeout=BOUND_S)[0] for process in (running[2], running[0]))
    for name, process, output in (("0", running[0], stayed), ("1, started again,", running[2], back)):
        if process.returncode != 0:
            raise SystemExit(f"replica {name} ended with {process.returncode}\n{output}")
    return stayed, back


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", help="tft_algos or tft_suite")
    parser.add_argument("--replica", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--killed-at", type=int)
    options = parser.parse_args()
    if options.replica is not None:
        train(options.module, options.replica, options.folder, options.killed_at)
        return
    running: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            stayed, back = outputs_of_a_recovery(options.module, Path(folder), running)
        finally:
            for process in running:
                process.kill()
        saved = sorted(path.name for path in Path(folder).iterdir())
    digests = [line.split()[1] for output in (stayed, back) for line in output.splitlines() if "digest " in line[:7]]
    if len(digests) != 2 or digests[0] != digests[1]:
        raise SystemExit(f"the replicas printed the digests {digests}, not two equal ones\n{stayed}\n{back}")
    if "healed from replica_0:" not in back:
        raise SystemExit(f"replica 1 did not heal\n{back}")
    if saved != ["step-10", "step-5"]:
        raise SystemExit(f"unexpected checkpoints: {saved}\n{stayed}")
    print(f"a killed replica healed, {STEPS} steps")


if __name__ == "__main__":
    main()
