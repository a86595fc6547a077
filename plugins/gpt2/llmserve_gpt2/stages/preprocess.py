"""The first stage: text to ids, and everything that is asked for beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.runtime import Params, Parts, RequestError, Tensors, read_prompts, respond
from llmserve_gpt2.session.sequences import StepRequest

_MOST = 2**31 - 1
_NONE = -1
"""Stands where a step sends no prompt, for a tensor without elements is nothing to batch."""


class Preprocess:
    """Reads prompts with the tokenizer; a step of a sequence has none."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder
        self._renamed = {settings["text"]: "text_input"}

    def start(self, parts: Parts) -> None:
        self._parts = parts

    def execute(self, requests: Sequence[Any]) -> Sequence[Any]:
        return respond(requests, self._answer, self._parts)

    def finalize(self) -> None:
        """Nothing is held."""

    def _answer(self, raw: Any) -> Tensors:
        prompts = read_prompts(raw, self._parts, empty=True, renamed=self._renamed)
        if len(prompts) > 1:
            raise RequestError(f"a sequence takes one prompt, not {len(prompts)}")
        prompt = prompts[0]
        step = StepRequest(prompt.text, tuple(prompt.ids), prompt.params, _step(prompt.params))
        ids = np.array([prompt.ids or [_NONE]], np.int64)
        return {"prompt_ids": ids, "params": np.array([[step.write().encode()]], np.object_)}


def _step(params: Params) -> int | None:
    """Return how many tokens are asked for; 0 asks for none, as the end of a sequence does."""
    given = params.extra.get("step_tokens")
    if given is None:
        return None
    whole = isinstance(given, int) or (isinstance(given, float) and given.is_integer())
    if isinstance(given, bool) or not whole or not 0 <= given <= _MOST:
        raise RequestError(f"step_tokens takes a whole number from 0 to {_MOST}, not {given!r}")
    return int(given)
