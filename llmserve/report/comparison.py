"""The report of ``llmserve compare``: several subjects under the same loads."""

from __future__ import annotations

from collections.abc import Iterable

from llmserve.measure.series import Comparison
from llmserve.report import tables, words
from llmserve.report.cells import Cells
from llmserve.report.contrasts import latency_figures, throughput_figures
from llmserve.report.doubts import doubts
from llmserve.report.facts import conditions, model_of, subjects
from llmserve.report.page import Draft, Page
from llmserve.report.plots.batches import batches
from llmserve.report.plots.ratios import ratios
from llmserve.report.plots.server import server_time
from llmserve.report.plots.timeline import Panel, timeline
from llmserve.report.rounds import every_load, ratio_table
from llmserve.report.verdicts import findings
from llmserve.report.within import shares, sizes


def comparison_page(comparison: Comparison) -> Page:
    """Put the report of a comparison together."""
    cells = Cells(comparison)
    main = cells.main
    several = len(comparison.loads) > 1
    first = comparison.subjects[0].name
    shown = [
        (at, name, run) for at, name in enumerate(cells.names) if (run := cells.typical(name, main))
    ]
    draft = Draft()
    draft.add(
        "At a glance",
        _shown(main, several=several, rounds=comparison.rounds),
        [timeline([Panel(name, run, at) for at, name, run in shown])],
        [tables.figures([(name, run) for name in cells.names for run in cells.of(name, main)])],
    )
    forests = [
        ratios(cells.ratios(name, main), name, first, main, f"ratios-{at}")
        for at, name in enumerate(cells.names[1:], 1)
    ]
    draft.add(
        "Throughput",
        figures=[*throughput_figures(cells), *forests],
        tables=[*(ratio_table(cells, name) for name in cells.names[1:]), every_load(cells)],
    )
    draft.add(
        "Latency", "Times count from when a request should have been sent.", latency_figures(cells)
    )
    single = cells.middles()
    draft.add(
        "In the server",
        "" if comparison.rounds == 1 else "Of the round in the middle by requests per second.",
        [
            server_time(shares([(name, run) for _, name, run in shown])),
            batches(sizes([(name, run, at) for at, name, run in shown])),
        ],
        [tables.server(single), tables.published(single)],
    )
    every = cells.every()
    draft.add("Failures and cost", tables=[tables.failures(every), tables.loader(single)])
    draft.add("Subjects", tables=[subjects(comparison.subjects)])
    facts = [
        ("Compared", words.listed([words.clean(name) for name in cells.names])),
        ("Model", words.listed(_distinct(model_of(part) for part in comparison.subjects))),
        ("Rounds", f"{comparison.rounds}, in each of which all saw the same requests in turn"),
        *conditions(cells.all, cells.loads()),
        ("Measured", words.when(comparison.started)),
    ]
    return Page(
        words.clean(comparison.title), "compare", tuple(findings(comparison, main)),
        tuple(
            doubts(
                every, interrupted=comparison.interrupted, ended_early=comparison.ended_early
            )
        ),
        tuple(facts),
        tuple(draft.sections),
    )  # fmt: skip


def _shown(main: str, *, several: bool, rounds: int) -> str:
    parts = [f"Under the heaviest load, {words.clean(main)}."] if several else []
    if rounds > 1:
        parts.append("The plot is of the round in the middle by requests per second.")
    return " ".join(parts)


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words.clean(text) for text in texts))
