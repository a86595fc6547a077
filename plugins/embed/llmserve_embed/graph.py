"""A graph in ONNX's form that Triton's own backend runs, called for each pass, and its pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.runtime import error_of_model
from llmserve_embed.engine import Packed
from llmserve_embed.inputs import INPUTS
from llmserve_embed.packing import GPU_PASS_COST

Array = npt.NDArray[Any]


class GraphValues(Packed):
    """Asks another model of the same server; the runtime of the generators ``encoder-onnx`` and
    ``classifier-onnx``."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        del folder
        super().__init__(settings, GraphNetwork(settings))


class GraphNetwork:
    """Runs a pass in the graph's model; without a ``pooling`` its output are the values."""

    streams = 1

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.padding: int = settings["padding"]
        graph = settings["graph"]
        self._model: str = graph["model"]
        self._types = {name: np.dtype(kind) for name, kind in graph["inputs"].items()}
        self._output: str = graph["output"]
        # A pass is a request to another model.
        self.pass_cost = 64 if graph["device"] == "cpu" else GPU_PASS_COST
        pooling = settings.get("pooling")
        self._pool = None if pooling is None else POOLINGS[pooling]

    def __call__(self, ids: Array, mask: Array, segments: Array) -> npt.NDArray[np.float32]:
        # Only processes of Triton have this module.
        import triton_python_backend_utils as pb

        named = zip(INPUTS, (ids, mask, segments), strict=True)
        request = pb.InferenceRequest(
            model_name=self._model,
            requested_output_names=[self._output],
            inputs=[
                pb.Tensor(name, rows.astype(self._types[name], copy=False))
                for name, rows in named
                if name in self._types
            ],
            preferred_memory=pb.PreferredMemory(pb.TRITONSERVER_MEMORY_CPU),
        )
        response = request.exec()
        if response.has_error():
            raise error_of_model(response.error().message())
        found = pb.get_output_tensor_by_name(response, self._output).as_numpy()
        values: npt.NDArray[np.float32] = found.astype(np.float32, copy=False)
        return values if self._pool is None else self._pool(values, mask)


def _mean(states: Array, mask: Array) -> Array:
    total: Array = np.einsum("rt,rtn->rn", mask.astype(states.dtype), states)
    mean: Array = total / mask.sum(1, dtype=states.dtype)[:, None]
    return mean


def _first(states: Array, mask: Array) -> Array:
    del mask
    return states[:, 0]


def _last(states: Array, mask: Array) -> Array:
    row: Array = states[np.arange(len(states)), mask.sum(1) - 1]
    return row


def _largest(states: Array, mask: Array) -> Array:
    largest: Array = np.where(mask[:, :, None] == 0, -np.inf, states).max(1)
    return largest.astype(states.dtype, copy=False)


POOLINGS: Mapping[str, Callable[[Array, Array], Array]] = {
    "mean": _mean,
    "cls": _first,
    "last": _last,
    "max": _largest,
}
