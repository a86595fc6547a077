"""Answers in float32 are those of transformers' ``generate()``, whatever else is running."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from llmserve.testing import LiveTriton

from .references import MAX_TOKENS, OPTIONS, PROMPTS, expected, save_tiny_llama, text_of

pytest.importorskip("vllm", reason="only `make test-vllm` installs vLLM")

BATCHINGS = ("continuous", "static", "dynamic", "iterative")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=BATCHINGS)
def asked(
    request: pytest.FixtureRequest, triton: LiveTriton, tiny: Path
) -> Callable[[int, int, random.Random], str]:
    """Asks for one of the prompts' answers in one of the ways there are, with each driver."""
    # Four at once, and the others wait in vLLM.
    model = triton.build(
        "vllm", str(tiny), **OPTIONS, batching=request.param, max_num_seqs=4, max_batch_size=4
    )

    def ask(number: int, tokens: int, chance: random.Random) -> str:
        text = text_of(PROMPTS[number])
        options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
        if chance.random() < 0.5:
            return triton.client.generate(model, text, **options).text.strip()
        pieces = triton.client.stream(model, text, **options)
        if chance.random() < 0.5:
            return "".join(piece.text for piece in pieces).strip()
        # A client that goes away after a piece has the beginning of the answer.
        first = next(pieces).text
        pieces.close()
        assert first
        assert text_of(expected(PROMPTS[number])).startswith(first.strip())
        return ""

    return ask


def test_answers_are_those_of_generate_alone_and_in_any_mix_of_arrivals(
    asked: Callable[[int, int, random.Random], str],
) -> None:
    def check(seed: int) -> None:
        chance = random.Random(seed)
        number, tokens = chance.randrange(len(PROMPTS)), chance.randrange(1, MAX_TOKENS + 1)
        time.sleep(chance.choice((0, 0.002, 0.01, 0.05)))
        answer = asked(number, tokens, chance)
        assert answer in ("", text_of(expected(PROMPTS[number])[:tokens])), seed

    for seed in range(12):
        check(seed)
    with ThreadPoolExecutor(9) as pool:
        list(pool.map(check, range(12, 100)))
