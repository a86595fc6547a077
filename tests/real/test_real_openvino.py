"""A real chat model, served by ``openvino``: answers, a whole context, compressed weights."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmserve.errors import InvalidRequestError
from llmserve.testing import LiveTriton
from tests.kept import linked
from tests.real.model import openvino_model
from tests.real.questions import Questions, check_city, message
from tests.real.reference import CHATS, TOKENS, Reference

pytestmark = [pytest.mark.real, pytest.mark.long]

CONTEXT, LONG = 8192, 7900
LOSSES = {"int8": 0.04, "int4": 0.12}
"""By how much the perplexity may rise."""
CHUNKS = 3


@pytest.fixture(scope="module")
def models(triton: LiveTriton, real_folder: Path) -> dict[str, Path]:
    """The model with unchanged weights and with compressed ones; made at once, by processes."""
    del real_folder

    def model(weights: str) -> Path:
        dtype = "float32" if weights == "auto" else "auto"
        name = f"real-{weights}"
        return linked(
            openvino_model(name, weight_format=weights, dtype=dtype), triton.repository / name
        )

    formats = ("auto", *LOSSES)
    with ThreadPoolExecutor(len(formats)) as pool:
        return dict(zip(formats, pool.map(model, formats), strict=True))


@pytest.fixture(scope="module")
def served(triton: LiveTriton, models: dict[str, Path]) -> LiveTriton:
    triton.load(*(models[weights].name for weights in ("auto", "int8")))
    return triton


def test_answers_are_those_of_generate(
    served: LiveTriton, models: dict[str, Path], reference: Reference
) -> None:
    def ask(chat: str) -> str:
        messages = message(chat)
        return served.client.generate(
            models["auto"].name, messages=messages, max_tokens=TOKENS
        ).text

    with ThreadPoolExecutor(len(CHATS)) as pool:
        assert list(pool.map(ask, CHATS)) == reference.answers


def test_a_prompt_of_the_whole_context_is_computed_once(
    served: LiveTriton, models: dict[str, Path], reference: Reference
) -> None:
    ask = Questions(served.client, models["int8"].name, reference.text(LONG))
    first, slow = ask("What is this text about?")
    again, fast = ask("What is this text about?")
    _, other = ask("Which language is it about?")
    print(f"{ask.tokens} tokens: {slow:.1f} s, again {fast:.2f} s, another end {other:.2f} s")
    assert LONG < ask.tokens < CONTEXT
    assert first == again
    assert max(fast, other) < slow / 4
    with pytest.raises(InvalidRequestError, match="8192"):
        Questions(served.client, models["int8"].name, reference.text(CONTEXT))("And now?")


def test_an_answer_keeps_to_a_json_schema(
    served: LiveTriton, models: dict[str, Path], reference: Reference
) -> None:
    del reference
    check_city(served.client, models["int8"].name)


def test_compressed_weights_lose_no_more_than_is_stated(
    served: LiveTriton, models: dict[str, Path], reference: Reference
) -> None:
    served.load(models["int4"].name)
    for weights, most in LOSSES.items():
        losses, ids = [], []
        for chunk in reference.chunks(CHUNKS):
            # Each without what is before it.
            answer = served.client.generate(
                models[weights].name, chunk, max_tokens=1, prompt_logprobs=1
            )
            entries = json.loads(answer.extra["prompt_logprobs"])
            losses += [-entry["logprob"] for entry in entries[1:]]
            ids.append([entry["id"] for entry in entries])
        whole = reference.perplexity(ids)
        loss = math.exp(sum(losses) / len(losses)) / whole - 1
        print(f"{weights}: perplexity {whole:.2f}, {loss:+.1%}")
        # More than nothing: the weights are compressed.
        assert 0 < abs(loss) < most
