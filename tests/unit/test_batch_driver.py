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
from llmserve.runtime.generation import Constraint, Generation
from llmserve.runtime.protocols import Answer, Tokenizer
from llmserve.runtime.text_formatter import TextFormatter
from llmserve.testing import ByteTokenizer, FakeBackendUtils, FakeRequest, make_parts
from llmserve.testing.fake import FakeModelException
from tests.echoes import Panic
from tests.support import drive


class Repeats:
    """A generator that repeats the prompt for ever.

    It refuses ``?``, fails at the third token of ``!``, panics at ``~`` and leaves off at ``.``.
    """

    context_length: int | None = 100
    eos_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.batches: list[int] = []

    def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
        self.batches.append(len(generations))
        prompts = b"".join(bytes(generation.prompt_ids) for generation in generations)
        if b"?" in prompts:
            raise RequestError("no questions: send an order")
        if b"~" in prompts:
            raise Panic("index out of bounds")
        step = 0
        while not all(generation.done for generation in generations):
            for generation in generations:
                if b"!" in bytes(generation.prompt_ids) and step == 2:
                    raise MemoryError("in cache.cpp:7:\n\nno memory left\nfor this")
                generation.push(generation.prompt_ids[step % len(generation.prompt_ids)])
            step += 1
            if b"." in prompts:
                return


def ask(text: str, **parameters: Any) -> FakeRequest:
    return FakeRequest({"text_input": [text]}, **parameters)


def test_every_request_of_a_batch_has_its_own_length() -> None:
    asked, generator = [ask("ab", max_tokens=n) for n in (1, 5, 3)], Repeats()
    drive(generator, *asked, decoupled=False)
    assert [request.text for request in asked] == ["a", "ababa", "aba"]
    assert all(request.closed and len(request.responses) == 1 for request in asked)
    assert generator.batches == [3]


def test_a_stream_gets_pieces_and_its_neighbour_a_whole() -> None:
    pieces, whole = ask("ab", max_tokens=3, stream=True), ask("cd", max_tokens=3)
    drive(Repeats(), pieces, whole)
    assert [response.texts[0] for response in pieces.responses] == ["a", "b", "a"]
    assert [response.texts[0] for response in whole.responses] == ["cdc"]


def test_rows_of_a_request_have_their_own_values_and_tensors_count_before_parameters() -> None:
    inputs = {"text_input": ["ab", "cd"], "max_tokens": np.array([[1], [3]])}
    request = FakeRequest(inputs, max_tokens=5)
    drive(Repeats(), request)
    assert [response.texts for response in request.responses] == [["a", "cdc"]]


def test_the_prompt_is_told_once_if_asked() -> None:
    stream, whole = (
        ask("ab", max_tokens=2, stream=stream, exclude_input_in_output=False)
        for stream in (True, False)
    )
    drive(Repeats(), stream, whole)
    assert stream.text == whole.text == "abab"


@pytest.mark.parametrize(
    ("culprit", "told", "code"),
    [
        (ask("ab", max_tokens=0), "max_tokens", "INVALID_ARG"),
        (ask("ab", top_k=3), "this model does not take top_k", "INVALID_ARG"),
        (ask("?"), "no questions: send an order", "INVALID_ARG"),
        (ask("!"), "the model failed: MemoryError: in cache.cpp:7: no memory left", "INTERNAL"),
        (ask("~"), "the model failed: RuntimeError: Panic: index out of bounds", "INTERNAL"),
    ],
    ids=["wrong", "unknown", "refused", "failing", "panicking"],
)
def test_a_request_that_cannot_be_answered_fails_alone(
    culprit: FakeRequest, told: str, code: str
) -> None:
    good, other = ask("ab"), ask("cd")
    drive(Repeats(), good, culprit, other, decoupled=False)
    assert (good.text, other.text) == ("abababab", "cdcdcdcd")
    assert told in (culprit.error or "")
    (refusal,) = culprit.responses
    assert refusal.error
    assert refusal.error.code() == getattr(FakeBackendUtils.TritonError, code)


@pytest.mark.parametrize("size", [4_000, 20_000_000])
def test_a_prompt_that_no_context_could_hold_is_refused_before_it_is_tokens(size: int) -> None:
    """To make tokens of a megabyte takes a second, and every other request waits."""
    seen = 0

    class Counts(ByteTokenizer):
        def encode(self, text: str, *, special: bool = True) -> list[int]:
            nonlocal seen
            seen += len(text)
            return super().encode(text, special=special)

    culprit, good = ask("a" * size), ask("ab", max_tokens=2)
    drive(Repeats(), culprit, good, tokenizer=Counts())
    assert good.text == "ab"
    assert f"has {size} characters, which are over the model's context of 100" in (
        culprit.error or ""
    )
    assert seen < 3_300


