"""The first step of the tutorial on sequences: reads the whole text again for each token."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.folder = json.loads(args["model_config"])["parameters"]["model"]["string_value"]

    def execute(self, requests: list[Any]) -> list[Any]:
        from tokenizers import Tokenizer

        # It is made anew for each batch.
        tokenizer = Tokenizer.from_file(f"{self.folder}/tokenizer.json")
        responses = []
        for request in requests:
            rows = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            ids = [tokenizer.encode(row[0].decode()).ids for row in rows]
            output = pb_utils.Tensor("IDS", np.array(ids, dtype=np.int64))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
