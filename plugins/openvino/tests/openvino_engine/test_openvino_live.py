"""Tests of the plugin on a real Triton that the conformance suite does not have."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from llmserve.plugin import demo_model_path
from llmserve.testing import LiveTriton
from llmserve.testing.live import completion_order
from llmserve.testing.tiny_models import make_model
from llmserve.testing.tiny_seeing import conversations, save_seeing

pytestmark = pytest.mark.long

PROMPTS = ("Programming in C++ is like", "Once upon a time", "Hello", "The capital of France is")
PROMPT = PROMPTS[0]
# A process without torch starts in a tenth of the time.
LIGHT: dict[str, Any] = {"tokenizer": "tokenizers"}


@pytest.fixture
def model(triton: LiveTriton, converted: Path) -> str:
    return triton.build("openvino", str(converted))


@pytest.fixture
def reference(triton: LiveTriton) -> str:
    return triton.build("hf")


@pytest.mark.parametrize("batching", ["continuous", "dynamic", "iterative"])
def test_every_driver_returns_the_answers_of_generate(
    triton: LiveTriton, converted: Path, reference: str, batching: str
) -> None:
    options = {} if batching == "continuous" else {"batching": batching, **LIGHT}
    model = triton.build("openvino", str(converted), **options)
    expected = [triton.client.generate(reference, p, max_tokens=32).text for p in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        texts = pool.map(lambda p: triton.client.generate(model, p, max_tokens=32).text, PROMPTS)
        assert list(texts) == expected


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"min_tokens": 40},
        {"end_id": 5},
        {"end_id": 2**31 - 1, "min_tokens": 4},
        {"stop_words": [" in"]},
        {"ignore_eos": True},
        {"presence_penalty": 3.0},
        {"bad_words": ["the"]},
        {"logit_bias": {17: 4.0}},
        {"temperature": 1.2, "top_p": 0.9, "seed": 11},
        {"regex": "[a-z ]{5,40}"},
        {"choice": ["one of these", "another"]},
    ],
    ids=str,
)
def test_parameters_work_as_in_hf(
    triton: LiveTriton, model: str, reference: str, params: dict[str, Any]
) -> None:
    for prompt in PROMPTS[:2]:
        found, expected = (
            triton.client.generate(name, prompt, max_tokens=48, **params)
            for name in (model, reference)
        )
        # How many tokens were cached is all that hf does not say.
        assert replace(found, extra={}) == expected


def test_log_probabilities_are_those_of_hf(triton: LiveTriton, model: str, reference: str) -> None:
    answer, expected = (
        triton.client.generate(name, PROMPT, logprobs=2, max_tokens=12)
        for name in (model, reference)
    )
    assert answer.logprobs
    assert expected.logprobs
    assert [one.token for one in answer.logprobs] == [one.token for one in expected.logprobs]
    values = [one.logprob for one in expected.logprobs]
    assert [one.logprob for one in answer.logprobs] == pytest.approx(values, abs=1e-3)


def test_a_request_joins_while_another_is_running(triton: LiveTriton, model: str) -> None:
    # A fast engine can be done before a busy machine runs the second client. If no request can
    # join, the long one is first every time.
    tries = (completion_order(triton, model, long=450, short=4) for _ in range(3))
    assert ["short", "long"] in tries


def test_a_disconnected_client_frees_the_engine(triton: LiveTriton, converted: Path) -> None:
    """With space for one sequence, the next is served at once only if the first was dropped."""
    model = triton.build("openvino", str(converted), max_sequences=1, **LIGHT)
    params: dict[str, Any] = {"max_tokens": 450, "ignore_eos": True}
    started = time.perf_counter()
    triton.client.generate(model, PROMPT, **params)
    seconds = time.perf_counter() - started

    def wait_after_another() -> float:
        for _ in triton.client.stream(model, PROMPT, **params):
            break
        started = time.perf_counter()
        triton.client.generate(model, PROMPT, max_tokens=1)
        return time.perf_counter() - started

    # On a busy machine, one of them alone may take that long all the same.
    assert min(wait_after_another() for _ in range(5)) < 0.75 * seconds


@pytest.mark.parametrize("family", ["mistral", "qwen2_moe", "gemma2", "deepseek_v3", "qwen3_next"])
def test_each_kind_of_model_gives_the_answers_of_generate(
    triton: LiveTriton, tmp_path: Path, family: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    tokenizer.save_pretrained(tmp_path)
    make_model(family, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    hf = triton.build("hf", str(tmp_path))
    # There is space for fewer than all requests, and a guesser: where states are kept, it is not
    # asked.
    model = triton.build("openvino", str(tmp_path), max_sequences=2, prompt_lookup=3)
    expected = [triton.client.generate(hf, p, max_tokens=24).text for p in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        texts = pool.map(lambda p: triton.client.generate(model, p, max_tokens=24).text, PROMPTS)
        assert list(texts) == expected


@pytest.mark.parametrize("family", ["llava", "gemma4", "qwen3_vl"])
def test_a_model_that_reads_images_answers_as_by_hf(
    triton: LiveTriton, tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    source = str(save_seeing(family, tmp_path_factory.mktemp("seeing")))
    hf, model = triton.build("hf", source), triton.build("openvino", source)
    asked = conversations((1, 0, 3, 2))
    expected = [triton.client.generate(hf, **each) for each in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda each: triton.client.generate(model, **each), asked))
    assert [each.text for each in found] == [each.text for each in expected]
    assert [each.input_tokens for each in found] == [each.input_tokens for each in expected]
