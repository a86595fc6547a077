"""How options travel.

To a model that llmserve built they go as request parameters. Triton batches only requests
that carry the same optional inputs, and requests with different options must still share a
batch. To any other model they go as the inputs that its config declares, else as parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from llmserve.client.model import ModelInfo, Tensor
from llmserve.client.packing import pack_numbers, pack_texts
from llmserve.errors import OptionError

Value = bool | int | float | str | list[Any]

# TensorRT-LLM has renamed these over its versions.
_SECOND_NAMES = {
    "seed": "random_seed",
    "random_seed": "seed",
    "min_tokens": "min_length",
    "min_length": "min_tokens",
}
QUEUE_TIMEOUT = "queue_timeout"
"""How long a request may wait for its turn, in seconds; not how long its answer may take."""
_DAYS = 1e7
_INT64 = range(-(2**63), 2**63)


def check_options(options: Mapping[str, Any]) -> dict[str, Value]:
    """Drop what is None and refuse what no model could take; ranges are the server's affair."""
    checked: dict[str, Value] = {}
    for name, given in options.items():
        if name == "stream":
            raise OptionError("stream is no option here", mend="call stream() or generate()")
        if name.startswith(("sequence_", "triton_")):
            raise OptionError(f"{name} is set by the client", mend="leave it out")
        if given is not None:
            checked[name] = _check(name, given)
    return checked


def _check(name: str, given: Any) -> Value:
    # What comes out of numpy or torch knows how to become plain Python.
    value = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(value, (list, tuple)):
        if name == "messages":
            return _as_json(name, list(value))
        if all(isinstance(part, (bool, int, float, str)) for part in value):
            return list(value)
    elif isinstance(value, (bool, int, float, str)):
        return value
    raise OptionError(
        f"{name} cannot be a {type(given).__name__}",
        mend="give a number, a text, true or false, or a list of them",
    )


def _as_json(name: str, value: list[Any]) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{name} cannot be written as JSON: {error}") from None


def set_parameters(parameters: Any, options: Mapping[str, Value]) -> None:
    """Put options into a request's parameters."""
    for name, value in options.items():
        slot = parameters[name]
        if isinstance(value, bool):
            slot.bool_param = value
        elif isinstance(value, int) and value in _INT64:
            slot.int64_param = value
        elif isinstance(value, float):
            slot.double_param = value
        else:
            # Triton refuses uint64_param here, so an integer beyond int64 goes as text too.
            slot.string_param = _text(name, value)


def _text(name: str, value: Value) -> str:
    text = _as_json(name, value) if isinstance(value, list) else str(value)
    if "\0" in text:
        # Triton would cut the text there and say nothing.
        raise OptionError(f"{name} cannot hold a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OptionError(f"{name} has a character that UTF-8 cannot carry") from None
    return text


def split_options(
    info: ModelInfo, options: Mapping[str, Value]
) -> tuple[dict[str, Value], list[tuple[Tensor, Value]]]:
    """Say which options go as parameters and which as inputs."""
    parameters: dict[str, Value] = {}
    tensors: list[tuple[Tensor, Value]] = []
    for name, value in options.items():
        if name == QUEUE_TIMEOUT:
            parameters["timeout"] = _patience(info, value)
            continue
        tensor = info.inputs.get(name) or info.inputs.get(_SECOND_NAMES.get(name, name))
        if info.made_by_llmserve or tensor is None:
            parameters[name] = value
        else:
            tensors.append((tensor, value))
    return parameters, tensors


def _patience(info: ModelInfo, value: Value) -> int:
    """Return Triton's own wish for a request's time in the queue, in microseconds."""
    if not info.queue_timeout:
        # Triton would say nothing and let it wait.
        raise OptionError(
            f"{info.name!r} does not take a {QUEUE_TIMEOUT}",
            mend="leave it out, or give its queue a default_timeout_microseconds and "
            "allow_timeout_override in config.pbtxt",
        )
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _DAYS:
        raise OptionError(f"{QUEUE_TIMEOUT} takes seconds above 0, not {value!r}")
    return max(1, round(1_000_000 * value))


def pack_option(
    tensor: Tensor, value: Value, rows: int, *, batched: bool
) -> tuple[list[int], bytes]:
    """Give the shape and the bytes of an option's input; every row gets the same."""
    values = value if isinstance(value, list) else [value]
    dims = _fit(tensor.dims, len(values))
    if prod(dims) != len(values):
        raise OptionError(f"{tensor.name} takes {prod(dims)} values, not {len(values)}")
    values = values * rows if batched else values
    if tensor.datatype == "BYTES":
        raw = pack_texts(part if isinstance(part, str) else json.dumps(part) for part in values)
    else:
        try:
            raw = pack_numbers(tensor.datatype, values)
        except ValueError as error:
            raise OptionError(f"{tensor.name} {error}") from None
    return [rows, *dims] if batched else dims, raw


def _fit(dims: Iterable[int], width: int) -> list[int]:
    """Fill in open dimensions: the last one takes the width, others become 1."""
    fitted = list(dims)
    for at in reversed(range(len(fitted))):
        if fitted[at] < 0:
            fitted[at], width = width, 1
    return fitted
