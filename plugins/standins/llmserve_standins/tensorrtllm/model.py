"""What Triton loads for ``backend: "tensorrtllm"`` where there is no TensorRT-LLM."""

from __future__ import annotations

import json
from collections.abc import Mapping

from llmserve_standins.tensorrtllm.backend import StandIn
from llmserve_standins.tensorrtllm.settings import Settings


class TritonPythonModel(StandIn):
    def __init__(self) -> None:
        """Triton calls this first, and ``initialize`` with what there is to know."""

    def initialize(self, args: Mapping[str, str]) -> None:
        import triton_python_backend_utils as pb_utils

        super().__init__(
            Settings.read(args["model_name"], json.loads(args["model_config"])), pb_utils
        )
