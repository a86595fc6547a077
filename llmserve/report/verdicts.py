"""What the ratios of a comparison say in words, with the spread that they have."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from llmserve.measure.series import Comparison, Ratio
from llmserve.report.metrics import metric, split
from llmserve.report.words import clean, counted, factor, listed, times

FIRST = (
    ("requests_per_second",), ("output_tokens_per_second",), ("goodput",),
    ("ttft_p50", "ttft_mean"), ("token_time_p50", "token_time_mean"),
    ("latency_p50", "latency_mean"), ("latency_p99",),
)  # fmt: skip
"""What is told in words, in this order, the first of each that there is; a table has the rest."""

_EVEN = "no difference"
_VERBS = {
    "requests_per_second": "served",
    "output_tokens_per_second": "wrote",
    "latency": "needed",
    "ttft": "needed",
    "token_time": "needed",
}


def findings(comparison: Comparison, main: str) -> list[str]:
    """Give a sentence for each subject and figure; ``main`` is the load that comes first."""
    against = comparison.subjects[0].name
    found = []
    for subject in comparison.subjects[1:]:
        known = {
            (row.metric, row.load): row
            for row in comparison.ratios
            if (row.subject, row.against) == (subject.name, against)
        }
        for names in FIRST:
            name = next((name for name in names if (name, main) in known), None)
            if name is None or (name == "output_tokens_per_second" and _repeats(known)):
                continue
            loads = [load for load in comparison.loads if (name, load) in known and load != main]
            others = [known[name, load] for load in loads]
            found.append(sentence(known[name, main], others, comparison.rounds))
    return found


def sentence(row: Ratio, others: Sequence[Ratio], rounds: int) -> str:
    """Tell a ratio under the load that matters most, then what becomes of it under others."""
    subject, against, by = clean(row.subject), clean(row.against), times(row.ratio)
    label = metric(row.metric).label
    where = f" at {clean(row.load)}" if others else ""
    if row.verdict == _EVEN:
        within = isfinite(row.high) and row.low <= 1 <= row.high
        told = "is within the spread" if within else "cannot be told from chance"
        start = (
            f"{label[:1].upper()}{label[1:]}{where}: the difference between {subject} and "
            f"{against} {told} ({by}; {clean(row.why)})"
        )
    else:
        verb = _VERBS.get(split(row.metric)[0], "had")
        spread = f"{factor(row.low)} to {factor(row.high)} over {counted(rounds, 'round')}"
        did = f"{subject} {verb} {by} the {label} of {against}{where}"
        start = f"{did}, which is {clean(row.verdict)} ({spread})"
    return "; ".join([start, *_elsewhere(others)]) + "."


def _elsewhere(rows: Sequence[Ratio]) -> list[str]:
    found = []
    for verdict in ("better", "worse"):
        some = [row for row in rows if row.verdict == verdict]
        if some:
            low, high = (times(pick(row.ratio for row in some)) for pick in (min, max))
            by = low if low == high else f"{low} to {high}"
            found.append(f"{verdict} at {_loads(some)} ({by})")
    even = [row for row in rows if row.verdict == _EVEN]
    return [*found, f"no telling them apart at {_loads(even)}"] if even else found


def _loads(rows: Sequence[Ratio]) -> str:
    """Name loads without saying ``concurrency`` each time."""
    kind, _, first = clean(rows[0].load).partition(" ")
    names = [clean(row.load).removeprefix(f"{kind} ") for row in rows]
    return f"{kind} {listed([first, *names[1:]])}"


def _repeats(known: dict[tuple[str, str], Ratio]) -> bool:
    """Say whether tokens only say again what requests have said: all answers were as long."""
    pairs = [
        (row, known.get(("requests_per_second", load)))
        for (name, load), row in known.items()
        if name == "output_tokens_per_second"
    ]
    return all(
        other is not None
        and (row.verdict, f"{row.ratio:.1f}") == (other.verdict, f"{other.ratio:.1f}")
        for row, other in pairs
    )
