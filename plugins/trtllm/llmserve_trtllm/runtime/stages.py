"""The models around the engine: ``preprocessing`` and ``postprocessing``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.runtime import (
    Answer,
    Generation,
    Params,
    Parts,
    Prompt,
    RequestError,
    Tensors,
    about_prompt,
    answer_limit,
    read_prompts,
    respond,
    tensors_of,
)
from llmserve.runtime.contract import parse_json
from llmserve_trtllm.runtime.engine_request import RequestWriter, array

_TEXT = "text_output"
_POSTPROCESSING_PARAMS = ("stop_words", "include_stop_str_in_output", "min_tokens")
"""The request parameters that postprocessing needs to interpret the engine's tokens."""


class Preprocessing:
    """Turns text and parameters into the engine's tensors, and refuses invalid requests."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder
        self._settings = settings

    def start(self, parts: Parts) -> None:
        self._parts = parts
        self._writer = RequestWriter(self._settings, parts)

    def execute(self, requests: Sequence[Any]) -> Sequence[Any]:
        return respond(requests, self._answer, self._parts)

    def finalize(self) -> None:
        """There is nothing to release."""

    def _answer(self, raw: Any) -> Tensors:
        prompts = read_prompts(raw, self._parts, renamed=self._settings["names"])
        limits = [self._limit(prompt) for prompt in prompts]
        inputs = tensors_of(raw)
        values = self._writer.write(
            [self._shortened(prompt) for prompt in prompts],
            limits,
            inputs.get("EMBEDDING_BIAS_WORDS"),
            inputs.get("EMBEDDING_BIAS_WEIGHTS"),
        )
        values["REQUEST"] = [
            [json.dumps(self._request_info(prompt, limit)).encode()]
            for prompt, limit in zip(prompts, limits, strict=True)
        ]
        values["OUT_STREAM"] = [[self._streams(prompt)] for prompt in prompts]
        values["OUT_EXCLUDE_INPUT_IN_OUTPUT"] = [[not self._echoes(prompt)] for prompt in prompts]
        outputs: Mapping[str, str] = self._settings["makes"]
        return {name: array(values[name], data_type) for name, data_type in outputs.items()}

    def _shortened(self, prompt: Prompt) -> Prompt:
        """Return what the engine reads of a prompt: one that is only asked about need not wait for
        that. What reads images gets a text, which a part of one need not be."""
        if not prompt.params.prompt_only or "OUT_IMAGE_URL" in self._settings["makes"]:
            return prompt
        return replace(prompt, ids=prompt.ids[:1])

    def _limit(self, prompt: Prompt) -> int:
        """Return the maximum length of the answer; refuse what this model cannot serve."""
        if prompt.params.stream and not self._settings["streams"]:
            raise RequestError(
                "this model answers in one piece: leave out stream, or build it with "
                "--set decoupled=true",
                code="unsupported_option",
                param="stream",
            )
        if prompt.params.prompt_only and self._settings["streams"]:
            raise RequestError(
                "prompt_only needs a model built with --set stream_through=bls",
                code="unsupported_option",
                param="prompt_only",
            )
        context: int = self._parts.generator.context_length
        return answer_limit(prompt, context, self._parts.defaults["max_tokens"])

    def _request_info(self, prompt: Prompt, limit: int) -> dict[str, Any]:
        """Return what postprocessing needs to know about a request."""
        params = prompt.params
        info = {
            "prompt": prompt.text if self._echoes(prompt) else "",
            "params": {name: getattr(params, name) for name in _POSTPROCESSING_PARAMS},
            "input_tokens": len(prompt.ids),
            "context": prompt.ids[-8:],
            "max_tokens": limit,
            "end": self._writer.ends(prompt),
        }
        if params.prompt_only:
            info["answer"] = about_prompt(prompt, self._parts)
        return info

    def _echoes(self, prompt: Prompt) -> bool:
        exclude = prompt.params.exclude_input_in_output
        return bool(self._parts.defaults.get("echo")) if exclude is None else not exclude

    def _streams(self, prompt: Prompt) -> bool:
        stream = prompt.params.stream
        return bool(self._parts.defaults.get("stream")) if stream is None else stream


class Postprocessing:
    """Turns the engine's tokens into an answer.

    If the model does not stream, preprocessing sends the information about the request. Triton
    lets no tensor bypass a decoupled engine, so a piece of a stream arrives alone: its spaces are
    kept, and a character whose bytes are in two pieces cannot be joined.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder
        self._echoes: bool = settings["engine_echoes"]

    def start(self, parts: Parts) -> None:
        self._parts = parts
        # A token before the piece, because decoding may drop a space at the start of a text.
        self._anchor = parts.tokenizer.encode("a", special=False)

    def execute(self, requests: Sequence[Any]) -> Sequence[Any]:
        return respond(requests, self._answer, self._parts)

    def finalize(self) -> None:
        """There is nothing to release."""

    def _answer(self, raw: Any) -> Tensors:
        inputs = tensors_of(raw)
        tokens = inputs["TOKENS_BATCH"]
        lengths = inputs.get("SEQUENCE_LENGTH")
        requests = inputs.get("REQUEST")
        answers = []
        for row in range(tokens.shape[0]):
            info = None if requests is None else parse_json(requests.reshape(-1)[row])
            beams = []
            for beam in range(tokens.shape[1]):
                length = tokens.shape[2] if lengths is None else int(lengths[row][beam])
                ids = tokens[row, beam, :length].tolist()
                beams.append(self._piece(ids) if info is None else self._whole(ids, info))
            answers.append(beams)
        format_answers = self._parts.formatter.format
        # One text for each row and beam, in one dimension, as NVIDIA's clients read it.
        texts = np.concatenate([format_answers(beams)[_TEXT] for beams in answers])
        best = format_answers([beams[0] for beams in answers])
        others = {name.upper(): best[name].reshape(-1, 1) for name in best if name != _TEXT}
        return {"OUTPUT": texts, **others}

    def _piece(self, ids: list[int]) -> Answer:
        decode = self._parts.tokenizer.decode
        text = decode([*self._anchor, *ids])[len(decode(self._anchor)) :]
        return Answer(text, "", None, 0, len(ids), False)

    def _whole(self, ids: list[int], info: Mapping[str, Any]) -> Answer:
        if self._echoes:
            ids = ids[info["input_tokens"] :]
        # A generation ends at stop words and at the ids that end an answer, which some versions of
        # the engine send and others do not.
        generation = Generation(
            info["context"],
            Params(**info["params"]),
            max_tokens=info["max_tokens"],
            eos_ids=frozenset(info["end"]),
            decode=self._parts.tokenizer.decode,
        )
        if "answer" in info:
            generation.tell(info["answer"])
        for token in ids:
            generation.push(token)
        generation.end()
        return Answer(
            text=generation.text,
            prompt=info["prompt"],
            finish_reason=generation.finish_reason,
            input_tokens=info["input_tokens"],
            output_tokens=len(generation.token_ids),
            echo=bool(info["prompt"]),
            so_far=generation.text,
        )
