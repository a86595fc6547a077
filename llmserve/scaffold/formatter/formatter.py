"""The formatter ``scaffold`` as it runs in Triton."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from llmserve.runtime import Answer, TextFormatter, strings


class ScaffoldFormatter:
    """Turns answers into tensors; a :class:`llmserve.runtime.protocols.Formatter`."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        # Clients rely on the outputs of the formatter text, so they stay.
        self._text = TextFormatter(settings, folder)

    def format(self, answers: Sequence[Answer]) -> dict[str, npt.NDArray[Any]]:
        objects = [json.dumps(_to_dict(answer), ensure_ascii=False) for answer in answers]
        return {**self._text.format(answers), "answer_json": strings(objects)}


def _to_dict(answer: Answer) -> dict[str, Any]:
    return {
        # The answer so far, including pieces that were sent earlier.
        "text": answer.so_far,
        "finish_reason": answer.finish_reason,
        "usage": {"input_tokens": answer.input_tokens, "output_tokens": answer.output_tokens},
    }
