"""Converts a transformers model to OpenVINO's form.

The model is traced as one function of new tokens and past keys and values. OpenVINO reads the
trace, the past becomes its state, and weights are compressed if requested. Before that, the
converted model is compared with the original.

It runs as a separate program, whose memory is freed when it ends, and because it prints a lot that
is useless as long as it succeeds.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from llmserve.plugin import PROGRAM_DONE
from llmserve_openvino.compare import difference, parts, window
from llmserve_openvino.formats import write
from llmserve_openvino.library import openvino as ov
from llmserve_openvino.stored import StoredWeights, load

MODEL = "openvino_model.xml"
NOT_WRITTEN = 74
"""The exit status of this program if it has converted the model, and cannot write it."""
NO_MEMORY = 71
"""The exit status if the system gives it no more memory, as with a limit."""
_TOLERANCE = 0.02
_READ, _TRACED, _COMPARING = 0.05, 0.15, 0.7
"""The shares of the time after which a model is read, traced (if it is small) and compared."""


class Past(DynamicCache):  # type: ignore[misc]
    """A cache for a single pass, which appends the new keys and values to the past ones."""

    def __init__(self, past: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._past = past
        self.present = list(past)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        del args, kwargs
        first = 2 * layer_idx
        for index, new in ((first, key_states), (first + 1, value_states)):
            self.present[index] = torch.cat([self._past[index], new], dim=2)
        return self.present[first], self.present[first + 1]

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        del args, kwargs
        return self._past[0].shape[2]

    def get_mask_sizes(self, query_length: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        del args, kwargs
        if isinstance(query_length, torch.Tensor) and query_length.ndim:
            query_length = query_length.shape[0]
        return self.get_seq_length() + query_length, 0


class Step(torch.nn.Module):
    """One pass over new tokens, which returns their logits and all keys and values."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        cache = Past(past)
        output = self._model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        return (output.logits, *cache.present)


def convert(model: Any, stored: StoredWeights) -> Any:
    """Return a transformers model as an OpenVINO model, with its past as state.

    Its weights are those of the model, which has to be kept for as long.
    """
    ids = torch.tensor([[1, 2], [3, 4]])
    with torch.inference_mode(), stored.shapes_only():
        layers = model(input_ids=ids, use_cache=True).past_key_values.layers
    shapes = [tensor.shape for layer in layers for tensor in (layer.keys, layer.values)]
    past = [torch.zeros(2, shape[1], 3, shape[3]) for shape in shapes]
    mask, positions = torch.ones(2, 5, dtype=torch.long), torch.tensor([[3, 4], [3, 4]])
    example = (ids, mask, positions, *past)
    with stored.extensions() as extensions:
        converted = ov.convert_model(Step(model), example_input=example, extension=extensions)
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
    return converted


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


def main(source: Path, target: Path, settings: dict[str, Any]) -> None:
    """Write the converted model, and next to it the facts that the build needs."""
    model = load(source, settings)
    stored = StoredWeights(model)
    _tell(_READ)
    differences, done = [], _READ
    for share in parts(model, stored):
        before, done = done, _READ + share * (_COMPARING - _READ)
        part = convert(model, stored)
        differences.append(difference(model, stored, part, _telling(before, done)))
    converted = convert(model, stored)
    if not differences:
        differences.append(difference(model, stored, converted, _telling(_TRACED, _COMPARING)))
    # A number that is none compares as false.
    if not all(each < _TOLERANCE for each in differences):
        raise SystemExit(
            "OpenVINO's answers differ from the model's own: log-probabilities are off by "
            f"{max(differences):.2g}"
        )
    facts = {"window": window(model.config.get_text_config())}
    try:
        write(converted, target / MODEL, settings, _telling(_COMPARING, 1))
    except (OSError, RuntimeError) as error:
        # What OpenVINO raises on a full disk does not say so.
        sys.stderr.write(f"{error}\n")
        sys.exit(NO_MEMORY if getattr(error, "errno", None) == errno.ENOMEM else NOT_WRITTEN)
    (target / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def _telling(first: float, last: float) -> Callable[[float], None]:
    """Return what tells the build how much is done of what takes it from one share to another."""
    return lambda share: _tell(first + share * (last - first))


def _tell(share: float) -> None:
    """Tell the build how much is done. Libraries print here as well."""
    sys.stdout.write(f"\n{PROGRAM_DONE}{share:.3f}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
    except MemoryError as error:
        sys.stderr.write(f"{error or 'out of memory'}\n")
        sys.exit(NO_MEMORY)
