"""A parameter server: a process that serves each client over a process group of their own, without a lighthouse.

Law of this folder: sessions between one server and many clients. It knows no quorum, no step and no Manager.
"""

from __future__ import annotations

from tft_algos.parameter_server.interface import ParameterServer

__all__ = ["ParameterServer"]
