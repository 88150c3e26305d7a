"""A program with transformers.Trainer, as its users write one. It runs as one replica of a job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from integration_tests.clients.data import (
    LENGTH,
    STEPS,
    TOKENS,
    Share,
    as_inputs,
    print_end,
    print_step,
    replica,
    sequences,
)
from tft_suite import Manager, ProcessGroupGloo
from tft_suite.integrations.data import endless
from tft_suite.integrations.huggingface import FaultToleranceCallback


class Report(TrainerCallback):
    """A callback that prints the loss on data that is never trained on."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._batch = as_inputs(list(sequences(64, seed=0)))

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.eval()
        print_step(self._manager, state.global_step, model(**self._batch).loss.item())


def main(folder: Path, *flags: str) -> None:
    config = GPT2Config(
        vocab_size=TOKENS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    manager = Manager(pg=ProcessGroupGloo(), replica_id=f"replica_{replica()}", min_replica_size=1)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / "checkpoints"),  # one folder for all replicas
            max_steps=STEPS,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            learning_rate=0.02,
            warmup_steps=10,
            lr_scheduler_type="cosine",
            eval_strategy="steps",
            eval_steps=20,
            save_steps=20,
            save_total_limit=2,
            logging_steps=20,
            ignore_data_skip=True,  # on a resume an endless data set has no place to go back to
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=endless(Share(replica(), folder)),
        eval_dataset=sequences(64, seed=0),
        data_collator=as_inputs,
        callbacks=[FaultToleranceCallback(manager)],
    )
    trainer.add_callback(Report(manager))
    trainer.train(resume_from_checkpoint="--resume" in flags)
    print_end(manager, trainer.state.global_step, model.state_dict(), trainer.optimizer.state_dict())
    manager.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
