"""Several subjects under the same loads, in turns: what ``llmserve compare`` does."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from llmserve.client.model import ModelInfo
from llmserve.errors import LLMServeError
from llmserve.measure.bench import Asks, OnProgress, Target, ignore, run_load, subject_of
from llmserve.measure.confidence import ratios
from llmserve.measure.plan import Prompts, plan_requests
from llmserve.measure.runs import Load, Run, Subject
from llmserve.measure.series import Cell, Comparison
from llmserve.measure.tokens import Counter

OnStep = Callable[[str, int, int], OnProgress]
"""Called with what is measured next, its number and how many there are; gives its progress."""


def _silent(label: str, at: int, of: int) -> OnProgress:
    del label, at, of
    return ignore


def compare(
    targets: Sequence[Target],
    infos: Sequence[ModelInfo],
    loads: Sequence[Load],
    prompts: Prompts,
    *,
    rounds: int,
    title: str = "",
    on_step: OnStep = _silent,
) -> Comparison:
    """Measure every subject under every load, in rounds.

    Within a round all subjects get the same prompts, lengths and arrival times, one after the
    other in an order that is drawn anew; so what drifts on the machine meets all alike. Each
    round has prompts of its own, where they are made up. Ctrl-C ends it with what there is, and
    so does a server that dies.
    """
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    # One tokenizer for all: the same prompts, whoever answers them.
    counter = targets[0].counter()
    runs: dict[tuple[int, int], list[Run]] = {}
    ended_early = None
    for at, (turn, which, target) in enumerate(steps := _steps(targets, loads, rounds)):
        load = replace(loads[which], seed=loads[which].seed + turn)
        label = f"round {turn + 1} of {rounds}: {targets[target].name}, {load.label}"
        progress = on_step(label, at, len(steps))
        try:
            run = _measure(targets[target], infos[target], load, prompts, counter, progress)
        except LLMServeError as error:
            if not runs:
                raise
            ended_early = f"{label}: {error}"
            break
        runs.setdefault((target, which), []).append(run)
        if run.ended_early is not None:
            ended_early = f"{label}: {run.ended_early}"
        if run.interrupted or ended_early is not None:
            break
    found = _joined(targets, infos, loads, rounds, runs, title or _title(targets), started)
    return replace(found, ended_early=ended_early)


def _steps(
    targets: Sequence[Target], loads: Sequence[Load], rounds: int
) -> list[tuple[int, int, int]]:
    found = []
    for turn in range(rounds):
        draw = random.Random(f"order {loads[0].seed} {turn}")  # noqa: S311
        for which in range(len(loads)):
            order = draw.sample(range(len(targets)), len(targets))
            found += [(turn, which, target) for target in order]
    return found


def _measure(
    target: Target,
    info: ModelInfo,
    load: Load,
    prompts: Prompts,
    counter: Counter,
    progress: OnProgress,
) -> Run:
    load = replace(load, dataset=prompts.describe(counter))
    ours = info.made_by_llmserve is not None
    asks: Asks = plan_requests(load, prompts, counter, ours=ours)
    return run_load(target, info, load, asks, counter, on_progress=progress)


def _joined(
    targets: Sequence[Target],
    infos: Sequence[ModelInfo],
    loads: Sequence[Load],
    rounds: int,
    runs: dict[tuple[int, int], list[Run]],
    title: str,
    started: str,
) -> Comparison:
    # A run that was cut is not like the others: it has fewer requests, and another mix.
    whole = {
        key: [run for run in made if not run.interrupted and run.ended_early is None]
        for key, made in runs.items()
    }
    cells = {
        (at, which): Cell(target.name, load.label, tuple(whole.get((at, which), ())))
        for at, target in enumerate(targets)
        for which, load in enumerate(loads)
    }
    found = [
        ratio
        for which in range(len(loads))
        for at in range(1, len(targets))
        for ratio in ratios(cells[at, which], cells[0, which])
    ]
    return Comparison(
        title=title,
        started=started,
        subjects=tuple(_subjects(targets, infos)),
        loads=tuple(load.label for load in loads),
        rounds=rounds,
        cells=tuple(cells.values()),
        ratios=tuple(found),
        interrupted=any(run.interrupted for made in runs.values() for run in made),
    )


def _subjects(targets: Sequence[Target], infos: Sequence[ModelInfo]) -> list[Subject]:
    return [subject_of(target, info) for target, info in zip(targets, infos, strict=True)]


def _title(targets: Sequence[Target]) -> str:
    return " against ".join(target.name for target in targets)
