"""The `tft` command: from the words of a command line to an exit code.

Law of this file: parsing and exit codes. Each command is implemented elsewhere and imported only if it is called, so
that `tft --help` starts fast.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

import typer

from tft_suite import __version__
from tft_suite.cli import launching
from tft_suite.errors import ConfigError, MissingExtraError, SuiteError

DEMO_NEEDS = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "rich": "rich"}

# The replicas of the demo are separate, whatever job this shell belongs to.
OF_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TFT_TOKEN", "TFT_TOKEN_FILE"),
    *("TFT_TLS_CERT", "TFT_TLS_KEY", "TFT_TLS_CA", "TFT_TLS_CLIENT_AUTH"),
)

WATCH_EVERY_S = 1.0
CLEAR = "\x1b[2J\x1b[H"  # the terminal, before the next picture

app = typer.Typer(
    help="Fault-tolerant PyTorch training.", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False
)


def print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"tft {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Fault-tolerant PyTorch training."""


@app.command()
def demo(
    replicas: Annotated[int, typer.Option(help="Replica groups, each one process.")] = 3,
    steps: Annotated[int, typer.Option(help="Committed steps at which all replicas stop.")] = 400,
    kills: Annotated[int, typer.Option(help="How many times a replica is killed with kill -9.")] = 2,
    seed: Annotated[int, typer.Option(help="Random seed of the kills, the initial weights and the samples.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for report.json, timeline.png and the logs.")] = Path("tft-demo"),
) -> int:
    """Train a small net with several replica groups, kill some, and watch them heal from a peer.

    Exits with 0 only if all replicas end at the same step with the same parameters and optimizer state. The net must
    also read at least 95 % of the test digits.
    """
    missing = tuple(name for module, name in DEMO_NEEDS.items() if importlib.util.find_spec(module) is None)
    if missing:
        raise MissingExtraError("tft demo", extra="demo", missing=missing)
    from rich.console import Console

    from tft_suite.demo.run import run_demo
    from tft_suite.demo.settings import DemoSettings

    settings = DemoSettings(replicas=replicas, steps=steps, kills=kills, seed=seed, out=out)
    # Torch reads this at its import in the replicas' processes. Replicas that share the cores compute with one thread
    # each.
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in OF_LAUNCHERS:
        os.environ.pop(name, None)
    return run_demo(settings, console=Console())


@app.command()
def doctor(
    lighthouse: Annotated[
        str | None, typer.Option(help="Address, or several separated by commas. Default: the environment's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that each lighthouse may take to answer.")] = 5.0,
) -> int:
    """Check what a job needs here: versions, addresses, interfaces, the lighthouse, the current timeouts.

    Each problem comes with its remedy. This changes nothing and joins no job. Exits with 0 if there is no problem, else
    1.
    """
    check_timeout(timeout)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # grpc's own messages would appear beside ours
    from tft_suite.doctor import report
    from tft_suite.doctor.findings import findings
    from tft_suite.doctor.survey import survey

    facts = survey(os.environ, lighthouse=lighthouse, timeout=timedelta(seconds=timeout))
    found = findings(facts)
    typer.echo((report.as_json if as_json else report.report)(facts, found))
    return int(any(finding.is_problem for finding in found))


@app.command()
def drain(
    replica: Annotated[str, typer.Argument(help="Its id, or its name if only one live replica has that name.")],
    lighthouse: Annotated[
        str | None, typer.Option(help="Address, or several separated by commas. Default: the environment's.")
    ] = None,
    job: Annotated[
        str | None, typer.Option(help='The job of the replica. Default: the environment\'s, else "default".')
    ] = None,
    reason: Annotated[str, typer.Option(help="The reason. The replica logs it with the caller.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a sentence.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that each lighthouse may take to answer.")] = 5.0,
) -> int:
    """Ask a replica to leave its job after its running step. The other replicas lose no step and do not wait."""
    check_timeout(timeout)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # grpc's own messages would appear beside ours
    from tft_suite import drain as draining

    within = timedelta(seconds=timeout)
    its_job = draining.drain(replica, os.environ, lighthouse=lighthouse, job=job, reason=reason, timeout=within)
    facts = {"job": its_job, "replica": replica, "asked_to": "leave"}
    sentence = f"asked {replica} of job {its_job} to leave after its running step"
    typer.echo(json.dumps(facts) if as_json else sentence)
    return 0


LighthouseOption = Annotated[
    str | None, typer.Option(help="Address, or several separated by commas. Default: the environment's.")
]
HttpOption = Annotated[
    str | None, typer.Option(help="Address of the lighthouse's HTTP port. Default: the port after the lighthouse's.")
]
TimeoutOption = Annotated[float, typer.Option(help="Seconds that each lighthouse may take to answer.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the lighthouse's JSON instead of text.")]


