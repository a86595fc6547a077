"""On a real Triton: the suite, documents through our client and curl, and nothing but JSON."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from llmserve.client import Completion
from llmserve.errors import RequestRejectedError
from llmserve.testing import ConstrainedConformance, LiveTriton

PROMPT = "The capital of France is"
JSON: dict[str, Any] = {"response_format": "json_object"}


class TestJsonOut(ConstrainedConformance):
    recipe = "jsonout"
    constrained = JSON

    def fits(self, text: str) -> bool:
        return isinstance(json.loads(text), dict)


@pytest.fixture
def model(triton: LiveTriton) -> str:
    return triton.build("jsonout")


@pytest.fixture
def by_hf(triton: LiveTriton) -> str:
    """The same formatter before another generator, in whole batches."""
    return triton.build("hf", formatter="json")


def test_the_document_comes_with_the_answer(triton: LiveTriton, model: str) -> None:
    answer = triton.client.generate(model, PROMPT, max_tokens=8)
    told = json.loads(answer.extra["json_output"])
    assert told["content"] == answer.text
    assert told["usage"] == {"input_tokens": answer.input_tokens, "output_tokens": 8}
    *pieces, last = triton.client.stream(model, PROMPT, max_tokens=8)
    assert pieces
    assert not any(piece.extra["json_output"] for piece in pieces)
    assert json.loads(last.extra["json_output"]) == told


def test_curl_sees_it_too(triton: LiveTriton, model: str) -> None:
    url = f"{triton.server.http_url}/v2/models/{model}/generate"
    body = json.dumps({"text_input": PROMPT, "max_tokens": 8}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body)) as response:
        told = json.loads(response.read())
    assert json.loads(told["json_output"])["content"] == told["text_output"]


@pytest.mark.parametrize("length", [3, 4, 7, 30])
@pytest.mark.parametrize("engine", ["model", "by_hf"])
def test_an_answer_held_to_json_is_complete_however_short(
    triton: LiveTriton, request: pytest.FixtureRequest, engine: str, length: int
) -> None:
    model: str = request.getfixturevalue(engine)
    wishes: list[dict[str, Any]] = [
        {"temperature": 2.0, "seed": n} if n else {"repetition_penalty": 1.3} for n in range(8)
    ]

    def ask(wish: dict[str, Any]) -> Completion:
        return triton.client.generate(model, PROMPT, max_tokens=length, **wish)

    with ThreadPoolExecutor(9) as pool:
        beside, *answers = pool.map(ask, [{}, *({**JSON, **wish} for wish in wishes)])
    for answer in answers:
        assert isinstance(json.loads(answer.text), dict)
        assert answer.finish_reason == "stop"
    assert beside == ask({})


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"response_format": "yaml"}, "one of text, json_object, not 'yaml'"),
        ({**JSON, "max_tokens": 2}, "max_tokens of at least 3"),
        ({**JSON, "ignore_eos": True}, "cannot go with ignore_eos"),
        ({**JSON, "stop_words": ["}"]}, "cannot go with stop_words"),
    ],
)
def test_what_cannot_be_held_to_json_is_refused(
    triton: LiveTriton, model: str, wish: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestRejectedError) as caught:
        triton.client.generate(model, PROMPT, **wish)
    assert message in str(caught.value)
    assert "failed" not in str(caught.value)
