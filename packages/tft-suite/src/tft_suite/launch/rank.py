"""One rank of a group: the user's script, and what its end means for the launcher.

A launcher sees only an exit code, and Python ends with 1 after every error. So the script runs inside this program,
which knows our errors: one that a restart can't mend ends with 3.

It runs as `python -m tft_suite.launch.rank train.py ARGUMENTS` or, for a module, `... rank -m package.train ARGUMENTS`.

Law of this file: run the script as Python would, and map its end to an exit code.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Final

from tft_suite.launch.exit_codes import DONE, NEVER, RESTART

# By name, because a script that does not import our packages need not wait for them either.
JOB_OVER: Final = "tft_coord.JobOverError"
CAN_NOT_BE_MENDED: Final = frozenset(
    {
        "tft_coord.ConfigError",
        "tft_pg.ConfigError",
        "tft_ckpt.ConfigError",
        "tft_algos.ConfigError",
        "tft_coord.UsageError",
        "tft_algos.UnsupportedFeatureError",
        "builtins.SyntaxError",
    }
)


def run(words: Sequence[str]) -> int:
    """Run the script or module, and return the exit code of this process."""
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            sys.path[0] = os.getcwd()
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        return code_of_exit(error)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return code_of_error(error)
    return DONE


def code_of_error(error: BaseException) -> int:
    """Return the exit code for an error that has ended the script."""
    names = {f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in type(error).__mro__}
    if JOB_OVER in names:
        # A rank that was in the job comes back too late, and the others have done its work. A rank that was never in
        # it would train nothing, and its operator has to know.
        return DONE if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else NEVER
    return RESTART if names.isdisjoint(CAN_NOT_BE_MENDED) else NEVER


def code_of_exit(error: SystemExit) -> int:
    """Return the exit code for a SystemExit.

    A script that handles one of our errors by ending with a code of its own means that error. A wrong argument, which
    `argparse` refuses, can't be mended by a restart.
    """
    if error.code is None or error.code == DONE:
        return DONE
    if not isinstance(error.code, int):
        print(error.code, file=sys.stderr)
    cause = error.__context__
    if is_usage_error(error.__traceback__) or (cause is not None and code_of_error(cause) == NEVER):
        return NEVER
    return error.code if isinstance(error.code, int) else RESTART


def is_usage_error(trace: TracebackType | None) -> bool:
    """Return whether `argparse` has refused the arguments."""
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_globals.get("__name__") == "argparse" and frame.f_code.co_name == "error":
            return True
        trace = trace.tb_next
    return False


def main() -> None:
    """Run the words of this process's command line."""
    code = run(sys.argv[1:])
    sys.exit(code)


if __name__ == "__main__":
    main()
