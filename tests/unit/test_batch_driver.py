"""The driver of whole batches: every request is answered on its own terms."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.runtime.batch import BatchDriver
from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Answer, Tokenizer
from llmserve.runtime.text_formatter import TextFormatter
from llmserve.testing import FakeBackendUtils, FakeRequest, make_parts


class Repeats:
    """A generator that repeats the prompt for ever; a prompt with ``!`` makes it fail."""

    context_length: int | None = 100
    eos_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.batches: list[int] = []

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        self.batches.append(len(generations))
        step = 0
        while not all(generation.done for generation in generations):
            for generation in generations:
                if ord("!") in generation.prompt_ids and step == 2:
                    raise MemoryError("no memory left\nfor this")
                generation.push(generation.prompt_ids[step % len(generation.prompt_ids)])
            step += 1


def driver(generator: Repeats, **changes: Any) -> BatchDriver:
    made = BatchDriver({}, Path())
    made.start(make_parts(generator, **changes))
    return made


def ask(text: str, **parameters: Any) -> FakeRequest:
    return FakeRequest({"text_input": [text]}, **parameters)


def test_every_request_of_a_batch_has_its_own_length() -> None:
    asked = [ask("ab", max_tokens=n) for n in (1, 5, 3)]
    generator = Repeats()
    driver(generator, decoupled=False).execute(asked)
    assert [request.text for request in asked] == ["a", "ababa", "aba"]
    assert all(request.closed and len(request.responses) == 1 for request in asked)
    assert generator.batches == [3]


def test_a_stream_gets_pieces_and_its_neighbour_a_whole() -> None:
    pieces, whole = ask("ab", max_tokens=3, stream=True), ask("cd", max_tokens=3)
    driver(Repeats()).execute([pieces, whole])
    assert [response.texts[0] for response in pieces.responses] == ["a", "b", "a"]
    assert [response.texts[0] for response in whole.responses] == ["cdc"]


def test_a_wrong_request_fails_alone_and_before_it_costs_anything() -> None:
    good, bad = ask("ab", max_tokens=2), ask("ab", max_tokens=0)
    generator = Repeats()
    driver(generator).execute([good, bad])
    assert good.text == "ab"
    assert "max_tokens" in (bad.error or "")
    assert generator.batches == [1]


def test_a_request_that_breaks_the_model_fails_alone() -> None:
    good, culprit, other = ask("ab"), ask("!"), ask("cd")
    driver(Repeats(), decoupled=False).execute([good, culprit, other])
    assert (good.text, other.text) == ("abababab", "cdcdcdcd")
    assert culprit.error == "the model failed: MemoryError: no memory left"


class Picky(Repeats):
    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        if any(ord("?") in generation.prompt_ids for generation in generations):
            raise RequestError("no questions: send an order")
        super().generate(generations, tokenizer)


def test_what_only_the_generator_can_tell_is_refused_and_not_a_failure() -> None:
    good, wrong = ask("ab"), ask("?")
    made = driver(Picky(), decoupled=False)
    made.execute([good, wrong])
    assert good.text == "abababab"
    assert wrong.error == "no questions: send an order"
    (refusal,) = wrong.responses
    assert refusal.error
    assert refusal.error.code() == FakeBackendUtils.TritonError.INVALID_ARG


class Keeps(TextFormatter):
    """A formatter that remembers what it was shown."""

    def __init__(self) -> None:
        super().__init__({}, Path())
        self.shown: list[tuple[str, str]] = []

    def format(self, answers: Sequence[Answer]) -> dict[str, Any]:
        self.shown += [(answer.text, answer.so_far) for answer in answers]
        return super().format(answers)


@pytest.mark.parametrize(
    ("stream", "shown"),
    [(True, [("a", "a"), ("b", "ab"), ("a", "aba")]), (False, [("aba", "aba")])],
)
def test_a_formatter_sees_all_so_far_with_every_piece(
    stream: bool, shown: list[tuple[str, str]]
) -> None:
    made, formatter = BatchDriver({}, Path()), Keeps()
    made.start(replace(make_parts(Repeats()), formatter=formatter))
    made.execute([ask("ab", max_tokens=3, stream=stream)])
    assert formatter.shown == shown


def test_a_stream_that_was_begun_is_not_begun_again() -> None:
    stream, culprit = ask("ab", stream=True), ask("!")
    driver(Repeats()).execute([stream, culprit])
    texts = [response.texts[0] for response in stream.responses if not response.error]
    assert "".join(texts) == "aba"
    assert "MemoryError" in (stream.error or "")
    assert stream.closed


def test_a_cancelled_request_stops_and_its_neighbour_goes_on() -> None:
    gone, stays = ask("ab", max_tokens=50), ask("cd", max_tokens=4)
    gone.cancelled = True
    driver(Repeats()).execute([gone, stays])
    assert gone.responses[0].tensors["finish_reason"].reshape(-1)[0] == b"cancelled"
    assert stays.text == "cdcd"


def test_rows_of_a_request_have_their_own_values() -> None:
    request = FakeRequest({"text_input": ["ab", "cd"], "max_tokens": np.array([[1], [3]])})
    driver(Repeats()).execute([request])
    assert [response.texts for response in request.responses] == [["a", "cdc"]]


def test_the_prompt_is_told_once_if_asked() -> None:
    stream = ask("ab", max_tokens=2, stream=True, exclude_input_in_output=False)
    whole = ask("ab", max_tokens=2, exclude_input_in_output=False)
    driver(Repeats()).execute([stream, whole])
    assert stream.text == whole.text == "abab"


def test_tensors_count_before_parameters() -> None:
    request = FakeRequest({"text_input": ["ab"], "max_tokens": np.array([[2]])}, max_tokens=5)
    driver(Repeats()).execute([request])
    assert request.text == "ab"


def test_what_a_model_does_not_take_is_refused_not_ignored() -> None:
    request = ask("ab", top_k=3)
    driver(Repeats()).execute([request])
    assert request.error == "this model does not take top_k"


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12),
            st.integers(-1, 20),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_any_batch_is_answered_completely(asked: list[tuple[str, int, bool]]) -> None:
    requests = [ask(text, max_tokens=n, stream=stream) for text, n, stream in asked]
    driver(Repeats()).execute(requests)
    for (text, length, _), request in zip(asked, requests, strict=True):
        assert request.closed
        if length < 1:
            assert "max_tokens" in (request.error or "")
        elif "!" not in "".join(text for text, _, _ in asked):
            # A zero byte is this tokenizer's end.
            expected = (text.encode() * 20)[:length].split(b"\0")[0]
            assert request.text == expected.decode(errors="replace")


class LeavesEarly(Repeats):
    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        for generation in generations:
            generation.push(generation.prompt_ids[0])


def test_a_generator_that_leaves_off_early_leaves_nobody_waiting() -> None:
    done, left = ask("a", max_tokens=1), ask("b", max_tokens=5)
    driver(LeavesEarly()).execute([done, left])
    assert done.text == "a"
    assert left.closed
    assert "left off" in (left.error or "")


def test_a_request_is_let_go_as_soon_as_it_is_answered() -> None:
    """One that lived until the process ends would take shared memory that is gone by then."""
    request, refused = ask("ab"), ask("")
    kept = [weakref.ref(request), weakref.ref(refused)]
    serving = driver(Repeats())
    gc.disable()
    try:
        serving.execute([request, refused])
        del request, refused
        assert [reference() for reference in kept] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("inputs", "parameters", "message"),
    [
        ({"text_input": []}, {}, "1 to 256 prompts"),
        ({"text_input": ["a"] * 257}, {}, "1 to 256 prompts"),
        ({"text_input": ["a", "b"], "messages": ["[]"]}, {}, "send one"),
        ({"text_input": ["a"]}, {"messages": "[" * 100_000}, "not JSON"),
        (
            {"text_input": ["a"]},
            {"messages": '[{"role": "user", "content": "\\ud800"}]'},
            "half a character",
        ),
        ({"text_input": ["a"]}, {"stop_words": '["\\ud800"]'}, "half a character"),
        ({"text_input": ["a"]}, {"stop_words": json.dumps(["x"] * 65)}, "at most 64 words"),
        ({"text_input": ["a"]}, {"stop_words": "x" * 257}, "256 characters"),
    ],
)
def test_what_would_hurt_others_is_refused(
    inputs: dict[str, Any], parameters: dict[str, Any], message: str
) -> None:
    wrong, good = FakeRequest(inputs, **parameters), ask("ab", max_tokens=2)
    driver(Repeats()).execute([wrong, good])
    assert message in (wrong.error or "")
    assert good.text == "ab"
