"""Most of a job is killed at once: its hosts say so, and that is no sign of a sick lighthouse."""

from __future__ import annotations

import logging
import queue
import signal
import subprocess
import sys
import time
from typing import Final

import pytest

from tft_coord.transport import direct
from tft_lighthouse import LighthouseServer

NUM_REPLICAS: Final = 6
BOUND_S: Final = 60.0
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


@pytest.mark.skipif(not direct.IS_THERE, reason="no bare sockets here: the end of a stream is not told")
def test_each_of_them_is_lost_by_its_stream_and_not_by_its_silence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tft_lighthouse")
    lost: queue.Queue[str] = queue.Queue()

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("lost replica"):
                lost.put(record.getMessage())

    hears = Hears()
    logging.getLogger("tft_lighthouse").addHandler(hears)
    try:
        with LighthouseServer("127.0.0.1:0", min_replicas=NUM_REPLICAS) as lighthouse:
            words = [sys.executable, "-c", REPLICAS, str(lighthouse.address), str(NUM_REPLICAS)]
            replicas = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            try:
                assert replicas.stdout is not None
                assert replicas.stdout.readline() == "joined\n"
                assert lighthouse._shell is not None
                until = time.monotonic() + BOUND_S
                while len(lighthouse._shell._direct._taken) < NUM_REPLICAS:
                    assert time.monotonic() < until, "the streams have no sockets"
                    time.sleep(0.01)
                replicas.send_signal(signal.SIGKILL)
                told = [lost.get(timeout=BOUND_S) for _ in range(NUM_REPLICAS)]
            finally:
                replicas.kill()
                replicas.communicate()
    finally:
        logging.getLogger("tft_lighthouse").removeHandler(hears)
    assert all("its stream broke and was not back within 300 ms" in each for each in told), told
