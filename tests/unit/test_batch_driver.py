"""The driver of whole batches: every request is answered on its own terms."""

from __future__ import annotations

import gc
import json
import time
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
from llmserve.runtime.contract import Tensor
from llmserve.runtime.errors import RequestError
from llmserve.runtime.generation import Generation
from llmserve.runtime.protocols import Answer, Parts, Tokenizer
from llmserve.runtime.text_formatter import TextFormatter
from llmserve.testing import ByteTokenizer, FakeBackendUtils, FakeRequest, make_parts


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


class Raw(FakeRequest):
    """A request whose parameters are as they came, which Triton does not look at."""

    def __init__(self, parameters: str | Exception) -> None:
        super().__init__({"text_input": ["a"]})
        self._raw = parameters

    def parameters(self) -> str:
        if isinstance(self._raw, Exception):
            raise self._raw
        return self._raw


@pytest.mark.parametrize(
    "parameters",
    [
        '{"max_tokens": ' + "9" * 4301 + "}",
        '{"messages": "[' + "9" * 4301 + ']"}',
        '{"stop_words": "\\ud800"}',
        '{"max_token\\ud800": 3}',
        "{" * 100_000,
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ],
    ids=lambda given: str(given)[:20],
)
def test_parameters_that_cannot_be_read_are_the_clients_fault(parameters: str | Exception) -> None:
    wrong, parts = Raw(parameters), make_parts(Repeats())
    made = BatchDriver({}, Path())
    made.start(parts)
    made.execute([wrong])
    (refusal,) = wrong.responses
    assert refusal.error
    assert refusal.error.code() == FakeBackendUtils.TritonError.INVALID_ARG
    assert refusal.error.message().encode()
    assert "\n" not in refusal.error.message()
    assert not parts.pb_utils.Logger.errors


class Panic(BaseException):
    """As pyo3's PanicException, which is no Exception."""


class Panics(ByteTokenizer):
    def encode(self, text: str, *, special: bool = True) -> list[int]:
        if text == "!":
            raise Panic("index out of bounds")
        return super().encode(text, special=special)


class PanicsLater(Repeats):
    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        if any(generation.prompt_ids == [ord("!")] for generation in generations):
            raise Panic("index out of bounds")
        super().generate(generations, tokenizer)


@pytest.mark.parametrize(
    "parts", [make_parts(Repeats(), tokenizer=Panics()), make_parts(PanicsLater())]
)
def test_a_panic_of_a_library_fails_one_request_and_not_the_model(parts: Parts) -> None:
    made = BatchDriver({}, Path())
    made.start(parts)
    culprit, good = ask("!"), ask("ab", max_tokens=2)
    made.execute([culprit, good])
    assert culprit.error == "the model failed: RuntimeError: Panic: index out of bounds"
    assert good.text == "ab"


COUNT = Tensor("count", "TYPE_INT32")
TEXT = Tensor("text_output", "TYPE_STRING", optional=False)
TABLE = Tensor("table", "TYPE_FP32", dims=(-1, -1))


class Returns:
    def __init__(self, **tensors: Any) -> None:
        self._tensors = tensors

    def format(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return self._tensors


def formatted(**tensors: Any) -> FakeRequest:
    outputs = {tensor.name: tensor for tensor in (COUNT, TEXT, TABLE)}
    made, request = BatchDriver({}, Path()), FakeRequest({"text_input": ["a", "b"]})
    parts = make_parts(Repeats(), decoupled=False, formatter=Returns(**tensors))
    made.start(replace(parts, outputs=outputs))
    made.execute([request])
    return request


TEXTS = np.array([b"a", b"b"], np.object_)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"count": np.zeros(7)}, "[7] of float64 instead of [2] of INT32 for 'count'"),
        ({"count": np.zeros(2, np.int64)}, "[2] of int64 instead of [2] of INT32 for 'count'"),
        ({"count": np.zeros((2, 1), np.int32)}, "[2, 1] of int32 instead of [2] of INT32"),
        ({"count": [1, 2]}, "list instead of a numpy array for 'count'"),
        ({"table": np.zeros(2, np.float32)}, "[2] of float32 instead of [2, -1] of FP32"),
        ({"other": np.zeros(2)}, "a tensor, but declares none for 'other'"),
        ({}, "no 'text_output', which it declares"),
    ],
)
def test_what_a_formatter_returns_is_held_to_what_it_declares(
    tensors: dict[str, Any], message: str
) -> None:
    error = formatted(**({"text_output": TEXTS} if tensors else {}), **tensors).error or ""
    assert error.startswith("the model failed: OutputError: the formatter ")
    assert "test_batch_driver:Returns returned " in error
    assert message in error


