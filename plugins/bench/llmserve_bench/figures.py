"""The figures of a run, by name, and their comparison and ranking.

A failed request counts as a request and as an error, but not in any time or rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import exp, floor, inf, log, log10, sqrt
from statistics import fmean, stdev
from typing import Any

import numpy as np

from llmserve_bench.results import Case, Load, Result, Run

_UNITS = {"time": ("ms", 1e3), "seconds": ("s", 1.0), "share": ("%", 1e2), "memory": ("GB", 1e-9)}
"""The symbol of each unit, and the factor to scale by; other figures are plain numbers."""


@dataclass(frozen=True)
class Figure:
    """The name, the label and the unit of a figure."""

    name: str
    label: str
    unit: str = "number"

    @property
    def title(self) -> str:
        return f"{self.label} ({_UNITS[self.unit][0]})" if self.unit in _UNITS else self.label

    def scaled(self, value: float) -> float:
        return value * _UNITS[self.unit][1] if self.unit in _UNITS else value

    def text(self, value: float) -> str:
        return number(self.scaled(value))


_TIMES = {"latency": "latency", "ttft": "time to first token", "token_time": "time between tokens"}
_PARTS = {"mean": "Mean", "p50": "P50", "p90": "P90", "p99": "P99"}
FIGURES = {
    figure.name: figure
    for figure in (
        Figure("requests_per_second", "Requests/s"),
        Figure("texts_per_second", "Texts/s"),
        Figure("input_tokens_per_second", "Input tokens/s"),
        Figure("output_tokens_per_second", "Output tokens/s"),
        *(
            Figure(f"{name}_{part}", f"{word} {label}", "time")
            for name, label in _TIMES.items()
            for part, word in _PARTS.items()
        ),
        Figure("gap_p50", "P50 gap between chunks", "time"),
        Figure("gap_p95", "P95 gap between chunks", "time"),
        Figure("gap_max", "Longest gap in an answer", "time"),
        Figure("chunk_tokens", "Tokens per chunk"),
        Figure("goodput", "Requests/s within limits"),
        Figure("within_limits", "Requests within limits", "share"),
        Figure("input_tokens", "Input tokens per request"),
        Figure("output_tokens", "Output tokens per request"),
        Figure("seconds", "Duration", "seconds"),
        Figure("requests", "Requests"),
        Figure("failed", "Failed requests"),
    )
}
COMPARED = (
    "requests_per_second", "texts_per_second", "output_tokens_per_second", "goodput",
    "latency_mean", "latency_p50", "latency_p99", "ttft_mean", "ttft_p50", "ttft_p99",
    "token_time_mean",
)  # fmt: skip
MACHINE_GAUGES = {
    "nv_gpu_utilization": ("GPU utilization", "share"),
    "nv_gpu_memory_used_bytes": ("GPU memory", "memory"),
    "nv_gpu_power_usage": ("GPU power (W)", "number"),
    "nv_cpu_utilization": ("CPU utilization", "share"),
    "nv_cpu_memory_used_bytes": ("CPU memory", "memory"),
}
"""Triton's metrics of the machine; its statistics cover the other metrics better."""
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t for 95 %, by degrees of freedom; the standard library has no quantile of it."""


def number(value: float) -> str:
    """Format a number with three significant digits; whole numbers keep all their digits."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{min(6, 2 - floor(log10(abs(value))))}f}"


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share))


