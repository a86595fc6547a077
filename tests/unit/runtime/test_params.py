"""The parameters of a request, and how wrong ones are refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.runtime.answer.params import READERS, Params, read_params
from llmserve.runtime.errors import RequestError


@pytest.mark.parametrize(
    ("values", "temperature"),
    [
        ({}, 0),
        # A sampling parameter without a temperature implies a temperature of 1.
        ({"top_k": 5}, 1),
        ({"top_p": 0.9}, 1),
        ({"min_p": 0.1}, 1),
        ({"temperature": 0, "top_k": 5}, 0),
    ],
)
def test_the_effective_temperature(values: dict[str, Any], temperature: float) -> None:
    assert read_params(values).effective_temperature == temperature


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
    ids=lambda value: str(value)[:20],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read_params({name: value})
    assert (caught.value.code, caught.value.param) == ("invalid_value", name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"stop_words": "END"}, {"stop_words": ("END",)}),
        ({"stop_words": '["a", "b"]'}, {"stop_words": ("a", "b")}),
        ({"stop_words": ["a", ""]}, {"stop_words": ("a",)}),
        ({"stop_words": "[not json"}, {"stop_words": ("[not json",)}),
        ({"max_tokens": "8"}, {"max_tokens": 8}),
        ({"temperature": "0.5", "ignore_eos": "true"}, {"temperature": 0.5, "ignore_eos": True}),
        ({"logit_bias": '{"50256": -100, "3": 0.5}'}, {"logit_bias": {50256: -100.0, 3: 0.5}}),
    ],
)
def test_any_value_may_be_text(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read_params(values) == Params(**expected)


def test_a_near_miss_is_refused_and_an_unrelated_name_is_ignored() -> None:
    with pytest.raises(RequestError, match="did you mean 'max_tokens'") as caught:
        read_params({"max_token": 3})
    assert (caught.value.code, caught.value.param) == ("unknown_option", "max_token")
    assert read_params({"traceparent": "00-x"}) == Params()
    start = time.process_time()
    assert read_params({f"x{n}_of_y": 1 for n in range(20_000)}) == Params()
    assert time.process_time() - start < 0.2, "many names must not stall other requests"


def test_a_parameter_that_a_plugin_reads_is_kept() -> None:
    assert read_params({"lora": "x"}, extras=frozenset({"lora"})).extra == {"lora": "x"}


@given(
    st.dictionaries(
        st.sampled_from(sorted(READERS)),
        st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.text())
        ),
    )
)
def test_any_value_is_accepted_or_refused_without_a_crash(values: dict[str, Any]) -> None:
    try:
        params = read_params(values)
    except RequestError:
        return
    assert params.max_tokens is None or params.max_tokens > 0


def test_every_engine_takes_the_same_requests_for_greedy() -> None:
    assert Params().greedy
    assert Params(temperature=0.0, top_p=0.5).greedy
    assert Params(temperature=1e-7).plain, "the sampler would divide by it"
    assert Params(temperature=2.0, top_k=1).plain
    assert not Params(temperature=0.01).greedy
    assert not Params(top_p=0.9).greedy
    assert Params(repetition_penalty=1.1).greedy
    assert not Params(repetition_penalty=1.1).plain


def test_a_request_may_name_the_token_that_ends_its_answer() -> None:
    of_model = frozenset({2, 7})
    assert Params().ends(of_model) == Params(end_id=-1).ends(of_model) == of_model
    assert Params(end_id=0).ends(of_model) == {0}
