"""The batch driver: every request is answered according to its own parameters."""

from __future__ import annotations

import gc
import json
import re
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

from llmserve.contract.tensors import Tensor
from llmserve.runtime.answer.generation import Constraint, Generation
from llmserve.runtime.answer.text_formatter import TextFormatter
from llmserve.runtime.drivers.batch import BatchDriver
from llmserve.runtime.errors import RequestError
from llmserve.runtime.protocols import Answer, Tokenizer
from llmserve.testing import ByteTokenizer, FakeBackendUtils, FakeRequest, make_parts
from llmserve.testing.echoes import Panic
from llmserve.testing.fake import FakeModelException
from tests.support import drive


class Repeater:
    """A generator that repeats the prompt forever.

    It refuses ``?``, fails at the third token of ``!``, panics at ``~`` and stops early at ``.``.
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
    requests, generator = [ask("ab", max_tokens=n) for n in (1, 5, 3)], Repeater()
    drive(generator, *requests, decoupled=False)
    assert [request.text for request in requests] == ["a", "ababa", "aba"]
    assert all(request.closed and len(request.responses) == 1 for request in requests)
    assert generator.batches == [3]


@pytest.mark.parametrize(
    ("context", "default", "parameters", "length"),
    [
        pytest.param(1000, 0, {}, 256, id="a default that is stated"),
        pytest.param(1000, 0, {"fill_context": True}, 998, id="what is left of the context"),
        pytest.param(1000, 0, {"fill_context": True, "max_tokens": 5}, 5, id="the request's"),
        pytest.param(1000, 20, {"fill_context": True}, 20, id="the build's"),
        pytest.param(100, 0, {}, 98, id="the context ends earlier"),
        pytest.param(None, 0, {"fill_context": True}, 256, id="no known context"),
    ],
)
def test_the_length_of_an_answer_whose_request_names_none(
    context: int | None, default: int, parameters: dict[str, Any], length: int
) -> None:
    generator, request = Repeater(), ask("ab", **parameters)
    generator.context_length = context
    drive(generator, request, max_tokens=default)
    assert len(request.text) == length
    assert request.responses[-1].tensors["finish_reason"].item() == b"length"


def test_a_stream_gets_pieces_and_its_neighbour_a_whole_answer() -> None:
    pieces, whole = ask("ab", max_tokens=3, stream=True), ask("cd", max_tokens=3)
    drive(Repeater(), pieces, whole)
    assert [response.texts[0] for response in pieces.responses] == ["a", "b", "a"]
    assert [response.texts[0] for response in whole.responses] == ["cdc"]


def test_rows_of_a_request_have_their_own_values_and_tensors_override_parameters() -> None:
    inputs = {"text_input": ["ab", "cd"], "max_tokens": np.array([[1], [3]])}
    request = FakeRequest(inputs, max_tokens=5)
    drive(Repeater(), request)
    assert [response.texts for response in request.responses] == [["a", "cdc"]]


def test_the_prompt_is_returned_once_on_request() -> None:
    stream, whole = (
        ask("ab", max_tokens=2, stream=stream, exclude_input_in_output=False)
        for stream in (True, False)
    )
    drive(Repeater(), stream, whole)
    assert stream.text == whole.text == "abab"


@pytest.mark.parametrize(
    ("culprit", "message", "code"),
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
    culprit: FakeRequest, message: str, code: str
) -> None:
    good, other = ask("ab"), ask("cd")
    drive(Repeater(), good, culprit, other, decoupled=False)
    assert (good.text, other.text) == ("abababab", "cdcdcdcd")
    assert message in (culprit.error or "")
    (refusal,) = culprit.responses
    assert refusal.error
    assert refusal.error.code() == getattr(FakeBackendUtils.TritonError, code)


def test_an_error_in_a_plugin_says_where() -> None:
    culprit = ask("!")
    drive(Repeater(), culprit)
    where = (
        r"\(Repeater\.\w+ in test_batch_driver\.py, line \d+; the server's log has the traceback\)"
    )
    assert re.search(where, culprit.error or ""), culprit.error


@pytest.mark.parametrize("size", [4_000, 20_000_000])
def test_a_prompt_that_no_context_could_hold_is_refused_before_tokenization(size: int) -> None:
    """Tokenizing a megabyte takes a second, and every other request waits."""
    encoded = 0

    class CountingTokenizer(ByteTokenizer):
        def encode(self, text: str, *, special: bool = True) -> list[int]:
            nonlocal encoded
            encoded += len(text)
            return super().encode(text, special=special)

    culprit, good = ask("a" * size), ask("ab", max_tokens=2)
    drive(Repeater(), culprit, good, tokenizer=CountingTokenizer())
    assert good.text == "ab"
    assert f"has {size} characters, which are over the model's context of 100" in (
        culprit.error or ""
    )
    assert encoded < 3_300


class PanickingTokenizer(ByteTokenizer):
    def encode(self, text: str, *, special: bool = True) -> list[int]:
        if text == "~":
            raise Panic("index out of bounds")
        return super().encode(text, special=special)


class PanickingFormatter(TextFormatter):
    def constrain(self, generation: Generation, tokenizer: Tokenizer) -> Constraint | None:
        if generation.prompt == "~":
            raise Panic("index out of bounds")
        return super().constrain(generation, tokenizer)


@pytest.mark.parametrize(
    "part", [{"tokenizer": PanickingTokenizer()}, {"formatter": PanickingFormatter({}, Path())}]
)
def test_a_panic_of_a_part_fails_one_request_and_not_the_model(part: dict[str, Any]) -> None:
    culprit, good = ask("~"), ask("ab", max_tokens=2)
    drive(Repeater(), culprit, good, **part)
    assert (culprit.error or "").startswith(
        "the model failed: RuntimeError: Panic: index out of bounds"
    )
    assert good.text == "ab"


@pytest.mark.parametrize(
    ("stream", "expected"),
    [(True, [("a", "a"), ("b", "ab"), ("a", "aba")]), (False, [("aba", "aba")])],
)
def test_a_formatter_gets_the_text_so_far_with_every_piece(
    stream: bool, expected: list[tuple[str, str]]
) -> None:
    seen: list[tuple[str, str]] = []

    class RecordingFormatter(TextFormatter):
        def format(self, answers: Sequence[Answer]) -> dict[str, Any]:
            seen.extend((answer.text, answer.so_far) for answer in answers)
            return super().format(answers)

    request = ask("ab", max_tokens=3, stream=stream)
    drive(Repeater(), request, formatter=RecordingFormatter({}, Path()))
    assert seen == expected


def test_a_stream_that_has_started_is_not_restarted() -> None:
    stream, culprit = ask("ab", stream=True), ask("!")
    drive(Repeater(), stream, culprit)
    texts = [response.texts[0] for response in stream.responses if not response.error]
    assert "".join(texts) == "aba"
    assert "MemoryError" in (stream.error or "")
    assert stream.closed


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_response_that_triton_cannot_send_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    culprit = ask("ab", max_tokens=4, stream=stream)
    whole, pieces = ask("cd", max_tokens=4), ask("ef", max_tokens=4, stream=True)
    send = FakeRequest.send

    def send_without_memory(request: FakeRequest, response: Any = None, flags: int = 0) -> None:
        if request is culprit and not response.error:
            raise FakeModelException("no shared memory is left")
        send(request, response, flags=flags)

    monkeypatch.setattr(FakeRequest, "send", send_without_memory)
    generator = Repeater()
    drive(generator, whole, culprit, pieces)
    assert (culprit.error or "").startswith(
        "the model failed: FakeModelException: no shared memory is left"
    )
    assert (whole.text, pieces.text, pieces.error) == ("cdcd", "efef", None)
    assert generator.batches == [3], "no request was restarted"


def test_a_cancelled_request_stops_and_its_neighbour_continues() -> None:
    cancelled, other = ask("ab", max_tokens=50), ask("cd", max_tokens=4)
    cancelled.cancelled = True
    drive(Repeater(), cancelled, other)
    assert cancelled.responses[0].tensors["finish_reason"].reshape(-1)[0] == b"cancelled"
    assert other.text == "cdcd"


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
def test_any_batch_is_answered_completely(batch: list[tuple[str, int, bool]]) -> None:
    requests = [ask(text, max_tokens=n, stream=stream) for text, n, stream in batch]
    drive(Repeater(), *requests)
    for (text, length, _), request in zip(batch, requests, strict=True):
        assert request.closed
        if length < 1:
            assert "max_tokens" in (request.error or "")
        elif not set("!?~.") & set("".join(text for text, _, _ in batch)):
            # A zero byte is this tokenizer's end token.
            expected = (text.encode() * 20)[:length].split(b"\0")[0]
            assert request.text == expected.decode(errors="replace")


def test_a_generator_that_stops_early_leaves_no_request_waiting() -> None:
    complete, unfinished = ask("a", max_tokens=1), ask(".", max_tokens=5)
    drive(Repeater(), complete, unfinished)
    assert complete.text == "a"
    assert unfinished.closed
    assert "stopped before the end" in (unfinished.error or "")


def test_a_request_is_released_as_soon_as_it_is_answered() -> None:
    """A request that lives until the process ends would use shared memory that is gone by then."""
    request, refused = ask("ab"), ask("")
    references = [weakref.ref(request), weakref.ref(refused)]
    driver = BatchDriver({}, Path())
    driver.start(make_parts(Repeater()))
    gc.disable()
    try:
        driver.execute([request, refused])
        del request, refused
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


LONE_SURROGATE = '[{"role": "user", "content": "\\ud800"}]'


@pytest.mark.parametrize(
    ("prompts", "parameters", "message"),
    [
        ([], {}, "1 to 256 prompts"),
        (["a"] * 257, {}, "1 to 256 prompts"),
        (["a"], {"messages": "[" * 100_000}, "cannot be read as JSON"),
        *((["a"], {"messages": m}, "messages takes") for m in ("[]", "3", '["hi"]')),
        (["a"], {"messages": '[{"role": "user"}]'}, "messages takes"),
        (["a"], {"messages": LONE_SURROGATE}, "half a character"),
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
def test_a_request_that_would_harm_others_is_refused(
    prompts: list[str], parameters: dict[str, Any], message: str
) -> None:
    wrong, good = FakeRequest({"text_input": prompts}, **parameters), ask("ab", max_tokens=2)
    drive(Repeater(), wrong, good)
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
    ids=lambda value: str(value)[:20],
)
def test_parameters_that_cannot_be_read_are_the_clients_fault(raw: str | Exception) -> None:
    class Raw(FakeRequest):
        """A request with raw parameters, which Triton does not check."""

        def parameters(self) -> str:
            if isinstance(raw, Exception):
                raise raw
            return raw

    wrong, parts = Raw({"text_input": ["a"]}), make_parts(Repeater())
    driver = BatchDriver({}, Path())
    driver.start(parts)
    driver.execute([wrong])
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


class FixedFormatter:
    def __init__(self, **tensors: Any) -> None:
        self._tensors = tensors

    def format(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return self._tensors


def answer_with(**tensors: Any) -> FakeRequest:
    outputs = {tensor.name: tensor for tensor in (COUNT, TEXT, TABLE)}
    driver, request = BatchDriver({}, Path()), FakeRequest({"text_input": ["a", "b"]})
    parts = make_parts(Repeater(), decoupled=False, formatter=FixedFormatter(**tensors))
    driver.start(replace(parts, outputs=outputs))
    driver.execute([request])
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
def test_the_output_of_a_formatter_must_match_its_declaration(
    tensors: dict[str, Any], message: str
) -> None:
    error = answer_with(**({"text_output": TEXTS} if tensors else {}), **tensors).error or ""
    assert error.startswith("the model failed: UndeclaredOutputError: the formatter ")
    assert "test_batch_driver:FixedFormatter returned " in error
    assert message in error


def test_a_piece_costs_the_same_however_long_the_answer_is() -> None:
    class Scored(Repeater):
        context_length = None

        def generate(self, generations: Sequence[Generation], tokenizer: Tokenizer) -> None:
            logits = np.zeros(128, np.float32)
            for generation in generations:
                while not generation.done:
                    generation.push(ord("a"), logits)

    def cost_of_a_piece(count: int) -> float:
        seconds = []
        for _ in range(3):
            request = ask("ab", max_tokens=count, stream=True, logprobs=0)
            # The time of this thread alone: other load on the machine does not count.
            start = time.thread_time()
            drive(Scored(), request, inputs=("logprobs",))
            seconds.append(time.thread_time() - start)
            assert len(request.responses) == count
        return min(seconds) / count

    # A quadratic cost would be ten times as much.
    assert cost_of_a_piece(5_000) < 4 * cost_of_a_piece(500)


def test_a_request_about_the_prompt_alone_needs_no_generation() -> None:
    short, long = ask("ab", prompt_only=True), ask("a" * 300, prompt_only=True)
    generator = Repeater()
    drive(generator, short, long, ask("cd", max_tokens=1))
    assert json.loads(short.text) == {
        "ids": [97, 98], "text": "ab", "context_length": 100, "longest_prompt": 51_200,
    }  # fmt: skip
    assert len(json.loads(long.text)["ids"]) == 300
    assert generator.batches == [1]


def test_a_prompt_may_be_sent_as_ids() -> None:
    parameter = FakeRequest({}, input_ids="[97, 98]", max_tokens=4)
    tensor = FakeRequest({"input_ids": np.array([[99]], np.int32)}, max_tokens=2)
    drive(Repeater(), parameter, tensor)
    assert (parameter.text, tensor.text) == ("abab", "cc")


@pytest.mark.parametrize("ids", ["[256]", "[-1]", "[]", "[1.5]", "ab", "{}", '["a"]'])
def test_ids_that_are_no_tokens_are_refused(ids: str) -> None:
    request = FakeRequest({}, input_ids=ids)
    drive(Repeater(), request)
    assert "input_ids" in (request.error or "")


def test_counts_of_a_stream_are_deltas_on_request() -> None:
    deltas = ask("ab", stream=True, max_tokens=3, return_num_output_tokens=True)
    totals = ask("ab", stream=True, max_tokens=3)
    drive(Repeater(), deltas, totals, inputs=("return_num_output_tokens",))

    def counts(request: FakeRequest) -> list[int]:
        return [int(piece.tensors["num_output_tokens"][0, 0]) for piece in request.responses]

    assert (counts(totals), counts(deltas)) == ([1, 2, 3], [1, 1, 1])
