"""Which variant of a sweep is best, and which cannot be any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from llmserve.measure.runs import Run
from llmserve.measure.series import Variant
from llmserve.measure.summary import Spread, first_token, latency, summarize

SLACK = (0.35, 0.2)
"""By how much less than the best a variant may do and still go on, after one round and after
more: a first impression is rough, and one of several rounds less so."""
OVER = 1.5
"""How far over its limit a latency is beyond all hope."""


def with_figures(
    variant: Variant, limit_latency: float | None, limit_ttft: float | None
) -> Variant:
    """Work out what a variant is ranked by, over all its runs."""
    good = [record for run in variant.runs for record in run.records if record.error is None]
    spread = Spread.of([latency(record) for record in good])
    if spread is None:
        return variant
    ttft = Spread.of([first_token(record) for record in good])
    held = (limit_latency is None or spread.p99 <= limit_latency) and (
        limit_ttft is None or ttft is None or ttft.p99 <= limit_ttft
    )
    throughput = fmean(_throughput(run) for run in variant.runs)
    return replace(variant, throughput=throughput, latency=spread.p99, within=held)


def stop_losers(
    variants: Sequence[Variant], limit_latency: float | None, limit_ttft: float | None
) -> list[Variant]:
    """Stop those that cannot win: far slower than the best that holds the limit, or far over it.

    Where none holds the limit, only what is far over it goes, and never all of them.
    """
    holding = [v.throughput for v in variants if v.within and v.throughput is not None]
    best = max(holding, default=None)
    judged = [_judge(variant, best, limit_latency, limit_ttft) for variant in variants]
    if any(variant.state == "waiting" for variant in judged) or best is not None:
        return judged
    # All are far over the limit: the nearest to it is still worth knowing well.
    waiting = [v for v in variants if v.state == "waiting" and v.latency is not None]
    nearest = min(waiting, key=lambda v: v.latency or 0.0, default=None)
    return [
        variant if nearest is not None and variant.name == nearest.name else verdict
        for variant, verdict in zip(variants, judged, strict=True)
    ]


def rank(variants: Sequence[Variant]) -> tuple[str, ...]:
    """Name what was measured to the end: within the limit by throughput, then the others."""
    done = [variant for variant in variants if variant.state == "done"]
    order = sorted(done, key=lambda v: (not v.within, -(v.throughput or 0.0)))
    return tuple(variant.name for variant in order)


def _judge(
    variant: Variant, best: float | None, limit_latency: float | None, limit_ttft: float | None
) -> Variant:
    if variant.state != "waiting" or variant.throughput is None:
        return variant
    slack = SLACK[min(len(variant.runs), len(SLACK)) - 1]
    if best is not None and variant.throughput < best * (1 - slack):
        why = f"{variant.throughput:.1f} tokens/s, where another within the limit made {best:.1f}"
        return replace(variant, state="stopped", why=why)
    for name, found, limit in (
        ("latency", variant.latency, limit_latency),
        ("time to first token", _ttft(variant), limit_ttft),
    ):
        if limit is not None and found is not None and found > limit * OVER:
            why = f"P99 {name} {found * 1000:.0f} ms, the limit is {limit * 1000:.0f} ms"
            return replace(variant, state="stopped", why=why)
    return variant


def _ttft(variant: Variant) -> float | None:
    good = [record for run in variant.runs for record in run.records if record.error is None]
    spread = Spread.of([first_token(record) for record in good])
    return None if spread is None else spread.p99


def _throughput(run: Run) -> float:
    found = summarize(run)
    tokens = found.output_tokens_per_second
    return found.requests_per_second if tokens is None else tokens