def test_what_a_formatter_declares_it_may_return() -> None:
    count, table = np.ones(2, np.int32), np.zeros((2, 5), np.float32)
    for more in ({}, {"count": count}, {"count": count, "table": table}):
        request = formatted(text_output=TEXTS, **more)
        assert request.error is None
        assert set(request.responses[0].tensors) == {"text_output", *more}


class Scored(Repeats):
    """A generator of many tokens with their scores."""

    context_length = None

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        logits = np.zeros(128, np.float32)
        for generation in generations:
            while not generation.done:
                generation.push(ord("a"), logits)


def test_a_piece_costs_the_same_however_long_the_answer_is() -> None:
    def cost_of_a_piece(count: int) -> float:
        seconds = []
        for _ in range(3):
            asked = ask("ab", max_tokens=count, stream=True, logprobs=0)
            made = driver(Scored(), inputs=("logprobs",))
            began = time.perf_counter()
            made.execute([asked])
            seconds.append(time.perf_counter() - began)
            assert len(asked.responses) == count
        return min(seconds) / count

    short = cost_of_a_piece(800)
    assert cost_of_a_piece(8_000) < 2 * short


def about(request: FakeRequest) -> Any:
    return json.loads(request.text)


def test_who_asks_only_about_the_prompt_is_told_at_once() -> None:
    generator = Repeats()
    asked = ask("ab", prompt_only=True)
    driver(generator).execute([asked, ask("cd", max_tokens=1)])
    assert about(asked) == {"ids": [97, 98], "text": "ab", "context_length": 100}
    assert generator.batches == [1]


def test_a_prompt_over_the_context_can_be_counted() -> None:
    asked = ask("a" * 300, prompt_only=True)
    driver(Repeats()).execute([asked])
    assert len(about(asked)["ids"]) == 300


def test_a_prompt_may_come_as_ids() -> None:
    asked = FakeRequest({}, input_ids="[97, 98]", max_tokens=4)
    rows = FakeRequest({"input_ids": np.array([[99]], np.int32)}, max_tokens=2)
    driver(Repeats()).execute([asked, rows])
    assert (asked.text, rows.text) == ("abab", "cc")


@pytest.mark.parametrize("ids", ["[256]", "[-1]", "[]", "[1.5]", "ab", "{}", '["a"]'])
def test_ids_that_are_no_tokens_are_refused(ids: str) -> None:
    asked = FakeRequest({}, input_ids=ids)
    driver(Repeats()).execute([asked])
    assert asked.error is not None
    assert "input_ids" in asked.error


def test_counts_of_a_stream_are_deltas_for_who_adds_them_up() -> None:
    asked = ask("ab", stream=True, max_tokens=3, return_num_output_tokens=True)
    plain = ask("ab", stream=True, max_tokens=3)
    driver(Repeats(), inputs=("return_num_output_tokens",)).execute([asked, plain])

    def counts(request: FakeRequest) -> list[int]:
        return [int(one.tensors["num_output_tokens"][0, 0]) for one in request.responses]

    assert counts(plain) == [1, 2, 3]
    assert counts(asked) == [1, 1, 1]
