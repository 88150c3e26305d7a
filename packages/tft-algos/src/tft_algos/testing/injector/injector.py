"""The injector: it stands at every place of a rank's steps, and lets those faults happen that were asked for.

A Manager is put together from parts, and torch's modules and optimizers have hooks; so a test wraps the parts, and the
code under test is the code of production:

    injector = EventInjector(Fault(action=Action.KILL, place=Place.VOTE, replica="a", rank=1, step=7))
    transport = injector.transport(HTTPTransport(timedelta(seconds=60), num_chunks=0, advertise_addr="localhost"))
    manager = Manager(
        injector.group(ProcessGroupGloo()), load, take,
        replica_id="a", coordinator=injector.coordinator, checkpoint_transport=transport,
    )
    ddp = DistributedDataParallel(manager, injector.module(module))
    optimizer = Optimizer(manager, injector.optimizer(torch.optim.AdamW(module.parameters())))
    injector.attach(manager)

A fault that can't strike would let a test pass that proves nothing, so `attach` and `inject` refuse one whose part was
not wrapped, and `check_all_struck` at the end of a test finds the others.

Law of this file: which fault strikes, and what striking is. How a part fails in its own words stands in `wrappers`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, final

import torch

from tft_algos.errors import SettingError, UsageError
from tft_algos.manager.config import ResolvedConfig
from tft_algos.manager.coordinator import GroupCoordinator
from tft_algos.manager.parts import Coordinator, Group
from tft_algos.testing.injector.fault import Action, Fault, InjectedError, NotStruck, Place
from tft_algos.testing.injector.wrappers import StruckGroup, StruckTransport, struck_coordinator
from tft_ckpt import CheckpointTransport

Module = TypeVar("Module", bound=torch.nn.Module)
TorchOptimizer = TypeVar("TorchOptimizer", bound=torch.optim.Optimizer)


# What has to be wrapped for each place, and by which method of the injector.
WRAPPED_BY: Final = {
    Place.QUORUM: "coordinator",
    Place.CONFIGURE: "group",
    Place.FORWARD: "module",
    Place.BACKWARD: "module",
    Place.REDUCTION: "group",
    Place.WORD: "group",
    Place.VOTE: "coordinator",
    Place.OPTIMIZER: "optimizer",
    Place.SERVING: "transport",
    Place.HEALING: "transport",
}
IN_USER_CODE: Final = (Place.FORWARD, Place.BACKWARD, Place.OPTIMIZER)


class Steered(Protocol):
    """What the injector asks of a Manager's `strategy`."""

    @property
    def config(self) -> ResolvedConfig: ...

    def report_torn(self, error: Exception) -> None: ...


class Attached(Protocol):
    """What the injector asks of a Manager: who and where it is, and to be told of failures in the user's own code."""

    @property
    def strategy(self) -> Steered: ...

    def current_step(self) -> int: ...

    def report_error(self, e: Exception) -> None: ...


