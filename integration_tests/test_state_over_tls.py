"""Managers with certificates in their environment: their state travels over TLS, from the job's own sources alone."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import trustme

from tft_algos import Manager
from tft_ckpt import HTTPTransport, StateUnavailableError
from tft_coord import TLS
from tft_lighthouse import LighthouseServer
from tft_pg import ProcessGroupGloo

BOUND: Final = timedelta(seconds=30)


def certificates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    own.private_key_and_cert_chain_pem.write_to_path(str(folder / "own.pem"))
    monkeypatch.setenv("TFT_TLS_CERT", str(folder / "own.pem"))
    monkeypatch.setenv("TFT_TLS_KEY", str(folder / "own.pem"))
    monkeypatch.setenv("TFT_TLS_CA", str(folder / "ca.pem"))
    monkeypatch.setenv("TFT_TLS_CLIENT_AUTH", "1")


class Replica:
    """A Manager, and a state of one tensor."""

    def __init__(self, lighthouse: LighthouseServer, name: str, weights: torch.Tensor) -> None:
        self.weights = weights
        self.manager = Manager(
            ProcessGroupGloo(timeout=BOUND),
            load_state_dict=self._load,
            state_dict=lambda: {"weights": self.weights},
            lighthouse_addr=lighthouse.address,
            replica_id=name,
            hostname="127.0.0.1",
            rank=0,
            world_size=1,
            timeout=BOUND,
            init_sync=False,
        )

    def _load(self, state: dict[str, Any]) -> None:
        self.weights.copy_(state["weights"])

    def step(self) -> bool:
        self.manager.start_quorum()
        self.manager.allreduce(torch.ones(4)).wait()
        return self.manager.should_commit()


def test_a_newcomer_heals_over_tls_and_a_stranger_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates(tmp_path, monkeypatch)
    monkeypatch.setenv("TFT_TOKEN", "secret")
    with LighthouseServer("127.0.0.1:0", token="secret", tls=TLS.from_environment()) as lighthouse:
        first = Replica(lighthouse, "a", torch.arange(1000.0))
        while first.manager.current_step() < 2:
            first.step()
        second = Replica(lighthouse, "b", torch.zeros(1000))
        healed = threading.Event()

        def train_on() -> None:
            while not healed.is_set():
                first.step()

        others = threading.Thread(target=train_on)
        others.start()
        try:
            while second.manager.current_step() < 3:
                second.step()
        finally:
            healed.set()
            second.manager.shutdown()  # ends what the first waits for
            others.join()
            first.manager.shutdown()
        address = first.manager._parts.shared.transport.metadata()
    assert second.weights.equal(torch.arange(1000.0))
    assert address.startswith("https://127.0.0.1:")


def test_who_has_no_certificate_gets_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates(tmp_path, monkeypatch)
    monkeypatch.setenv("TFT_TOKEN", "secret")
    with LighthouseServer("127.0.0.1:0", token="secret", tls=TLS.from_environment()) as lighthouse:
        replica = Replica(lighthouse, "a", torch.ones(10))
        with HTTPTransport[Any](bind="127.0.0.1", token="secret") as stranger, pytest.raises(StateUnavailableError):
            stranger.recv_checkpoint(0, replica.manager._parts.shared.transport.metadata(), 0, timedelta(seconds=5))
        replica.manager.shutdown()
