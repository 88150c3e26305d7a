"""Flight records: the last collectives of each group, written as files that `tft trace` compares.

Torch records every collective in a ring of its own, whether or not anybody reads the ring. This package reads the ring
on request, and at the end of each configuration if a directory is set. The step path does nothing for it.
"""

from tft_pg.recorder.group import GroupRecorder, dump_traces, flush_traces, name_job

__all__ = ["GroupRecorder", "dump_traces", "flush_traces", "name_job"]
