"""A custom strategy: a step's mean is over the first K of M replicas to be ready, and late replicas contribute nothing.

With M replicas a step lasts as long as the slowest of them. Here each replica computes its gradient in pieces, and
draws a ticket at the end. Once K tickets are drawn the others stop after their next piece, and weigh zero in the mean.
So a straggler costs the others one piece, not a whole step. (Backup workers, arXiv 1604.00981.)

    (umask 077; openssl rand -hex 32 > tft-token) # once, and in each shell: export TFT_TOKEN_FILE=$PWD/tft-token
    tft-lighthouse --min_replicas 3                                                                     # shell 1
    TFT_LIGHTHOUSE=http://localhost:29510 python custom_strategy.py --replica 0                      # 0, 1: shells 2, 3
    TFT_LIGHTHOUSE=http://localhost:29510 python custom_strategy.py --replica 2 --piece_s 0.05          # shell 4

The parts are a custom process group around ProcessGroupGloo, which also uses the quorum's store, and the Manager's
weights. The Manager keeps control of steps, healing and votes.
"""

import argparse
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tft_algos import Manager, Optimizer, ProcessGroupLike
from tft_algos.testing import digest
from tft_pg import ProcessGroupGloo, create_store_client

PIECES = 8


class Tickets(ProcessGroupLike):
    """A process group whose members can draw tickets in a round, at the store of the quorum that it is built for."""

    def __init__(self, group: ProcessGroupLike) -> None:
        self._group = group
        self._store: Any = None
        self._round = 0

    def configure(self, store_addr: str, rank: int, world_size: int, **identity: Any) -> None:
        self._group.configure(store_addr, rank, world_size, **identity)
        self._store = create_store_client(f"{store_addr}/tickets", timedelta(seconds=10))
        self._round = 0

    def next_round(self) -> None:
        """Begin a round. Every member of a quorum does so once a step. If one does not, only tickets are lost."""
        self._round += 1

    def draw(self, tickets: int = 1) -> int:
        """Return the number of the drawn ticket, 1 for the first. With `tickets=0`, return how many are drawn."""
        number: int = self._store.add(str(self._round), tickets)
        return number

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.ReduceOp | dist.ReduceOp.RedOpType) -> dist.Work:
        return self._group.allreduce(tensors, opts)

    def errored(self) -> Exception | None:
        return self._group.errored()

    def abort(self) -> None:
        self._group.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    def shutdown(self) -> None:
        self._store = None
        self._group.shutdown()


def first_k(manager: Manager, tickets: Tickets, k: int, pieces: list[torch.Tensor], loss_of: Any) -> bool:
    """Compute a gradient in pieces while fewer than k others are ready, and return whether it counts."""
    try:
        for number, piece in enumerate(pieces, start=1):
            (loss_of(piece) / len(pieces)).backward()
            if number == 1:
                participates = manager.is_participating()  # waits for the quorum, which the first piece does not need
                tickets.next_round()
            if number < len(pieces) and tickets.draw(0) >= k:
                return False
        return participates and tickets.draw() <= k
    except dist.DistError as error:  # the store belonged to a replica that has died
        manager.report_error(error)
        return False


def main(steps: int, replica: int, k: int, piece_s: float) -> None:
    torch.manual_seed(0)
    teacher = torch.nn.Linear(32, 1)
    torch.manual_seed(1 + replica)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)

    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(piece_s)
        return torch.nn.functional.mse_loss(model(inputs), teacher(inputs).detach())

    tickets = Tickets(ProcessGroupGloo())
    with Manager(tickets, min_replica_size=k, replica_id=f"replica_{replica}") as manager:
        manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
        optimizer = Optimizer(manager, sgd)
        while manager.current_step() < steps:
            optimizer.zero_grad()
            counts = first_k(manager, tickets, k, [torch.randn(16, 32) for _ in range(PIECES)], loss_of)
            manager.set_weight(float(counts))
            for work in [manager.allreduce(each.grad) for each in model.parameters() if each.grad is not None]:
                work.wait()
            if optimizer.step():
                step, members, how = manager.current_step(), manager.num_participants(), ("late", "counted")[counts]
                print(f"step {step} {how} of {members}, {digest(model.state_dict())}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int, nargs="?", default=200)
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--k", type=int, default=2, help="replicas over which the mean is taken")
    parser.add_argument("--piece_s", type=float, default=0.0, help="seconds more for each piece")
    main(**vars(parser.parse_args()))
