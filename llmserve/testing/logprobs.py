"""Compares log-probabilities of an answer with transformers' own logits for the same text."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest

from llmserve.client import Completion
from llmserve.demo import demo_model_path
from llmserve.testing import LiveTriton

PROMPT = "Programming in C++ is like"
OPTIONS: tuple[dict[str, Any], ...] = (
    {"logprobs": 5},
    {"logprobs": 0, "temperature": 0.8, "seed": 3},
    {"logprobs": 20, "repetition_penalty": 1.3},
    {},
    {"return_log_probs": True, "top_p": 0.9, "seed": 4},
)


@cache
def _model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model_path()).eval()


def _check_prompt(answer: Completion) -> None:
    """Check the log-probability of each token of the prompt, given the tokens before it."""
    import torch

    entries = json.loads(answer.extra["prompt_logprobs"])
    ids = [entry["id"] for entry in entries]
    assert len(ids) == answer.input_tokens
    assert entries[0]["logprob"] is None
    with torch.inference_mode():
        expected = _model()(torch.tensor([ids])).logits[0, :-1].log_softmax(dim=-1)
    for entry, row in zip(entries[1:], expected, strict=True):
        assert entry["logprob"] == pytest.approx(row[entry["id"]].item(), abs=1e-4)
        likeliest = row.topk(2).values.tolist()
        assert [top["logprob"] for top in entry["top"]] == pytest.approx(likeliest, abs=1e-4)


def _check_answer(answer: Completion) -> None:
    import torch
    from transformers import AutoTokenizer

    assert answer.logprobs is not None
    prompt_ids = AutoTokenizer.from_pretrained(demo_model_path()).encode(PROMPT)
    answer_ids = [entry.id for entry in answer.logprobs]
    assert len(answer_ids) == answer.output_tokens
    with torch.inference_mode():
        logits = _model()(torch.tensor([prompt_ids + answer_ids])).logits[0]
    expected = logits[len(prompt_ids) - 1 : -1].log_softmax(dim=-1)
    for entry, row in zip(answer.logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(row[entry.id].item(), abs=1e-4)
        likeliest = row.topk(len(entry.top)).values.tolist() if entry.top else []
        assert [top.logprob for top in entry.top] == pytest.approx(likeliest, abs=1e-4)
        assert [row[top.id].item() for top in entry.top] == pytest.approx(likeliest, abs=1e-4)


def check_logprobs(triton: LiveTriton, model: str) -> None:
    """Check answers alone, streamed, and batched with requests that have other or no options."""
    client = triton.client

    def ask(options: dict[str, Any]) -> Completion:
        return client.generate(model, PROMPT, max_tokens=24, ignore_eos=True, **options)

    alone = [ask(options) for options in OPTIONS]
    executions_before = triton.executions(model)
    with ThreadPoolExecutor(len(OPTIONS)) as pool:
        batched = list(pool.map(ask, OPTIONS))
    executions = triton.executions(model) - executions_before
    if client.model(model).exchange == "unary":
        # The first request may run alone while the others wait; these then run together.
        assert executions <= 3
    for options, answer, batched_answer in zip(OPTIONS, alone, batched, strict=True):
        assert answer.text == batched_answer.text
        if not options:
            assert answer.logprobs is None is batched_answer.logprobs
            continue
        _check_answer(answer)
        _check_answer(batched_answer)
    assert alone[0].logprobs is not None
    assert "".join(entry.token for entry in alone[0].logprobs) == alone[0].text
    assert {len(entry.top) for entry in alone[0].logprobs} == {5}
    _check_prompt(client.generate(model, PROMPT, max_tokens=1, prompt_logprobs=2))
    pieces = list(client.stream(model, PROMPT, max_tokens=24, ignore_eos=True, logprobs=5))
    streamed = [entry for piece in pieces for entry in piece.logprobs or ()]
    assert [entry.id for entry in streamed] == [entry.id for entry in alone[0].logprobs]
    assert [entry.logprob for entry in streamed] == pytest.approx(
        [entry.logprob for entry in alone[0].logprobs], abs=1e-4
    )
