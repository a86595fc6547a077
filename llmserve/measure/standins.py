"""Which models are answered by one of llmserve's stand-ins, by what the server itself says.

A stand-in tells on ``/metrics`` that it is one. Where that cannot be reached, Triton's
configuration of a model still says whether a library or Python runs its backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmserve.measure.published import labels_of
from llmserve.measure.runs import Run
from llmserve.server.backends.telling import METRIC

if TYPE_CHECKING:
    from llmserve.measure.bench import Target

_PYTHON = "model.py"
_PLAIN = {"tensorrtllm": "TensorRT-LLM"}
_SHOWN = 4
MARK = " (stand-in)"
"""Follows the name of what was measured."""


def told_on(page: str) -> dict[str, str]:
    """Read which models say so on ``/metrics``, and what they stand in for.

    >>> told_on('llmserve_stand_in{instead_of="TensorRT-LLM",model="engine"} 1')
    {'engine': 'TensorRT-LLM'}
    """
    return {
        labels["model"]: labels["instead_of"]
        for labels in labels_of(page, METRIC)
        if labels.keys() >= {"model", "instead_of"}
    }


def find(configs: Mapping[str, Any], page: str) -> dict[str, str]:
    """Name the models that a stand-in answers, of those with these configurations.

    Triton writes into a model's configuration what runs it. A library is nobody's stand-in,
    whatever a page says that may be of another server; and a model of ours never asks for
    Python where its backend has a library.
    """
    told = told_on(page)
    found = {}
    for name, config in configs.items():
        if config.runtime not in ("", _PYTHON):
            continue
        if name in told:
            found[name] = told[name]
        elif config.runtime == _PYTHON and "llmserve.version" in config.parameters:
            found[name] = _PLAIN.get(config.backend, f"Triton's backend {config.backend}")
    return found


def marked(target: Target) -> Target:
    """Give a target a name that says so where a stand-in answers for it."""
    from llmserve.measure.figures import Observer

    observer = Observer(target.place, target.model, target.metrics_url)
    try:
        now = observer.look()
    finally:
        observer.close()
    if now is None or not now.stand_ins:
        return target
    return replace(target, name=f"{target.name or target.model}{MARK}")


def stood_in(runs: Iterable[Run]) -> bool:
    """Say whether a stand-in answered in any of these runs."""
    return any(run.server is not None and run.server.stand_ins for run in runs)


def notes(named: Iterable[tuple[str, Run]]) -> list[str]:
    """Say of what was measured for which parts of it a stand-in answered, a line for each part."""
    found: dict[str, list[str]] = {}
    for name, run in named:
        for part in sorted(set(run.server.stand_ins.values())) if run.server else ():
            names = found.setdefault(part, [])
            if name not in names:
                names.append(name)
    return [
        f"{_some(names)}: llmserve's stand-in answered in place of {part}; these figures say "
        "nothing of how fast that is"
        for part, names in found.items()
    ]


def lines(found: Mapping[str, str]) -> list[str]:
    """Say for what stand-ins stand in, a line each.

    >>> lines({"a": "TensorRT-LLM", "b": "TensorRT-LLM"})
    ['stand-in for TensorRT-LLM, in Python: a, b']
    """
    return [
        f"stand-in for {part}, in Python: {', '.join(models)}"
        for part, models in _by_part(found).items()
    ]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _by_part(found: Mapping[str, str]) -> dict[str, Sequence[str]]:
    parts: dict[str, list[str]] = {}
    for model, part in sorted(found.items()):
        parts.setdefault(part, []).append(model)
    return dict(parts)
