"""Hostile and abandoned requests on a real Triton, and what they cost the others."""

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

pytestmark = pytest.mark.long

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


def test_the_pieces_of_any_text_join_to_the_whole_and_invalid_text_is_refused(
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
    figure("unusual texts whose pieces join to the whole", len(TEXTS), "")


def test_impossible_requests_are_refused_at_once(triton: LiveTriton, model: str) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [("word " * 50_000, {})]
    requests += [(PROMPT, {"max_tokens": count}) for count in (0, -1, 2**31, 10**14)]
    values = (math.nan, math.inf, -math.inf)
    requests += [(PROMPT, {name: value}) for name in FLOATS for value in values]
    requests += [(PROMPT, {"logit_bias": f'{{"5": {value}}}'}) for value in ("NaN", "Infinity")]
    longest = 0.0
    for prompt, options in requests:
        seconds = []
        for _ in range(3):
            started = time.monotonic()
            with pytest.raises(RequestRejectedError):
                triton.client.generate(model, prompt, **options)
            seconds.append(time.monotonic() - started)
        longest = max(longest, min(seconds))
    figure(f"{len(requests)} impossible requests: each refused within", longest)
    assert longest < 0.05 * 4, "a busy machine gets four times as long"


def test_five_hundred_that_disconnect_free_their_slots(triton: LiveTriton, model: str) -> None:
    def disconnect(seed: int) -> None:
        pieces = triton.client.stream(model, PROMPT, max_tokens=400, ignore_eos=True)
        for _ in range(seed % 4):
            next(pieces)
        pieces.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(disconnect, range(500)))
    started = time.monotonic()
    eventually(lambda: not running(triton, model), 10)
    took = time.monotonic() - started
    figure("500 streams abandoned: the model has stopped after", took)
    assert took < 0.5 * 4, "a busy machine gets four times as long"
    with ThreadPoolExecutor(32) as pool:
        prompts = [PROMPT] * 32
        texts = pool.map(lambda p: triton.client.generate(model, p, max_tokens=8).text, prompts)
        assert len(set(texts)) == 1


@pytest.mark.soak
def test_sixty_four_streams_of_all_kinds_for_three_minutes(triton: LiveTriton, model: str) -> None:
    client = triton.client
    alone = {
        (prompt, count): client.generate(model, prompt, max_tokens=count).text
        for prompt, count in GREEDY
    }
    end = time.monotonic() + 180
    counts = {"greedy": 0, "abandoned": 0, "sampled": 0}

    def send_requests(seed: int) -> None:
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
                if kind == "abandoned" and chance.random() < 0.3:
                    break
            pieces.close()
            assert kind != "greedy" or "".join(texts) == alone[prompt, count]
            counts[kind] += 1

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(send_requests, range(64)))
    eventually(lambda: not running(triton, model), 10)
    figure(f"64 concurrent streams, {counts}: wrong ones", 0, "")


@pytest.mark.soak
def test_two_hundred_sequences_over_four_slots_a_fifth_of_them_abandoned(
    triton: LiveTriton,
) -> None:
    """No client gets another's text, and the slots of abandoned sequences are freed in time.

    Triton counts a sequence that waits for a slot as idle: if it waits longer than the limit, it
    loses the slot that it gets, and its client gets an error.
    """
    sequences = triton.build("gpt2-torchscript", idle_seconds=3.0, max_batch_size=4)
    prompts = ("I have lived in London", "Once upon a time", "A", "The capital of France is")
    options = {"max_tokens": 24, "ignore_eos": True}
    hf = triton.build("hf")
    alone = {prompt: triton.client.generate(hf, prompt, **options).text for prompt in prompts}
    abandoned: list[Any] = []
    started = time.monotonic()

    def ask(number: int) -> str:
        prompt = prompts[number % len(prompts)]
        sequence = triton.client.sequence(sequences, timeout=280)
        text, settings = "", options
        try:
            steps = sequence.__enter__()
            while True:
                piece = steps.send("" if text else prompt, step_tokens=4, **settings)
                text, settings = text + piece.text, {}
                if number % 5 == 0:
                    abandoned.append(sequence)
                    return "abandoned"
                if piece.finish_reason:
                    sequence.__exit__(None, None, None)
                    return "right" if text == alone[prompt] else f"wrong: {text}"
        except ClientError as error:
            return "lost" if "START" in str(error) else str(error)

    with ThreadPoolExecutor(32) as pool:
        outcomes = Counter(pool.map(ask, range(200)))
    figure(f"200 sequences over 4 slots, {dict(outcomes)}: took", time.monotonic() - started)
    assert outcomes["right"]
    assert not outcomes.keys() - {"right", "abandoned", "lost"}
    answer = triton.client.generate(sequences, "Hello", max_tokens=4, timeout=60)
    assert answer.output_tokens == 4
