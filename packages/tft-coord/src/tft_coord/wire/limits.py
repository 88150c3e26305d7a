"""The maximum sizes of the parts of a message.

Law of this file: numbers for the codecs and the checks of settings; it imports no codec.
"""

from __future__ import annotations

from tft_coord.core.types import MAX_INT64

MAX_NAME_BYTES = 256  # replica ids and jobs
MAX_ADDRESS_BYTES = 512
ADDRESSES_MOST = 4  # of one peer in a trial
MAX_DATA_BYTES = 64 * 1024
MAX_METADATA_BYTES = 4096  # checkpoint metadata, and reconfigure handles
MAX_HANDLES_BYTES = 256 * 1024  # of one member, in total
MAX_SENTENCE_BYTES = 4096
MAX_MEMBERS = 100_000
# A parsed message takes up to ninety times the memory of its bytes, so bytes are bounded before they are parsed.
MAX_UNPACKED_BYTES = 16 * 1024 * 1024  # a longer quorum is sent uncompressed
MAX_UNASKED_BYTES = 4 * 1024 * 1024  # a request with the largest fingerprint, handles and reports
MAX_JOBS_DESCRIBED = 1_000
MAX_WARNINGS_DESCRIBED = 20
MAX_WORLD_SIZE = 1_000_000
MAX_COUNT = 2**31 - 1
MAX_HEALED_BYTES = MAX_INT64 // MAX_WORLD_SIZE  # of one rank, so that the sum over a group's ranks always fits
