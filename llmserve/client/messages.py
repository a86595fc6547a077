"""Builds request messages and reads response messages of the protocol.

A model that llmserve built gets options as request parameters: Triton batches only requests that
carry the same optional inputs, and requests with different options must still share a batch. Any
other model gets them as the inputs that its config declares, else as parameters.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor

from llmserve.client.model import ModelInfo, TensorInfo
from llmserve.client.results import Logprob, Piece
from llmserve.contract.options import OPTIONS
from llmserve.contract.tensors import (
    LOGPROBS_OUTPUTS,
    MESSAGES,
    TEXT_FORMAT_OUTPUTS,
    TEXT_INPUT,
    TEXT_OUTPUT,
    TEXT_PAIR,
)
from llmserve.errors import ClientError, OptionError, UsageError

Value = bool | int | float | str | list[Any]

_BY_METHOD = frozenset(row.name for row in OPTIONS.values() if row.set_by == "client")
_AS_JSON = frozenset({MESSAGES.name, *(row.name for row in OPTIONS.values() if row.json)})
QUEUE_TIMEOUT = "queue_timeout"
"""Seconds that a request may wait in the queue, not counting the time to answer it."""
_MAX_QUEUE_SECONDS = 1e7
_INT64 = range(-(2**63), 2**63)


def check_options(options: Mapping[str, Any]) -> dict[str, Value]:
    """Drop options that are None and refuse impossible types; the server checks ranges."""
    checked: dict[str, Value] = {}
    for name, value in options.items():
        if name in _BY_METHOD:
            raise OptionError(f"{name} is not an option here", hint="call stream() or generate()")
        if name.startswith(("sequence_", "triton_")):
            raise OptionError(f"{name} is set by the client", hint="leave it out")
        if value is not None:
            checked[name] = _check(name, value)
    return checked


def _check(name: str, raw_value: Any) -> Value:
    # Arrays and tensors of numpy and torch convert themselves to plain Python.
    value = raw_value.tolist() if hasattr(raw_value, "tolist") else raw_value
    if name in _AS_JSON and isinstance(value, (dict, list, tuple)):
        return _as_json(name, value)
    if isinstance(value, (list, tuple)):
        if all(isinstance(item, (bool, int, float, str)) for item in value):
            return list(value)
    elif isinstance(value, (bool, int, float, str)):
        return value
    raise OptionError(
        f"{name} cannot be a {type(raw_value).__name__}",
        hint="give a number, a string, a boolean, or a list of them",
    )


def _as_json(name: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{name} cannot be written as JSON: {error}") from None


def _set_parameters(parameters: Any, options: Mapping[str, Value]) -> None:
    for name, value in options.items():
        slot = parameters[name]
        if isinstance(value, bool):
            slot.bool_param = value
        elif isinstance(value, int) and value in _INT64:
            slot.int64_param = value
        elif isinstance(value, float):
            slot.double_param = value
        else:
            # Triton refuses uint64_param here, so an integer beyond int64 is sent as text too.
            slot.string_param = _text(name, value)


def _text(name: str, value: Value) -> str:
    text = _as_json(name, value) if isinstance(value, list) else str(value)
    if "\0" in text:
        # Triton would silently cut the text there.
        raise OptionError(f"{name} cannot contain a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OptionError(f"{name} has a character that UTF-8 cannot encode") from None
    return text


def _queue_microseconds(info: ModelInfo, value: Value) -> int:
    if not info.queue_timeout:
        # Triton would silently ignore it.
        raise OptionError(
            f"{info.name!r} does not accept a {QUEUE_TIMEOUT}",
            hint="leave it out, or set default_timeout_microseconds and allow_timeout_override for "
            "its queue in config.pbtxt",
        )
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value < _MAX_QUEUE_SECONDS
    ):
        raise OptionError(f"{QUEUE_TIMEOUT} must be a number of seconds above 0, not {value!r}")
    return max(1, round(1_000_000 * value))


def _pack_option(
    tensor: TensorInfo, value: Value, rows: int, *, batched: bool
) -> tuple[list[int], bytes]:
    """Return the shape and the bytes of an option's input, the same for every row."""
    values = value if isinstance(value, list) else [value]
    dims = _fit(tensor.dims, len(values))
    if prod(dims) != len(values):
        raise OptionError(f"{tensor.name} needs {prod(dims)} values, not {len(values)}")
    values = values * rows if batched else values
    if tensor.datatype == "BYTES":
        raw = pack_texts(item if isinstance(item, str) else json.dumps(item) for item in values)
    else:
        try:
            raw = pack_numbers(tensor.datatype, values)
        except ValueError as error:
            raise OptionError(f"{tensor.name} {error}") from None
    return [rows, *dims] if batched else dims, raw


