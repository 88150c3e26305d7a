"""Run a script, and end the process when anything in it is unpickled by name.

    python unpickles.py script.py words...

A pickle that names a class or a function runs code of its author. If tft or one of its libraries loads one, the stack
is printed and the process exits with `FOUND`.

Law of this file: the hook and the script. It imports nothing of the project.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback

FOUND = 86


def watch() -> None:
    """Watch from now on. An audit hook can't be removed, so this belongs in a separate process."""

    def audited(event: str, arguments: tuple[object, ...]) -> None:
        if event == "pickle.find_class":
            sys.stderr.write(f"unpickles {arguments}\n{''.join(traceback.format_stack())}")
            sys.stderr.flush()
            os._exit(FOUND)

    sys.addaudithook(audited)


if __name__ == "__main__":
    watch()
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
