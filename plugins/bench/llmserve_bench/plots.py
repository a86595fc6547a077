"""The plots of a report, all made by :func:`draw`."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure as Canvas

from llmserve_bench.figures import FIGURES, Figure, figures_of, ranking
from llmserve_bench.results import Case, Record, Result
from llmserve_bench.tables import throughput_figure

_STYLE = {
    # The same picture for the same result.
    "svg.hashsalt": "llmserve",
    # Names are written as they are, whatever dollars are in them.
    "text.parse_math": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
}
_MOST_CASES = 6
_LONGEST_NAME = 36


@dataclass(frozen=True)
class Plot:
    title: str
    caption: str
    svg: str

    @property
    def source(self) -> str:
        """Give the picture as the source of an image, which needs no file beside the page."""
        return f"data:image/svg+xml;base64,{b64encode(self.svg.encode()).decode()}"


def plots_of(result: Result) -> list[Plot]:
    cases = [case for case in result.cases if any(run.good for run in case.runs)]
    if not cases:
        return []
    found = []
    if len(result.loads) > 1 and result.kind != "sweep":
        figures = (throughput_figure(result), FIGURES["latency_p50"], FIGURES["latency_p99"])
        found = [_over_loads(cases, figure, result.loads) for figure in figures]
    heaviest = [case for case in cases if case.load.label == cases[-1].load.label][:_MOST_CASES]
    if result.kind == "sweep":
        heaviest = [one.case for one in ranking(result.cases)][:2] or heaviest
    found.append(_distribution(heaviest, "latency", lambda record: record.latency))
    if any(len(record.pieces) > 1 for case in heaviest for run in case.runs for record in run.good):
        found.append(_distribution(heaviest, "time to first token", lambda r: r.first_token))
    return found


def draw(title: str, caption: str, paint: Callable[[Any], None]) -> Plot:
    with mpl.rc_context(_STYLE):
        canvas = Canvas(figsize=(5.4, 3.4), layout="constrained")
        paint(canvas.subplots())
        text = io.StringIO()
        # Tight, so that no label is cut off at the edge.
        canvas.savefig(text, format="svg", metadata={"Date": None}, bbox_inches="tight")
    return Plot(title, caption, text.getvalue())


def _label_times(axis: Any, label: str, values: Iterable[float]) -> float:
    """Label an axis with a time in one unit for all of its ticks; give the factor to it."""
    unit, factor = ("s", 1.0) if max(values, default=0.0) >= 2.0 else ("ms", 1e3)
    axis.set_label_text(f"{label} ({unit})")
    return factor


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def _over_loads(cases: Sequence[Case], figure: Figure, loads: list[str]) -> Plot:
    lines: dict[str, dict[int, list[float]]] = {}
    for case in cases:
        values = [figures_of(run, case.load).get(figure.name) for run in case.runs]
        if known := [value for value in values if value is not None]:
            lines.setdefault(case.name, {})[loads.index(case.load.label)] = known

    def paint(axes: Any) -> None:
        factor = 1.0
        axes.set_ylabel(figure.label)
        if figure.unit == "time":
            every = [v for line in lines.values() for values in line.values() for v in values]
            factor = _label_times(axes.yaxis, figure.label, every)
            _draw_limit(axes.axhline, cases[0].load.limit_latency, factor, every)
        for name, line in lines.items():
            low, mean, high = (
                [of(values) * factor for values in line.values()] for of in (min, fmean, max)
            )
            (drawn,) = axes.plot(list(line), mean, marker="o", label=_short(name))
            axes.fill_between(list(line), low, high, color=drawn.get_color(), alpha=0.18)
        axes.set_xticks(range(len(loads)), [label.split()[-1] for label in loads])
        axes.set_xlabel(loads[0].split()[0])
        axes.set_ylim(bottom=0)
        axes.legend()

    caption = "The line is the mean of the rounds, the band their range."
    return draw(f"{figure.label.replace('/s', ' per second')} by load", caption, paint)


def _distribution(cases: Sequence[Case], label: str, of: Callable[[Record], float]) -> Plot:
    times = {case.name: [of(one) for run in case.runs for one in run.good] for case in cases}

    def paint(axes: Any) -> None:
        load = cases[0].load
        every = [time for own in times.values() for time in own]
        factor = _label_times(axes.xaxis, label, every)
        for name, own in times.items():
            axes.ecdf([time * factor for time in own], label=_short(name))
        limit = load.limit_latency if label == "latency" else load.limit_ttft
        _draw_limit(axes.axvline, limit, factor, every)
        axes.set_xlim(left=0)
        axes.set_ylabel("share of requests done within")
        axes.legend(loc="lower right")

    loads = dict.fromkeys(case.load.label for case in cases)
    caption = f"Of all rounds at {' and '.join(loads)}, counted from when each request was due."
    return draw(f"Distribution of {label}", caption, paint)


def _draw_limit(
    line: Callable[..., Any], limit: float | None, factor: float, values: Iterable[float]
) -> None:
    # One that is far beyond what was measured would leave no room for it.
    if limit is not None and limit < 2 * max(values, default=0.0):
        line(limit * factor, color="black", linestyle=":", label="limit")
