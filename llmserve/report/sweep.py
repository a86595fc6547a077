"""The report of ``llmserve sweep``: which variant is the best, and what the settings do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from llmserve.measure.series import Sweep, Variant
from llmserve.report import tables, words
from llmserve.report.doubts import doubts
from llmserve.report.facts import conditions, settings, value_of
from llmserve.report.metrics import Mean, Metric, metric, rounds, throughput
from llmserve.report.page import Draft, Figure, Page, Table
from llmserve.report.plots.bars import Bar, bars
from llmserve.report.plots.curves import Curve, curves
from llmserve.report.plots.pareto import Point, pareto
from llmserve.report.plots.server import Share, server_time
from llmserve.report.plots.timeline import Panel, timeline
from llmserve.report.winners import findings

_NUMBER = re.compile(r"\d+(\.\d+)?$")
BEST = 8
"""So many are told apart by colour."""


def sweep_page(sweep: Sweep) -> Page:
    """Put the report of a sweep together."""
    known = {variant.name: variant for variant in sweep.variants}
    ranked = [known[name] for name in sweep.ranking if name in known]
    runs = [run for variant in sweep.variants for run in variant.runs]
    wanted = metric(throughput(runs))
    best = ranked[:BEST]
    draft = Draft()
    draft.add(
        "The best",
        figures=[_bars(best, wanted), _pareto(sweep, ranked, wanted)],
        tables=[_ranking(sweep, ranked)],
    )
    draft.add("What each setting does", figures=_settings(sweep, ranked, wanted))
    shares = [
        Share(variant.name, run.server.models[0], len(run.records) + run.unfinished)
        for variant in best
        for run in variant.runs[:1]
        if run.server and run.server.models
    ]
    named = [(variant.name, variant.runs[0]) for variant in best if variant.runs]
    draft.add(
        "In the server",
        "Of the first round of each.",
        [server_time(shares)],
        [tables.server(named)],
    )
    ends = [ranked[0], ranked[-1]] if len(ranked) > 1 else ranked
    draft.add(
        "The first and the last of the ranking" if len(ends) > 1 else "Requests over time",
        figures=[
            timeline(
                [Panel(part.name, part.runs[0], at) for at, part in enumerate(ends) if part.runs]
            )
        ],
    )
    draft.add("Not measured to the end", tables=[_left(sweep)])
    every = [(variant.name, run) for variant in sweep.variants for run in variant.runs]
    draft.add("Failures and cost", tables=[tables.failures(every), tables.loader(named)])
    varied = "; ".join(
        f"{words.clean(key)} {words.listed([value_of(value) for value in values])}"
        for key, values in sweep.varied.items()
        if values
    )
    built = sweep.settings.get("build")
    common = settings(built) if isinstance(built, Mapping) else ""
    loads = list({run.load.label: run.load for run in runs}.values())
    facts = [
        ("Model", words.clean(sweep.model)),
        ("Plugin", words.clean(sweep.plugin)),
        ("Varied", varied or "nothing"),
        *([("The same in all", common)] if common else []),
        ("Limit", _limit(sweep)),
        ("Rounds", str(sweep.rounds)),
        *conditions(runs, loads),
        ("Measured", words.when(sweep.started)),
    ]
    return Page(
        words.clean(sweep.title), "sweep", tuple(findings(sweep, ranked, wanted)),
        tuple(doubts(every, interrupted=sweep.interrupted)), tuple(facts), tuple(draft.sections),
    )  # fmt: skip


def _bars(best: Sequence[Variant], wanted: Metric) -> Figure | None:
    rows = [
        Bar(variant.name, mean, 0 if variant.within is not False else 6, f"{at}.")
        for at, variant in enumerate(best, 1)
        if (mean := rounds(variant.runs, wanted.name))
    ]
    late = any(variant.within is False for variant in best)
    note = "Those in another colour do not hold the limit." if late else ""
    return bars("ranking", "The ranking", wanted, rows, note)


def _pareto(sweep: Sweep, ranked: Sequence[Variant], wanted: Metric) -> Figure | None:
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


def _ranking(sweep: Sweep, ranked: Sequence[Variant]) -> Table:
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
    many = len(keys)
    return Table("The ranking", columns, tuple(rows), frozenset({*range(1, many + 1), many + 4}))


def _settings(sweep: Sweep, ranked: Sequence[Variant], wanted: Metric) -> list[Figure | None]:
    """Draw, for each setting, the best that each of its values reached."""
    figures: list[Figure | None] = []
    for at, (key, values) in enumerate(sweep.varied.items()):
        found: list[tuple[object, Mean]] = []
        for value in values:
            having = [
                mean
                for variant in ranked
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
            figures.append(curves(name, title, wanted, words.clean(key), [Curve(key, points)]))
        else:
            rows = [Bar(value_of(value), mean) for value, mean in found]
            figures.append(bars(name, title, wanted, rows))
    return figures


def _left(sweep: Sweep) -> Table:
    rows = tuple(
        (
            words.clean(variant.name),
            words.clean(variant.state),
            words.clean(variant.why) or words.NONE,
        )
        for variant in sweep.variants
        if variant.state != "done"
    )
    counts = Counter(row[1] for row in rows)
    title = ", ".join(f"{many} {state}" for state, many in sorted(counts.items()))
    return Table(title, ("", "state", "why"), rows, frozenset({0, 1, 2}))


def _limit(sweep: Sweep) -> str:
    parts = [
        f"{what} {words.seconds(limit)}, P99"
        for what, limit in (
            ("latency", sweep.limit_latency),
            ("time to first token", sweep.limit_ttft),
        )
        if limit is not None
    ]
    return ", ".join(parts) or "none"
