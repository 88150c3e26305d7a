"""A real lighthouse with its page, and a real job of three replicas that can be killed and started again.

Law of this file: processes and their ends; it is for tests and for the pictures of the documentation.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
NUM_REPLICAS: Final = 3
LIGHTHOUSE: Final = (sys.executable, "-m", "tft_lighthouse", "--min-replicas", "2")
TRAINER: Final = (sys.executable, str(ROOT / "examples/train_ddp.py"), "100000000")
OF_A_JOB: Final = ("TFT_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
WITHIN_S: Final = 20.0


class PageJob:
    """A lighthouse, and the replicas of one job. All end with this context.

    Args:
        folder: for their output.
        job: its name.

    Attributes:
        page: the address of the lighthouse's page.
    """

    def __init__(self, folder: Path, job: str = "llama-8b") -> None:
        self._folder = folder
        self._job = job
        self._replicas: dict[int, subprocess.Popen[bytes]] = {}
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self.page = ""

    def __enter__(self) -> PageJob:
        self.start_lighthouse("127.0.0.1:0", "127.0.0.1:0")
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._replicas.values(), self._lighthouse):
            if process is not None:
                process.kill()
                process.wait(WITHIN_S)

    def start_lighthouse(self, bind: str, http_bind: str) -> None:
        """Start the lighthouse, and wait until it listens. The test's timeout bounds the wait."""
        words = [*LIGHTHOUSE, "--bind", bind, "--http-bind", http_bind]
        log = self._folder / "lighthouse.log"
        self._lighthouse = self._start(words, log, {})
        while not (found := re.search(r"listening at (http://\S+)(?:.|\n)*health at (http://\S+) \(", log.read_text())):
            assert self._lighthouse.poll() is None, log.read_text()
        self._address, self.page = found[1], found[2]

    def start(self, replica: int) -> None:
        """Start a replica."""
        environment = {
            "TFT_LIGHTHOUSE": self._address,
            "TFT_JOB_ID": self._job,
            "REPLICA_GROUP_ID": str(replica),
            "NUM_REPLICA_GROUPS": str(NUM_REPLICAS),
        }
        self._replicas[replica] = self._start(TRAINER, self._folder / f"replica_{replica}.log", environment)

    def start_all(self) -> None:
        """Start all replicas."""
        for replica in range(NUM_REPLICAS):
            self.start(replica)

    def kill(self, replica: int) -> None:
        """Kill a replica with kill -9."""
        self._replicas[replica].kill()
        self._replicas[replica].wait(WITHIN_S)

    def has_ended(self, replica: int) -> bool:
        """Return whether the process of a replica has ended."""
        return self._replicas[replica].poll() is not None

    def _start(self, words: Sequence[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(OF_A_JOB)}
        with open(log, "ab") as output:
            return subprocess.Popen(
                words, env={**inherited, **environment}, cwd=self._folder, stdout=output, stderr=subprocess.STDOUT
            )
