"""The figures of a run by name, with what to call them and which way is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from llmserve.measure.runs import Run
from llmserve.measure.summary import Spread, Summary, summarize
from llmserve.report import words

_SPREADS = {
    "latency": "latency",
    "ttft": "time to first token",
    "token_time": "time between tokens",
    "gap": "wait for the next piece",
}
_POINTS = {
    "mean": "mean",
    "minimum": "shortest",
    "p50": "P50",
    "p90": "P90",
    "p99": "P99",
    "maximum": "longest",
}
_PLAIN = {
    "requests_per_second": ("requests per second", True),
    "output_tokens_per_second": ("output tokens per second", True),
    "goodput": ("requests per second within the limits", True),
    "within_limits": ("share of requests within the limits", True),
    "inflight": ("requests under way", None),
    "input_tokens": ("input tokens per request", None),
    "output_tokens": ("output tokens per request", None),
}
_SERVER = {"server_queue": "queue in the server", "server_compute_infer": "compute in the server"}


@dataclass(frozen=True)
class Metric:
    """One figure: ``more`` is whether more is better, None where neither is."""

    name: str
    label: str
    time: bool = False
    more: bool | None = None

    def of(self, summary: Summary) -> float | None:
        """Take it from a summary; None where the run has none."""
        whole, point = split(self.name)
        value = getattr(summary, whole, None)
        if isinstance(value, Spread) and point:
            value = getattr(value, point)
        return float(value) if isinstance(value, (int, float)) else None

    def show(self, value: float | None) -> str:
        """Write a value of it."""
        return words.seconds(value) if self.time else words.number(value)


def metric(name: str) -> Metric:
    """Give the metric of a name; one that is not known here is shown under its own name.

    >>> metric("latency_p99").label
    'P99 latency'
    """
    whole, point = split(name)
    if point:
        return Metric(name, f"{_POINTS[point]} {_SPREADS[whole]}", time=True, more=False)
    if name.startswith("server_"):
        return Metric(name, _SERVER.get(name, words.clean(name)), time=True, more=False)
    label, more = _PLAIN.get(name, (words.clean(name).replace("_", " "), None))
    return Metric(name, label, more=more)


def split(name: str) -> tuple[str, str]:
    """Part ``latency_p99`` into the spread and the point of it; others have no point."""
    whole, _, point = name.rpartition("_")
    return (whole, point) if whole in _SPREADS and point in _POINTS else (name, "")


@dataclass(frozen=True)
class Mean:
    """A metric over rounds: the mean of them, the least and the most."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean | None:
        """Describe rounds; None where there are none."""
        if not values:
            return None
        return cls(fmean(values), min(values), max(values))

    def show(self, write: Callable[[float], str]) -> str:
        """Write the mean, and the range where there is one.

        >>> Mean.of([2.0, 1.0, 3.0]).show(str)
        '2.0 (1.0 to 3.0)'
        """
        if self.low == self.high:
            return write(self.value)
        return f"{write(self.value)} ({write(self.low)} to {write(self.high)})"


def rounds(runs: Sequence[Run], name: str) -> Mean | None:
    """Give a metric over the runs that have it."""
    wanted = metric(name)
    found = [wanted.of(summarize(run)) for run in runs]
    return Mean.of([value for value in found if value is not None])


def pooled(runs: Sequence[Run]) -> Summary | None:
    """Summarize all runs as one: their requests together, over their windows together."""
    if not runs:
        return None
    records = tuple(record for run in runs for record in run.records)
    length = sum(run.seconds for run in runs)
    cut = sum(run.unfinished_seconds for run in runs)
    return summarize(replace(runs[0], records=records, seconds=length, unfinished_seconds=cut))


def throughput(runs: Sequence[Run]) -> str:
    """Name what to measure throughput in: tokens where all count them, else requests."""
    tokens = all(summarize(run).output_tokens_per_second is not None for run in runs)
    return "output_tokens_per_second" if runs and tokens else "requests_per_second"
