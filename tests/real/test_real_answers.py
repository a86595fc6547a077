"""A real chat model, served by ``hf`` and ``iterative``: what holds for text with meaning."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from llmserve.testing import LiveTriton
from tests.real.questions import Questions, check_city, message
from tests.real.reference import CHATS, TOKENS, Reference

pytestmark = [pytest.mark.real, pytest.mark.long]

Served = Callable[[str], str]


@pytest.fixture
def served(triton: LiveTriton, real_folder: Path) -> Served:
    """The name of the model, served by a plugin in float32."""
    # The cache of a context of 8,192 tokens would take 3 GB, beside all the other tests' models.
    options: dict[str, dict[str, Any]] = {"iterative": {"cache_tokens": 8192}}
    return lambda plugin: triton.build(
        plugin, str(real_folder), dtype="float32", **options.get(plugin, {})
    )


@pytest.mark.parametrize("plugin", ["hf", "iterative"])
def test_answers_are_those_of_generate(
    triton: LiveTriton, served: Served, reference: Reference, plugin: str
) -> None:
    model = served(plugin)
    with ThreadPoolExecutor(len(CHATS)) as pool:
        answers = pool.map(
            lambda chat: triton.client.generate(model, messages=message(chat), max_tokens=TOKENS),
            CHATS,
        )
        assert [answer.text for answer in answers] == reference.answers


def test_it_knows_what_such_a_model_knows(reference: Reference) -> None:
    """The file was read as it was meant, tokenizer and template included."""
    assert "Tokyo" in reference.answers[0]
    assert "bananas" in reference.answers[1].lower()


def test_an_answer_keeps_to_a_json_schema(triton: LiveTriton, served: Served) -> None:
    check_city(triton.client, served("iterative"))


def test_an_answer_ends_before_a_stop_word(
    triton: LiveTriton, served: Served, reference: Reference
) -> None:
    whole = reference.answers[4]
    # It begins within a token, and ends within another one.
    stop = whole[20:29]
    pieces = triton.client.stream(
        served("iterative"), messages=message(CHATS[4]), max_tokens=TOKENS, stop_words=[stop]
    )
    *_, last = received = list(pieces)
    assert "".join(piece.text for piece in received) == whole[: whole.index(stop)]
    assert last.finish_reason == "stop"


def test_what_a_prompt_shares_with_an_earlier_one_is_not_computed_again(
    triton: LiveTriton, served: Served, reference: Reference
) -> None:
    ask = Questions(triton.client, served("iterative"), reference.text(1000))
    first, slow = ask("What is this text about?")
    again, fast = ask("What is this text about?")
    _, other = ask("Which language is it about?")
    print(f"{ask.tokens} tokens: {slow:.1f} s, again {fast:.2f} s, another end {other:.2f} s")
    assert first == again
    assert max(fast, other) < slow / 2