def test_a_panic_of_the_tokenizer_fails_one_request_and_not_the_model() -> None:
    class Panics(ByteTokenizer):
        def encode(self, text: str, *, special: bool = True) -> list[int]:
            if text == "~":
                raise Panic("index out of bounds")
            return super().encode(text, special=special)

    culprit, good = ask("~"), ask("ab", max_tokens=2)
    drive(Repeats(), culprit, good, tokenizer=Panics())
    assert culprit.error == "the model failed: RuntimeError: Panic: index out of bounds"
    assert good.text == "ab"


def test_a_panic_over_a_form_fails_one_request_and_not_the_model() -> None:
    class Panics(TextFormatter):
        def constrain(self, generation: Generation, tokenizer: Tokenizer) -> Constraint | None:
            if generation.prompt == "~":
                raise Panic("index out of bounds")
            return super().constrain(generation, tokenizer)

    culprit, good = ask("~"), ask("ab", max_tokens=2)
    drive(Repeats(), culprit, good, formatter=Panics({}, Path()))
    assert culprit.error == "the model failed: RuntimeError: Panic: index out of bounds"
    assert good.text == "ab"


@pytest.mark.parametrize(
    ("stream", "shown"),
    [(True, [("a", "a"), ("b", "ab"), ("a", "aba")]), (False, [("aba", "aba")])],
)
def test_a_formatter_sees_all_so_far_with_every_piece(
    stream: bool, shown: list[tuple[str, str]]
) -> None:
    seen: list[tuple[str, str]] = []

    class Notes(TextFormatter):
        def format(self, answers: Sequence[Answer]) -> dict[str, Any]:
            seen.extend((answer.text, answer.so_far) for answer in answers)
            return super().format(answers)

    drive(Repeats(), ask("ab", max_tokens=3, stream=stream), formatter=Notes({}, Path()))
    assert seen == shown


def test_a_stream_that_was_begun_is_not_begun_again() -> None:
    stream, culprit = ask("ab", stream=True), ask("!")
    drive(Repeats(), stream, culprit)
    texts = [response.texts[0] for response in stream.responses if not response.error]
    assert "".join(texts) == "aba"
    assert "MemoryError" in (stream.error or "")
    assert stream.closed


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_response_that_triton_cannot_take_is_an_error_of_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    culprit = ask("ab", max_tokens=4, stream=stream)
    whole, pieces = ask("cd", max_tokens=4), ask("ef", max_tokens=4, stream=True)
    send = FakeRequest.send

    def full(request: FakeRequest, response: Any = None, flags: int = 0) -> None:
        if request is culprit and not response.error:
            raise FakeModelException("no shared memory is left")
        send(request, response, flags=flags)

    monkeypatch.setattr(FakeRequest, "send", full)
    generator = Repeats()
    drive(generator, whole, culprit, pieces)
    assert culprit.error == "the model failed: FakeModelException: no shared memory is left"
    assert (whole.text, pieces.text, pieces.error) == ("cdcd", "efef", None)
    assert generator.batches == [3], "nobody had to begin again"


def test_a_cancelled_request_stops_and_its_neighbour_goes_on() -> None:
    gone, stays = ask("ab", max_tokens=50), ask("cd", max_tokens=4)
    gone.cancelled = True
    drive(Repeats(), gone, stays)
    assert gone.responses[0].tensors["finish_reason"].reshape(-1)[0] == b"cancelled"
    assert stays.text == "cdcd"


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
    drive(Repeats(), *requests)
    for (text, length, _), request in zip(asked, requests, strict=True):
        assert request.closed
        if length < 1:
            assert "max_tokens" in (request.error or "")
        elif not set("!?~.") & set("".join(text for text, _, _ in asked)):
            # A zero byte is this tokenizer's end.
            expected = (text.encode() * 20)[:length].split(b"\0")[0]
            assert request.text == expected.decode(errors="replace")


def test_a_generator_that_leaves_off_early_leaves_nobody_waiting() -> None:
    done, left = ask("a", max_tokens=1), ask(".", max_tokens=5)
    drive(Repeats(), done, left)
    assert done.text == "a"
    assert left.closed
    assert "left off" in (left.error or "")


def test_a_request_is_let_go_as_soon_as_it_is_answered() -> None:
    """One that lived until the process ends would take shared memory that is gone by then."""
    request, refused = ask("ab"), ask("")
    kept = [weakref.ref(request), weakref.ref(refused)]
    serving = BatchDriver({}, Path())
    serving.start(make_parts(Repeats()))
    gc.disable()
    try:
        serving.execute([request, refused])
        del request, refused
        assert [reference() for reference in kept] == [None, None]
    finally:
        gc.enable()


HALF = '[{"role": "user", "content": "\\ud800"}]'