def _fit(dims: Iterable[int], width: int) -> list[int]:
    """Fill in variable dimensions: the last one becomes the width, others become 1."""
    fitted = list(dims)
    for axis in reversed(range(len(fitted))):
        if fitted[axis] < 0:
            fitted[axis], width = width, 1
    return fitted


_OUTPUTS = tuple(tensor.name for tensor in TEXT_FORMAT_OUTPUTS)
_STANDARD = frozenset({*_OUTPUTS, *(tensor.name for tensor in LOGPROBS_OUTPUTS)})
_MAX_ITEM_BYTES = 8
_INT32_BYTES = 4


def build_request(
    info: ModelInfo,
    prompts: Sequence[str],
    options: Mapping[str, Value],
    *,
    request_id: str = "",
    controls: Mapping[str, Value] | None = None,
    pairs: Sequence[str] | None = None,
) -> Any:
    """Build a ``ModelInferRequest``: one row per prompt, the same options for all of them.

    ``pairs`` has the second text of each prompt.
    """
    request = service_pb2.ModelInferRequest(model_name=info.name, id=request_id)
    shape = _text_shape(info, len(prompts))
    for name, texts in ((TEXT_INPUT.name, prompts), (TEXT_PAIR.name, pairs)):
        if texts is not None:
            tensor = info.inputs.get(name)
            called = name if tensor is None else tensor.name
            request.inputs.add(name=called, datatype="BYTES", shape=shape)
            request.raw_input_contents.append(pack_texts(texts))
    parameters = dict(controls or {})
    for name, value in options.items():
        tensor = info.input_of(name)
        if name == QUEUE_TIMEOUT:
            parameters["timeout"] = _queue_microseconds(info, value)
        elif info.made_by_llmserve or tensor is None:
            parameters[name] = value
        else:
            shape, raw = _pack_option(tensor, value, len(prompts), batched=info.batched)
            request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
            request.raw_input_contents.append(raw)
    _set_parameters(request.parameters, parameters)
    return request


def _text_shape(info: ModelInfo, rows: int) -> list[int]:
    tensor = info.inputs.get("text_input")
    if tensor is None or tensor.datatype != "BYTES" or "text_output" not in info.outputs:
        raise UsageError(
            f"{info.name!r} accepts no text: its inputs are {', '.join(info.inputs) or 'none'}",
            hint="choose a model with the input text_input and the output text_output",
        )
    if info.batched:
        return [rows, *(1 for _ in tensor.dims)]
    return [rows if axis == 0 else 1 for axis, _ in enumerate(tensor.dims)]


def read_response(response: Any, rows: int, answer: str = TEXT_OUTPUT.name) -> list[Piece]:
    """Read a ``ModelInferResponse``: one piece per row, none if it contains no text.

    ``answer`` is what the model calls its text.
    """
    if answer != TEXT_OUTPUT.name:
        for output in response.outputs:
            if output.name == answer:
                output.name = TEXT_OUTPUT.name
    if rows == 1 and (piece := _read_simple(response)):
        return [piece]
    tensors = {
        output.name: (output.datatype, raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=False)
    }
    if "text_output" not in tensors:
        return []
    texts, reasons, input_counts, output_counts = (_rows(tensors, name, rows) for name in _OUTPUTS)
    logprobs = _logprobs(tensors, rows)
    standard_names = _STANDARD - ({"logprobs"} if logprobs is None else set())
    extra = {name: _extra(tensors, name, rows) for name in tensors if name not in standard_names}
    return [
        Piece(
            text,
            row,
            (reasons[row] or None) if reasons else None,
            input_counts[row] if input_counts else None,
            output_counts[row] if output_counts else None,
            {name: values[row] for name, values in extra.items() if values},
            logprobs[row] if logprobs else None,
        )
        for row, text in enumerate(texts)
    ]


