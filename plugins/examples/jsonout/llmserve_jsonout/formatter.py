"""The formatter ``json``: what ``text`` says, a document beside it, and answers held to JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from llmserve.runtime import (
    Answer,
    Constraint,
    Generation,
    RequestError,
    TextFormatter,
    Tokenizer,
    strings,
)
from llmserve_jsonout.calls import find_calls, parse
from llmserve_jsonout.constraint import JsonConstraint, Pieces

_FORMATS = ("text", "json_object")


class JsonFormatter:
    """Fills the contract's outputs, and ``json_output`` when an answer is complete."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._text = TextFormatter(settings, folder)
        self._pieces: Pieces | None = None

    def constrain(self, generation: Generation, tokenizer: Tokenizer) -> Constraint | None:
        """Hold an answer to one JSON object if its request asks for that."""
        asked = generation.params.extra.get("response_format", "text")
        if asked not in _FORMATS:
            raise RequestError(f"response_format is one of {', '.join(_FORMATS)}, not {asked!r}")
        if asked == "text":
            return None
        if self._pieces is None:
            self._pieces = Pieces(tokenizer)
        return JsonConstraint(generation, self._pieces)

    def format(self, answers: Sequence[Answer]) -> dict[str, npt.NDArray[Any]]:
        """Return each output tensor, one element per answer.

        A piece of a stream has an empty document: calls can be told only from the whole.
        """
        documents = [document(answer) if answer.finish_reason else "" for answer in answers]
        return {**self._text.format(answers), "json_output": strings(documents)}


def document(answer: Answer) -> str:
    """Return one answer as JSON, whatever is in it.

    >>> document(Answer("no", "", "stop", 3, 2, False, so_far="no"))
    '{"content": "no", "value": null, "tool_calls": [], "finish_reason": "stop", \
"usage": {"input_tokens": 3, "output_tokens": 2}}'
    """
    content, calls = find_calls(answer.so_far)
    told = {
        "content": content,
        "value": None if calls else parse(content),
        "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in calls],
        "finish_reason": answer.finish_reason,
        "usage": {"input_tokens": answer.input_tokens, "output_tokens": answer.output_tokens},
    }
    # As ASCII, for a model can write half a character as an escape, and UTF-8 cannot carry it.
    return json.dumps(told, allow_nan=False)
