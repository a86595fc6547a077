"""The model ``postprocessing``: the engine's tokens to an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.runtime import Answer, Generation, Params, Parts, Tensors, respond, tensors_of

_OUTPUT = "text_output"


class Postprocessing:
    """Writes answers.

    Where the model answers in one piece, preprocessing sends what there is to know of the
    request. Triton lets nothing by a decoupled engine, so a piece of a stream is all that there is:
    its spaces are kept, and a character whose bytes are in two pieces cannot be put together.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder
        self._echoes: bool = settings["engine_echoes"]

    def start(self, parts: Parts) -> None:
        """Take the tokenizer and the formatter."""
        self._parts = parts
        # Something before the piece, so that its leading space is not taken for a beginning.
        self._anchor = parts.tokenizer.encode("a", special=False)

    def execute(self, requests: Sequence[Any]) -> Sequence[Any]:
        """Answer every request, each for itself."""
        return respond(requests, self._answer, self._parts)

    def finalize(self) -> None:
        """Nothing is held."""

    def _answer(self, raw: Any) -> Tensors:
        given = tensors_of(raw)
        tokens = given["TOKENS_BATCH"]
        lengths = given.get("SEQUENCE_LENGTH")
        requests = given.get("REQUEST")
        answers = []
        for row in range(tokens.shape[0]):
            about = None if requests is None else json.loads(requests.reshape(-1)[row])
            beams = []
            for beam in range(tokens.shape[1]):
                length = tokens.shape[2] if lengths is None else int(lengths[row][beam])
                ids = tokens[row, beam, :length].tolist()
                beams.append(self._piece(ids) if about is None else self._whole(ids, about))
            answers.append(beams)
        return self._tensors(answers)

    def _piece(self, ids: list[int]) -> Answer:
        decode = self._parts.tokenizer.decode
        text = decode([*self._anchor, *ids])[len(decode(self._anchor)) :]
        return Answer(text, "", None, 0, len(ids), False)

    def _whole(self, ids: list[int], about: Mapping[str, Any]) -> Answer:
        if self._echoes:
            ids = ids[about["input_tokens"] :]
        # The core's own reading of tokens: it ends at stop words and at the ids that end an answer,
        # which some versions of the engine send and others do not.
        generation = Generation(
            about["context"],
            Params(stop_words=tuple(about["stop"]), min_tokens=about["min_tokens"]),
            max_tokens=about["max_tokens"],
            eos_ids=frozenset(about["end"]),
            decode=self._parts.tokenizer.decode,
        )
        for token in ids:
            generation.push(token)
        generation.end()
        return Answer(
            text=generation.text,
            prompt=about["prompt"],
            finish_reason=generation.finish_reason,
            input_tokens=about["input_tokens"],
            output_tokens=len(generation.token_ids),
            echo=bool(about["prompt"]),
            so_far=generation.text,
        )

    def _tensors(self, answers: list[list[Answer]]) -> Tensors:
        form = self._parts.formatter.format
        # A text for each row and beam in one dimension: that is how NVIDIA's clients read it.
        texts = np.concatenate([form(beams)[_OUTPUT] for beams in answers])
        first = form([beams[0] for beams in answers])
        others = {
            name.upper(): values.reshape(-1, 1) for name, values in first.items() if name != _OUTPUT
        }
        return {"OUTPUT": texts, **others}
