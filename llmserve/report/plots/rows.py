"""The marks of a timeline, as broken lines: one path each, however many requests there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import nan, sqrt

from llmserve.measure.runs import Record

Line = tuple[list[float], list[float]]

APART = 1.4
"""Marks closer than so many units of the picture are drawn as one bar: they would look like it,
and take a hundred times the room."""

_MARK, _FIRST = 0.9, 1.8


def waits(records: Sequence[Record]) -> Line:
    """Draw from when a request was due to its first piece, or its failure."""
    return _line(
        (record.scheduled, record.done if record.first is None else record.first, row)
        for row, record in enumerate(records)
    )


def firsts(records: Sequence[Record], scale: float) -> Line:
    """Draw the first piece of each answer."""
    return _line(
        (record.first - _FIRST / scale, record.first, row)
        for row, record in enumerate(records)
        if record.first is not None
    )


def spans(records: Sequence[Record]) -> Line:
    """Draw from the first piece to the end, so that pieces far apart read as one answer."""
    return _line(
        (record.first, record.done, row)
        for row, record in enumerate(records)
        if record.first is not None and record.done > record.first
    )


def pieces(records: Sequence[Record], scale: float) -> Line:
    """Draw all pieces; ``scale`` is how many units a second has."""
    return _line(
        (start, end, row)
        for row, record in enumerate(records)
        for start, end in bars(record.pieces, record.tokens, scale)
    )


def bars(
    moments: Sequence[float], tokens: Sequence[int], scale: float
) -> list[tuple[float, float]]:
    """Give a mark for each piece, the wider the more tokens it brought, and join those that
    cannot be told apart. A mark ends when the piece came: its tokens were made before.

    >>> bars([1.0, 1.01, 2.0], [1, 1, 4], 100.0)
    [(0.991, 1.01), (1.982, 2.0)]
    """
    found: list[tuple[float, float]] = []
    for moment, many in zip(moments, [*tokens, *[1] * len(moments)], strict=False):
        start = moment - _MARK * sqrt(max(1, many)) / scale
        if found and start - found[-1][1] < (APART - _MARK) / scale:
            found[-1] = (found[-1][0], moment)
        else:
            found.append((start, moment))
    return [(round(start, 6), end) for start, end in found]


def failures(records: Sequence[Record]) -> Line:
    """Mark where requests failed."""
    found = [(record.done, row) for row, record in enumerate(records) if record.error is not None]
    return [x for x, _ in found], [float(row) for _, row in found]


def _line(parts: Iterable[tuple[float, float, int]]) -> Line:
    x: list[float] = []
    y: list[float] = []
    for start, end, row in parts:
        x += [start, end, nan]
        y += [row, row, nan]
    return x, y
