"""What shall go wrong, where, and for whom: a fault is a sentence that a test writes down beforehand.

Law of this file: values, their checks and their words; nothing strikes here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import timedelta

from tft_algos.errors import SettingError, TrainingError


class Action(enum.Enum):
    """What happens to the rank.

    FAIL: the place fails as its own machinery reports a failure; in the user's own code it is reported to the Manager.
    RAISE: an exception that nobody expects, an `InjectedError`, comes out of the place.
    HANG: the thread that came there sleeps while its process lives; what it came for happens afterwards.
    STOP: SIGSTOP to this process. KILL: SIGKILL to this process.
    """

    FAIL = "fail"
    RAISE = "raise"
    HANG = "hang"
    STOP = "stop"
    KILL = "kill"


class Place(enum.Enum):
    """Where in a step, each before it is done: the fault comes instead of it, or first.

    QUORUM: the request; a replica that waits for such a fault asks in every step. CONFIGURE: of the process group.
    FORWARD: of the module. BACKWARD: of the module, when its first gradient is there. REDUCTION: an allreduce across
    the groups. WORD: how the step went, told to the same rank of the other groups. VOTE: on the commit. OPTIMIZER: its
    step, after the commit. SERVING: offering live state. HEALING: fetching it.
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
    """The exception that nobody expects.

    Args:
        fault: that it comes from.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.describe())
        self.fault = fault


class NotStruck(TrainingError, AssertionError):
    """Faults that a test asked for have not happened, so what it saw proves nothing: look where they were meant for.

    Args:
        faults: those, in the order in which they were asked for.
    """

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        sentences = ", and ".join(fault.describe().rpartition(";")[0] for fault in faults)
        super().__init__(f"not struck: {sentences}; look whether that replica and rank came to that place and step")
        self.faults = faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong, once in the life of a process.

    Args:
        action: what happens.
        place: where.
        replica: name of the replica group, as the Manager was given it.
        rank: group rank.
        step: committed steps when it strikes; a group that heals past it is not struck. None: the first time that the
            rank comes to the place, whatever the step.
        hang_for: HANG: how long.
        with_children: STOP: the processes that this one has started too; on rank 0 the manager server is one.
    Raises: SettingError: a value can't be; one sentence names it.
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
            raise SettingError(f"action is {self.action!r}; give an Action, one of {_names(Action)}")
        if not isinstance(self.place, Place):
            raise SettingError(f"place is {self.place!r}; give a Place, one of {_names(Place)}")
        if not isinstance(self.replica, str) or not self.replica:
            raise SettingError(f"replica is {self.replica!r}; give the name that the Manager was given as replica_id")
        for name in ("rank", "step"):
            value = getattr(self, name)
            if value is None and name == "step":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise SettingError(f"{name} is {value!r}; give a whole number, at least 0")
        if not isinstance(self.hang_for, timedelta) or self.hang_for <= timedelta():
            raise SettingError(f"hang_for is {self.hang_for!r}; give a timedelta above zero")
        if not isinstance(self.with_children, bool):
            raise SettingError(f"with_children is {self.with_children!r}; give True or False")
        if self.with_children and self.action is not Action.STOP:
            raise SettingError(f"with_children belongs to STOP and action is {self.action.name}; leave one of them out")

    def strikes(self, place: Place, *, replica: str, rank: int, step: int) -> bool:
        """Whether it is meant for this rank, here, now."""
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
