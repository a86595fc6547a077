"""What a request may ask for, and how a wrong wish is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.runtime.errors import RequestError
from llmserve.runtime.params import READERS, Params, read_params


@pytest.mark.parametrize(
    ("asked", "temperature"),
    [
        ({}, 0),
        # Asking for a choice without a temperature means one.
        ({"top_k": 5}, 1),
        ({"top_p": 0.9}, 1),
        ({"min_p": 0.1}, 1),
        ({"temperature": 0, "top_k": 5}, 0),
    ],
)
def test_how_greedy_an_answer_is(asked: dict[str, Any], temperature: float) -> None:
    assert read_params(asked).effective_temperature == temperature


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "many"),
        ("max_tokens", 2**31),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -1),
        ("repetition_penalty", 0),
        ("seed", -1),
        ("seed", 2**64),
        ("ignore_eos", "perhaps"),
        ("stop_words", 3),
        ("stop_words", "[1, 2]"),
        ("temperature", 10**400),
        ("max_tokens", 10**4000),
        ("max_tokens", "9" * 5000),
        ("stop_words", "[" + "9" * 5000 + "]"),
        ("ignore_eos", "x" * 10_000),
        *(("logit_bias", b) for b in ("[1]", "{", '{"a": 1}', '{"1": 101}', '{"1": null}', "5")),
    ],
    ids=lambda given: str(given)[:20],
)
def test_a_wrong_wish_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        read_params({name: value})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("END", ("END",)),
        ('["a", "b"]', ("a", "b")),
        (["a", ""], ("a",)),
        ("[not json", ("[not json",)),
    ],
)
def test_stop_words_come_as_a_list_or_as_text(value: Any, words: tuple[str, ...]) -> None:
    assert read_params({"stop_words": value}).stop_words == words


def test_numbers_may_come_as_text() -> None:
    asked = read_params({"max_tokens": "8", "temperature": "0.5", "ignore_eos": "true"})
    assert (asked.max_tokens, asked.temperature, asked.ignore_eos) == (8, 0.5, True)


def test_a_near_miss_is_refused_and_a_strangers_name_is_left_alone() -> None:
    with pytest.raises(RequestError, match="did you mean 'max_tokens'"):
        read_params({"max_token": 3})
    assert read_params({"traceparent": "00-x"}) == Params()
    begun = time.process_time()
    assert read_params({f"x{n}_of_y": 1 for n in range(20_000)}) == Params()
    assert time.process_time() - begun < 0.2, "whoever sends many stalls nobody"


def test_what_a_plugin_reads_itself_is_kept() -> None:
    assert read_params({"lora": "x"}, extras=frozenset({"lora"})).extra == {"lora": "x"}


def test_biases_are_read_by_token() -> None:
    asked = read_params({"logit_bias": '{"50256": -100, "3": 0.5}'})
    assert asked.logit_bias == {50256: -100.0, 3: 0.5}


@given(
    st.dictionaries(
        st.sampled_from(sorted(READERS)),
        st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.text())
        ),
    )
)
def test_any_wish_is_taken_or_refused_never_a_crash(values: dict[str, Any]) -> None:
    try:
        asked = read_params(values)
    except RequestError:
        return
    assert asked.max_tokens is None or asked.max_tokens > 0
