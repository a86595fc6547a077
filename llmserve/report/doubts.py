"""Reasons not to trust figures, told at the top of a report rather than left to be found."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.measure.runs import Run
from llmserve.report.words import clean, counted

FEW = 100
_MOST = 2


def doubts(named: Sequence[tuple[str, Run]], *, interrupted: bool = False) -> list[str]:
    """Give them one line each, without repetition."""
    found = []
    if interrupted or any(run.interrupted for _, run in named):
        found.append("The measurement was interrupted: it holds what came until then.")
    told = [(name, run.loader.warning) for name, run in named if run.loader.warning]
    found += [f"{clean(name)}: {clean(warning).rstrip('.')}." for name, warning in told[:_MOST]]
    if len(told) > _MOST:
        rest = counted(len(told) - _MOST, "other run has", "other runs have")
        found.append(f"{rest} a warning of that kind.")
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
