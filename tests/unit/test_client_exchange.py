"""The exchanges as state machines: no server, only messages going in and coming out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from llmserve.client.aio import Deadline
from llmserve.client.exchange import FINAL_RESPONSE, open_exchange
from llmserve.client.messages import pack_texts, unpack_texts
from llmserve.client.model import ModelInfo, Tensor
from llmserve.client.results import Completion, Piece, gather
from llmserve.errors import ClientError, UsageError

INPUT = {"text_input": Tensor("text_input", "BYTES", (1,))}
OUTPUT = {name: Tensor(name, "BYTES", (1,)) for name in ("text_output", "finish_reason")}
UNARY = ModelInfo("m", "unary", True, 8, INPUT, OUTPUT, made_by_llmserve="0.1.0")
STREAM = replace(UNARY, exchange="stream")
SEQUENCE = replace(UNARY, exchange="sequence", rows=1)


def answer(request_id: str, *rows: tuple[str, str]) -> Any:
    message = service_pb2.ModelInferResponse(model_name="m", id=request_id)
    for at, name in enumerate(("text_output", "finish_reason")):
        message.outputs.add(name=name, datatype="BYTES", shape=[len(rows), 1])
        message.raw_output_contents.append(pack_texts(row[at] for row in rows))
    return message


def texts(request: Any) -> list[str]:
    return unpack_texts(request.raw_input_contents[0])


@given(st.integers(0, 30), st.integers(1, 8))
def test_prompts_are_spread_over_requests_and_come_back_in_order(count: int, size: int) -> None:
    prompts = [f"p{number}" for number in range(count)]
    exchange = open_exchange(replace(UNARY, rows=size), prompts, {}, pieces=False)
    requests = exchange.next_round()
    assert all(len(texts(request)) <= size for request in requests)
    pieces = [
        piece
        for request in reversed(requests)
        for piece in exchange.take(
            answer(request.id, *((text.upper(), "stop") for text in texts(request)))
        )
    ]
    assert [each.text for each in gather(pieces, count)] == [text.upper() for text in prompts]
    assert exchange.next_round() == []
    assert exchange.end_requests() == []


def test_only_streaming_models_are_told_whether_to_stream() -> None:
    for pieces in (True, False):
        (request,) = open_exchange(STREAM, ["p"], {}, pieces=pieces).next_round()
        assert request.parameters["stream"].bool_param is pieces
    (request,) = open_exchange(UNARY, ["p"], {}, pieces=True).next_round()
    assert "stream" not in request.parameters


def test_models_of_others_are_told_so_through_their_inputs() -> None:
    names = ("stream", "return_num_input_tokens", "return_num_output_tokens")
    flags = {name: Tensor(name, "BOOL", (1,), optional=True) for name in names}
    other = replace(STREAM, inputs=INPUT | flags, made_by_llmserve=None)
    (request,) = open_exchange(other, ["p"], {}, pieces=True).next_round()
    sent = dict(
        zip([each.name for each in request.inputs], request.raw_input_contents, strict=True)
    )
    assert {name: sent[name] for name in names} == dict.fromkeys(names, b"\1")
    bare = replace(STREAM, made_by_llmserve=None)
    (request,) = open_exchange(bare, ["p"], {}, pieces=True).next_round()
    assert list(request.parameters) == [FINAL_RESPONSE]
    assert len(request.inputs) == 1


def test_a_row_that_is_complete_stays_silent_while_others_go_on() -> None:
    exchange = open_exchange(STREAM, ["a", "b"], {}, pieces=True)
    (request,) = exchange.next_round()
    assert len(exchange.take(answer(request.id, ("x", "stop"), ("y", "")))) == 2
    assert [p.index for p in exchange.take(answer(request.id, ("", "stop"), ("z", "stop")))] == [1]


def test_ids_of_requests_are_numbers_that_no_other_client_has() -> None:
    """TensorRT-LLM 0.5.0 takes nothing else, and refuses one that is under way."""
    prompts = [f"p{number}" for number in range(16)]
    rounds = [open_exchange(replace(UNARY, rows=1), prompts, {}, pieces=False) for _ in range(2)]
    ids = [request.id for exchange in rounds for request in exchange.next_round()]
    assert len(set(ids)) == 32
    assert all(0 < int(number) < 2**63 for number in ids)


def test_an_answer_to_nothing_is_an_error() -> None:
    exchange = open_exchange(STREAM, ["a"], {}, pieces=True)
    with pytest.raises(ClientError, match="was not sent"):
        exchange.take(answer("7", ("x", "")))


def test_a_sequence_starts_steps_and_ends() -> None:
    exchange = open_exchange(SEQUENCE, ["one", "two"], {"max_tokens": 5}, pieces=True)
    first = exchange.next_round()
    ids = [request.parameters["sequence_id"].int64_param for request in first]
    assert len(set(ids)) == 2
    assert all(0 < number < 2**63 for number in ids)
    assert [texts(request) for request in first] == [["one"], ["two"]]
    assert all(request.parameters["sequence_start"].bool_param for request in first)
    assert all(request.parameters["max_tokens"].int64_param == 5 for request in first)
    exchange.take(answer("0", ("a", "")))
    exchange.take(answer("1", ("b", "stop")))
    (second,) = exchange.next_round()
    assert second.parameters["sequence_id"].int64_param == ids[0]
    assert "sequence_start" not in second.parameters
    assert "max_tokens" not in second.parameters
    assert texts(second) == [""]
    exchange.take(answer("0", ("", "length")))
    assert exchange.next_round() == []
    ends = exchange.end_requests()
    assert [end.parameters["sequence_id"].int64_param for end in ends] == ids
    assert all(end.parameters["sequence_end"].bool_param for end in ends)
    assert exchange.end_requests() == []


def test_a_model_that_counts_steps_is_told_how_many_tokens_each_gives() -> None:
    counted = Tensor("step_tokens", "INT32", (1,), optional=True)
    model = replace(SEQUENCE, inputs={**SEQUENCE.inputs, "step_tokens": counted})

    def told(request: Any) -> int:
        return int(request.parameters["step_tokens"].int64_param)

    for pieces, asked, expected in (
        (True, {}, 4),
        (False, {}, 1 << 20),
        (True, {"step_tokens": 2}, 2),
    ):
        exchange = open_exchange(model, ["one"], asked, pieces=pieces)
        (start,) = exchange.next_round()
        exchange.take(answer("0", ("a", "")))
        (step,) = exchange.next_round()
        (end,) = exchange.end_requests()
        assert [told(start), told(step), told(end)] == [expected, expected, 0]


def test_nothing_is_ended_that_was_not_started() -> None:
    assert open_exchange(SEQUENCE, ["one"], {}, pieces=True).end_requests() == []


def test_a_model_that_never_says_when_it_ends_is_asked_once() -> None:
    mute = replace(SEQUENCE, outputs={"text_output": OUTPUT["text_output"]})
    exchange = open_exchange(mute, ["one"], {}, pieces=True)
    exchange.next_round()
    exchange.take(answer("0", ("a", "")))
    assert exchange.next_round() == []


def test_pieces_become_answers() -> None:
    pieces = [
        Piece("b", 1, input_tokens=2, output_tokens=1),
        Piece("a", 0),
        Piece("c", 1, "length", output_tokens=2),
        Piece("", 1),
    ]
    assert gather(pieces, 3) == [
        Completion("a"),
        Completion("bc", "length", input_tokens=2, output_tokens=2),
        Completion(""),
    ]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_timeout_that_cannot_be_meant(seconds: float) -> None:
    with pytest.raises(UsageError, match="seconds above 0"):
        Deadline(seconds)
