"""The figures of a run, by name, and what compares and ranks them.

A failed request counts as a request and as an error, and in no time and no rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import exp, floor, inf, log, log10, sqrt
from statistics import fmean, stdev
from typing import Any

import numpy as np

from llmserve_bench.results import Case, Load, Result, Run

_UNITS = {"time": ("ms", 1e3), "seconds": ("s", 1.0), "share": ("%", 1e2), "memory": ("GB", 1e-9)}
"""How a unit is written, and the factor to that; other figures are plain numbers."""


@dataclass(frozen=True)
class Figure:
    """What a figure is called and measured in."""

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
        Figure("output_tokens_per_second", "Output tokens/s"),
        *(
            Figure(f"{name}_{part}", f"{word} {label}", "time")
            for name, label in _TIMES.items()
            for part, word in _PARTS.items()
        ),
        Figure("gap_max", "Longest gap in an answer", "time"),
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
    "requests_per_second", "output_tokens_per_second", "goodput", "latency_mean", "latency_p50",
    "latency_p99", "ttft_mean", "ttft_p50", "ttft_p99", "token_time_mean",
)  # fmt: skip
MACHINE_GAUGES = {
    "nv_gpu_utilization": ("GPU utilization", "share"),
    "nv_gpu_memory_used_bytes": ("GPU memory", "memory"),
    "nv_gpu_power_usage": ("GPU power (W)", "number"),
    "nv_cpu_utilization": ("CPU utilization", "share"),
    "nv_cpu_memory_used_bytes": ("CPU memory", "memory"),
}
"""What Triton publishes of the machine; its statistics tell the rest of its metrics better."""
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t for 95 %, by degrees of freedom; the standard library has no quantile of it."""


def number(value: float) -> str:
    """Write a number with three digits that count; whole ones keep all of theirs."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{min(6, 2 - floor(log10(abs(value))))}f}"


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share))


def distribution(name: str, values: Sequence[float]) -> dict[str, float]:
    """Give the mean and percentiles of values as figures; none where there are no values."""
    if not values:
        return {}
    parts = {f"{name}_p{share}": percentile(values, share / 100) for share in (50, 90, 99)}
    return {f"{name}_mean": fmean(values), **parts}


def figures_of(run: Run, load: Load) -> dict[str, float]:
    """Work out the figures of a run by the names of :data:`FIGURES`; seconds where they are times.

    Time to first token and between tokens are left out where answers came in one piece: they
    would only repeat the latency. Token figures are left out where the model does not count.
    """
    good, seconds = run.good, run.seconds or 1e-9
    read = [record.input_tokens for record in good if record.input_tokens is not None]
    written = [record.output_tokens for record in good if record.output_tokens is not None]
    found: dict[str, float] = {
        "requests_per_second": len(good) / seconds,
        "seconds": run.seconds,
        "requests": len(run.records),
        "failed": len(run.records) - len(good),
        **distribution("latency", [record.latency for record in good]),
    }
    if read:
        found["input_tokens"] = fmean(read)
    if written:
        found["output_tokens"] = fmean(written)
        found["output_tokens_per_second"] = sum(written) / seconds
    if load.stream and any(len(record.pieces) > 1 for record in good):
        between = [time for record in good if (time := record.token_time) is not None]
        found |= distribution("ttft", [record.first_token for record in good])
        found |= distribution("token_time", between)
        found["gap_max"] = max(b - a for record in good for a, b in pairwise(record.pieces))
    if load.limit_latency is not None or load.limit_ttft is not None:
        within = sum(load.holds(record.latency, record.first_token) for record in good)
        found["goodput"] = within / seconds
        found["within_limits"] = within / max(1, len(run.records))
    return found


def server_figures(run: Run) -> list[tuple[Figure, float]]:
    """Give Triton's own figures, per request where they are times, and the gauges it publishes.

    Triton knows of an ensemble only how long it took; its parts have the rest.
    """
    if run.server is None:
        return []
    # By our own count: an iterative model counts a request at each of its steps.
    sent = max(1, len(run.records))
    whole, *parts = run.server.models
    found: list[tuple[Figure, float]] = []
    if parts:
        found.append((Figure("server_success", "Server: whole", "time"), whole.success / sent))
    for model in parts or [whole]:
        part = model.model.removeprefix(f"{whole.model}_")
        where = f"Server, {part}" if parts else "Server"
        for what in ("queue", "compute_input", "compute_infer", "compute_output"):
            figure = Figure(f"server_{what}", f"{where}: {what.replace('_', ' ')}", "time")
            found.append((figure, getattr(model, what) / sent))
        rows = model.inferences / max(1, model.executions)
        found.append((Figure("server_batch", f"{where}: rows per batch"), rows))
        executions = Figure("server_executions", f"{where}: executions")
        found.append((executions, model.executions))
    for name, gauge in run.server.gauges.items():
        label, unit = MACHINE_GAUGES.get(name, (name, "number"))
        found.append((Figure(f"{name}_mean", f"{label}, mean", unit), gauge.mean))
        found.append((Figure(f"{name}_peak", f"{label}, peak", unit), gauge.peak))
    return found


def throughput_figure(result: Result) -> Figure:
    """Give the figure that stands for throughput: tokens where a model counts them."""
    counted = any(one.output_tokens is not None for run in result.runs for one in run.good)
    return FIGURES["output_tokens_per_second" if counted else "requests_per_second"]


def rounds_of(case: Case) -> dict[Figure, list[float]]:
    found: dict[Figure, list[float]] = {}
    for run in case.runs:
        own = [(FIGURES[name], value) for name, value in figures_of(run, case.load).items()]
        for figure, value in (*own, *server_figures(run)):
            found.setdefault(figure, []).append(value)
    if not any(found.get(FIGURES["failed"], ())):
        found.pop(FIGURES["failed"], None)
    return found


@dataclass(frozen=True)
class Ratio:
    """A figure of a case divided by that of the first one under the same load.

    ``low`` and ``high`` are a 95 % confidence interval over rounds; that of a single round
    has no end.
    """

    figure: str
    load: str
    name: str
    against: str
    ratio: float
    low: float
    high: float | None


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Give the mean of ratios, one for each round, and where it lies with 95 % confidence.

    Rounds are what is independent here: requests of one round share what the machine did then, so
    hundreds of them say less than they seem to. Logarithms, because twice and half are as far from
    the same. A single round says nothing of the spread, and its interval has no end.
    """
    logs = [log(ratio) for ratio in ratios]
    middle = fmean(logs)
    if len(logs) < 2:
        return exp(middle), 0.0, inf
    t = _T[min(len(logs) - 1, len(_T)) - 1]
    reach = t * stdev(logs) / sqrt(len(logs))
    return exp(middle), exp(middle - reach), exp(middle + reach)