@app.command()
def kill(
    replica: Annotated[str, typer.Argument(help="Its id, the short form of it, or its name if only one has it.")],
    lighthouse: LighthouseOption = None,
    http: HttpOption = None,
    job: Annotated[
        str | None, typer.Option(help='The job of the replica. Default: the environment\'s, else "default".')
    ] = None,
    reason: Annotated[str, typer.Option(help="The reason. The replica logs it with the caller.")] = "",
    as_json: JsonOption = False,
    timeout: TimeoutOption = 10.0,
) -> int:
    """End the processes of a replica at once, as if they had crashed. `tft drain` lets a replica finish its step."""
    from tft_suite.drain import DEFAULT_JOB, JOB
    from tft_suite.operate.client import http_addresses
    from tft_suite.operate.kill import kill

    check_timeout(timeout)
    addresses = http_addresses(os.environ, lighthouse=lighthouse, http=http)
    its_job = job or os.environ.get(JOB) or DEFAULT_JOB
    found = kill(replica, addresses, os.environ, job=its_job, reason=reason, timeout_s=timeout)
    sentence = f"asked the processes of {found.get('replica_id')} of job {its_job} to end"
    typer.echo(json.dumps(found) if as_json else "".join(each if each.isprintable() else "?" for each in sentence))
    return 0


@app.command()
def status(
    lighthouse: LighthouseOption = None,
    http: HttpOption = None,
    job: Annotated[str | None, typer.Option(help="Show this job only.")] = None,
    watch: Annotated[bool, typer.Option(help="Show the status again each second, until Ctrl-C.")] = False,
    as_json: JsonOption = False,
    timeout: TimeoutOption = 5.0,
) -> int:
    """Show what a lighthouse's jobs do: their members, steps and phases, and what is waited for."""
    from tft_suite.operate.client import fetch, http_addresses
    from tft_suite.operate.text import of_job, status_text

    check_timeout(timeout)
    addresses = http_addresses(os.environ, lighthouse=lighthouse, http=http)
    while True:
        found = fetch(addresses, "/api/v1/status", os.environ, timeout_s=timeout)
        found = found if job is None else of_job(found, job)
        text = json.dumps(found) if as_json else status_text(found)
        clears = watch and not as_json and sys.stdout.isatty()
        typer.echo(f"{CLEAR}{text}" if clears else text)
        if not watch:
            return 0
        time.sleep(WATCH_EVERY_S)


@app.command()
def incidents(
    lighthouse: LighthouseOption = None,
    http: HttpOption = None,
    job: Annotated[str | None, typer.Option(help="Show the incidents of this job only.")] = None,
    limit: Annotated[int, typer.Option(help="Show the newest so many.")] = 50,
    as_json: JsonOption = False,
    timeout: TimeoutOption = 5.0,
) -> int:
    """Show what has happened to a lighthouse's jobs: losses, joins, leaves, failed rounds, and how long each took."""
    from tft_suite.operate.client import fetch, http_addresses
    from tft_suite.operate.text import incidents_text

    check_timeout(timeout)
    if not 1 <= limit <= 1_000:
        raise ConfigError(f"--limit is {limit}; give 1 to 1000, the number that a lighthouse keeps")
    query = urlencode({"limit": limit} | ({"job": job} if job is not None else {}))
    addresses = http_addresses(os.environ, lighthouse=lighthouse, http=http)
    found = fetch(addresses, f"/api/v1/incidents?{query}", os.environ, timeout_s=timeout)
    typer.echo(json.dumps(found) if as_json else incidents_text(found["incidents"]))
    return 0


def check_timeout(timeout: float) -> None:
    """Raise ConfigError if --timeout is out of its range."""
    if not 0.001 <= timeout <= 3600:
        raise ConfigError(f"--timeout is {timeout}; give seconds, 0.001 to 3600")


@app.command()
def trace(
    directories: Annotated[list[Path], typer.Argument(help="Directories with flight records of all machines.")],
    late: Annotated[
        float, typer.Option(help="Report waits of this many seconds, and ranks that enter a call this late.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of sentences.")] = False,
) -> int:
    """Find deadlocks, stragglers and mismatched collectives in the flight records of a job.

    The processes write the records to the directory that TFT_TRACE_DIR names. This changes nothing and joins no job.
    Exits with 0 if there is no problem and all files are readable, else 1.
    """
    if not 0.001 <= late <= 86400:
        raise ConfigError(f"--late is {late}; give seconds, 0.001 to 86400")
    from tft_suite.trace import report
    from tft_suite.trace.analysis import find_problems, group_traces
    from tft_suite.trace.files import SUFFIX, read_traces

    traces, broken = read_traces(directories)
    if not traces and not broken:
        names = ", ".join(map(str, directories))
        raise ConfigError(f"there is no flight record (*{SUFFIX}) in {names}; give the directory of TFT_TRACE_DIR")
    groups = group_traces(traces)
    found = find_problems(groups, late_s=late)
    typer.echo((report.as_json if as_json else report.as_text)(groups, found, broken))
    return int(bool(found or broken))


app.command(context_settings=launching.COMMAND_SETTINGS)(launching.launch)
app.command()(launching.chaos)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the `tft` console script and exit with its code. A wrong call exits with 2 and one sentence on stderr."""
    sys.exit(exit_code_of(sys.argv[1:] if arguments is None else list(arguments)))


def exit_code_of(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    command = typer.main.get_command(app)
    try:
        result = command.main(args=list(arguments), prog_name="tft", standalone_mode=False)
    except SuiteError as error:
        return print_error(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        # Only the parser's usage errors have a message for users, in all its versions. All other errors are bugs.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return print_error(text.rstrip(".") + "." if (text := str(message())) else "")
    return result if isinstance(result, int) else 0


def print_error(message: str) -> int:
    """Print one sentence on stderr. Return the exit code of a wrong call."""
    if message:  # empty if the help was printed instead
        typer.echo(f"tft: {message}", err=True)
    return 2
