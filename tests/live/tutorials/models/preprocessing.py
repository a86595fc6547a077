"""The first stage of the tutorials on TensorRT-LLM: ids of the prompt and of the words."""

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
            queries = pb_utils.get_input_tensor_by_name(request, "QUERY").as_numpy()
            length = pb_utils.get_input_tensor_by_name(request, "REQUEST_OUTPUT_LEN").as_numpy()
            stops = pb_utils.get_input_tensor_by_name(request, "STOP_WORDS_DICT").as_numpy()
            rows = [self.tokenizer.encode(row[0].decode()).ids for row in queries]
            # The end of a text is the padding of a shorter one.
            ids = np.zeros((len(rows), max(map(len, rows))), np.int32)
            for row, values in zip(ids, rows, strict=True):
                row[: len(values)] = values
            lengths = np.array([[len(row)] for row in rows], np.int32)
            tensors = {"INPUT_ID": ids, "REQUEST_INPUT_LEN": lengths}
            tensors["REQUEST_OUTPUT_LEN"] = length
            tensors["STOP_WORDS_IDS"] = self.words(stops)
            outputs = [pb_utils.Tensor(name, value) for name, value in tensors.items()]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses

    def words(self, rows: Any) -> Any:
        """Return the ids of words, and their ends; no step of the ensemble reads them."""
        ids = [self.tokenizer.encode(row[0].decode()).ids for row in rows]
        most = max(1, *map(len, ids))
        padded = [[*row, *[0] * (most - len(row))] for row in ids]
        ends = [[len(row), *[-1] * (most - 1)] for row in ids]
        return np.array([[a, b] for a, b in zip(padded, ends, strict=True)], np.int32)
