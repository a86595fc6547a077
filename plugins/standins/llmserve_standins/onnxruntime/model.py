"""The stand-in for ``backend: "onnxruntime"``: ONNX graphs with the onnxruntime of PyPI."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.runtime import contract
from llmserve_standins.graphs import Graph, ServedGraph, check_input_count

_TYPES = {
    "TYPE_BOOL": "bool",
    "TYPE_FP16": "float16",
    "TYPE_FP32": "float",
    "TYPE_FP64": "double",
    "TYPE_STRING": "string",
    **{
        f"TYPE_{sign}INT{bits}": f"{sign.lower()}int{bits}"
        for sign in ("", "U")
        for bits in (8, 16, 32, 64)
    },
}
"""ONNX Runtime's names of Triton's types."""


class TritonPythonModel(ServedGraph):
    default_file = "model.onnx"

    def load(self, file: Path) -> Graph:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ.get(contract.THREADS, 0))
        # Threads that spin while waiting take CPU time from the server's other models.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        providers: list[Any] = ["CPUExecutionProvider"]
        if self.device is not None:
            if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
                raise RuntimeError(
                    "this onnxruntime has no CUDA support: install onnxruntime-gpu instead, or "
                    "build the model with --device cpu"
                )
            providers.insert(0, ("CUDAExecutionProvider", {"device_id": self.device}))
        session = onnxruntime.InferenceSession(file, options, providers=providers)
        check_tensors(self.config, session)
        return Graph(
            f"onnxruntime {onnxruntime.__version__}",
            frozenset(tensor.name for tensor in session.get_inputs()),
            lambda feeds, outputs: session.run(list(outputs), dict(feeds)),
        )


def check_tensors(config: Mapping[str, Any], session: Any) -> None:
    """Refuse a configuration whose tensors are not the graph's, as Triton's backend does."""
    check_input_count(config, len(session.get_inputs()))
    for kind, tensors, exact in (
        ("input", session.get_inputs(), False),
        ("output", session.get_outputs(), True),
    ):
        by_name = {tensor.name: tensor for tensor in tensors}
        for declared in config[kind]:
            name, data_type = declared["name"], declared["data_type"]
            if name not in by_name:
                raise RuntimeError(f"the graph has no {kind} {name}, only {', '.join(by_name)}")
            found = by_name[name]
            if found.type != f"tensor({_TYPES.get(data_type)})":
                raise RuntimeError(
                    f"the configuration declares the {kind} {name} as {data_type}, and the graph "
                    f"has {found.type}: declare what it has"
                )
            rows = [-1] if int(config["max_batch_size"]) else []
            shape = (declared.get("reshape") or {}).get("shape") or declared["dims"]
            sizes = [*rows, *map(int, shape)]
            has = [size if isinstance(size, int) else -1 for size in found.shape]
            if (rows and has[:1] != rows) or not _fit(sizes, has, exact=exact):
                raise RuntimeError(
                    f"the configuration declares the {kind} {name} with the shape {sizes}, and "
                    f"the graph has {has}"
                )


def _fit(declared: Sequence[int], found: Sequence[int], *, exact: bool) -> bool:
    """Compare shapes; an open size of the graph allows any for an input, but not for an output."""
    if not found:  # A single number has no shape, and is declared with one value.
        return all(size == 1 for size in declared)
    return len(declared) == len(found) and all(
        size == other or (not exact and other == -1)
        for size, other in zip(declared, found, strict=True)
    )