def ratios_of(result: Result) -> list[Ratio]:
    found = []
    for load in result.loads:
        first, *others = [case for case in result.cases if case.load.label == load]
        for case in others:
            pairs = [
                (figures_of(one, case.load), figures_of(two, first.load))
                for one, two in zip(case.runs, first.runs, strict=False)
            ]
            for name in COMPARED:
                quotients = [a[name] / b[name] for a, b in pairs if a.get(name) and b.get(name)]
                if quotients and len(quotients) == len(pairs):
                    ratio, low, high = interval(quotients)
                    end = high if high < inf else None
                    found.append(Ratio(name, load, case.name, first.name, ratio, low, end))
    return found


@dataclass(frozen=True)
class Ranked:
    """A case in a sweep's ranking, with its throughput in each round."""

    name: str
    throughput: float
    rounds: tuple[float, ...]
    latency_p99: float
    within_limits: bool


def ranking(cases: Iterable[Case]) -> list[Ranked]:
    """Rank what was measured to the end: within the limits by throughput, then the others."""
    order = []
    for case in cases:
        good = [record for run in case.runs for record in run.good]
        if case.state != "done" or not good:
            continue
        p99 = percentile([record.latency for record in good], 0.99)
        ttft = percentile([record.first_token for record in good], 0.99)
        figures = [figures_of(run, case.load) for run in case.runs]
        # Requests where the model does not count its tokens.
        rates = [f.get("output_tokens_per_second", f["requests_per_second"]) for f in figures]
        holds = case.load.holds(p99, ttft)
        order.append(Ranked(case.name, fmean(rates), tuple(rates), p99, holds))
    return sorted(order, key=lambda one: (not one.within_limits, -one.throughput))


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
