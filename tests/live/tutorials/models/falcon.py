"""The tutorial that serves Falcon with the pipeline, after its own step of dynamic batching."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import transformers
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        folder = parameters["model"]["string_value"]
        self.length = int(parameters["max_output_length"]["string_value"])
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.pipeline = transformers.pipeline(
            "text-generation", model=folder, tokenizer=self.tokenizer
        )
        self.pipeline.tokenizer.pad_token_id = self.tokenizer.eos_token_id

    def execute(self, requests: list[Any]) -> list[Any]:
        prompts = []
        for request in requests:
            rows = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            prompts += [row[0].decode() for row in rows]
        answers = self.pipeline(
            prompts,
            max_length=self.length,
            max_new_tokens=None,
            pad_token_id=self.tokenizer.eos_token_id,
            batch_size=len(prompts),
        )
        responses, texts = [], []
        for answer in answers:
            texts.append(answer[0]["generated_text"])
            rows = np.array(texts, dtype=object).reshape(1, -1)
            output = pb_utils.Tensor("text_output", rows)
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
