"""Run a script, and end the process when anything in it is unpickled by name.

    python unpickles.py script.py words...

A pickle that names a class or a function is code of whoever wrote it. Where one is loaded, by us or by what we call,
the stack is printed and the process exits with `FOUND`.

Law of this file: the hook and the script; it imports nothing of ours.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback

FOUND = 86


def watch() -> None:
    """From now on. An audit hook can't be taken back, so this is for a process of its own."""

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