@final
class EventInjector:
    """Lets faults happen in this process.

    Args:
        faults: that shall happen; those of other replicas and ranks are ignored, so that all may get the same.
        on_strike: told of a fault just before it strikes, on the thread that it strikes.
    Raises: SettingError: one of them is no Fault.
    """

    def __init__(self, *faults: Fault, on_strike: Callable[[Fault], object] = lambda _: None) -> None:
        self._lock = threading.Lock()
        self._pending: list[Fault] = []
        self._struck: list[Fault] = []
        self._on_strike = on_strike
        self._manager: Attached | None = None
        self._wrapped: set[str] = set()
        self._released = threading.Event()
        for fault in faults:
            self.inject(fault)

    # --- faults --------------------------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> EventInjector:
        """Ask for one more, from any thread. Returns: this injector.

        Raises: SettingError: it is no Fault. UsageError: as `attach`.
        """
        if not isinstance(fault, Fault):
            raise SettingError(f"a fault is a {type(fault).__name__}; give a Fault")
        with self._lock:
            if self._manager is not None:
                self._check_can_strike(fault, self._manager)
            self._pending.append(fault)
        return self

    def fail_at(self, replica: str, step: int, *, rank: int = 0) -> EventInjector:
        """Let a replica's user code raise in its forward pass. Returns: this injector."""
        return self.inject(Fault(action=Action.RAISE, place=Place.FORWARD, replica=replica, rank=rank, step=step))

    def fail_allreduce_at(self, replica: str, step: int, *, rank: int = 0) -> EventInjector:
        """Let a replica's next reduction fail. Returns: this injector."""
        return self.inject(Fault(action=Action.FAIL, place=Place.REDUCTION, replica=replica, rank=rank, step=step))

    @property
    def struck(self) -> tuple[Fault, ...]:
        """What has happened in this process, in order."""
        with self._lock:
            return tuple(self._struck)

    def check_all_struck(self, *elsewhere: Fault) -> None:
        """Demand, at the end of a test, that everything has happened that was asked for, of whatever replica.

        Args:
            elsewhere: what has happened in other processes, as `struck` or `on_strike` told there.
        Raises: NotStruck: some did not; the message describes them.
        """
        with self._lock:
            left = list(self._pending)
        for fault in elsewhere:
            if fault in left:
                left.remove(fault)
        if left:
            raise NotStruck(tuple(left))

    def attach(self, manager: Attached) -> None:
        """Say whose steps these are; when all parts are wrapped, and before the first step.

        Args:
            manager: a Manager.
        Raises: UsageError: a fault for its replica and rank names a place whose part was not wrapped. Nothing is
            attached then.
        """
        with self._lock:
            for fault in self._pending:
                self._check_can_strike(fault, manager)
            self._manager = manager

    def _check_can_strike(self, fault: Fault, manager: Attached) -> None:
        me, method = manager.strategy.config, WRAPPED_BY[fault.place]
        if (fault.replica, fault.rank) == (me.replica_id or "", me.rank) and method not in self._wrapped:
            raise UsageError(
                f"a fault at {fault.place.name} of replica {fault.replica}, rank {fault.rank}, can't strike, because "
                f"that part was not wrapped; wrap it with injector.{method} before attach(manager)"
            )

    def release(self) -> None:
        """End what hangs, and let nothing hang any more. The Manager's shutdown does it, and the process's end."""
        self._released.set()

    # --- the parts -----------------------------------------------------------------------------------------------

    def group(self, pg: Group) -> Group:
        """Wrap the process group for the Manager. Places: CONFIGURE, REDUCTION, and WORD if it can exchange one."""
        self._wrapped.add("group")
        return StruckGroup(pg, self)

    def coordinator(self, of: ResolvedConfig | Coordinator) -> Coordinator:
        """Wrap the coordinator for the Manager: `Manager(..., coordinator=injector.coordinator)`. Places: QUORUM and
        VOTE.

        Quorums of the wrapper may stand if the quorums of the wrapped coordinator may stand.

        Args:
            of: a coordinator, or the config of a GroupCoordinator.
        """
        self._wrapped.add("coordinator")
        return struck_coordinator(GroupCoordinator(of) if isinstance(of, ResolvedConfig) else of, self)

    def transport(self, transport: CheckpointTransport[Any]) -> CheckpointTransport[Any]:
        """Wrap the transport for the Manager. Places: SERVING and HEALING."""
        self._wrapped.add("transport")
        return StruckTransport(transport, self)

    def module(self, module: Module) -> Module:
        """Add hooks to a module, before it is wrapped for data parallelism. Places: FORWARD and BACKWARD.

        Returns: the module itself.
        """
        self._wrapped.add("module")
        module.register_forward_pre_hook(lambda _module, _inputs: self._in_user_code(Place.FORWARD))
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _: self._in_user_code(Place.BACKWARD))
        return module

    def optimizer(self, optimizer: TorchOptimizer) -> TorchOptimizer:
        """Add hooks to an optimizer, before it is wrapped for the Manager. Place: OPTIMIZER.

        Returns: the optimizer itself.
        """
        self._wrapped.add("optimizer")
        optimizer.register_step_pre_hook(lambda _optimizer, _args, _kwargs: self._in_user_code(Place.OPTIMIZER))
        return optimizer

    # --- striking ------------------------------------------------------------------------------------------------

    def reached(self, place: Place) -> Fault | None:
        """Perform the fault that is due at a place. A wrapper calls this when its rank comes to the place.

        Returns: a fault of action FAIL, which the caller performs in its own way. Otherwise None.
        Raises: InjectedError. UsageError: no Manager is attached, so rank and step are unknown.
        """
        fault = self._due(place)
        if fault is None:
            return None
        self._on_strike(fault)
        match fault.action:
            case Action.FAIL:
                return fault
            case Action.RAISE:
                raise InjectedError(fault)
            case Action.HANG:
                self._hang(fault.hang_for.total_seconds())
            case Action.STOP:
                for pid in _children() if fault.with_children else []:
                    os.kill(pid, signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
            case Action.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
        return None

    def _due(self, place: Place) -> Fault | None:
        with self._lock:
            # Before there is a Manager the user's module may run as it likes; the parts of a Manager have steps only.
            if not self._pending and place in IN_USER_CODE:
                return None
            manager = self._manager_attached()
            me, step = manager.strategy.config, manager.current_step()
            name = me.replica_id or ""
            due = next((f for f in self._pending if f.strikes(place, replica=name, rank=me.rank, step=step)), None)
            if due is not None:
                self._pending.remove(due)
                self._struck.append(due)
            return due

    def is_awaited(self, place: Place) -> bool:
        """Whether a fault may strike this rank at that place, in this step or in a later one."""
        with self._lock:
            manager = self._manager
            if manager is None:
                return False
            me, step = manager.strategy.config, manager.current_step()
            name = me.replica_id or ""
            return any(
                fault.strikes(place, replica=name, rank=me.rank, step=max(step, fault.step or 0))
                for fault in self._pending
            )

    def check_attached(self) -> None:
        """Check that a Manager is attached.

        Raises: UsageError: no Manager is attached.
        """
        self._manager_attached()

    def _manager_attached(self) -> Attached:
        if self._manager is None:
            raise UsageError("the injector knows no Manager; call injector.attach(manager) before the first step")
        return self._manager

    def _in_user_code(self, place: Place) -> None:
        fault = self.reached(place)
        if fault is None:
            return
        # The step is committed when the optimizer runs, so there only the state can be said to be wrong.
        manager = self._manager_attached()
        report = manager.strategy.report_torn if place is Place.OPTIMIZER else manager.report_error
        report(InjectedError(fault))

    def _hang(self, seconds: float) -> None:
        # A process that ends joins the threads of executors before it does anything that the public atexit offers.
        try:
            threading._register_atexit(self.release)  # type: ignore[attr-defined]
        except RuntimeError:  # it ends already
            return
        self._released.wait(seconds)


def _children() -> list[int]:
    """Return the living processes that this process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything; after it come the state and the parent.
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found
