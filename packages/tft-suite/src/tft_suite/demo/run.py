"""A demo run from settings to exit code: lighthouse, supervisor, report, picture.

Law of this file: the order of these, the output folder, and the final output.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import secrets
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from tft_lighthouse import LighthouseServer
from tft_suite.demo.report import Fault, Report, make_report, problems_of
from tft_suite.demo.settings import DemoSettings
from tft_suite.demo.supervisor import Outcome, Supervisor, caught_signals, log_of
from tft_suite.demo.timeline import draw
from tft_suite.demo.view import view_for
from tft_suite.errors import ConfigError

# torch imports torch._dynamo with the first optimizer, which takes a second.
PRELOADED = ("__main__", "torch", "torch._dynamo", "tft_suite.demo.forkserver")
TRAIN = "tft_suite.demo.replica:train"


def run_demo(settings: DemoSettings, *, console: Console, body: str = TRAIN) -> int:
    """Run the demo and return the exit code: 0 good, 1 something is wrong, 128 + n ended by signal n.

    Args:
        console: shows the run and its result.
        body: the work of each replica, as `module:function`. See Supervisor.
    Raises: ConfigError: the output folder can't be made or written.
    """
    prepare(settings.out, replicas=settings.replicas)
    console.print(f"{title_of(settings)}; logs in {settings.out}", highlight=False, soft_wrap=True, markup=False)
    # With these imports in the forkserver, a replica starts, or restarts, in a fraction of a second.
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, body.partition(":")[0]])
    token = secrets.token_hex(16)
    with (
        caught_signals() as caught,
        logged(settings.out / "lighthouse.log", "tft_lighthouse"),
        LighthouseServer(bind="127.0.0.1:0", min_replicas=1, token=token) as lighthouse,
    ):
        outcome = Supervisor(
            settings,
            lighthouse_addr=lighthouse.address,
            token=token,
            view=view_for(console, steps=settings.steps),
            body=body,
            caught=caught,
        ).run()
    if outcome.signal_number is not None:
        name = signal.Signals(outcome.signal_number).name
        console.print(f"Ended by {name} after {outcome.wall_s:.1f} s; no process is left.", highlight=False)
        return 128 + outcome.signal_number
    return write_results(outcome, settings, console=console)


def title_of(settings: DemoSettings) -> str:
    """Return the run in one line."""
    replicas = f"{settings.replicas} replica{'' if settings.replicas == 1 else 's'}"
    kills = f"{settings.kills} kill{'' if settings.kills == 1 else 's'}"
    return f"{replicas} to step {settings.steps}, {kills}, seed {settings.seed}"


def prepare(out: Path, *, replicas: int) -> None:
    """Make the folder, and remove the files of an earlier run.

    Raises: ConfigError: the folder can't be made or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for old in (out / "report.json", out / "timeline.png", *out.glob("replica-*.log"), out / "lighthouse.log"):
            old.unlink(missing_ok=True)
        log_of(out, replicas - 1).touch()
    except OSError as error:
        raise ConfigError(f"--out {out} can't be written ({error.strerror}); give another folder.") from error


@contextmanager
def logged(path: Path, name: str) -> Iterator[None]:
    """Write records of logger `name`, from INFO up, to the file while the context is open."""
    logger = logging.getLogger(name)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level_before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level_before)
        logger.removeHandler(handler)
        handler.close()


def write_results(outcome: Outcome, settings: DemoSettings, *, console: Console) -> int:
    """Write report.json and timeline.png, print the result, and return the exit code."""
    report = make_report(outcome.events, replicas=settings.replicas, steps=settings.steps, wall_s=outcome.wall_s)
    wrong = problems_of(report, outcome.events, kills=settings.kills, error=outcome.error)
    report_path, picture_path = settings.out / "report.json", settings.out / "timeline.png"
    report_path.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    draw(
        outcome.events,
        replicas=settings.replicas,
        end_s=outcome.wall_s,
        title=title_of(settings),
        path=picture_path,
    )
    for line in (*summary(report), f"{report_path} and {picture_path} are written.", *verdict(report, wrong)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if outcome.error is not None:
        console.print(f"The logs of the replicas are in {settings.out}.", highlight=False, soft_wrap=True, markup=False)
    return 1 if wrong else 0


def summary(report: Report) -> Sequence[str]:
    """Return the report in lines."""
    lines = [sentence_of(fault) for fault in report.faults]
    lines += [f"digest {digest}" for digest in report.digests]
    if report.test_accuracy is not None:
        lines.append(f"test accuracy {report.test_accuracy:.3f}")
    lines.append(f"wall time {report.wall_s:.1f} s")
    return lines


def sentence_of(fault: Fault) -> str:
    stalled = "never committed again" if fault.stall_s is None else f"committed again after {fault.stall_s:.2f} s"
    back = "never was back" if fault.rejoin_s is None else f"was back after {fault.rejoin_s:.2f} s"
    return f"replica {fault.replica} was killed at step {fault.at_step}: the others {stalled}, and it {back}"


def verdict(report: Report, wrong: Sequence[str]) -> Sequence[str]:
    """Return the final lines: OK, or one FAILED line for each problem."""
    if wrong:
        return [f"FAILED: {sentence}" for sentence in wrong]
    all_of_them = "the replica" if report.replicas == 1 else f"all {report.replicas} replicas"
    return [f"OK: {all_of_them} ended at step {report.steps} with one digest of parameters and optimizer state."]
