"""Streams and events of the current accelerator. Law of this file: each function works on any torch device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["get_stream_context", "record_event", "synchronize"]


def get_stream_context(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Return a context in which that stream is the current one; of None, one that changes nothing."""
    return nullcontext() if stream is None else stream


def record_event() -> torch.Event | None:
    """Return an event at the end of the current stream's present work; None without an accelerator."""
    if not torch.accelerator.is_available():
        return None
    event = torch.Event(torch.accelerator.current_accelerator(), interprocess=True)
    event.record(torch.accelerator.current_stream())
    return event


def synchronize() -> None:
    """Wait for the present work of the current stream. Without an accelerator, there is none."""
    if torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()
