"""What a measurement gives: a :class:`Run`, a :class:`Comparison` or a :class:`Sweep`.

All three are frozen dataclasses that :func:`save` writes as one JSON file and :func:`load` reads
back. Every time is in seconds; in a :class:`Record` it counts from the start of the measured
window, so that 0.0 is the same moment for all records of a run. Figures that can be derived
(rates, percentiles, time between tokens) are not kept twice: :func:`llmserve.measure.summary.
summarize` gives them for a run, and the JSON of a run has them under ``summary`` for readers
that are no Python.

::

    Run         one load against one subject
      subject     Subject: what was asked
      load        Load: how it was asked
      records     Record for every request of the window, failed ones too
      server      ServerFigures: what Triton says it did meanwhile, or None
      loader      LoaderCost: what asking cost, and whether it kept up
      tools       ToolFigures of perf_analyzer or AIPerf on the same model and load
    Comparison  several subjects under the same loads, interleaved in rounds
      cells       Cell: all runs of one subject under one load, one run per round
      ratios      Ratio: a metric of a subject against the first one, with its spread
    Sweep       many variants of one model, each built, served, measured and torn down
      variants    Variant: its build and load settings, state, and runs
      ranking     names of the variants, best first
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmserve.errors import ConfigError
from llmserve.measure.codec import decode, encode
from llmserve.measure.runs import (
    Load,
    LoaderCost,
    ModelFigures,
    Record,
    Run,
    ServerFigures,
    Subject,
    ToolFigures,
)
from llmserve.measure.series import Cell, Comparison, Ratio, Sweep, Variant

__all__ = [
    "SCHEMA",
    "Cell",
    "Comparison",
    "Load",
    "LoaderCost",
    "ModelFigures",
    "Ratio",
    "Record",
    "Result",
    "Run",
    "ServerFigures",
    "Subject",
    "Sweep",
    "ToolFigures",
    "Variant",
    "from_json",
    "load",
    "save",
    "to_json",
]

SCHEMA = 1
"""The form of these files; a reader refuses any other."""

Result = Run | Comparison | Sweep
_KINDS: dict[str, type[Run] | type[Comparison] | type[Sweep]] = {
    "run": Run,
    "comparison": Comparison,
    "sweep": Sweep,
}


def to_json(result: Result) -> dict[str, Any]:
    """Give a result as plain JSON values, with its kind, its schema and a run's summary."""
    from llmserve.measure.summary import summarize

    kind = next(name for name, made in _KINDS.items() if isinstance(result, made))
    content = {"kind": kind, "schema": SCHEMA, **encode(result)}
    if isinstance(result, Run):
        content["summary"] = encode(summarize(result))
    return content


def from_json(content: Any) -> Result:
    """Read what :func:`to_json` gave; an error of llmserve where it is anything else."""
    try:
        kind, schema = content["kind"], content["schema"]
        if schema == SCHEMA:
            return decode(_KINDS[kind], content)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError("this is no result of llmserve's measurements") from None
    raise ConfigError(
        f"this result has schema {schema}, this llmserve reads {SCHEMA}",
        mend="measure again, or use the llmserve that wrote it",
    )


def save(result: Result, path: Path) -> None:
    """Write a result, all or nothing."""
    draft = path.with_name(f".{path.name}.part")
    try:
        draft.write_text(json.dumps(to_json(result), ensure_ascii=False) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def load(path: Path) -> Result:
    """Read a result that :func:`save` wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise ConfigError(f"{path} is no JSON") from None
    return from_json(content)
