"""Public test tools for process groups of this and other packages: the conformance suite and its bench."""

from tft_pg.testing.bench import Bench, Outcome
from tft_pg.testing.computing import Combination, combinations
from tft_pg.testing.conformance import CHECKS, check_process_group
from tft_pg.testing.fake_backend import FakeAccelerator, WaitsOnHost
from tft_pg.testing.fake_memory import FakeMemory
from tft_pg.testing.forking import WAYS, end_children, fork_child
from tft_pg.testing.reconfigurable import ReconfigurableGloo, reconfigurable_gloo
from tft_pg.testing.subject import GLOO_LACKS, NCCL_LACKS, Subject

__all__ = [
    "CHECKS",
    "GLOO_LACKS",
    "NCCL_LACKS",
    "WAYS",
    "Bench",
    "Combination",
    "FakeAccelerator",
    "FakeMemory",
    "Outcome",
    "ReconfigurableGloo",
    "Subject",
    "WaitsOnHost",
    "check_process_group",
    "combinations",
    "end_children",
    "fork_child",
    "reconfigurable_gloo",
]
