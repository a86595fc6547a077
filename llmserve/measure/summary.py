"""The figures of a run, and what each of them means.

Failed requests count as requests, as errors and as under way, and in no time and no rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor

from llmserve.measure.runs import Record, Run


@dataclass(frozen=True)
class Spread:
    """A distribution in seconds; percentiles are interpolated between neighbours."""

    count: int
    mean: float
    minimum: float
    p50: float
    p90: float
    p99: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Describe values; None where there are none."""
        if not values:
            return None
        order = sorted(values)
        p50, p90, p99 = (percentile(order, share) for share in (0.5, 0.9, 0.99))
        mean = sum(order) / len(order)
        return cls(len(order), mean, order[0], p50, p90, p99, order[-1])


@dataclass(frozen=True)
class Summary:
    """The figures of one run.

    ``latency`` and ``ttft`` (time to first token) count from when a request should have been
    sent. ``ttft``, ``token_time`` and ``gap`` are None where answers came in one piece:
    they would only repeat the latency. ``token_time`` is the time between tokens, one mean per
    request: from its first piece to its last, over the tokens that came after the first piece,
    so that a piece of several tokens counts as several. ``gap`` is what a reader waits for
    the next piece, however much it brings. ``inflight`` is how many requests were under way on
    average, failed and unfinished ones too. ``goodput`` is requests a second that held the limits
    of the load, and ``within_limits`` their share of all requests; None without a limit. Token
    figures are None where the model does not count its tokens.
    """

    requests: int
    completed: int
    seconds: float
    requests_per_second: float
    output_tokens_per_second: float | None
    input_tokens: float | None
    output_tokens: float | None
    inflight: float
    latency: Spread | None
    ttft: Spread | None
    token_time: Spread | None
    gap: Spread | None
    goodput: float | None
    within_limits: float | None
    errors: Mapping[str, int] = field(default_factory=dict)


def summarize(run: Run) -> Summary:
    """Work out the figures of a run."""
    good = [record for record in run.records if record.error is None]
    seconds = run.seconds or 1e-9
    read = [record.input_tokens for record in good if record.input_tokens is not None]
    written = [record.output_tokens for record in good if record.output_tokens is not None]
    # One piece each means that nothing was streamed, whatever was asked for.
    streamed = run.load.stream and any(len(record.pieces) > 1 for record in good)
    held = [record for record in good if _holds(record, run)]
    limited = run.load.limit_latency is not None or run.load.limit_ttft is not None
    return Summary(
        requests=len(run.records),
        completed=len(good),
        seconds=run.seconds,
        requests_per_second=len(good) / seconds,
        output_tokens_per_second=sum(written) / seconds if written else None,
        input_tokens=sum(read) / len(read) if read else None,
        output_tokens=sum(written) / len(written) if written else None,
        inflight=_under_way(run) / seconds,
        latency=Spread.of([latency(record) for record in good]),
        ttft=Spread.of([first_token(record) for record in good]) if streamed else None,
        token_time=Spread.of(_token_times(good)) if streamed else None,
        gap=Spread.of(_gaps(good)) if streamed else None,
        goodput=len(held) / seconds if limited else None,
        within_limits=len(held) / max(1, len(run.records)) if limited else None,
        errors=dict(Counter(record.error for record in run.records if record.error is not None)),
    )


def latency(record: Record) -> float:
    """Say how long an answer took from when it should have been asked for."""
    return record.done - record.scheduled


def first_token(record: Record) -> float:
    """Say how long the first piece took; an answer without any text is done instead."""
    return (record.done if record.first is None else record.first) - record.scheduled


def token_time(record: Record) -> float | None:
    """Say how far apart an answer's tokens were; None where all came in one piece."""
    after = sum(record.tokens[1:])
    return (record.pieces[-1] - record.pieces[0]) / after if after > 0 else None


def percentile(order: Sequence[float], share: float) -> float:
    """Give a percentile of sorted values, interpolated.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.5
    """
    at = (len(order) - 1) * share
    low, high = order[floor(at)], order[ceil(at)]
    return low + (high - low) * (at - floor(at))


def _holds(record: Record, run: Run) -> bool:
    most, first = run.load.limit_latency, run.load.limit_ttft
    return (most is None or latency(record) <= most) and (
        first is None or first_token(record) <= first
    )


def _under_way(run: Run) -> float:
    return run.unfinished_seconds + sum(record.done - record.sent for record in run.records)


def _token_times(records: Sequence[Record]) -> list[float]:
    return [time for record in records if (time := token_time(record)) is not None]


def _gaps(records: Sequence[Record]) -> list[float]:
    return [
        later - earlier
        for record in records
        for earlier, later in zip(record.pieces, record.pieces[1:], strict=False)
    ]
