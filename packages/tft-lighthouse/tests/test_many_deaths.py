"""Most of a job is killed at once: its hosts say so, and that is no sign of a sick lighthouse."""

from __future__ import annotations

import logging
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

import grpc
import pytest

from tft_coord.core import effects, events
from tft_coord.core.types import Hello
from tft_coord.wire import codec, services
from tft_lighthouse import LighthouseServer

NUM_REPLICAS: Final = 6
BOUND_S: Final = 60.0
HEARTBEAT_TIMEOUT_MS: Final = 2_000
# All manager servers of the job in one process, so that none is left to report a death.
REPLICAS: Final = """
import sys, threading
from datetime import timedelta
from tft_coord import ManagerClient, ManagerServer, RankRequest
from tft_coord.core.lineage import initial_lineage

def join(number):
    server = ManagerServer(f"replica_{number}", sys.argv[1], "127.0.0.1", "127.0.0.1:0", "store:1", 1, in_process=True)
    client = ManagerClient(server.address(), timedelta(seconds=60), group_rank=0)
    kept.append((server, client))
    client.quorum(0, RankRequest(step=0, lineage=initial_lineage("default"), live=False, held=None),
                  timedelta(seconds=60))

kept = []
threads = [threading.Thread(target=join, args=(number,)) for number in range(int(sys.argv[2]))]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("joined", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lost() -> Iterator[queue.Queue[str]]:
    """The lighthouse's lines about losses."""
    found: queue.Queue[str] = queue.Queue()

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("lost replica"):
                found.put(record.getMessage())

    hears = Hears()
    logger = logging.getLogger("tft_lighthouse")
    logger.addHandler(hears)
    yield found
    logger.removeHandler(hears)


def test_each_of_them_is_lost_by_its_stream_and_not_by_its_silence(
    lost: queue.Queue[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tft_lighthouse")
    with LighthouseServer("127.0.0.1:0", min_replicas=NUM_REPLICAS) as lighthouse:
        words = [sys.executable, "-c", REPLICAS, str(lighthouse.address), str(NUM_REPLICAS)]
        replicas = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert replicas.stdout is not None
            assert replicas.stdout.readline() == "joined\n"
            replicas.send_signal(signal.SIGKILL)
            told = [lost.get(timeout=BOUND_S) for _ in range(NUM_REPLICAS)]
        finally:
            replicas.kill()
            replicas.communicate()
    assert all("its stream disconnected and did not return within 300 ms" in each for each in told), told


def test_streams_that_end_after_a_silence_may_be_the_networks_fault(
    lost: queue.Queue[str], caplog: pytest.LogCaptureFixture
) -> None:
    """So `heartbeat_timeout` judges them."""
    caplog.set_level(logging.INFO, "tft_lighthouse")
    with LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS) as lighthouse:
        channel = grpc.insecure_channel(str(lighthouse.address).removeprefix("http://"))
        stub: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(services.LIGHTHOUSE_SESSION)
        session, kept = time.time_ns() // 1_000_000, []
        for number in range(NUM_REPLICAS):
            hello = Hello("default", f"replica_{number}", session, f"h:{number}", ready=True)
            said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
            said.put(codec.encode_to_lighthouse(events.HelloReceived(0, hello)))
            kept.append(stub(iter(said.get, None)))
            assert isinstance(codec.decode_from_lighthouse(next(kept[-1])), effects.Welcome)
        time.sleep(0.6 * HEARTBEAT_TIMEOUT_MS / 1_000)
        channel.close()
        told = [lost.get(timeout=BOUND_S) for _ in range(NUM_REPLICAS)]
    assert all(f"silent for {HEARTBEAT_TIMEOUT_MS} ms" in each for each in told), told
