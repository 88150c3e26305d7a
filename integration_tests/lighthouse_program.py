"""A lighthouse as a separate program, of tft or torchft, which is killed and restarted at the same address.

Law of this file: one process, its address and its log, but no test.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import final

UP_WITHIN_S = 30.0
END_WITHIN_S = 5.0
LISTENING = re.compile(r"listening (?:at|on:) (https?)://\S+?:(\d+)")


@final
class LighthouseProgram:
    """One address, and successive lives of a lighthouse there.

    Args:
        command: the program and its settings, without `--bind`.
        log: a file for the output of all lives.
        environment: additional variables.
    """

    def __init__(self, command: Sequence[str | Path], log: Path, *, environment: dict[str, str] | None = None) -> None:
        self._command = [str(word) for word in command]
        self._environment = {**os.environ, **(environment or {})}
        self._log = log
        self._scheme, self._port = "http", 0
        self._process: subprocess.Popen[bytes] | None = None
        self.num_lives = 0

    @property
    def address(self) -> str:
        """Return `http://host:port`, or `https://host:port`, the same for all lives."""
        return f"{self._scheme}://127.0.0.1:{self._port}"

    @property
    def log_text(self) -> str:
        """Return the whole log so far."""
        return self._log.read_text(errors="replace")

    def start(self) -> None:
        """Start a life, and wait until it listens."""
        assert self._process is None, "it lives"
        before = len(LISTENING.findall(self.log_text)) if self.num_lives else 0
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [*self._command, "--bind", f"127.0.0.1:{self._port}"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.num_lives += 1
        deadline = time.monotonic() + UP_WITHIN_S
        while len(found := LISTENING.findall(self.log_text)) == before:
            assert self._process.poll() is None, f"it ended: {self.log_text[-2000:]}"
            assert time.monotonic() < deadline, f"it does not listen: {self.log_text[-2000:]}"
            time.sleep(0.02)
        self._scheme, self._port = found[-1][0], int(found[-1][1])

    def kill(self) -> None:
        """Kill it with kill -9, and return when it is gone."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """End it with SIGTERM, and return when it is gone."""
        self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """Stop it with SIGSTOP, until `go_on`."""
        assert self._process is not None, "it does not live"
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Resume it with SIGCONT."""
        assert self._process is not None, "it does not live"
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """End the current life, if there is one."""
        if self._process is not None:
            self.kill()

    def _signal(self, number: int) -> None:
        process, self._process = self._process, None
        assert process is not None, "it does not live"
        process.send_signal(number)
        process.wait(END_WITHIN_S)
