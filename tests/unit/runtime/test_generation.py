"""When and why an answer ends, and the text that it has by then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from llmserve.runtime import Generation, Params
from llmserve.testing.fake import generation

EOS = 0


def decode(ids: Sequence[int]) -> str:
    return bytes(i for i in ids if i != EOS).decode("utf-8", errors="replace")


def run(text: str, *, max_tokens: int = 100, end: bool = True, **params: Any) -> Generation:
    answer = generation(b"prompt", max_tokens, eos=frozenset({EOS}), decode=decode, **params)
    for token in [*text.encode(), *([EOS] if end else [])]:
        answer.push(token)
    return answer


@pytest.mark.parametrize(
    ("text", "params", "expected", "reason"),
    [
        pytest.param("hello", {}, "hello", "stop", id="the end token"),
        pytest.param("hello", {"max_tokens": 3}, "hel", "length", id="the length"),
        pytest.param("é", {"max_tokens": 1}, "\ufffd", "length", id="half a character"),
        pytest.param("say STOP now", {"stop_words": ("STOP",)}, "say ", "stop", id="a stop word"),
        pytest.param("say STO", {"stop_words": ("STOP",)}, "say STO", "stop", id="half a word"),
        pytest.param(
            "a.b.c.", {"stop_words": (".",), "min_tokens": 4}, "a.b", "stop", id="an early word"
        ),
        pytest.param("hi", {"ignore_eos": True}, "hi", None, id="an end that is ignored"),
    ],
)
def test_what_ends_an_answer(text: str, params: Any, expected: str, reason: str | None) -> None:
    answer = run(text, **params)
    assert (answer.text, answer.finish_reason) == (expected, reason)


def test_after_the_end_tokens_are_ignored() -> None:
    answer = run("hi")
    answer.push(ord("x"))
    assert (answer.text, len(answer.token_ids)) == ("hi", 3)


def test_cancellation_ends_an_answer_at_the_next_token() -> None:
    cancelled = False
    generation = Generation(
        b"p", Params(), max_tokens=9, eos_ids=frozenset(), decode=decode,
        is_cancelled=lambda: cancelled,
    )  # fmt: skip
    generation.push(ord("a"))
    cancelled = True
    generation.push(ord("b"))
    assert (generation.text, generation.finish_reason) == ("a", "cancelled")


def test_cancelling_decodes_no_text_at_which_a_tokenizer_might_fail() -> None:
    def fails(ids: object) -> str:
        raise ValueError(ids)

    generation = Generation(b"", Params(), max_tokens=9, eos_ids=frozenset(), decode=fails)
    generation.push(ord("a"))
    generation.cancel()
    assert generation.finish_reason == "cancelled"


def test_a_generator_that_pushes_no_end_token_ends_the_answer_itself() -> None:
    answer = run("hello", end=False)
    assert not answer.done
    answer.end()
    assert (answer.text, answer.finish_reason) == ("hello", "stop")
    full = run("hello", max_tokens=5, end=False)
    full.end()
    assert full.finish_reason == "length"


def test_tokens_are_decoded_when_the_text_is_read_and_not_one_by_one() -> None:
    decoded: list[int] = []

    def counted(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return decode(ids)

    answer = generation(b"prompt", 200, decode=counted)
    for token in b"x" * 100:
        answer.push(token)
    assert len(decoded) <= 2
    assert answer.has_news
    assert answer.take() == "x" * 100
    assert len(decoded) <= 5
