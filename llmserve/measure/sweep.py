"""Many variants of one model, each built, served, measured and torn down: ``llmserve sweep``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

from llmserve.client.model import ModelInfo
from llmserve.errors import ConfigError, LLMServeError, ServerError
from llmserve.measure.bench import OnProgress, Target, ignore, run_load
from llmserve.measure.codec import encode
from llmserve.measure.grid import make_variants
from llmserve.measure.plan import Prompts, plan_requests
from llmserve.measure.ranking import rank, stop_losers, with_figures
from llmserve.measure.results import load, save
from llmserve.measure.runs import Load, Run
from llmserve.measure.series import Sweep, Variant
from llmserve.measure.subjects import Built, serving

MakeLoad = Callable[[int | None, float | None, ModelInfo], Load]
"""Makes the load of a variant, of its concurrency or its rate."""


def _silent(message: str) -> None:
    del message


@dataclass(frozen=True)
class Sweeping:
    """What is swept, and how. ``settings`` is what a resumed sweep must have in common."""

    plugin: str
    model: str
    varied: Mapping[str, Sequence[str]]
    common: Mapping[str, Any]
    prompts: Prompts
    make_load: MakeLoad
    rounds: int
    limit_latency: float | None = None
    limit_ttft: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    report: Callable[[str], None] = _silent
    progress: OnProgress = ignore


def sweep(asked: Sweeping, state: Path) -> Sweep:
    """Run a sweep, or go on with one that was interrupted; the state is written after each run.

    Every round goes through all variants that still can win, so that what drifts on the machine
    meets all alike, and the first look at all of them comes early.
    """
    found = _begin(asked, state)
    if not any(variant.state == "waiting" for variant in found.variants):
        asked.report(f"{state} has it all already; without that file it is measured again")
    try:
        for turn in range(asked.rounds):
            for build, variants in _builds(found, turn):
                found = _measure_build(asked, found, build, variants, turn, state)
            found = replace(found, variants=tuple(_after_round(asked, found, turn)))
            save(found, state)
    except KeyboardInterrupt:
        found = replace(found, interrupted=True)
    found = replace(found, ranking=rank(found.variants))
    save(found, state)
    return found


def _begin(asked: Sweeping, state: Path) -> Sweep:
    fresh = Sweep(
        title=f"{asked.plugin} of {asked.model}",
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        plugin=asked.plugin,
        model=asked.model,
        varied={key: tuple(values) for key, values in asked.varied.items()},
        variants=tuple(make_variants(asked.varied)),
        ranking=(),
        rounds=asked.rounds,
        limit_latency=asked.limit_latency,
        limit_ttft=asked.limit_ttft,
        settings=encode(asked.settings),
    )
    if not state.exists():
        return fresh
    found = load(state)
    if not isinstance(found, Sweep) or _identity(found) != _identity(fresh):
        raise ConfigError(f"{state} is of another sweep", mend="give another --state, or delete it")
    return replace(found, interrupted=False)


def _identity(found: Sweep) -> list[Any]:
    settings = {key: value for key, value in found.settings.items() if value is not None}
    return [found.plugin, found.model, encode(found.varied), found.rounds, found.limit_latency,
            found.limit_ttft, settings]  # fmt: skip


def _builds(found: Sweep, turn: int) -> list[tuple[dict[str, Any], list[str]]]:
    """Name the variants that lack a run of this round, by what has to be built for them."""
    lacking = [v for v in found.variants if v.state == "waiting" and len(v.runs) <= turn]
    return [
        (dict(key), [variant.name for variant in group])
        for key, group in groupby(lacking, key=lambda variant: tuple(variant.build.items()))
    ]


def _measure_build(
    asked: Sweeping,
    found: Sweep,
    build: Mapping[str, Any],
    names: list[str],
    turn: int,
    state: Path,
) -> Sweep:
    label = " ".join(f"{key}={value}" for key, value in build.items()) or asked.plugin
    built = Built(label, asked.plugin, {**asked.common, **build})
    try:
        with serving([built], asked.model, report=asked.report) as targets:
            info = targets[0].info()
            for name in names:
                asked.report(f"round {turn + 1} of {asked.rounds}: {name}")
                variant = _variant(found, name)
                run = _run(asked, targets[0], info, variant, turn)
                found = _with(found, replace(variant, runs=(*variant.runs, run)))
                save(found, state)
    except LLMServeError as error:
        why = str(error)
        for name in names:
            variant = _variant(found, name)
            if len(variant.runs) <= turn:
                found = _with(found, replace(variant, state="failed", why=why))
        save(found, state)
    return found


def _run(asked: Sweeping, target: Target, info: ModelInfo, variant: Variant, turn: int) -> Run:
    concurrency, rate = variant.load.get("concurrency"), variant.load.get("rate")
    counter = target.counter()
    load = asked.make_load(
        None if concurrency is None else int(concurrency),
        None if rate is None else float(rate),
        info,
    )
    load = replace(load, seed=load.seed + turn, dataset=asked.prompts.describe(counter))
    asks = plan_requests(load, asked.prompts, counter, ours=info.made_by_llmserve is not None)
    run = run_load(target, info, load, asks, counter, on_progress=asked.progress)
    if run.interrupted:
        raise KeyboardInterrupt
    if run.ended_early is not None:
        raise ServerError(f"the server was gone while it was measured: {run.ended_early}")
    return run


def _after_round(asked: Sweeping, found: Sweep, turn: int) -> list[Variant]:
    limits = (asked.limit_latency, asked.limit_ttft)
    variants = []
    for variant in found.variants:
        variant = with_figures(variant, *limits)
        if variant.runs and variant.throughput is None and variant.state == "waiting":
            variant = replace(variant, state="failed", why=_first_message(variant))
        variants.append(variant)
    if turn + 1 < asked.rounds:
        return stop_losers(variants, *limits)
    return [
        replace(variant, state="done") if variant.state == "waiting" else variant
        for variant in variants
    ]


def _first_message(variant: Variant) -> str:
    messages = (record.message for run in variant.runs for record in run.records)
    return f"every request failed: {next((m for m in messages if m), 'no reason given')}"


def _variant(found: Sweep, name: str) -> Variant:
    return next(variant for variant in found.variants if variant.name == name)


def _with(found: Sweep, changed: Variant) -> Sweep:
    variants = tuple(changed if v.name == changed.name else v for v in found.variants)
    return replace(found, variants=variants)
