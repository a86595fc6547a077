"""The last stage of the tutorials on TensorRT-LLM: the text of all ids, padding included."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = json.loads(args["model_config"])["parameters"]["model"]["string_value"]
        self.tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")

    def execute(self, requests: list[Any]) -> list[Any]:
        responses = []
        for request in requests:
            beams = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
            texts = [
                self.tokenizer.decode(ids.tolist(), skip_special_tokens=False).encode()
                for row in beams
                for ids in row
            ]
            output = pb_utils.Tensor("OUTPUT", np.array(texts, dtype=object).reshape(-1, 1))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
