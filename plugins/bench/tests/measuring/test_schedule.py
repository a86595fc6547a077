"""The requests and their schedule: the same seed gives the same."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.errors import UsageError
from llmserve.plugin import demo_model_path
from llmserve_bench.prompts import (
    ESTIMATE,
    Lengths,
    Prompts,
    TokenCounter,
    arrival_times,
    find_counter,
    make_prompt,
    make_schedule,
    read_dataset,
)
from llmserve_bench.results import Load

WORDS = TokenCounter(lambda text: len(text.split()), "words")


@given(st.floats(0.1, 1000), st.integers(1, 300), st.sampled_from(["poisson", "constant"]))
def test_arrivals_have_the_requested_number_and_order(rate: float, count: int, kind: str) -> None:
    times = arrival_times(Load(rate=rate, arrivals=kind, requests=count))
    assert len(times) == count
    assert times[0] == 0
    assert times == sorted(times)
    assert times == arrival_times(Load(rate=rate, arrivals=kind, requests=count))


def test_too_many_arrivals_are_refused() -> None:
    with pytest.raises(UsageError, match="more than 10,000,000"):
        arrival_times(Load(rate=1e6, duration=3600))


@given(st.integers(1, 400), st.integers())
def test_synthetic_prompts_have_the_requested_number_of_tokens(tokens: int, seed: int) -> None:
    assert WORDS.count(make_prompt(WORDS, tokens, random.Random(seed))) == tokens


@pytest.mark.parametrize("tokens", [3, 17, 128])
def test_their_lengths_are_exact_for_the_models_own_tokenizer(tokens: int) -> None:
    counter = find_counter(None, "", demo_model_path())
    prompt = make_prompt(counter, tokens, random.Random(1))
    assert counter.count(prompt) == tokens


def test_without_a_tokenizer_lengths_are_marked_as_estimated(tmp_path: Path) -> None:
    assert find_counter(tmp_path, "none", None) is ESTIMATE
    assert "estimated" in Prompts().describe(ESTIMATE)
    with pytest.raises(UsageError, match="cannot be read") as caught:
        find_counter(None, "", tmp_path)
    assert "\n" not in str(caught.value)


def test_adapters_are_named_in_turn_and_none_is_one_of_them() -> None:
    load = Load(concurrency=2, requests=5, adapters=("a", "", "b"), options={"seed": 1})
    _, requests = make_schedule(load, Prompts(), WORDS, ignore_eos=True)
    assert [request.options.get("adapter") for request in requests] == ["a", None, "b", "a", None]
    assert all(request.options["seed"] == 1 for request in requests)


@given(st.integers(0, 5), st.integers(1, 40))
def test_the_same_seed_gives_the_same_requests(seed: int, count: int) -> None:
    load, prompts = (
        Load(concurrency=2, requests=count, seed=seed),
        Prompts(output_tokens=Lengths(9, 3)),
    )
    first = make_schedule(load, prompts, WORDS, ignore_eos=True)
    assert first == make_schedule(load, prompts, WORDS, ignore_eos=True)
    other = Load(concurrency=2, requests=count, seed=seed + 1)
    assert first != make_schedule(other, prompts, WORDS, ignore_eos=True)
    warmup, requests = first
    assert len(requests) == count
    # A server may cache prompts.
    assert not {request.prompt for request in warmup} & {request.prompt for request in requests}


@pytest.mark.parametrize("text", ["0", "x", "8,x", "8,-1", "nan", "1e9", ""])
def test_an_invalid_length_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a length"):
        Lengths.parse(text)


def test_answers_have_the_lengths_of_the_dataset(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(
        json.dumps([{"input": "a b", "output": "x y z"}, {"prompt": "c", "max_tokens": 7}])
    )
    load = Load(concurrency=1, requests=3, warmup=1, options={"temperature": 0.5})
    warmup, requests = make_schedule(load, Prompts(path), WORDS, ignore_eos=True)
    assert [request.options["max_tokens"] for request in requests] == [3, 7, 3]
    assert all(request.options["ignore_eos"] for request in requests)
    assert {request.options["temperature"] for request in requests} == {0.5}
    assert warmup[0].prompt == "a b"
    # Options for every request take precedence.
    load = Load(concurrency=1, requests=1, options={"max_tokens": 2})
    _, (request,) = make_schedule(load, Prompts(path), WORDS, ignore_eos=False)
    assert request.options == {"max_tokens": 2}
    with pytest.raises(UsageError, match="no prompt of at most 0 tokens"):
        make_schedule(load, Prompts(path, max_input_tokens=0), WORDS, ignore_eos=False)


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ('[{"input": "a", "instruction": "Sum:", "output": "b"}]', ["a Sum:"]),
        ('{"text": "a", "output_tokens": 3}\n\n{"prompt": "b"}', ["a", "b"]),
        ('["one", "two"]', ["one", "two"]),
        ("one\r\n\r\n two \n", ["one", " two "]),
        ("[1] is a footnote\n{so} is this", ["[1] is a footnote", "{so} is this"]),
    ],
)
def test_formats_of_a_dataset_are_recognized(text: str, prompts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text(text, encoding="utf-8-sig", newline="")
    assert [sample.text for sample in read_dataset(path)] == prompts


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "contains no prompts"),
        (b"\xff", "not UTF-8"),
        (b'[{"input": 3}]', "entry 1: input: .* valid string"),
        (b'{"input": "a"}\n{"inp', "line 2 is not JSON"),
        (b'[{"question": "a"}]', "entry 1: .*: Field required"),
        (b'{"prompt": "a", "max_tokens": true}', "max_tokens: .* valid integer"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens: .* greater than 0"),
        (b'["a", 3]', "entry 2: .* valid dictionary"),
    ],
)
def test_an_invalid_dataset_is_a_one_line_error_with_the_place(
    text: bytes, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    path.write_bytes(text)
    with pytest.raises(UsageError, match=problem):
        read_dataset(path)
