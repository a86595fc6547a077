"""Stand-ins: Python versions of the NVIDIA backends that the embedded server lacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmserve.plugin import Backend, hookimpl

_SUMMARIES = {
    "onnxruntime": "ONNX graphs with the onnxruntime of PyPI",
    "pytorch": "TorchScript with the torch of PyPI",
    "tensorrtllm": "TensorRT-LLM's tensors answered with PyTorch",
}


@hookimpl
def llmserve_register_backends() -> Sequence[Backend]:
    here = Path(__file__)
    return [
        Backend(name=name, summary=summary, folder=here.with_name(name), stand_in_for=name)
        for name, summary in _SUMMARIES.items()
    ]