def _read_simple(response: Any) -> Piece | None:
    """Read a response with nothing but one text, reason and counts; return None for any other.

    Nearly all messages of a stream are such, and the general way takes five times as long.
    """
    values: dict[str, Any] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=False):
        name, datatype = output.name, output.datatype
        if name not in _OUTPUTS:
            return None
        if datatype == "INT32" and len(raw) == _INT32_BYTES:
            values[name] = int.from_bytes(raw, "little", signed=True)
        elif datatype == "BYTES" and int.from_bytes(raw[:4], "little") == len(raw) - 4:
            try:
                values[name] = raw[4:].decode()
            except UnicodeDecodeError:
                return None
        else:
            return None
    if not isinstance(values.get("text_output"), str):
        return None
    reason, input_tokens, output_tokens = (values.get(name) for name in _OUTPUTS[1:])
    return Piece(values["text_output"], 0, reason or None, input_tokens, output_tokens)


def is_last(message: Any) -> bool:
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
        entries = [json.loads(text) for text in _rows(tensors, "logprobs", rows)]
        return [tuple(_logprob(entry) for entry in row) for row in entries]
    except (ValueError, KeyError, TypeError, ClientError):
        # Another model's output of that name, in another format.
        return None


def _logprob(entry: Mapping[str, Any]) -> Logprob:
    chosen = int(entry["id"]), str(entry["token"]), float(entry["logprob"])
    return Logprob(*chosen, tuple(_logprob(other) for other in entry.get("top", ())))


def _extra(tensors: Mapping[str, tuple[str, bytes]], name: str, rows: int) -> list[Any]:
    """Return the values of an extra output; an empty list unless it has one value per row."""
    datatype, raw = tensors[name]
    if datatype != "BYTES" and len(raw) > rows * _MAX_ITEM_BYTES:
        return []
    try:
        values = _unpack(datatype, raw)
    except ClientError:
        # An unreadable extra output must not cost the answer.
        return []
    return values if len(values) == rows else []


def _rows(tensors: Mapping[str, tuple[str, bytes]], name: str, rows: int) -> list[Any]:
    if name not in tensors:
        return []
    datatype, raw = tensors[name]
    values = _unpack(datatype, raw)
    if len(values) % rows:
        raise ClientError(f"the server sent {len(values)} values of {name} for {rows} prompts")
    # A model with beam search sends all beams, the best one first.
    return values[:: len(values) // rows] if values else []


# Triton's values are little-endian, and each text is preceded by its length.
_TYPES = ("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
_FORMATS = dict(zip((*_TYPES, "FP16", "FP32", "FP64"), "?bhiqBHIQefd", strict=True))


def _unpack(datatype: str, raw: bytes) -> list[Any]:
    return unpack_texts(raw) if datatype == "BYTES" else unpack_numbers(datatype, raw)


def pack_texts(texts: Iterable[str]) -> bytes:
    parts: list[bytes] = []
    for text in texts:
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text has a character that UTF-8 cannot encode, at {error.start}",
                hint="give text that was read as UTF-8",
            ) from None
        parts += (struct.pack("<I", len(raw)), raw)
    return b"".join(parts)


def unpack_texts(raw: bytes) -> list[str]:
    """Read the format of :func:`pack_texts`; invalid bytes are the fault of the model."""
    try:
        return [text.decode() for text in deserialize_bytes_tensor(raw)]
    except struct.error:
        raise ClientError("the server sent a truncated text") from None
    except UnicodeDecodeError as error:
        raise ClientError(
            f"the server sent text that is not UTF-8 (byte {error.object[error.start]:#04x} at "
            f"{error.start})",
            hint="the model must hold back a character until it is complete",
        ) from None


def pack_numbers(datatype: str, values: Sequence[Any]) -> bytes:
    """Pack numbers or booleans; raise ValueError if one does not fit the type."""
    code = _FORMATS.get(datatype)
    if code is None:
        raise ValueError(f"a tensor of type {datatype} cannot be sent")
    kinds = (bool,) if code == "?" else (int, float) if code in "efd" else (int,)
    for value in values:
        if not isinstance(value, kinds) or (code != "?" and isinstance(value, bool)):
            raise ValueError(f"must be {datatype}, not {value!r}")
    try:
        return struct.pack(f"<{len(values)}{code}", *values)
    except (struct.error, OverflowError):
        raise ValueError(f"does not fit into {datatype}: {values[0]!r}") from None


def unpack_numbers(datatype: str, raw: bytes) -> list[Any]:
    code = _FORMATS.get(datatype)
    if code is None or len(raw) % struct.calcsize(f"<{code}"):
        raise ClientError(f"the server sent a tensor of type {datatype} that cannot be read")
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(f'<{code}')}{code}", raw))
