"""Converts a transformers model to OpenVINO's form.

The model is traced as one function of new tokens and past keys and values. OpenVINO reads the
trace, the past becomes its state, and weights are compressed if requested. Before that, the
converted model is compared with the original: OpenVINO silently leaves out what it does not
understand, such as an unusual mask.

It runs as a separate program, because it takes several times the model's memory, which is freed
when it ends, and because it prints a lot that is useless as long as it succeeds.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from llmserve.runtime import Chunk
from llmserve_openvino.library import openvino as ov
from llmserve_openvino.runner import PAGE_SIZE, OpenVinoRunner

MODEL = "openvino_model.xml"
NOT_WRITTEN = 74
"""The exit status of this program if it has converted the model, and cannot write it."""
_TOLERANCE = 0.02
# How far below the likeliest token the compared ones are at most.
_RANGE = 12


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


def convert(model: Any) -> Any:
    """Return a transformers model as an OpenVINO model, with its past as state."""
    ids = torch.tensor([[1, 2], [3, 4]])
    with torch.inference_mode():
        layers = model(input_ids=ids, use_cache=True).past_key_values.layers
    shapes = [tensor.shape for layer in layers for tensor in (layer.keys, layer.values)]
    past = [torch.zeros(2, shape[1], 3, shape[3]) for shape in shapes]
    mask, positions = torch.ones(2, 5, dtype=torch.long), torch.tensor([[3, 4], [3, 4]])
    example = (ids, mask, positions, *past)
    with torch.no_grad():
        traced = torch.jit.trace(  # type: ignore[no-untyped-call]
            Step(model), example, check_trace=False
        )
    converted = ov.convert_model(traced, example_input=example)
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


def compress(model: Any, settings: dict[str, Any]) -> Any:
    """Return the model with int8 or int4 weights."""
    import nncf

    if settings["weight_format"] == "int8":
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    return nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode.INT4_ASYM,
        group_size=settings["int4_group"],
        ratio=settings["int4_ratio"],
        advanced_parameters=nncf.AdvancedCompressionParameters(
            group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST
        ),
    )


def store_in_16_bits(model: Any) -> None:
    """Store those weights in bfloat16 or float16 that either holds exactly."""
    ops = ov.opset13
    for node in model.get_ops():
        if node.get_type_name() != "Constant" or node.get_element_type() != ov.Type.f32:
            continue
        values = node.get_data()
        kind = _exact_type(values) if values.ndim > 1 else None
        if kind is not None:
            consumers = node.output(0).get_target_inputs()
            stored = ops.convert(ops.constant(values, dtype=kind), "f32")
            for consumer in consumers:
                consumer.replace_source_output(stored.output(0))
    model.validate_nodes_and_infer_types()


def _exact_type(values: Any) -> Any:
    """Return a type of 16 bits that holds all values, None if there is none."""
    if not (values.view(np.uint32) & 0xFFFF).any():
        return ov.Type.bf16
    # A weight beyond the range of float16 becomes infinite, which is not equal.
    with np.errstate(over="ignore"):
        return ov.Type.f16 if np.array_equal(values.astype(np.float16), values) else None


def check(model: Any, converted: Any) -> float:
    """Return by how much log-probabilities of the converted model differ from the model's own."""
    precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    runner = OpenVinoRunner(converted.clone(), precision, cache_tokens=6 * PAGE_SIZE)
    text_config = model.config.get_text_config()
    limit = min(window(text_config) or 96, text_config.max_position_embeddings or 96, 96)
    rng, worst = np.random.default_rng(0), 0.0
    for length in (13, limit // 3 + 12, limit):
        ids = rng.integers(text_config.vocab_size, size=min(length, limit)).tolist()
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
        found = torch.tensor(_scores(runner, ids)).log_softmax(-1)
        # Of the likeliest tokens: a product's last digits are large where a score is far below.
        likely = expected >= expected.max(dim=-1, keepdim=True).values - _RANGE
        worst = max(worst, float((found - expected)[likely].abs().max()))
    return worst


def _scores(runner: OpenVinoRunner, ids: list[int]) -> Any:
    """Compute ids in two pieces of a prompt and single tokens, in pages that are not in order."""
    pages = [4, 1, 3, 0][: -(-len(ids) // PAGE_SIZE)]
    singles = range(len(ids) - 6, len(ids))
    starts = [0, singles[0] // 2, *singles, len(ids)]
    rows: list[Any] = []
    for start, stop in itertools.pairwise(starts):
        logits = runner.run([Chunk(ids[start:stop], start, pages, stop - start)])
        rows += [logits.row(row).copy() for row in range(stop - start)]
    return np.stack(rows)


def window(config: Any) -> int | None:
    """Return how far back a model with limited attention looks, None for other models."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types and not {"sliding_attention", "chunked_attention"} & {*layer_types}:
        return None
    size = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    return size if isinstance(size, int) else None


def main(source: str, target: Path, settings: dict[str, Any]) -> None:
    """Write the converted model, and next to it the facts that the build needs."""
    model = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=torch.float32,
        attn_implementation="sdpa",
        use_safetensors=None if settings["pickle"] else True,
        trust_remote_code=settings["trust_remote_code"],
        local_files_only=True,
    ).eval()
    if settings["weight_format"] == "bf16":
        for weights in model.parameters():
            weights.data = weights.data.bfloat16().float()
    converted = convert(model)
    difference = check(model, converted)
    if not difference < _TOLERANCE:
        raise SystemExit(
            "OpenVINO's answers differ from the model's own: log-probabilities are off by "
            f"{difference:.2g}"
        )
    target.mkdir(parents=True, exist_ok=True)
    facts = {"window": window(model.config.get_text_config())}
    del model
    if settings["weight_format"] in ("int8", "int4"):
        converted = compress(converted, settings)
    elif settings["weight_format"] in ("auto", "bf16"):
        # With bf16, they have been rounded to it.
        store_in_16_bits(converted)
    fp16 = settings["weight_format"] == "fp16"
    try:
        ov.save_model(converted, str(target / MODEL), compress_to_fp16=fp16)
    except RuntimeError as error:
        # What it raises on a full disk does not say so.
        sys.stderr.write(f"{error}\n")
        sys.exit(NOT_WRITTEN)
    (target / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
