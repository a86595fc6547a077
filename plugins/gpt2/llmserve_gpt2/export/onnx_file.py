"""Exports the graph to ONNX with torch, and runs it with ONNX Runtime for the check."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from llmserve_gpt2.export import names
from llmserve_gpt2.export.check import Arrays, Runner
from llmserve_gpt2.export.model import Shape, example

FILE = "model.onnx"
# ONNX Runtime supported these when Triton 23.10 was new, and the graphs need nothing newer.
_OPSET, _IR = 18, 8
# Larger weights than this are saved in a separate file, one after the other: a protobuf is in
# memory as a whole, and limited to 2 GiB.
_MAX_EMBEDDED_WEIGHTS = 1 << 26


def write(step: torch.nn.Module, shape: Shape, folder: Path) -> Runner:
    """Export a step, and return what runs the file; the same model gives the same bytes."""
    dynamic = torch.export.Dim.DYNAMIC
    states = names.states(shape.layers)
    program = torch.onnx.export(
        step,
        example(shape),
        dynamo=True,
        verbose=False,
        opset_version=_OPSET,
        input_names=[*names.INPUTS, *(past for past, _ in states)],
        output_names=[names.LOGITS, *(present for _, present in states)],
        dynamic_shapes=(
            *({0: dynamic, 1: dynamic} for _ in names.INPUTS),
            tuple({0: dynamic, 2: dynamic} for _ in states),
        ),
    )
    if program is None:
        raise ValueError("torch exported nothing")
    _remove_metadata(program.model)
    program.model.ir_version = _IR
    program.save(str(folder / FILE), external_data=shape.weights * 4 > _MAX_EMBEDDED_WEIGHTS)
    return _load(folder)


def _load(folder: Path) -> Runner:
    # Otherwise onnxruntime sends usage data over the network.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Weights stay mapped. The backend copies them into forms that are faster to compute with.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # It would take twice what is asked for.
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.disable_prepacking", "1")
    session = onnxruntime.InferenceSession(
        folder / FILE, options, providers=["CPUExecutionProvider"]
    )

    def run(feeds: Arrays) -> Arrays:
        outputs = [output.name for output in session.get_outputs()]
        return dict(zip(outputs, session.run(outputs, dict(feeds)), strict=True))

    return run


def _remove_metadata(model: Any) -> None:
    """Remove information about this machine: each node contains the source lines it came from."""
    model.doc_string = None
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for function in model.functions.values():
        function.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.doc_string = None
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
