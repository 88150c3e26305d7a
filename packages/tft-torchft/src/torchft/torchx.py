"""A torchx component for a job of several replica groups.

Law of this file: one component. torchx is imported when it is called, because the module has its name.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from torchft._errors import ArgumentError

if TYPE_CHECKING:
    from torchx import specs

__all__ = ["hsdp"]

_FIRST_MASTER_PORT = 29600
_OF_THE_CHILDREN = {
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "LOGLEVEL": "INFO",
    "RUST_BACKTRACE": "1",
    "CLICOLOR_FORCE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "XPU_VISIBLE_DEVICES": "",
}


def hsdp(
    *script_args: str,
    replicas: int = 2,
    workers_per_replica: int = 1,
    max_restarts: int = 10,
    script: str = "train_ddp.py",
    env: dict[str, str] | None = None,
    image: str = "",
    h: str | None = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,
) -> specs.AppDef:  # torchx looks for this annotation
    """Return the description of a job: one role of torchrun for each replica group.

    Args:
        script_args: arguments of the script.
        replicas: number of replica groups.
        workers_per_replica: processes in each.
        max_restarts: of each group.
        script: the training script.
        env: additional variables. TORCHFT_LIGHTHOUSE defaults to http://localhost:29510.
        image: of the containers.
        h: a named resource of torchx, in place of cpu, gpu and memMB.
        cpu, gpu, memMB: of each group.
    Raises: AssertionError: there is no replica or no worker. ImportError: torchx is not installed.
    """
    if replicas <= 0 or workers_per_replica <= 0:
        raise ArgumentError(f"replicas is {replicas} and workers_per_replica {workers_per_replica}; give at least 1")
    try:
        made = import_module("torchx.specs")
    except ImportError as error:
        raise ImportError("torchx is not installed; install tft-torchft[torchx]") from error
    variables = dict(env or {})
    for name, value in _OF_THE_CHILDREN.items():
        variables.setdefault(name, value)
    variables.setdefault("TORCHFT_LIGHTHOUSE", os.environ.get("TORCHFT_LIGHTHOUSE", "http://localhost:29510"))
    return made.AppDef(
        name="torchft",
        roles=[
            made.Role(
                name=f"replica_{index}",
                image=image,
                min_replicas=workers_per_replica,
                num_replicas=1,
                entrypoint="torchrun",
                args=[
                    f"--master_port={_FIRST_MASTER_PORT + index}",
                    "--nnodes=1",
                    f"--nproc_per_node={workers_per_replica}",
                    f"--max_restarts={max_restarts}",
                    script,
                    *script_args,
                ],
                env={**variables, "REPLICA_GROUP_ID": str(index), "NUM_REPLICA_GROUPS": str(replicas)},
                resource=made.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
            )
            for index in range(replicas)
        ],
    )
