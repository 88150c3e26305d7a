"""The tests of the whole tree: they have the option --part, and the collector does not look at the collected tests."""

from __future__ import annotations

import gc

pytest_plugins = ["scripts.pytest_parts"]


def pytest_collection_finish() -> None:
    """Exempt all that the collection has made. There are millions of objects, and each full collection looks at all."""
    gc.collect()
    gc.freeze()
