"""When an answer ends, why, and what has been told by then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from llmserve.runtime import Generation, Params
from tests.support import generation

EOS = 0


def decode(ids: Sequence[int]) -> str:
    return bytes(i for i in ids if i != EOS).decode("utf-8", errors="replace")


def run(text: str, *, max_tokens: int = 100, end: bool = True, **asked: Any) -> Generation:
    made = generation(b"prompt", max_tokens, eos=frozenset({EOS}), decode=decode, **asked)
    for token in [*text.encode(), *([EOS] if end else [])]:
        made.push(token)
    return made


@pytest.mark.parametrize(
    ("text", "asked", "told", "reason"),
    [
        pytest.param("hello", {}, "hello", "stop", id="the end token"),
        pytest.param("hello", {"max_tokens": 3}, "hel", "length", id="the length"),
        pytest.param("é", {"max_tokens": 1}, "\ufffd", "length", id="half a character"),
        pytest.param("say STOP now", {"stop_words": ("STOP",)}, "say ", "stop", id="a stop word"),
        pytest.param("say STO", {"stop_words": ("STOP",)}, "say STO", "stop", id="half of one"),
        pytest.param(
            "a.b.c.", {"stop_words": (".",), "min_tokens": 4}, "a.b", "stop", id="one too early"
        ),
        pytest.param("hi", {"ignore_eos": True}, "hi", None, id="an end that is ignored"),
    ],
)
def test_what_ends_an_answer(text: str, asked: Any, told: str, reason: str | None) -> None:
    done = run(text, **asked)
    assert (done.text, done.finish_reason) == (told, reason)


def test_after_the_end_tokens_are_ignored() -> None:
    done = run("hi")
    done.push(ord("x"))
    assert (done.text, len(done.token_ids)) == ("hi", 3)


def test_cancellation_ends_it_at_the_next_token() -> None:
    gone = False
    generation = Generation(
        b"p", Params(), max_tokens=9, eos_ids=frozenset(), decode=decode, is_cancelled=lambda: gone
    )
    generation.push(ord("a"))
    gone = True
    generation.push(ord("b"))
    assert (generation.text, generation.finish_reason) == ("a", "cancelled")


def test_to_cancel_needs_no_text_which_a_tokenizer_might_fail_at() -> None:
    def fails(ids: object) -> str:
        raise ValueError(ids)

    generation = Generation(b"", Params(), max_tokens=9, eos_ids=frozenset(), decode=fails)
    generation.push(ord("a"))
    generation.cancel()
    assert generation.finish_reason == "cancelled"


def test_a_generator_that_keeps_the_end_to_itself_says_so() -> None:
    ended = run("hello", end=False)
    assert not ended.done
    ended.end()
    assert (ended.text, ended.finish_reason) == ("hello", "stop")
    full = run("hello", max_tokens=5, end=False)
    full.end()
    assert full.finish_reason == "length"


def test_tokens_are_decoded_when_somebody_reads_them_and_not_one_by_one() -> None:
    decoded: list[int] = []

    def counted(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return decode(ids)

    done = generation(b"prompt", 200, decode=counted)
    for token in b"x" * 100:
        done.push(token)
    assert len(decoded) <= 2
    assert done.has_news
    assert done.take() == "x" * 100
    assert len(decoded) <= 5
