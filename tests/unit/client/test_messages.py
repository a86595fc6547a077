"""Prompts and options are packed into messages unchanged, and answers are unpacked unchanged."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor

from llmserve.client import script
from llmserve.client.exchange import ASK_FOR_COUNTS
from llmserve.client.messages import (
    build_request,
    check_options,
    pack_numbers,
    pack_texts,
    read_response,
    unpack_texts,
)
from llmserve.client.model import ModelInfo, TensorInfo
from llmserve.client.results import Piece, gather
from llmserve.contract.options import OPTIONS
from llmserve.contract.tensors import TEXT_FORMAT_OUTPUTS
from llmserve.errors import ClientError, OptionError, UsageError
from llmserve_cli.query import query

OUTPUTS = {"text_output": TensorInfo("text_output", "BYTES", (1,))}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def info(*inputs: TensorInfo, batched: bool = True, ours: bool = True) -> ModelInfo:
    text = TensorInfo("text_input", "BYTES", (1,) if batched else (-1,))
    tensors = {tensor.name: tensor for tensor in (text, *inputs)}
    version = "0.1.0" if ours else None
    return ModelInfo("m", "unary", batched, 8, tensors, OUTPUTS, made_by_llmserve=version)


def response(rows: int, **tensors: tuple[str, bytes]) -> Any:
    message = service_pb2.ModelInferResponse(model_name="m")
    for name, (datatype, raw) in tensors.items():
        message.outputs.add(name=name, datatype=datatype, shape=[rows, 1])
        message.raw_output_contents.append(raw)
    return message


@given(st.lists(TEXTS))
def test_texts_are_packed_as_tritons_own_client_reads_them(texts: list[str]) -> None:
    raw = pack_texts(texts)
    assert unpack_texts(raw) == texts
    assert [bytes(text).decode() for text in deserialize_bytes_tensor(raw)] == texts


@given(st.integers(-(2**70), 2**70) | st.booleans() | st.floats() | TEXTS)
def test_options_go_to_our_models_as_parameters(value: Any) -> None:
    options = check_options({"option": value})
    if isinstance(value, str) and "\0" in value:
        with pytest.raises(OptionError):
            build_request(info(), ["p"], options)
        return
    declared = TensorInfo("option", "INT32", (1,), optional=True)
    request = build_request(info(declared), ["p"], options)
    assert len(request.inputs) == 1
    slot = request.parameters["option"]
    sent = getattr(slot, slot.WhichOneof("parameter_choice"))
    is_big = type(value) is int and not -(2**63) <= value < 2**63
    assert sent == (str(value) if is_big else value) or value != value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": {}}, "max_tokens cannot be a dict"),
        ({"stop_words": [["a"]]}, "stop_words cannot be a list"),
        ({"messages": [object()]}, "messages cannot be written as JSON"),
        ({"stream": True}, "call stream() or generate()"),
        ({"sequence_id": 1}, "set by the client"),
        ({"triton_x": 1}, "set by the client"),
    ],
)
def test_options_that_no_model_accepts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_options(options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("datatype", "value"),
    [("INT32", 2**31), ("INT32", "1"), ("INT32", 1.0), ("INT32", True), ("BOOL", 1), ("FP32", "1")],
)
def test_inputs_are_refused_values_of_another_type(datatype: str, value: Any) -> None:
    declared = TensorInfo("option", datatype, (1,), optional=True)
    with pytest.raises(OptionError, match="option"):
        build_request(info(declared, ours=False), ["p"], {"option": value})


@pytest.mark.parametrize(
    ("allowed", "value", "message"),
    [
        (True, 0.25, None),
        (False, 1, "'m' does not accept a queue_timeout"),
        *((True, value, "queue_timeout must be a number") for value in (0, -1, True, "1")),
        *((True, float(value), "queue_timeout must be a number") for value in ("nan", "inf")),
    ],
)
def test_the_queue_timeout_is_sent_as_tritons_own_parameter(
    allowed: bool, value: Any, message: str | None
) -> None:
    model = replace(info(), queue_timeout=allowed)
    if message is None:
        request = build_request(model, ["p"], check_options({"queue_timeout": value}))
        sent = {name: slot.int64_param for name, slot in request.parameters.items()}
        assert sent == {"timeout": 250_000}
    else:
        with pytest.raises(OptionError, match=message):
            build_request(model, ["p"], {"queue_timeout": value})


def test_none_is_not_sent_and_chats_are_json() -> None:
    chat = [{"role": "user", "content": "hé"}]
    checked = check_options({"seed": None, "messages": chat})
    assert list(checked) == ["messages"]
    assert json.loads(str(checked["messages"])) == chat


def test_the_error_for_a_model_without_text_names_its_inputs() -> None:
    model = ModelInfo("m", "unary", True, 8, {"pixels": TensorInfo("pixels", "FP32", (3,))}, {})
    with pytest.raises(UsageError, match="its inputs are pixels"):
        build_request(model, ["p"], {})


@given(st.lists(st.tuples(TEXTS, st.sampled_from(["", "stop"]), st.integers(0, 99)), min_size=1))
def test_responses_are_read_row_by_row(rows: list[tuple[str, str, int]]) -> None:
    message = response(
        len(rows),
        num_output_tokens=("INT32", pack_numbers("INT32", [row[2] for row in rows])),
        finish_reason=("BYTES", pack_texts(row[1] for row in rows)),
        text_output=("BYTES", pack_texts(row[0] for row in rows)),
    )
    pieces = read_response(message, len(rows))
    assert [(p.text, p.finish_reason or "", p.output_tokens) for p in pieces] == rows
    assert [p.index for p in pieces] == list(range(len(rows)))
    assert all(piece.input_tokens is None for piece in pieces)


def test_extra_outputs_of_a_formatter_are_kept() -> None:
    message = response(
        2,
        text_output=("BYTES", pack_texts(["a", "b"])),
        json_output=("BYTES", pack_texts(["{}", "[]"])),
        score=("FP32", pack_numbers("FP32", [0.5, 1.5])),
        logits=("FP32", pack_numbers("FP32", [0.0] * 8)),
        raw=("BYTES", struct.pack("<I", 1) + b"\xff"),
        half=("BF16", b"\0\0\0\0"),
    )
    first, second = read_response(message, 2)
    assert first.extra == {"json_output": "{}", "score": 0.5}
    assert second.extra == {"json_output": "[]", "score": 1.5}
    (whole,) = gather([Piece("a"), replace(first, finish_reason="stop"), Piece("")], 1)
    assert (whole.text, whole.extra) == ("aa", first.extra)


def test_the_best_beam_is_used_and_an_empty_response_has_no_pieces() -> None:
    beams = response(2, text_output=("BYTES", pack_texts(["a1", "a2", "b1", "b2"])))
    assert [piece.text for piece in read_response(beams, 2)] == ["a1", "b1"]
    assert read_response(response(1), 1) == []
    assert read_response(response(1, text_output=("BYTES", b"")), 1) == []


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (struct.pack("<I", 2) + b"a\xff", "not UTF-8 \\(byte 0xff at 1\\)"),
        (struct.pack("<I", 3) + b"ab", "truncated"),
        (b"\1\0", "truncated"),
        (pack_texts(["a", "b", "c"]), "3 values of text_output for 2 prompts"),
    ],
)
def test_broken_responses_are_a_one_line_error(raw: bytes, message: str) -> None:
    with pytest.raises(ClientError, match=message) as caught:
        read_response(response(2, text_output=("BYTES", raw)), 2)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=30))
def test_no_bytes_crash_the_reader(raw: bytes) -> None:
    try:
        texts = unpack_texts(raw)
    except ClientError:
        return
    assert pack_texts(texts) == raw


def test_a_prompt_that_is_not_valid_text_is_refused() -> None:
    with pytest.raises(UsageError, match="UTF-8"):
        build_request(info(), ["\ud800"], {})


def test_the_client_beside_a_model_uses_the_names_of_the_contract() -> None:
    """It is one file that imports nothing of llmserve."""
    inputs = {"text_input", *OPTIONS}
    own = {"url", "model", "json", "timeout", "pin", "prompt", "help"}
    assert {action.dest for action in script._parser()._actions} - own <= inputs
    assert ASK_FOR_COUNTS[0] in inputs
    options = {str(param.name) for param in query.params}
    assert {"max_tokens", "temperature", "top_k", "top_p", "seed", "logprobs"} <= options & inputs
    outputs = (tensor.name for tensor in TEXT_FORMAT_OUTPUTS)
    for name in ("text_input", *outputs, "stream", "logprobs"):
        assert f'"{name}"' in Path(script.__file__).read_text(encoding="utf-8")
