"""The commands `tft launch` and `tft chaos`: from the words of a command line to their settings.

Law of this file: parsing. Each command is implemented elsewhere and imported only if it is called.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

COMMAND_SETTINGS = {"allow_interspersed_args": False}  # the words after the script are the script's


def launch(
    command: Annotated[list[str], typer.Argument(help="A script that ends in .py, or a command; then its arguments.")],
    replicas: Annotated[int, typer.Option(help="Replica groups on this host.")] = 2,
    nproc: Annotated[int, typer.Option(help="Processes of each replica group.")] = 1,
    module: Annotated[bool, typer.Option("--module", "-m", help="COMMAND is a module, as after python -m.")] = False,
    first: Annotated[int, typer.Option(help="Number of the first replica group of this host, in its job.")] = 0,
    total: Annotated[
        int | None, typer.Option(help="Replica groups of the whole job. Default: those up to this host's last.")
    ] = None,
    lighthouse: Annotated[
        str,
        typer.Option(help="Address of a running lighthouse. Default: the environment's, else a new one is started."),
    ] = "",
    bind: Annotated[
        str, typer.Option(help="HOST:PORT of the new lighthouse. Default: a free port of this machine alone.")
    ] = "",
    min_replicas: Annotated[int | None, typer.Option(help="Smallest quorum of the new lighthouse. Default: 1.")] = None,
    logs: Annotated[Path, typer.Option(help="Folder in which each launch makes its own folder of logs.")] = Path(
        "tft-logs"
    ),
    max_restarts: Annotated[int, typer.Option(help="Restarts of a group in a row, before it is given up.")] = 10,
    backoff: Annotated[
        float, typer.Option(help="Seconds before a restart. Each further one in a row doubles them.")
    ] = 1,
    backoff_most: Annotated[float, typer.Option(help="The most seconds before a restart.")] = 60,
    good_after: Annotated[float, typer.Option(help="Seconds after which a group's failures count from 0 again.")] = 300,
    grace: Annotated[float, typer.Option(help="Seconds that processes get to end before they are killed.")] = 30,
) -> int:
    """Start the replica groups of a job on this host, and restart those that fail.

    Without a lighthouse, it starts one. Ctrl-C or SIGTERM drains all groups, and a second one kills them. A rank that
    exits with 0 is done, and one that exits with 3 is never restarted. Exits with 0 when all groups are done.
    """
    from tft_suite.launch.run import run_launch
    from tft_suite.launch.settings import LaunchSettings, RestartPolicy

    policy = RestartPolicy(
        max_restarts=max_restarts,
        backoff_s=backoff,
        backoff_most_s=backoff_most,
        good_after_s=good_after,
        grace_s=grace,
    )
    settings = LaunchSettings(
        command=tuple(command),
        is_module=module,
        replicas=replicas,
        nproc=nproc,
        first=first,
        total=total,
        min_replicas=min_replicas,
        bind=bind,
        lighthouse=lighthouse,
        logs=logs,
        restarts=policy,
    )
    return run_launch(settings, os.environ)


def chaos(
    lighthouse: Annotated[
        str | None, typer.Option(help="Address, or several separated by commas. Default: the environment's.")
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(help="Address of the lighthouse's HTTP port. Default: the port after the lighthouse's."),
    ] = None,
    job: Annotated[str | None, typer.Option(help='The job. Default: the environment\'s, else "default".')] = None,
    kinds: Annotated[
        str, typer.Option(help="Faults to draw from: kill, stop, slow and cut, separated by commas.")
    ] = "kill,stop,slow",
    rate: Annotated[float, typer.Option(help="Faults in a minute, on average.")] = 6,
    duration: Annotated[float, typer.Option(help="Seconds with faults.")] = 60,
    baseline: Annotated[float, typer.Option(help="Seconds before the first fault, to measure the rate of steps.")] = 10,
    lasts: Annotated[float, typer.Option(help="Seconds that a stop, a slowness or a cut lasts.")] = 5,
    slowness: Annotated[float, typer.Option(help="Part of the time that a slow process stands still.")] = 0.5,
    spare: Annotated[int, typer.Option(help="Replicas on this host that train undisturbed at any time.")] = 1,
    seed: Annotated[int, typer.Option(help="Random seed of the faults.")] = 0,
) -> int:
    """Kill, stop, slow or cut off replicas of a running job at random, and print the goodput.

    It breaks only processes on this host, and only rank 0 of each replica. Use it on a job that may be disturbed.
    """
    from tft_suite.drain import DEFAULT_JOB, JOB
    from tft_suite.launch.chaos import Chaos
    from tft_suite.launch.faults import ChaosSettings, kinds_of
    from tft_suite.operate.client import http_addresses

    settings = ChaosSettings(
        kinds=kinds_of(kinds),
        rate=rate,
        duration_s=duration,
        baseline_s=baseline,
        lasts_s=lasts,
        slowness=slowness,
        spare=spare,
        seed=seed,
    )
    addresses = http_addresses(os.environ, lighthouse=lighthouse, http=http)
    job = job or os.environ.get(JOB) or DEFAULT_JOB
    return Chaos(settings, addresses, os.environ, job, typer.echo).run()
