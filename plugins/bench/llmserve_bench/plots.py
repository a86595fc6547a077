"""The plots of a report, all made by :func:`draw`: SVG with text that a browser can read."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure as Canvas

from llmserve_bench.figures import (
    FIGURES,
    Figure,
    figures_of,
    part_name,
    ranking,
    ratios_of,
)
from llmserve_bench.results import Case, Record, Result, Run
from llmserve_bench.tables import throughput_figure

COLOURS = ("#2f6fd0", "#c8641b", "#2a9d62", "#8a55c7", "#c2373f", "#4a8f9c", "#9a7b1e", "#7a7f87")
_INK = "#30363d"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "llmserve",
    # Names are shown as they are, whatever dollars are in them.
    "text.parse_math": False,
    "font.family": ["DejaVu Sans", "sans-serif"],
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), _INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), _INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "axes.prop_cycle": cycler(color=COLOURS),
}
_MOST_REQUESTS = 200
_MOST_RANKED = 20
_LONGEST_NAME = 36
_RATIO_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True)
class Plot:
    """A picture with its title and what a reader has to know of it."""

    name: str
    title: str
    caption: str
    svg: str
    wide: bool

    @property
    def inline(self) -> str:
        """Give the picture as part of a page, which lends its colour to the text."""
        body = self.svg[self.svg.index("<svg") :].replace(_INK, "currentColor")
        return body.replace("<svg ", f'<svg role="img" aria-label="{escape(self.title)}" ', 1)


def plots_of(result: Result) -> list[Plot]:
    """Give the plots that fit a result."""
    measured = [case for case in result.cases if any(run.good for run in case.runs)]
    if not measured:
        return []
    heaviest = measured[-1].load.label
    shown = [case for case in measured if case.load.label == heaviest][:6]
    if result.kind == "sweep":
        shown = [place.case for place in ranking(result.cases)[:2]] or shown
        found = [_ranking(result)]
    else:
        found = [_requests_over_time(shown), _ratios(result, heaviest)]
        for figure in (throughput_figure(result), FIGURES["latency_p50"], FIGURES["latency_p99"]):
            found.append(_over_loads(measured, figure, result.loads))
    found += [
        _distribution(shown, "latency", lambda record: record.latency),
        _distribution(shown, "time to first token", lambda record: record.first_token),
        _server_time(shown),
    ]
    if result.kind == "sweep":
        found.append(_requests_over_time(shown))
    return [plot for plot in found if plot is not None]


def draw(
    title: str, caption: str, paint: Callable[[Any], None], *,
    size: tuple[float, float] = (5.4, 3.4), rows: int = 1,
) -> Plot:  # fmt: skip
    """Paint on the axes of a new picture."""
    with mpl.rc_context(_STYLE):
        canvas = Canvas(figsize=size, layout="constrained")
        paint(canvas.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])
        text = io.StringIO()
        # Tight, so that no label is cut off at the edge.
        canvas.savefig(text, format="svg", metadata={"Date": None}, bbox_inches="tight")
    name = "".join(letter if letter.isalnum() else "-" for letter in title.lower())
    return Plot(name, title, caption, text.getvalue(), wide=size[0] > 6)


def time_axis(axis: Any, label: str, values: Iterable[float]) -> float:
    """Label an axis with a time in one unit for all of its ticks; give the factor to it."""
    unit, factor = ("s", 1.0) if max(values, default=0.0) >= 2.0 else ("ms", 1e3)
    axis.set_label_text(f"{label} ({unit})")
    return factor


def short(name: str) -> str:
    """Cut a name that would leave no room for the plot."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def typical(case: Case) -> Run:
    """Give the round in the middle by its throughput."""
    rates = {
        at: figures_of(run, case.load)["requests_per_second"] for at, run in enumerate(case.runs)
    }
    return case.runs[sorted(rates, key=lambda at: rates[at])[len(rates) // 2]]


def _over_loads(cases: Sequence[Case], figure: Figure, loads: list[str]) -> Plot | None:
    """Draw a figure over the loads, a line for each subject with the range of its rounds."""
    lines: dict[str, dict[int, list[float]]] = {}
    for case in cases:
        values = [figures_of(run, case.load).get(figure.name) for run in case.runs]
        known = [value for value in values if value is not None]
        lines.setdefault(short(case.name), {}).update(
            {loads.index(case.load.label): known} if known else {}
        )
    everything = [v for line in lines.values() for values in line.values() for v in values]
    if len(loads) < 2:
        return None

    def paint(axes: Any) -> None:
        (axes,), factor = axes, 1.0
        axes.set_ylabel(figure.label)
        if figure.unit == "time":
            factor = time_axis(axes.yaxis, figure.label, everything)
            _draw_limit(axes.axhline, cases[0].load.limit_latency, factor)
        for name, line in lines.items():
            low, mean, high = (
                [of(values) * factor for values in line.values()] for of in (min, fmean, max)
            )
            (drawn,) = axes.plot(list(line), mean, marker="o", label=name)
            axes.fill_between(
                list(line), low, high, color=drawn.get_color(), alpha=0.18, linewidth=0
            )
        axes.set_xticks(range(len(loads)), [label.split()[-1] for label in loads])
        axes.set_xlabel(loads[0].split()[0])
        axes.set_ylim(bottom=0)
        axes.legend()

    caption = "The line is the mean of the rounds, the band their range."
    return draw(f"{figure.label.replace('/s', ' per second')} by load", caption, paint)


def _ratios(result: Result, load: str) -> Plot | None:
    ratios = [ratio for ratio in ratios_of(result) if ratio.load == load]
    if not ratios or ratios[0].low == 0:
        return None
    names = list(dict.fromkeys(ratio.name for ratio in ratios))
    labels = list(dict.fromkeys(ratio.figure.label for ratio in ratios))

    def paint(axes: Any) -> None:
        (axes,) = axes
        axes.axvline(1.0, color=_INK, linewidth=1)
        for at, name in enumerate(names):
            own = [ratio for ratio in ratios if ratio.name == name]
            shift = (at + 1) / (len(names) + 1) - 0.5
            places = [labels.index(ratio.figure.label) + shift for ratio in own]
            reach = [[r.ratio - r.low for r in own], [r.high - r.ratio for r in own]]
            middles, colour = [ratio.ratio for ratio in own], COLOURS[(at + 1) % len(COLOURS)]
            axes.errorbar(
                middles, places, xerr=reach, fmt="o", capsize=3, color=colour, label=short(name)
            )
        axes.set_xscale("log")
        low, high = min(ratio.low for ratio in ratios), max(ratio.high for ratio in ratios)
        ticks = [tick for tick in _RATIO_TICKS if low / 1.6 <= tick <= high * 1.6]
        axes.set_xticks(ticks, [f"{tick:g} x" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlim(min(low, *ticks) / 1.1, max(high, *ticks) * 1.1)
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        if len(names) > 1:
            axes.legend()

    caption = (
        f"Under {load}. The bar is the 95 % interval over rounds: across 1 x nothing is clear."
    )
    title = f"In multiples of {short(ratios[0].against)}"
    return draw(title, caption, paint, size=(5.4, 1.2 + 0.42 * len(labels)))


def _ranking(result: Result) -> Plot | None:
    places = ranking(result.cases)[:_MOST_RANKED]
    if not places:
        return None

    def paint(axes: Any) -> None:
        (axes,) = axes
        for at, place in enumerate(places):
            axes.barh(at, place.throughput, color=COLOURS[0 if place.within else 7], alpha=0.75)
            axes.plot(place.rounds, [at] * len(place.rounds), "|", color=_INK, markersize=9)
        axes.set_yticks(range(len(places)), [short(place.case.name) for place in places])
        axes.invert_yaxis()
        axes.set_xlabel(throughput_figure(result).label)
        axes.grid(visible=False, axis="y")

    caption = "The bar is the mean, a stroke each round; grey is over the limit."
    return draw("Ranking", caption, paint, size=(7.4, 1.0 + 0.36 * len(places)))


def _requests_over_time(cases: Sequence[Case]) -> Plot:
    runs = {short(case.name): typical(case) for case in cases[:4]}
    end = max(run.seconds for run in runs.values())

    def paint(axes: Any) -> None:
        factor = time_axis(axes[-1].xaxis, "time since the start", [end])
        for own, (name, run), colour in zip(axes, runs.items(), COLOURS, strict=False):
            records = sorted(run.records, key=lambda record: record.scheduled)[:_MOST_REQUESTS]
            due = [record.scheduled * factor for record in records]
            first = [(r.pieces[0] if len(r.pieces) > 1 else r.done) * factor for r in records]
            done = [record.done * factor for record in records]
            own.hlines(range(len(records)), due, first, color=colour, linewidth=1.1, alpha=0.3)
            own.hlines(range(len(records)), first, done, color=colour, linewidth=1.8)
            own.set_title(name, loc="left", fontsize=10)
            own.invert_yaxis()
            own.set_yticks([])
            own.set_ylabel("requests")
            own.set_xlim(0, end * factor)

    caption = (
        f"A line is a request, the first {_MOST_REQUESTS} in the order in which they were due: "
        "faint until its first piece, strong until its last. An answer in one piece is faint as a "
        "whole. Of several rounds it is the one in the middle by throughput."
    )
    size = (11.4, 0.8 + 2.2 * len(runs))
    return draw("Requests over time", caption, paint, size=size, rows=len(runs))


def _distribution(cases: Sequence[Case], label: str, of: Callable[[Record], float]) -> Plot | None:
    """Draw which share of requests was done within a time."""
    good = {
        short(case.name): [record for run in case.runs for record in run.good] for case in cases
    }
    if label != "latency" and all(len(r.pieces) < 2 for own in good.values() for r in own):
        return None

    def paint(axes: Any) -> None:
        (axes,), load = axes, cases[0].load
        longest = [of(record) for own in good.values() for record in own]
        factor = time_axis(axes.xaxis, label, longest)
        for name, records in good.items():
            axes.ecdf([of(record) * factor for record in records], label=name)
        limit = load.limit_latency if label == "latency" else load.limit_ttft
        _draw_limit(axes.axvline, limit, factor)
        axes.set_xlim(left=0)
        axes.set_ylabel("requests done within (%)")
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
        axes.legend(loc="lower right")

    caption = "Of all rounds together, counted from when each request was due."
    return draw(f"Distribution of {label}", caption, paint)


def _server_time(cases: Sequence[Case]) -> Plot | None:
    """Draw where requests spent their time in the server, by Triton's own account."""
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    bars: dict[str, list[float]] = {}
    for case in cases:
        run, name = typical(case), short(case.name)
        models = run.server.models if run.server else ()
        for model in models[1:] or models:
            step = short(part_name(model.model, models[0].model))
            own = name if len(models) == 1 else f"{name}, {step}"
            bars[own] = [getattr(model, part) / max(1, len(run.records)) for part in parts]
    if not any(sum(times) for times in bars.values()):
        return None

    def paint(axes: Any) -> None:
        (axes,) = axes
        factor = time_axis(axes.xaxis, "mean per request", [sum(times) for times in bars.values()])
        before = [0.0] * len(bars)
        for at, (part, colour) in enumerate(zip(parts, (7, 3, 0, 1), strict=True)):
            own, label = [times[at] * factor for times in bars.values()], part.replace("_", " ")
            axes.barh(list(bars), own, left=before, label=label, color=COLOURS[colour])
            before = [a + b for a, b in zip(before, own, strict=True)]
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)

    size = (5.4, 1.6 + 0.4 * len(bars))
    return draw("Time in the server", "By Triton's statistics.", paint, size=size)


def _draw_limit(line: Callable[..., Any], limit: float | None, factor: float) -> None:
    if limit is not None:
        line(limit * factor, color=_INK, linestyle=":", label="limit")
