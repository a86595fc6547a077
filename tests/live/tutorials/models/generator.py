"""The second step of the tutorial on sequences: the logits of all positions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import AutoModelForCausalLM


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = json.loads(args["model_config"])["parameters"]["model"]["string_value"]
        self.model = AutoModelForCausalLM.from_pretrained(folder)

    def execute(self, requests: list[Any]) -> list[Any]:
        responses = []
        for request in requests:
            ids = pb_utils.get_input_tensor_by_name(request, "IDS").as_numpy()
            with torch.inference_mode():
                logits = self.model(torch.tensor(ids)).logits.numpy()
            output = pb_utils.Tensor("LOGITS", logits.astype(np.float32))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
