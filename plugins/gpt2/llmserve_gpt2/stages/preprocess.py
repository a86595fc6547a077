"""The first stage: text to ids, and everything that is asked for beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.runtime.errors import RequestError
from llmserve.runtime.params import Params
from llmserve.runtime.protocols import Parts
from llmserve.runtime.request import read_prompts
from llmserve.runtime.stage import Tensors, respond
from llmserve_gpt2.session.opening import Wishes

_MOST = 2**31 - 1
_NONE = -1
"""Stands where a step sends no prompt, for a tensor without elements is nothing to batch."""


class Preprocess:
    """Reads prompts with the tokenizer; a step of a sequence has none."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder
        self._text: str = settings["text"]
        """What the prompt's tensor is called here."""

    def start(self, parts: Parts) -> None:
        """Take the model's other parts."""
        self._parts = parts

    def execute(self, requests: Sequence[Any]) -> Sequence[Any]:
        """Answer every request of a batch, each for itself."""
        return respond(requests, self._answer, self._parts)

    def finalize(self) -> None:
        """Nothing is held."""

    def _answer(self, raw: Any) -> Tensors:
        request = _Renamed(raw, self._text)
        prompts = read_prompts(request, self._parts, empty=True)
        if len(prompts) > 1:
            raise RequestError(f"a sequence takes one prompt, not {len(prompts)}")
        prompt = prompts[0]
        wishes = Wishes(prompt.text, tuple(prompt.ids), prompt.params, _step(prompt.params))
        ids = np.array([prompt.ids or [_NONE]], np.int64)
        return {"prompt_ids": ids, "wishes": np.array([[wishes.write().encode()]], np.object_)}


class _Renamed:
    """A request whose prompt has another name than ours."""

    def __init__(self, raw: Any, name: str) -> None:
        self._raw = raw
        self._name = name

    def parameters(self) -> str:
        """Return the request's parameters."""
        return str(self._raw.parameters())

    def inputs(self) -> list[Any]:
        """Return the request's tensors."""
        return [
            _Text(tensor) if tensor.name() == self._name else tensor
            for tensor in self._raw.inputs()
        ]


class _Text:
    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def name(self) -> str:
        return "text_input"

    def as_numpy(self) -> Any:
        return self._tensor.as_numpy()


def _step(params: Params) -> int | None:
    """Return how many tokens are asked for; 0 asks for none, as the end of a sequence does."""
    given = params.extra.get("step_tokens")
    if given is None:
        return None
    whole = isinstance(given, int) or (isinstance(given, float) and given.is_integer())
    if isinstance(given, bool) or not whole or not 0 <= given <= _MOST:
        raise RequestError(f"step_tokens takes a whole number from 0 to {_MOST}, not {given!r}")
    return int(given)
