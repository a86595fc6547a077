"""The first stage: encodes the prompt and reads the request's other parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.runtime import Params, Parts, RequestError, Tensors, read_prompts, respond
from llmserve_gpt2.session.sequences import StepRequest

_MAX_TOKENS = 2**31 - 1
_NO_PROMPT = -1
"""Sent by a step without a prompt, because Triton cannot batch an empty tensor."""


class Preprocess:
    """Encodes prompts with the tokenizer; later steps of a sequence have none."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder
        self._renamed = {settings["text"]: "text_input"}

    def start(self, parts: Parts) -> None:
        self._parts = parts

    def execute(self, requests: Sequence[Any]) -> Sequence[Any]:
        return respond(requests, self._answer, self._parts)

    def finalize(self) -> None:
        """There is nothing to release."""

    def _answer(self, raw: Any) -> Tensors:
        prompts = read_prompts(raw, self._parts, empty=True, renamed=self._renamed)
        if len(prompts) > 1:
            raise RequestError(f"a sequence accepts one prompt, not {len(prompts)}")
        prompt = prompts[0]
        step_tokens = _step_tokens(prompt.params)
        step = StepRequest(prompt.text, tuple(prompt.ids), prompt.params, step_tokens)
        ids = np.array([prompt.ids or [_NO_PROMPT]], np.int64)
        return {"prompt_ids": ids, "params": np.array([[step.write().encode()]], np.object_)}


def _step_tokens(params: Params) -> int | None:
    """Return the requested number of tokens; 0 only ends the sequence."""
    value = params.extra.get("step_tokens")
    if value is None:
        return None
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole or not 0 <= value <= _MAX_TOKENS:
        valid = f"a whole number from 0 to {_MAX_TOKENS}"
        problem = f"step_tokens takes {valid}, not {value!r}"
        raise RequestError(problem, code="invalid_value", param="step_tokens")
    return int(value)
