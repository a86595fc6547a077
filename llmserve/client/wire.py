"""Requests and responses as the protocol has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tritonclient.grpc import service_pb2

from llmserve.client.model import ModelInfo
from llmserve.client.options import Value, pack_option, set_parameters, split_options
from llmserve.client.packing import pack_texts, unpack_numbers, unpack_texts
from llmserve.client.results import Logprob, Piece
from llmserve.errors import ClientError, UsageError

_CONTRACT = frozenset(
    {
        "text_output",
        "finish_reason",
        "num_input_tokens",
        "num_output_tokens",
        "output_log_probs",
        "cum_log_probs",
    }
)
_WIDEST = 8


def build_request(
    info: ModelInfo,
    prompts: Sequence[str],
    options: Mapping[str, Value],
    *,
    request_id: str = "",
    controls: Mapping[str, Value] | None = None,
) -> Any:
    """Build a ``ModelInferRequest``: one row per prompt, the same options for all of them."""
    request = service_pb2.ModelInferRequest(model_name=info.name, id=request_id)
    request.inputs.add(name="text_input", datatype="BYTES", shape=_text_shape(info, len(prompts)))
    request.raw_input_contents.append(pack_texts(prompts))
    parameters, tensors = split_options(info, options)
    for tensor, value in tensors:
        shape, raw = pack_option(tensor, value, len(prompts), batched=info.batched)
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        request.raw_input_contents.append(raw)
    set_parameters(request.parameters, parameters)
    set_parameters(request.parameters, controls or {})
    return request


def _text_shape(info: ModelInfo, rows: int) -> list[int]:
    tensor = info.inputs.get("text_input")
    if tensor is None or tensor.datatype != "BYTES" or "text_output" not in info.outputs:
        raise UsageError(
            f"{info.name!r} takes no text: its inputs are {', '.join(info.inputs) or 'none'}",
            mend="name a model that takes text_input and gives text_output",
        )
    if info.batched:
        return [rows, *(1 for _ in tensor.dims)]
    return [rows if at == 0 else 1 for at, _ in enumerate(tensor.dims)]


def read_response(response: Any, rows: int) -> list[Piece]:
    """Read a ``ModelInferResponse``: one piece per row, none where it carries no text."""
    tensors = {
        output.name: (output.datatype, raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=False)
    }
    if "text_output" not in tensors:
        return []
    texts = _rows(tensors, "text_output", rows)
    reasons = _rows(tensors, "finish_reason", rows)
    read = _rows(tensors, "num_input_tokens", rows)
    written = _rows(tensors, "num_output_tokens", rows)
    logprobs = _logprobs(tensors, rows)
    if not texts:
        return []
    others = (name for name in tensors if not (logprobs and name == "logprobs"))
    extra = {name: values for name in others if (values := _extra(tensors, name, rows))}
    return [
        Piece(
            texts[row],
            row,
            (reasons[row] or None) if reasons else None,
            read[row] if read else None,
            written[row] if written else None,
            {name: values[row] for name, values in extra.items()},
            logprobs[row] if logprobs else None,
        )
        for row in range(rows)
    ]


def is_last(message: Any) -> bool:
    """Say whether a message of a stream is the last one for its request."""
    parameters = message.infer_response.parameters
    return "triton_final_response" in parameters and bool(
        parameters["triton_final_response"].bool_param
    )


def _logprobs(
    tensors: Mapping[str, tuple[str, bytes]], rows: int
) -> list[tuple[Logprob, ...]] | None:
    if "logprobs" not in tensors:
        return None
    try:
        told = [json.loads(text) for text in _rows(tensors, "logprobs", rows)]
        return [tuple(_logprob(entry) for entry in row) for row in told]
    except (ValueError, KeyError, TypeError, ClientError):
        # Another model's, in a form of its own.
        return None


def _logprob(entry: Mapping[str, Any]) -> Logprob:
    own = int(entry["id"]), str(entry["token"]), float(entry["logprob"])
    return Logprob(*own, tuple(_logprob(other) for other in entry.get("top", ())))


def _extra(tensors: Mapping[str, tuple[str, bytes]], name: str, rows: int) -> list[Any]:
    """Return an output of the formatter's own; what is no single value a row is left alone."""
    datatype, raw = tensors[name]
    if name in _CONTRACT or (datatype != "BYTES" and len(raw) > rows * _WIDEST):
        return []
    try:
        values = unpack_texts(raw) if datatype == "BYTES" else unpack_numbers(datatype, raw)
    except ClientError:
        # Nobody asked for it, so it cannot be a reason to lose the answer.
        return []
    return values if len(values) == rows else []


def _rows(tensors: Mapping[str, tuple[str, bytes]], name: str, rows: int) -> list[Any]:
    if name not in tensors:
        return []
    datatype, raw = tensors[name]
    values: list[Any] = unpack_texts(raw) if datatype == "BYTES" else unpack_numbers(datatype, raw)
    if len(values) % rows:
        raise ClientError(f"the server sent {len(values)} values of {name} for {rows} prompts")
    # A model that searches several beams sends them all, the best one first.
    return values[:: len(values) // rows] if values else []
