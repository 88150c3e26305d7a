"""The decisions: pure state machines over events and the time.

Law of this folder: standard library only; no clock, socket, thread, process or randomness. Time comes in as an argument
(`now_ms`, milliseconds of a monotonic clock), and decisions go out as values.
"""
