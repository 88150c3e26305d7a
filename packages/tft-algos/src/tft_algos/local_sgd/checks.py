"""The checks of a strategy's arguments before it begins. Each error is one sentence.

Law of this file: checking what the user gave. Nothing is changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence

import torch

from tft_algos.errors import ConfigError
from tft_algos.local_sgd.fragment import Fragment
from tft_algos.manager import Manager
from tft_algos.optim import Optimizer


def trained_by(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_manager(manager: object) -> None:
    """Check that `manager` is a Manager.

    Raises: ConfigError: `manager` is something else.
    """
    if not callable(getattr(manager, "should_commit", None)):  # the user may have a Manager class of their own
        raise ConfigError(f"manager is a {type(manager).__name__}; give a Manager")


def check_flags(**flags: object) -> None:
    """Check that each flag is True or False. A text would always count as true.

    Raises: ConfigError: a flag is something else.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}; give True or False")


def check_alpha(alpha: object) -> float:
    """Return the share of the live parameters that stays at the end of a sync, checked.

    Raises: ConfigError: it is no number from 0 to 1.
    """
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
        raise ConfigError(f"fragment_update_alpha is {alpha!r}; give a number from 0 to 1")
    return float(alpha)


def check_device(backup_device: torch.device | str | int | None) -> torch.device | None:
    """Return the backup device, checked; None if none is given.

    Raises: ConfigError: the device does not exist, or can't store tensors.
    """
    if backup_device is None:
        return None
    try:
        device = torch.device(backup_device)
        torch.empty(0, device=device)  # the name of a device does not say whether the device exists
    except Exception as error:  # torch has a different exception for each reason
        raise ConfigError(f"backup_device is {backup_device!r}; give a device of this process, as 'cpu'") from error
    if device.type == "meta":
        raise ConfigError("backup_device is meta, which stores no data; give 'cpu', or leave it out")
    return device


def check_inner_optimizer(
    optimizer: torch.optim.Optimizer, manager: Manager, fragments: Sequence[Mapping[str, torch.nn.Parameter]]
) -> None:
    """Check the inner optimizer against the Manager and the synchronized parameters.

    Raises: ConfigError: its steps would be steps of the same Manager, or it trains a parameter that is not
        synchronized.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"the inner optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer")
    if isinstance(optimizer, Optimizer) and optimizer.manager is manager:
        raise ConfigError(
            "the inner optimizer is an Optimizer on the same Manager, so each inner step would need a vote; give the "
            "optimizer that it wraps, or wrap it with another Manager"
        )
    known = {parameter for fragment in fragments for parameter in fragment.values()}
    if strangers := _num_strangers(optimizer, known):
        raise ConfigError(
            f"the inner optimizer trains {strangers} parameters that are in none of the synchronized modules, so "
            "replicas would drift apart in them; give all modules that it trains"
        )


def _num_strangers(optimizer: torch.optim.Optimizer, known: set[torch.nn.Parameter]) -> int:
    return sum(one not in known for one in trained_by(optimizer))


def check_still_synchronized(
    optimizer: torch.optim.Optimizer, modules: Sequence[torch.nn.Module], fragments: Sequence[Fragment]
) -> None:
    """Check, at the start of a sync, that parameters and optimizer are unchanged since the fragments were made.

    Raises: ConfigError: since then, a parameter was given to the inner optimizer, unfrozen, or converted.
    """
    for fragment in fragments:
        fragment.check_parameters()
    synchronized = {parameter for fragment in fragments for parameter in fragment.parameters}
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter not in synchronized:
                raise ConfigError(
                    f"{name} is trained but not synchronized, because it was frozen or missing when this strategy was "
                    "made; unfreeze it before making the strategy, or continue with a new Manager and strategy"
                )
    known = {parameter for module in modules for parameter in module.parameters()}
    if strangers := _num_strangers(optimizer, known):
        raise ConfigError(
            f"the inner optimizer was given {strangers} parameters that are in none of the synchronized modules, so "
            "replicas would drift apart in them; continue with a new Manager and strategy for all of these modules"
        )


def check_outer_optimizers(
    given: object, fragments: Sequence[Mapping[str, torch.nn.Parameter]], inner: torch.optim.Optimizer
) -> list[torch.optim.Optimizer]:
    """Return the outer optimizers: one for all fragments, or one for each.

    Raises: ConfigError: the number of optimizers is neither 1 nor the number of fragments; one of them is the inner
        optimizer; or one lacks a parameter that it has to update.
    """
    if isinstance(given, torch.optim.Optimizer):
        optimizers = [given]
    elif isinstance(given, Iterable) and not isinstance(given, str):
        optimizers = list(given)
    else:
        raise ConfigError(
            f"outer_optimizer is {given!r}; give a torch optimizer for all fragments, or a list with one for each"
        )
    if len(optimizers) not in (1, len(fragments)):
        raise ConfigError(
            f"there are {len(optimizers)} outer optimizers and {len(fragments)} fragments; give one for all, or one "
            "for each"
        )
    for index, fragment in enumerate(fragments):
        optimizer = optimizers[index if len(optimizers) > 1 else 0]
        if isinstance(optimizer, Optimizer) or not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"an outer optimizer is a {type(optimizer).__module__}.{type(optimizer).__qualname__}; give a torch "
                "optimizer, whose steps this strategy commits"
            )
        if optimizer in (inner, inner.optim if isinstance(inner, Optimizer) else None):
            raise ConfigError(
                "an outer optimizer is also the inner optimizer; make another one, for example "
                "torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)"
            )
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"an outer optimizer is a {type(optimizer).__name__}, which computes the loss again in its step; give "
                "one that steps by gradients alone"
            )
        known = set(trained_by(optimizer))
        lacking = [name for name, one in fragment.items() if one.requires_grad and one not in known]
        if lacking:
            raise ConfigError(
                f"the outer optimizer of fragment {index} lacks {len(lacking)} of its parameters, such as "
                f"{lacking[0]}, which would never be updated; give it all parameters that the fragment trains"
            )
    return optimizers
