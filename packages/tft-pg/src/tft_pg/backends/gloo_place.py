"""Where Gloo listens for its peers.

Law of this file: from a setting to Gloo's listeners. Which setting counts is decided in `gloo`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch.distributed as dist

from tft_pg.errors import ConfigError, ConfigureError

__all__ = ["INTERFACES_ENV", "ListeningPlace", "interface_names"]

INTERFACES_ENV: Final = "GLOO_SOCKET_IFNAME"
_Gloo: Any = dist.ProcessGroupGloo


def interface_names(interfaces: str, setting: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in interfaces.split(",") if name.strip())
    if not names:
        raise ConfigError(f"{setting} is {interfaces!r} and names no network interface; name one, for example 'eth0'")
    return names


@dataclass(frozen=True)
class ListeningPlace:
    """A place to listen: on interfaces, at an address of this machine, or at torch's choice.

    Args:
        interfaces, hostname: the place; without either it is torch's choice.
        advice: what to do if nothing can listen there.
    """

    interfaces: tuple[str, ...] = ()
    hostname: str = ""
    advice: str = field(default=f"set {INTERFACES_ENV} to a network interface, or pass a hostname", compare=False)

    def make_devices(self) -> tuple[object, ...]:
        """Make the listeners, one for each interface. Raises: ConfigureError: nothing can listen there."""
        try:
            if self.interfaces:
                return tuple(_Gloo.create_device(interface=name, lazy_init=False) for name in self.interfaces)
            if self.hostname:
                return (_Gloo.create_device(hostname=self.hostname, lazy_init=False),)
            return (_Gloo.create_default_device(lazy_init=False),)
        except RuntimeError as error:
            place = ", ".join(self.interfaces) or self.hostname or "the address of this machine's own name"
            raise ConfigureError(
                f"Gloo can't listen on {place} ({str(error).splitlines()[0]}); {self.advice}",
                is_own=True,
            ) from error
