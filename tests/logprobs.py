"""Log-probabilities of an answer held against transformers' own logits for the same text."""

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


def _prompt_agrees_with_the_model(answer: Completion) -> None:
    """How likely each token of the prompt was, behind those before it."""
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


def agrees_with_the_model(answer: Completion) -> None:
    import torch
    from transformers import AutoTokenizer

    assert answer.logprobs is not None
    prompt = AutoTokenizer.from_pretrained(demo_model_path()).encode(PROMPT)
    answered = [entry.id for entry in answer.logprobs]
    assert len(answered) == answer.output_tokens
    with torch.inference_mode():
        logits = _model()(torch.tensor([prompt + answered])).logits[0]
    expected = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    for entry, row in zip(answer.logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(row[entry.id].item(), abs=1e-4)
        likeliest = row.topk(len(entry.top)).values.tolist() if entry.top else []
        assert [other.logprob for other in entry.top] == pytest.approx(likeliest, abs=1e-4)
        assert [row[other.id].item() for other in entry.top] == pytest.approx(likeliest, abs=1e-4)


def check_logprobs(triton: LiveTriton, model: str) -> None:
    """Check answers alone, streamed, and beside neighbours with other options and with none."""
    client = triton.client

    def ask(options: dict[str, Any]) -> Completion:
        return client.generate(model, PROMPT, max_tokens=24, ignore_eos=True, **options)

    alone = [ask(options) for options in OPTIONS]
    before = triton.executions(model)
    with ThreadPoolExecutor(len(OPTIONS)) as pool:
        together = list(pool.map(ask, OPTIONS))
    shared = triton.executions(model) - before
    if client.model(model).exchange == "unary":
        # The first may have run alone while the others waited; they then ran together.
        assert shared <= 3
    for options, answer, beside in zip(OPTIONS, alone, together, strict=True):
        assert answer.text == beside.text
        if not options:
            assert answer.logprobs is None is beside.logprobs
            continue
        agrees_with_the_model(answer)
        agrees_with_the_model(beside)
    assert alone[0].logprobs is not None
    assert "".join(entry.token for entry in alone[0].logprobs) == alone[0].text
    assert {len(entry.top) for entry in alone[0].logprobs} == {5}
    _prompt_agrees_with_the_model(client.generate(model, PROMPT, max_tokens=1, prompt_logprobs=2))
    pieces = list(client.stream(model, PROMPT, max_tokens=24, ignore_eos=True, logprobs=5))
    streamed = [entry for piece in pieces for entry in piece.logprobs or ()]
    assert [entry.id for entry in streamed] == [entry.id for entry in alone[0].logprobs]
    assert [entry.logprob for entry in streamed] == pytest.approx(
        [entry.logprob for entry in alone[0].logprobs], abs=1e-4
    )
