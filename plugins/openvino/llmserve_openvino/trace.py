"""Traces a transformers model as one function of new tokens and past keys and values.

OpenVINO reads the trace, and the past becomes its state.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from llmserve.graphs import StoredWeights
from llmserve.graphs import openvino as ov
from llmserve.plugin import UnservedError
from llmserve_openvino.attention import Attention, Past, replaced
from llmserve_openvino.capped_attention import tell_caps
from llmserve_openvino.compare import window
from llmserve_openvino.embedded_rows import tell_rows
from llmserve_openvino.own_attention import OwnAttention, tell
from llmserve_openvino.recurrent_layers import STATE, Recurrence, keeps_states, state_extensions
from llmserve_openvino.seen_inputs import SeenInput, deepened, row_table, seen_inputs, shifted
from llmserve_openvino.state_tables import ROWS, TABLE
from llmserve_openvino.workarounds import forget_traces

_LONGEST = 1024
"""How many tokens the text has at most in which a model's own attention is measured."""
_CACHES = ("cache", "past_key_values", "cache_params")
"""What models call their cache: all of transformers "cache", since 5.24."""
_CACHELESS = "has no cache of keys and values that another could take the place of"
_SORTING = "ParallelExperts"
"""How the names of experts end that get the tokens of each in a row; a trace would have the lengths
of its example."""
_ROWS = ([0, 2, 4], [0, 1, 0, 2], [0, 2, 4], [0, 0], [9, 9])
"""Which states are whose in the example of a trace."""


class Step(torch.nn.Module):
    """One pass over new tokens, which returns their logits and all keys and values.

    First come those that ``seen`` names; after the past keys and values come the tables of states,
    and which rows of them are whose.
    """

    def __init__(self, model: Any, cache: Past, seen: Sequence[SeenInput] = ()) -> None:
        super().__init__()
        self._model = model
        self._seen = [each.name for each in seen]
        self._own = None if cache.own is None else cache.own.layers
        self._past, self._tables = len(cache.present), len(cache.recurrence.shapes)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor,
        *others: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        own = None if self._own is None else OwnAttention(attention_mask, self._own)
        given = dict(zip(self._seen, others, strict=False))
        others = others[len(given) :]
        past, states = others[: self._past], others[self._past :]
        recurrence = Recurrence(states[: self._tables], states[self._tables :])
        cache = Past(past, own, recurrence)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if takes(self._model, "position_ids"):
            inputs["position_ids"] = shifted(position_ids, given)
        with deepened(self._model, given):
            return (_pass(self._model, cache, **inputs).logits, *cache.present)


def _pass(model: Any, cache: Past, **inputs: torch.Tensor) -> Any:
    """Compute a pass, with attention and recurrent layers as a trace has them."""
    Attention(cache)
    name = next(name for name in _CACHES if _is_named(model, name))
    with cache.own or nullcontext(), cache.recurrence.replacing(model):
        return model(**inputs, **{name: cache}, use_cache=True)


def takes(model: Any, name: str) -> bool:
    """Whether a model has an argument, or takes any."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _is_named(model: Any, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def convert(model: Any, stored: StoredWeights) -> Any:
    """Return a transformers model as an OpenVINO model, with its past as state.

    Its weights are those of the model, which has to be kept for as long. A part that OpenVINO
    cannot compute raises an :class:`UnservedError`.
    """
    try:
        with replaced(model):
            return _convert(model, stored)
    except (UnservedError, MemoryError):
        raise
    except Exception as error:
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        if isinstance(first, UnservedError):
            raise first from None
        if keeps_states(model.config.get_text_config()):
            raise UnservedError(STATE) from error
        line = next((each for each in str(first).splitlines() if each.strip()), "")
        # What follows the first sentence is advice for who wrote the model.
        sentence = line.strip().partition(". ")[0]
        reason = f"{type(first).__name__}: {sentence}"[:200]
        part = _part_with(first)
        raise UnservedError(f"has a part that OpenVINO cannot read: {part} ({reason})") from error


def _part_with(error: BaseException) -> str:
    """Return the name of the innermost of a model's modules that an error came from."""
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [found for each in frames if isinstance(found := each.get("self"), torch.nn.Module)]
    names = [type(module).__name__ for module in modules if not isinstance(module, Step)]
    return names[-1] if names else "its cache"


