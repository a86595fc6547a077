"""The plots of a report."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from textwrap import fill
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure as Canvas

from llmserve_bench.figures import FIGURES, Figure, figures_of, ranking, throughput_figure
from llmserve_bench.results import Case, Record, Result

_STYLE = {
    # The same result gives the same picture.
    "svg.hashsalt": "llmserve",
    # Names are shown literally, even if they contain dollar signs.
    "text.parse_math": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
}
_MOST_CASES = 6
_LONGEST_LINE = 36


@dataclass(frozen=True)
class Plot:
    title: str
    caption: str
    svg: str


def plots_of(result: Result) -> list[Plot]:
    cases = [case for case in result.cases if any(run.good for run in case.runs)]
    if not cases:
        return []
    plots = []
    if len(result.loads) > 1 and result.kind != "sweep":
        figures = (throughput_figure(result), FIGURES["latency_p50"], FIGURES["latency_p99"])
        plots = [_over_loads(cases, figure, result.loads) for figure in figures]
    heaviest = [case for case in cases if case.load.label == cases[-1].load.label][:_MOST_CASES]
    if result.kind == "sweep":
        best = [ranked.name for ranked in ranking(result.cases)][:2]
        heaviest = [case for name in best for case in cases if case.name == name] or heaviest
    plots += _trade(result)
    load = heaviest[0].load
    plots.append(_distribution(heaviest, "latency", lambda r: r.latency, load.limit_latency))
    if any(len(record.pieces) > 1 for case in heaviest for run in case.runs for record in run.good):
        label = "time to first token"
        plots.append(_distribution(heaviest, label, lambda r: r.first_token, load.limit_ttft))
    return plots


def draw(title: str, caption: str, paint: Callable[[Any], None]) -> Plot:
    with mpl.rc_context(_STYLE):
        canvas = Canvas(figsize=(5.4, 3.4), layout="constrained")
        paint(canvas.subplots())
        text = io.StringIO()
        # Tight, so that no label is cut off.
        canvas.savefig(text, format="svg", metadata={"Date": None}, bbox_inches="tight")
    return Plot(title, caption, text.getvalue())


def _over_loads(cases: Sequence[Case], figure: Figure, loads: list[str]) -> Plot:
    lines: dict[str, dict[int, list[float]]] = {}
    for case in cases:
        values = [figures_of(run, case.load).get(figure.name) for run in case.runs]
        if rounds := [figure.scaled(value) for value in values if value is not None]:
            lines.setdefault(case.name, {})[loads.index(case.load.label)] = rounds

    def paint(axes: Any) -> None:
        for name, line in lines.items():
            low, mean, high = ([f(values) for values in line.values()] for f in (min, fmean, max))
            (curve,) = axes.plot(list(line), mean, marker="o", label=fill(name, _LONGEST_LINE))
            axes.fill_between(list(line), low, high, color=curve.get_color(), alpha=0.18)
        if figure.unit == "time":
            _draw_limit(axes.axhline, cases[0].load.limit_latency, axes.get_ylim())
        axes.set_xticks(range(len(loads)), [label.split()[-1] for label in loads])
        axes.set_xlabel(loads[0].split()[0])
        axes.set_ylabel(figure.title)
        axes.set_ylim(bottom=0)
        axes.legend()

    caption = "The line is the mean of the rounds; the band is their range."
    return draw(f"{figure.label.replace('/s', ' per second')} by load", caption, paint)


def _trade(result: Result) -> list[Plot]:
    """Return what answers lose against how fast they come, under the heaviest load."""
    rate, first = throughput_figure(result), next(iter(result.losses), None)
    rates = {
        case.subject.name: [figures_of(run, case.load)[rate.name] for run in case.runs]
        for case in result.cases
        if case.load.label == result.loads[-1] and case.runs
    }
    points = {
        loss.name: (fmean(rates[loss.name]), 100 * (loss.perplexity / first.perplexity - 1))
        for loss in result.losses
        if loss.name in rates and loss.perplexity and first and first.perplexity
    }

    def paint(axes: Any) -> None:
        for name, (x, y) in points.items():
            axes.plot([x], [y], marker="o", linestyle="", label=fill(name, _LONGEST_LINE))
        axes.set_xlim(left=0)
        axes.set_xlabel(rate.title)
        axes.set_ylabel("more perplexity (%)")
        axes.legend()

    caption = f"At {result.loads[-1]}; perplexity is compared with that of {result.cases[0].name}."
    return [draw("What answers lose, and how fast they are", caption, paint)] if points else []


def _distribution(
    cases: Sequence[Case], label: str, time_of: Callable[[Record], float], limit: float | None
) -> Plot:
    times = {case.name: [time_of(r) * 1e3 for run in case.runs for r in run.good] for case in cases}

    def paint(axes: Any) -> None:
        for name, case_times in times.items():
            axes.ecdf(case_times, label=fill(name, _LONGEST_LINE))
        _draw_limit(axes.axvline, limit, axes.get_xlim())
        axes.set_xlim(left=0)
        axes.set_xlabel(f"{label} (ms)")
        axes.set_ylabel("share of requests finished")
        axes.legend(loc="lower right")

    loads = dict.fromkeys(case.load.label for case in cases)
    caption = f"All rounds at {' and '.join(loads)}, counted from when each request was due."
    return draw(f"Distribution of {label}", caption, paint)


def _draw_limit(line: Callable[..., Any], limit: float | None, ends: Sequence[float]) -> None:
    # A limit far beyond the measured values would leave no space for them.
    if limit is not None and limit * 1e3 < 2 * ends[1]:
        line(limit * 1e3, color="black", linestyle=":", label="limit")
