"""How an answer is to be made, in the words and types of the engine."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from llmserve.runtime.errors import RequestError
from llmserve.runtime.params import Params

_SECOND_NAMES = {"random_seed": "seed", "min_length": "min_tokens"}
_TYPES: dict[str, Any] = {
    "INT32": np.int32,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "STRING": np.object_,
}
_INT32 = 2**31 - 1


def numpy_type(kind: str) -> Any:
    """Return numpy's name for one of Triton's types."""
    return _TYPES[kind]


class Wishes:
    """Turns what a request asks for into values for the engine.

    ``kinds`` are the wishes that the engine of the version has, with their types. Everything is
    always said, for Triton batches only requests that have the same inputs, and the engine's own
    defaults are not those of every version: its seed, for one, is always the same.

    >>> Wishes({"temperature": "FP32", "top_k": "INT32"}).values(Params(temperature=0.5))
    {'temperature': 0.5, 'top_k': 0}
    """

    def __init__(self, kinds: Mapping[str, str], *, max_beam_width: int = 1) -> None:
        self.kinds = dict(kinds)
        self._beams = max_beam_width
        self._has = {_SECOND_NAMES.get(name, name) for name in kinds}

    def values(self, params: Params, *, end_id: int = -1, pad_id: int = 0) -> dict[str, Any]:
        """Return a value for each wish that the engine has; refuse what it cannot do."""
        self._refuse_unknown(params)
        greedy = params.heat == 0 or params.top_k == 1
        known = {
            "end_id": end_id,
            "pad_id": pad_id,
            # A temperature of 0 divides by nothing in some versions.
            "temperature": 1.0 if greedy else params.heat,
            "top_k": 1 if greedy else max(params.top_k, 0),
            "top_p": 1.0 if greedy else params.top_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "min_tokens": params.min_tokens,
            "seed": secrets.randbits(64) if params.seed is None else params.seed,
            "beam_width": int(number("beam_width", params, 1, 1, self._beams)),
            "length_penalty": number("length_penalty", params, 0.0, -100, 100),
        }
        return {name: known[_SECOND_NAMES.get(name, name)] for name in self.kinds}

    def arrays(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the values of several prompts as tensors of one value a row."""
        return {
            name: np.array([[row[name]] for row in rows], numpy_type(kind))
            for name, kind in self.kinds.items()
        }

    def _refuse_unknown(self, params: Params) -> None:
        plain = Params()
        for name in ("frequency_penalty", "presence_penalty", "min_tokens"):
            if name not in self._has and getattr(params, name) != getattr(plain, name):
                raise RequestError(f"this engine's version of TensorRT-LLM has no {name}")
        if params.top_k > 1024:
            raise RequestError(f"top_k must be at most 1024, not {params.top_k}")


def number(name: str, params: Params, default: float, low: float, high: float) -> float:
    """Return a wish that the core does not read, or refuse it."""
    value = params.extra.get(name, default)
    fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not fits or not low <= value <= high:
        raise RequestError(f"{name} must be from {low:g} to {high:g}, not {value!r}")
    if isinstance(default, int) and value != int(value):
        raise RequestError(f"{name} takes a whole number, not {value!r}")
    return float(value)


def pad_of(params: Params, default: int) -> int:
    """Return the id that fills up what is shorter than its neighbours."""
    return int(number("pad_id", params, default, 0, _INT32))
