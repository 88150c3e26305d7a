"""The injector, which is called at every place of a rank's steps and performs the requested faults.

A Manager consists of parts, and torch's modules and optimizers have hooks. So a test wraps the parts, and the code
under test is the production code:

    injector = EventInjector(Fault(action=Action.KILL, place=Place.VOTE, replica="a", rank=1, step=7))
    transport = injector.transport(HTTPTransport(timedelta(seconds=60), num_chunks=0, advertise_addr="localhost"))
    manager = Manager(
        injector.group(ProcessGroupGloo()), load, take,
        replica_id="a", coordinator=injector.coordinator, checkpoint_transport=transport,
    )
    ddp = DistributedDataParallel(manager, injector.module(module))
    optimizer = Optimizer(manager, injector.optimizer(torch.optim.AdamW(module.parameters())))
    injector.attach(manager)

A fault that can't happen would let a useless test pass. So `attach` and `inject` refuse a fault whose part was not
wrapped, and `check_all_struck` at the end of a test finds other missing faults.

Law of this file: which fault happens, and how. The failures in each part's own form are in `wrappers`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, final

import torch

from tft_algos.errors import ConfigError, UsageError
from tft_algos.manager.config import ResolvedConfig
from tft_algos.manager.interfaces import Coordinator, ProcessGroupLike
from tft_algos.manager.quorum.coordinator import GroupCoordinator
from tft_algos.testing.injector.fault import Action, Fault, FaultNotInjectedError, InjectedError, Place
from tft_algos.testing.injector.wrappers import StruckGroup, StruckTransport, struck_coordinator
from tft_ckpt import CheckpointTransport

Module = TypeVar("Module", bound=torch.nn.Module)
TorchOptimizer = TypeVar("TorchOptimizer", bound=torch.optim.Optimizer)


# The wrapped part for each place: the name of the injector's method.
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
    """The interface of a Manager's `strategy` for the injector."""

    @property
    def config(self) -> ResolvedConfig: ...

    def report_torn(self, error: Exception) -> None: ...


class Attached(Protocol):
    """The interface of a Manager for the injector.

    The injector needs the Manager's identity and step, and reports failures in the user's own code to it.
    """

    @property
    def strategy(self) -> Steered: ...

    def current_step(self) -> int: ...

    def report_error(self, e: Exception) -> None: ...


@final
class EventInjector:
    """The injector of faults in this process.

    Args:
        faults: the faults to perform. Faults of other replicas and ranks are ignored, so that all processes may get the
            same list.
        on_strike: called with a fault just before it happens, on the affected thread.
    Raises: ConfigError: an argument is not a Fault.
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
        """Request one more fault, from any thread. Return this injector.

        Raises: ConfigError: `fault` is not a Fault. UsageError: as `attach`.
        """
        if not isinstance(fault, Fault):
            raise ConfigError(f"a fault is a {type(fault).__name__}; give a Fault")
        with self._lock:
            if self._manager is not None:
                self._check_can_strike(fault, self._manager)
            self._pending.append(fault)
        return self

    def fail_at(self, replica: str, step: int, *, rank: int = 0) -> EventInjector:
        """Make a replica's user code raise in its forward pass. Return this injector."""
        return self.inject(Fault(action=Action.RAISE, place=Place.FORWARD, replica=replica, rank=rank, step=step))

    def fail_allreduce_at(self, replica: str, step: int, *, rank: int = 0) -> EventInjector:
        """Make a replica's next reduction fail. Return this injector."""
        return self.inject(Fault(action=Action.FAIL, place=Place.REDUCTION, replica=replica, rank=rank, step=step))

    @property
    def struck(self) -> tuple[Fault, ...]:
        """Return the faults that have happened in this process, in order."""
        with self._lock:
            return tuple(self._struck)

    def check_all_struck(self, *elsewhere: Fault) -> None:
        """Check, at the end of a test, that every requested fault has happened, in all replicas.

        Args:
            elsewhere: faults that have happened in other processes, from `struck` or `on_strike` there.
        Raises: FaultNotInjectedError: some faults have not happened. The message describes them.
        """
        with self._lock:
            left = list(self._pending)
        for fault in elsewhere:
            if fault in left:
                left.remove(fault)
        if left:
            raise FaultNotInjectedError(tuple(left))

    def attach(self, manager: Attached) -> None:
        """Set the Manager of the steps. Call this after all parts are wrapped, and before the first step.

        Args:
            manager: a Manager.
        Raises: UsageError: a fault for its replica and rank names a place whose part was not wrapped. No Manager is
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
        """End current hangs and prevent later ones. The Manager's shutdown and the end of the process call this."""
        self._released.set()

    # --- the parts -----------------------------------------------------------------------------------------------

    def group(self, pg: ProcessGroupLike) -> ProcessGroupLike:
        """Wrap the process group for the Manager. Places: CONFIGURE, REDUCTION, and WORD if it can exchange one."""
        self._wrapped.add("group")
        return StruckGroup(pg, self)

    def coordinator(self, of: ResolvedConfig | Coordinator) -> Coordinator:
        """Wrap the coordinator for the Manager: `Manager(..., coordinator=injector.coordinator)`.

        Places: QUORUM and VOTE.

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

    # --- performing faults ---------------------------------------------------------------------------------------

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
            # Without a Manager, the user's module may run freely. The parts of a Manager only run in steps.
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
        """Return whether a fault may happen to this rank at that place, in this step or in a later one."""
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
        # The optimizer runs after the commit, so only the state can be reported as wrong.
        manager = self._manager_attached()
        report = manager.strategy.report_torn if place is Place.OPTIMIZER else manager.report_error
        report(InjectedError(fault))

    def _hang(self, seconds: float) -> None:
        # At its end, a process joins the threads of executors before it runs the public atexit functions.
        try:
            threading._register_atexit(self.release)  # type: ignore[attr-defined]
        except RuntimeError:  # the process is ending already
            return
        self._released.wait(seconds)


def _children() -> list[int]:
    """Return the living processes that this process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may contain anything. The state and the parent follow it.
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # the process has ended meanwhile
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found
