"""Checks a formatter's tensors against the outputs that it declared when the model was built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.contract.tasks import TOKENS
from llmserve.contract.tensors import INPUT_TOKENS, PROMPT_REPORT, TYPES, Tensor
from llmserve.runtime.protocols import Answer, Parts, strings


class UndeclaredOutputError(Exception):
    """A formatter returned something other than it declared: its author's fault."""


def format_answers(answers: Sequence[Answer], parts: Parts) -> dict[str, npt.NDArray[Any]]:
    """Return the formatter's tensors; the first dimension of each is the number of answers."""
    if parts.answers != TOKENS and all(answer.value is None for answer in answers):
        return _report(answers, parts)
    tensors = parts.formatter.format(answers)
    declared = parts.outputs
    if declared:
        for name, values in tensors.items():
            if problem := _problem(values, declared.get(name), len(answers)):
                raise UndeclaredOutputError(f"{_name(parts)} returned {problem} for {name!r}")
        for name, tensor in declared.items():
            if not tensor.optional and name not in tensors:
                raise UndeclaredOutputError(
                    f"{_name(parts)} returned no {name!r}, which it declares"
                )
    return tensors


def _report(answers: Sequence[Answer], parts: Parts) -> dict[str, npt.NDArray[Any]]:
    """Return what a model that answers with values says about prompts."""
    found: dict[str, npt.NDArray[Any]] = {PROMPT_REPORT.name: strings([a.text for a in answers])}
    if INPUT_TOKENS.name in parts.outputs:
        found[INPUT_TOKENS.name] = np.array([a.input_tokens for a in answers], dtype=np.int32)
    return found


def _problem(values: Any, tensor: Tensor | None, count: int) -> str | None:
    if tensor is None:
        return "a tensor, but declares none"
    if not isinstance(values, np.ndarray):
        return f"{type(values).__name__} instead of a numpy array"
    shape, rest = values.shape, tensor.dims if tensor.vector else tensor.dims[1:]
    fits = len(shape) == len(rest) + 1 and shape[0] == count
    if fits and rest:
        fits = all(size in (-1, actual) for size, actual in zip(rest, shape[1:], strict=True))
    if fits and values.dtype == np.dtype(TYPES[tensor.data_type]):
        return None
    declared = [count, *rest]
    return f"{list(shape)} of {values.dtype} instead of {declared} of {tensor.data_type[5:]}"


def _name(parts: Parts) -> str:
    kind = type(parts.formatter)
    return f"the formatter {kind.__module__}:{kind.__qualname__}"


def declared_outputs(manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the outputs that a manifest's contract lists, by name."""
    outputs = manifest["contract"].get("outputs", ())
    return {entry["name"]: Tensor(**{**entry, "dims": tuple(entry["dims"])}) for entry in outputs}
