"""Gaps: ``suffix`` of OpenAI's and Ollama's APIs, and llama.cpp's ``/infill``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from llmserve.client import Completion, Logprob, ModelInfo, Piece
from llmserve_gateway.openai_requests import read_completion

from .gateways import Triton, request_via

AROUND: Any = {"model": "m", "prompt": "def f(", "suffix": "): pass"}
GAP: Any = {"input_prefix": "def f(", "input_suffix": "): pass"}


class Coder(Triton):
    """A model that fills in gaps, unless it is of no family that does."""

    def __init__(self, family: str | None = "Qwen2.5-Coder", text: str = "a, b") -> None:
        super().__init__()
        self.family, self.text, self.reason = family, text, "stop"
        self.prompts: list[str] = []
        self.maker: str | None = "0.1"

    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        info = await super().model(name, refresh=refresh)
        more: Any = {"include_stop_str_in_output": None, "logprobs": None}
        return replace(info, made_by_llmserve=self.maker, inputs={**info.inputs, **more})

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        if options.get("prompt_only"):
            about = {"ids": [], "text": "", "context_length": 512, "fill_in": self.family}
            return Completion(json.dumps(about), "stop", 0, 0)
        self.requests.append(options)
        self.prompts.append(prompt)
        logprobs = (Logprob(1, "x", -0.5),) if "logprobs" in options else None
        return Completion(self.text, self.reason, 20, 3, logprobs=logprobs)

    async def stream(self, name: str, prompt: str, **options: Any) -> AsyncIterator[Piece]:
        answer = await self.generate(name, prompt, **options)
        yield Piece("a", input_tokens=20, output_tokens=1)
        yield Piece(answer.text[1:], 0, "stop", 20, 3)


def events(answer: Any) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", AROUND),
        ("/v1/completions", {**AROUND, "stream": True}),
        ("/api/generate", AROUND),
        ("/api/generate", {**AROUND, "raw": True, "stream": False}),
        ("/infill", {**GAP, "model": "m"}),
        ("/infill", {**GAP, "stream": True}),
        ("/infill", {"input_prefix": "def ", "prompt": "f(", "input_suffix": "): pass"}),
    ],
)
def test_the_model_gets_what_is_before_the_gap_and_after(path: str, body: Any) -> None:
    model = Coder()
    answer = request_via(model, path, json=body)
    assert answer.status_code == 200, answer.text
    assert model.prompts == ["def f("]
    assert model.requests[0]["suffix"] == "): pass"
    assert "messages" not in model.requests[0]


@pytest.mark.parametrize("maker", ["0.1", None])
@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", AROUND, "suffix"),
        ("/v1/completions", {**AROUND, "stream": True}, "suffix"),
        ("/api/generate", AROUND, "suffix"),
        ("/infill", GAP, "input_suffix"),
    ],
)
def test_a_model_without_the_tokens_is_refused_by_name(
    path: str, body: Any, name: str, maker: str | None
) -> None:
    """One that knows of no gaps would write as if nothing followed, and nobody would see it."""
    model = Coder(family=None)
    model.maker = maker
    answer = request_via(model, path, json=body)
    assert answer.status_code == 400
    said = answer.json()["error"]
    what = said if isinstance(said, str) else said["message"]
    assert what == f"{name}: 'm' fills in no gap, its tokenizer has no tokens for that"
    assert not model.requests


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
def test_an_empty_suffix_is_none(path: str) -> None:
    model = Coder(family=None)
    answer = request_via(model, path, json={**AROUND, "suffix": ""})
    assert answer.status_code == 200
    assert "suffix" not in model.requests[0]


def test_a_gap_at_the_end_of_a_file_is_one_in_llama_cpps_api() -> None:
    model = Coder()
    request_via(model, "/infill", json={"input_prefix": "", "input_suffix": ""})
    assert (model.prompts, model.requests[0]["suffix"]) == ([""], "")


def test_what_is_around_counts_as_prompt_before_it_is_admitted() -> None:
    without = read_completion({"model": "m", "prompt": ["a", "b"]})
    around = read_completion({"model": "m", "prompt": ["a", "b"], "suffix": "c" * 3000})
    assert around.estimated_tokens - without.estimated_tokens == 2000


def test_ollama_refuses_what_the_model_would_not_read_beside_a_gap() -> None:
    for name in ("system", "images"):
        more = {name: "You help." if name == "system" else ["aGk="]}
        answer = request_via(Coder(), "/api/generate", json={**AROUND, **more})
        assert answer.status_code == 400
        assert answer.json()["error"].startswith(f"{name}: what is around a gap")


@pytest.mark.parametrize("family", ["StarCoder", None])
def test_ollamas_clients_see_whether_a_model_fills_in(family: str | None) -> None:
    shown = request_via(Coder(family), "/api/show", json={"model": "m"}).json()
    assert ("insert" in shown["capabilities"]) is (family is not None)


# llama.cpp's API


def test_the_answer_has_the_fields_of_llama_cpp() -> None:
    answer = request_via(Coder(), "/infill", json=GAP).json()
    timings = answer.pop("timings")
    assert answer == {
        "index": 0, "content": "a, b", "tokens": [], "id_slot": -1, "stop": True, "model": "m",
        "tokens_predicted": 3, "tokens_evaluated": 20, "has_new_line": False, "truncated": False,
        "stop_type": "eos", "stopping_word": "", "tokens_cached": 23,
    }  # fmt: skip
    assert (timings["prompt_n"], timings["predicted_n"], timings["cache_n"]) == (20, 3, 0)
    assert timings["predicted_ms"] > 0


def test_a_stream_has_its_parts_and_ends_with_the_numbers() -> None:
    answer = request_via(Coder(), "/infill", json={**GAP, "stream": True})
    *parts, last = events(answer)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [part["content"] for part in parts] == ["a", ", b"]
    assert not any(part["stop"] for part in parts)
    assert (last["content"], last["stop"], last["stop_type"]) == ("", True, "eos")
    assert (last["tokens_predicted"], last["tokens_evaluated"]) == (3, 20)
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_word_is_told_and_left_out(stream: bool) -> None:
    model = Coder(text="a, b\nEND")
    body = {**GAP, "stop": ["END"], "stream": stream}
    found = events(request_via(model, "/infill", json=body)) if stream else [
        request_via(model, "/infill", json=body).json()
    ]  # fmt: skip
    assert "".join(part["content"] for part in found) == "a, b\n"
    last = found[-1]
    told = (last["stop_type"], last["stopping_word"], last["has_new_line"])
    assert told == ("word", "END", True)
    assert model.requests[0]["include_stop_str_in_output"] is True


def test_an_answer_that_is_cut_says_so() -> None:
    model = Coder()
    model.reason = "length"
    answer = request_via(model, "/infill", json={**GAP, "n_predict": 3}).json()
    assert answer["stop_type"] == "limit"
    assert model.requests[0]["max_tokens"] == 3


def test_a_length_of_none_only_has_the_prompt_read() -> None:
    """Editors send it while nothing is typed, so that the next answer finds its prompt warm."""
    model = Coder()
    answer = request_via(model, "/infill", json={**GAP, "n_predict": 0}).json()
    assert (answer["content"], answer["tokens_predicted"]) == ("", 0)
    assert model.requests[0]["max_tokens"] == 1


def test_other_files_reach_the_model() -> None:
    model = Coder()
    extra = [{"filename": "a.py", "text": "A = 1"}, {"text": "B = 2"}]
    request_via(model, "/infill", json={**GAP, "input_extra": extra})
    assert json.loads(model.requests[0]["extra_files"]) == [
        extra[0],
        {**extra[1], "filename": "tmp"},
    ]


def test_a_client_gets_only_the_fields_that_it_names() -> None:
    """So llama.vim asks; what is not there is left out."""
    body = {**GAP, "response_fields": ["content", "timings/prompt_n", "timings/none", "x/y"]}
    assert request_via(Coder(), "/infill", json=body).json() == {
        "content": "a, b", "timings/prompt_n": 20,
    }  # fmt: skip


def test_what_llama_vim_sends_is_answered() -> None:
    model = Coder()
    body = {
        **GAP, "id_slot": 0, "input_extra": [], "prompt": "", "n_predict": 64, "n_indent": 4,
        "stop": [], "top_k": 40, "top_p": 0.9, "stream": False, "samplers": ["top_k", "infill"],
        "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
        "response_fields": ["content", "truncated"],
    }  # fmt: skip
    answer = request_via(model, "/infill", json=body)
    assert answer.json() == {"content": "a, b", "truncated": False}
    options = model.requests[0]
    assert (options["max_tokens"], options["top_k"], options["top_p"]) == (64, 40, 0.9)


def test_probabilities_are_told_if_they_are_asked_for() -> None:
    answer = request_via(Coder(), "/infill", json={**GAP, "n_probs": 2}).json()
    assert answer["completion_probabilities"][0]["logprob"] == -0.5
    assert "completion_probabilities" not in request_via(Coder(), "/infill", json=GAP).json()


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": 5}, "input_suffix"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra"),
        ({"input_extra": {"text": "a"}}, "input_extra"),
        ({"input_extra": [{"text": "a", "filename": None}]}, "input_extra"),
        ({"n_predict": -2}, "n_predict"),
        ({"grammar": "root ::= a"}, "grammar"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"return_tokens": True}, "return_tokens"),
        ({"response_fields": "content"}, "response_fields"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(body: Any, name: str) -> None:
    model = Coder()
    answer = request_via(model, "/infill", json={**GAP, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert not model.requests
