"""The variants of a sweep: every combination of what is varied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import inf

from llmserve.errors import UsageError
from llmserve.measure.series import Variant

LOADS = ("concurrency", "rate")
"""What belongs to the load and needs no build of its own."""


def parse_varied(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Read ``KEY=VALUE,VALUE`` as often as it was given.

    >>> parse_varied(["max_batch_size=4,8"])
    {'max_batch_size': ('4', '8')}
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        parts = tuple(dict.fromkeys(part.strip() for part in values.split(",") if part.strip()))
        if not (key and equals and parts):
            raise UsageError(f"{text!r} varies nothing", mend="write KEY=VALUE,VALUE")
        if key in found:
            raise UsageError(f"{key} is varied twice", mend="give all its values at once")
        found[key] = parts
    if not found:
        raise UsageError("there is nothing to vary", mend="give --vary KEY=VALUE,VALUE")
    if len(found.keys() & set(LOADS)) > 1:
        raise UsageError("concurrency and rate cannot both be varied", mend="leave out one")
    return found


def make_variants(varied: Mapping[str, Sequence[str]]) -> list[Variant]:
    """Give every combination, those of the same build next to one another."""
    builds = {key: values for key, values in varied.items() if key not in LOADS}
    loads = {key: values for key, values in varied.items() if key in LOADS}
    made = []
    for build in _combinations(builds):
        for load in _combinations(loads):
            _check_numbers(load)
            name = " ".join(f"{key}={value}" for key, value in {**build, **load}.items())
            made.append(Variant(name, build, load))
    return made


def _combinations(varied: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    return [dict(zip(varied, values, strict=True)) for values in product(*varied.values())]


def _check_numbers(load: Mapping[str, str]) -> None:
    for key, value in load.items():
        try:
            number = float(value) if key == "rate" else int(value)
        except ValueError:
            number = 0
        if not 0 < number < inf:
            raise UsageError(f"{key}={value} is no load", mend="give numbers above 0")
