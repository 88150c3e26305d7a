"""What tests of process groups need, of this package's and of yours: the conformance suite and its bench."""

from tft_pg.testing.bench import Bench, Outcome
from tft_pg.testing.conformance import CHECKS, Subject, check_process_group
from tft_pg.testing.fake_backend import FakeAccelerator, WaitsOnHost

__all__ = ["CHECKS", "Bench", "FakeAccelerator", "Outcome", "Subject", "WaitsOnHost", "check_process_group"]
