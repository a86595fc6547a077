"""ONNX graphs with the onnxruntime of PyPI, on CPU or GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmserve.server.backends.native.engine import Array
from llmserve.server.backends.native.serving import Place, Serving


class Graph:
    """An ONNX session; its values are OrtValues on the session's device."""

    def __init__(self, place: Place) -> None:
        import onnxruntime

        self._library = onnxruntime
        options = onnxruntime.SessionOptions()
        # Threads that spin while they wait keep the other models of the server from running.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        providers: list[Any] = ["CPUExecutionProvider"]
        self._device = ("cpu", 0) if place.device is None else ("cuda", place.device)
        if place.device is not None:
            if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
                raise RuntimeError(
                    "this onnxruntime has no CUDA: pip install onnxruntime-gpu in its place, or "
                    "build the model with --device cpu"
                )
            providers.insert(0, ("CUDAExecutionProvider", {"device_id": place.device}))
        path = place.file("model.onnx")
        self._session = onnxruntime.InferenceSession(path, options, providers=providers)
        self.name = f"onnxruntime {onnxruntime.__version__} ({self._device[0]})"
        self.inputs = frozenset(tensor.name for tensor in self._session.get_inputs())

    def value(self, array: Array) -> Any:
        """Bring an array to the device."""
        array = np.ascontiguousarray(array)
        return self._library.OrtValue.ortvalue_from_numpy(array, *self._device)

    def array(self, value: Any) -> Array:
        """Bring a value back."""
        if self._device[0] == "cpu" and hasattr(value, "__dlpack__"):
            # Without a copy; the array keeps the value's memory.
            return np.from_dlpack(value)
        return value.numpy()  # type: ignore[no-any-return]

    def shape(self, value: Any) -> tuple[int, ...]:
        """Return a value's shape."""
        return tuple(value.shape())

    def row(self, value: Any, index: int) -> Array:
        """Return one row."""
        return self.array(value)[index : index + 1]

    def join(self, rows: Sequence[Any]) -> Any:
        """Make one value of rows."""
        return self.value(np.concatenate(rows))

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
        """Run the graph; nothing leaves the device."""
        binding = self._session.io_binding()
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, value)
        for name in outputs:
            binding.bind_output(name, *self._device)
        self._session.run_with_iobinding(binding)
        return dict(zip(outputs, binding.get_outputs(), strict=True))


class TritonPythonModel:
    """The model as Triton's Python backend knows it."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the graph; Triton calls this once."""
        import triton_python_backend_utils as pb_utils

        place = Place.read(args)
        self._serving = Serving(Graph(place), place, pb_utils)

    def execute(self, requests: Sequence[Any]) -> Sequence[Any]:
        """Answer requests; Triton calls this for every batch."""
        return self._serving.execute(requests)

    def finalize(self) -> None:
        """Let go; Triton calls this once nothing is under way any more."""
        if hasattr(self, "_serving"):
            self._serving.close()
