"""vLLM itself behind Triton: exact answers, every option, cancellation and failures."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from llmserve.errors import InvalidRequestError, LLMServeError
from llmserve.testing import LiveTriton
from llmserve.testing.logprobs import check_logprobs

pytest.importorskip("vllm", reason="only `make test-vllm` installs vLLM")

OPTIONS: Mapping[str, Any] = {"enforce_eager": True, "dtype": "float32"}
PROMPT = "Programming in C++ is like"


@pytest.fixture
def model(triton: LiveTriton) -> str:
    return triton.build("vllm", **OPTIONS)


@pytest.mark.parametrize("batching", ["continuous", "static", "dynamic"])
def test_log_probabilities_are_those_of_the_model(triton: LiveTriton, batching: str) -> None:
    check_logprobs(triton, triton.build("vllm", **OPTIONS, batching=batching))


def test_constrained_answers(triton: LiveTriton, model: str) -> None:
    client = triton.client

    def text(**form: Any) -> str:
        return client.generate(model, "The capital", max_tokens=48, **form).text

    assert text(choice=["red", "green (light)"]) in ("red", "green (light)")
    assert re.fullmatch("[0-9]{3}-[a-z]{4}", text(regex="[0-9]{3}-[a-z]{4}"))
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
    assert json.loads(text(json_schema=schema))["a"] <= 9
    assert text(grammar='start: "a" "b"') == "ab"
    assert text(guided_decoding_guide_type="ebnf_grammar",
                guided_decoding_guide='root ::= "x" "y"') == "xy"  # fmt: skip
    pieces = client.stream(model, "The capital", max_tokens=48, regex="(so ){9}")
    assert "".join(piece.text for piece in pieces) == "so " * 9
    for form, param in (
        ({"regex": "(["}, "regex"),
        ({"json_schema": {"type": "x"}}, "json_schema"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            text(**form)
        assert refused.value.param == param


def test_options_change_the_answer_as_everywhere(triton: LiveTriton, model: str) -> None:
    ask = triton.client.generate
    plain = ask(model, PROMPT, max_tokens=24)
    word = max(plain.text.split(), key=len)
    assert word not in ask(model, PROMPT, max_tokens=24, bad_words=[word]).text
    stopped = ask(model, PROMPT, max_tokens=24, stop_words=[word])
    assert (plain.text.startswith(stopped.text), stopped.finish_reason) == (True, "stop")
    assert word not in stopped.text
    first = ask(model, PROMPT, max_tokens=1, logprobs=2)
    assert first.logprobs is not None
    other = first.logprobs[0].top[1].id
    biased = ask(model, PROMPT, max_tokens=1, logprobs=0, logit_bias={other: 100})
    assert biased.logprobs is not None
    assert biased.logprobs[0].id == other
    short = ask(model, "The capital of France is", max_tokens=60)
    longer = ask(model, "The capital of France is", max_tokens=60, min_tokens=50)
    assert short.output_tokens is not None
    assert short.output_tokens < 50 <= (longer.output_tokens or 0)
    ids = json.loads(ask(model, PROMPT, prompt_only=True).text)["ids"]
    assert ask(model, "", input_ids=ids, max_tokens=24).text == plain.text
    chat = ask(model, messages=[{"role": "user", "content": "What is the capital of Japan?"}])
    assert "Tokyo" in chat.text
    for option, value in (("temperature", 3.0), ("presence_penalty", 5.0)):
        with pytest.raises(InvalidRequestError) as refused:
            ask(model, PROMPT, **{option: value})
        assert refused.value.param == option


def test_what_a_prompt_shares_with_an_earlier_one_is_not_computed_again(
    triton: LiveTriton, model: str
) -> None:
    # Other tests ask the same model, and one of them with nothing but "so".
    prompt = "Nobody else begins with this: " + "so " * 300
    first = triton.client.generate(model, prompt, max_tokens=2)
    again = triton.client.generate(model, prompt, max_tokens=2)
    assert first.text == again.text
    assert first.extra["num_cached_tokens"] == 0
    assert again.extra["num_cached_tokens"] >= 256


def running(triton: LiveTriton, model: str) -> float:
    with urllib.request.urlopen(triton.server.metrics_url) as response:
        lines = response.read().decode().splitlines()
    prefix = f'llmserve_running_sequences{{model="{model}"'
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(prefix))


def test_streams_that_are_abandoned_end_in_vllm_at_once(triton: LiveTriton, model: str) -> None:
    for _ in range(3):
        pieces = triton.client.stream(model, PROMPT, max_tokens=450, ignore_eos=True)
        next(pieces)
        pieces.close()
    started = time.monotonic()
    while running(triton, model):
        assert time.monotonic() - started < 10
        time.sleep(0.05)
    # The metric itself is published four times a second.
    assert time.monotonic() - started < 0.5 * 4, "a busy machine gets four times as long"
    assert triton.client.generate(model, PROMPT, max_tokens=4).output_tokens == 4


def test_a_step_that_fails_answers_those_in_flight_and_the_next_gets_a_new_engine(
    triton: LiveTriton,
) -> None:
    model = triton.build("vllm", **OPTIONS, max_num_seqs=4, name="failing")
    entry = triton.repository / model / "1" / "model.py"
    entry.write_text(entry.read_text(encoding="utf-8") + _FAILS_ONCE, encoding="utf-8")
    triton.load(model)
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(triton.client.generate, model, PROMPT, max_tokens=400) for _ in "abc"]
    failed = [job.exception() for job in jobs]
    assert any("made to fail" in str(error) for error in failed if error)
    assert all(error is None or isinstance(error, LLMServeError) for error in failed)
    assert triton.client.generate(model, PROMPT, max_tokens=4, timeout=120).output_tokens == 4


_FAILS_ONCE = """
from llmserve_vllm.library import LLMEngine
_step, _calls = LLMEngine.step, []
def _failing(self):
    _calls.append(self)
    if len(_calls) == 20:
        raise RuntimeError("made to fail")
    return _step(self)
LLMEngine.step = _failing
"""
