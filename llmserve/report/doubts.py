"""Reasons not to trust figures, told at the top of a report rather than left to be found."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.measure.runs import Run
from llmserve.measure.standins import notes
from llmserve.report.words import clean, counted

FEW = 100


def doubts(
    named: Sequence[tuple[str, Run]],
    *,
    interrupted: bool = False,
    ended_early: str | None = None,
) -> list[str]:
    """Give them one line each, without repetition."""
    found = []
    if interrupted or any(run.interrupted for _, run in named):
        found.append("The measurement was interrupted: it holds what came until then.")
    if ended_early:
        found.append(f"The measurement ended early: {clean(ended_early).rstrip('.')}.")
    found += [
        f"{clean(name)}: it ended early: {clean(run.ended_early).rstrip('.')}."
        for name, run in named
        if run.ended_early
    ]
    found += [f"{clean(note)}." for note in notes(named)]
    told = [(name, run.loader) for name, run in named if run.loader.warning]
    if told:
        # One stands for all: they differ only in how much.
        name, worst = max(told, key=lambda pair: pair[1].late)
        line = f"{clean(name)}: {clean(worst.warning).rstrip('.')}."
        if len(told) > 1:
            line += f" It is the worst of {len(told)} runs of {len(named)} that have a warning."
        found.append(line)
    failed: dict[str, int] = {}
    for name, run in named:
        errors = sum(record.error is not None for record in run.records)
        if errors:
            failed[name] = failed.get(name, 0) + errors
    found += [
        f"{clean(name)}: {counted(many, 'request')} failed; they count in no time and in no rate."
        for name, many in failed.items()
    ]
    return list(dict.fromkeys(found))


def few(runs: Sequence[Run]) -> str:
    """Warn of a 99th percentile of too few."""
    many = sum(len(run.records) for run in runs)
    if many >= FEW:
        return ""
    return f"Of {counted(many, 'request')}, P99 is little more than the longest."
