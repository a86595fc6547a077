"""Which requests are of the measured window, and how long it was."""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.measure.crew import Noted
from llmserve.measure.runs import Record


@dataclass(frozen=True)
class Window:
    """What counts; ``unfinished`` is how long each request was under way that was not done."""

    records: tuple[Record, ...]
    seconds: float
    unfinished: tuple[float, ...] = ()


def window_of(noted: Noted, duration: float | None) -> Window:
    """Cut what was noted to the window.

    A duration ends it to the moment; without one it ends with the last answer. Where the server
    was gone for good it ends with what was under way then: that somebody went on asking for a
    while is no part of the load.
    """
    records = noted.records
    if noted.gone is not None:
        gone = noted.gone
        records = tuple(record for record in records if record.sent <= gone)
        return Window(records, max((record.done for record in records), default=gone))
    if duration is None:
        ends = [record.done for record in records]
        seconds = noted.seconds if noted.interrupted or not ends else max(ends)
        inside = records
    else:
        seconds = min(duration, noted.seconds)
        inside = tuple(record for record in records if record.done <= seconds)
    late = [record.sent for record in records if record.done > seconds]
    unfinished = tuple(max(0.0, seconds - sent) for sent in (*late, *noted.cut))
    return Window(inside, seconds, unfinished)
