"""Attention whose scores are capped (Gemma 2), which OpenVINO's own over pages cannot do.

Its operation still writes new keys and values into their pages. Its result is replaced by that of
plain products, over what the pages had before the pass and what is new in it. The scores are those
of one sequence after the other. Keys and values of all sequences of a pass are read from their
pages at once, in float32, for a layer at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from llmserve.graphs import openvino as ov
from llmserve.plugin import IncompatibleError

_PLACE = ["llmserve", "caps"]
"""Where a model of OpenVINO has the caps of its attention."""
_OPERATION = "PagedAttentionExtension"
_WINDOW_INPUT = 10
_FAR = 1 << 30
_LOWEST = float(np.finfo(np.float32).min)


class Cap(NamedTuple):
    """What a layer does that caps its scores, and its shape."""

    limit: float
    heads: int
    """Those of keys and values."""
    sharing: int
    """How many heads of queries have the same keys."""
    width: int
    value_width: int


def tell_caps(model: Any, caps: Sequence[Cap | None]) -> None:
    """Keep in a model of OpenVINO which of its layers cap their scores."""
    if any(caps):
        model.set_rt_info(json.dumps(caps), _PLACE)


def has_caps(model: Any) -> bool:
    return bool(model.has_rt_info(_PLACE))


def check_cache(model: Any, kind: str) -> None:
    """Refuse a cache in a form that plain operations do not read."""
    if kind == "u8" and has_caps(model):
        raise IncompatibleError(
            "a model that caps its attention scores cannot have its cache in 8 bits",
            hint="build it with --kv-cache auto",
        )


def apply_caps(model: Any, page_size: int) -> None:
    """Cap the scores of those layers that do, in a model whose attention reads pages."""
    if not has_caps(model):
        return
    told = json.loads(model.get_rt_info(_PLACE).astype(str))
    operations = [each for each in model.get_ordered_ops() if each.get_type_name() == _OPERATION]
    for operation, cap in zip(operations, told, strict=True):
        if cap:
            _replace(operation, Cap(*cap), page_size)
    model.validate_nodes_and_infer_types()


def _replace(operation: Any, cap: Cap, page_size: int) -> None:
    """Put another result in the place of an operation's."""
    ops = ov.opset13
    own = operation.output(0)
    readers = own.get_target_inputs()
    query, key, value, key_pages, value_pages, past, begins, pages, page_begins, scale, back = (
        operation.input_value(place) for place in range(_WINDOW_INPUT + 1)
    )
    # What it attends to itself is not used: it need not look far.
    operation.input(_WINDOW_INPUT).replace_source_output(ops.constant(np.int32(1)).output(0))
    capped_scale = ops.divide(scale, ops.constant(np.float32(cap.limit)))
    is_limited = ops.greater(back, ops.constant(np.int32(0)))
    values = {
        "query": ops.multiply(query, capped_scale).output(0),
        "key": key,
        "value": value,
        "past_key": _read(key_pages, pages, cap.heads, page_size, cap.width),
        "past_value": _read(value_pages, pages, cap.heads, page_size, cap.value_width),
        "past": _long(past),
        "begins": _long(begins),
        "page_begins": _long(page_begins),
        "back": _long(ops.select(is_limited, back, ops.constant(np.int32(_FAR)))),
    }
    count = ops.squeeze(ops.shape_of(past, output_type="i64"), _numbers(0))
    loop = ops.loop(count, ops.constant(np.bool_(True)))
    parameters = {
        name: ops.parameter(each.get_partial_shape(), each.get_element_type())
        for name, each in values.items()
    }
    # Each sequence writes its rows over those of the operation: which therefore is computed.
    rows = ops.parameter(own.get_partial_shape(), own.get_element_type())
    place = ops.parameter([1], ov.Type.i64)
    goes_on = ops.constant(np.array([True])).output(0)
    written = _attend(place, rows, parameters, cap).output(0)
    body = ov.Model([goes_on, written], [place, rows, *parameters.values()], "capped")
    loop.set_function(body)
    loop.set_special_body_ports([0, 0])
    for name, each in values.items():
        loop.set_invariant_input(parameters[name], each)
    loop.set_merged_input(rows, own, written)
    result = loop.get_iter_value(written, -1)
    for reader in readers:
        reader.replace_source_output(result)


