"""Settings that every test of this package runs under, before torch is imported.

torch's TCPStore looks up the name of each address that it connects to or accepts. A resolver that does not answer
costs five seconds each time, which is nothing that these tests are about.
"""

from __future__ import annotations

import os

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
