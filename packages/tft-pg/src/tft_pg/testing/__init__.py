"""What tests of process groups need, of this package's and of yours: the conformance suite and its bench."""

from tft_pg.testing.bench import Bench, Outcome
from tft_pg.testing.conformance import CHECKS, Subject, check_process_group

__all__ = ["CHECKS", "Bench", "Outcome", "Subject", "check_process_group"]
