"""The formatter ``scaffold`` as it runs in Triton."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from llmserve.runtime import Answer, TextFormatter, strings


class ScaffoldFormatter:
    """Answers to tensors; a :class:`llmserve.runtime.protocols.Formatter`."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        # Every client knows the outputs of the formatter text, so they stay.
        self._text = TextFormatter(settings, folder)

    def format(self, answers: Sequence[Answer]) -> dict[str, npt.NDArray[Any]]:
        objects = [json.dumps(_described(answer), ensure_ascii=False) for answer in answers]
        return {**self._text.format(answers), "answer_json": strings(objects)}


def _described(answer: Answer) -> dict[str, Any]:
    return {
        # Everything so far: what was sent with earlier pieces is in it.
        "text": answer.so_far,
        "finish_reason": answer.finish_reason,
        "usage": {"input_tokens": answer.input_tokens, "output_tokens": answer.output_tokens},
    }
