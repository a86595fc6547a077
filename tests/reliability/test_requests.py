"""Requests that mean harm, or that leave: what they cost the others on a real Triton."""

from __future__ import annotations

import json
import math
import random
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import soak

from llmserve.errors import ClientError, RequestRejectedError, UsageError
from llmserve.testing import LiveTriton
from tests.live.servers import PROMPT, eventually, figure

TEXTS = [
    "a\0b",
    "\ufeffBOM",
    "👩‍🚀 and 👨‍👩‍👧‍👦",
    "e\u0301\u0301 grüße",
    "\u202e\u05e9\u05dc",
    "\U0010ffff",
    "\x1b[31m",
]
FLOATS = [
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
]  # fmt: skip
GREEDY = [(prompt, count) for prompt in (PROMPT, "Once upon a time", "A") for count in (4, 20, 60)]


@pytest.fixture(scope="module")
def model(triton: LiveTriton) -> str:
    return triton.build("iterative")


def running(triton: LiveTriton, model: str) -> float:
    return soak.figure(triton, model, "running_sequences")


def test_any_text_streams_to_the_whole_and_what_is_no_text_is_refused(
    triton: LiveTriton, model: str
) -> None:
    for text in TEXTS:
        whole = triton.client.generate(model, text, max_tokens=24, ignore_eos=True).text
        pieces = triton.client.stream(model, text, max_tokens=24, ignore_eos=True)
        assert "".join(piece.text for piece in pieces) == whole
    for raw in (b"\xff", b"\xc3", b"\xed\xa0\xbd", b"\xf0\x9f\x91"):
        assert "UTF-8" in triton.send_bytes(model, raw)
    with pytest.raises(UsageError):
        triton.client.generate(model, "\ud83d")
    body = json.dumps({"text_input": "\ud83d"}).encode()
    url = f"{triton.server.http_url}/v2/models/{model}/generate"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, body, timeout=60)
    assert refused.value.code >= 400
    figure("odd texts streamed to their whole", len(TEXTS), "")


def test_what_cannot_be_is_refused_at_once(triton: LiveTriton, model: str) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [("word " * 50_000, {})]
    asked += [(PROMPT, {"max_tokens": count}) for count in (0, -1, 2**31, 10**14)]
    values = (math.nan, math.inf, -math.inf)
    asked += [(PROMPT, {name: value}) for name in FLOATS for value in values]
    asked += [(PROMPT, {"logit_bias": f'{{"5": {value}}}'}) for value in ("NaN", "Infinity")]
    longest = 0.0
    for prompt, options in asked:
        took = []
        for _ in range(3):
            begun = time.monotonic()
            with pytest.raises(RequestRejectedError):
                triton.client.generate(model, prompt, **options)
            took.append(time.monotonic() - begun)
        longest = max(longest, min(took))
    figure(f"{len(asked)} impossible requests: each refused within", longest)
    assert longest < 0.05 * 4, "a machine that is busy has four times as long"


def test_five_hundred_that_leave_take_no_place_with_them(triton: LiveTriton, model: str) -> None:
    def leave(seed: int) -> None:
        pieces = triton.client.stream(model, PROMPT, max_tokens=400, ignore_eos=True)
        for _ in range(seed % 4):
            next(pieces)
        pieces.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(leave, range(500)))
    begun = time.monotonic()
    eventually(lambda: not running(triton, model), 10)
    took = time.monotonic() - begun
    figure("500 streams left: the model has stopped after", took)
    assert took < 0.5 * 4, "a machine that is busy has four times as long"
    with ThreadPoolExecutor(32) as pool:
        asked = [PROMPT] * 32
        texts = pool.map(lambda p: triton.client.generate(model, p, max_tokens=8).text, asked)
        assert len(set(texts)) == 1


@pytest.mark.soak
def test_sixty_four_streams_of_all_kinds_for_three_minutes(triton: LiveTriton, model: str) -> None:
    client = triton.client
    alone = {
        (prompt, count): client.generate(model, prompt, max_tokens=count).text
        for prompt, count in GREEDY
    }
    end = time.monotonic() + 180
    counts = {"greedy": 0, "left": 0, "drawn": 0}

    def ask_on(seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < end:
            prompt, count = chance.choice(GREEDY)
            kind = chance.choice(list(counts))
            options: dict[str, Any] = {}
            if kind != "greedy":
                options = {
                    "temperature": chance.uniform(0, 2), "top_p": chance.uniform(0.1, 1),
                    "top_k": chance.randint(1, 50), "seed": seed, "ignore_eos": True,
                    "stop_words": ["zz"], "repetition_penalty": chance.uniform(1, 1.5),
                }  # fmt: skip
            pieces = client.stream(model, prompt, max_tokens=count, timeout=120, **options)
            texts = []
            for piece in pieces:
                texts.append(piece.text)
                if kind == "left" and chance.random() < 0.3:
                    break
            pieces.close()
            assert kind != "greedy" or "".join(texts) == alone[prompt, count]
            counts[kind] += 1

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(ask_on, range(64)))
    eventually(lambda: not running(triton, model), 10)
    figure(f"64 streams at a time, {counts}: wrong ones", 0, "")


@pytest.mark.soak
def test_two_hundred_sequences_over_four_places_a_fifth_of_them_abandoned(
    triton: LiveTriton,
) -> None:
    """Nobody reads another's text, and the places of those who went are free in time.

    While a sequence waits for a place Triton counts it as idle: who waits for longer than that
    loses the place that it gets, and is told.
    """
    sequences = triton.build("gpt2-torchscript", idle_seconds=3.0, max_batch_size=4)
    prompts = ("I have lived in London", "Once upon a time", "A", "The capital of France is")
    asked = {"max_tokens": 24, "ignore_eos": True}
    hf = triton.build("hf")
    alone = {prompt: triton.client.generate(hf, prompt, **asked).text for prompt in prompts}
    abandoned: list[Any] = []
    begun = time.monotonic()

    def ask(number: int) -> str:
        prompt = prompts[number % len(prompts)]
        sequence = triton.client.sequence(sequences, timeout=280)
        text, options = "", asked
        try:
            steps = sequence.__enter__()
            while True:
                piece = steps.send("" if text else prompt, step_tokens=4, **options)
                text, options = text + piece.text, {}
                if number % 5 == 0:
                    abandoned.append(sequence)
                    return "abandoned"
                if piece.finish_reason:
                    sequence.__exit__(None, None, None)
                    return "right" if text == alone[prompt] else f"wrong: {text}"
        except ClientError as error:
            return "lost" if "START" in str(error) else str(error)

    with ThreadPoolExecutor(32) as pool:
        found = Counter(pool.map(ask, range(200)))
    figure(f"200 sequences over 4 places, {dict(found)}: took", time.monotonic() - begun)
    assert found["right"]
    assert not found.keys() - {"right", "abandoned", "lost"}
    answer = triton.client.generate(sequences, "Hello", max_tokens=4, timeout=60)
    assert answer.output_tokens == 4
