"""Results as measurements give them, of a small simulated server: for the tests of reports."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

from llmserve.measure.results import (
    Cell,
    Comparison,
    Load,
    LoaderCost,
    ModelFigures,
    Ratio,
    Record,
    Run,
    ServerFigures,
    Subject,
    Sweep,
    ToolFigures,
    Variant,
)
from llmserve.measure.summary import summarize

MACHINE = {"cores": "2", "architecture": "x86_64", "system": "Linux", "python": "3.11.2"}
STARTED = "2026-01-02T03:04:05+00:00"


def make_run(
    batching: str, *, concurrency: int = 16, requests: int = 98, seed: int = 0, slots: int = 8,
    name: str | None = None, stream: bool = True, failing: int = 0,
) -> Run:  # fmt: skip
    """Serve requests on paper: a step takes longer the more take part; ``static`` lets nobody in
    until all of a batch are done."""
    draw = random.Random(f"{seed} {requests}")
    lengths = [max(4, int(draw.gauss(40, 18))) for _ in range(requests)]
    now = 0.0
    waiting: list[int] = []
    live: dict[int, int] = {}
    due = [(0.0, at) for at in range(min(concurrency, requests))]
    heapq.heapify(due)
    begun: dict[int, list[float]] = {}
    scheduled: dict[int, float] = {}
    ended: dict[int, float] = {}
    following = len(due)
    batches: dict[str, int] = {}
    while len(ended) < requests:
        while due and due[0][0] <= now:
            when, at = heapq.heappop(due)
            scheduled[at] = when
            waiting.append(at)
        if not live or batching != "static":
            while waiting and len(live) < slots:
                at = waiting.pop(0)
                live[at] = lengths[at]
                begun[at] = []
        if not live:
            now = due[0][0]
            continue
        now += 0.010 + 0.0012 * len(live) + draw.random() * 0.001
        batches[str(len(live))] = batches.get(str(len(live)), 0) + 1
        for at in list(live):
            begun[at].append(round(now, 6))
            live[at] -= 1
            if not live[at]:
                del live[at]
                ended[at] = now
                if following < requests:
                    heapq.heappush(due, (now, following))
                    following += 1
    records = []
    for at in range(requests):
        pieces = tuple(begun[at]) if stream else (begun[at][-1],)
        tokens = (1,) * len(pieces) if stream else (lengths[at],)
        record = Record(
            at, scheduled[at], scheduled[at] + 0.0002, pieces[0], round(ended[at], 6), 12,
            lengths[at], pieces, tokens, "length",
        )  # fmt: skip
        if at < failing:
            record = replace(
                record, first=None, pieces=(), tokens=(), output_tokens=None, finish_reason=None,
                error="rejected", message="prompt <b>too long</b> | `max_tokens` & *more*",
            )  # fmt: skip
        records.append(record)
    queue = sum(begun[at][0] - scheduled[at] for at in range(requests))
    whole = sum(ended[at] - scheduled[at] for at in range(requests))
    steps = sum(batches.values())
    rows = sum(int(size) * many for size, many in batches.items())
    figures = ModelFigures(
        name or batching, requests, failing, rows, steps, whole, queue, 0.002 * requests,
        whole - queue - 0.003 * requests, 0.001 * requests, batches,
    )  # fmt: skip
    build = {"plugin": "iterative", "model": "demo", "batching": batching, "max_batch_size": slots}
    return Run(
        Subject(name or batching, "demo", "127.0.0.1:8001", "stream", build, "a Triton 2.51.0"),
        Load(concurrency, None, None, requests, None, 8, stream, seed, "made up, 32 ± 4 tokens",
             {"max_tokens": 40}),
        STARTED, max(ended.values()), tuple(records),
        ServerFigures((figures,), {"llmserve_output_tokens_total": float(sum(lengths))}),
        LoaderCost(1, 0.21, 0.04, 0.0009), machine=MACHINE,
    )  # fmt: skip


def make_comparison(
    loads: tuple[int, ...] = (16,), rounds: int = 3, requests: int = 98,
    names: tuple[str, ...] = ("static", "inflight"),
) -> Comparison:  # fmt: skip
    """Compare the two; the ratios are of the medians, with the range of the rounds about them."""
    runs = {
        (name, load): tuple(
            make_run("static" if at == 0 else "iterative", concurrency=load, requests=requests,
                     seed=seed, name=name)
            for seed in range(rounds)
        )
        for at, name in enumerate(names)
        for load in loads
    }  # fmt: skip
    cells = tuple(Cell(name, f"concurrency {load}", part) for (name, load), part in runs.items())
    ratios = [
        _ratio(metric, load, names[0], name, runs)
        for name in names[1:]
        for load in loads
        for metric in (
            "requests_per_second", "output_tokens_per_second", "ttft_p50", "latency_p50",
            "latency_p99",
        )
    ]  # fmt: skip
    return Comparison(
        "static against in-flight", STARTED,
        tuple(runs[name, loads[0]][0].subject for name in names),
        tuple(f"concurrency {load}" for load in loads), rounds, cells, tuple(ratios),
    )  # fmt: skip


def make_sweep(limit: float | None = 2.5) -> Sweep:
    """Sweep over batching, slots and concurrency; one variant stopped, one failed."""
    variants = []
    for batching in ("iterative", "static"):
        for slots in (2, 4, 8):
            for concurrency in (4, 16):
                name = f"batching {batching}, max_batch_size {slots}, concurrency {concurrency}"
                build = {"batching": batching, "max_batch_size": slots}
                if batching == "static" and slots == 2:
                    state, why = (
                        ("stopped", "at most 80 tokens/s")
                        if concurrency == 4
                        else ("failed", "no memory")
                    )
                    variants.append(Variant(name, build, {"concurrency": concurrency}, state, why))
                    continue
                run = make_run(
                    batching, concurrency=concurrency, slots=slots, requests=40, name=name
                )
                summary = summarize(run)
                assert summary.latency
                variants.append(
                    Variant(
                        name, build, {"concurrency": concurrency}, "done", "", (run,),
                        summary.output_tokens_per_second, summary.latency.p99,
                        None if limit is None else summary.latency.p99 <= limit,
                    )
                )  # fmt: skip
    done = [variant for variant in variants if variant.state == "done"]
    done.sort(key=lambda variant: (variant.within is False, -(variant.throughput or 0)))
    return Sweep(
        "demo, 12 variants", STARTED, "iterative", "demo",
        {"batching": ("iterative", "static"), "max_batch_size": (2, 4, 8), "concurrency": (4, 16)},
        tuple(variants), tuple(variant.name for variant in done), 1, limit,
    )  # fmt: skip


def with_tools(run: Run) -> Run:
    """Add what another tool measured."""
    figures = {"requests_per_second": 9.1, "latency_mean": 1.4, "latency_p99": 2.5}
    return replace(
        run, tools=(ToolFigures("perf-analyzer", "2.51", "perf_analyzer -m demo", figures),)
    )


def _ratio(
    metric: str, load: int, against: str, name: str, runs: dict[tuple[str, int], tuple[Run, ...]]
) -> Ratio:
    from llmserve.report.metrics import rounds

    one, other = rounds(runs[name, load], metric), rounds(runs[against, load], metric)
    assert one
    assert other
    low, high = one.low / other.high, one.high / other.low
    less = metric.startswith(("ttft", "latency"))
    verdict = "no difference" if low <= 1 <= high else "better" if (high < 1) == less else "worse"
    return Ratio(
        metric, f"concurrency {load}", name, against, one.value / other.value, low, high, verdict,
        "it lay on both sides of 1" if verdict == "no difference" else "it lay on one side of 1",
    )  # fmt: skip
