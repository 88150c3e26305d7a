"""Makes the forkserver of the demo end at once.

Intuition: a forkserver ends when the last process that uses it is gone, and then the interpreter takes apart, for more
than a second, all that was imported for the replicas. Nothing of that matters to anybody, but a process that is still
there when the command has ended does.

Law of this file: one statement that acts on import, in a forkserver alone: a forkserver calls nothing, it only imports.
"""

from __future__ import annotations

import atexit
import os
import sys

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    atexit.register(os._exit, 0)
