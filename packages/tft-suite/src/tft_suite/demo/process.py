"""The process of a replica, around the training loop.

Whatever a replica does or prints, and however it fails, the supervisor and the log file get it.

Law of this file: signals, output, and the report of an error. It does not import torch, because the supervisor imports
it.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias, final

from tft_suite.demo.events import ReplicaFailed, one_line
from tft_suite.demo.link import Link


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTask:
    """The arguments of one process of the demo."""

    replica: int
    steps: int
    seed: int
    lighthouse_addr: str
    token: str = field(repr=False)
    log: Path


Body: TypeAlias = Callable[[ReplicaTask, Link], None]


def replica_main(body: str, task: ReplicaTask, events: Connection, orders: Connection) -> None:
    """Run `body` (`module:function`) to its end.

    An error is logged and reported, and ends the process with exit code 1.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the supervisor decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(task.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for output in (1, 2):  # by number, so that output of C++ code goes there too
        os.dup2(log, output)
    os.close(log)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    link = Link(events=events, orders=orders)
    try:
        module, _, function = body.partition(":")
        run: Body = getattr(importlib.import_module(module), function)
        run(task, link)
    except Exception as error:
        traceback.print_exc()
        link.send(ReplicaFailed(at_s=0, replica=task.replica, error=one_line(error)))
        sys.exit(1)
