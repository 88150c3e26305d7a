"""A worker process of a benchmark: it runs under its system's interpreter, and exchanges JSON lines.

Law of this file: one process and its lines. The benchmark owns their content.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from benchmarks import peer

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 60.0


@final
class Worker:
    """A process that runs a module of the benchmarks.

    Args:
        system: "torchft" for the peer's interpreter; any other, such as "tft", for this one.
        module: for example "benchmarks.failure_worker". It receives `--system` and the arguments.
        arguments: of its command line.
        prefix: a command that starts the interpreter, such as a command that enters a network namespace first.
    """

    def __init__(self, system: str, module: str, arguments: Sequence[str] = (), *, prefix: Sequence[str] = ()) -> None:
        self._module = module
        interpreter = str(peer.python()) if system == "torchft" else sys.executable
        self.process = subprocess.Popen(
            [*prefix, interpreter, "-m", module, "--system", system, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            # A name server that does not answer costs each client of a store five seconds, which would distort the
            # figures.
            env={**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "error", "RES_OPTIONS": "timeout:1 attempts:1"},
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="benchmark-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # otherwise it was killed in the middle of a line
                self._lines.put(line)
        self._lines.put("")

    def send(self, order: dict[str, Any]) -> None:
        """Send one line to the worker."""
        assert self.process.stdin is not None
        json.dump(order, self.process.stdin)
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def receive(self, within_s: float = PATIENCE_S) -> dict[str, Any]:
        """Return its next line. Raises: RuntimeError: it ended, or was silent for too long."""
        try:
            line = self._lines.get(timeout=max(within_s, 0.001))
        except queue.Empty:
            line = ""
        if not line:
            raise RuntimeError(f"a worker ended or timed out; run {self._module} by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
