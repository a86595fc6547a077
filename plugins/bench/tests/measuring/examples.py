"""Synthetic results for the tests."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

from llmserve_bench.results import (
    Case,
    Gauge,
    GeneratorCost,
    Load,
    ModelFigures,
    Record,
    Result,
    Run,
    ServerFigures,
    Subject,
)

MACHINE = {"cores": "2", "python": "3.11.2", "llmserve": "0.1.0"}
STARTED = "2026-01-02T03:04:05+00:00"


def make_run(
    batching: str, *, concurrency: int = 16, requests: int = 98, seed: int = 0, slots: int = 8,
    stream: bool = True, failing: int = 0, stand_in: bool = False,
) -> Run:  # fmt: skip
    """Simulate a run: one request after the other in each slot; ``static`` is slower."""
    draw = random.Random(f"{seed} {requests}")
    free = [0.0] * slots
    step = 0.03 if batching == "static" else 0.02
    records = []
    for at in range(requests):
        begin = free[0]
        tokens = max(4, int(draw.gauss(40, 18)))
        steps = [round(begin + step * (n + 1) + draw.random() * 0.001, 6) for n in range(tokens)]
        heapq.heapreplace(free, steps[-1])
        pieces = tuple(steps) if stream else (steps[-1],)
        counts = (1,) * tokens if stream else (tokens,)
        record = Record(at, begin, begin, steps[-1], pieces, counts, 12, tokens, "length")
        if at < failing:
            message = "prompt <b>too long</b> | `max_tokens` & *more*"
            record = Record(at, begin, begin, steps[-1], error="rejected", message=message)
        records.append(record)
    whole = sum(record.done - record.scheduled for record in records)
    model = ModelFigures(batching, requests, requests, requests, whole, 1.0, 0.1, whole - 1.2, 0.1)
    stand_ins = {batching: "TensorRT-LLM"} if stand_in else {}
    server = ServerFigures((model,), {"nv_gpu_utilization": Gauge(0.5, 0.9)}, stand_ins)
    cost = GeneratorCost(1, 0.21, 0.04, 0.0009)
    return Run(max(free), tuple(records), server, cost)


def make_case(
    batching: str, *, name: str = "", concurrency: int = 16, rounds: int = 1,
    limit: float | None = None, state: str = "done", varied: dict[str, str] | None = None,
    **run_options: object,
) -> Case:  # fmt: skip
    build = {"plugin": "iterative", "model": "demo", "batching": batching}
    subject = Subject(name or batching, "demo", "127.0.0.1:8001", build, "a Triton 2.51.0")
    load = Load(concurrency=concurrency, requests=98, stream=True, prompts="synthetic, 32 tokens")
    runs = [
        make_run(batching, concurrency=concurrency, seed=seed, **run_options)  # type: ignore[arg-type]
        for seed in range(rounds)
    ]
    return Case(subject, replace(load, limit_latency=limit), tuple(runs), varied or {}, state)


def make_result(kind: str, cases: list[Case], rounds: int = 1, title: str = "") -> Result:
    return Result(kind, title or kind, STARTED, rounds, MACHINE, tuple(cases))  # type: ignore[arg-type]


def make_comparison(
    loads: tuple[int, ...] = (16,), *, rounds: int = 3,
    names: tuple[str, str] = ("static", "inflight"), same: bool = False, **options: object,
) -> Result:  # fmt: skip
    """Compare the two kinds of batching; with ``same``, both cases have the same distribution."""
    kinds = ("static", "static" if same else "iterative")
    cases = [
        make_case(kind, name=name, concurrency=load, rounds=rounds, **options)  # type: ignore[arg-type]
        for load in loads
        for kind, name in zip(kinds, names, strict=True)
    ]
    if same:
        # The same rounds, in reverse order.
        cases[1] = replace(cases[1], runs=cases[1].runs[::-1])
    return make_result("compare", cases, rounds, title="static against in-flight")


def make_sweep(limit: float | None = 2.5) -> Result:
    cases = []
    for kind in ("iterative", "static"):
        for slots in (2, 8):
            varied = {"batching": kind, "max_batch_size": str(slots)}
            cases.append(make_case(kind, rounds=2, slots=slots, varied=varied, limit=limit))
    cases[-1] = replace(cases[-1], state="failed", why="no memory", runs=())
    return make_result("sweep", cases, rounds=2)
