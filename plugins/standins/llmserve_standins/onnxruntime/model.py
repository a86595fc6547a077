"""The stand-in for ``backend: "onnxruntime"``: ONNX graphs with the onnxruntime of PyPI."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from llmserve.runtime import contract
from llmserve_standins.graphs import Graph, ServedGraph


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
        return Graph(
            f"onnxruntime {onnxruntime.__version__}",
            frozenset(tensor.name for tensor in session.get_inputs()),
            lambda feeds, outputs: session.run(list(outputs), dict(feeds)),
        )
