"""A fast exit for the forkserver of the demo.

A forkserver ends after the last process that uses it. The interpreter then needs more than a second to release
everything that was imported for the replicas. The release is useless, but a process that outlives the command is
visible.

Law of this file: one statement that acts on import, only in a forkserver, because a forkserver only imports modules.
"""

from __future__ import annotations

import atexit
import os
import sys

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    atexit.register(os._exit, 0)
