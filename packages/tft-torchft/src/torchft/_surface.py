"""An object with torchft's documented methods of a Manager, for strategies of tft.

Users test their loops with a Manager of their own, or with one of `unittest.mock`. The strategies of tft ask a Manager
for more. This view answers those questions from the documented methods. It treats what such an object does not answer
as absent: there is no opening, no state exchange beside the vote, and one sync at a time.

Law of this file: answers. A real Manager is never seen through this view.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final, NoReturn, final

import torch
import torch.distributed as dist

import tft_algos
from tft_algos import UnsupportedFeatureError
from tft_pg import DummyWork
from torchft.manager import Manager

_AVG: Final = dist.ReduceOp.AVG
_views: weakref.WeakKeyDictionary[Any, ManagerView] = weakref.WeakKeyDictionary()


def for_strategies(manager: Any) -> Any:
    """Return what tft's strategies take as their Manager: the object itself, or a view of it.

    A mock says that it is of the class that it imitates, so the real type counts.
    """
    is_real = not {Manager, tft_algos.Manager}.isdisjoint(type(manager).__mro__)
    if is_real or not callable(getattr(manager, "should_commit", None)):
        return manager  # a strategy refuses what is no Manager, with a sentence
    return _views.setdefault(manager, ManagerView(manager))


@final
class ManagerView:
    """A view of an object with torchft's documented methods. See the module.

    Args:
        manager: the object.
    """

    left = False

    def __init__(self, manager: Any) -> None:
        self._manager = weakref.proxy(manager)
        self.strategy = _Strategy(self)
        self.works: list[dist.Work] = []

    def start_quorum(self, *_: object, **__: object) -> None:
        self.strategy.attempt += 1
        self._manager.start_quorum()

    def should_commit(self) -> bool:
        works, self.works = self.works, []
        for work in works:
            work.wait()
        return bool(self._manager.should_commit())

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: Any = _AVG) -> dist.Work:
        """Reduce a tensor. A sum over an object that has no number of participants, such as a mock, is the tensor."""
        if reduce_op == _AVG:
            work: dist.Work = self._manager.allreduce(tensor)
        elif self._sums():
            work = self._manager.allreduce(tensor, reduce_op=reduce_op)
        else:
            work = DummyWork(tensor)
        return work

    def _sums(self) -> bool:
        count = getattr(self._manager, "num_participants", None)
        takes = "reduce_op" in inspect.signature(self._manager.allreduce).parameters
        return takes and callable(count) and isinstance(count(), int)

    def current_step(self) -> int:
        """Return a number above zero: what the object counts, and the opening, which such an object has not."""
        step = self._manager.current_step()
        return 1 + (step if isinstance(step, int) else 0)

    def is_participating(self) -> bool:
        return bool(self._manager.is_participating())

    def errored(self) -> Any:
        return self._manager.errored()

    def report_error(self, error: Exception) -> None:
        self._manager.report_error(error)

    def register_state_dict_fn(self, key: str, load: Any, take: Any, **_: object) -> None:
        self._manager.register_state_dict_fn(key, load, take)


@final
class _Strategy:
    """The interface for strategies of a view. `StepControl` describes the methods.

    Args:
        view: of the Manager.
    """

    verdict = None
    is_untouched = False
    num_deferred = 0
    config = SimpleNamespace(world_size=1, rank0_synchronization_only=False)

    def __init__(self, view: ManagerView) -> None:
        self.attempt = 0
        self._view = view

    def attach(self, name: str) -> None:
        return

    def describe_parameters(self, model: object, *, strides: bool = False) -> None:
        return

    def describe_optimizer(self, optimizer: object) -> None:
        return

    def add_to_fingerprint(self, name: str, value: str) -> None:
        return

    def wait_plan(self) -> Any:
        return SimpleNamespace(step=self._view.current_step())

    def quorum_is_known(self) -> bool:
        return True

    def raise_if_left(self) -> None:
        return

    def quantizer_of(self, should_quantize: object, tensor: object) -> object:
        return should_quantize

    def reduce_in_sync(self, tensor: torch.Tensor, quantizer: object = None) -> dist.Work:
        manager = self._view._manager
        work: dist.Work = manager.allreduce(tensor, should_quantize=True) if quantizer else manager.allreduce(tensor)
        self._view.works.append(work)
        return work

    def exchange_state(self) -> bool:
        return False

    def defer(self) -> NoReturn:
        raise UnsupportedFeatureError("several syncs in flight need a Manager of torchft; give a shorter delay")

    def give_up_deferred(self) -> None:
        return

    def inner_step_ended(self) -> None:
        return

    @contextlib.contextmanager
    def applying(self) -> Iterator[None]:
        yield

    def report_torn(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            self._view.report_error(error)
