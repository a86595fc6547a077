"""The exchanges as state machines: no server, only messages in and out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from llmserve.client.deadlines import Deadline
from llmserve.client.exchange import FINAL_RESPONSE, open_exchange
from llmserve.client.messages import pack_texts
from llmserve.client.model import ModelInfo, TensorInfo
from llmserve.errors import ClientError, UsageError

INPUT = {"text_input": TensorInfo("text_input", "BYTES", (1,))}
OUTPUT = {name: TensorInfo(name, "BYTES", (1,)) for name in ("text_output", "finish_reason")}
UNARY = ModelInfo("m", "unary", True, 8, INPUT, OUTPUT, made_by_llmserve="0.1.0")
STREAM = replace(UNARY, exchange="stream")
SEQUENCE = replace(UNARY, exchange="sequence", rows=1)


def answer(request_id: str, *rows: tuple[str, str]) -> Any:
    message = service_pb2.ModelInferResponse(model_name="m", id=request_id)
    for column, name in enumerate(("text_output", "finish_reason")):
        message.outputs.add(name=name, datatype="BYTES", shape=[len(rows), 1])
        message.raw_output_contents.append(pack_texts(row[column] for row in rows))
    return message


def test_third_party_models_get_flags_through_their_inputs() -> None:
    names = ("stream", "return_num_input_tokens", "return_num_output_tokens")
    flags = {name: TensorInfo(name, "BOOL", (1,), optional=True) for name in names}
    third_party = replace(STREAM, inputs=INPUT | flags, made_by_llmserve=None)
    (request,) = open_exchange(third_party, ["p"], {}, pieces=True).next_round()
    input_names = [tensor.name for tensor in request.inputs]
    sent = dict(zip(input_names, request.raw_input_contents, strict=True))
    assert {name: sent[name] for name in names} == dict.fromkeys(names, b"\1")
    bare = replace(STREAM, made_by_llmserve=None)
    (request,) = open_exchange(bare, ["p"], {}, pieces=True).next_round()
    assert list(request.parameters) == [FINAL_RESPONSE]
    assert len(request.inputs) == 1


def test_request_ids_are_numbers_that_no_other_client_uses() -> None:
    """TensorRT-LLM 0.5.0 accepts only numbers, and refuses the id of a request in flight."""
    prompts = [f"p{number}" for number in range(16)]
    rounds = [open_exchange(replace(UNARY, rows=1), prompts, {}, pieces=False) for _ in range(2)]
    ids = [request.id for exchange in rounds for request in exchange.next_round()]
    assert len(set(ids)) == 32
    assert all(0 < int(number) < 2**63 for number in ids)


def test_an_answer_to_no_request_is_an_error() -> None:
    exchange = open_exchange(STREAM, ["a"], {}, pieces=True)
    with pytest.raises(ClientError, match="was not sent"):
        exchange.take(answer("7", ("x", "")))


def test_a_model_without_finish_reasons_gets_one_request() -> None:
    mute = replace(SEQUENCE, outputs={"text_output": OUTPUT["text_output"]})
    exchange = open_exchange(mute, ["one"], {}, pieces=True)
    exchange.next_round()
    exchange.take(answer("0", ("a", "")))
    assert exchange.next_round() == []


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e300])
def test_an_invalid_timeout_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="seconds above 0"):
        Deadline(seconds)
