"""The model ``preprocessing``: a request's text and parameters to the tensors of the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.runtime import (
    Parts,
    Prompt,
    RequestError,
    Tensors,
    answer_limit,
    read_prompts,
    respond,
    tensors_of,
)
from llmserve_trtllm.runtime.limits import EngineLimits, Renamed
from llmserve_trtllm.runtime.sampling import (
    SamplingValues,
    bias_of,
    numpy_type,
    pad_of,
    word_ids,
    word_tensor,
)


class Preprocessing:
    """Reads requests; what cannot be served is refused here, at no cost to the engine."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder
        self._settings = settings
        self._names: Mapping[str, str] = settings["names"]
        self._kinds: Mapping[str, str] = settings["kinds"]

    def start(self, parts: Parts) -> None:
        """Take the tokenizer and the engine's limits."""
        self._parts = parts
        self._engine: EngineLimits = parts.generator
        self._values = SamplingValues(
            self._settings["sampling"], max_beam_width=self._engine.max_beam_width
        )

    def execute(self, requests: Sequence[Any]) -> Sequence[Any]:
        """Answer every request, each for itself."""
        return respond(requests, self._answer, self._parts)

    def finalize(self) -> None:
        """Nothing is held."""

    def _answer(self, raw: Any) -> Tensors:
        prompts = read_prompts(Renamed(raw, self._names), self._parts)
        rows = [self._row(prompt) for prompt in prompts]
        width = max(len(prompt.ids) for prompt in prompts)
        pads = [row["sampling"].get("pad_id", 0) for row in rows]
        ids = [p.ids + [pad] * (width - len(p.ids)) for p, pad in zip(prompts, pads, strict=True)]
        words = self._parts.tokenizer
        tensors = {
            "INPUT_ID": np.array(ids, np.int32),
            "REQUEST_INPUT_LEN": np.array([[len(p.ids)] for p in prompts], np.int32),
            "REQUEST_OUTPUT_LEN": np.array(
                [[row["room"]] for row in rows], numpy_type(self._kinds["REQUEST_OUTPUT_LEN"])
            ),
            "BAD_WORDS_IDS": word_tensor([word_ids(p.params.bad_words, words) for p in prompts]),
            "STOP_WORDS_IDS": word_tensor([row["stop"] for row in rows]),
        }
        if "EMBEDDING_BIAS" in self._kinds:
            given = tensors_of(raw)
            tensors["EMBEDDING_BIAS"] = bias_of(
                given.get("EMBEDDING_BIAS_WORDS"),
                given.get("EMBEDDING_BIAS_WEIGHTS"),
                len(prompts),
                self._engine.vocab_size,
                words,
            )
        if "REQUEST" in self._kinds:
            texts = [[json.dumps(row["request"]).encode()] for row in rows]
            tensors["REQUEST"] = np.array(texts, np.object_)
        for name, values in (("OUT_STREAM", "stream"), ("OUT_EXCLUDE_INPUT_IN_OUTPUT", "exclude")):
            if name in self._kinds:
                tensors[name] = np.array([[row[values]] for row in rows], np.bool_)
        made = self._values.arrays([row["sampling"] for row in rows])
        return {**tensors, **{f"OUT_{name.upper()}": value for name, value in made.items()}}

    def _row(self, prompt: Prompt) -> dict[str, Any]:
        params, parts = prompt.params, self._parts
        if params.stream and not self._settings["streams"]:
            raise RequestError(
                "this model answers in one piece: leave out stream, or build it with "
                "--set decoupled=true"
            )
        self._engine.check_prompt(prompt.ids)
        room = answer_limit(prompt, self._engine.context_length, parts.defaults["max_tokens"])
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens {params.min_tokens} is over max_tokens {room}: lower it"
            )
        ends = self._ends_of(prompt)
        end = ends[0] if ends else self._settings["no_end"]
        own = self._engine.pad_id
        pad = pad_of(params, own if own is not None else max(end, 0))
        exclude = params.exclude_input_in_output
        echo = bool(parts.defaults.get("echo")) if exclude is None else not exclude
        wants = bool(parts.defaults.get("stream")) if params.stream is None else params.stream
        return {
            "room": room,
            "stream": wants,
            "exclude": not echo,
            # The engine itself stops at one id; what else ends an answer goes as words do.
            "stop": word_ids(params.stop_words, parts.tokenizer) + [[other] for other in ends[1:]],
            "sampling": self._values.values(params, end_id=end, pad_id=pad),
            "request": {
                "prompt": prompt.text if echo else "",
                "stop": list(params.stop_words),
                "min_tokens": params.min_tokens,
                "input_tokens": len(prompt.ids),
                "context": prompt.ids[-8:],
                "max_tokens": room,
                "end": ends,
            },
        }

    def _ends_of(self, prompt: Prompt) -> list[int]:
        """The ids that end the answer, the one for the engine first."""
        asked = prompt.params.end_id
        if prompt.params.ignore_eos:
            return []
        if asked is not None and asked >= 0:
            return [asked]
        return self._engine.ends(self._parts.tokenizer.eos_ids)
