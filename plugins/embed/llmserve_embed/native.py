"""Places a graph in ONNX's form as a model of its own, which Triton's own backend runs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from llmserve.plugin import (
    BuildContext,
    ModelConfig,
    ModelSourceError,
    OptionError,
)
from llmserve_embed.files import brought
from llmserve_embed.inputs import INPUTS

_CUDA = re.compile(r"cuda(:[0-9]{1,4})?")
_TYPES = {
    "tensor(int64)": ("TYPE_INT64", "int64"),
    "tensor(int32)": ("TYPE_INT32", "int32"),
    "tensor(float)": ("TYPE_FP32", "float32"),
    "tensor(float16)": ("TYPE_FP16", "float16"),
}
"""ONNX Runtime's names of types that these graphs have, with Triton's and numpy's."""


def check_device(device: str) -> None:
    if device != "cpu" and not _CUDA.fullmatch(device):
        raise OptionError(f"device cannot be {device!r}", hint="choose cpu, cuda or cuda:N")


def place_graph(context: BuildContext, *, pools: bool) -> dict[str, Any]:
    """Copy the graph's file and configure its model; return what has to be known to call it."""
    name = str(context.options["file"])
    file, beside = brought(context, name, (".onnx",))
    # Libraries refuse weights that are linked from elsewhere, as in the hub's cache.
    context.place([file, *beside], ".", copy=True)
    session = _opened(context, name, context.folder / file.name)
    try:
        described = declare(context.config, session, pools=pools)
    except ValueError as error:
        raise ModelSourceError(
            f"{name} of {context.source.asked} cannot be used: {error}",
            hint="name another file of it with --set file=",
        ) from None
    device = str(context.options["device"])
    _place_on_device(context.config, device)
    context.config.default_model_filename = file.name
    return {"model": context.name, "device": device, **described}


def _opened(context: BuildContext, name: str, file: Path) -> Any:
    # Otherwise onnxruntime sends usage data over the network.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Nothing is computed with it here.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # Its errors have no class in common that is public.
        reason = " ".join(str(error).split())
        raise ModelSourceError(
            f"{name} of {context.source.asked} cannot be read: {reason}",
            hint="download or save it again",
        ) from None


def declare(config: ModelConfig, session: Any, *, pools: bool) -> dict[str, Any]:
    """Declare the graph's inputs and the output that is used; others are left out.

    A graph that is not for this raises a ValueError.
    """
    inputs = {tensor.name: tensor for tensor in session.get_inputs()}
    if unknown := sorted(inputs.keys() - {*INPUTS}):
        raise ValueError(f"it reads {', '.join(unknown)}")
    if missing := sorted({*INPUTS[:2]} - inputs.keys()):
        raise ValueError(f"it does not read {' and '.join(missing)}")
    if fixed := [t.name for t in inputs.values() if _is_fixed(t.shape)]:
        raise ValueError(f"it reads {fixed[0]} of one shape only")
    output = _states(session) if pools else _logits(session)
    # Triton adds the rows of a batch itself.
    rows = [] if config.max_batch_size else [-1]
    for tensor in inputs.values():
        config.input.add(name=tensor.name, data_type=_type(tensor)[0], dims=[*rows, -1])
    sizes = [size if isinstance(size, int) else -1 for size in output.shape[1:]]
    config.output.add(name=output.name, data_type=_type(output)[0], dims=[*rows, *sizes])
    kinds = {tensor.name: _type(tensor)[1] for tensor in inputs.values()}
    return {"inputs": kinds, "output": output.name}


def _is_fixed(shape: Any) -> bool:
    return len(shape) != 2 or any(isinstance(size, int) for size in shape)


def _type(tensor: Any) -> tuple[Any, str]:
    if tensor.type not in _TYPES:
        raise ValueError(f"{tensor.name} is of the type {tensor.type}")
    name, kind = _TYPES[tensor.type]
    return pb.DataType.Value(name), kind


def _of_rank(session: Any, rank: int) -> list[Any]:
    return [tensor for tensor in session.get_outputs() if len(tensor.shape) == rank]


def _states(session: Any) -> Any:
    if not (found := _of_rank(session, 3)):
        raise ValueError("it has no output of vectors of tokens")
    return found[0]


def _logits(session: Any) -> Any:
    found = _of_rank(session, 2)
    named = [tensor for tensor in found if tensor.name == "logits"]
    # What gives vectors of tokens has no head: the other output is a pooled vector of the text.
    if not named and (not found or _of_rank(session, 3)):
        raise ValueError("it has no output of logits")
    return (named or found)[0]


def _place_on_device(config: ModelConfig, device: str) -> None:
    group = config.instance_group.add(count=1)
    if device == "cpu":
        group.kind = pb.ModelInstanceGroup.KIND_CPU
    else:
        group.kind = pb.ModelInstanceGroup.KIND_GPU
        group.gpus.append(int(device[5:] or 0))
