"""The endpoint ``/infill`` of llama.cpp's server, which editors ask: its requests and answers.

As ``tools/server`` has them at commit 006639c3ff51a3dbde5f52ebf4c5a55ad5306caf.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmserve.client import Completion, Logprob, Piece
from llmserve.runtime.contract import EXTRA_FILES, INT32, OPTIONS, SUFFIX
from llmserve_gateway.errors import ApiError, bad_request
from llmserve_gateway.fields import (
    STRING,
    Body,
    Field,
    Values,
    any_text,
    check_encodable,
    ignored,
    needed,
    option,
    reads,
    refused,
    text,
)
from llmserve_gateway.generation_fields import STREAM, sampling
from llmserve_gateway.openai_answers import dump, token_json, without_stop_word
from llmserve_gateway.reply import RequestRecord
from llmserve_gateway.text_requests import ParsedRequest
from llmserve_gateway.usage import CACHED, Usage

_MAX_FILES = 256
_MAX_PATHS = 64


# Requests


def _files(value: Any, name: str) -> list[dict[str, str]]:
    what = f'{name} must be a list of at most {_MAX_FILES} {{"filename": …, "text": …}}'
    if not isinstance(value, list) or len(value) > _MAX_FILES:
        raise bad_request(what, name)
    files = []
    for item in value:
        if not isinstance(item, dict):
            raise bad_request(what, name)
        file = {each: item.get(each, default) for each, default in _FILE.items()}
        if not all(isinstance(each, str) for each in file.values()):
            raise bad_request(what, name)
        check_encodable("".join(file.values()), name)
        files.append(file)
    return files


_FILE: Mapping[str, Any] = {"filename": "tmp", "text": None}


def _length(value: Any, name: str) -> int | None:
    if type(value) is not int or not -1 <= value <= INT32:
        raise bad_request(f"{name} must be an integer from -1 to {INT32}", name)
    return value if value >= 0 else None


def _paths(value: Any, name: str) -> list[str]:
    is_list = isinstance(value, list) and len(value) <= _MAX_PATHS
    if not is_list or not all(isinstance(path, str) for path in value):
        raise bad_request(f"{name} must be a list of at most {_MAX_PATHS} strings", name)
    return [*value]


_MODEL = text("model", "The name of a model, if there are several.")
_BEFORE = needed(any_text("input_prefix", "What is before the gap; it may be empty."))
_AFTER = needed(any_text("input_suffix", "What is after the gap; it may be empty."))
_BEGUN = any_text("prompt", "What the gap begins with: it is read after input_prefix.")
_OTHERS: Field[list[dict[str, str]]] = Field(
    "input_extra", "Other files of the project, or parts of them.", _files,
    {"type": "array", "maxItems": _MAX_FILES, "items": {
        "type": "object", "required": ["text"],
        "properties": {"filename": STRING, "text": STRING}}},
    absent=(),
)  # fmt: skip
_LENGTH: Field[int | None] = Field(
    "n_predict", "The longest answer, in tokens; -1 is no limit, and 0 only has the prompt read.",
    _length, {"type": "integer", "minimum": -1, "maximum": INT32},
)  # fmt: skip
_PROBABILITIES = option(
    OPTIONS["logprobs"], "n_probs", passed=False, then=lambda count: count or None
)
_PATHS: Field[list[str]] = Field(
    "response_fields", "The fields of the answer, as paths such as timings/prompt_n.", _paths,
    {"type": "array", "maxItems": _MAX_PATHS, "items": STRING}, absent=(),
)  # fmt: skip
_SAMPLED = {row.name: row for row in sampling(max_temperature=OPTIONS["temperature"].high)}
INFILL = Body(
    _BEFORE,
    _AFTER,
    _BEGUN,
    _OTHERS,
    _MODEL,
    STREAM,
    _LENGTH,
    *(_SAMPLED[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop",
                                  "presence_penalty", "frequency_penalty", "logit_bias",
                                  "ignore_eos")),
    replace(_SAMPLED["repetition_penalty"], name="repeat_penalty"),
    _PROBABILITIES,
    _PATHS,
    *ignored("cache_prompt", "id_slot", "samplers", "n_indent", "t_max_prompt_ms",
             "t_max_predict_ms", "n_keep", "n_discard", "n_cache_reuse", "timings_per_token",
             "return_progress", "post_sampling_probs", "repeat_last_n", "typical_p"),
    *refused("what fills a gap cannot be constrained", "json_schema", "grammar"),
    *refused("/tokenize has the ids of a text", "return_tokens"),
)  # fmt: skip


@reads(INFILL)
def read_infill(values: Values) -> ParsedRequest:
    options, length, others = values.options, values[_LENGTH], values[_OTHERS]
    options[SUFFIX] = values[_AFTER]
    if others:
        options[EXTRA_FILES] = json.dumps([*others], ensure_ascii=False)
    if length is not None:
        # No model answers with nothing: its one token is not told.
        options["max_tokens"] = length or 1
    count = values[_PROBABILITIES]
    if count is not None:
        options["logprobs"] = count
    return ParsedRequest(
        model=values[_MODEL] or "",
        options=options,
        prompts=[values[_BEFORE] + values[_BEGUN]],
        stream=values[STREAM],
        logprobs=count is not None,
        echo_only=length == 0,
        report_stop_word="stop_words" in options,
        echoed_fields={_PATHS.name: values[_PATHS]},
        sent={
            SUFFIX: _AFTER.name, EXTRA_FILES: _OTHERS.name, "max_tokens": _LENGTH.name,
            "text_input": _BEFORE.name, "logprobs": _PROBABILITIES.name,
        },
        unknown=values.unknown,
    )  # fmt: skip


# Answers


class InfillWriter:
    """Writes what fills a gap, whole or in events."""

    def __init__(self, request: ParsedRequest, record: RequestRecord) -> None:
        self.usage = Usage(1, 1)
        self._request = request
        self._record = record
        self._stop_words = request.options.get("stop_words", []) if request.report_stop_word else []
        self._reason, self._stop_word = "none", ""
        self._has_lines = False

    def whole(self, answers: Sequence[Completion]) -> bytes:
        answer = answers[0]
        told = self._told(answer)
        found = {**self._final(told), **self._probabilities(answer.logprobs)}
        return dump(self._chosen(found))

    def opening(self, piece: Piece) -> bytes:
        del piece
        return b""

    def chunk(self, piece: Piece) -> bytes:
        told = self._told(piece)
        content = {
            **self._head(told, ends=False),
            **self._probabilities(piece.logprobs),
        }
        return _event(content) if told or piece.logprobs else b""

    def closing(self) -> bytes:
        return _event(self._chosen(self._final("")))

    def failure(self, error: ApiError) -> bytes:
        return error.event()

    def _told(self, answer: Completion | Piece) -> str:
        """Return the text that the client gets, and note what the end of an answer says."""
        is_silent = self._request.echo_only
        count = 0 if is_silent else answer.output_tokens
        self.usage.update(0, answer.input_tokens, count, answer.extra.get(CACHED))
        said, word = without_stop_word(answer, self._stop_words)
        if answer.finish_reason:
            self._reason = "limit"
            if answer.finish_reason == "stop" and not is_silent:
                self._reason = "word" if word else "eos"
            self._stop_word = word or ""
        self._has_lines = self._has_lines or ("\n" in said and not is_silent)
        return "" if is_silent else said

    def _head(self, content: str, *, ends: bool) -> dict[str, Any]:
        return {
            "index": 0,
            "content": content,
            "tokens": [],
            "id_slot": -1,
            "stop": ends,
            "tokens_predicted": self.usage.output_tokens,
            "tokens_evaluated": self.usage.input_tokens,
        }

    def _final(self, content: str) -> dict[str, Any]:
        return {
            **self._head(content, ends=True),
            "model": self._request.called,
            "has_new_line": self._has_lines,
            "truncated": False,
            "stop_type": self._reason,
            "stopping_word": self._stop_word,
            "tokens_cached": self.usage.input_tokens + self.usage.output_tokens,
            "timings": self._timings(),
        }

    def _timings(self) -> dict[str, Any]:
        """Return tokens and milliseconds; of an answer in one piece, its prompt's are not apart."""
        record, now, cached = self._record, time.perf_counter(), self.usage.cached_tokens or 0
        asked = record.admitted or record.arrived
        began = record.first_output or asked
        read, made = max(0, self.usage.input_tokens - cached), self.usage.output_tokens
        times = _rates("prompt", read, began - asked) if record.first_output else {}
        return {"cache_n": cached, "prompt_n": read, **times, "predicted_n": made,
                **_rates("predicted", made, now - began)}  # fmt: skip

    def _probabilities(self, logprobs: Sequence[Logprob] | None) -> dict[str, Any]:
        if not self._request.logprobs or not logprobs or self._request.echo_only:
            return {}
        return {"completion_probabilities": [token_json(token) for token in logprobs]}

    def _chosen(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that the request wants, by their paths; all if it names none."""
        paths = self._request.echoed_fields[_PATHS.name]
        if not paths:
            return found
        chosen = {}
        for path in paths:
            value: Any = found
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                chosen[path] = value
        return chosen


def _rates(name: str, tokens: int, seconds: float) -> dict[str, float]:
    milliseconds = round(seconds * 1000, 3)
    return {
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": round(milliseconds / tokens, 3) if tokens else 0.0,
        f"{name}_per_second": round(tokens / seconds, 3) if seconds > 0 else 0.0,
    }


def _event(content: Any) -> bytes:
    return b"data: " + dump(content) + b"\n\n"
