"""The report of ``llmserve sweep``: which variant is the best, and what the settings do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from llmserve.measure.series import Sweep
from llmserve.report import tables, words
from llmserve.report.doubts import doubts
from llmserve.report.facts import conditions, model_name, settings, value_of
from llmserve.report.metrics import metric, throughput
from llmserve.report.page import Draft, Page, Table
from llmserve.report.plots.server import server_time
from llmserve.report.plots.timeline import Panel, timeline
from llmserve.report.variants import (
    BEST,
    ranking_bars,
    ranking_front,
    ranking_tables,
    setting_figures,
)
from llmserve.report.winners import findings
from llmserve.report.within import shares


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
        figures=[ranking_bars(best, wanted), ranking_front(sweep, ranked, wanted)],
        tables=ranking_tables(sweep, ranked),
    )
    draft.add("What each setting does", figures=setting_figures(sweep, ranked, wanted))
    named = [(variant.name, variant.runs[0]) for variant in best if variant.runs]
    draft.add(
        "In the server",
        "Of the first round of each.",
        [server_time(shares(named))],
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
        ("Model", model_name(sweep.model)),
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