def _convert(model: Any, stored: StoredWeights) -> Any:
    kinds = {type(module).__name__ for module in model.modules()}
    if sorting := next((kind for kind in sorted(kinds) if kind.endswith(_SORTING)), None):
        raise UnservedError(f"sorts tokens by their experts, which no trace has ({sorting})")
    ids = torch.tensor([[1, 2], [3, 4]])
    with torch.inference_mode(), stored.shapes_only(model):
        cache = _shapes(model, ids)
    shapes = [tensor.shape for tensor in cache.present]
    past = [torch.zeros(2, shape[1], 3, shape[3]) for shape in shapes]
    mask, positions = torch.ones(2, 5, dtype=torch.long), torch.tensor([[3, 4], [3, 4]])
    tables = [torch.zeros(3, *shape) for shape in cache.recurrence.shapes]
    rows = [torch.tensor(each, dtype=torch.int32) for each in _ROWS] if tables else []
    seen = seen_inputs(model.config)
    try:
        converted = stored.traced(
            Step(model, cache, seen),
            (ids, mask, positions, *(each.example for each in seen), *past, *tables, *rows),
            state_extensions(),
        )
    finally:
        forget_traces()
    stored.put_packed(converted)
    names = ["input_ids", "attention_mask", "position_ids", *(each.name for each in seen)]
    state_names = [f"{TABLE}{number}" for number in range(len(tables))] + [*ROWS[: len(rows)]]
    suffixes = [f"{index // 2}.{'value' if index % 2 else 'key'}" for index in range(len(past))]
    states = {f"past_key_values.{suffix}": f"present.{suffix}" for suffix in suffixes}
    for port, name in zip(converted.inputs, [*names, *states, *state_names], strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_friendly_name(name)
    for port, name in zip(converted.outputs, ["logits", *states.values()], strict=True):
        port.get_tensor().set_names({name})
    for port in converted.inputs[:3]:
        port.get_node().set_partial_shape(ov.PartialShape([-1, -1]))
    wide = [[*each.shape] for each in seen]
    wide += [[-1, shape[1], -1, shape[3]] for shape in shapes]
    wide += [[-1, *shape] for shape in cache.recurrence.shapes] + [[-1] for _ in rows]
    for port, axes in zip(converted.inputs[3:], wide, strict=True):
        port.get_node().set_partial_shape(ov.PartialShape(axes))
    _reorder_past(converted, list(states))
    manager = ov.passes.Manager()
    manager.register_pass(ov.passes.MakeStateful(states))
    manager.run_passes(converted)
    _begin_empty(converted)
    converted.validate_nodes_and_infer_types()
    if cache.own is not None:
        tell(converted, cache.own.layers)
    tell_caps(converted, cache.caps)
    tell_rows(converted, row_table(model))
    return converted


def _shapes(model: Any, ids: torch.Tensor) -> Past:
    """Return the cache after a pass over the beginning of a text."""
    if not any(_is_named(model, name) for name in _CACHES):
        raise UnservedError(STATE if _is_named(model, "state") else _CACHELESS)
    # Where a model attends itself, the text is longer than it looks back.
    back = window(model.config.get_text_config()) or 0
    length = 4 + min(back, _LONGEST)
    for is_own in (False, True):
        own = OwnAttention(torch.ones(2, length), window=back) if is_own else None
        cache = Past(own=own)
        text = ids if own is None else ids.repeat(1, -(-length // 2))[:, :length]
        _pass(model, cache, input_ids=text)
        if cache.present or cache.recurrence.shapes:
            return cache
    raise UnservedError(_CACHELESS)


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
