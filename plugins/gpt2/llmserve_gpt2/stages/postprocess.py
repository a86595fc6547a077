"""The last stage: turns a session's output into the tensors of a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime import Answer, Parts, Tensors, format_answers, respond, tensors_of


class Postprocess:
    """Passes pieces of answers to the formatter."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del settings, folder

    def start(self, parts: Parts) -> None:
        self._parts = parts

    def execute(self, requests: Sequence[Any]) -> Sequence[Any]:
        return respond(requests, self._answer, self._parts)

    def finalize(self) -> None:
        """There is nothing to release."""

    def _answer(self, raw: Any) -> Tensors:
        answer = read_answer(tensors_of(raw))
        tensors = format_answers([answer], self._parts)
        return {name: values.reshape(-1, 1) for name, values in tensors.items()}


class NextTokens(Postprocess):
    """Returns only the piece, in the tensor and the shape of the sequence batcher tutorial."""

    def _answer(self, raw: Any) -> Tensors:
        tensors = format_answers([read_answer(tensors_of(raw))], self._parts)
        return {"NEXT_TOKENS": tensors["text_output"].reshape(-1)}


def read_answer(tensors: Tensors) -> Answer:
    names = ("piece", "so_far", "echo", "reason")
    texts = {name: tensors[name].reshape(-1)[0].decode("utf-8") for name in names}
    input_tokens, output_tokens = tensors["counts"].reshape(-1).tolist()
    return Answer(
        text=texts["piece"],
        prompt=texts["echo"],
        finish_reason=texts["reason"] or None,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        echo=bool(texts["echo"]),
        so_far=texts["so_far"],
    )