def _attend(place: Any, rows: Any, given: Mapping[str, Any], cap: Cap) -> Any:
    """Return the rows of all sequences, with those of one in their place."""
    ops = ov.opset13
    begin, end = _pair(given["begins"], place)
    past = ops.gather(given["past"], place, _numbers(0))
    count = ops.subtract(end, begin)
    grouped = _numbers([0, cap.heads, cap.sharing, cap.width])
    query = ops.reshape(_part(given["query"], begin, end), grouped, special_zero=True)
    query = ops.transpose(query, _numbers([1, 2, 0, 3]))
    query = ops.reshape(query, _numbers([cap.heads, -1, cap.width]), special_zero=False)

    def whole(kind: str, width: int) -> Any:
        """Return what pages have of a sequence, and what is new: ``[heads, tokens, width]``."""
        before = _part(given[f"past_{kind}"], *_pair(given["page_begins"], place))
        before = ops.transpose(before, _numbers([1, 0, 2, 3]))
        before = ops.reshape(before, _numbers([cap.heads, -1, width]), special_zero=False)
        before = _part(before, _numbers([0]), past, axis=1)
        new = _part(given[kind], begin, end)
        new = ops.reshape(new, _numbers([0, cap.heads, width]), special_zero=True)
        return ops.concat([before, ops.transpose(new, _numbers([1, 0, 2]))], 1)

    scores = ops.tanh(ops.matmul(query, whole("key", cap.width), False, True))
    scores = ops.multiply(scores, ops.constant(np.float32(cap.limit)))
    # Heads that share keys are one below the other: a mask is for each of them.
    length = ops.add(past, count)
    split = ops.concat([_numbers([cap.heads, cap.sharing]), count, length], 0)
    scores = ops.reshape(scores, split, special_zero=False)
    at = ops.unsqueeze(_range(past, length), _numbers(1))
    back = ops.subtract(at, ops.unsqueeze(_range(_numbers([0]), length), _numbers(0)))
    is_seen = ops.logical_and(ops.greater_equal(back, _numbers(0)), ops.less(back, given["back"]))
    scores = ops.select(is_seen, scores, ops.constant(np.float32(_LOWEST)))
    shares = ops.reshape(
        ops.softmax(scores, -1),
        ops.concat([_numbers([cap.heads, -1]), length], 0),
        special_zero=False,
    )
    found = ops.matmul(shares, whole("value", cap.value_width), False, False)
    split = ops.concat([_numbers([cap.heads, cap.sharing]), count, _numbers([cap.value_width])], 0)
    found = ops.transpose(ops.reshape(found, split, special_zero=False), _numbers([2, 0, 1, 3]))
    found = ops.reshape(
        found, _numbers([-1, cap.heads * cap.sharing * cap.value_width]), special_zero=False
    )
    return ops.scatter_update(rows, _range(begin, end), found, _numbers(0))


def _read(cache: Any, pages: Any, heads: int, page_size: int, width: int) -> Any:
    """Return what is in pages, in float32: ``[pages, heads, page_size, width]``."""
    ops = ov.opset13
    found = ops.convert(ops.gather(cache, pages, _numbers(0)), ov.Type.f32)
    shape = _numbers([-1, heads, page_size, width])
    return ops.reshape(found, shape, special_zero=False).output(0)


def _pair(begins: Any, place: Any) -> tuple[Any, Any]:
    ops = ov.opset13
    following = ops.add(place, _numbers([1]))
    return ops.gather(begins, place, _numbers(0)), ops.gather(begins, following, _numbers(0))


def _part(values: Any, begin: Any, end: Any, *, axis: int = 0) -> Any:
    return ov.opset13.slice(values, begin, end, _numbers([1]), _numbers([axis]))


def _range(begin: Any, end: Any) -> Any:
    ops = ov.opset13
    first, stop = (ops.squeeze(each, _numbers(0)) for each in (begin, end))
    return ops.range(first, stop, _numbers(1), "i64")


def _numbers(values: int | Sequence[int]) -> Any:
    return ov.opset13.constant(np.array(values, np.int64))


def _long(values: Any) -> Any:
    return ov.opset13.convert(values, ov.Type.i64).output(0)
