"""A parameter server: workers fetch the weights, compute gradients on their own data, and send them back.

Workers come and go at any time, and never wait for each other. If a worker dies, the server forgets its session and
serves the others.

    (umask 077; openssl rand -hex 32 > tft-token) # once, and in each shell: export TFT_TOKEN_FILE=$PWD/tft-token
    python parameter_server.py serve --port 29600                                                       # shell 1
    python parameter_server.py work http://localhost:29600/new_session                               # shells 2, 3, ...
"""

import argparse
import threading
from contextlib import suppress
from datetime import timedelta

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tft_algos import ParameterServer
from tft_pg import ProcessGroup, ProcessGroupGloo

SERVER, WORKER = 0, 1  # the ranks in a session


class Weights(ParameterServer):
    """A server that holds the weights, and applies the gradients of all workers as they come."""

    def __init__(self, port: int, lr: float = 0.02) -> None:
        torch.manual_seed(0)
        self._weights = parameters_to_vector(make_model().parameters()).detach()
        self._lr = lr
        self._lock = threading.Lock()
        super().__init__(port)  # last, because it begins to serve

    @classmethod
    def new_process_group(cls) -> ProcessGroup:
        return ProcessGroupGloo(timeout=timedelta(seconds=60))  # the longest time between two calls of a worker

    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        gradient = torch.empty_like(self._weights)
        while True:  # until the worker leaves: the next call then raises PeerDisconnectedError, which ends the session
            with self._lock:
                weights = self._weights.clone()
            pg.broadcast_one(weights, SERVER).wait()
            pg.recv([gradient], WORKER, 0).wait()
            with self._lock:
                self._weights.sub_(gradient, alpha=self._lr)


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


def serve(port: int) -> None:
    with suppress(KeyboardInterrupt), Weights(port) as server:
        print(f"serving at {server.address()}", flush=True)
        threading.Event().wait()  # until Ctrl-C


def work(address: str, steps: int) -> None:
    model = make_model()
    teacher = torch.arange(32.0) / 32
    pg = Weights.new_session(address)
    try:
        weights = parameters_to_vector(model.parameters()).detach()
        for step in range(1, steps + 1):
            pg.broadcast_one(weights, SERVER).wait()
            vector_to_parameters(weights, model.parameters())
            inputs = torch.randn(64, 32)
            loss = (model(inputs).squeeze(1) - inputs @ teacher).square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            pg.send([parameters_to_vector(gradients)], SERVER, 0).wait()
            if step == 1 or step % 50 == 0:
                print(f"step {step}, loss {loss:.4f}", flush=True)
    finally:
        pg.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    roles = parser.add_subparsers(dest="role", required=True)
    server = roles.add_parser("serve", help="hold the weights")
    server.add_argument("--port", type=int, default=29600)
    worker = roles.add_parser("work", help="compute gradients")
    worker.add_argument("address", help="what the server prints")
    worker.add_argument("--steps", type=int, default=500)
    settings = parser.parse_args()
    if settings.role == "serve":
        serve(settings.port)
    else:
        work(settings.address, settings.steps)
