"""The plots and tables of a sweep's variants."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llmserve.measure.series import Sweep, Variant
from llmserve.report import words
from llmserve.report.facts import settings, value_of
from llmserve.report.metrics import Mean, Metric, rounds
from llmserve.report.page import Figure, Table
from llmserve.report.plots.bars import Bar, bars
from llmserve.report.plots.curves import Curve, curves
from llmserve.report.plots.pareto import Point, pareto

_NUMBER = re.compile(r"\d+(\.\d+)?$")
_TOP = 12
BEST = 8
"""So many are told apart by colour."""


def ranking_bars(best: Sequence[Variant], wanted: Metric) -> Figure | None:
    """Draw the throughput of the best."""
    rows = [
        Bar(variant.name, mean, 0 if variant.within is not False else 6, f"{at}.")
        for at, variant in enumerate(best, 1)
        if (mean := rounds(variant.runs, wanted.name))
    ]
    late = any(variant.within is False for variant in best)
    note = "Those in another colour do not hold the limit." if late else ""
    return bars("ranking", "The ranking", wanted, rows, note)


def ranking_front(sweep: Sweep, ranked: Sequence[Variant], wanted: Metric) -> Figure | None:
    """Draw all that was measured to the end, throughput against latency."""
    points = [
        Point(settings(variant.build) or "as built", str(at), variant.latency, mean.value)
        for at, variant in enumerate(ranked, 1)
        if variant.latency is not None and (mean := rounds(variant.runs, wanted.name))
    ]
    # One colour for each build, while colours last.
    if len({point.group for point in points}) > BEST:
        points = [Point("", point.label, point.latency, point.throughput) for point in points]
    return pareto(
        points, wanted, limit=sweep.limit_latency, labels="places in the ranking", joined=False
    )


def ranking_tables(sweep: Sweep, ranked: Sequence[Variant]) -> list[Table]:
    """List the ranking; what is far down is folded away."""
    keys = list(sweep.varied)
    rows = []
    for at, variant in enumerate(ranked, 1):
        given = {**variant.build, **variant.load}
        ttft = rounds(variant.runs, "ttft_p99")
        rows.append(
            (f"{at}", *(value_of(given[key]) if key in given else words.NONE for key in keys),
             words.number(variant.throughput), words.seconds(variant.latency),
             ttft.show(words.seconds) if ttft else words.NONE,
             {True: "yes", False: "no", None: words.NONE}[variant.within])
        )  # fmt: skip
    columns = (
        "place", *(words.clean(key) for key in keys), "output tokens per second", "P99 latency",
        "P99 time to first token", "within the limit",
    )  # fmt: skip
    named = frozenset({*range(1, len(keys) + 1), len(keys) + 4})
    return [
        Table("The ranking", columns, tuple(rows[:_TOP]), named),
        Table("The rest of the ranking", columns, tuple(rows[_TOP:]), named, folded=True),
    ]


def setting_figures(sweep: Sweep, ranked: Sequence[Variant], wanted: Metric) -> list[Figure | None]:
    """Draw, for each setting, the best that each of its values reached, within the limit where
    one was held at all."""
    figures: list[Figure | None] = []
    held = [variant for variant in ranked if variant.within]
    limited = bool(held) and len(held) < len(ranked)
    note = "Of the variants that hold the limit." if limited else ""
    for at, (key, values) in enumerate(sweep.varied.items()):
        found: list[tuple[object, Mean]] = []
        for value in values:
            having = [
                mean
                for variant in held or ranked
                if {**variant.build, **variant.load}.get(key) == value
                and (mean := rounds(variant.runs, wanted.name))
            ]
            if having:
                found.append((value, max(having, key=lambda mean: mean.value)))
        if len(found) < 2:
            continue
        name, title = f"setting-{at}", f"{words.clean(key)}: the best of each value"
        numbers = [(value, mean) for value, mean in found if _NUMBER.match(str(value))]
        if len(numbers) == len(found):
            points = tuple((float(str(value)), mean) for value, mean in numbers)
            figures.append(
                curves(name, title, wanted, words.clean(key), [Curve(key, points)], note)
            )
        else:
            rows = [Bar(value_of(value), mean) for value, mean in found]
            figures.append(bars(name, title, wanted, rows, note))
    return figures
