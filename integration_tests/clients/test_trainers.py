"""The adapters' handling of a discarded step, and their refusals, in this process, with one replica.

The other libraries warn on import, so the tests import them inside, and ignore warnings.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from integration_tests.clients.data import as_inputs, loss_of, network, sequences
from tft_algos import ConfigError, UnsupportedFeatureError, UsageError
from tft_lighthouse import LighthouseServer
from tft_suite import Manager, ProcessGroupGloo
from tft_suite.integrations.data import endless

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(150)]  # on a machine that is busy

STEPS: Final = 6
DISCARDED: Final = (2, 3, 5)  # numbers of discarded attempts, from 1
COUNTED: Final = [1, 1, 1, 2, 2, 3, 4, 5, 6]  # number of steps after each attempt


@contextmanager
def replica() -> Iterator[Manager]:
    """Yield a Manager with a lighthouse. A fixture would not work: pytest would hold the last one past the port
    check."""
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=1) as lighthouse,
        Manager(pg=ProcessGroupGloo(), replica_id="a", min_replica_size=1, lighthouse_addr=lighthouse.address) as made,
    ):
        yield made


def fail_some(manager: Manager) -> None:
    """Discard the attempt if it is one of DISCARDED."""
    if manager.strategy.attempt in DISCARDED:
        manager.report_error(RuntimeError("this batch is bad"))


def let_go(model: torch.nn.Module) -> None:
    """Break the cycle from parameters to their hooks, which no collector sees, so that the Manager's port is closed."""
    for parameter in model.parameters():
        assert parameter._post_accumulate_grad_hooks is not None
        parameter._post_accumulate_grad_hooks.clear()


# --- Hugging Face ---


def huggingface_trainer(manager: Manager, folder: Path, *, dataset: Any = None, **settings: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from tft_suite.integrations.huggingface import FaultToleranceCallback

    config = GPT2Config(vocab_size=16, n_positions=12, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    usual = {"max_steps": STEPS, "save_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    return Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(output_dir=str(folder), **usual | settings),
        train_dataset=endless(sequences(64, seed=1)) if dataset is None else dataset,
        eval_dataset=sequences(8, seed=0),
        data_collator=as_inputs,
        callbacks=[FaultToleranceCallback(manager)],
    )


@pytest.mark.in_parts
def test_huggingface_counts_no_discarded_step(tmp_path: Path) -> None:
    with replica() as manager:
        huggingface_counts(manager, tmp_path)


def huggingface_counts(manager: Manager, folder: Path) -> None:
    from transformers import TrainerCallback

    counted, learning_rates, saved, evaluated = [], [], [], []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            fail_some(manager)

        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            counted.append(state.global_step)
            learning_rates.append(parts["lr_scheduler"].get_last_lr()[0])

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saved.append(state.global_step)

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            evaluated.append(state.global_step)

    trainer = huggingface_trainer(manager, folder, learning_rate=0.06, eval_strategy="steps", eval_steps=1)
    trainer.add_callback(Watch())
    assert trainer.train().global_step == STEPS
    assert counted == COUNTED
    assert learning_rates == pytest.approx([0.06 - 0.01 * step for step in COUNTED])
    assert saved == evaluated == list(range(1, STEPS + 1))
    with pytest.raises(UsageError, match="make a new Manager"):
        trainer.train()
    let_go(trainer.model)


@pytest.mark.parametrize(
    ("settings", "expected", "words"),
    [
        ({"dataset": sequences(64, seed=1)}, ConfigError, "train_dataset=endless"),
        ({"fp16": True}, UnsupportedFeatureError, "bf16=True"),
    ],
)
def test_huggingface_refuses(settings: dict[str, Any], expected: type[Exception], words: str, tmp_path: Path) -> None:
    with replica() as manager:
        trainer = huggingface_trainer(manager, tmp_path, **settings)
        if "fp16" in settings:
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu")  # accelerate makes one only on accelerators
        with pytest.raises(expected, match=words):
            trainer.train()
        assert manager.strategy.attempt == 0


# --- Lightning ---


def lightning_module(interval: str = "step", *, automatic: bool = True) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.automatic_optimization = automatic

        def training_step(self, tokens: Tensor, _: int) -> Tensor:
            return loss_of(self.net(tokens), tokens)

        def configure_optimizers(self) -> Any:
            sgd = torch.optim.SGD(self.parameters(), lr=0.06)
            schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1 - step / STEPS)
            return {"optimizer": sgd, "lr_scheduler": {"scheduler": schedule, "interval": interval}}

    return Module()


def lightning_trainer(manager: Manager, folder: Path, **settings: Any) -> Any:
    import lightning.pytorch as pl

    from tft_suite.integrations.lightning import FaultTolerantStrategy

    usual = {"max_steps": STEPS, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        strategy=FaultTolerantStrategy(manager), accelerator="cpu", default_root_dir=folder, **usual | settings
    )


def loader() -> Any:
    return DataLoader(list(sequences(16, seed=1)), batch_size=4)  # type: ignore[arg-type]


def test_lightning_counts_no_discarded_step(tmp_path: Path) -> None:
    with replica() as manager:
        lightning_counts(manager, tmp_path)


def lightning_counts(manager: Manager, folder: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    counted, learning_rates = [], []

    class Watch(pl.Callback):
        def on_before_optimizer_step(self, *_: Any) -> None:
            fail_some(manager)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            counted.append(trainer.global_step)
            learning_rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    checkpoints = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer = lightning_trainer(manager, folder, callbacks=[Watch(), checkpoints])
    module = lightning_module()
    trainer.fit(module, loader())
    assert counted == COUNTED
    assert learning_rates == pytest.approx([0.06 - 0.01 * step for step in COUNTED])
    assert sorted(path.name for path in folder.glob("*.ckpt")) == [f"step={step}.ckpt" for step in range(1, 7)]
    with pytest.raises(UsageError, match="make a new Manager"):
        trainer.fit(module, loader())
    let_go(module)


@pytest.mark.parametrize(
    ("settings", "module", "expected", "words"),
    [
        ({"max_steps": -1, "max_epochs": 2}, {}, ConfigError, "max_steps"),
        ({"max_epochs": 2}, {}, ConfigError, "max_epochs"),
        ({}, {"interval": "epoch"}, ConfigError, "interval: step"),
        ({}, {"automatic": False}, UnsupportedFeatureError, "automatic optimization"),
    ],
)
def test_lightning_refuses(
    settings: dict[str, Any],
    module: dict[str, Any],
    expected: type[Exception],
    words: str,
    tmp_path: Path,
) -> None:
    with replica() as manager:
        with pytest.raises(expected, match=words):
            lightning_trainer(manager, tmp_path, **settings).fit(lightning_module(**module), loader())
        assert manager.strategy.attempt == 0


@pytest.mark.in_parts
def test_the_strategy_is_also_one_of_the_other_distribution_of_lightning() -> None:
    program = "\n".join(
        [
            "import pytorch_lightning as pl",
            "from tft_suite.integrations.lightning import FaultTolerantStrategy",
            "assert issubclass(FaultTolerantStrategy, pl.strategies.Strategy), FaultTolerantStrategy.__mro__",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
