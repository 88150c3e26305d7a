"""A TorchX component: one role for each replica group, so that a scheduler restarts one group and leaves the others.

    torchx run --scheduler slurm tft_suite/integrations/torchx.py:hsdp --lighthouse http://head:29510 --script train.py

Law of this file: the description of a job. TorchX is imported when the component is called, so that its absence hurts
only those who use it. TorchX reads the types of the arguments from the annotations, so these are no strings.
"""

from typing import TYPE_CHECKING, Any

from tft_suite.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from torchx.specs import AppDef

REPLICAS_MOST = 1_000


def hsdp(
    *script_args: str,
    replicas: int = 2,
    workers_per_replica: int = 1,
    script: str = "",
    module: str = "",
    lighthouse: str = "",
    image: str = "",
    name: str = "tft",
    cpu: int = 2,
    gpu: int = 0,
    mem_mb: int = 4096,
    max_retries: int = 10,
) -> "AppDef":
    """Train with several replica groups: sharded inside a group, fault-tolerant across the groups.

    Args:
        script_args: arguments of the script, after --.
        replicas: replica groups, each on one host.
        workers_per_replica: processes of each group.
        script: a file that ends in .py, or a command.
        module: a module, in place of the script.
        lighthouse: address of the running lighthouse that all groups reach, for example http://head:29510
        image: container image or folder in which tft-suite is installed.
        name: of the app, and of the job at the lighthouse.
        cpu: cores of each group.
        gpu: devices of each group.
        mem_mb: memory of each group, in MiB.
        max_retries: restarts of a group by the scheduler.
    """
    try:
        from torchx import specs
    except ImportError as error:
        raise MissingExtraError("the component hsdp", extra="torchx", missing=("torchx",)) from error
    command = _command(script, module, script_args)
    if not 1 <= replicas <= REPLICAS_MOST or workers_per_replica < 1:
        raise ConfigError(
            f"replicas is {replicas} and workers_per_replica {workers_per_replica}; give 1 to {REPLICAS_MOST} replicas "
            "of 1 worker or more"
        )
    if not lighthouse:
        raise ConfigError("lighthouse is not given; start tft-lighthouse, and give its address")
    roles = [
        specs.Role(
            name=f"replica{replica}",
            image=image,
            entrypoint="tft",
            args=_launch(replica, replicas, workers_per_replica, lighthouse) + command,
            env={"TFT_JOB_ID": name, "TFT_LIGHTHOUSE": lighthouse},
            num_replicas=1,
            max_retries=max_retries,
            retry_policy=specs.RetryPolicy.REPLICA,
            resource=specs.Resource(cpu=cpu, gpu=gpu, memMB=mem_mb),
        )
        for replica in range(replicas)
    ]
    return specs.AppDef(name=name, roles=roles)


def _command(script: str, module: str, arguments: tuple[Any, ...]) -> list[str]:
    if bool(script) == bool(module):
        raise ConfigError("give either script or module: what each worker runs")
    return [*(["--module", "--", module] if module else ["--", script]), *arguments]


def _launch(replica: int, replicas: int, workers: int, lighthouse: str) -> list[str]:
    place = ["--replicas", "1", "--first", str(replica), "--total", str(replicas)]
    return ["launch", *place, "--nproc", str(workers), "--lighthouse", lighthouse]
