"""Whether two subjects differ, or only seem to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, stdev

from llmserve.measure.runs import Run
from llmserve.measure.series import Cell, Ratio
from llmserve.measure.summary import Summary, summarize

METRICS: Mapping[str, bool] = {
    "requests_per_second": True,
    "output_tokens_per_second": True,
    "goodput": True,
    "latency_mean": False,
    "latency_p50": False,
    "latency_p99": False,
    "ttft_mean": False,
    "ttft_p99": False,
    "token_time_mean": False,
}
"""What is held against each other, and whether more of it is better."""

_FEW = 3
_FAILED = 0.01
# Student's t for 95 %, by degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_T_MANY = 2.0


@dataclass(frozen=True)
class Interval:
    """A ratio and where it lies with 95 % confidence."""

    middle: float
    low: float
    high: float


def interval(ratios: Sequence[float]) -> Interval:
    """Say where a ratio lies, from one ratio per round.

    Rounds are what is independent here: requests of one round share the machine's mood, so that
    hundreds of them say less than they seem to. Logarithms, since twice and half are as far from
    the same. One round says nothing about the spread, so the interval is without end.

    >>> interval([2.0, 2.0, 2.0])
    Interval(middle=2.0, low=2.0, high=2.0)
    """
    logs = [log(ratio) for ratio in ratios]
    middle = exp(fmean(logs))
    if len(logs) < 2:
        return Interval(middle, 0.0, float("inf"))
    freedom = len(logs) - 1
    t = _T[freedom - 1] if freedom <= len(_T) else _T_MANY
    reach = t * stdev(logs) / sqrt(len(logs))
    # exp of the mean of equal logs is not always the same number again.
    return Interval(
        middle, min(middle, exp(fmean(logs) - reach)), max(middle, exp(fmean(logs) + reach))
    )


def ratios(cell: Cell, against: Cell) -> list[Ratio]:
    """Hold a subject against another under the same load, round by round."""
    pairs = list(zip(cell.runs, against.runs, strict=False))
    both = [(summarize(one), summarize(other)) for one, other in pairs]
    failed = max([_failed(run) for pair in pairs for run in pair], default=0.0)
    found = []
    for metric, more_is_better in METRICS.items():
        values = [(figure(one, metric), figure(other, metric)) for one, other in both]
        quotients = [a / b for a, b in values if a and b]
        if quotients and len(quotients) == len(values):
            found.append(_ratio(metric, more_is_better, cell, against, quotients, failed))
    return found


def figure(summary: Summary, metric: str) -> float | None:
    """Read a metric by its name, such as ``latency_p99``."""
    value = getattr(summary, metric, None)
    if value is None and "_" in metric:
        spread, _, part = metric.rpartition("_")
        value = getattr(getattr(summary, spread, None), part, None)
    return None if value is None else float(value)


def _failed(run: Run) -> float:
    return sum(record.error is not None for record in run.records) / max(1, len(run.records))


def _ratio(
    metric: str,
    more_is_better: bool,
    cell: Cell,
    against: Cell,
    quotients: Sequence[float],
    failed: float,
) -> Ratio:
    found = interval(quotients)
    verdict, why = _verdict(found, len(quotients), more_is_better, failed)
    return Ratio(
        metric, cell.load, cell.subject, against.subject,
        found.middle, found.low, found.high, verdict, why,
    )  # fmt: skip


def _verdict(found: Interval, rounds: int, more_is_better: bool, failed: float) -> tuple[str, str]:
    if failed > _FAILED:
        return "no difference", f"{failed:.0%} of the requests of a run failed"
    if rounds < _FEW:
        few = "1 round is" if rounds == 1 else f"{rounds} rounds are"
        return "no difference", f"{few} too few to know the spread"
    if found.low <= 1.0 <= found.high:
        return "no difference", (
            f"over {rounds} rounds it lay between {found.low:.2f} and {found.high:.2f}, "
            "which holds 1"
        )
    better = (found.middle > 1.0) == more_is_better
    return "better" if better else "worse", (
        f"over {rounds} rounds it lay between {found.low:.2f} and {found.high:.2f}"
    )
