"""Traces a transformers model as one function of new tokens and past keys and values.

OpenVINO reads the trace, and the past becomes its state.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from llmserve.graphs import StoredWeights
from llmserve.graphs import openvino as ov
from llmserve.plugin import UnservedError
from llmserve_openvino.attention import STATE, Attention, Past, replaced
from llmserve_openvino.compare import window
from llmserve_openvino.own_attention import Layer, OwnAttention, tell

_LONGEST = 1024
"""How many tokens the text has at most in which a model's own attention is measured."""


class Step(torch.nn.Module):
    """One pass over new tokens, which returns their logits and all keys and values."""

    def __init__(self, model: Any, own: Sequence[Layer] | None) -> None:
        super().__init__()
        self._model, self._own = model, own

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        own = None if self._own is None else OwnAttention(attention_mask, self._own)
        cache = Past(past, own)
        Attention(cache)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if takes(self._model, "position_ids"):
            inputs["position_ids"] = position_ids
        with own or nullcontext():
            output = self._model(**inputs, past_key_values=cache, use_cache=True)
        return (output.logits, *cache.present)


def takes(model: Any, name: str) -> bool:
    """Whether a model has an argument, or takes any."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def convert(model: Any, stored: StoredWeights) -> Any:
    """Return a transformers model as an OpenVINO model, with its past as state.

    Its weights are those of the model, which has to be kept for as long.
    """
    with replaced(model):
        return _convert(model, stored)


def _convert(model: Any, stored: StoredWeights) -> Any:
    ids = torch.tensor([[1, 2], [3, 4]])
    with torch.inference_mode(), stored.shapes_only(model):
        cache = _shapes(model, ids)
    shapes = [tensor.shape for tensor in cache.present]
    past = [torch.zeros(2, shape[1], 3, shape[3]) for shape in shapes]
    mask, positions = torch.ones(2, 5, dtype=torch.long), torch.tensor([[3, 4], [3, 4]])
    example = (ids, mask, positions, *past)
    with stored.extensions() as extensions:
        converted = ov.convert_model(
            Step(model, None if cache.own is None else cache.own.layers),
            example_input=example,
            extension=extensions,
        )
    stored.put_packed(converted)
    names = ["input_ids", "attention_mask", "position_ids"]
    suffixes = [f"{index // 2}.{'value' if index % 2 else 'key'}" for index in range(len(past))]
    states = {f"past_key_values.{suffix}": f"present.{suffix}" for suffix in suffixes}
    for port, name in zip(converted.inputs, [*names, *states], strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
    for port, name in zip(converted.outputs, ["logits", *states.values()], strict=True):
        port.get_tensor().set_names({name})
    for port in converted.inputs[:3]:
        port.get_node().set_partial_shape(ov.PartialShape([-1, -1]))
    for port, shape in zip(converted.inputs[3:], shapes, strict=True):
        port.get_node().set_partial_shape(ov.PartialShape([-1, shape[1], -1, shape[3]]))
    _reorder_past(converted, list(states))
    manager = ov.passes.Manager()
    manager.register_pass(ov.passes.MakeStateful(states))
    manager.run_passes(converted)
    _begin_empty(converted)
    converted.validate_nodes_and_infer_types()
    if cache.own is not None:
        tell(converted, cache.own.layers)
    return converted


def _shapes(model: Any, ids: torch.Tensor) -> Past:
    """Return the cache after a pass over the beginning of a text."""
    # Where a model attends itself, the text is longer than it looks back.
    back = window(model.config.get_text_config()) or 0
    length = 4 + min(back, _LONGEST)
    for is_own in (False, True):
        own = OwnAttention(torch.ones(2, length), window=back) if is_own else None
        cache = Past(own=own)
        Attention(cache)
        text = ids if own is None else ids.repeat(1, -(-length // 2))[:, :length]
        try:
            with own or nullcontext():
                model(input_ids=text, past_key_values=cache, use_cache=True)
        except TypeError:
            # It has no argument for such a cache.
            break
        if cache.present:
            return cache
    raise UnservedError(STATE)


def _reorder_past(model: Any, names: Sequence[str]) -> None:
    """Add the input that selects which row's past each row continues, as OpenVINO expects it."""
    ops = ov.opset13
    rows = ops.parameter([-1], ov.Type.i32, name="beam_idx")
    rows.output(0).get_tensor().set_names({"beam_idx"})
    model.add_parameters([rows])
    for name in names:
        past = model.input(name).get_node()
        consumers = past.output(0).get_target_inputs()
        selected = ops.gather(past, rows, ops.constant(np.int64(0)))
        for consumer in consumers:
            consumer.replace_source_output(selected.output(0))
    model.validate_nodes_and_infer_types()


def _begin_empty(model: Any) -> None:
    """Make each state begin without tokens, with one row for each prompt."""
    ops = ov.opset13
    shape = ops.shape_of(model.input("input_ids").get_node(), output_type="i64")
    rows = ops.gather(shape, ops.constant(np.array([0])), ops.constant(np.int64(0)))
    for state in model.get_ops():
        if state.get_type_name() == "ReadValue":
            _, heads, _, width = state.get_output_partial_shape(0)
            rest = ops.constant(np.array([heads.get_length(), 0, width.get_length()]))
            empty = ops.broadcast(ops.constant(np.float32(0)), ops.concat([rows, rest], 0))
            state.set_arguments([empty])
