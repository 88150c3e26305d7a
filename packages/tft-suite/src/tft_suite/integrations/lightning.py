"""Fault tolerance for the Trainer of Lightning: one strategy.

The strategy starts a quorum before each step, and averages the gradients over the replicas in the backward pass. The
optimizer steps only on commit. The Trainer's `global_step` becomes the job's step.

    manager = Manager(pg=ProcessGroupGloo(), replica_id="replica_0", min_replica_size=1)
    trainer = Trainer(strategy=FaultTolerantStrategy(manager), max_steps=1000)
    trainer.fit(module, loader)
    manager.shutdown()

Law of this file: which event of the Trainer is which part of a step. docs/trainers.md lists what is not supported.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, final

from tft_algos import ConfigError, Manager, Optimizer, PureDistributedDataParallel, UnsupportedFeatureError, UsageError

try:
    # The distributions `lightning` and `pytorch-lightning` contain two copies of the same classes.
    if "lightning.pytorch" in sys.modules:
        from lightning.pytorch.strategies import SingleDeviceStrategy
    else:
        from pytorch_lightning.strategies import SingleDeviceStrategy
except ImportError as error:
    raise ImportError(
        f"tft_suite.integrations.lightning needs pytorch-lightning ({error}); install it with "
        "pip install 'tft-suite[lightning]'"
    ) from error


@final
class FaultTolerantStrategy(SingleDeviceStrategy):
    """A strategy that trains one replica of a job with an unmodified Lightning Trainer.

    A replica is one process on one device. The participant with rank 0 writes checkpoints. `tft drain` ends `fit()`
    after the running step. When `fit()` returns, call `manager.shutdown()` at once, because the others wait for this
    replica until then. Import `lightning` or `pytorch_lightning` before this module, so that it finds the Trainer that
    you use.

    Args:
        manager: of this replica. The strategy registers module, optimizer and schedulers with it.
        device: the device on which the module is trained.
        options: of SingleDeviceStrategy.
    Raises (in `fit`): UnsupportedFeatureError: manual optimization, several optimizers, or a gradient scaler.
        ConfigError: the end is not given by max_steps, or a scheduler steps by epoch. UsageError: `fit` was called
        before.
    """

    def __init__(self, manager: Manager, device: Any = "cpu", **options: Any) -> None:
        super().__init__(device=device, **options)
        self._manager = manager
        self._optimizer: Optimizer | None = None
        self._is_open = False  # a step has begun and has not been voted on
        self._reduces = False  # the running backward pass is the last one of its step
        self._is_primary = True

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        if self._optimizer is not None:
            raise UsageError("fit() was called again; make a new Manager, strategy and Trainer for each training")
        module, manager = self.lightning_module, self._manager
        _check(trainer, module, self)
        inner = self.optimizers[0]
        manager.register_state_dict_fn("model", module.load_state_dict, module.state_dict)
        manager.register_state_dict_fn("optimizer", inner.load_state_dict, inner.state_dict)
        for place, config in enumerate(self.lr_scheduler_configs):
            scheduler = config.scheduler
            manager.register_state_dict_fn(f"scheduler {place}", scheduler.load_state_dict, scheduler.state_dict)
            config.scheduler = _Stepping(scheduler, functools.partial(self._step_on_commit, scheduler))
        self._averaged = PureDistributedDataParallel(manager, module)  # reduces in the backward pass of the module
        self._optimizer = Optimizer(manager, inner)
        self._steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self._is_open:
            assert self._optimizer is not None
            self._optimizer.zero_grad()
            self._is_open = True

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if self._reduces else self._averaged.no_sync():
            return super().backward(closure_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        self._reduces = True
        try:
            result = super().optimizer_step(_Stepping(self._optimizer, self._run_and_vote), closure, model, **kwargs)
        finally:
            self._reduces = self._is_open = False
        manager = self._manager
        self._steps.completed = manager.current_step() - 1  # the Trainer adds 1
        self._is_primary = bool(manager.strategy.verdict) and manager.participating_rank() == 0
        if manager.left:
            self.lightning_module.trainer.should_stop = True
        return result

    def _run_and_vote(self, closure: Callable[[], Any]) -> Any:
        assert self._optimizer is not None
        result = closure()
        self._optimizer.step()
        return result

    def _step_on_commit(self, scheduler: Any, *args: Any) -> None:
        if self._manager.strategy.verdict:
            scheduler.step(*args)

    @property
    def is_global_zero(self) -> bool:
        return self._is_primary

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        step = checkpoint["global_step"]
        self._manager.load_state_dict({"step": step, "batches_committed": step})
        return checkpoint


@final
class _Stepping:
    """An optimizer or a scheduler with another `step`."""

    def __init__(self, inner: Any, step: Callable[..., Any]) -> None:
        self._inner = inner
        self.step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _check(trainer: Any, module: Any, strategy: FaultTolerantStrategy) -> None:
    if not module.automatic_optimization or len(strategy.optimizers) != 1:
        raise UnsupportedFeatureError("only automatic optimization with one optimizer can wait for a commit")
    if getattr(strategy.precision_plugin, "scaler", None) is not None:
        raise UnsupportedFeatureError(
            "16-mixed needs a gradient scaler, which would step without a commit; use bf16-mixed"
        )
    if trainer.max_steps < 1 or trainer.max_epochs != -1:
        raise ConfigError("a discarded step must not count; give Trainer max_steps, and leave max_epochs out or -1")
    if any(config.interval != "step" for config in strategy.lr_scheduler_configs):
        raise ConfigError("epochs differ between replicas; set interval: step for each scheduler")