@pytest.mark.parametrize(
    ("prompts", "parameters", "message"),
    [
        ([], {}, "1 to 256 prompts"),
        (["a"] * 257, {}, "1 to 256 prompts"),
        (["a"], {"messages": "[" * 100_000}, "not JSON"),
        *((["a"], {"messages": m}, "messages takes") for m in ("[]", "3", '["hi"]')),
        (["a"], {"messages": '[{"role": "user"}]'}, "messages takes"),
        (["a"], {"messages": HALF}, "half a character"),
        (["a"], {"messages": '[{"role": "a", "content": null}]'}, "messages takes"),
        (
            ["a"],
            {"messages": '[{"role": "a", "content": "", "tool_calls": [{}]}]'},
            "messages takes",
        ),
        (["a"], {"stop_words": '["\\ud800"]'}, "half a character"),
        (["a"], {"stop_words": json.dumps(["x"] * 65)}, "at most 64 words"),
        (["a"], {"stop_words": "x" * 257}, "256 characters"),
    ],
)
def test_what_would_hurt_others_is_refused(
    prompts: list[str], parameters: dict[str, Any], message: str
) -> None:
    wrong, good = FakeRequest({"text_input": prompts}, **parameters), ask("ab", max_tokens=2)
    drive(Repeats(), wrong, good)
    assert message in (wrong.error or "")
    assert good.text == "ab"


@pytest.mark.parametrize(
    "raw",
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
def test_parameters_that_cannot_be_read_are_the_clients_fault(raw: str | Exception) -> None:
    class Raw(FakeRequest):
        """A request whose parameters are as they came, which Triton does not look at."""

        def parameters(self) -> str:
            if isinstance(raw, Exception):
                raise raw
            return raw

    wrong, parts, made = Raw({"text_input": ["a"]}), make_parts(Repeats()), BatchDriver({}, Path())
    made.start(parts)
    made.execute([wrong])
    (refusal,) = wrong.responses
    assert refusal.error
    assert refusal.error.code() == FakeBackendUtils.TritonError.INVALID_ARG
    assert refusal.error.message().encode()
    assert "\n" not in refusal.error.message()
    assert not parts.pb_utils.Logger.errors


COUNT = Tensor("count", "TYPE_INT32")
TEXT = Tensor("text_output", "TYPE_STRING", optional=False)
TABLE = Tensor("table", "TYPE_FP32", dims=(-1, -1))
TEXTS = np.array([b"a", b"b"], np.object_)


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


def test_a_piece_costs_the_same_however_long_the_answer_is() -> None:
    class Scored(Repeats):
        context_length = None

        def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
            logits = np.zeros(128, np.float32)
            for generation in generations:
                while not generation.done:
                    generation.push(ord("a"), logits)

    def cost_of_a_piece(count: int) -> float:
        seconds = []
        for _ in range(3):
            asked = ask("ab", max_tokens=count, stream=True, logprobs=0)
            # Of this thread alone: what else the machine does is not counted.
            began = time.thread_time()
            drive(Scored(), asked, inputs=("logprobs",))
            seconds.append(time.thread_time() - began)
            assert len(asked.responses) == count
        return min(seconds) / count

    # Were it the square, it would be ten times as much.
    assert cost_of_a_piece(5_000) < 4 * cost_of_a_piece(500)


def test_who_asks_only_about_the_prompt_is_told_at_once() -> None:
    asked, over, generator = (
        ask("ab", prompt_only=True),
        ask("a" * 300, prompt_only=True),
        Repeats(),
    )
    drive(generator, asked, over, ask("cd", max_tokens=1))
    assert json.loads(asked.text) == {"ids": [97, 98], "text": "ab", "context_length": 100}
    assert len(json.loads(over.text)["ids"]) == 300
    assert generator.batches == [1]


def test_a_prompt_may_come_as_ids() -> None:
    asked = FakeRequest({}, input_ids="[97, 98]", max_tokens=4)
    rows = FakeRequest({"input_ids": np.array([[99]], np.int32)}, max_tokens=2)
    drive(Repeats(), asked, rows)
    assert (asked.text, rows.text) == ("abab", "cc")


@pytest.mark.parametrize("ids", ["[256]", "[-1]", "[]", "[1.5]", "ab", "{}", '["a"]'])
def test_ids_that_are_no_tokens_are_refused(ids: str) -> None:
    asked = FakeRequest({}, input_ids=ids)
    drive(Repeats(), asked)
    assert "input_ids" in (asked.error or "")


def test_counts_of_a_stream_are_deltas_for_who_adds_them_up() -> None:
    asked = ask("ab", stream=True, max_tokens=3, return_num_output_tokens=True)
    plain = ask("ab", stream=True, max_tokens=3)
    drive(Repeats(), asked, plain, inputs=("return_num_output_tokens",))

    def counts(request: FakeRequest) -> list[int]:
        return [int(one.tensors["num_output_tokens"][0, 0]) for one in request.responses]

    assert (counts(plain), counts(asked)) == ([1, 2, 3], [1, 1, 1])
