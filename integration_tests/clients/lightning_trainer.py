"""A program with Lightning's Trainer, as its users write one. It runs as one replica of a job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from integration_tests.clients.data import (
    STEPS,
    Share,
    loss_of,
    network,
    print_end,
    print_step,
    replica,
    sequences,
)
from tft_suite import Manager, ProcessGroupGloo
from tft_suite.integrations.lightning import FaultTolerantStrategy


class LanguageModel(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, tokens: Tensor, _: int) -> Tensor:
        return loss_of(self.net(tokens), tokens)

    def validation_step(self, tokens: Tensor, _: int) -> None:
        self.log("val_loss", loss_of(self.net(tokens), tokens))

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 - step / STEPS)
        return {"optimizer": adam, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Report(pl.Callback):
    """A callback that prints the loss on data that is never trained on."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._tokens = sequences(64, seed=0)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._printed = trainer.global_step

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        step = trainer.global_step
        if step != self._printed:
            self._printed = step
            print_step(self._manager, step, loss_of(module.net(self._tokens), self._tokens).item())


def main(folder: Path, *flags: str) -> None:
    module = LanguageModel()
    manager = Manager(pg=ProcessGroupGloo(), replica_id=f"replica_{replica()}", min_replica_size=1)
    checkpoints = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=20, save_top_k=-1, filename="{step}")
    trainer = pl.Trainer(
        strategy=FaultTolerantStrategy(manager),
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[checkpoints],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.callbacks.append(Report(manager))
    loader = DataLoader(Share(replica(), folder), batch_size=4, shuffle=True)
    validation: Any = DataLoader(list(sequences(64, seed=0)), batch_size=64)  # type: ignore[arg-type]
    resumed = folder / "checkpoints" / f"step={STEPS - 20}.ckpt" if "--resume" in flags else None
    trainer.fit(module, loader, validation, ckpt_path=resumed)
    print_end(manager, trainer.global_step, module.state_dict(), trainer.optimizers[0].state_dict())
    manager.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
