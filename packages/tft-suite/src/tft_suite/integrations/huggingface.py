"""Fault tolerance for the Trainer of Hugging Face transformers: one callback.

The callback starts a quorum before each step, and averages the gradients over the replicas in the backward pass. The
optimizer steps only on commit. The Trainer's `global_step` becomes the job's step.

    manager = Manager(pg=ProcessGroupGloo(), replica_id="replica_0", min_replica_size=1)
    trainer = Trainer(
        model=model, args=args, train_dataset=endless(share), callbacks=[FaultToleranceCallback(manager)]
    )
    trainer.train()
    manager.shutdown()

Law of this file: which event of the Trainer is which part of a step. docs/trainers.md lists what is not supported.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, final

from tft_algos import ConfigError, Manager, Optimizer, PureDistributedDataParallel, UnsupportedFeatureError, UsageError

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        f"tft_suite.integrations.huggingface needs transformers and accelerate ({error}); install them with "
        "pip install 'tft-suite[huggingface]'"
    ) from error

_HEALED = ("best_metric", "best_global_step", "best_model_checkpoint")  # fields of the TrainerState


@final
class FaultToleranceCallback(TrainerCallback):
    """A callback that trains one replica of a job with an unmodified `transformers.Trainer`.

    A replica is one process. All replicas evaluate, at the same steps. The participant with rank 0 logs the loss and
    saves checkpoints. `tft drain` ends `train()` after the running step. When `train()` returns, call
    `manager.shutdown()` at once, because the others wait for this replica until then.

    Args:
        manager: of this replica. The callback registers model, optimizer, scheduler and the best metric with it.
    Raises (in `train`): UnsupportedFeatureError: the Trainer runs several processes, an fp16 scaler, or an optimizer
        that can't be wrapped. ConfigError: the training data has a length. UsageError: `train` was called before.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._optimizer: Optimizer | None = None
        self._passes = 0  # backward passes of this step
        self._no_sync = contextlib.ExitStack()  # while a context is entered, backward passes reduce nothing

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        if self._optimizer is not None:
            raise UsageError("train() was called again; make a new Manager, callback and Trainer for each training")
        model, optimizer, scheduler = parts["model"], parts["optimizer"], parts["lr_scheduler"]
        _check(args, state, optimizer)
        inner, manager = optimizer.optimizer, self._manager
        if state.global_step:  # the Trainer has loaded a checkpoint, and all replicas do this
            manager.load_state_dict({"step": state.global_step, "batches_committed": state.global_step})
        manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
        manager.register_state_dict_fn("optimizer", inner.load_state_dict, inner.state_dict)
        manager.register_state_dict_fn("scheduler", scheduler.load_state_dict, scheduler.state_dict)
        manager.register_state_dict_fn(
            "trainer",
            lambda best: vars(state).update(best),
            lambda: {name: getattr(state, name) for name in _HEALED},
            compared=False,  # only the replica that saves knows the path of the best checkpoint
        )
        self._model = PureDistributedDataParallel(manager, model)  # reduces in the backward pass of the model itself
        self._accelerated = optimizer
        self._optimizer = optimizer.optimizer = Optimizer(manager, inner)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert self._optimizer is not None
        self._optimizer.zero_grad()
        self._passes = 0
        self._reduce_if(args.gradient_accumulation_steps == 1)

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._passes += 1
        self._reduce_if(self._passes == args.gradient_accumulation_steps - 1)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # With this, the Trainer skips the scheduler's step. It also adds 1 to global_step.
        self._accelerated._is_overflow = not self._manager.strategy.verdict
        state.global_step = self._manager.current_step() - 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        committed = bool(self._manager.strategy.verdict)
        is_primary = committed and self._manager.participating_rank() == 0
        control.should_evaluate &= committed
        control.should_log &= is_primary
        control.should_save &= is_primary
        control.should_training_stop |= self._manager.left

    on_epoch_end = on_step_end

    def _reduce_if(self, reduces: bool) -> None:
        self._no_sync.close()
        if not reduces:
            self._no_sync.enter_context(self._model.no_sync())


def _check(args: TrainingArguments, state: TrainerState, optimizer: Any) -> None:
    if args.world_size > 1:
        raise UnsupportedFeatureError(
            f"the Trainer runs {args.world_size} processes; start each replica as one process, without torchrun"
        )
    if not isinstance(optimizer, AcceleratedOptimizer) or hasattr(optimizer.optimizer, "train"):
        name = type(getattr(optimizer, "optimizer", optimizer)).__name__
        raise UnsupportedFeatureError(
            f"the Trainer's optimizer is a {name}, which can't wait for a commit; use AdamW or SGD"
        )
    if optimizer.scaler is not None:
        raise UnsupportedFeatureError("fp16 needs a gradient scaler, which would step without a commit; set bf16=True")
    if state.num_train_epochs < sys.maxsize:
        raise ConfigError(
            "the training data has a length, so a discarded step would end the training before max_steps; give "
            "max_steps, and train_dataset=endless(dataset) from tft_suite.integrations.data"
        )
