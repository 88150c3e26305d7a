"""A fault: what goes wrong, where, and in which replica. A test writes it down beforehand.

Law of this file: values, their checks and their descriptions. No fault happens here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import timedelta

from tft_algos.errors import ConfigError, TrainingError


class Action(enum.Enum):
    """What happens to the rank.

    FAIL: the place fails as its own code reports a failure. In the user's own code, the failure is reported to the
    Manager.
    RAISE: the place raises an unexpected exception, an `InjectedError`.
    HANG: the thread sleeps at the place while its process lives, and then continues.
    STOP: SIGSTOP to this process. KILL: SIGKILL to this process.
    """

    FAIL = "fail"
    RAISE = "raise"
    HANG = "hang"
    STOP = "stop"
    KILL = "kill"


class Place(enum.Enum):
    """The place in a step. The fault happens before the work of the place, or instead of it.

    QUORUM: the request. A replica that waits for such a fault makes a request in every step. CONFIGURE: of the process
    group. FORWARD: of the module. BACKWARD: of the module, when its first gradient is ready. REDUCTION: an allreduce
    across the groups. WORD: the result of the step, sent to the same rank of the other groups. VOTE: at the verdict on
    the commit, also in a group of one rank, which sends no vote. OPTIMIZER: its step, after the commit. SERVING:
    offering live state. HEALING: fetching it.
    """

    QUORUM = "quorum"
    CONFIGURE = "configure"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCTION = "reduction"
    WORD = "word"
    VOTE = "vote"
    OPTIMIZER = "optimizer"
    SERVING = "serving"
    HEALING = "healing"


class InjectedError(RuntimeError):
    """The unexpected exception.

    Args:
        fault: its cause.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.describe())
        self.fault = fault


class FaultNotInjectedError(TrainingError, AssertionError):
    """Requested faults have not happened, so the test proves nothing. Check the place and the step of each fault.

    Args:
        faults: the missing faults, in the order of the requests.
    """

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        sentences = ", and ".join(fault.describe().rpartition(";")[0] for fault in faults)
        super().__init__(
            f"faults that did not strike: {sentences}; check whether that replica and rank reached that place and step"
        )
        self.faults = faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, which happens once in the life of a process.

    Args:
        action: what happens.
        place: where it happens.
        replica: name of the replica group, as given to the Manager.
        rank: group rank.
        step: committed steps at the fault. A group that heals past this step gets no fault. None: the first time that
            the rank comes to the place, at any step.
        hang_for: for HANG, the duration.
        with_children: for STOP, also stop the processes that this one has started. On rank 0 the manager server is one
            of them.
    Raises: ConfigError: a value is invalid. One sentence names it.
    """

    action: Action
    place: Place
    replica: str
    rank: int = 0
    step: int | None = None
    hang_for: timedelta = timedelta(hours=1)
    with_children: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.action, Action):
            raise ConfigError(f"action is {self.action!r}; give an Action, one of {_names(Action)}")
        if not isinstance(self.place, Place):
            raise ConfigError(f"place is {self.place!r}; give a Place, one of {_names(Place)}")
        if not isinstance(self.replica, str) or not self.replica:
            raise ConfigError(f"replica is {self.replica!r}; give the name that the Manager was given as replica_id")
        for name in ("rank", "step"):
            value = getattr(self, name)
            if value is None and name == "step":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name} is {value!r}; give a whole number, at least 0")
        if not isinstance(self.hang_for, timedelta) or self.hang_for <= timedelta():
            raise ConfigError(f"hang_for is {self.hang_for!r}; give a timedelta above zero")
        if not isinstance(self.with_children, bool):
            raise ConfigError(f"with_children is {self.with_children!r}; give True or False")
        if self.with_children and self.action is not Action.STOP:
            raise ConfigError(f"with_children belongs to STOP and action is {self.action.name}; leave one of them out")

    def strikes(self, place: Place, *, replica: str, rank: int, step: int) -> bool:
        """Return whether the fault is due for this rank, here and now."""
        here = self.place is place and self.replica == replica and self.rank == rank
        return here and self.step in (None, step)

    def describe(self) -> str:
        """Describe the fault in a sentence, for errors and logs."""
        when = "the first time" if self.step is None else f"step {self.step}"
        return (
            f"injected: {self.action.value} at {self.place.value}, replica {self.replica}, rank {self.rank}, {when}; "
            "a test asked for it"
        )


def _names(kind: type[enum.Enum]) -> str:
    return ", ".join(member.name for member in kind)
