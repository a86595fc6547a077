"""The last stage: what a session says to the tensors of a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime import Answer, Parts, Tensors, format_answers, respond, tensors_of


class Postprocess:
    """Hands pieces of answers to the formatter."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del settings, folder

    def start(self, parts: Parts) -> None:
        self._parts = parts

    def execute(self, requests: Sequence[Any]) -> Sequence[Any]:
        return respond(requests, self._answer, self._parts)

    def finalize(self) -> None:
        """Nothing is held."""

    def _answer(self, raw: Any) -> Tensors:
        answer = read_answer(tensors_of(raw))
        tensors = format_answers([answer], self._parts)
        return {name: values.reshape(-1, 1) for name, values in tensors.items()}


class NextTokens(Postprocess):
    """Gives the piece alone, in the tensor and the shape of the sequence batcher tutorial."""

    def _answer(self, raw: Any) -> Tensors:
        tensors = format_answers([read_answer(tensors_of(raw))], self._parts)
        return {"NEXT_TOKENS": tensors["text_output"].reshape(-1)}


def read_answer(tensors: Tensors) -> Answer:
    names = ("piece", "so_far", "echo", "reason")
    said = {name: tensors[name].reshape(-1)[0].decode("utf-8") for name in names}
    read, written = tensors["counts"].reshape(-1).tolist()
    return Answer(
        text=said["piece"],
        prompt=said["echo"],
        finish_reason=said["reason"] or None,
        input_tokens=read,
        output_tokens=written,
        echo=bool(said["echo"]),
        so_far=said["so_far"],
    )
