"""Batches that try again at once, for tests that would wait for their pauses."""

from __future__ import annotations

import pytest

from llmserve.client.batches import engine, jobs


def shorten_pauses(
    patch: pytest.MonkeyPatch,
    *,
    first: float | None = None,
    longest: float | None = None,
    period: float | None = None,
) -> None:
    """Set the seconds of the first and the longest pause, and between two looks at the server."""
    if first is not None:
        patch.setattr(jobs, "FIRST_PAUSE", first)
    if longest is not None:
        patch.setattr(jobs, "LONGEST_PAUSE", longest)
    if period is not None:
        patch.setattr(engine, "_PERIOD", period)