def distribution(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the mean and percentiles of values as figures; none if there are no values."""
    if not values:
        return {}
    parts = {f"{name}_p{share}": percentile(values, share / 100) for share in (50, 90, 99)}
    return {f"{name}_mean": fmean(values), **parts}


def figures_of(run: Run, load: Load) -> dict[str, float]:
    """Return the figures of a run by the names of :data:`FIGURES`; times are in seconds.

    Time to first token and between tokens are left out if answers came in one piece: they would
    only repeat the latency. Token figures are left out if the model does not count its tokens.
    """
    good, seconds = run.good, run.seconds or 1e-9
    inputs = [record.input_tokens for record in good if record.input_tokens is not None]
    outputs = [record.output_tokens for record in good if record.output_tokens is not None]
    figures: dict[str, float] = {
        "requests_per_second": len(good) / seconds,
        "seconds": run.seconds,
        "requests": len(run.records),
        "failed": len(run.records) - len(good),
        **distribution("latency", [record.latency for record in good]),
    }
    if inputs:
        figures["input_tokens"] = fmean(inputs)
    if texts := sum(record.texts for record in good):
        figures["texts_per_second"] = texts / seconds
        if inputs:
            figures["input_tokens_per_second"] = sum(inputs) / seconds
    if outputs:
        figures["output_tokens"] = fmean(outputs)
        figures["output_tokens_per_second"] = sum(outputs) / seconds
    if load.stream and any(len(record.pieces) > 1 for record in good):
        token_times = [time for record in good if (time := record.token_time) is not None]
        figures |= distribution("ttft", [record.first_token for record in good])
        figures |= distribution("token_time", token_times)
        gaps = [b - a for record in good for a, b in pairwise(record.pieces)]
        figures |= {f"gap_p{share}": percentile(gaps, share / 100) for share in (50, 95)}
        figures["gap_max"] = max(gaps)
        if outputs:
            # A coarse stream has long gaps at any speed: what arrives at once explains them.
            counted = [record for record in good if record.output_tokens is not None]
            figures["chunk_tokens"] = sum(outputs) / sum(len(r.pieces) for r in counted)
    if load.limit_latency is not None or load.limit_ttft is not None:
        within = sum(load.within_limits(record.latency, record.first_token) for record in good)
        figures["goodput"] = within / seconds
        figures["within_limits"] = within / max(1, len(run.records))
    return figures


def server_figures(run: Run) -> list[tuple[Figure, float]]:
    """Return Triton's own figures, with times per request, and the gauges it publishes.

    Of an ensemble itself Triton knows only how long it took; its parts have the rest.
    """
    if run.server is None:
        return []
    # Our own count: an iterative model counts a request at each of its steps.
    sent = max(1, len(run.records))
    whole, *parts = run.server.models
    figures: list[tuple[Figure, float]] = []
    if parts:
        figures.append((Figure("server_success", "Server: total", "time"), whole.success / sent))
    for model in parts or [whole]:
        part = model.model.removeprefix(f"{whole.model}_")
        prefix = f"Server, {part}" if parts else "Server"
        for phase in ("queue", "compute_input", "compute_infer", "compute_output"):
            figure = Figure(f"server_{phase}", f"{prefix}: {phase.replace('_', ' ')}", "time")
            figures.append((figure, getattr(model, phase) / sent))
        rows = model.inferences / max(1, model.executions)
        figures.append((Figure("server_batch", f"{prefix}: rows per batch"), rows))
        executions = Figure("server_executions", f"{prefix}: executions")
        figures.append((executions, model.executions))
    for name, gauge in run.server.gauges.items():
        label, unit = MACHINE_GAUGES.get(name, (name, "number"))
        figures.append((Figure(f"{name}_mean", f"{label}, mean", unit), gauge.mean))
        figures.append((Figure(f"{name}_peak", f"{label}, peak", unit), gauge.peak))
    return figures


def throughput_figure(result: Result) -> Figure:
    """Return the figure for throughput: tokens if a model counts them, else texts or requests."""
    records = [record for run in result.runs for record in run.good]
    if any(record.texts for record in records):
        return FIGURES["texts_per_second"]
    counts = any(record.output_tokens is not None for record in records)
    return FIGURES["output_tokens_per_second" if counts else "requests_per_second"]


def rounds_of(case: Case) -> dict[Figure, list[float]]:
    rounds: dict[Figure, list[float]] = {}
    for run in case.runs:
        measured = [(FIGURES[name], value) for name, value in figures_of(run, case.load).items()]
        for figure, value in (*measured, *server_figures(run)):
            rounds.setdefault(figure, []).append(value)
    if not any(rounds.get(FIGURES["failed"], ())):
        rounds.pop(FIGURES["failed"], None)
    return rounds


@dataclass(frozen=True)
class Ratio:
    """A figure of a case divided by that of the first case under the same load.

    ``low`` and ``high`` are a 95 % confidence interval over rounds; that of a single round is
    unbounded.
    """

    figure: str
    load: str
    name: str
    against: str
    ratio: float
    low: float
    high: float | None


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of the ratios of all rounds, and its 95 % confidence interval.

    Rounds are the independent samples: requests of one round share what the machine did then, so
    hundreds of them tell less than they seem to. Logarithms, because twice and half are equally far
    from no change. A single round says nothing about the spread: its interval is unbounded.
    """
    logs = [log(ratio) for ratio in ratios]
    middle = fmean(logs)
    if len(logs) < 2:
        return exp(middle), 0.0, inf
    t = _T[min(len(logs) - 1, len(_T)) - 1]
    reach = t * stdev(logs) / sqrt(len(logs))
    return exp(middle), exp(middle - reach), exp(middle + reach)


def ratios_of(result: Result) -> list[Ratio]:
    ratios = []
    for load in result.loads:
        first, *others = [case for case in result.cases if case.load.label == load]
        for case in others:
            pairs = [
                (figures_of(run, case.load), figures_of(first_run, first.load))
                for run, first_run in zip(case.runs, first.runs, strict=False)
            ]
            for name in COMPARED:
                quotients = [a[name] / b[name] for a, b in pairs if a.get(name) and b.get(name)]
                if quotients and len(quotients) == len(pairs):
                    ratio, low, high = interval(quotients)
                    end = high if high < inf else None
                    ratios.append(Ratio(name, load, case.name, first.name, ratio, low, end))
    return ratios


@dataclass(frozen=True)
class Ranked:
    """A case in a sweep's ranking, with its throughput in each round."""

    name: str
    throughput: float
    rounds: tuple[float, ...]
    latency_p99: float
    within_limits: bool


def ranking(cases: Iterable[Case]) -> list[Ranked]:
    """Rank the cases that were completed, by throughput; those within the limits come first."""
    ranked = []
    for case in cases:
        good = [record for run in case.runs for record in run.good]
        if case.state != "done" or not good:
            continue
        p99 = percentile([record.latency for record in good], 0.99)
        ttft = percentile([record.first_token for record in good], 0.99)
        figures = [figures_of(run, case.load) for run in case.runs]
        rates = [_throughput(each) for each in figures]
        within = case.load.within_limits(p99, ttft)
        ranked.append(Ranked(case.name, fmean(rates), tuple(rates), p99, within))
    return sorted(ranked, key=lambda case: (not case.within_limits, -case.throughput))


def _throughput(figures: Mapping[str, float]) -> float:
    """Return tokens per second, or requests if the model does not count them, or texts."""
    names = ("texts_per_second", "output_tokens_per_second", "requests_per_second")
    return next(figures[name] for name in names if name in figures)


def summary(result: Result) -> dict[str, Any]:
    cases = [
        {
            "name": case.name,
            "load": case.load.label,
            "rounds": [figures_of(run, case.load) for run in case.runs],
            "errors": Counter(r.error for run in case.runs for r in run.records if r.error),
        }
        for case in result.cases
    ]
    ratios = ratios_of(result) if result.kind == "compare" else ()
    ranked = ranking(result.cases) if result.kind == "sweep" else ()
    return {
        "cases": cases,
        "ratios": [asdict(ratio) for ratio in ratios],
        "ranking": [asdict(place) for place in ranked],
    }
