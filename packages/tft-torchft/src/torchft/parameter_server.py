"""The parameter server, under torchft's name. Law of this file: names. The server is tft_algos's."""

from __future__ import annotations

import tft_algos
from tft_pg import ProcessGroup
from torchft.process_group import ProcessGroupGloo

__all__ = ["ParameterServer"]


class ParameterServer(tft_algos.ParameterServer):
    """A server that many clients use at the same time, each over a process group of two.

    A subclass has `new_process_group`, a classmethod, and `forward(session_id, pg)`.

    Args:
        port: where clients ask for a session. 0: a free port.
        store_port: of the store at which the two sides of a session meet. 0: a free port.
    Raises: ValueError: a port is wrong or taken.
    """

    def __init__(self, port: int, store_port: int = 0) -> None:
        super().__init__(port, store_port)

    def _new_isolated_group(self) -> ProcessGroup:
        group = super()._new_isolated_group()
        if isinstance(group, ProcessGroupGloo):
            group.isolate()  # Gloo ends its process if a client's message is longer than the tensor that receives it
        return group
