"""The tests of the whole tree: they have the option --part, and the collector does not look at the collected tests."""

from __future__ import annotations

import gc
import os

# The port after a free one may be another test's. A test of the HTTP port asks for it.
os.environ.setdefault("TFT_LIGHTHOUSE_HTTP_BIND", "0")

# The secrets and keys that tests write are for their owner alone, as the docs say; others are warned of.
os.umask(0o077)

pytest_plugins = ["scripts.pytest_parts"]


def pytest_collection_finish() -> None:
    """Exempt all that the collection has made. There are millions of objects, and each full collection looks at all."""
    gc.collect()
    gc.freeze()
